"""What the pools that step environments in this process have in common: the pool contract, and restarts."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import StepBatch, Tree, tree_map
from rayvec.data.layouts import ArrayLayout, index_tree, split_actions
from rayvec.envs.factory import EnvFactory
from rayvec.envs.failures import (
    FAILURES,
    captured,
    copied_shallowly,
    copied_value,
    end_if_forked,
    failures_ignored,
    is_ctrl_c,
)
from rayvec.errors import ConfigError, EnvError, RemoteFailure, message
from rayvec.pools.base import NO_RESTARTS, Autoreset, RestartPolicy
from rayvec.pools.ids_by_owner import Keys
from rayvec.pools.restart_state import ENV_ARRAYS, RestartBudget

__all__ = [
    "FAILURES",
    "EnvsFailed",
    "InProcessPool",
    "captured",
    "copied_actions",
    "copied_value",
    "end_if_forked",
    "failures_ignored",
    "is_ctrl_c",
    "raise_failures",
]

_IMMUTABLE = (bool, int, float, str, bytes, type(None), np.generic)
_NOTE_CHARS = 1000
"""How much of an exception's text is in the log line of a restart."""


def copied_actions(actions: Any) -> Any:
    """Copies actions: environments may keep a reference to them, and a policy may write into the same array again."""
    return tree_map(copied_value, actions)


class EnvsFailed(Exception):
    """Some environments raised. The others completed their step.

    Attributes:
        failures: Pairs of an environment's row and the failure.
    """

    def __init__(self, failures: Sequence[tuple[int, RemoteFailure]]) -> None:
        super().__init__(f"{len(failures)} environments raised")
        self.failures = tuple(failures)


def raise_failures(failures: Sequence[tuple[int, RemoteFailure]]) -> None:
    """Raises ``EnvsFailed`` if there are any."""
    if failures:
        raise EnvsFailed(failures)


class InProcessPool(ABC):
    """Executes the commands of a pool in this process, inside :meth:`recv`, and restarts what raises.

    A *unit* is what fails and restarts as a whole: an environment, or a native sub-batch.

    Args:
        factory: Makes exactly the units of this pool.
        first_id: Global index of the first environment, for infos and errors.
        where: Name of the process that runs this pool, for errors.
        restart_policy: The restart policy for units that raise.

    Attributes:
        obs: Current observation of each environment, tree of ``[N, *obs_shape]``, or an object array.
        rew: Last rewards, ``float64 [N]``.
        terminated: ``bool [N]``.
        truncated: ``bool [N]``.
        notes: Messages about restarts for the log. The reader clears the list.
        infos_stay: Whether infos are read in this process: those that can't be copied are then returned themselves.
    """

    infos_stay = False
    native_mode: Autoreset | None = None
    _unit_kind = "environment"
    action_layout: ArrayLayout | None

    def __init__(
        self,
        factory: EnvFactory,
        first_id: int = 0,
        where: str = "this process",
        restart_policy: RestartPolicy = NO_RESTARTS,
    ) -> None:
        self.num_envs = factory.num_envs
        self.first_id = first_id
        self.notes: list[str] = []
        self._factory = factory
        self._where = where
        self._owner = os.getpid()
        self._restart = restart_policy.restart
        self._budget = RestartBudget()
        self._envs: list[Any] = []
        self._everyone: NDArray[np.int64] | None = None
        self._keys = Keys()
        self._progress = np.zeros(1, np.int64).data
        self._num_turns = 0
        self._pending: dict[bytes, tuple[NDArray[np.int64], Callable[..., list[Any]], tuple[Any, ...]]] = {}
        try:
            for unit in range(factory.num_envs):
                self._envs.append(self._make(unit))
            self._check_distinct()
            self._set_up()
            end_if_forked(self._owner)
        except FAILURES as error:
            end_if_forked(self._owner, error)
            unit, first = len(self._envs), first_id if self._unit_kind == "environment" else 0
            name = where if unit == factory.num_envs else f"{where}, {self._unit_kind} {first + unit}"
            with failures_ignored():
                self.close()
            raise EnvsFailed([(0, captured(error, name))]) from error

    def _check_distinct(self) -> None:
        """Raises ``ConfigError`` if two units are, or wrap, the same object: each would step the other's episode."""
        made = [getattr(env, "unwrapped", env) for env in self._envs]
        if len(set(map(id, made))) < len(made):
            raise ConfigError(
                "Each callable makes an environment of its own.",
                expected=f"{len(made)} environments in one process",
                got="the same environment more than once",
                remedy="Make the environment inside the callable: lambda: gymnasium.make(...).",
            )

    # What a pool defines. Rows are indices of its environments.

    @abstractmethod
    def _make(self, unit: int) -> Any:
        """Makes a unit."""

    @abstractmethod
    def _set_up(self) -> None:
        """Reads the spaces of the units that have been made, and allocates the arrays."""

    @abstractmethod
    def _identify(self, unit: int) -> tuple[int, str]:
        """Returns the row of a unit's first environment, and the name of the unit and its seed, for errors."""

    @abstractmethod
    def _end_episodes(self, unit: int) -> None:
        """Takes note that a unit is restarted: its episodes are cut, and its next reset has another seed."""

    @abstractmethod
    def step_rows(self, rows: Sequence[int], actions: Iterable[Any], autoreset: Autoreset) -> list[Any]:
        """Steps some environments. Writes results into the arrays and returns raw infos."""

    @abstractmethod
    def reset_rows(
        self, rows: Sequence[int], seeds: Sequence[int | None], options: Mapping[str, Any] | None
    ) -> list[Any]:
        """Resets some environments, each with its seed."""

    @abstractmethod
    def begin_rows(self, rows: Sequence[int]) -> list[Any]:
        """Resets, without a seed, those of the given environments that are between two episodes."""

    @abstractmethod
    def call_rows(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: Sequence[int]) -> list[Any]:
        """Calls a method or reads an attribute of some environments."""

    @abstractmethod
    def set_rows(self, name: str, values: Sequence[Any], rows: Sequence[int]) -> None:
        """Sets an attribute of some environments."""

    @abstractmethod
    def _rows_of(self, env_ids: NDArray[np.int64]) -> Any:
        """Returns what names some environments in :meth:`step_rows`, :meth:`reset_rows` and :meth:`begin_rows`."""

    def attach(self, layout: ArrayLayout | None, arrays: Mapping[str, Any]) -> None:
        """Writes results and what a restart needs into these arrays of N rows: ``obs``, and those of `ENV_ARRAYS`.

        The arrays outlive this process. A replacement process resumes from the seed, the number of restarts and the
        :class:`~rayvec.pools.restart_state.EpisodeState` of each environment.
        """
        self.layout = layout
        self._arrays = arrays
        self._everyone = None
        self.obs: Tree = arrays["obs"]
        self.rew: NDArray[np.float64] = arrays["rew"]
        self.terminated: NDArray[np.bool_] = arrays["terminated"]
        self.truncated: NDArray[np.bool_] = arrays["truncated"]

    def attach_own(self, layout: ArrayLayout | None) -> None:
        """Allocates arrays in this process and writes results there."""
        n = self.num_envs
        obs = np.full(n, None, dtype=object) if layout is None else layout.empty((n,))
        self.attach(layout, {"obs": obs, **{name: np.zeros(n, dtype) for name, dtype in ENV_ARRAYS.items()}})

    def _copied(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """Copies an info: environments may modify it after they return it."""
        return {
            key: value if isinstance(value, _IMMUTABLE) else self._info_value(key, value) for key, value in info.items()
        }

    def _info_value(self, key: Any, value: Any) -> Any:
        try:
            return copied_value(value)
        except Exception as error:
            if self.infos_stay:
                return copied_shallowly(value)
            raise TypeError(
                message(
                    "What an info holds is pickled and sent to the process of the driver.",
                    expected=f"a value that can be copied under {key!r}",
                    got=f"{type(value).__name__} ({error})",
                    remedy="Leave it out of the info, or pass num_nodes=0 and workers_per_node=0.",
                )
            ) from error

    def _failure(self, unit: int, error: BaseException) -> tuple[int, RemoteFailure]:
        end_if_forked(self._owner, error)
        row, name = self._identify(unit)
        return row, captured(error, f"{self._where}, {name}")

    def _recover(
        self, unit: int, error: BaseException, failures: list[tuple[int, RemoteFailure]], resume: Callable[[], None]
    ) -> None:
        """Restarts a unit after an error and resumes with `resume`.

        If that raises too, it tries again until it succeeds or the restart budget is spent.
        """
        while True:
            row, failure = self._failure(unit, error)
            if not self._restart:
                failures.append((row, failure))
                return
            if not self._budget.spend(unit):
                text = message(
                    f"The same {self._unit_kind} is not restarted for ever.",
                    expected=RestartBudget.rule(),
                    got=f"one more, by {failure.type_name}: {failure.text}",
                    remedy="Correct the environment; its traceback stands below.",
                )
                last = EnvError(f"{text}\n\n{failure.remote_traceback}")
                failures.append((row, RemoteFailure.capture(last, failure.where)))
                return
            try:
                with failures_ignored():
                    self._envs[unit].close()
                self._end_episodes(unit)
                said = " ".join(failure.text.split())[:_NOTE_CHARS]
                self.notes.append(f"{failure.where} raised {failure.type_name}: {said}; restarted")
                self._envs[unit] = self._make(unit)
                self._check_distinct()
                resume()
                return
            except FAILURES as again:
                error = again

    def show_progress(self, progress: NDArray[np.int64]) -> None:
        """Reports the progress of a rollout in `progress`, ``int64 [1]``, which the waiting process reads.

        The number is odd while environments step and even while the policy acts. It changes with every step, so that
        the waiting process can detect a hung step.
        """
        self._num_turns = 0
        progress[0] = 0
        self._progress = progress.data

    # The EnvPool interface, for a rollout in this process.

    def send(self, env_ids: NDArray[np.int64], actions: Tree, autoreset: Autoreset) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`. The environments step inside :meth:`recv`."""
        self._start(env_ids, self.step_rows, split_actions(copied_actions(actions), len(env_ids)), autoreset)

    def reset(
        self, env_ids: NDArray[np.int64], seeds: Sequence[int | None], options: Mapping[str, Any] | None = None
    ) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        self._start(env_ids, self.reset_rows, seeds, options)

    def begin_episodes(self, env_ids: NDArray[np.int64]) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        self._start(env_ids, self.begin_rows)

    def observe(self, env_ids: NDArray[np.int64]) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        self._start(env_ids, lambda rows: [])

    def recv(
        self,
        env_ids: NDArray[np.int64] | None = None,
        min_completed: int | None = None,
        timeout_s: float | None = None,
    ) -> StepBatch:
        """See :class:`~rayvec.pools.base.EnvPool`. Executes the pending commands now."""
        self._progress[0] = self._num_turns + 1
        keys = list(self._pending) if env_ids is None else [self._keys.of(env_ids)]
        started = [self._pending.pop(key) for key in keys]
        infos: list[Any] = []
        for ids, function, args in started:
            rows = self._rows_of(ids)
            infos += self._guard(function, rows, *args)
        if env_ids is None:
            env_ids = np.sort(np.concatenate([ids for ids, _, _ in started]))
            infos.sort(key=lambda info: info.env_id)
        self._num_turns += 2
        self._progress[0] = self._num_turns
        return self._batch(env_ids, infos)

    def _start(self, env_ids: NDArray[np.int64], function: Callable[..., list[Any]], *args: Any) -> None:
        self._pending[self._keys.of(env_ids)] = (env_ids, function, args)

    def call(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], env_ids: NDArray[np.int64]
    ) -> Callable[[float | None], list[Any]]:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        results = self._guard(self.call_rows, name, args, kwargs, env_ids.tolist())
        return lambda timeout_s: results

    def set_attr(self, name: str, values: Sequence[Any], env_ids: NDArray[np.int64]) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        self._guard(self.set_rows, name, values, env_ids.tolist())

    def _guard(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except EnvsFailed as failed:
            raise failed.failures[0][1].rebuild()  # noqa: B904  # rebuild() sets the cause

    def _batch(self, env_ids: NDArray[np.int64], infos: Sequence[Any]) -> StepBatch:
        if env_ids is not self._everyone:
            if not np.array_equal(env_ids, np.arange(self.num_envs)):
                return self._answers(env_ids, env_ids, infos)
            self._everyone = env_ids  # a rollout passes the same array at each step
            self._without_infos = self._answers(env_ids, slice(None), ())
        return self._answers(env_ids, slice(None), infos) if infos else self._without_infos

    def _answers(self, env_ids: NDArray[np.int64], rows: Any, infos: Sequence[Any]) -> StepBatch:
        return StepBatch(
            env_ids,
            index_tree(self.obs, rows),
            self.rew[rows],
            self.terminated[rows],
            self.truncated[rows],
            tuple(infos),
        )

    def close(self) -> None:
        """Closes all that the pool steps. If some raise, it raises the first error after all are closed."""
        errors: list[BaseException] = []
        while self._envs:
            try:
                self._envs.pop().close()
            except FAILURES as error:
                if is_ctrl_c(error):
                    raise
                errors.append(error)
        if errors:
            raise errors[0]
