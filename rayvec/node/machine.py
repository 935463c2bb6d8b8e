"""The environments of one machine, in worker processes over shared memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from gymnasium import Space

from rayvec.data.partition import even_bounds
from rayvec.envs.factory import EnvFactory
from rayvec.envs.spaces import PoolSpaces
from rayvec.errors import duration
from rayvec.fleet.commands import ChildLost
from rayvec.fleet.fleet import Fleet
from rayvec.fleet.restarts import NO_RESTARTS, RestartPolicy, seed_of
from rayvec.node.local_worker import LocalWorker
from rayvec.node.memory import BlockSpec, MachineBlock
from rayvec.node.serve import WorkerSpec

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

    Attributes:
        spaces: The spaces and metadata of the environments.

    Raises:
        WorkerLostError: A worker died, or did not make its environments in time.
        Exception: The exception that the constructor of an environment raised. Its ``__cause__`` is an ``EnvError``.
    """

    def __init__(
        self,
        factory: EnvFactory,
        num_workers: int,
        *,
        node: str = "local",
        preload: Sequence[str] = (),
        restart_policy: RestartPolicy = NO_RESTARTS,
        first_id: int = 0,
    ) -> None:
        self.first_id, self._preload = first_id, tuple(preload)
        units = even_bounds(factory.num_envs, num_workers)
        self._block: MachineBlock | None = None
        self._factories = factory.in_parts(units)
        names = [f"node {node}, worker {k}" for k in range(num_workers)]
        self._specs = [
            WorkerSpec(places, first_id + first, name, restart_policy, factory.seed)
            for places, first, name in zip(self._factories.places, units, names, strict=False)
        ]
        self._workers: list[LocalWorker] = []
        try:
            for k, spec in enumerate(self._specs):
                self._workers.append(LocalWorker(spec, k, self._factories.fd, self._preload))
            found = [worker.spaces() for worker in self._workers]
            sizes = [stop - start for start, stop in pairwise(units)]
            counts = [spaces.num_envs or size for spaces, size in zip(found, sizes, strict=True)]
            self.spaces = PoolSpaces.join(list(zip(counts, found, strict=True)))
        except ChildLost as lost:
            self._kill_all()
            raise lost.error from lost
        except BaseException:
            self._kill_all()
            raise
        bounds = np.cumsum([0, *counts]).tolist()
        super().__init__(self._workers, bounds, self._replacement if restart_policy.restart else None)

    def allocate(self, observation: Space[Any], action: Space[Any]) -> None:
        """Allocates the shared arrays for these spaces, and attaches the workers to them."""
        block = self._block = MachineBlock(BlockSpec(observation, action, tuple(self.bounds.tolist())))
        self.layout, self.action_layout = block.layout, block.action_layout
        for k, worker in enumerate(self._workers):
            worker.attach(block, self.first_id + int(self.bounds[k]))
        self.open(block.arrays)

    def _replacement(self, k: int) -> LocalWorker:
        assert self._block is not None
        row = int(self.bounds[k])
        seed = seed_of(self.arrays, row, self.first_id + row)
        spec = self._specs[k]
        worker = LocalWorker(spec if seed is None else replace(spec, seed=seed), k, self._factories.fd, self._preload)
        worker.attach(self._block, self.first_id + row)
        self._workers[k] = worker
        return worker

    def worker_pids(self) -> list[int]:
        """Returns the process ids of the workers."""
        return [worker.pid for worker in self._workers]

    def _kill_all(self) -> None:
        for worker in self._workers:
            worker.kill()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Closes the environments and ends the workers. Those that run after `timeout_s` are killed."""
        if timeout_s <= 0:
            self._kill_all()
            killed = []
        else:
            deadline = time.monotonic() + timeout_s
            for worker in self._workers:
                worker.close()
            ended = [worker.join(max(0.0, deadline - time.monotonic())) for worker in self._workers]
            killed = [worker.name for worker, has_ended in zip(self._workers, ended, strict=True) if not has_ended]
        if killed:
            names = ", ".join(killed)
            logger.warning("killed after %s, since their environments had not closed: %s", duration(timeout_s), names)
        self._workers = []
        self._factories.close()
        if self._block is not None:
            self._block.close()
            self._block = None
