"""Every algorithm on every action space, with memory or without, eager or compiled: as its paper tells it.

Ranks: see ``tests/distributed`` for PPO and IMPALA; those of SAC are here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import sac_kit
from helpers.actor_critic_kit import (
    BOX,
    DISCRETE,
    MASKED,
    OBS,
    STATS,
    distance,
    impala_config,
    make_chunk,
    perturb,
    ppo_config,
)
from helpers.own_parts import two_heads
from helpers.paper_kit import PaperIMPALA, PaperPPO, PaperSAC
from helpers.thread_ranks import ThreadRanks, on_ranks, shard

from rayvec.config.references import refer
from rayvec.data import Batch
from rayvec.learners.impala import IMPALALearner
from rayvec.learners.ppo import PPOLearner
from rayvec.learners.sac import SACLearner
from rayvec.policies.policy import Policy

CUT = {"vtrace_lambda": 0.7, "rho_bar": 1.3, "c_bar": 0.9}
UNCLIPPED = {"clip_value_loss": False, "normalize_advantage": False, "gae_lambda": 0.8}
GRU = {"recurrent": "gru", "recurrent_size": 6, "sequence_length": 5}
LSTM = {**GRU, "recurrent": "lstm", "sequence_length": 16}
SPACES: dict[str, tuple[spaces.Space[Any], spaces.Space[Any]]] = {
    "discrete": (OBS, DISCRETE),
    "box": (OBS, BOX),
    "unequal choices": (OBS, spaces.MultiDiscrete([3, 5])),
    "binary": (OBS, spaces.MultiBinary(3)),
    "masked": (MASKED, DISCRETE),
}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """The graphs that torch traces, which it does not translate to C++."""
    compile_, found = torch.compile, []

    def count(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        found.append(graph)
        return graph.forward

    monkeypatch.setattr("torch.compile", lambda function, *, options, **rest: compile_(function, backend=count, **rest))
    return found


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def learn(algorithm: str, names: str, settings: dict[str, Any], compiled: bool) -> None:
    """Three updates from steps of an older policy, some of which did not happen, equal those of the paper."""
    obs, act = SPACES[names]
    make: Callable[..., Any] = PPOLearner if algorithm == "ppo" else IMPALALearner
    config: Callable[..., Any] = ppo_config if algorithm == "ppo" else impala_config
    usual = {"entropy_coef": 0.1, "minibatch_size": 20, "clip_coef": 0.05} if algorithm == "ppo" else {}
    learner = make(obs, act, config(**{**usual, **settings}, compile=compiled))
    policy = Policy(learner.module)
    perturb(learner.module, 0.2)  # so that ratios leave 1 and some are clipped
    paper = PaperPPO(learner) if algorithm == "ppo" else PaperIMPALA(learner)
    start = learner.weights()
    for seed in range(3):
        chunk = make_chunk(policy, seed, invalid=seed > 0, space=obs)
        for column in (chunk.rew, chunk.extras["logp"]):
            column[~chunk.valid] = np.nan
        metrics = learner.update(Batch((chunk,), STATS))
        paper.update(chunk)
        assert 0 < metrics["clip_fraction"] < 1
    for ours, theirs in zip(learner.module.parameters(), paper.module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert np.abs(learner.weights() - start).max() > 0.02


@pytest.mark.parametrize("names", SPACES)
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [("ppo", {"clip_value_loss": True}), ("ppo", UNCLIPPED), ("impala", {}), ("impala", CUT)],
    ids=["ppo", "ppo unclipped", "impala", "impala cut"],
)
def test_updates_are_those_of_the_paper(algorithm: str, settings: dict[str, Any], names: str) -> None:
    learn(algorithm, names, settings, compiled=False)


@pytest.mark.parametrize("names", ["discrete", "box"])
@pytest.mark.parametrize(("algorithm", "settings"), [("ppo", {"clip_coef": 0.5}), ("impala", {})])
def test_updates_of_your_own_network_are_those_of_the_paper(
    algorithm: str, settings: dict[str, Any], names: str
) -> None:
    learn(algorithm, names, {"network": refer(two_heads), **settings}, compiled=False)


@pytest.mark.parametrize("names", ["discrete", "masked", slow("box"), slow("unequal choices")])
@pytest.mark.parametrize("memory", [GRU, LSTM], ids=["gru", "lstm"])
@pytest.mark.parametrize("algorithm", ["ppo", "impala"])
def test_recurrent_updates_are_those_of_the_paper(algorithm: str, memory: dict[str, Any], names: str) -> None:
    learn(algorithm, names, memory, compiled=False)


@pytest.mark.parametrize(
    ("algorithm", "names", "settings"),
    [
        ("ppo", "box", {}),
        ("ppo", "unequal choices", {}),
        ("impala", "unequal choices", {}),
        slow("ppo", "discrete", {}),
        slow("ppo", "binary", {}),
        slow("ppo", "masked", GRU),
        slow("impala", "box", {}),
        slow("impala", "binary", {}),
        slow("impala", "discrete", LSTM),
    ],
)
def test_compiled_updates_are_those_of_the_paper(
    algorithm: str,
    names: str,
    settings: dict[str, Any],
    graphs: list[torch.fx.GraphModule],
    recwarn: pytest.WarningsRecorder,
) -> None:
    """Traced whole, but not translated to C++; one graph serves minibatches of all sizes."""
    learn(algorithm, names, settings, compiled=True)
    assert len(graphs) == 1
    assert not [warning for warning in recwarn if "uncompiled" in str(warning.message)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "names", "settings"),
    [("ppo", "discrete", {}), ("ppo", "box", {}), ("ppo", "discrete", GRU), ("impala", "box", {})],
)
def test_updates_in_compiled_cpp_are_those_of_the_paper(algorithm: str, names: str, settings: dict[str, Any]) -> None:
    learn(algorithm, names, settings, compiled=True)


# SAC

SAC_SPACES = {
    "box": (sac_kit.OBS, sac_kit.BOX),
    "discrete": (sac_kit.OBS, sac_kit.DISCRETE),
    "masked": (spaces.Dict(numbers=sac_kit.OBS, action_mask=spaces.MultiBinary(3)), sac_kit.DISCRETE),
}


def make_sac(names: str, dtype: torch.dtype = torch.float64, **settings: Any) -> SACLearner:
    return SACLearner(*SAC_SPACES[names], sac_kit.make_config(**settings), dtype=dtype)


def sac_batches(names: str, count: int) -> list[Batch]:
    make = sac_kit.masked_chunk if names == "masked" else sac_kit.make_chunk
    return [Batch((make(SAC_SPACES[names][1], seed, invalid=seed > 0),), sac_kit.STATS) for seed in range(count)]


def check_sac(names: str, **settings: Any) -> None:
    """Updates from a ring that overflows equal those of the paper from lists."""
    learner = make_sac(names, alpha=0.3, replay_size=40, **settings)
    paper = PaperSAC(learner)
    start = learner.weights()
    for batch in sac_batches(names, 5):
        metrics, expected = learner.update(batch), paper.update(batch.chunks[0])
        for name, tensor in paper.networks().items():
            torch.testing.assert_close(learner.state_dict()[name], tensor, atol=1e-10, rtol=0)
        for name in ("critic_loss", "q_mean", "actor_loss", "entropy", "alpha") if expected else ():
            values = [each[name] for each in expected if name in each]
            assert metrics[name] == pytest.approx(np.mean(values), rel=1e-9), name
    assert metrics["num_updates"] == paper.num_updates > 20 and metrics["replay_steps"] == 40
    assert np.abs(learner.weights() - start).max() > 0.01


@pytest.mark.parametrize("names", SAC_SPACES)
@pytest.mark.parametrize(
    "settings",
    [
        {"policy_interval": 1},
        {"policy_interval": 2, "num_critics": 3},
        {"autotune": False, "update_to_data": 0.7},
        {"target_entropy": 0.2},
    ],
    ids=str,
)
def test_updates_of_sac_are_those_of_the_papers(names: str, settings: dict[str, Any]) -> None:
    check_sac(names, **settings)


@pytest.mark.parametrize("names", ["box", slow("discrete"), slow("masked")])
def test_traced_updates_of_sac_are_those_of_the_papers(
    names: str, graphs: list[torch.fx.GraphModule], recwarn: pytest.WarningsRecorder
) -> None:
    check_sac(names, compile=True)
    assert len(graphs) == 2  # of critics and actor
    assert not [warning for warning in recwarn if "uncompiled" in str(warning.message)]


@pytest.mark.slow
@pytest.mark.parametrize("names", SAC_SPACES)
def test_compiled_updates_of_sac_are_those_of_the_papers(names: str) -> None:
    check_sac(names, compile=True)


def sac_on_ranks(names: str, bounds: list[int], **settings: Any) -> list[Any]:
    def work(ranks: ThreadRanks) -> Any:
        learner = make_sac(names, **settings)
        if ranks.size > 1:
            learner.ranks = ranks
        metrics = [learner.update(shard(b, *bounds[ranks.rank : ranks.rank + 2])) for b in sac_batches(names, 4)]
        return torch.cat([learner.state_dict()[name] for name in ("critic", "target", "actor")]), metrics

    return on_ranks(len(bounds) - 1, work)


@pytest.mark.parametrize("names", SAC_SPACES)
@pytest.mark.parametrize("bounds", [[0, 2, 4], [0, 1, 1, 4], slow([0, 1, 2, 3, 4])], ids=str)
@pytest.mark.parametrize("settings", [{"policy_interval": 2}, {"policy_interval": 1, "batch_size": 7}], ids=str)
def test_several_ranks_of_sac_do_what_one_does(names: str, bounds: list[int], settings: dict[str, Any]) -> None:
    [(one, expected)] = sac_on_ranks(names, [0, 4], **settings)
    (first, _), *others = several = sac_on_ranks(names, bounds, **settings)
    assert distance(first, one) < 1e-12
    assert all(torch.equal(each, first) for each, _ in others)
    for _, metrics in several:
        assert all(got == pytest.approx(want, rel=1e-9) for got, want in zip(metrics, expected, strict=True))


def test_ranks_of_sac_in_float32() -> None:
    [(one, _)] = sac_on_ranks("box", [0, 4], dtype=torch.float32)
    (first, _), _ = sac_on_ranks("box", [0, 2, 4], dtype=torch.float32)
    assert distance(first, one) < 1e-6


def test_ranks_with_graphs_do_what_one_does(graphs: list[torch.fx.GraphModule]) -> None:
    [(one, _)] = sac_on_ranks("box", [0, 4])
    (first, _), _ = sac_on_ranks("box", [0, 1, 4], compile=True)
    assert distance(first, one) < 1e-12 and graphs
