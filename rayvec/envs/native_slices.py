"""A slice of native sub-batches: vector environments that step, fail and restart as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rayvec.data.columns import Columns, as_columns, mask_of, merge, select
from rayvec.data.layouts import ArrayLayout, index_tree
from rayvec.data.trees import objects, tree_leaves, tree_map
from rayvec.envs.slices import CUT, ENDED, NEW, RUNNING, Slice, own_info, values_of
from rayvec.envs.spaces import PoolSpaces
from rayvec.envs.vector_envs import has_single_envs, layer_with, spaces_of
from rayvec.errors import ConfigError, EnvError
from rayvec.fleet.commands import Autoreset, Command, Op
from rayvec.fleet.restarts import RESTARTED, seed_of

__all__ = ["NativeSlice"]

Seeds = dict[int, int | None]


class NativeSlice(Slice):
    """Executes commands for native sub-batches. A step names all environments of a sub-batch, or none."""

    _unit_kind = "native sub-batch"

    def _set_up(self) -> None:
        if self._max_episodes:
            raise ConfigError(
                f"restart_env_every={self._max_episodes} was passed with native sub-batches. Their environments can't "
                "be made again one by one: leave it out, or make ordinary environments."
            )
        sizes = [env.num_envs for env in self._envs]
        self.spaces = PoolSpaces.join(list(zip(sizes, map(spaces_of, self._envs), strict=True)))
        self.native_mode, self.num_envs = self.spaces.native_mode, sum(sizes)
        self.unit_bounds = np.cumsum([0, *sizes])

    def open(self, layout: ArrayLayout, arrays: dict[str, Any]) -> None:
        """Attaches the arrays. A replacement begins with cut episodes."""
        super().open(layout, arrays)
        self._leaves = list(tree_leaves(self._obs))
        self._mode = Autoreset.NEXT_STEP  # of the last step
        self._key, self._places = b"", dict[int, NDArray[np.int64]]()  # of the last command
        arrays["episode"][arrays["episode"] != NEW] = CUT

    def _divided(self, command: Command) -> Iterable[tuple[int, Any]]:
        """Yields the units of a command, each with its actions, or its environments and their seeds or values."""
        rows, key = command.rows, command.rows.tobytes()
        if key != self._key:
            units = np.searchsorted(self.unit_bounds, rows, side="right") - 1
            self._key, self._places = key, {int(unit): np.flatnonzero(units == unit) for unit in np.unique(units)}
        if command.op == Op.STEP:
            for unit, places in self._places.items():
                whole = len(places) == len(rows)
                yield unit, command.actions if whole else tree_map(lambda leaf, at=places: leaf[at], command.actions)
            return
        values = [None] * len(rows)
        if command.op == Op.RESET:
            values = command.rest[0]
            self._note_seeds(rows.tolist(), values)
        elif command.op == Op.SET:
            values = command.rest[1]
        for unit, places in self._places.items():
            own = (rows[places] - self.unit_bounds[unit]).tolist()
            yield unit, dict(zip(own, (values[place] for place in places), strict=True))

    def _step(self, unit: int, actions: Any, command: Command) -> None:
        env, rows, self._mode = self._envs[unit], self._rows(unit), command.mode
        if self._episode[rows.start] != RUNNING and self._step_is_replaced(unit, self._mode):
            return
        obs, rew, terminated, truncated, info = values_of("step", 5, env.step(actions))
        flags = [self._checked(unit, each, np.bool_, (), "flags") for each in (terminated, truncated)]
        leaves, done = self._checked_leaves(unit, obs), flags[0] | flags[1]
        # now, since a reset may write into these arrays
        self._rew[rows] = self._checked(unit, rew, np.float64, (), "rewards")
        self._terminated[rows], self._truncated[rows] = flags
        is_final = self._mode == Autoreset.SAME_STEP and bool(done.any())
        resets_here = is_final and self.native_mode == Autoreset.DISABLED
        if is_final and not resets_here:
            self._check_final(unit, info, done, leaves)
        self._write(unit, leaves)
        self._say(unit, info, ~done if resets_here else None)
        if resets_here:
            final = {"final_obs": self.layout.tree(leaves), "final_info": own_info(info)}
            self._say(unit, {**final, "_final_obs": done, "_final_info": done})
            self._reset_some(unit, done)

    def _say_cut(self, unit: int, mode: Autoreset) -> None:
        rows, every = self._rows(unit), np.ones(self._envs[unit].num_envs, bool)
        mark = {RESTARTED: every, f"_{RESTARTED}": every}
        self._say(unit, mark)
        if mode == Autoreset.SAME_STEP:
            final = {"final_obs": tree_map(lambda leaf: leaf[rows], self._obs), "final_info": mark}
            self._say(unit, {**final, "_final_obs": every, "_final_info": every})

    def _reset_unit(self, unit: int, **kwargs: Any) -> None:
        self._reset_some(unit, np.ones(self._envs[unit].num_envs, bool))

    def _reset(self, unit: int, seeds: Any, command: Command) -> None:
        """Resets environments of a sub-batch, given by row with the seed, or None, of each."""
        mask = np.zeros(self._envs[unit].num_envs, bool)
        mask[list(seeds)] = True
        has_seeds = any(seed is not None for seed in command.rest[0])
        mask = self._reset_some(unit, mask, seeds if has_seeds else None, command.rest[1])
        self._clear(self._rows(unit).start + np.flatnonzero(mask))

    def _begin(self, unit: int, _: Any, command: Command) -> None:
        """Resets environments between two episodes. Where the sub-batch does so in its next step, it is left to it."""
        rows, mask = self._rows(unit), np.ones(self._envs[unit].num_envs, bool)
        state = self._episode[rows.start]
        if state == CUT:
            self._say_cut(unit, command.mode)
        elif state == RUNNING:
            mask = (self._terminated[rows] | self._truncated[rows]) & (self._mode == Autoreset.DISABLED)
        if mask.any():
            self._clear(rows.start + np.flatnonzero(self._reset_some(unit, mask)))

    def _reset_some(
        self, unit: int, mask: NDArray[np.bool_], seeds: Seeds | None = None, options: Mapping[str, Any] | None = None
    ) -> NDArray[np.bool_]:
        """Resets some environments of a sub-batch, or all if it was restarted. Returns which, ``bool [num_envs]``.

        Raises:
            EnvError: The sub-batch has reset others too: it does not support ``options["reset_mask"]``.
        """
        env, rows = self._envs[unit], self._rows(unit)
        ids = range(rows.start, rows.stop)
        if self._episode[rows.start] in (CUT, ENDED):  # a restarted sub-batch has no episode to continue
            mask = np.ones(env.num_envs, bool)
        if self._to_seed.issuperset(ids):
            base = seed_of(self.arrays, rows.start, self.first_id + rows.start)
            seeds = None if base is None else {row: base + row for row in range(env.num_envs)}
        self._to_seed.difference_update(ids)
        kwargs: dict[str, Any] = {} if seeds is None else {"seed": _seed_for(env, seeds)}
        if not mask.all():
            options = {**(options or {}), "reset_mask": mask.copy()}
        if options is not None:
            kwargs["options"] = dict(options)
        obs, info = values_of("reset", 2, env.reset(**kwargs))
        leaves = self._checked_leaves(unit, obs)
        for kept, new in zip(self._leaves, leaves, strict=True):
            if not np.array_equal(kept[rows][~mask], new[~mask], equal_nan=True):
                raise EnvError(
                    "A native sub-batch has ignored options['reset_mask']: its other environments have new "
                    "observations too. Reset whole sub-batches, or let them reset by themselves."
                )
        self._write(unit, leaves)
        self.arrays["episode"][rows] = RUNNING
        self._say(unit, info, mask)
        return mask

    def _checked(self, unit: int, value: Any, dtype: DTypeLike, shape: tuple[int, ...], name: str) -> NDArray[Any]:
        array, expected = np.asarray(value), (self._envs[unit].num_envs, *shape)
        if array.shape != expected or not np.can_cast(array.dtype, dtype, "same_kind"):
            raise EnvError(
                f"A native sub-batch has returned {name} of shape {array.shape} and dtype {array.dtype}. It must "
                f"return a row for each of its environments: shape {expected}, dtype {np.dtype(dtype)}."
            )
        return array

    def _checked_leaves(self, unit: int, obs: Any, name: str = "observations") -> list[NDArray[Any]]:
        leaves = zip(self.layout.flatten(obs), self.layout.leaves, strict=True)
        return [self._checked(unit, leaf, *field, name) for leaf, field in leaves]

    def _check_final(self, unit: int, info: Any, done: NDArray[np.bool_], leaves: list[NDArray[Any]]) -> None:
        """Checks that a step which reset environments says what they showed last."""
        final, named = info.get("final_obs"), np.asarray(info.get("_final_obs", True), bool)
        is_objects = isinstance(final, np.ndarray) and final.dtype.hasobject
        items = [self.layout.flatten(item) for item in (final[done] if is_objects else [final]) if item is not None]
        is_shared = any(np.may_share_memory(array, leaf) for item in items for array in item for leaf in leaves)
        if is_shared or len(items) < (done.sum() if is_objects else 1) or (done & ~named).any():
            raise EnvError(
                "A native sub-batch that resets within a step must return a row for each of its environments whose "
                "episode ended in info['final_obs'], named by info['_final_obs'] and in memory of its own: it is "
                "missing, or a view of the observations that the reset overwrites."
            )
        if not is_objects:
            self._checked_leaves(unit, final, "info['final_obs']")

    def _write(self, unit: int, leaves: list[NDArray[Any]]) -> None:
        for target, leaf in zip(self._leaves, leaves, strict=True):
            target[self._rows(unit)] = leaf

    def _say(self, unit: int, info: Any, among: NDArray[np.bool_] | None = None) -> None:
        """Adds infos of a sub-batch, or of some of its environments, to the answer."""
        if not info or (among is not None and not among.any()):
            return
        count, rows = self._envs[unit].num_envs, self._rows(unit)
        final = info.get("final_obs")
        if isinstance(final, dict | tuple):  # objects, as Gymnasium has them
            ended = np.flatnonzero(mask_of("final_obs", info, count))
            info = {**info, "final_obs": np.full(count, None)}
            info["final_obs"][ended] = objects([index_tree(final, row) for row in ended.tolist()])
        columns, index = as_columns(own_info(info), count), rows.start + np.arange(count)
        if among is not None and not among.all():
            columns, index = select(columns, among), index[among]
        self._infos.append((index, columns))

    def _columns(self) -> Columns:
        return merge(sorted(self._infos, key=lambda each: int(each[0][0])), self.num_envs)

    def _name(self, unit: int) -> str:
        start, stop = self.first_id + self.unit_bounds[unit : unit + 2]
        seed = seed_of(self.arrays, int(self.unit_bounds[unit]), start)
        return f"native sub-batch of environments {start} to {stop - 1}, seed {seed}"

    def _call(self, unit: int, rows: Seeds, command: Command) -> None:
        """Calls a method, or reads an attribute, of the outermost layer that has it.

        Single environments have a value each, and so has a list, tuple or array with a row for each environment. Any
        other value stands for all.
        """
        name, args, kwargs = command.rest
        env, count = layer_with(self._envs[unit], name), self._envs[unit].num_envs
        if env is env.unwrapped and has_single_envs(env) and name != "render":
            value = env.call(name, *args, **kwargs)
        else:
            value = getattr(env, name)
            value = value(*args, **kwargs) if callable(value) else value
        has_rows = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim > 0)
        values = value if has_rows and len(value) == count else [value] * count
        self._values |= {self._rows(unit).start + row: values[row] for row in rows}

    def _set(self, unit: int, values: dict[int, Any], command: Command) -> None:
        """Sets an attribute where :meth:`_call` reads it.

        Raises:
            ConfigError: The sub-batch has one attribute for all its environments, and the values differ.
        """
        name, count = command.rest[0], self._envs[unit].num_envs
        env = layer_with(self._envs[unit], name)
        if env is env.unwrapped and has_single_envs(env):
            old = [None] * count if len(values) == count else env.get_attr(name)
            env.set_attr(name, [values.get(row, old[row]) for row in range(count)])
            return
        first, *others = values.values()
        if len(values) < count or not all(each is first or np.array_equal(each, first) for each in others):
            raise ConfigError(
                f"The environments of a native sub-batch share its attributes, but set_attr got values of {name!r} "
                f"that differ, or not for all {count}. Pass the same value for every environment of a sub-batch."
            )
        setattr(env, name, first)


def _seed_for(env: Any, seeds: Seeds) -> Any:
    """Returns what `reset` of a vector environment gets as its seed: that of its first environment, or a list.

    Raises:
        ConfigError: Seeds that are not consecutive, of a sub-batch that takes one.
    """
    bases = {None if seed is None else seed - row for row, seed in seeds.items()}
    base = bases.pop()
    if not bases and (base is None or base >= 0):
        return base
    if not has_single_envs(env):
        raise ConfigError(
            f"A native sub-batch takes one seed, that of its first environment, but got {[*seeds.values()][:8]}. Pass "
            "one int to reset, or consecutive seeds without None."
        )
    return [seeds.get(row) for row in range(env.num_envs)]
