"""Devices that are absent or too small, and compilers that can't work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.device_cases import CASES, Case

from rayvec.errors import LearnerError

FIRST = [next(each for each in CASES if each.algorithm == name) for name in ("ppo", "impala", "sac")]


def on_gpu(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.2 GiB free.")


def in_numpy(*_: Any) -> Any:
    raise MemoryError("Unable to allocate 2.00 TiB for an array")


@pytest.mark.parametrize("case", FIRST, ids=str)
@pytest.mark.parametrize(("allocate", "asked"), [(on_gpu, "2.00 GiB"), (in_numpy, "2.00 TiB")])
def test_memory_that_runs_out(allocate: Any, asked: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what was asked for and which settings to lower; the learner learns on with less."""
    learner = case.learner("cpu")
    (batch,) = case.batches(1)
    monkeypatch.setattr("rayvec.learners.ranks.Alone.all_reduce_", allocate)
    with pytest.raises(LearnerError, match=rf"Out of memory on the device.*{asked}.*Lower .*(num_|batch_)"):
        learner.update(batch)
    monkeypatch.undo()
    assert learner.update(batch)
