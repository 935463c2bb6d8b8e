"""One node: a machine's fleet, and the policies that act in the process that owns its workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from gymnasium import Space

from rayvec.data import Chunk, ChunkSummary, RolloutTimes, Tree
from rayvec.data.join_chunks import join_chunks, summarize
from rayvec.envs.failures import FAILURES, captured
from rayvec.fleet.commands import Answer, Command, Op, Ticket
from rayvec.node.machine import Machine
from rayvec.rollout.policy_host import ChunkOrder, PolicyHost, TakenChunk
from rayvec.rollout.stepper import Stepper

__all__ = ["Node", "NodeChunk"]


class NodeChunk(NamedTuple):
    """A node's part of a chunk.

    Attributes:
        times: The times of each worker, or of the node where the policy acts there.
        chunk: The part. Its arrays are views of shared memory, if this process owns the workers.
        summary: Its summary, if it stays on the node.
        kept: Its number on the node, if it stays there; in the driver, the reference in Ray's object store.
    """

    times: tuple[RolloutTimes, ...]
    chunk: Chunk | None
    summary: ChunkSummary | None = None
    kept: Any = None

    @property
    def last_obs(self) -> Tree:
        """The last observation of each environment; its episode continues from there."""
        part = self.chunk or self.summary
        assert part is not None
        return part.last_obs


class Node:
    """Executes commands, and lets policies act over all workers of its machine that were loaded for the node.

    Args:
        machine: The machine, which the node closes.
        name: What errors call the node.

    Attributes:
        kept: Chunks that stay here, by number, until Ray's object store gets them.
    """

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self._name = machine, name
        self.kept: dict[int, Chunk] = {}
        self._numbers = itertools.count()
        self._own_policies: set[int] = set()
        self._actor = ThreadPoolExecutor(1, "rayvec-node-policy")

    def allocate(
        self, observation: Space[Any], action: Space[Any], first_id: int, state: dict[str, Any] | None = None
    ) -> None:
        """Allocates the arrays of the machine; they begin with `state`, the last answers of a lost node."""
        machine = self.machine
        machine.allocate(observation, action, first_id=first_id, state=state)
        self._stepper = Stepper(machine, machine.action_layout, first_id, machine.spaces.native_mode)
        self._host = PolicyHost(self._stepper)

    def post(self, command: Command) -> Ticket | Future[Answer]:
        """Starts a command. Returns what to wait for."""
        op = command.op
        if op == Op.RESET:
            self._host.note_reset(command.rows)
        elif op == Op.STEP:
            self._host.note_absence()
        elif op == Op.LOAD:
            key, policy, *where = command.rest
            if any(where):
                self._own_policies.add(key)
                return self._act(lambda: self._host.load(key, policy))
            command = command._replace(rest=(key, policy))
        elif op in (Op.DROP, Op.ROLLOUT):
            key = command.rest[0]
            if key in self._own_policies:
                return self._act(lambda: self._take(command.rest) if op == Op.ROLLOUT else self._drop(key))
        return self.machine.post(command)

    def _take(self, order: ChunkOrder) -> NodeChunk:
        return self._part(order, [self._host.take(order)])

    def _drop(self, key: int) -> None:
        self._own_policies.discard(key)
        self._host.drop(key)

    def _act(self, function: Callable[[], Any]) -> Future[Answer]:
        """Lets a policy act in a thread: meanwhile the stream is read, and a driver waits for other nodes."""

        def answer() -> Answer:
            try:
                value = function()
            except FAILURES as error:
                return Answer(failure=captured(error, self._name))
            notes, self._stepper.notes = tuple(self._stepper.notes), []
            return Answer(value=value, notes=notes)

        return self._actor.submit(answer)

    def wait(self, ticket: Ticket | Future[Answer], timeout_s: float) -> bool:
        """Waits for a command, for up to `timeout_s`. Returns whether it is answered.

        Raises:
            Exception: A worker was lost that is not replaced.
        """
        if isinstance(ticket, Ticket):
            return self.machine.wait(ticket, timeout_s)
        return bool(wait([ticket], timeout_s).done)

    def take(self, ticket: Ticket | Future[Answer]) -> Answer:
        """Returns the answer to a command, which :meth:`wait` has found answered."""
        if not isinstance(ticket, Ticket):
            return ticket.result()
        answer, command = self.machine.take(ticket), ticket.command
        if answer.failure is None and command.op == Op.ROLLOUT:
            answer = answer._replace(value=self._part(command.rest, answer.value))
        replaced, self.machine.num_replaced = self.machine.num_replaced, 0
        return answer._replace(replaced=replaced) if replaced else answer

    def _part(self, order: ChunkOrder, taken: list[TakenChunk]) -> NodeChunk:
        """Returns a chunk of this node, or keeps it here and returns its summary, where that is requested."""
        times, stays = tuple(each.times for each in taken), order.request.by_reference
        chunk = taken[0].chunk
        if len(taken) > 1 or stays:
            chunk = join_chunks([each.chunk for each in taken], copy=stays)
        if not stays:
            return NodeChunk(times, chunk)
        number = next(self._numbers)
        self.kept[number] = chunk
        return NodeChunk(times, None, summarize(chunk), number)

    def objects(self, rows: Any) -> list[list[Any]]:
        """Returns those leaves of the observations of some environments that are objects."""
        layout = self.machine.layout
        leaves = layout.flatten(self.machine.arrays["obs"])
        return [leaves[place][rows].tolist() for place in layout.objects]

    def close(self, timeout_s: float) -> None:
        """Closes the environments, and ends the workers and the policies."""
        self.machine.close(timeout_s)
        self._actor.shutdown(wait=False, cancel_futures=True)
