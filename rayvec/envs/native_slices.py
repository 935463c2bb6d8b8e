"""A slice of native sub-batches: vector environments that step, fail and restart as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data.columns import Columns, merge
from rayvec.data.layouts import ArrayLayout
from rayvec.data.sub_batch_infos import merge_reset
from rayvec.data.trees import tree_leaves, tree_map
from rayvec.envs.failures import FAILURES
from rayvec.envs.slices import CUT, ENDED, NEW, RUNNING, Slice
from rayvec.envs.spaces import PoolSpaces
from rayvec.envs.sub_batch import SubBatch
from rayvec.errors import ConfigError, EnvError, RemoteFailure
from rayvec.fleet.commands import Autoreset
from rayvec.fleet.restarts import RESTARTED, seed_of, store_seed

__all__ = ["NativeSlice"]


class NativeSlice(Slice):
    """Executes commands for native sub-batches. A step names all environments of a sub-batch, or none."""

    _envs: list[SubBatch]
    _unit_kind = "native sub-batch"
    unit_bounds: Any = ()

    def _make(self, unit: int) -> SubBatch:
        env = SubBatch(self._factory.make(unit))
        if len(self.unit_bounds) and env.num_envs != self._envs[unit].num_envs:
            raise EnvError(
                f"A restarted native sub-batch has {env.num_envs} environments, not {self._envs[unit].num_envs}. "
                "Let the callable return the same vector environment every time."
            )
        return env

    def _set_up(self) -> None:
        sizes = [env.num_envs for env in self._envs]
        self.spaces = PoolSpaces.join(list(zip(sizes, map(_spaces_of, self._envs), strict=True)))
        self.native_mode, self.num_envs = self.spaces.native_mode, sum(sizes)
        self.unit_bounds = np.cumsum([0, *sizes])

    def open(self, layout: ArrayLayout, arrays: dict[str, Any]) -> None:
        """Attaches the arrays. A replacement begins with cut episodes."""
        super().open(layout, arrays)
        self._leaves = list(tree_leaves(self._obs))
        self._rows_placed: Sequence[int] = ()
        self._waiting = np.zeros(self.num_envs, bool)  # for a reset by the caller, after their episode has ended
        for unit in range(len(self._envs)):
            states = arrays["episode"][self._rows(unit)]
            states[:] = NEW if (states == NEW).all() else CUT

    def _rows(self, unit: int) -> slice:
        return slice(int(self.unit_bounds[unit]), int(self.unit_bounds[unit + 1]))

    def _places_by_unit(self, rows: Sequence[int]) -> dict[int, NDArray[np.int64]]:
        """Returns the places in `rows` of the environments of each sub-batch."""
        if rows is not self._rows_placed:
            units = np.searchsorted(self.unit_bounds, rows, side="right") - 1
            self._places = {int(unit): np.flatnonzero(units == unit) for unit in np.unique(units)}
            self._rows_placed = rows
        return self._places

    def _step(self, rows: list[int], actions: Any, mode: Autoreset) -> None:
        for unit, places in self._places_by_unit(rows).items():
            own = actions if len(places) == len(rows) else tree_map(lambda leaf, at=places: leaf[at], actions)
            try:
                self._step_unit(unit, own, mode)
            except FAILURES as error:
                self._recover(unit, error, partial(self._step_unit, unit, own, mode))

    def _step_unit(self, unit: int, actions: Any, mode: Autoreset) -> None:
        env, rows = self._envs[unit], self._rows(unit)
        state = self._episode[rows.start]
        if state == CUT:
            self._end_cut_unit(unit, mode)
        elif state == ENDED:
            self._reset_whole(unit)
            if mode == Autoreset.NEXT_STEP:
                self._clear(rows)
        else:
            self.arrays["episode"][rows] = RUNNING
            obs, rew, terminated, truncated, info = env.step(actions)
            done = terminated | truncated
            # now, since a reset may write into these arrays
            self._rew[rows], self._terminated[rows], self._truncated[rows] = rew, terminated, truncated
            self._waiting[rows] = done & (mode == Autoreset.DISABLED)
            if mode == Autoreset.SAME_STEP and done.any():
                if self.native_mode == Autoreset.DISABLED:
                    obs, info = self._reset_within(unit, obs, info, done)
                else:
                    env.final_obs(info, done, obs)
                    if not getattr(info["final_obs"], "dtype", np.dtype(int)).hasobject:
                        self._checked_leaves(unit, info["final_obs"], "info['final_obs']")
            self._write(unit, obs)
            self._say(unit, info)

    def _end_cut_unit(self, unit: int, mode: Autoreset) -> None:
        """Ends interrupted episodes without a step: the last true observations, reward 0, truncated."""
        rows, mark = self._rows(unit), self._mark(unit)
        if mode == Autoreset.SAME_STEP:
            ended = np.ones(rows.stop - rows.start, bool)
            final_obs = tree_map(lambda leaf: leaf[rows].copy(), self._obs)
            final = {"final_obs": final_obs, "_final_obs": ended, "final_info": dict(mark), "_final_info": ended.copy()}
            self._reset_whole(unit, mark={**mark, **final})
        else:
            self.arrays["episode"][rows] = ENDED
            self._say(unit, mark)
        self._rew[rows] = 0.0
        self._terminated[rows], self._truncated[rows] = False, True

    def _mark(self, unit: int) -> Columns:
        mark = np.ones(self._envs[unit].num_envs, bool)
        return {RESTARTED: mark, f"_{RESTARTED}": mark.copy()}

    def _reset_within(self, unit: int, obs: Any, info: Columns, done: NDArray[np.bool_]) -> tuple[Any, Columns]:
        """Resets, within the step, environments of a sub-batch that doesn't do so by itself."""
        final_obs, info = tree_map(np.array, obs), self._copied(info)  # the reset may write into what it has returned
        self._write(unit, obs)
        obs, reset_info = self._reset_some(unit, None, None, done)
        ended = {"final_obs": final_obs, "_final_obs": done, "final_info": info, "_final_info": done}
        return obs, {**merge_reset(info, reset_info, done), **ended}

    def _reset_some(
        self, unit: int, seeds: Mapping[int, int | None] | None, options: Mapping[str, Any] | None, mask: Any
    ) -> tuple[Any, Columns]:
        """Resets some environments of a sub-batch.

        Raises:
            EnvError: The sub-batch has reset others too: it does not support ``options["reset_mask"]``.
        """
        env, rows = self._envs[unit], self._rows(unit)
        if mask.all():
            return env.reset(seeds, options, None)
        obs, info = env.reset(seeds, options, mask.copy())
        for kept, new in zip(self._leaves, self._checked_leaves(unit, obs), strict=True):
            if not np.array_equal(kept[rows][~mask], new[~mask], equal_nan=new.dtype.kind == "f"):
                raise EnvError(
                    "A native sub-batch has ignored options['reset_mask']: its other environments have new "
                    "observations too. Reset whole sub-batches, or let them reset by themselves."
                )
        return obs, info

    def _reset(self, rows: Sequence[int], seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> None:
        given = {row: seed for row, seed in zip(rows, seeds, strict=True) if seed is not None}
        for row, seed in given.items():
            store_seed(self.arrays, row, seed)
        for unit, places in self._places_by_unit(rows).items():
            own = [rows[place] for place in places]
            mask = np.zeros(self._envs[unit].num_envs, bool)
            mask[np.array(own) - self._rows(unit).start] = True
            of_unit = {row - self._rows(unit).start: given.get(row) for row in own} if given else None
            try:
                self._reset_unit(unit, of_unit, options, mask)
            except FAILURES as error:
                self._recover(unit, error, partial(self._reset_whole, unit, options))

    def _reset_unit(
        self,
        unit: int,
        seeds: Mapping[int, int | None] | None,
        options: Mapping[str, Any] | None,
        mask: NDArray[np.bool_],
        mark: Columns | None = None,
    ) -> None:
        """Resets environments of a sub-batch, and says what it returns, together with `mark`."""
        env, rows = self._envs[unit], self._rows(unit)
        state = self._episode[rows.start]
        if state == NEW and not mask.all():
            raise ConfigError(
                f"The first reset of {self._name(unit)} has a mask for some of its environments. Call reset() once "
                "without a mask: the first reset of a native sub-batch resets all of them."
            )
        if state in (CUT, ENDED):  # a restarted sub-batch has no episode to continue
            mask = np.ones(env.num_envs, bool)
            seeds = self._restart_seeds(unit) if seeds is None else seeds
        if seeds is not None and env.ignores_seeds:
            name = f"{self._where}, {self._name(unit)}"
            self._notes.append(f"{name} ignores the seeds of a reset; pass seeds to envpool.make")
        obs, info = self._reset_some(unit, seeds, options, mask)
        self._write(unit, obs)
        self._clear(np.flatnonzero(mask) + rows.start)
        self._waiting[rows] &= ~mask
        self.arrays["episode"][rows] = RUNNING
        self._say(unit, {**info, **(mark or {})})

    def _reset_whole(self, unit: int, options: Mapping[str, Any] | None = None, *, mark: Columns | None = None) -> None:
        self._reset_unit(unit, None, options, np.ones(self._envs[unit].num_envs, bool), mark)

    def _restart_seeds(self, unit: int) -> dict[int, int | None] | None:
        """Returns the seeds with which a restarted sub-batch is reset, or None if it never had one."""
        start = self._rows(unit).start
        seed = seed_of(self.arrays, start, self.first_id + start) if self.arrays["restarts"][start] else None
        return None if seed is None else {row: seed + row for row in range(self._envs[unit].num_envs)}

    def _begin(self, rows: Sequence[int]) -> None:
        """Resets environments between two episodes. Where the sub-batch does so in its next step, it is left to it."""
        for unit in self._places_by_unit(rows):
            begin = partial(self._begin_unit, unit)
            try:
                begin()
            except FAILURES as error:
                self._recover(unit, error, begin)

    def _begin_unit(self, unit: int) -> None:
        rows = self._rows(unit)
        state = self._episode[rows.start]
        waiting = self._waiting[rows].copy()
        if state != RUNNING:
            self._reset_whole(unit, mark=self._mark(unit) if state == CUT else None)
        elif waiting.any():
            self._reset_unit(unit, None, None, waiting)

    def _write(self, unit: int, obs: Any) -> None:
        for target, leaf in zip(self._leaves, self._checked_leaves(unit, obs), strict=True):
            target[self._rows(unit)] = leaf

    def _checked_leaves(self, unit: int, obs: Any, name: str = "observations") -> list[NDArray[Any]]:
        """Returns the arrays of the observations of a sub-batch.

        Raises:
            EnvError: They are not those of its space.
        """
        env = self._envs[unit]
        try:
            leaves = self.layout.flatten(obs)
        except ValueError as error:
            raise EnvError(
                f"A native sub-batch has returned {name} that are not those of {self.layout.space}: {error}"
            ) from error
        return [env.leaf(leaf, *field, name) for leaf, field in zip(leaves, self.layout.leaves, strict=True)]

    def _note_restart(self, unit: int, failure: RemoteFailure) -> None:
        super()._note_restart(unit, failure)
        self.arrays["episode"][self._rows(unit)] = CUT

    def _say(self, unit: int, info: Columns) -> None:
        if info:
            self._infos.append((self._rows(unit), self._copied(info)))

    def _columns(self) -> Columns:
        return merge(sorted(self._infos, key=lambda each: each[0].start), self.num_envs)

    def _name(self, unit: int) -> str:
        rows = self._rows(unit)
        ids = f"environments {self.first_id + rows.start} to {self.first_id + rows.stop - 1}"
        return f"native sub-batch of {ids}, seed {seed_of(self.arrays, rows.start, self.first_id + rows.start)}"

    def _call(self, rows: Sequence[int], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        values: list[Any] = [None] * len(rows)
        for unit, places in self._places_by_unit(rows).items():
            try:
                of_unit = self._envs[unit].call(name, args, kwargs)
            except FAILURES as error:
                self._failure = self._captured(unit, error)
                break
            for place in places.tolist():
                values[place] = of_unit[rows[place] - self._rows(unit).start]
        return values

    def _set(self, rows: Sequence[int], name: str, values: Sequence[Any]) -> Any:
        for unit, places in self._places_by_unit(rows).items():
            try:
                start = self._rows(unit).start
                self._envs[unit].set_attr(name, {rows[place] - start: values[place] for place in places.tolist()})
            except FAILURES as error:
                self._failure = self._captured(unit, error)
                break
        return [None] * len(rows)


def _spaces_of(env: SubBatch) -> PoolSpaces:
    """Returns the spaces of a sub-batch.

    Raises:
        ConfigError: No arrays hold their elements.
    """
    for name, space in (("observation", env.observation_space), ("action", env.action_space)):
        if ArrayLayout.of(space) is None:
            raise ConfigError(
                f"The {name}s of a native sub-batch are {space}. They must be a Box, Discrete, MultiDiscrete or "
                "MultiBinary space, or a Dict or Tuple of them: make it an ordinary environment, or convert it by a "
                "wrapper."
            )
    return PoolSpaces(
        env.observation_space, env.action_space, env.metadata, env.render_mode, sub_batches=(env.num_envs,)
    )
