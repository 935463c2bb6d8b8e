"""Ranks on any nodes that sum by a collective of torch.distributed: gloo between CPUs, NCCL between GPUs.

The process group is separate from the default group of the process. Ranks read each other's addresses from a store
while the group is built, and not after that. gloo connects from and to the node's own address only; neither gloo nor
NCCL authenticates a peer.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rayvec.errors import ConfigError, RankLostError, first_line

_NCCL_WAITS = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""Let a sum that waits too long raise. By default NCCL's ``wait`` returns at once, and a watchdog ends the process
minutes after a rank was lost."""

_c10d: Any = dist  # what is used of it is there in all versions, but only partly in its annotations


class CollectiveRanks:
    """One of several ranks on any nodes; see :class:`~rayvec.learners.ranks.Ranks`.

    The constructor returns once all ranks are connected. The store is not read after that.

    Args:
        rank: Number of this rank.
        size: Number of ranks.
        store: A store of torch.distributed that all ranks share.
        host: This node's own address.
        device: ``"cpu"`` for gloo, ``"cuda"`` for NCCL. NCCL sums a tensor of another device on the GPU and copies the
            sum back.
        timeout_s: How long to wait for other ranks, in seconds.

    Attributes:
        rank: Number of this rank.
        size: Number of ranks.

    Raises:
        RankLostError: The other ranks did not connect in time.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Any,
        *,
        host: str = "127.0.0.1",
        device: str = "cpu",
        timeout_s: float = 60.0,
    ) -> None:
        self.rank, self.size = rank, size
        self._timeout_s = timeout_s
        self._device = torch.device(device)
        self._store = store  # NCCL may look into it later
        try:
            self._group: Any = self._make_group(store, host)
        except RuntimeError as error:
            raise self._lost(error) from error
        self.all_reduce_(torch.zeros(1, device=device))  # NCCL connects at the first sum

    def _make_group(self, store: Any, host: str) -> Any:
        is_cuda = self._device.type == "cuda"
        options = _c10d.ProcessGroupNCCL.Options() if is_cuda else _c10d.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=self._timeout_s)
        if is_cuda:
            os.environ.update(_NCCL_WAITS)
            return _c10d.ProcessGroupNCCL(store, self.rank, self.size, options)
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=host)]
        return _c10d.ProcessGroupGloo(store, self.rank, self.size, options)

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Replaces `tensor` by its sum over all ranks, with the same bits on each; returns it.

        Raises:
            RankLostError: A rank exited, or did not call `all_reduce_` in time.
        """
        if tensor.device.type != self._device.type or not tensor.is_contiguous():
            here = tensor.to(self._device, copy=True, memory_format=torch.contiguous_format)
            return tensor.copy_(self.all_reduce_(here))
        if self._group is None:
            raise self._lost(RuntimeError("this rank has left the group"))
        try:
            self._group.allreduce([tensor.detach()]).wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        return tensor

    def _lost(self, error: RuntimeError) -> RankLostError:
        return RankLostError(
            f"A sum of {self.size} ranks failed on rank {self.rank}: {first_line(error)}. Every rank takes part in "
            f"every sum within {self._timeout_s:g} s. The logs of the other ranks may say why."
        )

    def close(self) -> None:
        """Leaves the group: the connections close, and ranks that wait for this one raise. May be called again."""
        if self._group is not None and self._device.type == "cuda":
            with contextlib.suppress(RuntimeError):
                self._group.abort()
        self._group = None


def check_device(device: str) -> None:
    """Raises a ConfigError where the process does not have the device."""
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(
            f'device={device!r} can\'t be used here. Pass device="cpu", or "cuda" where torch sees a GPU.'
        )
