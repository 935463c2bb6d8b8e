"""PPO's compiled gradient beside the eager one, and what becomes of it where there is no compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.actor_critic_kit import BOX, DISCRETE, OBS, SPACES, make_batch, ppo_config
from torch import Tensor

from rayvec.learners.compiling import Compiled
from rayvec.learners.ppo import PPOLearner
from rayvec.policies.policy import Policy

UNEQUAL = spaces.MultiDiscrete([3, 5])


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs what would be compiled as it is."""
    monkeypatch.setattr("rayvec.learners.compiled_step.Compiled", lambda function, **options: function)


def learn_both_ways(action_space: spaces.Space[Any], gaps: bool) -> tuple[Any, Any]:
    """Two updates, eager and then compiled; with gaps in the batches, minibatches differ in size."""
    results = []
    for compiled in (False, True):
        learner = PPOLearner(OBS, action_space, ppo_config(compile=compiled))
        policy = Policy(learner.module)
        metrics = [learner.update(make_batch(policy, seed, invalid=gaps)) for seed in range(2)]
        results.append((learner.weights(), metrics))
    return results[0], results[1]


@pytest.mark.parametrize(
    ("action_space", "gaps"),
    [(DISCRETE, False), *(pytest.param(space, True, marks=pytest.mark.slow) for space in (DISCRETE, BOX, UNEQUAL))],
    ids=["discrete", "discrete with gaps", "box with gaps", "unequal choices with gaps"],
)
def test_compiled_updates_equal_eager_ones(action_space: spaces.Space[Any], gaps: bool) -> None:
    (weights, metrics), (others, other_metrics) = learn_both_ways(action_space, gaps)
    np.testing.assert_allclose(others, weights, atol=2e-5)
    for ours, theirs in zip(other_metrics, metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    "action_space",
    [
        pytest.param(DISCRETE, marks=pytest.mark.slow),
        BOX,
        UNEQUAL,
        pytest.param(spaces.MultiDiscrete([2, 2]), marks=pytest.mark.slow),
        pytest.param(spaces.MultiBinary(3), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_space_is_one_graph(
    action_space: spaces.Space[Any], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Traced whole, but not translated to C++, which takes half a minute."""
    compile_ = torch.compile
    monkeypatch.setattr(
        "torch.compile", lambda function, *, options, **rest: compile_(function, backend="eager", **rest)
    )
    (weights, _), (others, _) = learn_both_ways(action_space, gaps=False)
    np.testing.assert_allclose(others, weights, atol=2e-5)
    assert not [warning for warning in recwarn if "uncompiled" in str(warning.message)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "captured"])
@SPACES
def test_cuda_equals_cpu(action_space: spaces.Space[Any], compiled: bool) -> None:
    cpu = PPOLearner(OBS, action_space, ppo_config())
    gpu = PPOLearner(OBS, action_space, ppo_config(learner_device="cuda", compile=compiled))
    policy = Policy(cpu.module)
    for seed in range(3):
        batch = make_batch(policy, seed, invalid=True)
        expected = cpu.update(batch)
        assert gpu.update(batch) == pytest.approx(expected, rel=1e-3, abs=1e-4)
    np.testing.assert_allclose(gpu.weights(), cpu.weights(), atol=1e-3)


def test_without_a_compiler_updates_are_eager_and_say_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> Any:
        def call(*args: object) -> None:
            raise RuntimeError("no compiler here.\n\nSet TORCHDYNAMO_VERBOSE=1 for the internal stack trace")

        return call

    monkeypatch.setattr("torch.compile", refuse)
    with pytest.warns(RuntimeWarning, match=r"run uncompiled.*no compiler here\. To do without, pass") as warned:
        (weights, _), (others, _) = learn_both_ways(DISCRETE, gaps=True)
    assert len(warned) == 1
    np.testing.assert_allclose(others, weights, atol=2e-5)


def begin(learner: PPOLearner, index: Tensor, count: int) -> tuple[Any, tuple[Tensor, ...]]:
    """Returns the compiled step of a learner, and what it reads of some samples of a batch."""
    samples = learner._samples(make_batch(Policy(learner.module)))
    assert learner._compiled is not None
    learner._compiled.begin(tuple(samples))
    return learner._compiled, (torch.full((len(index),), 1 / count), index, samples.advantage[index])


def test_a_rank_without_rows_has_no_compiled_gradient(uncompiled: None) -> None:
    learner = PPOLearner(OBS, DISCRETE, ppo_config(compile=True))
    compiled, rows = begin(learner, torch.zeros(0, dtype=torch.int64), 16)
    assert not any(each.any() for each in compiled.gradient(*rows))
    compiled, rows = begin(learner, torch.arange(16), 16)
    assert all(each.any() for each in compiled.gradient(*rows))


@pytest.mark.parametrize("count", [1, 5])
def test_what_fills_a_minibatch_up_is_not_too_likely(count: int, uncompiled: None) -> None:
    """Of twenty narrow Gaussians the density at 0 is beyond float32: rows of zeros would bring infinity times 0."""
    learner = PPOLearner(OBS, spaces.Box(-1, 1, (20,), np.float32), ppo_config(compile=True))
    assert learner.module.log_std is not None
    learner.module.log_std.data.fill_(-6.0)
    before = learner.weights()
    compiled, rows = begin(learner, torch.arange(count), count)
    assert torch.stack(compiled.steps([rows])).isfinite().all()
    assert (learner.weights() != before).any() and np.isfinite(learner.weights()).all()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_nothing_is_read_back_before_the_end(compiled: bool, uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first minibatch to the last one."""
    learner = PPOLearner(OBS, DISCRETE, ppo_config(compile=compiled))
    samples = learner._samples(make_batch(Policy(learner.module)))
    total = len(samples.logp)
    epochs, _ = learner._draw(samples, [], range(total), total, np.random.default_rng(0))

    def refuse(*args: object) -> Any:
        raise AssertionError("a value was read back")

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(Tensor, name, refuse)
    if learner._compiled is not None:
        learner._compiled.begin(tuple(samples))
    for epoch in epochs:
        learner._learn(tuple(samples), [minibatch.rows for minibatch in epoch])


@pytest.mark.slow
def test_every_learner_has_graphs_of_its_own(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    """torch allows eight for each piece of code; none of ten learners is refused its own, or becomes eager."""
    compile_, graphs = torch.compile, []

    def count(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr("torch.compile", lambda function, *, options, **rest: compile_(function, backend=count, **rest))
    for seed in range(10):
        learner = PPOLearner(OBS, DISCRETE, ppo_config(compile=True, num_epochs=1, seed=seed))
        learner.update(make_batch(Policy(learner.module)))
    assert len(graphs) == 10 and not [warning for warning in recwarn if "uncompiled" in str(warning.message)]


@pytest.mark.slow
def test_the_cache_on_disk_tells_settings_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings are constants of the graph, which is found again by what is in it."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    hits = []
    for settings in ({"clip_coef": 0.01}, {"clip_coef": 0.3}, {"max_grad_norm": 0.05}, {"clip_coef": 0.01}):
        counters.clear()
        weights = []
        for compiled in (False, True):
            learner = PPOLearner(OBS, DISCRETE, ppo_config(compile=compiled, **settings))
            learner.update(make_batch(Policy(learner.module), 0))
            weights.append(learner.weights())
        np.testing.assert_allclose(weights[1], weights[0], atol=2e-5)
        hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, 0, 0, 1]


def test_a_graph_too_many_is_computed_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after calls that were compiled; the warning does not blame a C++ compiler."""
    compile_ = torch.compile
    monkeypatch.setattr(
        "torch.compile", lambda function, *, options, **rest: compile_(function, backend="eager", **rest)
    )

    def add(into: Tensor, what: Tensor) -> Tensor:
        into.add_(what)
        return 2 * into

    function = Compiled(add)
    with pytest.warns(RuntimeWarning, match="run uncompiled.*pass compile=False") as warned:
        for size in range(1, 13):
            total = torch.zeros(size)
            assert function(total, torch.ones(size)).tolist() == [2.0] * size
            assert total.tolist() == [1.0] * size
    assert len(warned) == 1 and "compiler" not in str(warned[0].message)
