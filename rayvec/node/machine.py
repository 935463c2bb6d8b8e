"""The environments of one machine, in worker processes over shared memory."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from rayvec.data.resources import EnvResources
from rayvec.data.topology import Topology, even_bounds
from rayvec.data.trees import tree_map
from rayvec.envs.factory import EnvFactory
from rayvec.envs.spaces import PoolSpaces
from rayvec.errors import duration
from rayvec.fleet.commands import ChildLost, Command, Op, Ticket
from rayvec.fleet.fleet import Fleet
from rayvec.fleet.restarts import NO_RESTARTS, RestartPolicy, seed_of
from rayvec.node.local_worker import LocalWorker
from rayvec.node.memory import CHUNK_STEP_BITS, BlockSpec, ChunkColumns, MachineBlock
from rayvec.node.processes import allow_open_files
from rayvec.node.worker_main import WorkerSpec
from rayvec.node.worker_share import worker_shares
from rayvec.rollout.policy_host import ChunkOrder, ChunkPlace

__all__ = ["Machine"]

logger = logging.getLogger(__name__)

CLOSE_S = 10.0


class Machine(Fleet):
    """A fleet of workers. The constructor starts them; :meth:`allocate` follows, once their spaces are known.

    Args:
        factory: Makes all environments, or native sub-batches.
        num_workers: How many workers there are.
        node: Name of the machine, for errors.
        preload: Modules that the fork server imports once for all workers.
        restart_policy: Whether environments that raise, and workers that die or hang, are replaced; and their limits.
        first_id: Global index of the first environment.
        resources: What each environment needs; None for what its worker happens to have.
        gpus: The GPUs that are claimed for all environments; None for those that this process sees.

    Attributes:
        spaces: The spaces and metadata of the environments.

    Raises:
        WorkerLostError: A worker died, or did not make its environments in time.
        Exception: The exception that the constructor of an environment raised. Its ``__cause__`` is an ``EnvError``.
    """

    transports = ("shm",)
    has_nodes = False

    def __init__(
        self,
        factory: EnvFactory,
        num_workers: int,
        *,
        node: str = "local",
        preload: Sequence[str] = (),
        restart_policy: RestartPolicy = NO_RESTARTS,
        first_id: int = 0,
        resources: EnvResources | None = None,
        gpus: Sequence[str] | None = None,
    ) -> None:
        self.first_id, self._preload = first_id, tuple(preload)
        units = even_bounds(factory.num_envs, num_workers)
        shares = worker_shares(resources, units, gpus)
        allow_open_files(num_workers)
        self._block: MachineBlock | None = None
        self._slots: dict[tuple[int, int], deque[int]] = {}
        self._num_chunks = 0
        self._factories = factory.in_parts(units)
        names = [f"node {node}, worker {k}" for k in range(num_workers)]
        self._specs = [
            WorkerSpec(places, first_id + first, name, restart_policy, factory.seed, share)
            for places, first, name, share in zip(self._factories.places, units, names, shares, strict=False)
        ]
        self.children: list[LocalWorker] = []
        try:
            for k, spec in enumerate(self._specs):
                self.children.append(LocalWorker(spec, k, self._factories.fd, self._preload))
                if k == 0:
                    self.children[0].pid  # noqa: B018  # a fork server that can't import shows with the first worker
            found = [worker.spaces() for worker in self.children]
            sizes = [stop - start for start, stop in pairwise(units)]
            counts = [spaces.num_envs or size for spaces, size in zip(found, sizes, strict=True)]
            self.spaces = PoolSpaces.join(list(zip(counts, found, strict=True)))
        except ChildLost as lost:
            self.close(0.0)
            raise lost.error from lost
        except BaseException:
            self.close(0.0)
            raise
        bounds = np.cumsum([0, *counts]).tolist()
        start = self._replacement if restart_policy.restart else None
        super().__init__(self.children, bounds, start, first_id=first_id, replay_calls=restart_policy.replay_calls)

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
        for k, worker in enumerate(self.children):
            worker.attach(block, self.first_id + int(self.bounds[k]))
        if state is not None:
            tree_map(lambda array, given: array.__setitem__(slice(None), given), block.arrays, state)
        self.open(block.arrays)

    def post(self, command: Command) -> Ticket:
        """Starts a command. Of each environment at most two chunks may be pending, or not yet copied."""
        if command.op == Op.ROLLOUT:
            command = command._replace(rest=self._placed(command.rest, command.rows))
        return super().post(command)

    def _placed(self, order: ChunkOrder, rows: NDArray[np.int64]) -> ChunkOrder:
        """Chooses where workers write a chunk, and puts its weights there: two slots alternate for each set of rows."""
        assert self._block is not None
        self._num_chunks += 1
        key = int(rows[0]), len(rows)
        slots = self._slots.setdefault(key, deque(range(2 * len(self._slots), 2 * len(self._slots) + 2)))
        slots.rotate()
        num_weights = 0 if order.weights is None else order.weights.size
        num_bytes = 4 * num_weights + order.request.num_steps * len(rows) * self._block.row_bytes
        place = ChunkPlace(self._num_chunks, slots[0], num_bytes, *key, num_weights)
        if order.weights is not None:
            ChunkColumns(self._block, place).weights[:] = order.weights
        return order._replace(weights=None, place=place)

    def steps_in(self, ticket: Ticket) -> NDArray[np.int64]:
        """Returns how many steps the environments of each worker have taken in a pending chunk, ``int64 [W]`` each."""
        order, owners = ticket.command.rest, list(ticket.shares)
        numbers, steps = np.divmod(self._shared("chunk_step")[owners], 1 << CHUNK_STEP_BITS)
        steps //= np.diff(self.bounds)[owners]
        has_taken_all = numbers > order.place.number
        return np.where(numbers == order.place.number, steps, has_taken_all * order.request.num_steps)

    def cut(self, ticket: Ticket) -> None:
        """Ends a pending chunk after the step that each worker is taking."""
        self._shared("cut_chunk")[list(ticket.shares)] = ticket.command.rest.place.number

    def _shared(self, name: str) -> NDArray[np.int64]:
        assert self._block is not None
        return self._block.by_worker[name]

    def _replacement(self, k: int, lost: ChildLost) -> LocalWorker:
        assert self._block is not None
        row = int(self.bounds[k])
        seed = seed_of(self.arrays, row, self.first_id + row)
        spec = self._specs[k]
        worker = LocalWorker(spec if seed is None else replace(spec, seed=seed), k, self._factories.fd, self._preload)
        worker.attach(self._block, self.first_id + row)
        return worker

    def worker_pids(self) -> list[int]:
        """Returns the process ids of the workers."""
        return [worker.pid for worker in self.children]

    def pids(self) -> dict[str, list[int]]:
        """Returns the id of this process and those of the workers, by the name of the node."""
        return {self.topology.nodes[0].name: [os.getpid(), *self.worker_pids()]}

    @property
    def topology(self) -> Topology:
        """This node, and the environments of each worker."""
        return Topology.of_this_node(self.bounds.tolist())

    def close(self, timeout_s: float | None = None) -> None:
        """Closes the environments and ends the workers. Those that run after `timeout_s` (10 s) are killed."""
        timeout_s = CLOSE_S if timeout_s is None else timeout_s
        self._start = None  # a wait of another thread replaces no worker
        deadline = time.monotonic() + timeout_s
        for worker in self.children if timeout_s > 0 else ():
            worker.close()
        killed = [worker.name for worker in self.children if not worker.join(max(0.0, deadline - time.monotonic()))]
        if killed and timeout_s > 0:
            names = ", ".join(killed)
            logger.warning("killed after %s, since their environments had not closed: %s", duration(timeout_s), names)
        self.children = []
        self._factories.close()
        if self._block is not None:
            self._block.close()
            self._block = None
