"""Ranks anywhere that sum by a collective of torch.distributed: gloo between CPUs, NCCL between GPUs.

The process group is one of our own, beside whatever default group the process has or has not. Ranks find each other
by a store at rank 0, which listens on that node's own address only, and gloo's connections are made from each node's
own.
"""

from __future__ import annotations

import contextlib
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rayvec.errors import ConfigError, RankLostError

__all__ = ["CollectiveRanks", "RankStore", "check_device"]

_c10d: Any = dist  # what is used of it is there in all versions, but only partly in its annotations


class RankStore:
    """Where ranks find each other; one of them holds it, in its own process.

    Args:
        host: This node's own address.
        timeout_s: How long whoever asks waits for an answer, in seconds.

    Attributes:
        address: What the ranks are told: host and port.
    """

    def __init__(self, host: str, timeout_s: float = 60.0) -> None:
        listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = (host, listener.getsockname()[1])
        self._store = _c10d.TCPStore(
            host,
            self.address[1],
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


class CollectiveRanks:
    """One of several ranks on any nodes; see :class:`~rayvec.learners.ranks.Ranks`.

    It comes to be when all of them are made.

    Args:
        rank: Number of this rank.
        size: How many there are.
        store: Address of a :class:`RankStore`.
        host: This node's own address.
        device: ``"cpu"`` for gloo, ``"cuda"`` for NCCL, in which case what lies elsewhere is summed on the GPU and
            copied back.
        timeout_s: How long to wait for other ranks, in seconds.

    Attributes:
        rank: Number of this rank.
        size: How many there are.

    Raises:
        ConfigError: There is no GPU.
        RankLostError: The others did not come in time.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: tuple[str, int],
        *,
        host: str = "127.0.0.1",
        device: str = "cpu",
        timeout_s: float = 60.0,
    ) -> None:
        self.rank, self.size = rank, size
        self._timeout_s = timeout_s
        self._device = torch.device(device)
        timeout = timedelta(seconds=timeout_s)
        check_device(device)
        try:
            self._store = _c10d.TCPStore(*store, is_master=False, timeout=timeout, wait_for_workers=False)
            self._group: Any = self._make_group(host, timeout)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _make_group(self, host: str, timeout: timedelta) -> Any:
        if self._device.type == "cuda":
            options = _c10d.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return _c10d.ProcessGroupNCCL(self._store, self.rank, self.size, options)
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timeout
        return _c10d.ProcessGroupGloo(self._store, self.rank, self.size, options)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replaces `tensor` by its sum over all ranks, with the same bits on each; returns it.

        Raises:
            RankLostError: A rank is gone, or did not come in time.
        """
        if tensor.device.type != self._device.type or not tensor.is_contiguous():
            here = tensor.to(self._device, copy=True, memory_format=torch.contiguous_format)
            return tensor.copy_(self.sum_(here))
        if self._group is None:
            raise self._lost(RuntimeError("this rank has given up"))
        try:
            self._group.allreduce([tensor.detach()]).wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        return tensor

    def _lost(self, error: RuntimeError) -> RankLostError:
        return RankLostError(
            "All ranks come to every sum.",
            expected=f"{self.size} ranks within {self._timeout_s:g} s, each going on until all are done",
            got=f"on rank {self.rank}: {str(error).splitlines()[0]}",
            remedy="Look into the log of the other ranks; a LearnerGroup starts its ranks again by itself",
        )

    def close(self) -> None:
        """Gives up: the connections end, which whoever waits for this rank notices. May be called again."""
        if self._group is not None and self._device.type == "cuda":
            with contextlib.suppress(RuntimeError):
                self._group.abort()
        self._group = None


def check_device(device: str) -> None:
    """Refuses a device that this process has not got.

    Raises:
        ConfigError: It asks for CUDA where there is none.
    """
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(
            "Learners compute on a device that their node has.",
            expected='"cpu", or "cuda" where torch sees a GPU',
            got=repr(device),
            remedy='Pass device="cpu", or install torch with CUDA on nodes with GPUs',
        )
