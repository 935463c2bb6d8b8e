"""What the pools that step environments in this process have in common: the pool contract, over rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import StepBatch, Tree
from rayvec.errors import RemoteFailure
from rayvec.pools.base import Autoreset
from rayvec.pools.plan import Keys
from rayvec.pools.restarts import ENV_ARRAYS
from rayvec.pools.shared_memory import ArrayLayout, index_tree, split_actions

__all__ = ["EnvsFailed", "InProcessPool"]


class EnvsFailed(Exception):
    """Some environments raised. The others completed their step.

    Attributes:
        failures: Pairs of an environment's row and the failure.
    """

    def __init__(self, failures: Sequence[tuple[int, RemoteFailure]]) -> None:
        super().__init__(f"{len(failures)} environments raised")
        self.failures = tuple(failures)


class InProcessPool:
    """Executes the commands of a pool in this process, inside :meth:`recv`.

    Args:
        num_envs: The number of environments N.
        first_id: Global index of the first environment, for infos and errors.

    Attributes:
        obs: Current observation of each environment, tree of ``[N, *obs_shape]``, or an object array.
        rew: Last rewards, ``float64 [N]``.
        terminated: ``bool [N]``.
        truncated: ``bool [N]``.
        notes: Messages about restarts for the log. The reader clears the list.
    """

    native_mode: Autoreset | None = None
    _envs: list[Any]
    obs: Tree
    rew: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]

    def __init__(self, num_envs: int, first_id: int) -> None:
        self.num_envs = num_envs
        self.first_id = first_id
        self.notes: list[str] = []
        self._everyone: NDArray[np.int64] | None = None
        self._keys = Keys()
        self._progress = np.zeros(1, np.int64).data
        self._num_turns = 0
        self._pending: dict[bytes, tuple[NDArray[np.int64], Callable[..., list[Any]], tuple[Any, ...]]] = {}

    # What a pool defines. Rows are indices of its environments.

    def attach(self, layout: ArrayLayout | None, arrays: Mapping[str, Any]) -> None:
        """Writes results and what a restart needs into these arrays of N rows: ``obs``, and those of `ENV_ARRAYS`."""
        raise NotImplementedError

    def step_rows(self, rows: Sequence[int], actions: Iterable[Any], autoreset: Autoreset) -> list[Any]:
        """Steps some environments. Writes results into the arrays and returns raw infos."""
        raise NotImplementedError

    def reset_rows(
        self, rows: Sequence[int], seeds: Sequence[int | None], options: Mapping[str, Any] | None
    ) -> list[Any]:
        """Resets some environments, each with its seed."""
        raise NotImplementedError

    def begin_rows(self, rows: Sequence[int]) -> list[Any]:
        """Resets, without a seed, those of the given environments that are between two episodes."""
        raise NotImplementedError

    def call_rows(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: Sequence[int]) -> list[Any]:
        """Calls a method or reads an attribute of some environments."""
        raise NotImplementedError

    def set_rows(self, name: str, values: Sequence[Any], rows: Sequence[int]) -> None:
        """Sets an attribute of some environments."""
        raise NotImplementedError

    def _rows_of(self, env_ids: NDArray[np.int64]) -> Any:
        """Returns what names some environments in :meth:`step_rows`, :meth:`reset_rows` and :meth:`begin_rows`."""
        raise NotImplementedError

    def attach_own(self, layout: ArrayLayout | None) -> None:
        """Allocates arrays in this process and writes results there."""
        n = self.num_envs
        obs = np.full(n, None, dtype=object) if layout is None else layout.empty((n,))
        self.attach(layout, {"obs": obs, **{name: np.zeros(n, dtype) for name, dtype in ENV_ARRAYS.items()}})

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
        self._start(env_ids, self.step_rows, split_actions(actions, len(env_ids)), autoreset)

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
            error = failed.failures[0][1].rebuild()
        raise error

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
        errors = []
        while self._envs:
            try:
                self._envs.pop().close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
