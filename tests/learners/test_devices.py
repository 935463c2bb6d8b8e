"""Learners on devices that are no CPU, in other precisions, and out of memory: results equal to a CPU's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
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


@pytest.mark.parametrize("case", [each for each in CASES if re.search("numbers-box|gru", str(each))], ids=str)
def test_transfers_do_not_grow_with_the_number_of_minibatches(case: Case) -> None:
    """A GPU computes what was launched before the host gets an answer, and waits for the host afterwards.

    PPO uploads what all minibatches need at once.
    """
    more = {"ppo": {"num_epochs": 4}, "impala": {"num_minibatches": 4}, "sac": {"update_to_data": 0.2}}[case.algorithm]
    counts = []
    batches = case.batches(2)
    for settings in ({}, more):
        with pretended() as device:
            learner = case.learner("meta", **settings)
            learner.update(batches[0])
            device.reads.clear()
            device.uploads.clear()
            learner.update(batches[1])
            counts.append(Counter(device.reads + device.uploads * (case.algorithm == "ppo")))
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


def learned(case: Case, precision: str, count: int) -> tuple[Any, list[dict[str, float]]]:
    learner = case.learner("cpu", precision=precision)
    batches = case.batches(4)
    return learner, [learner.update(batches[number % 4]) for number in range(count)]


@pytest.mark.parametrize("case", [each for each in CASES if str(each).endswith("-numbers-box")], ids=str)
def test_updates_in_bfloat16_stay_near_those_in_float32(case: Case) -> None:
    first, _ = learned(case, "float32", 0)
    (exact, expected), (rough, got) = learned(case, "float32", 20), learned(case, "bf16", 20)
    way = np.linalg.norm(exact.weights() - first.weights())
    off = np.linalg.norm(exact.weights() - rough.weights())
    assert 0 < off < 0.4 * way  # bfloat16 has 8 bits: other than exact, and not far away
    value = "critic_loss" if case.algorithm == "sac" else "value_loss"
    assert got[-1][value] == pytest.approx(expected[-1][value], rel=0.2)
    assert all(each.dtype == torch.float32 for each in rough.module.parameters())


DEEP = [each for each in CASES if each.obs in ("images", "dict") and "recurrent" not in each.settings]


@pytest.mark.parametrize("case", DEEP, ids=str)
def test_a_gradient_in_bfloat16_is_off_by_rounding(case: Case) -> None:
    """Deep networks multiply it, and steps of Adam do, too: what counts is what rounded weights alone would do."""
    got, by_weights = case.rounding("cpu", "bf16")
    assert 0 < got < 4 * by_weights


_GPU = Path(__file__).parents[1] / "gpu"
_PROGRAM = """
import sys

sys.modules.update(dict.fromkeys({absent!r}))  # as if they were not installed
import pytest
sys.exit(pytest.main({arguments!r}))
"""
_ABSENT = {"ray", "yaml", "tyro", "psutil", "tianshou", "hypothesis", "tensorboard", "scipy", "numba", "pandas"}


def run(*arguments: str, **environment: str) -> str:
    """Runs tests/gpu where nothing but torch, NumPy, Gymnasium and pytest is installed."""
    program = _PROGRAM.format(absent=_ABSENT, arguments=["-q", str(_GPU), *arguments])
    variables = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_without_a_gpu_they_are_skipped_and_say_why() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "this machine has no GPU that torch" in run("-k", "lost or (captured and sac-numbers-box)")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_on_a_cpu_they_pass() -> None:
    assert " passed" in run(RAYVEC_GPU_TESTS_ON="cpu")
