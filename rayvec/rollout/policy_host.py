"""The policies that act over some environments, in a worker, in a node's process or in the driver."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayvec.data import ChunkRequest, StepBatch
from rayvec.data.chunk import StopEarly
from rayvec.data.layouts import ArrayLayout, index_tree
from rayvec.envs.failures import FAILURES, captured
from rayvec.fleet.commands import STEPPING, Answer, Autoreset, Note, Op
from rayvec.rollout.column_recorder import Empty
from rayvec.rollout.loop import ActingPolicy, TakenChunk, as_policy, rollout

__all__ = ["ChunkOrder", "ChunkPlace", "PolicyHost"]


class ChunkPlace(NamedTuple):
    """Where the workers of a machine write a chunk.

    Attributes:
        number: Number of the chunk, from 1.
        slot: Number of the slot.
        num_bytes: Size of the slot.
        first_row: The machine's row of the chunk's first column.
        num_envs: N, of all workers that take the chunk.
        num_weights: P; 0 for a policy that keeps its weights.
    """

    number: int
    slot: int
    num_bytes: int
    first_row: int
    num_envs: int
    num_weights: int


class ChunkOrder(NamedTuple):
    """What a command for a rollout asks for.

    Attributes:
        key: The key of the policy.
        request: How many steps, and which noise.
        version: Version of the weights.
        weights: The weights to act with, ``float32 [P]``; None for those that the policy has.
        place: Where workers of a machine write the chunk, and read the weights; the machine's fleet says so.
    """

    key: int
    request: ChunkRequest
    version: int = 0
    weights: NDArray[np.float32] | None = None
    place: ChunkPlace | None = None


class PolicyHost:
    """Lets policies take chunks of steps, and knows where a recurrent policy must reset its hidden state.

    That is where an episode began outside of chunks, or everywhere if the policy has not seen the last steps.

    Args:
        target: Executes commands, with the methods and arrays of :class:`rayvec.fleet.fleet.Fleet`.
        action_layout: How actions lie in arrays; None where they are objects.
        first_id: Global index of the first environment.
        native_mode: The autoreset mode of native sub-batches; None for ordinary environments.
        groups: Partition of the rows: the policy acts on one group while the next one steps. One group by default.

    Attributes:
        notes: What was restarted, for the log, until the caller takes the list.
    """

    def __init__(
        self,
        target: Any,
        action_layout: ArrayLayout | None,
        first_id: int = 0,
        native_mode: Autoreset | None = None,
        groups: Sequence[NDArray[np.int64]] | None = None,
    ) -> None:
        self.num_envs, self.first_id, self.native_mode = target.num_envs, first_id, native_mode
        self.action_layout, self.target = action_layout, target
        self.groups = groups or [np.arange(target.num_envs)]
        self.notes: list[Note] = []
        self._policies: dict[int, ActingPolicy] = {}
        self._versions: dict[int, int] = {}
        self._begun = np.zeros(target.num_envs, bool)
        self._acted: ActingPolicy | None = None

    def load(self, key: int, policy: ActingPolicy | bytes) -> None:
        """Takes a policy of this process, or loads a pickled one."""
        self._policies[key] = as_policy(pickle.loads(policy)) if isinstance(policy, bytes) else policy
        self._versions[key] = 0

    def execute(self, op: int, rest: Any, where: str, take: Callable[[ChunkOrder], TakenChunk] | None = None) -> Answer:
        """Executes a command for policies. Returns its result or failure, and what was restarted.

        Args:
            op: ``LOAD``, ``DROP`` or ``ROLLOUT``.
            rest: What else the operation needs.
            where: What errors call this process.
            take: Takes a chunk, in place of :meth:`take`.
        """
        try:
            value = None
            if op == Op.ROLLOUT:
                value = (take or self.take)(rest)
            elif op == Op.LOAD:
                self.load(*rest)
            else:
                self.drop(*rest)
        except FAILURES as error:
            return Answer(failure=captured(error, where))
        return Answer(value=value, notes=self.take_notes())

    def drop(self, key: int) -> None:
        """Removes a policy."""
        self._policies.pop(key, None)

    def note(self, op: int, rows: NDArray[np.int64]) -> None:
        """Records a command for environments outside of this host's chunks: the next policy has not seen its steps."""
        if op == Op.RESET:
            self._begun[rows] = True
        elif op in STEPPING:
            self._acted = None

    def take_notes(self) -> tuple[Note, ...]:
        """Returns what was restarted since the last call, for the log."""
        notes, self.notes = tuple(self.notes), []
        return notes

    def results(self, ticket: Any, env_ids: NDArray[np.int64], rows: Any) -> StepBatch:
        """Waits for a command, and returns its results as views of the arrays.

        Args:
            ticket: Of the command.
            env_ids: Its environments.
            rows: The same, a slice if they are consecutive.

        Raises:
            Exception: What an environment raised that was not restarted. Its ``__cause__`` is an ``EnvError``.
        """
        self.target.wait(ticket)
        answer, arrays = self.target.take(ticket), self.target.arrays
        self.notes += answer.notes
        if answer.failure is not None:
            raise answer.failure.rebuild()
        rew, terminated, truncated = (arrays[name][rows] for name in ("rew", "terminated", "truncated"))
        return StepBatch(env_ids, index_tree(arrays["obs"], rows), rew, terminated, truncated, answer.infos)

    def take(self, order: ChunkOrder, cut: StopEarly | None = None, empty: Empty = np.empty) -> TakenChunk:
        """Takes a chunk with a loaded policy. `cut` and `empty` are those of :func:`rayvec.rollout.loop.rollout`."""
        policy = self._policies[order.key]
        if order.weights is not None and order.version != self._versions[order.key]:
            policy.load_weights(order.weights)
            self._versions[order.key] = order.version
        begun = np.flatnonzero(self._begun) if policy is self._acted else None
        taken = rollout(self, policy, order.request, order.version, begun, cut, empty)
        self._begun[:] = False
        restarts = taken.chunk.restarts
        at_end = restarts[:, 0] == taken.chunk.num_steps - 1  # the policy has not seen the episode that begins next
        self._begun[restarts[at_end, 1]] = True
        self._acted = policy  # only now: the steps count as absence
        return taken
