"""Tianshou's algorithms between devices."""

from __future__ import annotations

import cloudpickle
import pytest
import torch
from helpers import tianshou_algorithms as kit

from rayvec.tianshou.learn.algorithm_state import load_algorithm


def test_an_algorithm_of_a_gpu_reaches_ranks_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = kit.make("dqn")
    monkeypatch.setattr("torch.serialization.location_tag", lambda storage: "cuda:0")  # as if it lay there
    pickled = cloudpickle.dumps(algorithm)
    monkeypatch.undo()
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA"):
            cloudpickle.loads(pickled)
    loaded = load_algorithm(pickled, torch.device("cpu"))
    for got, want in zip(loaded.parameters(), algorithm.parameters(), strict=True):
        assert got.device.type == "cpu" and torch.equal(got, want)
