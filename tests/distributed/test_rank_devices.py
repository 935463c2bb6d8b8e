"""Ranks on GPUs, as far as a CPU shows it: what reaches them, and how a lost one is noticed."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from rayvec.distributed.allreduce_torch import CollectiveRanks
from rayvec.errors import RankLostError


class LateGroup:
    """NCCL's process group, whose second sum comes too late; it says what it saw of the environment."""

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.waits = os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
        self.num_sums = 0
        self.is_aborted = False

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        self.num_sums += 1
        return SimpleNamespace(wait=self.wait)

    def wait(self) -> None:
        if self.num_sums > 1:
            raise torch.distributed.DistBackendError("Watchdog caught collective operation timeout")

    def abort(self) -> None:
        self.is_aborted = True


def test_a_timeout_of_nccl_is_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL is told to wait, so that it raises here."""
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.setenv(name, "0")
    LateGroup.Options = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", LateGroup, raising=False)
    with FakeTensorMode():  # tensors of a GPU without one
        ranks = CollectiveRanks(0, 2, store=None, device="cuda", timeout_s=3)
        group = ranks._group
        assert group.waits == "1"
        with pytest.raises(RankLostError, match=r"2 ranks failed on rank 0: Watchdog.* within 3 s"):
            ranks.all_reduce_(torch.zeros(2, device="cuda"))
    ranks.close()
    assert group.is_aborted
