"""The environments of one machine, in worker processes over shared memory."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from rayvec.data.resources import EnvResources
from rayvec.data.topology import Topology
from rayvec.data.trees import tree_map
from rayvec.envs.pickled_parts import PickledParts
from rayvec.fleet.commands import ChildLost, Ticket
from rayvec.fleet.fleet import Fleet
from rayvec.fleet.restarts import DEFAULT_RULES, EnvRules, seed_of
from rayvec.node.local_worker import LocalWorker
from rayvec.node.memory import CHUNK_STEP_BITS, BlockSpec, ChunkColumns, ChunkPlace, MachineBlock
from rayvec.node.processes import allow_open_files
from rayvec.node.worker_main import WorkerSpec
from rayvec.node.worker_share import worker_shares
from rayvec.rollout.loop import ChunkRequest


class MachineSpec(NamedTuple):
    """What a machine starts with.

    Attributes:
        parts: The pickled factory of each worker, which only the worker loads.
        first_id: Global index of the first environment, or native sub-batch.
        seed: As of :class:`~rayvec.envs.factory.EnvFactory`.
        name: Name of the machine, for errors.
        preload: Modules that the fork server imports once for all workers.
        env_rules: What happens to environments that raise, hang or have run for long, and their limits.
        resources: What each environment needs; None for what its worker happens to have.
    """

    parts: PickledParts
    first_id: int
    seed: int | None
    name: str
    preload: tuple[str, ...] = ()
    env_rules: EnvRules = DEFAULT_RULES
    resources: EnvResources | None = None


class Machine(Fleet):
    """A fleet of workers. The constructor starts them; :meth:`allocate` follows, once their spaces are known.

    Args:
        spec: What it starts with.
        gpus: The GPUs that are claimed for all environments; None for those that this process sees.

    Raises:
        WorkerLostError: A worker died, or did not make its environments in time.
        Exception: The exception that the constructor of an environment raised. Its ``__cause__`` is an ``EnvError``.
    """

    transports = ("shm",)
    has_nodes = False
    _block: MachineBlock

    def __init__(self, spec: MachineSpec, gpus: Sequence[str] | None = None) -> None:
        self.first_id, self._spec, rules, places = spec.first_id, spec, spec.env_rules, spec.parts.places
        units = [0, *(each.stop for each in places)]
        shares = worker_shares(spec.resources, units, gpus)
        allow_open_files(len(places))
        self._slots: dict[tuple[int, int], deque[int]] = {}
        self._num_chunks = 0
        self._workers = [
            WorkerSpec(each, spec.first_id + each.start, f"node {spec.name}, worker {k}", rules, spec.seed, share)
            for k, (each, share) in enumerate(zip(places, shares, strict=True))
        ]
        starting = (LocalWorker(worker, k, spec.parts.fd, spec.preload) for k, worker in enumerate(self._workers))
        start = self._replacement if rules.restart else None
        super().__init__(starting, start, first_id=spec.first_id, replay_calls=rules.replay_calls)

    def allocate(
        self,
        observation: Space[Any],
        action: Space[Any],
        *,
        first_id: int | None = None,
        state: dict[str, Any] | None = None,
    ) -> None:
        """Allocates the shared arrays for these spaces, and attaches the workers to them.

        Args:
            observation: Observation space of one environment.
            action: Action space of one environment.
            first_id: Global index of the first environment, where that of the constructor counts native sub-batches.
            state: What the arrays begin with, in place of another machine that was lost.
        """
        self.first_id = self.first_id if first_id is None else first_id
        block = self._block = MachineBlock(BlockSpec(observation, action, tuple(self.bounds.tolist())))
        self.layout, self.action_layout = block.layout, block.action_layout
        if state is not None:
            tree_map(lambda array, given: array.__setitem__(slice(None), given), block.arrays, state)
        self.open(block.arrays, block)

    def _placed(self, request: ChunkRequest, rows: NDArray[np.int64]) -> ChunkRequest:
        """Chooses where workers write a chunk, and puts its weights there: two slots alternate for each set of rows.

        Of each environment at most two chunks may be pending, or not yet copied.
        """
        self._num_chunks += 1
        key = int(rows[0]), len(rows)
        slots = self._slots.setdefault(key, deque(range(2 * len(self._slots), 2 * len(self._slots) + 2)))
        slots.rotate()
        num_weights = 0 if request.weights is None else request.weights.size
        num_bytes = 4 * num_weights + request.num_steps * len(rows) * self._block.row_bytes
        place = ChunkPlace(self._num_chunks, slots[0], num_bytes, *key, num_weights)
        if request.weights is not None:
            ChunkColumns(self._block, place).weights[:] = request.weights
        return request._replace(weights=None, place=place)

    def steps_in(self, ticket: Ticket) -> NDArray[np.int64]:
        """Returns how many steps the environments of each worker have taken in a pending chunk, ``int64 [W]`` each."""
        request, owners = ticket.command.rest, list(ticket.shares)
        numbers, steps = np.divmod(self._block.by_worker["chunk_step"][owners], 1 << CHUNK_STEP_BITS)
        steps //= np.diff(self.bounds)[owners]
        has_taken_all = numbers > request.place.number
        return np.where(numbers == request.place.number, steps, has_taken_all * request.num_steps)

    def cut(self, ticket: Ticket) -> None:
        """Ends a pending chunk after the step that each worker is taking."""
        self._block.by_worker["cut_chunk"][list(ticket.shares)] = ticket.command.rest.place.number

    def _replacement(self, k: int, lost: ChildLost) -> LocalWorker:
        row = int(self.bounds[k])
        seed = seed_of(self.arrays, row, self.first_id + row)
        worker = self._workers[k] if seed is None else replace(self._workers[k], seed=seed)
        return LocalWorker(worker, k, self._spec.parts.fd, self._spec.preload)

    def pids(self) -> dict[str, list[int]]:
        """Returns the id of this process and those of the workers, by the name of the node."""
        return {self._spec.name: [os.getpid(), *(worker.pid for worker in self.children)]}

    @property
    def topology(self) -> Topology:
        """This node, and the environments of each worker."""
        return Topology.of_this_node(self.bounds.tolist())

    def close(self, timeout_s: float | None = None) -> None:
        """Closes the environments and ends the workers. Those that run after `timeout_s` (10 s) are killed."""
        super().close(timeout_s)
        self._spec.parts.close()
        if hasattr(self, "_block"):
            self._block.close()
            del self._block
