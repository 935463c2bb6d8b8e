"""The client's side of a node's workers: who holds the block and the pipes steps the environments.

That is the :class:`~rayvec.node.process_pool.ProcessPool` which started the workers, or a driver on the same
machine to which it lends them. One at a time: the counters of the rings lie in the block, so the other
may go on as soon as no command is under way.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import RawInfo, StepBatch, Tree
from rayvec.errors import RemoteFailure, WorkerLostError
from rayvec.node.wire import NodeBlock, Op, travels
from rayvec.node.worker_link import LOOK_S, WorkerLink, readable
from rayvec.pools.base import Autoreset, NotReady, Supervision
from rayvec.pools.memory import ArrayLayout, index_tree, split_actions
from rayvec.pools.plan import Part, Plan, Plans
from rayvec.pools.restarts import LastAnswers, RestartBudget

__all__ = ["PoolClient", "Respawn"]

logger = logging.getLogger(__name__)


Respawn = Callable[[int], Connection]
"""Ends a worker, named by its index, if it has not ended, and starts another in its place; returns the pipe to it."""


class PoolClient:
    """An :class:`~rayvec.pools.base.EnvPool` over the workers of one node.

    Ids are those of the node, from 0; infos carry ids of the node too.

    Args:
        block: Of the node.
        links: To its workers.
        first_id: Global index of the node's first environment.
        supervision: What becomes of workers that end or hang.
        respawn: Starts a worker anew.
    """

    def __init__(
        self,
        block: NodeBlock,
        links: Sequence[WorkerLink],
        first_id: int,
        supervision: Supervision,
        respawn: Respawn,
    ) -> None:
        self.num_envs = block.shape.num_envs
        self.layout: ArrayLayout | None = block.layout
        self.first_id = first_id
        self._block = block
        self._links = list(links)
        for link in self._links:
            link.wait_for_room = self._wait_for_room
        self._supervision = supervision
        self._respawn = respawn
        self._budget = RestartBudget()
        self.action_layout: ArrayLayout | None = block.action_layout
        self._action_rows = block.actions(slice(None))
        self._arrays = block.arrays
        self._obs: Tree = None if self.layout is None else self.layout.select(block.arrays, "obs")
        self._plans = Plans(np.array(block.shape.worker_bounds[:-1]))
        self._turn = 0
        self._under_way = np.zeros(self.num_envs, bool)
        self._command_of = np.zeros(self.num_envs, np.int64)
        self._look_at_s = 0.0
        self._last = LastAnswers(self._obs, self.num_envs, block.arrays["stays"]) if supervision.restart else None

    def send(self, env_ids: NDArray[np.int64], actions: Tree, autoreset: Autoreset) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        plan = self._plans.of(env_ids)
        codes = self._write_actions(plan, actions)
        stays = autoreset == Autoreset.SAME_STEP
        if codes is not None:
            self._start(plan, stays, lambda link, part: link.post_step(part, autoreset, codes))
            return
        objects = split_actions(actions, len(env_ids))
        self._start(
            plan,
            stays,
            lambda link, part: link.post(
                Op.STEP_OBJECTS, part.rows, autoreset=autoreset, payload=[objects[i] for i in part.places]
            ),
        )

    def reset(
        self, env_ids: NDArray[np.int64], seeds: Sequence[int | None], options: Mapping[str, Any] | None = None
    ) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        self._start(
            self._plans.of(env_ids),
            True,
            lambda link, part: link.post(
                Op.RESET, part.rows, payload=([seeds[i] for i in part.places.tolist()], options)
            ),
        )

    def ready(self, env_ids: NDArray[np.int64], *, begin: bool = True) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        plan = self._plans.of(env_ids)
        if begin:
            self._start(plan, True, lambda link, part: link.post(Op.READY, part.rows))
        else:
            self._start(plan, None, lambda link, part: link.post(Op.LOOK, part.rows))

    def _start(self, plan: Plan, stays: bool | None, post: Callable[[WorkerLink, Part], int]) -> None:
        for part in plan.parts:
            part.number = post(self._links[part.owner], part)
        if self._last is not None and stays is not None:
            self._last.started(plan.select, stays)
        plan.turn = self._turn
        self._under_way[plan.select] = True
        for part in plan.parts:  # after the workers have begun
            self._command_of[part.of_all] = part.number

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
        plan = self._plans.of(env_ids)
        if (
            plan.turn != self._turn
        ):  # another grouping than was asked for: what any plan knows of numbers is out of date
            self._turn += 1
            for part in plan.parts:
                part.number = int(self._command_of[part.of_all].max())
        for part in reversed(plan.parts):  # who was asked last is done last, and we are woken but once
            self._wait(self._links[part.owner], part.number, deadline)
        plan.turn = -1
        self._under_way[plan.select] = False
        self._raise_failures(plan)
        batch = self._batch(plan)
        if self._last is not None:
            self._last.keep(plan.select, batch.obs, batch.terminated, batch.truncated)
        return batch

    @property
    def event_fd(self) -> int:
        """A file descriptor that is readable when some step is done; for who calls :meth:`ready_ids`."""
        self._arrays["wants_event"][0] = True
        return self._block.event_fd

    def ready_ids(self) -> NDArray[np.int64]:
        """Returns the ids whose answers :meth:`recv` would return without waiting, ``int64 [k]``.

        Now and then it sees to workers that have ended or hang, however many others go on answering.
        """
        event = self.event_fd  # from here on, whatever is done is told
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(event)
        if time.monotonic() >= self._look_at_s:
            self._look_at_s = time.monotonic() + LOOK_S
            self._look_after_all()
        for link in self._links:
            link.poll()
        done = np.repeat([link.num_done for link in self._links], [link.stop - link.start for link in self._links])
        return np.flatnonzero(self._under_way & (self._command_of < done))

    def _wait_for(self, min_ready: int | None, deadline: float | None) -> NDArray[np.int64]:
        """Returns the ids under way, or those of them that are done when at least `min_ready` are."""
        ids = np.flatnonzero(self._under_way)
        if min_ready is None or min_ready >= len(ids):
            return ids
        while True:
            done = self.ready_ids()
            if len(done) >= min_ready:
                return done
            if deadline is not None and time.monotonic() >= deadline:
                raise NotReady(f"{len(done)} of {min_ready} environments have answered in time")
            readable([self.event_fd], LOOK_S)

    def _look_after_all(self) -> None:
        for link in self._links:
            if link.num_done < link.num_posted:
                self._look_after(link)

    def _wait(self, link: WorkerLink, number: int, deadline: float | None) -> None:
        """Waits for a command; a worker that ends or hangs meanwhile is started anew, or that is raised."""
        limit_s = self._supervision.step_timeout_s
        while True:
            until = deadline
            if limit_s is not None and link.num_done <= number:
                look_s = min(link.overdue_s(limit_s), time.monotonic() + LOOK_S)  # at the steps of a chunk
                until = min(look_s, math.inf if until is None else until)
            try:
                link.wait(number, until)
                return
            except NotReady:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
                assert limit_s is not None
                if time.monotonic() < link.overdue_s(limit_s):
                    continue
                self._restart_worker(link, link.hangs(limit_s), link.waited_s)
            except WorkerLostError as error:
                self._restart_worker(link, error)

    def _wait_for_room(self, link: WorkerLink) -> None:
        """Waits until the oldest command of a worker is done, so that there is room in its pipe for another."""
        self._wait(link, link.num_done, None)

    def _look_after(self, link: WorkerLink) -> None:
        """Restarts a worker that has ended, or takes too long for its oldest command."""
        limit_s = self._supervision.step_timeout_s
        ended = link.ended()
        link.poll()  # what is done was in time, however late somebody looks
        if link.num_done == link.num_posted:
            return
        if ended:
            self._restart_worker(link, link.lost())
        elif limit_s is not None and time.monotonic() > link.overdue_s(limit_s):
            self._restart_worker(link, link.hangs(limit_s), link.waited_s)

    def _restart_worker(self, link: WorkerLink, error: WorkerLostError, hung_s: float = 0.0) -> None:
        """Starts a worker anew, gives it what was under way again, and ends the episodes that were.

        Args:
            link: To the worker.
            error: What is raised if it may not be restarted at all.
            hung_s: How long it was waited for, if it hangs.

        Raises:
            WorkerLostError: It may not be restarted, or not once more.
            Exception: What an environment raised that was made anew.
        """
        if self._last is None:
            raise error
        link.kill()  # one that was only slow must not write over what is restored now
        link.raise_what_it_said()
        if not self._budget.spend(link.index, link.startup_s if link.is_starting else hung_s):
            raise WorkerLostError(
                "A worker that ends again and again is not restarted for ever.",
                expected=RestartBudget.rule(),
                got=f"one more of {link.where}",
                remedy="Look into the system's log for what ends it.",
            ) from error
        self._keep_last(self._finished(link))
        link.give_up_what_is_not_repeated()
        rows = slice(link.start, link.stop)
        lost = np.flatnonzero(~self._mask(self._finished(link)))
        self._last.restore(lost[(lost >= link.start) & (lost < link.stop)], self._obs)
        self._arrays["cut"][rows] |= self._last.mid_episode(rows) & self._arrays["started"][rows]
        self._arrays["restarts"][rows] += 1
        had, seed = self._arrays["has_seed"][rows].tolist(), self._arrays["seed"][rows].tolist()
        seeds = [value if given else None for value, given in zip(seed, had, strict=True)]
        logger.warning("restarted %s, seeds %s: %s", link.where, seeds, error)
        link.reconnect(self._respawn(link.index), repeat=True)

    def _finished(self, link: WorkerLink) -> NDArray[np.int64]:
        """Ids of a worker whose answers are there but have not been asked for."""
        ids = np.arange(link.start, link.stop)
        return ids[self._under_way[ids] & (self._command_of[ids] < link.num_done)]

    def _mask(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        mask = np.zeros(self.num_envs, bool)
        mask[ids] = True
        return mask

    def stepped_by_another(self, last_obs: Tree) -> None:
        """Takes note that another process has let the environments take steps, each reset within its last one.

        Args:
            last_obs: Their observations, ``object [N]``, where they are no arrays; else they are in the block.
        """
        if self.layout is None:
            self.know_objects(last_obs)
        if self._last is not None:
            self._last.started(slice(None), True)
            self._keep_last(slice(None))

    def know_objects(self, obs: NDArray[Any]) -> None:
        """Takes note of observations that are no arrays, ``object [N]``."""
        for link in self._links:
            link.objects.update((i, obs[i]) for i in range(link.start, link.stop))

    def _keep_last(self, select: Any) -> None:
        assert self._last is not None
        obs = None if self._obs is None else index_tree(self._obs, select)
        self._last.keep(select, obs, self._arrays["terminated"][select], self._arrays["truncated"][select])

    def take_begun(self, batch: StepBatch) -> NDArray[np.int64]:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        return batch.env_ids[batch.terminated | batch.truncated]

    def call(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], env_ids: NDArray[np.int64]
    ) -> Callable[[float | None], list[Any]]:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        plan = self._plans.of(env_ids)
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
            self._plans.of(env_ids),
            lambda part: ("set_attr", name, [values[i] for i in part.places.tolist()], part.rows.tolist()),
        )(None)

    def close(self) -> None:
        """Closes the pipes; the workers belong to the process pool that started them."""
        for link in self._links:
            link.close()
        self._links = []
        self._block.close()

    def _ask(
        self, plan: Plan, command: Callable[[Part], tuple[Any, ...]], num_steps: int = 1, repeat: bool = True
    ) -> Callable[[float | None], list[Any]]:
        """Calls a method, which takes so many steps, on every worker concerned, all at once.

        Returns:
            A function that waits and returns one value for each part of the plan.
        """
        links = [self._links[part.owner] for part in plan.parts]
        numbers = [
            link.post_call(*command(part), num_steps=num_steps, repeat=repeat)
            for link, part in zip(links, plan.parts, strict=True)
        ]

        def collect(timeout_s: float | None) -> list[Any]:
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            for link, number in zip(links, numbers, strict=True):
                self._wait(link, number, deadline)
            replies = [link.take_reply(number) for link, number in zip(links, numbers, strict=True)]
            for link, reply in zip(links, replies, strict=True):
                link.failures += reply.failures
            self._raise_failures(plan)
            return [reply.value for reply in replies]

        return collect

    def _write_actions(self, plan: Plan, actions: Tree) -> list[int] | None:
        """Writes actions into the block; returns the codes of their data types, or None if they don't fit."""
        layout = self.action_layout
        if layout is None:
            return None
        if isinstance(actions, list):
            return None
        leaves = [np.asarray(leaf) for leaf in layout.flatten(actions)]
        shapes = [shape for _, shape in layout.leaves]
        if any(len(leaf) != len(plan.ids) for leaf in leaves) or not all(map(travels, leaves, shapes)):
            return None
        for rows, leaf in zip(self._action_rows, leaves, strict=True):
            rows.view(leaf.dtype.char)[plan.select] = leaf
        return [ord(leaf.dtype.char) for leaf in leaves]

    def _batch(self, plan: Plan) -> StepBatch:
        arrays, select = self._arrays, plan.select
        return StepBatch(
            plan.ids,
            self._take_objects(plan) if self.layout is None else index_tree(self._obs, select),
            arrays["rew"][select],
            arrays["terminated"][select],
            arrays["truncated"][select],
            self._take_infos(plan),
        )

    def _take_infos(self, plan: Plan) -> tuple[RawInfo, ...]:
        links = self._links
        if not any([links[part.owner].infos for part in plan.parts]):
            return ()
        first = self.first_id
        taken: dict[int, RawInfo] = {}
        for part in plan.parts:
            infos = links[part.owner].infos
            for env_id in (first + part.start + part.rows).tolist() if infos else ():
                info = infos.pop(env_id, None)
                if info is not None:
                    taken[env_id - first] = info._replace(env_id=env_id - first)
        return tuple(taken[env_id] for env_id in plan.ids.tolist() if env_id in taken)

    def _take_objects(self, plan: Plan) -> NDArray[Any]:
        objects = np.full(len(plan.ids), None, dtype=object)
        for part in plan.parts:
            known = self._links[part.owner].objects
            for place, row in zip(part.places.tolist(), part.rows.tolist(), strict=True):
                objects[place] = known.get(part.start + row)
        return objects

    def _raise_failures(self, plan: Plan) -> None:
        """Raises what one of these environments raised; what others did is raised when they are asked for."""
        ours: list[RemoteFailure] = []
        for part in plan.parts:
            link = self._links[part.owner]
            if link.failures:
                rows = {-1, *part.rows.tolist()}
                ours += [failure for row, failure in link.failures if row in rows]
                link.failures = [(row, failure) for row, failure in link.failures if row not in rows]
        if ours:
            raise ours[0].rebuild()
