"""Environments stepped one after another in this process: the innermost pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rayvec.envs import EnvFactory
from rayvec.errors import RemoteFailure
from rayvec.pools.base import Autoreset, PoolSpaces
from rayvec.pools.memory import ArrayLayout, index_tree, split_actions, tree_writer
from rayvec.types import RawInfo, StepBatch, Tree

__all__ = ["EnvsFailed", "SerialPool"]


class EnvsFailed(Exception):
    """Some environments raised; the others took their step.

    Attributes:
        failures: Row of the environment and what it raised.
    """

    def __init__(self, failures: Sequence[tuple[int, RemoteFailure]]) -> None:
        super().__init__(f"{len(failures)} environments raised")
        self.failures = tuple(failures)


class SerialPool:
    """Steps environments in a loop.

    Args:
        factory: Makes exactly the environments of this pool.
        first_id: Global index of the first, for infos and for errors.
        where: Who runs this pool, for errors.

    Attributes:
        obs: Current observation of each environment, tree of ``[N, *obs_shape]``, or an object array.
        rew: Last rewards, ``float64 [N]``.
        terminated: ``bool [N]``.
        truncated: ``bool [N]``.
    """

    def __init__(self, factory: EnvFactory, first_id: int = 0, where: str = "this process") -> None:
        factory.register()
        self.num_envs = factory.num_envs
        self._first_id = first_id
        self._where = where
        self._seeds: list[int | None] = [None] * self.num_envs
        self._envs: list[gymnasium.Env[Any, Any]] = []
        for row in range(self.num_envs):
            try:
                self._envs.append(factory.make(row))
            except Exception as error:
                failure = self._failure(row, error)
                self.close()
                raise EnvsFailed([failure]) from error
        self._between_episodes = [True] * self.num_envs
        self._under_way: dict[bytes, tuple[NDArray[np.int64], Callable[..., list[RawInfo]], tuple[Any, ...]]] = {}
        self.layout = ArrayLayout.of(self._envs[0].observation_space)
        self.attach(self.layout, None)

    def attach(self, layout: ArrayLayout | None, arrays: Mapping[str, Any] | None) -> None:
        """Says where results go: into these arrays ``obs``, ``rew``, ``terminated``, ``truncated``, or its own."""
        n = self.num_envs
        self.layout = layout
        if arrays is None:
            obs = np.full(n, None, dtype=object) if layout is None else layout.empty((n,))
            arrays = {"obs": obs, "rew": np.zeros(n), "terminated": np.zeros(n, bool), "truncated": np.zeros(n, bool)}
        self.obs: Tree = arrays["obs"]
        self.rew: NDArray[np.float64] = arrays["rew"]
        self.terminated: NDArray[np.bool_] = arrays["terminated"]
        self.truncated: NDArray[np.bool_] = arrays["truncated"]
        self._write_obs: Callable[[int, Any], None] = tree_writer(self.obs)

    def spaces(self) -> PoolSpaces:
        """Returns what the environments say of themselves."""
        return PoolSpaces.join(
            [
                (1, PoolSpaces(env.observation_space, env.action_space, dict(env.metadata), env.render_mode))
                for env in self._envs
            ]
        )

    def step_rows(self, rows: Sequence[int], actions: Iterable[Any], autoreset: Autoreset) -> list[RawInfo]:
        """Takes one step of some environments, by row; results are in the arrays, raw infos are returned.

        Raises:
            EnvsFailed: Some raised; the others have taken their step.
        """
        infos: list[RawInfo] = []
        failures: list[tuple[int, RemoteFailure]] = []
        next_step, same_step = autoreset == Autoreset.NEXT_STEP, autoreset == Autoreset.SAME_STEP
        envs, write_obs, between = self._envs, self._write_obs, self._between_episodes
        rew, terminated, truncated = self.rew, self.terminated, self.truncated
        for row, action in zip(rows, actions, strict=True):
            env = envs[row]
            try:
                if next_step and between[row]:
                    self._reset_row(row, None, None, infos)
                    continue
                obs, reward, term, trunc, info = env.step(action)
                rew[row] = reward
                terminated[row] = term
                truncated[row] = trunc
                if term or trunc:
                    if same_step:
                        final_obs, final_info = deepcopy(obs), info  # some environments reuse their array
                        obs, info = env.reset()
                        infos.append(RawInfo(self._first_id + row, info, final_obs, final_info))
                        write_obs(row, obs)
                        between[row] = False
                        continue
                    between[row] = True
                else:
                    between[row] = False
                write_obs(row, obs)
                if info:
                    infos.append(RawInfo(self._first_id + row, info))
            except Exception as error:
                between[row] = True
                failures.append(self._failure(row, error))
        if failures:
            raise EnvsFailed(failures)
        return infos

    def reset_rows(
        self, rows: Sequence[int], seeds: Sequence[int | None], options: Mapping[str, Any] | None
    ) -> list[RawInfo]:
        """Resets some environments, by row, each with its seed.

        Raises:
            EnvsFailed: Some raised; the others have been reset.
        """
        infos: list[RawInfo] = []
        failures = []
        for row, seed in zip(rows, seeds, strict=True):
            self._seeds[row] = seed
            try:
                self._reset_row(row, seed, options, infos)
            except Exception as error:
                failures.append(self._failure(row, error))
        if failures:
            raise EnvsFailed(failures)
        return infos

    def ready_rows(self, rows: Sequence[int]) -> list[RawInfo]:
        """Resets those of these environments that are between two episodes, without a seed."""
        waiting = [row for row in rows if self._between_episodes[row]]
        return self.reset_rows(waiting, [None] * len(waiting), None)

    def _reset_row(self, row: int, seed: int | None, options: Mapping[str, Any] | None, infos: list[RawInfo]) -> None:
        self._between_episodes[row] = True
        env = self._envs[row]
        obs, info = env.reset(seed=seed, options=None if options is None else dict(options))
        self._write_obs(row, obs)
        self.rew[row] = 0.0
        self.terminated[row] = self.truncated[row] = False
        self._between_episodes[row] = False
        if info:
            infos.append(RawInfo(self._first_id + row, info))

    def call_rows(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: Sequence[int]) -> list[Any]:
        """Calls a method of some environments, or gets an attribute, through their wrappers."""
        results = []
        for row in rows:
            try:
                attribute = self._envs[row].get_wrapper_attr(name)
                results.append(attribute(*args, **kwargs) if callable(attribute) else attribute)
            except Exception as error:
                raise EnvsFailed([self._failure(row, error)]) from error
        return results

    def set_rows(self, name: str, values: Sequence[Any], rows: Sequence[int]) -> None:
        """Sets an attribute of some environments, through their wrappers."""
        for row, value in zip(rows, values, strict=True):
            try:
                self._envs[row].set_wrapper_attr(name, value)
            except Exception as error:
                raise EnvsFailed([self._failure(row, error)]) from error

    def _failure(self, row: int, error: Exception) -> tuple[int, RemoteFailure]:
        where = f"{self._where}, environment {self._first_id + row}, seed {self._seeds[row]}"
        return row, RemoteFailure.capture(error, where)

    # The EnvPool contract, for a rollout that runs where the environments are.

    def send(self, env_ids: NDArray[np.int64], actions: Tree, autoreset: Autoreset) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`; the step itself is taken by :meth:`recv`."""
        self._start(env_ids, self.step_rows, split_actions(actions, len(env_ids)), autoreset)

    def reset(
        self, env_ids: NDArray[np.int64], seeds: Sequence[int | None], options: Mapping[str, Any] | None = None
    ) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        self._start(env_ids, self.reset_rows, seeds, options)

    def ready(self, env_ids: NDArray[np.int64]) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        self._start(env_ids, self.ready_rows)

    def recv(
        self,
        env_ids: NDArray[np.int64] | None = None,
        min_ready: int | None = None,
        timeout_s: float | None = None,
    ) -> StepBatch:
        """See :class:`~rayvec.pools.base.EnvPool`; what was started is done now."""
        keys = list(self._under_way) if env_ids is None else [env_ids.tobytes()]
        started = [self._under_way.pop(key) for key in keys]
        infos: list[RawInfo] = []
        for ids, function, args in started:
            infos += self._guard(function, ids.tolist(), *args)
        return self._batch(np.concatenate([ids for ids, _, _ in started]) if env_ids is None else env_ids, infos)

    def _start(self, env_ids: NDArray[np.int64], function: Callable[..., list[RawInfo]], *args: Any) -> None:
        self._under_way[env_ids.tobytes()] = (env_ids, function, args)

    def call(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], env_ids: NDArray[np.int64]
    ) -> Callable[[float | None], list[Any]]:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        results = self._guard(self.call_rows, name, args, kwargs, env_ids.tolist())
        return lambda timeout_s: results

    def set_attr(self, name: str, values: Sequence[Any], env_ids: NDArray[np.int64]) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        self._guard(self.set_rows, name, values, env_ids.tolist())

    def close(self) -> None:
        """Closes every environment; the first error is raised when all have been closed."""
        errors = []
        while self._envs:
            try:
                self._envs.pop().close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _guard(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except EnvsFailed as failed:
            raise failed.failures[0][1].rebuild() from None

    def _batch(self, env_ids: NDArray[np.int64], infos: Sequence[RawInfo]) -> StepBatch:
        everything = len(env_ids) == self.num_envs and bool((env_ids == np.arange(self.num_envs)).all())
        rows: Any = slice(None) if everything else env_ids
        return StepBatch(
            env_ids,
            index_tree(self.obs, rows),
            self.rew[rows],
            self.terminated[rows],
            self.truncated[rows],
            tuple(infos),
        )
