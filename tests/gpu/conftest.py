"""Which device the tests of this folder use: CUDA, or what RAYVEC_GPU_TESTS_ON names, to try the tests themselves."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """The device, ``"cuda"`` where there is nothing to say otherwise."""
    name = os.environ.get("RAYVEC_GPU_TESTS_ON", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"this machine has no GPU that torch {torch.__version__} can use")
    if name == "cpu":  # where nothing is captured, compiling for minutes would show nothing
        monkeypatch.setattr("torch.compile", lambda function, **_: function)
    return name


@pytest.fixture
def second_gpu(device: str) -> str:
    """The device, where there are two of them."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU, and NCCL wants one for each rank")
    return device
