"""The driver's own node, as a child of the cluster's fleet: this process owns its workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from gymnasium import Space

from rayvec.cluster.node import Node, NodeChunk
from rayvec.cluster.row_bytes import result_leaves
from rayvec.data import Chunk
from rayvec.data.trees import as_slice, tree_leaves
from rayvec.envs.spaces import PoolSpaces
from rayvec.fleet.commands import STEPPING, Answer, Command, Op
from rayvec.fleet.restarts import EpisodeState, store_seed
from rayvec.node.machine import CLOSE_S, Machine

__all__ = ["OwnNode", "note_chunk", "store_seeds"]


def store_seeds(arrays: dict[str, Any], command: Command) -> None:
    """Stores the seeds of a command for a reset in the driver's arrays."""
    if command.op == Op.RESET:
        for row, seed in zip(command.rows.tolist(), command.rest[0], strict=True):
            if seed is not None:
                store_seed(arrays, row, seed)


def note_chunk(arrays: dict[str, Any], command: Command, answer: Answer) -> None:
    """Writes into the driver's arrays how the environments go on after a chunk."""
    if command.op == Op.ROLLOUT and answer.failure is None:
        for leaf, last in zip(tree_leaves(arrays["obs"]), tree_leaves(answer.value.last_obs), strict=True):
            leaf[command.rows] = last
        arrays["episode"][command.rows] = EpisodeState.RUNNING


class OwnNode:
    """A node whose workers belong to this process.

    Args:
        machine: Its machine, which has started.
        name: What errors call the node.
        release: Called when it has ended: releases its cores.
        keep: Puts a chunk into Ray's object store.
    """

    transport = "shm"

    def __init__(
        self,
        machine: Machine,
        name: str,
        release: Callable[[], None] = lambda: None,
        keep: Callable[[Chunk], Any] = lambda chunk: chunk,
    ) -> None:
        self.name, self._node, self._release, self._keep = name, Node(machine, name), release, keep
        self._pending: list[tuple[Command, Any]] = []

    def spaces(self) -> PoolSpaces:
        """Returns the spaces of the environments."""
        return self._node.machine.spaces

    def attach(self, observation: Space[Any], action: Space[Any], first_id: int) -> None:
        """Notes the spaces that all nodes share, and the global index of the first environment."""
        self._arguments = observation, action, first_id

    def open(self, arrays: dict[str, Any]) -> None:
        """Allocates shared memory for the workers. The answers are copied into `arrays`."""
        has_begun = arrays["episode"].any() or arrays["has_seed"].any()
        self._node.allocate(*self._arguments, arrays if has_begun else None)
        self._arrays = arrays
        self._copies = list(zip(result_leaves(arrays), result_leaves(self._node.machine.arrays), strict=True))

    def post(self, command: Command) -> None:
        """Starts a command."""
        store_seeds(self._arrays, command)
        self._pending.append((command, self._node.post(command)))

    def wait(self, timeout_s: float) -> Answer | None:
        """Returns the answer to one of the pending commands, or None if there is none within `timeout_s`."""
        for place, (command, ticket) in enumerate(self._pending):
            if self._node.wait(ticket, timeout_s if len(self._pending) == 1 else 0.0):
                del self._pending[place]
                return self._answer(place, command, self._node.take(ticket))
        if len(self._pending) > 1:
            self._node.wait(self._pending[0][1], timeout_s)
        return None

    def _answer(self, place: int, command: Command, answer: Answer) -> Answer:
        if command.op in STEPPING and command.op != Op.ROLLOUT:
            rows = as_slice(command.rows)
            for mine, of_node in self._copies:
                mine[rows] = of_node[rows]
        note_chunk(self._arrays, command, answer)
        if isinstance(answer.value, NodeChunk) and answer.value.summary is not None:
            kept = self._keep(self._node.kept.pop(answer.value.kept))
            answer = answer._replace(value=answer.value._replace(kept=kept))
        return answer._replace(place=place) if place else answer

    def worker_pids(self) -> list[int]:
        """Returns the process ids of this process and of the workers."""
        return [os.getpid(), *self._node.machine.worker_pids()]

    def kill(self) -> None:
        """Ends the workers at once."""
        self.close(0.0)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Closes the environments, and ends the workers after `timeout_s`."""
        try:
            self._node.close(timeout_s)
        finally:
            release, self._release = self._release, lambda: None
            release()

    def join(self, timeout_s: float) -> bool:
        """Returns whether it has ended, which :meth:`close` has waited for."""
        return True
