"""The client's side of a node's workers: who holds the block and the pipes steps the environments.

That is the :class:`~rayvec.pools.process.ProcessPool` which started the workers, or a driver on the same
machine to which it lends them. One at a time: the counters of the rings lie in the block, so the other
may go on as soon as no command is under way.
"""

from __future__ import annotations

import pickle
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from rayvec.errors import RemoteFailure, WorkerLostError, message
from rayvec.pools.base import Autoreset
from rayvec.pools.memory import ArrayLayout, BulkReceiver, index_tree, split_actions
from rayvec.pools.wire import AUTORESET, COUNT, DTYPES, OP, NodeBlock, Op, Reply, travels
from rayvec.types import RawInfo, StepBatch, Tree, tree_leaves

__all__ = ["PoolClient", "WorkerLink"]

_LOOK_S = 0.1
"""How often a wait looks whether the worker still lives."""
_PIPE_BYTES = 1 << 16
"""What surely fits into a pipe that nobody reads."""


class WorkerLink:
    """One worker as its client sees it: post commands, wait for them in order.

    Args:
        block: Of the node.
        index: Of the worker.
        pipe: To the worker.
        where: Its name, for errors.
    """

    def __init__(self, block: NodeBlock, index: int, pipe: Connection, where: str) -> None:
        bounds = block.shape.worker_bounds
        self.start, self.stop = bounds[index], bounds[index + 1]
        self.pipe = pipe
        self.where = where
        self.infos: dict[int, RawInfo] = {}
        self.objects: dict[int, Any] = {}
        self.failures: list[tuple[int, RemoteFailure]] = []
        self._replies: dict[int, Reply] = {}
        self._receiver = BulkReceiver(pipe)
        self._go, self._done = block.go[index], block.done[index]
        self._ring = block.arrays["ring"][index]
        self._has_reply = block.arrays["has_reply"][index]
        self._head, self._tail = block.arrays["head"][index : index + 1], block.arrays["tail"][index : index + 1]
        self._depth, self._first_id_at = block.depth, block.first_id_at

    @property
    def head(self) -> int:
        """How many commands have been posted."""
        return int(self._head[0])

    def post(
        self, op: Op, rows: NDArray[np.int64], *, autoreset: int = 0, dtypes: Sequence[int] = (), payload: Any = None
    ) -> int:
        """Posts a step or reset of these rows (the worker's own); returns the command's number."""
        command = self._ring[self.head % self._depth]
        count, at = len(rows), self._first_id_at
        command[OP] = op
        command[AUTORESET] = autoreset
        command[COUNT] = count
        if dtypes:
            command[DTYPES:at] = dtypes
        command[at : at + count] = rows
        return self._post(payload)

    def post_call(self, name: str, *args: Any) -> int:
        """Posts a call of one of the worker's methods."""
        self._ring[self.head % self._depth][OP] = Op.CALL
        return self._post((name, args))

    def wait(self, number: int, deadline: float | None) -> None:
        """Waits until the command with this number is done.

        What came with steps and resets is kept, by environment, for :meth:`PoolClient.recv`; what calls
        returned, by number, for :meth:`take_reply`.

        Raises:
            TimeoutError: It was not done at `deadline` (of ``time.monotonic``).
            WorkerLostError: The worker ended.
        """
        while self._tail[0] <= number:
            self._acquire(deadline)
            self._finish()

    def take_reply(self, number: int) -> Reply:
        """Returns what the call with this number, which is done, returned."""
        return self._replies.pop(number)

    def poll(self) -> None:
        """Takes note of the commands that are done, without waiting."""
        while self._tail[0] < self._head[0] and self._done.try_acquire():
            self._finish()

    @property
    def finished(self) -> int:
        """How many commands are done and noted."""
        return int(self._tail[0])

    def _post(self, payload: Any) -> int:
        number = self.head
        data = b"" if payload is None else _dumps(payload)
        if len(data) > _PIPE_BYTES:  # the worker may be writing too: let it finish, or both would wait for ever
            self.wait(number - 1, None)
        self._head[0] = number + 1
        self._go.post()
        if payload is not None:
            try:
                self.pipe.send_bytes(data)
            except (BrokenPipeError, ConnectionResetError) as error:
                raise self.lost() from error
        return number

    def _acquire(self, deadline: float | None) -> None:
        while not self._done.acquire(_LOOK_S if deadline is None else min(_LOOK_S, deadline - time.monotonic())):
            if self.hung_up() and not self._done.try_acquire():
                raise self.lost()
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{self.where} has not answered in time")

    def _finish(self) -> None:
        """Takes note of the oldest command under way, which is done."""
        number = int(self._tail[0])
        slot = number % self._depth
        if self._has_reply[slot]:
            try:
                reply: Reply = self._receiver.recv()
            except (EOFError, ConnectionResetError) as error:
                raise self.lost() from error
            if self._ring[slot][OP] == Op.CALL:
                self._replies[number] = reply
            else:
                self._keep(self._ring[slot], reply)
        self._tail[0] = number + 1

    def _keep(self, command: NDArray[np.int64], reply: Reply) -> None:
        for info in reply.infos:
            self.infos[info.env_id] = info
        if reply.objects is not None:
            rows = command[self._first_id_at : self._first_id_at + command[COUNT]].tolist()
            self.objects.update(zip((self.start + row for row in rows), reply.objects, strict=True))
        self.failures += reply.failures

    def hung_up(self) -> bool:
        """Whether the worker has closed its end of the pipe, which only its end does."""
        poll = select.poll()
        poll.register(self.pipe.fileno(), 0)
        return any(event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in poll.poll(0))

    def lost(self) -> WorkerLostError:
        """Describes that the worker is gone."""
        return WorkerLostError(
            message(
                "A worker process runs until the pool is closed.",
                expected=f"{self.where} to answer",
                got="its process has ended (killed, out of memory, or a crash in an environment's native code)",
                remedy="Look into the system's log for what killed it; make the pool anew.",
            )
        )

    def close(self) -> None:
        """Closes the pipe, upon which the worker ends."""
        self._receiver.close()
        self.pipe.close()


@dataclass(slots=True)
class _Part:
    """The share of one worker in a set of environments.

    Attributes:
        link: The worker.
        rows: The worker's own rows, ``int64 [k]``.
        places: Where they stand among the ids.
        number: Of the last command posted for this part.
    """

    link: WorkerLink
    rows: NDArray[np.int64]
    places: NDArray[np.int64]
    number: int = -1


@dataclass(slots=True)
class _Plan:
    """What a set of ids means for the workers, worked out once for each set.

    Attributes:
        ids: The ids in the caller's order, ``int64 [k]``.
        select: The same as a slice where they are consecutive, so that arrays are views.
        parts: One for each worker concerned.
        under_way: Whether exactly this set has been sent and not received.
    """

    ids: NDArray[np.int64]
    select: Any
    parts: list[_Part]
    under_way: bool = False


class PoolClient:
    """An :class:`~rayvec.pools.base.EnvPool` over the workers of one node.

    Ids are those of the node, from 0; infos carry ids of the node too.
    """

    def __init__(self, block: NodeBlock, links: Sequence[WorkerLink], first_id: int) -> None:
        self.num_envs = block.shape.num_envs
        self.layout: ArrayLayout | None = block.layout
        self.first_id = first_id
        self._block = block
        self._links = list(links)
        self._starts = np.array(block.shape.worker_bounds[:-1])
        self.action_layout: ArrayLayout | None = block.action_layout
        self._action_rows = block.actions(slice(None))
        self._arrays = block.arrays
        self._obs: Tree = None if self.layout is None else self.layout.select(block.arrays, "obs")
        self._plans: dict[bytes, _Plan] = {}
        self._under_way = np.zeros(self.num_envs, bool)
        self._command_of = np.zeros(self.num_envs, np.int64)

    def send(self, env_ids: NDArray[np.int64], actions: Tree, autoreset: Autoreset) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        plan = self._plan(env_ids)
        codes = self._write_actions(plan, actions)
        if codes is not None:
            self._start(plan, lambda part: part.link.post(Op.STEP, part.rows, autoreset=autoreset, dtypes=codes))
            return
        objects = split_actions(actions, len(env_ids))
        self._start(
            plan,
            lambda part: part.link.post(
                Op.STEP_OBJECTS, part.rows, autoreset=autoreset, payload=[objects[i] for i in part.places]
            ),
        )

    def reset(
        self, env_ids: NDArray[np.int64], seeds: Sequence[int | None], options: Mapping[str, Any] | None = None
    ) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        self._start(
            self._plan(env_ids),
            lambda part: part.link.post(
                Op.RESET, part.rows, payload=([seeds[i] for i in part.places.tolist()], options)
            ),
        )

    def ready(self, env_ids: NDArray[np.int64]) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        self._start(self._plan(env_ids), lambda part: part.link.post(Op.READY, part.rows))

    def _start(self, plan: _Plan, post: Callable[[_Part], int]) -> None:
        for part in plan.parts:
            part.number = post(part)
            self._command_of[part.link.start + part.rows] = part.number
        self._under_way[plan.select] = True
        plan.under_way = True

    def recv(
        self,
        env_ids: NDArray[np.int64] | None = None,
        min_ready: int | None = None,
        timeout_s: float | None = None,
    ) -> StepBatch:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if env_ids is None:
            env_ids = self._wait_for(min_ready, deadline)
        plan = self._plan(env_ids)
        for part in plan.parts:
            number = part.number
            if not plan.under_way:
                number = int(self._command_of[part.link.start + part.rows].max())
            part.link.wait(number, deadline)
        plan.under_way = False
        self._under_way[plan.select] = False
        self._raise_failures()
        return self._batch(plan)

    def _wait_for(self, min_ready: int | None, deadline: float | None) -> NDArray[np.int64]:
        """Returns the ids under way, or those of them that are done when at least `min_ready` are."""
        ids = np.flatnonzero(self._under_way)
        if min_ready is None or min_ready >= len(ids):
            return ids
        links = [link for link in self._links if self._under_way[link.start : link.stop].any()]
        waiting = self._arrays["any_waiting"]
        waiting[0] = 1
        try:
            while True:
                for link in links:
                    link.poll()
                finished = np.concatenate([np.full(link.stop - link.start, link.finished) for link in self._links])
                done = ids[self._command_of[ids] < finished[ids]]
                if len(done) >= min_ready:
                    return done
                if not self._block.any_done.acquire(_LOOK_S):
                    for link in links:
                        if link.hung_up():
                            raise link.lost()
                    if deadline is not None and time.monotonic() >= deadline:
                        raise TimeoutError(f"{len(done)} of {min_ready} environments have answered in time")
        finally:
            waiting[0] = 0
            while self._block.any_done.try_acquire():
                pass

    def call(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], env_ids: NDArray[np.int64]
    ) -> Callable[[float | None], list[Any]]:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        plan = self._plan(env_ids)
        collect = self._ask(plan, lambda part: ("call", name, args, kwargs, part.rows.tolist()))

        def results(timeout_s: float | None) -> list[Any]:
            in_order: list[Any] = [None] * len(env_ids)
            for part, values in zip(plan.parts, collect(timeout_s), strict=True):
                for place, value in zip(part.places.tolist(), values, strict=True):
                    in_order[place] = value
            return in_order

        return results

    def set_attr(self, name: str, values: Sequence[Any], env_ids: NDArray[np.int64]) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        self._ask(
            self._plan(env_ids),
            lambda part: ("set_attr", name, [values[i] for i in part.places.tolist()], part.rows.tolist()),
        )(None)

    def close(self) -> None:
        """Closes the pipes; the workers belong to the process pool that started them."""
        for link in self._links:
            link.close()
        self._links = []
        self._block.close()

    def _ask(self, plan: _Plan, command: Callable[[_Part], tuple[Any, ...]]) -> Callable[[float | None], list[Any]]:
        """Calls a method on every worker concerned, all at once.

        Returns:
            A function that waits and returns one value for each part of the plan.
        """
        numbers = [part.link.post_call(*command(part)) for part in plan.parts]

        def collect(timeout_s: float | None) -> list[Any]:
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            for part, number in zip(plan.parts, numbers, strict=True):
                part.link.wait(number, deadline)
            replies = [part.link.take_reply(number) for part, number in zip(plan.parts, numbers, strict=True)]
            for part, reply in zip(plan.parts, replies, strict=True):
                part.link.failures += reply.failures
            self._raise_failures()
            return [reply.value for reply in replies]

        return collect

    def _write_actions(self, plan: _Plan, actions: Tree) -> list[int] | None:
        """Writes actions into the block; returns the codes of their data types, or None if they don't fit."""
        layout = self.action_layout
        if layout is None:
            return None
        leaves = [np.asarray(leaf) for leaf in tree_leaves(actions)]
        if len(leaves) != len(layout.leaves) or not all(
            travels(leaf, shape) for leaf, (_, shape) in zip(leaves, layout.leaves, strict=True)
        ):
            return None
        for rows, leaf in zip(self._action_rows, leaves, strict=True):
            rows.view(leaf.dtype.char)[plan.select] = leaf
        return [ord(leaf.dtype.char) for leaf in leaves]

    def _batch(self, plan: _Plan) -> StepBatch:
        arrays, select = self._arrays, plan.select
        return StepBatch(
            plan.ids,
            self._take_objects(plan) if self.layout is None else index_tree(self._obs, select),
            arrays["rew"][select],
            arrays["terminated"][select],
            arrays["truncated"][select],
            self._take_infos(plan),
        )

    def _take_infos(self, plan: _Plan) -> tuple[RawInfo, ...]:
        if not any(part.link.infos for part in plan.parts):
            return ()
        first = self.first_id
        taken: dict[int, RawInfo] = {}
        for part in plan.parts:
            for row in part.rows.tolist():
                env_id = first + part.link.start + row
                info = part.link.infos.pop(env_id, None)
                if info is not None:
                    taken[env_id - first] = info._replace(env_id=env_id - first)
        return tuple(taken[env_id] for env_id in plan.ids.tolist() if env_id in taken)

    def _take_objects(self, plan: _Plan) -> NDArray[Any]:
        objects = np.full(len(plan.ids), None, dtype=object)
        for part in plan.parts:
            for place, row in zip(part.places.tolist(), part.rows.tolist(), strict=True):
                objects[place] = part.link.objects.get(part.link.start + row)
        return objects

    def _raise_failures(self) -> None:
        failures = [failure for link in self._links for _, failure in link.failures]
        for link in self._links:
            link.failures.clear()
        if failures:
            raise failures[0].rebuild()

    def _plan(self, env_ids: NDArray[np.int64]) -> _Plan:
        key = env_ids.tobytes()
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) > 4096:  # random subsets would otherwise be kept for ever
                self._plans = {k: p for k, p in self._plans.items() if p.under_way}
            plan = self._plans[key] = self._make_plan(env_ids)
        return plan

    def _make_plan(self, env_ids: NDArray[np.int64]) -> _Plan:
        ids = np.array(env_ids, np.int64)
        owner = np.searchsorted(self._starts, ids, side="right") - 1
        parts = []
        for k in np.unique(owner).tolist():
            places = np.flatnonzero(owner == k)
            link = self._links[k]
            parts.append(_Part(link, ids[places] - link.start, places))
        consecutive = len(ids) > 0 and bool((ids == np.arange(ids[0], ids[0] + len(ids))).all())
        return _Plan(ids, slice(int(ids[0]), int(ids[0]) + len(ids)) if consecutive else ids, parts)


def _dumps(value: Any) -> bytes:
    """Pickles for a worker; functions and classes of a main module go by value."""
    try:
        return pickle.dumps(value, 5)
    except Exception:
        data: bytes = cloudpickle.dumps(value, 5)
        return data
