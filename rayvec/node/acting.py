"""Loads policies into the workers of one machine, publishes weights to them, and requests chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Chunk
from rayvec.node.chunk_memory import PackedChunk
from rayvec.node.interrupts import Uninterrupted
from rayvec.node.weight_memory import WeightMemory
from rayvec.node.wire import WeightsRef
from rayvec.node.worker_link import WorkerLink
from rayvec.node.workers import Workers
from rayvec.pools.base import MOST_CHUNKS, Acting, deadline_in

__all__ = ["WorkerActing"]


@dataclass(slots=True)
class _Policy:
    """A policy that the workers hold.

    Attributes:
        pickled: The pickled policy.
        weights: The weights for the next chunk.
        memory: The shared memory of its weights.
    """

    pickled: bytes
    weights: WeightsRef
    memory: WeightMemory = field(default_factory=WeightMemory)


@dataclass(frozen=True, slots=True)
class _PendingChunk:
    """A requested chunk that has not been received.

    Attributes:
        key: Key of the policy.
        weights: The weights that the policy acts with.
        by_reference: Whether the chunk goes to the object store.
        numbers: Command number for each worker.
    """

    key: int
    weights: WeightsRef
    by_reference: bool
    numbers: list[int]


class WorkerActing(Acting):
    """The policies of a process pool and its pending chunks, at most `MOST_CHUNKS`.

    Args:
        workers: The worker processes.
        links: The link to each worker.
        call_all: Calls a method of every worker, with arguments and file descriptors, and waits.
        wait_all: Waits until each worker has completed the command with its number, or until a deadline.
    """

    def __init__(
        self,
        workers: Workers,
        links: Sequence[WorkerLink],
        call_all: Callable[[str, tuple[Any, ...], Sequence[int]], object],
        wait_all: Callable[[Sequence[int], float], None],
    ) -> None:
        self._workers = workers
        self._links = links
        self._call_all = call_all
        self._wait_all = wait_all
        self._policies: dict[int, _Policy] = {}
        self._pending: list[_PendingChunk] = []
        self._num_begun = 0

    @property
    def by_reference(self) -> bool:
        """Whether the oldest pending chunk goes to the object store."""
        return self._pending[0].by_reference

    @property
    def policies(self) -> list[tuple[int, bytes, int]]:
        """The policies to send to a replacement worker: key, pickled policy, descriptor of its weight memory."""
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
        """See :class:`~rayvec.pools.base.Acting`. Copies the weights into shared memory, unless they are there."""
        policy = self._policies[key]
        if version == policy.weights.version:
            return
        in_use = {chunk.weights.slot for chunk in self._pending if chunk.key == key}
        policy.weights = WeightsRef(version, policy.memory.write(weights, in_use))

    def drop(self, key: int) -> None:
        """See :class:`~rayvec.pools.base.Acting`."""
        self._call_all("drop_policy", (key,), ())
        self._policies.pop(key).memory.close()

    def release(self) -> None:
        """Forgets the oldest pending chunk, which :meth:`finish` has returned."""
        with Uninterrupted():
            if self._pending:
                chunk = self._pending.pop(0)
                for link, number in zip(self._links, chunk.numbers, strict=True):
                    link.take_reply(number)

    def begin(self, key: int, num_steps: int, first_step: int, noise_seed: int, by_reference: bool = False) -> None:
        """Requests a chunk from every worker, each over its own slice. A worker runs pending chunks in order."""
        assert self.has_room, "a chunk more than there is memory for"
        weights = self._policies[key].weights
        args = (key, num_steps, first_step, noise_seed, weights, self._num_begun % MOST_CHUNKS)
        with Uninterrupted():
            numbers = [link.post_call("rollout", *args, num_steps=num_steps) for link in self._links]
            self._pending.append(_PendingChunk(key, weights, by_reference, numbers))
            self._num_begun += 1

    def finish(self, timeout_s: float | None = None) -> list[PackedChunk]:
        """Waits for the oldest pending chunk; returns each worker's, packed. It stays pending until :meth:`release`.

        Raises:
            NotReady: It takes longer.
            Exception: What the policy raised.
        """
        chunk = self._pending[0]
        self._wait_all(chunk.numbers, deadline_in(timeout_s))
        replies = [link.reply(number) for link, number in zip(self._links, chunk.numbers, strict=True)]
        for _, failure in (each for reply in replies for each in reply.failures):
            self.release()
            raise failure.rebuild()
        return [reply.value for reply in replies]

    def done_chunks(self, link: WorkerLink) -> list[Chunk]:
        """Returns a worker's part of each pending chunk that the worker has finished, oldest first."""
        numbers = [chunk.numbers[link.index] for chunk in self._pending]
        replies = [link.reply(number) for number in numbers if number < link.num_done]
        memory = self._workers.memories[link.index]
        return [reply.value.unpack(memory) for reply in replies if not reply.failures]

    def close(self) -> None:
        """Frees the memory of the weights."""
        for policy in self._policies.values():
            policy.memory.close()
        self._policies.clear()
