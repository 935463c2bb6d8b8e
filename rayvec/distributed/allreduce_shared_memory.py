"""Ranks on one machine that sum through a block of shared memory.

A sum of a thousand numbers over two ranks takes microseconds here and a third of a millisecond through sockets. That
decides whether a small network gains anything from a second rank.

The block is an anonymous file: it has no name that could be left behind, and ends with the last process that maps it.
Each rank has a *mark* in it, a counter of the steps that it has reached. A rank that waits for another reads its mark.
Beside it are the sizes of the rank's latest two tensors. And each rank locks a byte of the file: a rank whose lock is
free has left, or its process has ended, however that happened.

Every rank writes its numbers into a slot of its own. When all marks are at the next step, each rank adds up all slots,
in the order of ranks, so that all get the same bits. Two sets of slots alternate, so that a fast rank never overwrites
what a slower one still reads. A tensor that is larger than a slot is summed in pieces.

x86 processors promise that another core sees a mark only after what was written before it. On other processors, use
:class:`~rayvec.distributed.allreduce_torch.CollectiveRanks`.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import platform
import time

import torch
from torch import Tensor

from rayvec.errors import LearnerError, RankLostError
from rayvec.node.shared_memory import anonymous_file

_LINE_BYTES = 64
_SLOT_BYTES = 16 * 1024 * 1024
_NUM_READS = 400
_MOVE_AFTER_S = 0.0002
_SHORTEST_SLEEP_S = 1e-6
_YIELD_S = 0.005
_SLEEP_S = 0.0005
_CHECK_AFTER_S = 0.05


def can_share_memory() -> bool:
    """Says whether this processor keeps the order of writes that `SharedMemoryRanks` relies on."""
    return platform.machine() in ("x86_64", "AMD64")


class SharedMemoryRanks:
    """One of several ranks on one machine; see :class:`~rayvec.learners.ranks.Ranks`.

    Rank 0 is made first; the other ranks are made with its `path`. Tensors of any dtype and size may be summed. Those
    of another device are copied to memory and back.

    A process is one rank, and opens the block once: locks of ``fcntl`` belong to the process, and closing any other
    descriptor of the block would free them.

    Args:
        rank: Number of this rank.
        size: Number of ranks.
        path: Of rank 0's block; None for rank 0 itself.
        timeout_s: How long to wait for another rank, in seconds.

    Attributes:
        rank: Number of this rank.
        size: Number of ranks.
        path: Of the block, as long as rank 0 lives.

    Raises:
        RankLostError: Rank 0 exited.
    """

    def __init__(self, rank: int, size: int, path: str | None = None, *, timeout_s: float = 60.0) -> None:
        self.rank, self.size = rank, size
        self._timeout_s = timeout_s
        self._others = [other for other in range(size) if other != rank]
        self._num_steps = 0
        fd = self._open(path)
        self.path = f"/proc/{os.getpid()}/fd/{fd}" if path is None else path
        self._fd: int | None = fd
        self._map(fd)
        fcntl.lockf(fd, fcntl.LOCK_EX, 1, rank)
        self._lines[rank * 8] = 1  # from now on, a free lock says that this rank is gone

    def _open(self, path: str | None) -> int:
        if path is None:
            return anonymous_file("rayvec-ranks", self._num_bytes)
        try:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise _lost(0, f"has ended ({error.strerror})") from error

    @property
    def _num_bytes(self) -> int:
        """Size of the block; pages that no rank writes to take no memory."""
        return 2 * self.size * (_LINE_BYTES + _SLOT_BYTES)

    def _map(self, fd: int) -> None:
        self._block = mmap.mmap(fd, self._num_bytes)
        lines = self.size * _LINE_BYTES
        whole = memoryview(self._block)
        self._marks = whole[:lines].cast("Q")
        self._lines = whole[lines : 2 * lines].cast("Q")
        self._slots = torch.frombuffer(self._block, dtype=torch.uint8)[2 * lines :].view(2, self.size, _SLOT_BYTES)
        self._views: dict[tuple[torch.dtype, int], list[tuple[Tensor, ...]]] = {}

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Replaces `tensor` by its sum over all ranks, with the same bits on each; returns it.

        Raises:
            RankLostError: A rank exited, has left, or did not call `all_reduce_` in time.
            LearnerError: Another rank sums a tensor of another size.
        """
        if self._fd is None:
            raise _lost(self.rank, "has left the group")
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            return tensor.copy_(self.all_reduce_(tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)))
        flat = tensor.detach().view(-1)
        length = _SLOT_BYTES // flat.element_size()
        for start in range(0, max(1, len(flat)), length):
            self._sum_piece(flat[start : start + length])
        return tensor

    def _sum_piece(self, flat: Tensor) -> None:
        key = flat.dtype, flat.nbytes
        if key not in self._views:
            self._views[key] = [each[:, : flat.nbytes].view(flat.dtype).unbind() for each in self._slots]
        slots = self._views[key][self._num_steps & 1]
        slots[self.rank].copy_(flat)
        self._wait_for_all(flat.nbytes)
        torch.add(slots[0], slots[1], out=flat)
        for slot in slots[2:]:
            flat.add_(slot)

    def _wait_for_all(self, num_bytes: int) -> None:
        """Sets this rank's mark to the next step, and waits until all marks are there, with as many bytes."""
        marks, lines = self._marks, self._lines
        self._num_steps += 1
        word = 1 + (self._num_steps & 1)  # of two that alternate: no rank is more than a step ahead
        lines[self.rank * 8 + word] = num_bytes
        marks[self.rank * 8] = num_steps = self._num_steps
        began_s: float | None = None
        for other in self._others:
            place = other * 8
            for _ in range(_NUM_READS):
                if marks[place] >= num_steps:
                    break
            else:
                began_s = began_s or time.monotonic()
                self._wait_for(other, began_s)
            if lines[place + word] != num_bytes:
                raise _of_another_length(self.rank, num_bytes, other, lines[place + word])

    def _wait_for(self, other: int, began_s: float) -> None:
        """Waits for one rank: yields the core at first, then sleeps, and checks that the rank is still there.

        Two ranks that only yield to each other can share a core for good while another core is idle: Linux looks for
        an idle core when a process wakes up. So there is one short sleep early in the wait.

        Args:
            other: The rank.
            began_s: When this sum began to wait.
        """
        place = other * 8
        checked_s, has_slept = 0.0, False
        while self._marks[place] < self._num_steps:
            waited_s = time.monotonic() - began_s
            if waited_s > _MOVE_AFTER_S and not has_slept:
                has_slept = True
                time.sleep(_SHORTEST_SLEEP_S)
                continue
            if waited_s < _YIELD_S:
                os.sched_yield()
                continue
            if waited_s > self._timeout_s:
                here = [str(rank) for rank in range(self.size) if self._marks[rank * 8] >= self._num_steps]
                late = f"did not come to a sum within {self._timeout_s:g} s; only ranks {', '.join(here)} did"
                raise _lost(other, late)
            if waited_s - checked_s > _CHECK_AFTER_S:
                checked_s = waited_s
                self._check(other)
            time.sleep(_SLEEP_S)

    def _check(self, other: int) -> None:
        """Raises if a rank that was here is gone before this step."""
        if self._fd is None or not self._lines[other * 8]:
            return
        with contextlib.suppress(BlockingIOError, PermissionError):  # it holds its lock
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, other)
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, other)
            if self._marks[other * 8] < self._num_steps:
                raise _lost(other, "has left, or its process has ended")

    def close(self) -> None:
        """Leaves: a rank that waits for this one, now or later, raises. May be called again."""
        if self._fd is not None:
            os.close(self._fd)  # which frees the lock
            self._fd = None


def _of_another_length(rank: int, num_bytes: int, other: int, other_bytes: int) -> LearnerError:
    return LearnerError(
        f"Rank {other} sums a tensor of {other_bytes} bytes, and rank {rank} one of {num_bytes}. Every rank must call "
        "all_reduce_ in the same order, with tensors of the same shape and dtype."
    )


def _lost(rank: int, what: str) -> RankLostError:
    return RankLostError(f"Rank {rank} {what}, and every rank takes part in every sum. Its log may say why.")
