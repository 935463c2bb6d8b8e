"""Learners on devices that are no CPU, in other precisions, and out of memory: results equal to a CPU's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers.device_cases import CASES, Case
from helpers.pretend_device import pretended

_SLOW = ("images", "dict", "discrete-True", "numbers-discrete", "numbers-multibinary", "tuple-box")


def param(case: Case, slow: tuple[str, ...] = _SLOW) -> Any:
    """Marks what another case nearly covers as slow."""
    is_slow = any(each in str(case) for each in slow) and "ppo-numbers-discrete-gru" not in str(case)
    return pytest.param(case, marks=pytest.mark.slow if is_slow else (), id=str(case))


EVERY = pytest.mark.parametrize("case", [*map(param, CASES)])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What is computed here is small: a second thread would wait for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_same(learner: Any, metrics: Any, other: Any, expected: Any) -> None:
    for got, want in zip(metrics, expected, strict=True):
        assert got == pytest.approx(want, rel=1e-4, abs=1e-5)
    np.testing.assert_allclose(learner.weights(), other.weights(), rtol=1e-4, atol=1e-5)


@EVERY
def test_updates_on_a_device_are_those_of_a_cpu(case: Case) -> None:
    """An operation on tensors of two devices would raise, and so would one that waits for values."""
    batches = case.batches(2)
    here = case.learner("cpu")
    expected = [here.update(batch) for batch in batches]
    with pretended():
        learner = case.learner("meta")
        metrics = [learner.update(batch) for batch in batches]
        assert_same(learner, metrics, here, expected)


@pytest.mark.parametrize("case", [each for each in CASES if "numbers-box" in str(each)], ids=str)
def test_reads_do_not_grow_with_the_number_of_minibatches(case: Case) -> None:
    """A GPU computes what was launched before the host gets an answer, and waits for the host afterwards."""
    more = {"ppo": {"num_epochs": 4}, "impala": {"num_minibatches": 4}, "sac": {"update_to_data": 0.2}}[case.algorithm]
    counts = []
    batches = case.batches(2)
    for settings in ({}, more):
        with pretended() as device:
            learner = case.learner("meta", **settings)
            learner.update(batches[0])
            device.reads.clear()
            learner.update(batches[1])
            counts.append(Counter(device.reads))
    assert not counts[1] - counts[0]


def test_a_state_goes_to_a_replay_elsewhere_and_back() -> None:
    case, batches = Case("sac", "numbers", "box"), Case("sac", "numbers", "box").batches(4)
    here, elsewhere = case.learner("cpu"), []
    expected = [here.update(batch) for batch in batches]
    with pretended():
        state: Any = None
        for batch, on_device in zip(batches, (False, True, True, False), strict=True):
            learner = case.learner("meta", replay_on_device=on_device)
            if state is not None:
                learner.load_state_dict(state)
            elsewhere.append(learner.update(batch))
            state = learner.state_dict()
        assert_same(learner, elsewhere, here, expected)


FIRST = [next(each for each in CASES if each.algorithm == name) for name in ("ppo", "impala", "sac")]


def cases(*names: str) -> list[Any]:
    return [pytest.param(case, id=str(case)) for case in CASES if str(case) in names]


def learned(case: Case, name: str, count: int, **settings: Any) -> tuple[Any, list[dict[str, float]]]:
    learner = case.learner("cpu", precision=name, **settings)
    batches = case.batches(min(count, 4))
    return learner, [learner.update(batches[number % 4]) for number in range(count)]


@pytest.mark.parametrize("case", cases("ppo-numbers-box", "impala-numbers-box", "sac-numbers-box"))
def test_updates_in_bfloat16_stay_near_those_in_float32(case: Case) -> None:
    first, _ = learned(case, "float32", 0)
    (exact, expected), (rough, got) = learned(case, "float32", 20), learned(case, "bf16", 20)
    way = np.linalg.norm(exact.weights() - first.weights())
    off = np.linalg.norm(exact.weights() - rough.weights())
    assert 0 < off < 0.4 * way  # bfloat16 has 8 bits: other than exact, and not far away
    value = "critic_loss" if case.algorithm == "sac" else "value_loss"
    assert got[-1][value] == pytest.approx(expected[-1][value], rel=0.2)
    assert all(each.dtype == torch.float32 for each in rough.module.parameters())
