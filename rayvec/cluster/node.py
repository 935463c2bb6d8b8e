"""One node in the process that owns its workers: a machine's fleet, and the policies that act over all its workers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from gymnasium import Space

from rayvec.cluster.stream import Stream, memory_of_rows
from rayvec.data.trees import as_slice, object_leaves, tree_leaves
from rayvec.envs.failures import FAILURES, captured
from rayvec.fleet.commands import IN_ARRAYS, Answer, Command, Op, Ticket
from rayvec.fleet.fleet import CLOSE_S
from rayvec.fleet.spaces import PoolSpaces
from rayvec.node.machine import Machine, MachineSpec
from rayvec.rollout.loop import PolicyHost, join_rollouts

_POLL_S = 1e-3
"""How long a node waits for the first of several pending commands before it looks at the others."""
_NEWS_S = 0.1
"""The interval at which a node looks after its workers' limits."""


class Node:
    """Executes commands. It is a child of the driver's fleet, or what the process of another node serves.

    Policies that were loaded for the node act over all its workers, in a thread.

    Args:
        spec: What its machine starts with.
        gpus: The GPUs that are claimed for its environments, without a `claim`.
        claim: What is claimed from Ray for it: `wait()` returns the GPUs once the rest is reserved too, `release()`
            makes all of it free again.

    Attributes:
        name: What errors call it.
        machine: The machine; :meth:`start` starts it.
        memory_of: Returns the memory of some rows of the arrays that hold its answers.
        objects: The arrays of these that hold objects, and have no such memory.
        pending: The pending commands, and what to wait for.
    """

    transport = "shm"
    machine: Machine

    def __init__(self, spec: MachineSpec, gpus: Sequence[str] = (), claim: Any = None) -> None:
        self.name, self._spec = f"node {spec.name}", spec
        self._gpus, self._claim = gpus, claim
        self.pending: list[tuple[Command, Ticket | Future[Answer]]] = []
        self._own_policies: set[int] = set()
        self._copies: list[tuple[Any, Any]] = []
        self._actor = ThreadPoolExecutor(1, "rayvec-node-policy")

    def start(self) -> None:
        """Starts the workers."""
        if self._claim is not None:
            self._gpus = self._claim.wait()
        self.machine = Machine(self._spec, self._gpus)

    def spaces(self) -> PoolSpaces:
        """Returns the spaces of the environments."""
        return self.machine.spaces

    def open(self, arrays: dict[str, Any], first_id: int, *spaces: Space[Any]) -> None:
        """Allocates shared memory for the workers. The answers are copied into `arrays`."""
        self.allocate(arrays, first_id, *spaces)
        self._copies = list(zip(tree_leaves(arrays), tree_leaves(self.machine.arrays), strict=True))

    def allocate(self, state: dict[str, Any], first_id: int, observation: Space[Any], action: Space[Any]) -> None:
        """Allocates the arrays of the machine; they begin with `state`, maybe the last answers of a lost node."""
        machine = self.machine
        machine.allocate(observation, action, first_id=first_id, state=state)
        self.memory_of = memory_of_rows(tree_leaves(machine.arrays))
        self.objects = object_leaves(machine.arrays["obs"])
        self._host = PolicyHost(machine)

    def post(self, command: Command) -> None:
        """Starts a command."""
        self.pending.append((command, self._started(command)))

    def _started(self, command: Command) -> Ticket | Future[Answer]:
        if command.op == Op.LOAD:
            key, policy, acts_here = command.rest
            command = command._replace(rest=(key, policy))
            if acts_here:
                self._own_policies.add(key)
        op, rest = command.op, command.rest
        if op in (Op.LOAD, Op.DROP, Op.ROLLOUT) and rest[0] in self._own_policies:  # meanwhile the stream is read
            return self._actor.submit(self._host.execute, op, rest, self.name)
        return self.machine.post(command)

    def wait(self, timeout_s: float) -> Answer | None:
        """Returns the answer to one of the pending commands, or None if there is none within `timeout_s`."""
        poll_s = timeout_s if len(self.pending) == 1 else min(timeout_s, _POLL_S)
        for place, (command, ticket) in enumerate(self.pending):
            try:
                answer = self._answer(command, ticket, 0.0 if place else poll_s)
            except FAILURES as error:  # a worker that is not replaced
                answer = Answer(failure=captured(error, self.name))
            if answer is not None:
                del self.pending[place]
                if self._copies and command.op in IN_ARRAYS:
                    rows = as_slice(command.rows)
                    for mine, of_machine in self._copies:
                        mine[rows] = of_machine[rows]
                return answer._replace(place=place) if place else answer
        return None

    def wait_for_news(self, stream: Stream) -> bool:
        """Waits for a moment for a command, or for an answer. Returns whether a command has arrived."""
        timeout_s, workers = _NEWS_S, []
        for _, ticket in self.pending:
            if isinstance(ticket, Future):
                timeout_s = min(timeout_s, _POLL_S)
            elif (missing := ticket.missing()) is None or (worker := self.machine.children[missing]).fileno() < 0:
                timeout_s = 0.0  # it is answered, or its worker was lost and not replaced
            else:
                workers.append(worker)
        return stream.poll(timeout_s, workers)

    def _answer(self, command: Command, ticket: Ticket | Future[Answer], timeout_s: float) -> Answer | None:
        if isinstance(ticket, Future):
            return ticket.result() if wait([ticket], timeout_s).done else None
        if not self.machine.wait(ticket, timeout_s):
            return None
        answer = self.machine.take(ticket)
        if answer.failure is None and command.op == Op.ROLLOUT:
            answer = answer._replace(value=join_rollouts(answer.value, copy=False))
        return answer

    def worker_pids(self) -> list[int]:
        """Returns the process ids of this process and of the workers."""
        (pids,) = self.machine.pids().values()
        return pids

    def kill(self) -> None:
        """Ends the workers at once."""
        self.close(0.0)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Closes the environments, and ends the workers and the policies."""
        try:
            if hasattr(self, "machine"):  # else it has not started
                self.machine.close(timeout_s)
        finally:
            self._actor.shutdown(wait=False, cancel_futures=True)
            claim, self._claim = self._claim, None
            if claim is not None:
                claim.release()

    def join(self, timeout_s: float) -> bool:
        """Returns whether it has ended, which :meth:`close` has waited for."""
        return True
