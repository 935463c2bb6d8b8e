"""The environments of a slice or of a fleet, as a rollout steps them: groups of environments, each with its command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data.layouts import ArrayLayout, index_tree
from rayvec.data.steps import StepBatch
from rayvec.data.trees import Tree, as_slice, tree_map
from rayvec.fleet.commands import Answer, Autoreset, Command, Op

__all__ = ["Here", "Stepper"]


class Here:
    """A slice of this process, which answers each command at once.

    Args:
        slice_: The slice; its arrays are attached.
    """

    def __init__(self, slice_: Any) -> None:
        self._slice = slice_
        self.num_envs: int = slice_.num_envs
        self.arrays: dict[str, Any] = slice_.arrays

    def post(self, command: Command) -> Answer:
        """Executes a command. Actions are copied: environments may keep a reference to them."""
        if command.op == Op.STEP:
            command = Command(Op.STEP, command.rows, tree_map(np.array, command.actions), command.mode)
        answer: Answer = self._slice.execute(command)
        return answer

    def wait(self, ticket: Answer) -> bool:
        """Returns True."""
        return True

    def take(self, ticket: Answer) -> Answer:
        """Returns the answer."""
        return ticket


class Stepper:
    """Steps groups of environments.

    Args:
        target: Executes the commands, with the methods and arrays of :class:`rayvec.fleet.fleet.Fleet`.
        action_layout: How actions lie in arrays; None where they are objects.
        first_id: Global index of the first environment.
        native_mode: The autoreset mode of native sub-batches; None for ordinary environments.

    Attributes:
        notes: What was restarted, for the log, until the caller clears the list.
    """

    def __init__(
        self,
        target: Any,
        action_layout: ArrayLayout | None,
        first_id: int = 0,
        native_mode: Autoreset | None = None,
    ) -> None:
        self.num_envs, self.first_id, self.native_mode = target.num_envs, first_id, native_mode
        self.action_layout = action_layout
        self.notes: list[str] = []
        self._target = target
        self._tickets: dict[bytes, Any] = {}
        self._selections: dict[bytes, Any] = {}

    def begin_episodes(self, env_ids: NDArray[np.int64]) -> None:
        """Resets those environments that are between two episodes."""
        self._post(Command(Op.BEGIN, env_ids))

    def send(self, env_ids: NDArray[np.int64], actions: Tree, autoreset: Autoreset) -> None:
        """Starts a step of some environments."""
        self._post(Command(Op.STEP, env_ids, actions, autoreset))

    def reset(
        self, env_ids: NDArray[np.int64], seeds: Sequence[int | None], options: Mapping[str, Any] | None = None
    ) -> None:
        """Starts a reset of some environments, each with its seed."""
        self._post(Command(Op.RESET, env_ids, rest=(list(seeds), options)))

    def _post(self, command: Command) -> None:
        self._tickets[command.rows.tobytes()] = self._target.post(command)

    def recv(self, env_ids: NDArray[np.int64]) -> StepBatch:
        """Waits for the command of some environments, and returns its results as views of the arrays.

        Raises:
            Exception: What an environment raised that was not restarted. Its ``__cause__`` is an ``EnvError``.
        """
        key = env_ids.tobytes()
        ticket = self._tickets.pop(key)
        self._target.wait(ticket)
        answer = self._target.take(ticket)
        self.notes += answer.notes
        if answer.failure is not None:
            raise answer.failure.rebuild()
        if key not in self._selections:
            self._selections[key] = as_slice(env_ids)
        arrays, rows = self._target.arrays, self._selections[key]
        rew, terminated, truncated = (arrays[name][rows] for name in ("rew", "terminated", "truncated"))
        return StepBatch(env_ids, index_tree(arrays["obs"], rows), rew, terminated, truncated, answer.infos)
