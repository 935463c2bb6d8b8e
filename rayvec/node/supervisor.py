"""Waits for workers, and restarts workers that exit or hang if the restart policy allows it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Chunk, Tree
from rayvec.data.layouts import index_tree
from rayvec.errors import WorkerLostError, without_remedy
from rayvec.fleet.deferred_signals import Uninterrupted
from rayvec.node.pipe import LOOK_S
from rayvec.node.process_watch import readable
from rayvec.node.step_memory import NodeBlock
from rayvec.node.worker_client import Reports, WorkerClient
from rayvec.node.worker_inference import WorkerInference
from rayvec.node.worker_processes import WorkerSet
from rayvec.pools.base import NotReady, seconds_until
from rayvec.pools.restart_state import EpisodeState, LastAnswers, RestartBudget, seed_of

__all__ = ["Supervisor"]

logger = logging.getLogger(__name__)


class Supervisor:
    """Waits for the workers of one pool and restarts them.

    The episodes of a restarted worker end as truncated, at the last true observation.

    Args:
        workers: The worker processes.
        clients: The client of each worker.
        reports: What the workers have sent beside the arrays.
        block: The pool's shared block.
        pending: Whether each environment has a command whose result has not been received, ``bool [N]``. Shared
            with the pool.
        command_of: Number of each environment's last command, ``int64 [N]``. Shared with the pool.
        server_lost: See :class:`~rayvec.node.process_pool.ProcessPool`.

    Attributes:
        last: The last result of each environment, or None if the restart policy restarts nothing.
        acting: The policies to send to replacement workers.
        closed: Whether the pool is closed. A closed pool restarts no workers.
        num_replaced: How many workers were replaced.
        broken_by: The exception, as from a signal handler, that has ended a command half-way; None if there was none.
    """

    acting: WorkerInference

    def __init__(
        self,
        workers: WorkerSet,
        clients: Sequence[WorkerClient],
        reports: Reports,
        block: NodeBlock,
        pending: NDArray[np.bool_],
        command_of: NDArray[np.int64],
        server_lost: Callable[[Exception], Exception] | None,
    ) -> None:
        self.closed = False
        self._workers = workers
        self._restart_policy = workers.restart_policy
        self._clients = clients
        self._reports = reports
        self._block = block
        self._arrays = block.arrays
        self._pending = pending
        self._command_of = command_of
        self._server_lost = server_lost
        self._obs: Tree = block.obs
        self.last = LastAnswers(self._obs, len(command_of)) if self._restart_policy.restart else None
        self._budget = RestartBudget()
        self._look_at_s = 0.0
        self.broken_by: BaseException | None = None
        self.num_replaced = 0

    def arm_event(self) -> None:
        """Clears the event of the block. Every command that completes from here on signals it."""
        self._arrays["wants_event"][0] = True
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._block.event_fd)

    def wait_all(self, numbers: Mapping[int, int], deadline: float) -> None:
        """Waits until workers have completed a command. Ctrl-C leaves the state unchanged.

        Args:
            numbers: Number of the command, by the worker's index.
            deadline: A ``time.monotonic`` time.

        Raises:
            NotReady: The deadline was reached before all workers had completed.
        """
        while True:
            with Uninterrupted():
                self.poll_all()
                clients = [(self._clients[index], number) for index, number in numbers.items()]
                missing = [client for client, number in clients if client.num_done <= number]
                if not missing:
                    self._arrays["wants_event"][0] = False
                    return
            if time.monotonic() >= deadline:
                raise NotReady(f"{missing[0].where} has not answered in time")
            readable([self._block.event_fd], min(LOOK_S, seconds_until(deadline)))

    def poll_all(self) -> None:
        """Records the completed commands of all workers, and restarts workers that have exited or hang."""
        with Uninterrupted():
            self.arm_event()
            for client in self._clients:
                self.poll(client)
            self.look_after_all()

    def poll(self, client: WorkerClient) -> None:
        """Records a worker's completed commands. Restarts the worker if it exited in the middle of a reply."""
        try:
            client.poll()
        except WorkerLostError as error:
            self._restart_worker(client, error)

    def look_after_all(self) -> None:
        """Restarts workers that have exited or hang. Checks at most every 0.1 s."""
        if time.monotonic() < self._look_at_s:
            return
        self._look_at_s = time.monotonic() + LOOK_S
        for client in self._clients:
            if client.num_done < client.num_posted:
                self._look_after(client)

    def wait(self, client: WorkerClient, number: int, deadline: float) -> None:
        """Waits for a command. A worker that exits or hangs is restarted if the restart policy allows it.

        Raises:
            NotReady: The deadline was reached.
            WorkerLostError: The worker exited or hangs, and may not be restarted. Or an exception has ended an earlier
                command half-way, so that a wait might not end.
        """
        if self.broken_by is not None:
            raise WorkerLostError(
                "No other exception may end a call of the environments before their results have arrived.",
                expected="calls that return, or raise what an environment raised",
                got=f"{self.broken_by!r} in an earlier call, as from a signal handler",
                remedy="Pass a timeout to call_wait() in place of the handler, or close the environments after it.",
            ) from self.broken_by
        while True:
            try:
                client.wait(number, self._until(client, number, deadline))
                return
            except NotReady:
                if time.monotonic() >= deadline:
                    raise
                self.look_after_all()  # the others' commands grow older meanwhile
                if client.num_done <= number:
                    self._restart_if_overdue(client)
            except WorkerLostError as error:
                self._restart_worker(client, error)
            except BaseException as error:
                self.broken_by = error
                raise

    def _until(self, client: WorkerClient, number: int, deadline: float) -> float:
        """Returns the time until which to wait for a command before checking whether its worker hangs."""
        if client.num_done > number:
            return deadline
        _, limit_s = self._limit_of(client)
        if limit_s is None and not client.is_starting:
            return deadline
        client.note_progress()
        overdue_in = math.inf if limit_s is None else client.overdue_in(limit_s)
        return min(time.monotonic() + min(LOOK_S, overdue_in), deadline)

    def _look_after(self, client: WorkerClient) -> None:
        """Restarts a worker that has exited or exceeds the time limit of its oldest command."""
        ended = client.ended()
        self.poll(client)  # completed commands were in time, even if this check is late
        if client.num_done == client.num_posted:
            return
        if ended:
            self._restart_worker(client, client.lost())
        else:
            self._restart_if_overdue(client)

    def _restart_if_overdue(self, client: WorkerClient) -> None:
        start_s = self._restart_policy.start_timeout_s
        name, limit_s = self._limit_of(client)
        client.note_progress()
        if client.is_starting:
            if client.startup_s > start_s:
                name = "start_timeout_s"
                self._restart_worker(client, client.hangs(name, start_s), client.startup_s, name)
        elif limit_s is not None and client.overdue_in(limit_s) <= 0:
            self._restart_worker(client, client.hangs(name, limit_s), client.waited_s, name)

    def _limit_of(self, client: WorkerClient) -> tuple[str, float | None]:
        """Returns the name and the seconds of the limit for the oldest pending command of a worker."""
        if client.is_loading:
            return "start_timeout_s", self._restart_policy.start_timeout_s
        return "step_timeout_s", self._restart_policy.step_timeout_s

    def _restart_worker(
        self, client: WorkerClient, error: WorkerLostError, hung_s: float = 0.0, limit: str | None = None
    ) -> None:
        """Restarts a worker, posts its pending commands again, and ends its interrupted episodes.

        Args:
            client: The client of the worker.
            error: The error to raise if the restart policy restarts nothing.
            hung_s: Seconds that the pool waited for the worker, if it hangs.
            limit: Name of the limit that it exceeded, if it hangs.

        Raises:
            WorkerLostError: The restart policy restarts nothing, or the restart budget is spent.
            Exception: The exception that the constructor of an environment raised during a restart.
        """
        if self.closed:  # another thread has closed the pool
            raise error
        if self._server_lost is not None and self._workers.server.ended():
            raise self._server_lost(error) from error
        if self.last is None:
            if hung_s:
                client.kill()  # else close() would wait for it
            raise error
        client.kill()  # a slow worker must not overwrite the restored state
        client.raise_what_it_said()
        if not self._budget.spend(client.index, client.startup_s if client.is_starting else hung_s):
            raise WorkerLostError(
                "A worker that ends again and again is not restarted for ever.",
                expected=RestartBudget.rule(),
                got=f"one more of {client.where}",
                remedy="Look into the system's log for what ends it."
                if limit is None
                else f"Raise {limit}, which it exceeded, or find out why its environments take so long.",
            ) from error
        for chunk in self.acting.done_chunks(client):
            self.note_chunk(client, chunk)
        rows, ids = slice(client.start, client.stop), np.arange(client.start, client.stop)
        finished = self._pending[rows] & (self._command_of[rows] < client.num_done)
        self._keep_last(ids[finished])
        self.last.restore(ids[~finished], self._obs)
        episode = self._arrays["episode"][rows]
        cut = (episode == EpisodeState.CUT) | (self.last.mid_episode(rows) & (episode != EpisodeState.NEW))
        episode[cut] = EpisodeState.CUT
        episode[episode == EpisodeState.RUNNING] = EpisodeState.ENDED
        units = self._workers.spaces.unit_bounds
        named = ids if units is None else np.intersect1d(ids, units)  # a native sub-batch has the seed of its first row
        seeds = [seed_of(self._arrays, row, self._workers.first_id + row) for row in named.tolist()]
        self._arrays["restarts"][rows] += 1
        logger.warning("restarted %s, seeds %s: %s", client.where, seeds, without_remedy(error))
        self.num_replaced += 1
        client.reconnect(self._workers.restart(client.index, client.num_done, self.acting.policies))

    def note_chunk(self, client: WorkerClient, chunk: Chunk) -> None:
        """Stores the end of a worker's finished chunk. Environments that fail later resume from there."""
        rows = slice(client.start, client.stop)
        if self._obs is None:
            self.know_objects(rows, chunk.last_obs)
        if self.last is not None:
            self.last.requested(rows, resets=True)
            self.last.keep(rows, chunk.last_obs, chunk.terminated[-1], chunk.truncated[-1])

    def know_objects(self, rows: slice, obs: NDArray[Any]) -> None:
        """Stores observations that are objects, ``object [n]``, of the consecutive environments in `rows`."""
        self._reports.objects.update(zip(range(len(self._command_of))[rows], obs, strict=True))

    def _keep_last(self, select: Any) -> None:
        assert self.last is not None
        obs = None if self._obs is None else index_tree(self._obs, select)
        self.last.keep(select, obs, self._arrays["terminated"][select], self._arrays["truncated"][select])
