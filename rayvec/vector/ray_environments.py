"""The pool of a Ray cluster in the form that adapters take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from rayvec.data import StepBatch, SubBatchInfo
from rayvec.data.columns import Columns, columns_of, merge
from rayvec.data.layouts import ArrayLayout, tree_writer
from rayvec.data.trees import tree_leaves
from rayvec.envs.slices import own_arrays
from rayvec.errors import NodeLostError, WorkerLostError
from rayvec.fleet.commands import NO_NEWS, Answer, Command, Op
from rayvec.pools.base import ActingPool, NotReady

__all__ = ["RayEnvironments"]

_POLL_S = 1e-3


@dataclass(slots=True, eq=False)
class _Ticket:
    """A command, what waits for it, and its answer."""

    command: Command
    finish: Callable[[float | None], Answer]
    answer: Answer | None = None
    error: Exception | None = None


class RayEnvironments:
    """Environments on the nodes of a Ray cluster.

    Args:
        pool: Steps them.
    """

    has_nodes = True

    def __init__(self, pool: ActingPool) -> None:
        self.pool = pool
        self.spaces, self.num_envs, self.first_id = pool.spaces, pool.num_envs, pool.first_id
        self.pids, self.take_replaced, self.close = pool.worker_pids, pool.take_replaced, pool.close
        self._published: dict[int, int] = {}

    def allocate(self, observation: Space[Any], action: Space[Any]) -> None:
        """Allocates the arrays for these spaces."""
        self.pool.allocate(observation, action)
        self.layout, self.action_layout = ArrayLayout.with_objects(observation), ArrayLayout.of_actions(action)
        self.arrays = own_arrays(self.layout, self.num_envs)
        self._write = tree_writer(self.arrays["obs"])

    @property
    def topology(self) -> Any:
        """Which node holds which environments."""
        return self.pool.topology

    @property
    def transports(self) -> tuple[str, ...]:
        """How each node is reached."""
        return self.pool.transports

    @property
    def parts(self) -> tuple[range, ...]:
        """The environments of each node."""
        return self.pool.parts

    def post(self, command: Command) -> _Ticket:
        """Starts a command."""
        pool, rows, rest = self.pool, command.rows, command.rest
        finish: Callable[[float | None], Answer] = lambda timeout_s: NO_NEWS  # noqa: E731
        if command.op == Op.CALL:
            wait = pool.call(rest[0], rest[1], rest[2], rows)
            return _Ticket(command, lambda timeout_s: Answer(value=wait(timeout_s)))
        if command.op == Op.SET:
            pool.set_attr(rest[0], rest[1], rows)
        elif command.op == Op.LOAD:
            pool.acting.load(rest[0], rest[1], rest[3], on_node=rest[2])
        elif command.op == Op.DROP:
            pool.acting.drop(rest[0])
        elif command.op == Op.ROLLOUT:
            return self._begin_rollout(command)
        else:
            finish = self._start(command)
        return _Ticket(command, finish)

    def _start(self, command: Command) -> Callable[[float | None], Answer]:
        rows, actions = command.rows, command.actions
        if command.op == Op.STEP:
            is_objects = isinstance(actions, np.ndarray) and actions.dtype.hasobject
            self.pool.send(rows, list(actions) if is_objects else actions, command.mode)
        elif command.op == Op.RESET:
            self.pool.reset(rows, *command.rest)
        else:
            self.pool.begin_episodes(rows)
        return lambda timeout_s: self._stepped(self.pool.recv(rows, timeout_s=timeout_s))

    def _stepped(self, batch: StepBatch) -> Answer:
        rows = batch.env_ids
        for name in ("rew", "terminated", "truncated"):
            self.arrays[name][rows] = getattr(batch, name)
        self._write_all(rows, batch.obs)
        return Answer(self._columns(batch.info)) if batch.info else NO_NEWS

    def _columns(self, infos: Sequence[Any]) -> Columns:
        if isinstance(infos[0], SubBatchInfo):
            parts = [(slice(info.env_id, info.env_id + info.num_envs), info.columns) for info in infos]
            return merge(parts, self.num_envs)
        items: list[tuple[int, Any]] = []
        for env_id, info, final_obs, final_info in infos:
            if final_info is not None:
                items.append((env_id, {"final_obs": final_obs, "final_info": final_info}))
            items.append((env_id, info))
        return columns_of(items, self.num_envs)

    def _begin_rollout(self, command: Command) -> _Ticket:
        order, rows = command.rest, command.rows
        part = None
        if len(rows) < self.num_envs:
            part = next(k for k, envs in enumerate(self.parts) if envs.start == rows[0])
        if order.weights is not None and self._published.get(order.key) != order.version:
            self.pool.acting.publish(order.key, order.version, order.weights)
            self._published[order.key] = order.version
        self.pool.begin_rollout(order.key, order.request, part)

        def finish(timeout_s: float | None) -> Answer:
            rollout = self.pool.finish_rollout(timeout_s, part=part)
            if rollout.chunk is not None:
                self._write_all(rows, rollout.chunk.last_obs)
            return Answer(value=rollout)

        return _Ticket(command, finish)

    def _write_all(self, rows: NDArray[np.int64], obs: Any) -> None:
        if self.layout.objects:
            for row, each in zip(rows.tolist(), obs, strict=True):
                self._write(row, each)
            return
        for kept, leaf in zip(tree_leaves(self.arrays["obs"]), tree_leaves(obs), strict=True):
            kept[rows] = leaf

    def wait(self, ticket: _Ticket, timeout_s: float = math.inf) -> bool:
        """Waits until a command is answered."""
        try:
            if ticket.answer is None and ticket.error is None:
                ticket.answer = ticket.finish(None if timeout_s == math.inf else timeout_s)
        except NotReady:
            return False
        except (NodeLostError, WorkerLostError):
            raise
        except Exception as error:  # of an environment or a policy
            ticket.error = error
        return True

    def wait_some(self, tickets: Sequence[_Ticket], count: int = 1, timeout_s: float = math.inf) -> list[int]:
        """Waits until some commands are answered."""
        deadline = time.monotonic() + timeout_s
        while True:
            answered = [index for index, ticket in enumerate(tickets) if self.wait(ticket, 0.0)]
            if len(answered) >= count or time.monotonic() >= deadline:
                return answered
            time.sleep(_POLL_S)

    def take(self, ticket: _Ticket) -> Answer:
        """Returns the answer to a command."""
        if ticket.error is not None:
            raise ticket.error
        assert ticket.answer is not None
        return ticket.answer
