"""Loads policies into the workers of one machine, publishes weights to them, and requests chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Chunk, ChunkRequest
from rayvec.data.chunk import Cut
from rayvec.data.topology import Topology, split_groups
from rayvec.fleet.deferred_signals import Uninterrupted
from rayvec.node.chunk_memory import PackedChunk
from rayvec.node.node_inference import NodeInference
from rayvec.node.protocol import WeightsRef
from rayvec.node.slow_workers import EnoughSteps, StepTimes
from rayvec.node.step_memory import CHUNK_STEP_BITS
from rayvec.node.weight_memory import WeightMemory
from rayvec.node.worker_client import WorkerClient, pack_call
from rayvec.node.worker_processes import WorkerSet, within_file_limit
from rayvec.pools.base import MOST_CHUNKS, Acting, NotReady, deadline_in

__all__ = ["WorkerInference"]

_CUT_LOOK_S = 0.001
"""The interval at which a wait asks whether to cut the chunk, in seconds."""


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
    memory: WeightMemory


@dataclass(frozen=True, slots=True)
class _PendingChunk:
    """A requested chunk that has not been received.

    Attributes:
        key: Key of the policy.
        request: How many steps are requested, and which noise. A cut chunk has fewer steps.
        weights: The weights that the policy acts with.
        number: Number of the chunk, from 1.
        commands: Number of the command to each worker that takes it, by the worker's index.
    """

    key: int
    request: ChunkRequest
    weights: WeightsRef
    number: int
    commands: dict[int, int]

    @property
    def parts(self) -> Collection[int]:
        """The workers that take it."""
        return self.commands.keys()


class WorkerInference(Acting):
    """The policies of a process pool and its pending chunks, at most `MOST_CHUNKS` of each worker.

    Args:
        workers: The worker processes.
        clients: The client of each worker.
        arrays: The arrays of the shared block.
        call_all: Calls a method of every worker, with arguments and file descriptors, and waits.
        wait_all: Waits until workers, given by index, have completed the command with a number, or until a deadline.

    Attributes:
        own: The policies that act in this process, over the environments of all workers, in two groups.
    """

    def __init__(
        self,
        workers: WorkerSet,
        clients: Sequence[WorkerClient],
        arrays: Mapping[str, NDArray[Any]],
        call_all: Callable[[str, tuple[Any, ...], Sequence[int]], object],
        wait_all: Callable[[Mapping[int, int], float], None],
    ) -> None:
        self._workers = workers
        self._clients = clients
        self._call_all = call_all
        self._wait_all = wait_all
        self._policies: dict[int, _Policy] = {}
        self._pending: list[_PendingChunk] = []
        self._num_begun = 0
        self._num_begun_of = [0] * len(clients)
        self._arrays = arrays
        self._num_envs = np.diff(workers.bounds)
        self._step_times = StepTimes(self._num_envs)
        units: NDArray[np.int64] | None = workers.spaces.unit_bounds
        groups = 2 if units is None or len(units) > 2 else 1
        self.own = NodeInference(workers.bounds[-1], split_groups(Topology.of_this_node(workers.bounds), groups, units))

    def by_reference(self, part: int | None = None) -> bool:
        """Whether the oldest pending chunk, of all workers or of one, goes to the object store."""
        chunk: _PendingChunk = self._pending_of(part)[0]
        return chunk.request.by_reference

    @property
    def policies(self) -> list[tuple[int, bytes, int]]:
        """The policies to send to a replacement worker: key, pickled policy, descriptor of its weight memory."""
        return [(key, policy.pickled, policy.memory.fd) for key, policy in self._policies.items()]

    @property
    def num_pending(self) -> int:
        """See :class:`~rayvec.pools.base.Acting`."""
        return len(self._pending) + self.own.num_pending

    def has_room(self, key: int, part: int | None = None) -> bool:
        """See :class:`~rayvec.pools.base.Acting`."""
        if key in self.own:
            return not self._pending and self.own.has_room(key)
        return not self.own.num_pending and super().has_room(key, part)

    def load(self, key: int, policy: bytes, version: int = 0, *, on_node: bool = False) -> None:
        """See :class:`~rayvec.pools.base.Acting`."""
        if on_node:
            self.own.load(key, policy, version)
            return
        with within_file_limit():
            held = self._policies[key] = _Policy(policy, WeightsRef(version), WeightMemory(len(self._clients)))
            try:
                self._call_all("load_policy", (key, policy), [held.memory.fd])
            except BaseException:
                self._policies.pop(key).memory.close()
                raise

    def publish(self, key: int, version: int, weights: NDArray[np.float32]) -> None:
        """See :class:`~rayvec.pools.base.Acting`. Copies the weights into shared memory, unless they are there."""
        if key in self.own:
            self.own.publish(key, version, weights)
            return
        policy = self._policies[key]
        if version == policy.weights.version:
            return
        in_use = {chunk.weights.slot for chunk in self._pending if chunk.key == key}
        with within_file_limit():
            policy.weights = WeightsRef(version, policy.memory.write(weights, in_use))

    def drop(self, key: int) -> None:
        """See :class:`~rayvec.pools.base.Acting`."""
        if key in self.own:
            self.own.drop(key)
            return
        try:
            self._call_all("drop_policy", (key,), ())
        finally:
            self._policies.pop(key).memory.close()  # not before: a replacement worker repeats its pending chunks

    def release(self, part: int | None = None) -> None:
        """Forgets the oldest pending chunk of all workers, or of one, which :meth:`finish` has returned."""
        with Uninterrupted():
            for chunk in self._pending_of(part)[:1]:
                self._pending.remove(chunk)
                for index, command in chunk.commands.items():
                    self._clients[index].take_reply(command)

    def begin(self, key: int, request: ChunkRequest, part: int | None = None) -> None:
        """Requests a chunk from every worker, or from one, each over its own slice.

        A worker runs pending chunks in order.
        """
        assert self.has_room(key, part), "a chunk more than there is memory for"
        if key in self.own:
            self.own.begin(key, request)
            return
        self.own.note_absence()
        policy, number = self._policies[key], self._num_begun + 1
        args = (key, request, policy.weights, number)
        chunk = _PendingChunk(key, request, policy.weights, number, {})
        with Uninterrupted():
            for client in self._clients if part is None else [self._clients[part]]:
                piece = self._num_begun_of[client.index] % MOST_CHUNKS
                chunk.commands[client.index] = client.post_call(pack_call("rollout", *args, piece), request.num_steps)
                self._num_begun_of[client.index] += 1
            self._pending.append(chunk)
            self._num_begun = number

    def has_finished(self, part: int) -> bool:
        """Whether a worker has finished its oldest pending chunk, as far as its client has been polled."""
        return bool(self._pending_of(part)[0].commands[part] < self._clients[part].num_done)

    def finish(
        self, timeout_s: float | None = None, cut: Cut | None = None, part: int | None = None
    ) -> list[PackedChunk]:
        """Waits for the oldest pending chunk; returns each worker's, packed. It stays pending until :meth:`release`.

        Args:
            timeout_s: The longest wait. None waits without limit.
            cut: See :meth:`rayvec.pools.base.ActingPool.finish_rollout`.
            part: The only worker whose chunk is meant; None for a chunk of all workers.

        Raises:
            NotReady: It takes longer.
            Exception: What the policy raised.
        """
        chunk: _PendingChunk = self._pending_of(part)[0]
        deadline = deadline_in(timeout_s)
        if cut is not None:
            self._wait_or_cut(chunk, deadline, cut)
        self._wait_all(chunk.commands, deadline)
        replies = [self._clients[index].reply(command) for index, command in chunk.commands.items()]
        for _, failure in (each for reply in replies for each in reply.failures):
            self.release(part)
            raise failure.rebuild()
        return [reply.value for reply in replies]

    def _wait_or_cut(self, chunk: _PendingChunk, deadline: float, cut: Cut) -> None:
        """Waits until all workers have taken a chunk, or `cut` returns True: then each ends it after its present step.

        With :class:`EnoughSteps`, slow workers end it before that.
        """
        cuts = self._arrays["cut_chunk"]
        self._step_times.begin()
        while True:
            try:
                self._wait_all(chunk.commands, min(deadline_in(_CUT_LOOK_S), deadline))
                return
            except NotReady:
                if time.monotonic() >= deadline:
                    raise
            taken = self._steps_taken(chunk)
            if cut(int(taken @ self._num_envs)):
                cuts[:] = chunk.number
                return
            if isinstance(cut, EnoughSteps):
                cuts[self._step_times.too_slow(taken, cut.num_steps, chunk.request.num_steps)] = chunk.number

    def _steps_taken(self, chunk: _PendingChunk) -> NDArray[np.int64]:
        """Returns how many steps each environment of each worker has taken in a chunk, ``int64 [W]``."""
        numbers, steps = np.divmod(self._arrays["chunk_step"], 1 << CHUNK_STEP_BITS)
        steps //= self._num_envs
        return np.where(numbers == chunk.number, steps, np.where(numbers > chunk.number, chunk.request.num_steps, 0))

    def done_chunks(self, client: WorkerClient) -> list[Chunk]:
        """Returns a worker's part of each pending chunk that the worker has finished, oldest first."""
        commands = [chunk.commands[client.index] for chunk in self._pending_of(client.index)]
        replies = [client.reply(command) for command in commands if command < client.num_done]
        memory = self._workers.memories[client.index]
        return [reply.value.unpack(memory) for reply in replies if not reply.failures]

    def close(self) -> None:
        """Frees the memory of the weights."""
        for policy in self._policies.values():
            policy.memory.close()
        self._policies.clear()
