"""Policies in the workers of one machine: loaded, given weights, and let act a chunk at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Chunk
from rayvec.node.chunk_memory import MOST_CHUNKS, PackedChunk
from rayvec.node.interrupts import Uninterrupted
from rayvec.node.weight_memory import WeightMemory
from rayvec.node.wire import WeightsRef
from rayvec.node.worker_link import WorkerLink
from rayvec.node.workers import Workers

__all__ = ["WorkerActing"]


@dataclass(slots=True)
class _Policy:
    """A policy that the workers hold: pickled, the memory of its weights, and the weights it acts with next."""

    pickled: bytes
    weights: WeightsRef
    memory: WeightMemory = field(default_factory=WeightMemory)


@dataclass(frozen=True, slots=True)
class _PendingChunk:
    """A chunk that was asked for.

    Attributes:
        key: Of the policy.
        weights: That the policy acts with.
        by_reference: Whether it goes to the object store.
        numbers: Of each worker's command.
    """

    key: int
    weights: WeightsRef
    by_reference: bool
    numbers: list[int]


class WorkerActing:
    """The policies of a process pool and its pending chunks, `MOST_CHUNKS` at most.

    Args:
        workers: The processes.
        links: To each.
        call_all: Calls a method of every worker, with arguments and descriptors, and waits.
        wait_all: Waits until each worker has done the command with its number, up to a deadline.
    """

    def __init__(
        self,
        workers: Workers,
        links: Sequence[WorkerLink],
        call_all: Callable[[str, tuple[Any, ...], Sequence[int]], object],
        wait_all: Callable[[Sequence[int], float | None], None],
    ) -> None:
        self._workers = workers
        self._links = links
        self._call_all = call_all
        self._wait_all = wait_all
        self._policies: dict[int, _Policy] = {}
        self._pending: list[_PendingChunk] = []
        self._num_begun = 0

    @property
    def num_under_way(self) -> int:
        """See :class:`~rayvec.pools.base.Acting`."""
        return len(self._pending)

    @property
    def has_room(self) -> bool:
        """See :class:`~rayvec.pools.base.Acting`."""
        return len(self._pending) < MOST_CHUNKS

    @property
    def by_reference(self) -> bool:
        """Whether the oldest pending chunk goes to the object store."""
        return self._pending[0].by_reference

    @property
    def policies(self) -> list[tuple[int, bytes, int]]:
        """What a replacement worker must know: key, pickled policy, and the descriptor of its weights' memory."""
        return [(key, policy.pickled, policy.memory.fd) for key, policy in self._policies.items()]

    def load(self, key: int, policy: bytes, version: int = 0) -> None:
        """See :class:`~rayvec.pools.base.Acting`."""
        held = self._policies[key] = _Policy(policy, WeightsRef(version))
        try:
            self._call_all("load_policy", (key, policy), [held.memory.fd])
        except BaseException:
            self._policies.pop(key).memory.close()
            raise

    def publish(self, key: int, version: int, weights: NDArray[np.float32]) -> None:
        """See :class:`~rayvec.pools.base.Acting`; one copy into shared memory, which waits for nothing."""
        policy = self._policies[key]
        in_use = {chunk.weights.slot for chunk in self._pending if chunk.key == key}
        policy.weights = WeightsRef(version, policy.memory.write(weights, in_use))

    def drop(self, key: int) -> None:
        """See :class:`~rayvec.pools.base.Acting`."""
        self._call_all("drop_policy", (key,), ())
        self._policies.pop(key).memory.close()

    def begin(self, key: int, num_steps: int, first_step: int, noise_seed: int, by_reference: bool = False) -> None:
        """Lets every worker take steps with a policy over its own slice; workers go from one chunk to the next."""
        assert self.has_room, "a chunk more than there is memory for"
        weights = self._policies[key].weights
        args = (key, num_steps, first_step, noise_seed, weights, self._num_begun % MOST_CHUNKS)
        with Uninterrupted():
            numbers = [link.post_call("rollout", *args, num_steps=num_steps) for link in self._links]
            self._pending.append(_PendingChunk(key, weights, by_reference, numbers))
            self._num_begun += 1

    def finish(self, timeout_s: float | None = None) -> list[PackedChunk]:
        """Waits for the oldest pending chunk; returns each worker's, packed.

        Raises:
            NotReady: It takes longer; the chunk stays pending, as it does after Ctrl-C.
            Exception: What the policy raised.
        """
        chunk = self._pending[0]
        self._wait_all(chunk.numbers, None if timeout_s is None else time.monotonic() + timeout_s)
        with Uninterrupted():
            replies = [link.take_reply(number) for link, number in zip(self._links, chunk.numbers, strict=True)]
            del self._pending[0]
        for _, failure in (each for reply in replies for each in reply.failures):
            raise failure.rebuild()
        return [reply.value for reply in replies]

    def done_chunks(self, link: WorkerLink) -> list[Chunk]:
        """Returns a worker's part of the pending chunks that it has finished, the oldest first."""
        replies = [link.peek_reply(chunk.numbers[link.index]) for chunk in self._pending]
        memory = self._workers.memories[link.index]
        return [reply.value.unpack(memory) for reply in replies if reply is not None and not reply.failures]

    def close(self) -> None:
        """Frees the memory of the weights."""
        for policy in self._policies.values():
            policy.memory.close()
        self._policies.clear()
