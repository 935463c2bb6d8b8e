"""The innermost pool of native sub-batches: vector environments that step as a whole, in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import SubBatchInfo, Tree, as_slice, tree_leaves, tree_map
from rayvec.data.layouts import ArrayLayout
from rayvec.data.sub_batch_infos import merge_reset
from rayvec.envs.sub_batch import SubBatch
from rayvec.errors import ConfigError, EnvError, RemoteFailure
from rayvec.pools.base import Autoreset, PoolSpaces
from rayvec.pools.ids_by_owner import Plans
from rayvec.pools.in_process_base import FAILURES, EnvsFailed, InProcessPool, copied_actions, raise_failures
from rayvec.pools.restart_state import RESTARTED, EpisodeState, seed_of, store_seed

__all__ = ["NativePool"]

NEW, RUNNING, ENDED, CUT = (int(state) for state in EpisodeState)


class NativePool(InProcessPool):
    """Steps native sub-batches one after another.

    A sub-batch steps, fails and restarts as a whole. In :meth:`step_rows` and :meth:`begin_rows`, numbers name
    sub-batches.

    Attributes:
        spaces: The spaces, sizes and metadata of the sub-batches.
    """

    _envs: list[SubBatch]
    _unit_kind = "native sub-batch"
    _slices: Sequence[slice] = ()

    def _make(self, unit: int) -> SubBatch:
        env = SubBatch(self._factory.make(unit))
        if self._slices and env.num_envs != self._envs[unit].num_envs:
            raise EnvError(
                "A native sub-batch that is restarted has as many environments as before.",
                expected=self._envs[unit].num_envs,
                got=env.num_envs,
                remedy="Let the callable return the same vector environment every time.",
            )
        return env

    def _set_up(self) -> None:
        sizes = [env.num_envs for env in self._envs]
        self.spaces = PoolSpaces.join(list(zip(sizes, map(_spaces_of, self._envs), strict=True)))
        self.native_mode = self.spaces.native_mode
        self._bounds = np.cumsum([0, *sizes])
        self._slices = [slice(*pair) for pair in pairwise(self._bounds.tolist())]
        self.num_envs = sum(sizes)
        self.action_layout = ArrayLayout.of(self.spaces.action)
        self._plans = Plans(np.zeros(1, np.int64), self.num_envs, self._bounds)
        self.attach_own(ArrayLayout.of(self.spaces.observation))

    def attach(self, layout: ArrayLayout | None, arrays: Mapping[str, Any]) -> None:
        """See :class:`~rayvec.pools.in_process_base.InProcessPool`. A replacement process begins with cut episodes."""
        super().attach(layout, arrays)
        self._obs_leaves = list(tree_leaves(self.obs))
        self._waiting = np.zeros(self.num_envs, bool)  # for a reset by the caller, after their episode has ended
        self._episodes = [arrays["episode"][rows] for rows in self._slices]  # all of a sub-batch have one state
        for episodes in self._episodes:
            episodes[:] = NEW if (episodes == NEW).all() else CUT

    def step_rows(self, rows: Sequence[int], actions: Any, autoreset: Autoreset) -> list[SubBatchInfo]:
        """Steps some sub-batches. Writes results into the arrays and returns infos.

        Raises:
            EnvsFailed: Some sub-batches raised and were not restarted. The others completed their step.
        """
        infos: list[SubBatchInfo] = []
        failures: list[tuple[int, RemoteFailure]] = []
        at = 0
        for unit in rows:
            size = self._envs[unit].num_envs
            part = actions if len(rows) == 1 else tree_map(lambda leaf, at=at, size=size: leaf[at : at + size], actions)
            at += size
            try:
                self._step_unit(unit, part, autoreset, infos)
            except FAILURES as error:
                self._recover(unit, error, failures, partial(self._end_cut, unit, autoreset, infos))
        raise_failures(failures)
        return infos

    def _step_unit(self, unit: int, actions: Any, autoreset: Autoreset, infos: list[SubBatchInfo]) -> None:
        state = self._episodes[unit][0]
        if state == CUT:
            self._end_cut(unit, autoreset, infos)
            return
        if state == ENDED:
            self._reset_whole(unit, infos)
            return
        env, rows = self._envs[unit], self._slices[unit]
        obs, rew, terminated, truncated, info = env.step(actions)
        done = terminated | truncated
        # now, since a reset may write into these arrays
        self.rew[rows], self.terminated[rows], self.truncated[rows] = rew, terminated, truncated
        if autoreset == Autoreset.DISABLED:
            self._waiting[rows] = done
        elif autoreset == Autoreset.SAME_STEP and done.any():
            if self.native_mode == Autoreset.DISABLED:
                obs, info = self._reset_within(unit, obs, info, done)
            else:
                env.final_obs(info, done, obs)
                if not getattr(info["final_obs"], "dtype", np.dtype(int)).hasobject:
                    self._leaves(unit, info["final_obs"], "info['final_obs']")
        self._write_obs(unit, obs)
        self._say(unit, info, infos)

    def _write_obs(self, unit: int, obs: Any) -> None:
        for target, leaf in zip(self._obs_leaves, self._leaves(unit, obs), strict=True):
            target[self._slices[unit]] = leaf

    def _leaves(self, unit: int, obs: Any, name: str = "observations") -> list[NDArray[Any]]:
        """Returns the arrays of the observations of a sub-batch.

        Raises:
            EnvError: They are not those of its space.
        """
        env = self._envs[unit]
        assert self.layout is not None
        try:
            leaves = self.layout.flatten(obs)
        except ValueError as error:
            raise EnvError(
                "A native sub-batch returns observations in the structure of its space.",
                expected=f"{name} of {self.layout.space}",
                got=error,
                remedy="Correct the vector environment, or its spaces.",
            ) from error
        return [env.leaf(leaf, *field, name) for leaf, field in zip(leaves, self.layout.leaves, strict=True)]

    def _say(self, unit: int, info: Mapping[str, Any], infos: list[SubBatchInfo]) -> None:
        if info:
            rows = self._slices[unit]
            infos.append(SubBatchInfo(self.first_id + rows.start, rows.stop - rows.start, self._copied(info)))

    def _reset_within(
        self, unit: int, obs: Any, info: Mapping[str, Any], done: NDArray[np.bool_]
    ) -> tuple[Any, dict[str, Any]]:
        """Resets, within the step, environments of a sub-batch that doesn't do so by itself."""
        final_obs, info = tree_map(np.array, obs), self._copied(info)  # the reset may write into what it has returned
        self._write_obs(unit, obs)
        obs, reset_info = self._reset_some(unit, None, None, done)
        ended = {"final_obs": final_obs, "_final_obs": done, "final_info": info, "_final_info": done}
        return obs, {**merge_reset(info, reset_info, done), **ended}

    def _reset_some(
        self,
        unit: int,
        seeds: Mapping[int, int | None] | None,
        options: Mapping[str, Any] | None,
        mask: NDArray[np.bool_],
    ) -> tuple[Any, dict[str, Any]]:
        """Resets some environments of a sub-batch.

        Raises:
            EnvError: The sub-batch has reset others too: it does not support ``options["reset_mask"]``.
        """
        env, rows = self._envs[unit], self._slices[unit]
        if mask.all():
            return env.reset(seeds, options, None)
        obs, info = env.reset(seeds, options, mask.copy())
        assert self.layout is not None
        for kept, leaf, field in zip(self._obs_leaves, self.layout.flatten(obs), self.layout.leaves, strict=True):
            new = env.leaf(leaf, *field)
            if not np.array_equal(kept[rows][~mask], new[~mask], equal_nan=new.dtype.kind == "f"):
                raise EnvError(
                    "A reset of some environments of a native sub-batch needs its support of options['reset_mask'].",
                    expected="the observations of the other environments to stay as they are",
                    got="new ones: the sub-batch ignores the mask",
                    remedy="Reset whole sub-batches, or let them reset by themselves.",
                )
        return obs, info

    def reset_rows(
        self, rows: Sequence[int], seeds: Sequence[int | None], options: Mapping[str, Any] | None
    ) -> list[SubBatchInfo]:
        """Resets some environments, given by row, each with its seed.

        Raises:
            EnvsFailed: Some sub-batches raised and were not restarted. The others have been reset.
        """
        infos: list[SubBatchInfo] = []
        failures: list[tuple[int, RemoteFailure]] = []
        selected = np.zeros(self.num_envs, bool)
        selected[rows] = True
        given = {row: seed for row, seed in zip(rows, seeds, strict=True) if seed is not None}
        for row, seed in given.items():
            store_seed(self._arrays, row, seed)
        for unit, of_unit in enumerate(self._slices):
            mask = selected[of_unit]
            if not mask.any():
                continue
            own = {row: given.get(of_unit.start + row) for row in np.flatnonzero(mask).tolist()} if given else None
            try:
                self._reset_unit(unit, own, options, mask, infos)
            except FAILURES as error:
                if isinstance(error, ConfigError):
                    failures.append(self._failure(unit, error))
                else:
                    self._recover(unit, error, failures, partial(self._reset_whole, unit, infos, options))
        raise_failures(failures)
        return infos

    def _reset_unit(
        self,
        unit: int,
        seeds: Mapping[int, int | None] | None,
        options: Mapping[str, Any] | None,
        mask: NDArray[np.bool_],
        infos: list[SubBatchInfo],
        mark: Mapping[str, Any] | None = None,
    ) -> None:
        """Resets environments of a sub-batch, and says what it returns, together with `mark`."""
        env, rows = self._envs[unit], self._slices[unit]
        state = self._episodes[unit][0]
        if state != RUNNING and not mask.all():
            if state == NEW:
                raise ConfigError(
                    "The first reset of a native sub-batch resets all its environments.",
                    expected="no reset_mask before the first reset",
                    got=f"a mask of some environments of {self._name(unit)}",
                    remedy="Call reset() once without a mask.",
                )
            mask = np.ones(env.num_envs, bool)  # a restarted sub-batch has no episode to continue
        if seeds is None and state in (CUT, ENDED):
            seeds = self._restart_seeds(unit)
        if seeds is not None and env.ignores_seeds:
            where = f"{self._where}, {self._name(unit)}"
            self.notes.append(f"{where} ignores the seeds of a reset; pass seeds to envpool.make")
        obs, info = self._reset_some(unit, seeds, options, mask)
        self._write_obs(unit, obs)
        self.rew[rows][mask] = 0.0
        self.terminated[rows][mask] = self.truncated[rows][mask] = False
        self._waiting[rows] &= ~mask
        self._episodes[unit][:] = RUNNING
        self._say(unit, {**info, **(mark or {})}, infos)

    def _reset_whole(
        self,
        unit: int,
        infos: list[SubBatchInfo],
        options: Mapping[str, Any] | None = None,
        mark: Mapping[str, Any] | None = None,
    ) -> None:
        self._reset_unit(unit, None, options, np.ones(self._envs[unit].num_envs, bool), infos, mark)

    def begin_rows(self, rows: Sequence[int]) -> list[SubBatchInfo]:
        """Resets, without a seed, those environments of some sub-batches that are between two episodes.

        Where the sub-batch resets them in its next step, this is left to it.
        """
        infos: list[SubBatchInfo] = []
        failures: list[tuple[int, RemoteFailure]] = []
        for unit in rows:
            state = self._episodes[unit][0]
            try:
                if state != RUNNING:
                    self._reset_whole(unit, infos, mark=self._restarted(unit) if state == CUT else None)
                elif self.native_mode == Autoreset.DISABLED:
                    done = self._waiting[self._slices[unit]].copy()
                    if done.any():
                        self._reset_unit(unit, None, None, done, infos)
            except FAILURES as error:
                self._recover(unit, error, failures, partial(self._reset_whole, unit, infos))
        raise_failures(failures)
        return infos

    def _restarted(self, unit: int) -> dict[str, Any]:
        mark = np.ones(self._envs[unit].num_envs, bool)
        return {RESTARTED: mark, f"_{RESTARTED}": mark.copy()}

    def _end_cut(self, unit: int, autoreset: Autoreset, infos: list[SubBatchInfo]) -> None:
        """Ends interrupted episodes without a step: the last true observations, reward 0, truncated."""
        rows = self._slices[unit]
        mark, final_obs = self._restarted(unit), tree_map(lambda leaf: leaf[rows].copy(), self.obs)
        self._episodes[unit][:] = ENDED
        if autoreset == Autoreset.SAME_STEP:
            ended = np.ones(rows.stop - rows.start, bool)
            final = {"final_obs": final_obs, "_final_obs": ended, "final_info": dict(mark), "_final_info": ended.copy()}
            self._reset_whole(unit, infos, mark={**mark, **final})
        else:
            self._say(unit, mark, infos)
        self.rew[rows] = 0.0
        self.terminated[rows], self.truncated[rows] = False, True

    def _identify(self, unit: int) -> tuple[int, str]:
        start = self._slices[unit].start
        return start, f"{self._name(unit)}, seed {seed_of(self._arrays, start, self.first_id + start)}"

    def _end_episodes(self, unit: int) -> None:
        self._arrays["restarts"][self._slices[unit]] += 1
        self._episodes[unit][:] = CUT

    def _restart_seeds(self, unit: int) -> dict[int, int | None] | None:
        """Returns the seeds with which a restarted sub-batch is reset, or None if it never had one."""
        start = self._slices[unit].start
        seed = seed_of(self._arrays, start, self.first_id + start) if self._arrays["restarts"][start] else None
        return None if seed is None else {row: seed + row for row in range(self._envs[unit].num_envs)}

    def _name(self, unit: int) -> str:
        rows = self._slices[unit]
        return f"native sub-batch of environments {self.first_id + rows.start} to {self.first_id + rows.stop - 1}"

    def rows_of_units(self, units: Sequence[int]) -> Any:
        """Returns the rows of some sub-batches, as a slice if they are consecutive."""
        if len(units) == len(self._slices):
            return slice(None)
        return as_slice(
            np.concatenate([np.arange(self._slices[unit].start, self._slices[unit].stop) for unit in units])
        )

    def call_rows(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: Sequence[int]) -> list[Any]:
        """Calls a method or reads an attribute of the sub-batches of some environments; returns a value for each.

        Raises:
            EnvsFailed: A sub-batch raised.
        """
        values: dict[int, Sequence[Any]] = {}
        units = self._units_of(rows)
        for unit in dict.fromkeys(units):
            try:
                values[unit] = self._envs[unit].call(name, args, kwargs)
            except FAILURES as error:
                raise EnvsFailed([self._failure(unit, error)]) from error
        return [values[unit][row - self._slices[unit].start] for row, unit in zip(rows, units, strict=True)]

    def set_rows(self, name: str, values: Sequence[Any], rows: Sequence[int]) -> None:
        """Sets an attribute of the sub-batches of some environments.

        Raises:
            EnvsFailed: A sub-batch raised.
        """
        by_unit: dict[int, dict[int, Any]] = {}
        for row, unit, value in zip(rows, self._units_of(rows), values, strict=True):
            by_unit.setdefault(unit, {})[row - self._slices[unit].start] = value
        for unit, given in by_unit.items():
            try:
                self._envs[unit].set_attr(name, given)
            except FAILURES as error:
                raise EnvsFailed([self._failure(unit, error)]) from error

    def _units_of(self, rows: Sequence[int]) -> list[int]:
        found: list[int] = (np.searchsorted(self._bounds, rows, side="right") - 1).tolist()
        return found

    # The EnvPool interface, for a rollout in this process.

    def _rows_of(self, env_ids: NDArray[np.int64]) -> list[int]:
        return [unit for part in self._plans.of(env_ids).parts for unit in part.units.tolist()]

    def send(self, env_ids: NDArray[np.int64], actions: Tree, autoreset: Autoreset) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`. The environments step inside :meth:`recv`."""
        self._plans.of(env_ids).check_whole()
        self._start(env_ids, self.step_rows, copied_actions(actions), autoreset)

    def reset(
        self, env_ids: NDArray[np.int64], seeds: Sequence[int | None], options: Mapping[str, Any] | None = None
    ) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        self._start(env_ids, lambda _: self.reset_rows(env_ids.tolist(), seeds, options))


def _spaces_of(env: SubBatch) -> PoolSpaces:
    """Returns the spaces of a sub-batch.

    Raises:
        ConfigError: No arrays hold their elements.
    """
    for name, space in (("observation", env.observation_space), ("action", env.action_space)):
        if ArrayLayout.of(space) is None:
            raise ConfigError(
                f"A native sub-batch has {name}s in arrays.",
                expected="a Box, Discrete, MultiDiscrete or MultiBinary space, or a Dict or Tuple of them",
                got=space,
                remedy="Make it an ordinary environment, or convert it by a wrapper.",
            )
    return PoolSpaces(
        env.observation_space, env.action_space, env.metadata, env.render_mode, sub_batches=(env.num_envs,)
    )
