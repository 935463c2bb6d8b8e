"""IMPALA's compiled steps beside the eager ones, and V-trace of rows beside its recursion."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.actor_critic_kit import BOX, DISCRETE, MIXED, OBS, STATS, N, T, impala_config, make_batch, make_chunk
from helpers.ranks_kit import make_batches, make_impala
from helpers.thread_ranks import learn_on_ranks

from rayvec.data import Batch, tree_map
from rayvec.learners.impala import IMPALALearner
from rayvec.learners.returns import vtrace
from rayvec.learners.torch_vtrace import num_rounds, vtrace_of_rows
from rayvec.policies.policy import Policy

UNEQUAL = spaces.MultiDiscrete([3, 5])


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """The graphs that torch traces, which it does not translate to C++."""
    compile_, found = torch.compile, []

    def count(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        found.append(graph)
        return graph.forward

    monkeypatch.setattr("torch.compile", lambda function, *, options, **rest: compile_(function, backend=count, **rest))
    return found


def learn_both_ways(obs: spaces.Space[Any], act: spaces.Space[Any], **settings: Any) -> None:
    """Updates from chunks with and without gaps, and of two lengths: the compiled ones equal the eager ones."""
    settings = {"rho_bar": 1.1, **settings}  # whether weights of 1 are above 1 is a matter of rounding
    results = []
    for compiled in (False, True):
        learner = IMPALALearner(obs, act, impala_config(compile=compiled, **settings))
        policy = Policy(learner.module)
        batches = [make_batch(policy, seed, invalid=seed > 0, space=obs) for seed in range(2)]
        batches.append(Batch((make_chunk(policy, 3, space=obs, num_steps=2 * T + 1),), STATS))
        metrics = [learner.update(batch) for batch in batches]
        results.append((learner.weights(), metrics))
    (weights, metrics), (others, other_metrics) = results
    np.testing.assert_allclose(others, weights, atol=1e-5)
    for ours, theirs in zip(other_metrics, metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_compiled_updates_equal_eager_ones(optimizer: str) -> None:
    learn_both_ways(OBS, BOX, optimizer=optimizer)


@pytest.mark.parametrize(
    ("obs", "act"),
    [
        pytest.param(OBS, DISCRETE, marks=pytest.mark.slow, id="discrete"),
        pytest.param(OBS, BOX, marks=pytest.mark.slow, id="box"),
        pytest.param(OBS, UNEQUAL, id="unequal choices"),
        pytest.param(OBS, spaces.MultiBinary(3), marks=pytest.mark.slow, id="binary"),
        pytest.param(MIXED, DISCRETE, marks=pytest.mark.slow, id="image and numbers"),
    ],
)
def test_every_space_is_one_graph(
    obs: spaces.Space[Any],
    act: spaces.Space[Any],
    graphs: list[torch.fx.GraphModule],
    recwarn: pytest.WarningsRecorder,
) -> None:
    """Traced whole, but not translated to C++; minibatches of all sizes need no second one."""
    learn_both_ways(obs, act, num_steps=2 * T + 1)
    assert len(graphs) == 1
    assert not [warning for warning in recwarn if "uncompiled" in str(warning.message)]


class ClonesItsInputs:
    """`CUDAGraph` without a GPU: the function gets copies of what it is captured with."""

    def __init__(self, function: Any, pool: Any) -> None:
        self.function, self.inputs = function, []

    def __call__(self, state: Any, *rows: torch.Tensor) -> Any:
        if not self.inputs:
            self.inputs = [each.clone() for each in rows]
            self.function(tree_map(torch.clone, state), *self.inputs)
        for each, new in zip(self.inputs, rows, strict=True):
            each.copy_(new)
        return self.function(state, *self.inputs).clone()


def test_captures_of_all_lengths_share_one_graph(
    graphs: list[torch.fx.GraphModule], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """A graph for each length would be refused by torch after eight."""
    monkeypatch.setattr("rayvec.learners.compiled_step.CUDAGraph", ClonesItsInputs)
    monkeypatch.setattr("rayvec.learners.compiled_step.can_capture", lambda device: True)
    learn_both_ways(OBS, BOX, num_steps=2 * T + 1)
    assert len(graphs) == 1
    assert not [warning for warning in recwarn if "uncompiled" in str(warning.message)]


def test_a_longer_chunk_than_the_settings_name_is_summed_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayvec.learners.compiled_step.Compiled", lambda function, **options: function)
    learn_both_ways(OBS, DISCRETE, num_steps=3)


@pytest.mark.parametrize("bounds", [[0, 3, 7], [0, 0, 7]], ids=["even", "uneven"])
def test_compiled_ranks_equal_one(bounds: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayvec.learners.compiled_step.Compiled", lambda function, **options: function)
    batches = make_batches(DISCRETE, 3)

    def learn(bounds: list[int]) -> list[Any]:
        learners, _ = learn_on_ranks(lambda: make_impala(DISCRETE, torch.float64, compile=True), batches, bounds)
        return [learner.state_dict()["parameters"] for learner in learners]

    [alone] = learn([0, 7])
    first, second = learn(bounds)
    torch.testing.assert_close(first, alone, atol=1e-12, rtol=0)
    assert torch.equal(first, second)


@pytest.mark.parametrize("num_steps", [1, 2, 7, 64])
def test_vtrace_of_rows_equals_the_recursion(num_steps: int) -> None:
    rng = np.random.default_rng(num_steps)
    shape = num_steps, N
    rew, value, next_value, log_ratio = rng.normal(size=(4, *shape))
    terminated, truncated = rng.random((2, *shape)) < 0.15
    valid = rng.random(shape) > 0.2
    terminated, truncated = terminated & valid, truncated & valid
    limits = {"rho_bar": 1.2, "c_bar": 0.9}
    expected = vtrace(
        rew, value, next_value, log_ratio, terminated, truncated, gamma=0.9, lam=0.8, valid=valid, **limits
    )
    chain = ~(terminated | truncated)
    chain[:-1] &= valid[1:]
    chain[-1] = False
    columns = [rew, value, next_value, log_ratio, np.where(terminated, 0.0, 0.9), chain.astype(float)]
    rows = [torch.from_numpy(column.T[valid.T]) for column in columns]
    got = vtrace_of_rows(*rows, decay=0.9 * 0.8, rounds=num_rounds(num_steps), **limits)
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs.T[valid.T], atol=1e-12)
