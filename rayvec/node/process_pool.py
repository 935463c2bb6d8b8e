"""The pool of one machine, with worker processes that each hold a slice of the environments."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from rayvec.data import Chunk, ChunkRequest, ChunkSummary, RawInfo, Rollout, RolloutTimes, StepBatch, Topology, Tree
from rayvec.data.chunk import Cut
from rayvec.data.join_chunks import join_chunks, summarize
from rayvec.data.layouts import index_tree, split_actions
from rayvec.data.partition import even_bounds
from rayvec.envs.factory import EnvFactory
from rayvec.envs.pickled_parts import PickledParts
from rayvec.errors import RemoteFailure
from rayvec.node.object_store import as_rollout, check_object_store
from rayvec.node.parted_pool import PartedPool
from rayvec.node.protocol import Op
from rayvec.node.step_memory import NodeBlock
from rayvec.node.supervisor import Supervisor
from rayvec.node.worker_client import Reports, WorkerClient, pack_call
from rayvec.node.worker_inference import WorkerInference
from rayvec.node.worker_processes import WorkerSet
from rayvec.pools.base import NO_RESTARTS, Autoreset, PoolSpaces, RestartPolicy, deadline_in
from rayvec.pools.ids_by_owner import Part, Plan
from rayvec.pools.restart_state import NodeState

__all__ = ["ProcessPool"]

_CLOSE_S = 10.0

logger = logging.getLogger(__name__)


class ProcessPool(PartedPool):
    """Steps environments in worker processes on this machine, through shared memory.

    The pool starts in two steps, because the array shapes are known only after the environments are made. The
    constructor starts the workers and sets :attr:`spaces`. :meth:`allocate` then creates the arrays. Environment ids
    are local to this machine and start at 0. Infos hold global ids.

    Args:
        factories: A pickled factory of environments for each worker.
        worker_bounds: Global indices: worker k holds ``range(worker_bounds[k], worker_bounds[k + 1])``.
        node: Name of the machine, for errors.
        preload: Modules that the fork server imports once for all workers.
        restart_policy: The restart policy for environments that raise, and for workers that exit or hang.
        server_lost: Makes the error to raise if the fork server exits, which ends every worker. None applies the
            restart policy to each worker instead.

    Attributes:
        acting: The policies that act in the workers.

    Raises:
        WorkerLostError: A worker exited, or did not make its environments in time.
        Exception: The exception that the constructor of an environment raised. Its ``__cause__`` is an ``EnvError``.
    """

    transports: tuple[str, ...] = ("shm",)

    def __init__(
        self,
        factories: PickledParts,
        worker_bounds: Sequence[int],
        node: str = "local",
        preload: Sequence[str] = (),
        restart_policy: RestartPolicy = NO_RESTARTS,
        server_lost: Callable[[Exception], Exception] | None = None,
    ) -> None:
        self._workers = WorkerSet(factories, worker_bounds, node, preload, restart_policy)
        spaces: PoolSpaces = self._workers.spaces
        super().__init__(self._workers.bounds[:-1], self._workers.bounds[-1], spaces.unit_bounds)
        self.spaces = spaces
        self.native_mode = spaces.native_mode
        self.first_id = self._workers.first_id
        self.topology = Topology.of_this_node(self._workers.bounds)
        self._server_lost = server_lost
        self._block: NodeBlock | None = None
        self._clients: list[WorkerClient] = []
        self._reports = Reports(self.first_id)
        self._turn = 0
        self._command_of = np.zeros(self.num_envs, np.int64)

    @classmethod
    def of(
        cls,
        factory: EnvFactory,
        num_workers: int,
        *,
        node: str = "local",
        preload: Sequence[str] = (),
        restart_policy: RestartPolicy = NO_RESTARTS,
        first_id: int = 0,
    ) -> ProcessPool:
        """Starts workers for all environments of a factory. The caller must call :meth:`allocate` next."""
        bounds = even_bounds(factory.num_envs, num_workers)
        global_bounds = [first_id + bound for bound in bounds]
        return cls(factory.in_parts(bounds), global_bounds, node, preload, restart_policy)

    @classmethod
    def start(
        cls, factory: EnvFactory, num_workers: int, *, restart_policy: RestartPolicy = NO_RESTARTS
    ) -> ProcessPool:
        """Starts workers for all environments of a factory and allocates the arrays."""
        pool = cls.of(factory, num_workers, restart_policy=restart_policy)
        pool.allocate(pool.spaces.observation, pool.spaces.action)
        return pool

    def allocate(
        self,
        observation: Space[Any],
        action: Space[Any],
        state: NodeState | None = None,
        first_id: int | None = None,
    ) -> None:
        """Allocates the shared memory for these spaces and sends it to the workers.

        Args:
            observation: Observation space of one environment.
            action: Action space of one environment.
            state: State of the lost node that this node replaces, if any.
            first_id: Global index of the first environment, where it was not known before.
        """
        workers = self._workers
        if first_id is not None:
            self.first_id = workers.first_id = self._reports.first_id = first_id
        try:
            block = self._block = workers.allocate(observation, action, state)
        except BaseException:
            self.close()
            raise
        self.layout, self.action_layout = block.layout, block.action_layout
        self._arrays = block.arrays
        self._obs: Tree = block.obs
        self._clients = [
            WorkerClient(block, k, process, workers.where(k), self._reports)
            for k, process in enumerate(workers.processes)
        ]
        supervisor = self._supervisor = Supervisor(
            workers, self._clients, self._reports, block, self._pending, self._command_of, self._server_lost
        )
        self._last = supervisor.last
        self.acting = supervisor.acting = WorkerInference(
            workers, self._clients, block.arrays, self._call_all, supervisor.wait_all
        )
        if state is not None and self.layout is None:
            supervisor.know_objects(slice(None), state.obs)

    def send(self, env_ids: NDArray[np.int64], actions: Tree, autoreset: Autoreset) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        plan = self._plans.of(env_ids)
        plan.check_whole()
        self.acting.own.note_absence()
        assert self._block is not None
        codes = self._block.write_actions(plan.select, actions, len(plan.ids))
        resets = autoreset == Autoreset.SAME_STEP
        if codes is not None:
            self._start(plan, resets, lambda client, part: client.post_step(part, autoreset, codes))
            return
        objects: Any = None if self.spaces.sub_batches else split_actions(actions, len(env_ids))
        self._start(
            plan,
            resets,
            lambda client, part: client.post(
                Op.STEP_OBJECTS,
                part.units,
                autoreset=autoreset,
                payload=part.take(actions) if objects is None else [objects[i] for i in part.places],
            ),
        )

    def reset(
        self, env_ids: NDArray[np.int64], seeds: Sequence[int | None], options: Mapping[str, Any] | None = None
    ) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        self.acting.own.note_reset(env_ids)
        self._start(
            self._plans.of(env_ids),
            True,
            lambda client, part: client.post(
                Op.RESET, part.units, payload=(part.rows.tolist(), [seeds[i] for i in part.places.tolist()], options)
            ),
        )

    def begin_episodes(self, env_ids: NDArray[np.int64]) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        self._start(self._plans.of(env_ids), True, lambda client, part: client.post(Op.BEGIN, part.units))

    def observe(self, env_ids: NDArray[np.int64]) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        self._start(self._plans.of(env_ids), None, lambda client, part: client.post(Op.OBSERVE, part.units))

    def _start(self, plan: Plan, resets: bool | None, post: Callable[[WorkerClient, Part], int]) -> None:
        """Posts a command to each worker of the plan.

        Args:
            plan: The plan of the environments.
            resets: See :meth:`~rayvec.pools.restart_state.LastAnswers.requested`. None if the command only reads.
            post: Posts the command for a part and returns its number.
        """
        for part in plan.parts:
            part.number = post(self._clients[part.owner], part)
        if self._last is not None and resets is not None:
            self._last.requested(plan.select, resets=resets)
        plan.turn = self._turn
        self._pending[plan.select] = True
        for part in plan.parts:  # after posting, so that the workers start sooner
            self._command_of[part.of_all] = part.number

    def wait(self, env_ids: NDArray[np.int64], deadline: float) -> None:
        """See :class:`~rayvec.node.parted_pool.PartedPool`."""
        plan = self._plans.of(env_ids)
        if plan.turn != self._turn:  # requested as another subset: look up each worker's last command
            self._turn += 1
            for part in plan.parts:
                part.number = int(self._command_of[part.of_all].max())
        for part in reversed(plan.parts):  # the last worker to start usually ends last: one wake-up
            self._supervisor.wait(self._clients[part.owner], part.number, deadline)

    def take(self, env_ids: NDArray[np.int64]) -> StepBatch:
        """See :class:`~rayvec.node.parted_pool.PartedPool`."""
        plan = self._plans.of(env_ids)
        plan.turn = -1
        self._pending[plan.select] = False
        self._raise_failures(plan)
        batch = self._batch(plan)
        if self._last is not None:
            self._last.keep(plan.select, batch.obs, batch.terminated, batch.truncated)
        return batch

    @property
    def event_fds(self) -> Sequence[int]:
        """See :class:`~rayvec.node.parted_pool.PartedPool`."""
        return [] if self._block is None else [self._block.event_fd]

    def completed_ids(self) -> NDArray[np.int64]:
        """See :class:`~rayvec.node.parted_pool.PartedPool`.

        Every 0.1 s, a call also checks for workers that have exited or hang.
        """
        self._supervisor.arm_event()
        self._supervisor.look_after_all()
        for client in self._clients:
            self._supervisor.poll(client)
        done = np.repeat(
            [client.num_done for client in self._clients], [client.stop - client.start for client in self._clients]
        )
        return np.flatnonzero(self._pending & (self._command_of < done))

    def _call_owners(
        self, plan: Plan, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[float | None], list[Any]]:
        return self._ask(plan, lambda part: ("call", name, args, kwargs, part.rows.tolist()))

    def set_attr(self, name: str, values: Sequence[Any], env_ids: NDArray[np.int64]) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        self._ask(
            self._plans.of(env_ids),
            lambda part: ("set_attr", name, [values[i] for i in part.places.tolist()], part.rows.tolist()),
        )(None)

    def begin_rollout(self, key: int, request: ChunkRequest, part: int | None = None) -> None:
        """See :class:`~rayvec.pools.base.ActingPool`. Every worker acts over its own slice. A part is a worker."""
        if request.by_reference:
            check_object_store()
        self.acting.begin(key, request, part)

    def finish_rollout(
        self, timeout_s: float | None = None, cut: Cut | None = None, part: int | None = None
    ) -> Rollout:
        """See :class:`~rayvec.pools.base.ActingPool`."""
        if self.acting.own.num_pending:
            return self.acting.own.finish(self, cut)
        by_reference, began_s = self.acting.by_reference(part), time.monotonic()
        chunks, times = self.finish_chunks(timeout_s, cut, part)
        waited_s = time.monotonic() - began_s
        chunk = join_chunks(chunks)
        num_padded = chunk.valid.size - sum(each.valid.size for each in chunks)
        rollout = as_rollout(chunk, by_reference, times, waited_s, num_padded)
        self.acting.release(part)
        return rollout

    def _first_finished(self, parts: Sequence[int]) -> int | None:
        self._supervisor.poll_all()
        return next((part for part in parts if self.acting.has_finished(part)), None)

    def finish_chunks(
        self, timeout_s: float | None = None, cut: Cut | None = None, part: int | None = None
    ) -> tuple[tuple[Chunk, ...], tuple[RolloutTimes, ...]]:
        """Waits for the oldest pending chunk; the arguments are those of :meth:`finish_rollout`.

        Returns:
            The chunk of each worker, with global ids, and its times. The arrays are views of shared memory, which
            the chunk after the next one overwrites.

        Raises:
            NotReady: The timeout was reached. The chunk stays pending.
        """
        packed = self.acting.finish(timeout_s, cut, part)
        clients = self._clients if part is None else [self._clients[part]]
        memories = [self._workers.memories[client.index] for client in clients]
        chunks = tuple(each.unpack(memory) for each, memory in zip(packed, memories, strict=True))
        for client, chunk in zip(clients, chunks, strict=True):
            self._supervisor.note_chunk(client, chunk)
        return chunks, tuple(each.times for each in packed)

    def finish_on_node(
        self, with_summary: bool, timeout_s: float | None = None
    ) -> tuple[tuple[RolloutTimes, ...], ChunkSummary | None, Any]:
        """Waits for the oldest pending chunk, as the part of this machine in a cluster's chunk.

        Returns:
            The times of each worker, and the summary and the joined chunk. Without `with_summary`, None and what
            :meth:`finish_chunks` returns.
        """
        if self.acting.own.num_pending:
            taken = self.acting.own.finish(self)
            return (taken.times, taken.summary, taken.chunk) if with_summary else (taken.times, None, (taken.chunk,))
        chunks, times = self.finish_chunks(timeout_s)
        if not with_summary:
            return times, None, chunks
        chunk = join_chunks(chunks)
        return times, summarize(chunk), chunk

    def take_replaced(self) -> dict[str, int]:
        """See :class:`~rayvec.pools.base.ActingPool`."""
        count, self._supervisor.num_replaced = self._supervisor.num_replaced, 0
        return {"worker": count} if count else {}

    def worker_pids(self) -> dict[str, list[int]]:
        """Returns the process ids of the fork server and of the workers, by node name."""
        (node,) = self.topology.nodes
        return {node.name: [self._workers.server.pid, *(each.pid for each in self._workers.processes)]}

    def close(self, timeout_s: float | None = None) -> None:
        """Closes the environments, ends the workers and frees the memory. Further calls do nothing.

        Args:
            timeout_s: Workers that still run after this time are killed. None means 10 s.
        """
        if self._block is not None:
            self._supervisor.closed = True
        for client in self._clients:
            client.post_close()
        self._clients = []
        self._workers.close(_CLOSE_S if timeout_s is None else timeout_s)
        if self._block is not None:
            self.acting.close()
            self._block.close()
            self._block = None

    def _call_all(self, name: str, args: tuple[Any, ...], fds: Sequence[int]) -> None:
        """Calls a method of every worker and waits. A replacement worker repeats only a call without descriptors."""
        everyone = self._plans.of(np.arange(self.num_envs))
        self._ask(everyone, lambda part: (name, *args), fds)(None)

    def _ask(
        self, plan: Plan, command: Callable[[Part], tuple[Any, ...]], fds: Sequence[int] = ()
    ) -> Callable[[float | None], list[Any]]:
        """Calls a method on every worker in the plan, in parallel.

        Args:
            plan: The plan of the environments.
            command: Returns the method name and the arguments for a part.
            fds: File descriptors to send with the call.

        Returns:
            A function that takes a timeout in seconds, waits, and returns one value for each part of the plan.
        """
        clients = [self._clients[part.owner] for part in plan.parts]
        messages = [pack_call(*command(part)) for part in plan.parts]  # all of them first: one may not be picklable
        try:
            numbers = [client.post_call(each, fds=fds) for client, each in zip(clients, messages, strict=True)]
        except BaseException as error:
            self._supervisor.broken_by = error
            raise

        def collect(timeout_s: float | None) -> list[Any]:
            deadline = deadline_in(timeout_s)
            for client, number in zip(clients, numbers, strict=True):
                self._supervisor.wait(client, number, deadline)
            replies = [client.take_reply(number) for client, number in zip(clients, numbers, strict=True)]
            for client, reply in zip(clients, replies, strict=True):
                client.failures += reply.failures
            self._raise_failures(plan)
            return [reply.value for reply in replies]

        return collect

    def _batch(self, plan: Plan) -> StepBatch:
        arrays, select = self._arrays, plan.select
        return StepBatch(
            plan.ids,
            self._objects(plan) if self.layout is None else index_tree(self._obs, select),
            arrays["rew"][select],
            arrays["terminated"][select],
            arrays["truncated"][select],
            self._take_infos(plan),
        )

    def _take_infos(self, plan: Plan) -> tuple[RawInfo, ...]:
        infos = self._reports.infos
        if not infos:
            return ()
        env_ids = self._first_ids(plan) if self.spaces.sub_batches else (self.first_id + plan.ids).tolist()
        return tuple(infos.pop(env_id) for env_id in env_ids if env_id in infos)

    def _first_ids(self, plan: Plan) -> list[int]:
        """Returns the global index of the first environment of each native sub-batch in a plan."""
        bounds = self.spaces.unit_bounds
        assert bounds is not None
        units = np.unique(np.searchsorted(bounds, plan.ids, side="right") - 1)
        return [self.first_id + start for start in bounds[units].tolist()]

    def _objects(self, plan: Plan) -> NDArray[Any]:
        return np.fromiter(map(self._reports.objects.get, plan.ids.tolist()), object, len(plan.ids))

    def _raise_failures(self, plan: Plan) -> None:
        """Raises the first failure of the environments in the plan. Failures of other environments stay stored."""
        ours: list[RemoteFailure] = []
        for part in plan.parts:
            client = self._clients[part.owner]
            if client.failures:
                rows = {-1, *part.rows.tolist()}
                if self.spaces.sub_batches:  # each fails as a whole, under the number of its first row
                    rows.update(first - self.first_id - client.start for first in self._first_ids(plan))
                ours += [failure for row, failure in client.failures if row in rows]
                client.failures = [(row, failure) for row, failure in client.failures if row not in rows]
        if ours:
            raise ours[0].rebuild()
