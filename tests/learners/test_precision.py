"""Updates in bfloat16: near those in float32, with the same weights, optimizers and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers.device_cases import CASES, Case

from rayvec.policies.policy import Policy


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What is computed here is small: a second thread would wait for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cases(*names: str) -> list[Any]:
    return [pytest.param(case, id=str(case)) for case in CASES if str(case) in names]


def learn(case: Case, name: str, count: int, **settings: Any) -> tuple[Any, list[dict[str, float]]]:
    learner = case.learner("cpu", precision=name, **settings)
    batches = case.batches(min(count, 4))
    return learner, [learner.update(batches[number % 4]) for number in range(count)]


@pytest.mark.parametrize("case", cases("ppo-numbers-box", "impala-numbers-box", "sac-numbers-box"))
def test_updates_in_bfloat16_stay_near_those_in_float32(case: Case) -> None:
    first, _ = learn(case, "float32", 0)
    (exact, expected), (rough, got) = learn(case, "float32", 20), learn(case, "bf16", 20)
    way = np.linalg.norm(exact.weights() - first.weights())
    off = np.linalg.norm(exact.weights() - rough.weights())
    assert 0 < off < 0.4 * way  # bfloat16 has 8 bits: other than exact, and not far away
    value = "critic_loss" if case.algorithm == "sac" else "value_loss"
    assert got[-1][value] == pytest.approx(expected[-1][value], rel=0.2)
    assert all(each.dtype == torch.float32 for each in rough.module.parameters())


@pytest.mark.parametrize("case", cases("ppo-numbers-box", "ppo-images-discrete"))
def test_policies_act_in_float32(case: Case) -> None:
    """Steps are the same wherever a policy acts."""
    chunk = case.batches(1)[0].chunks[0]
    obs = chunk.obs[0]
    actors = [Policy(case.learner("cpu", precision=each).module) for each in ("float32", "bf16")]
    noise = np.full((len(obs), actors[0].noise.lanes), 0.4)
    (one, extras), (other, others) = (actor.act(obs, noise) for actor in actors)
    np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(extras["logp"], others["logp"])
