"""Everything that only a GPU can show, in one command: ``python -m pytest tests/gpu``.

It needs torch, NumPy and Gymnasium, and less than 8 minutes on one GPU. What a CPU can show of it, without computing
there, is in ``tests/learners/test_devices.py``. ``RAYVEC_GPU_TESTS_ON=cpu`` tries these tests on another device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import gpu_ranks
import numpy as np
import pytest
import torch
from helpers.device_cases import CASES, Case
from helpers.rank_processes import on_processes

from rayvec.errors import RankLostError
from rayvec.policies.policy import Policy

EVERY = pytest.mark.parametrize("case", CASES, ids=str)
_FEW = ("ppo-numbers-box", "ppo-dict-box-impala", "impala-numbers-box", "sac-numbers-box")
FEW = pytest.mark.parametrize("case", [each for each in CASES if str(each) in _FEW], ids=str)
DEVICES, KINDS = {"cuda": ("cuda:0", "cuda:1"), "cpu": ("cpu", "cpu")}, {"cuda": "nccl", "cpu": "collective"}


@pytest.fixture
def device() -> Iterator[str]:
    """The device, ``"cuda"`` where there is nothing to say otherwise."""
    name = os.environ.get("RAYVEC_GPU_TESTS_ON", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"this machine has no GPU that torch {torch.__version__} can use")
    with torch.compiler.set_stance("force_eager") if name == "cpu" else nullcontext():  # there nothing is captured
        yield name


@pytest.fixture
def second_gpu(device: str) -> str:
    """The device, where there are two of them."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU, and NCCL wants one for each rank")
    return device


def learn(case: Case, device: str, count: int = 3, **settings: Any) -> tuple[Any, list[dict[str, float]]]:
    learner = case.learner(device, **settings)
    return learner, [learner.update(batch) for batch in case.batches(count)]


def assert_near(learner: Any, other: Any, metrics: Any = None, expected: Any = None) -> None:
    np.testing.assert_allclose(learner.weights(), other.weights(), rtol=1e-3, atol=2e-4)  # Adam amplifies rounding
    for got, want in zip(metrics or [], expected or [], strict=True):
        assert got == pytest.approx(want, rel=1e-2, abs=1e-3)


@EVERY
def test_updates_are_those_of_a_cpu(case: Case, device: str) -> None:
    (learner, metrics), (here, expected) = learn(case, device), learn(case, "cpu")
    assert_near(learner, here, metrics, expected)


@EVERY
def test_captured_updates_are_those_of_a_cpu(case: Case, device: str) -> None:
    """Captured at the first update, replayed from then on."""
    (learner, metrics), (here, expected) = learn(case, device, compile=True), learn(case, "cpu")
    assert_near(learner, here, metrics, expected)


@FEW
def test_a_state_that_is_loaded_after_a_capture(case: Case, device: str) -> None:
    """Graphs know the memory that they were captured with: loading must change what is in it."""
    batches = case.batches(3)
    learner = case.learner(device, compile=True)
    learner.update(batches[0])
    state = learner.state_dict()
    for batch in batches[1:]:
        learner.update(batch)
    weights = learner.weights()
    learner.load_state_dict(state)
    for batch in batches[1:]:
        learner.update(batch)
    np.testing.assert_allclose(learner.weights(), weights, rtol=1e-3, atol=1e-5)


@EVERY
def test_a_checkpoint_goes_from_device_to_device(case: Case, device: str) -> None:
    there, _ = learn(case, device, 1)
    here = case.learner("cpu")
    here.load_state_dict(there.state_dict())
    (batch,) = case.batches(1)
    there.update(batch)
    here.update(batch)
    assert_near(there, here)


@pytest.mark.parametrize("case", [each for each in CASES if str(each) == "ppo-dict-box-impala"], ids=str)
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_gradients_of_deep_networks_in_other_precisions_are_off_by_rounding(
    case: Case, device: str, precision: str
) -> None:
    got, by_weights = case.rounding(device, precision)
    assert got < 5 * by_weights


@pytest.mark.parametrize("case", [each for each in CASES if str(each) in _FEW and each.obs != "dict"], ids=str)
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_other_precisions_stay_near_float32(case: Case, device: str, precision: str) -> None:
    (exact, expected), (rough, got) = learn(case, device, 5), learn(case, device, 5, precision=precision)
    first = case.learner("cpu").weights()
    way, off = (np.linalg.norm(each - exact.weights()) for each in (first, rough.weights()))
    assert off < 0.4 * way
    value = "critic_loss" if case.algorithm == "sac" else "value_loss"
    assert got[-1][value] == pytest.approx(expected[-1][value], rel=0.3)


@EVERY
def test_a_policy_acts_there(case: Case, device: str) -> None:
    """With the actions of a CPU, up to rounding: ``inference="node"`` acts on the learner's device."""
    if "recurrent" in case.settings:
        pytest.skip("a policy with a hidden state acts on a CPU")
    module = case.learner(device).module
    obs, noise = case.observations()
    policies = [Policy(module), Policy(module, device=device)]
    (_, expected), (_, extras) = (policy.act(obs, noise(policy)) for policy in policies)
    np.testing.assert_allclose(extras["logp"], expected["logp"], rtol=1e-3, atol=1e-3)


@FEW
def test_two_ranks_on_one_gpu(case: Case, device: str) -> None:
    """They sum by gloo, through the memory of the host."""
    check_ranks(case, on_processes(2, gpu_ranks.learn, (device, device), str(case), kind="collective"))


@FEW
def test_two_ranks_on_two_gpus(case: Case, second_gpu: str) -> None:
    """They sum by NCCL."""
    check_ranks(case, on_processes(2, gpu_ranks.learn, DEVICES[second_gpu], str(case), kind=KINDS[second_gpu]))


def check_ranks(case: Case, weights: list[Any]) -> None:
    assert all(isinstance(each, np.ndarray) for each in weights), weights
    np.testing.assert_array_equal(*weights)
    alone = case.learner("cpu")
    for batch in case.batches(2):
        alone.update(batch)
    np.testing.assert_allclose(weights[0], alone.weights(), rtol=1e-3, atol=2e-4)


def test_a_lost_rank_is_noticed(second_gpu: str) -> None:
    """By the timeout of the ranks, as an error that can be caught; NCCL's watchdog would end the process."""
    raised, lost = on_processes(2, gpu_ranks.lose_a_rank, DEVICES[second_gpu], kind=KINDS[second_gpu], timeout_s=20.0)
    assert lost is None and isinstance(raised, RankLostError)
