"""A slice of native sub-batches: vector environments that step, fail and restart as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data.columns import Columns, as_columns, mask_of, merge, select
from rayvec.data.trees import copied, fitted, index_tree, objects, tree_map, tree_writer
from rayvec.envs.factory import EnvFactory
from rayvec.envs.failures import own_info, values_of
from rayvec.envs.slices import CUT, ENDED, NEW, RUNNING, Slice
from rayvec.envs.vector_envs import has_single_envs, layer_with, spaces_of
from rayvec.errors import ConfigError, EnvError
from rayvec.fleet.commands import Autoreset, Command, Op
from rayvec.fleet.restarts import RESTARTED, EnvRules, seed_of
from rayvec.fleet.spaces import PoolSpaces


def make_slice(factory: EnvFactory, first_id: int, where: str, rules: EnvRules) -> Slice:
    """Makes the slice of all environments of a factory; the arguments are those of :class:`Slice`."""
    kind = NativeSlice if factory.native else Slice
    return kind(factory, first_id, where, rules)


class NativeSlice(Slice):
    """Executes commands for native sub-batches. A step names all environments of a sub-batch, or none."""

    _unit_kind = "native sub-batch"

    def _set_up(self) -> None:
        rules = self._rules
        for name, value in {"restart_env_every": rules.max_episodes, "spare_envs": rules.spare_envs}.items():
            if value:
                raise ConfigError(
                    f"{name}={value} was passed with native sub-batches. Their environments can't be made again one by "
                    "one: leave it out, or make ordinary environments."
                )
        self.spaces = PoolSpaces.join([spaces_of(env) for env in self._envs])
        self.unit_bounds, self.native_mode = np.cumsum([0, *self.spaces.sub_batches]), self.spaces.native_mode

    def open(self, arrays: dict[str, Any]) -> None:
        """Attaches the arrays. A replacement begins with cut episodes."""
        super().open(arrays)
        self._writers = [
            tree_writer(tree_map(lambda leaf, at=rows: leaf[None, at], self._obs)) for rows in self._unit_rows
        ]
        self._mode = Autoreset.NEXT_STEP  # of the last step
        arrays["episode"][arrays["episode"] != NEW] = CUT

    def _divided(self, command: Command) -> Iterable[tuple[int, Any]]:
        """Returns the units of a command, each with the places of its environments among those of the command."""
        if command.op == Op.STEP and len(command.rows) == self.num_envs:
            return enumerate(self._unit_rows)
        ends = np.searchsorted(command.rows, self.unit_bounds).tolist()  # callers name environments in ascending order
        return [(unit, np.arange(start, stop)) for unit, (start, stop) in enumerate(pairwise(ends)) if start < stop]

    def _step(self, unit: int, places: Any, command: Command) -> None:
        env, rows, self._mode = self._envs[unit], self._unit_rows[unit], command.mode
        if self._episode[rows.start] != RUNNING and self._step_is_replaced(unit, self._mode):
            return
        actions = tree_map(copied, index_tree(command.actions, places))  # the sub-batch may keep a reference
        began_s = perf_counter()
        result = env.step(actions)
        self._times[unit][0].recent.append(perf_counter() - began_s)
        obs, rew, terminated, truncated, info = values_of("step", 5, result)
        for name, values in (("rew", rew), ("terminated", terminated), ("truncated", truncated)):
            array = self.arrays[name][rows]
            array[:] = fitted(values, array.dtype, array.shape)
        done = self.arrays["terminated"][rows] | self.arrays["truncated"][rows]
        is_final = self._mode == Autoreset.SAME_STEP and bool(done.any())
        resets_here = is_final and self.native_mode == Autoreset.DISABLED
        if is_final and not resets_here:
            self._check_final(info, done)
        self._writers[unit](0, obs)
        self._add_infos(unit, info, ~done if resets_here else None)
        if resets_here:
            final = {"final_obs": tree_map(itemgetter(rows), self._obs), "final_info": own_info(info)}
            self._add_infos(unit, {**final, "_final_obs": done, "_final_info": done})
            self._reset_some(unit, done)

    def _report_interrupted(self, unit: int, mode: Autoreset) -> None:
        rows, every = self._unit_rows[unit], np.ones(self._envs[unit].num_envs, bool)
        mark = {RESTARTED: every, f"_{RESTARTED}": every}
        self._add_infos(unit, mark)
        if mode == Autoreset.SAME_STEP:
            final = {"final_obs": tree_map(itemgetter(rows), self._obs), "final_info": mark}
            self._add_infos(unit, {**final, "_final_obs": every, "_final_info": every})

    def _reset_unit(self, unit: int, seed: int | None = None, options: Any = None) -> None:
        self._reset_some(unit, np.ones(self._envs[unit].num_envs, bool))

    def _reset(self, unit: int, places: Any, command: Command) -> None:
        """Resets environments of a sub-batch, each with its seed or None."""
        start, count = self._unit_rows[unit].start, self._envs[unit].num_envs
        own = command.rows[places] - start
        mask, seeds = np.zeros(count, bool), np.full(count, None)
        mask[own], seeds[own] = True, [command.rest[0][place] for place in places]
        self._clear(start + np.flatnonzero(self._reset_some(unit, mask, seeds.tolist(), command.rest[1])))

    def _begin(self, unit: int, _: Any, command: Command) -> None:
        """Resets environments between two episodes. Where the sub-batch does so in its next step, it is left to it."""
        rows, mask = self._unit_rows[unit], np.ones(self._envs[unit].num_envs, bool)
        state = self._episode[rows.start]
        if state == CUT:
            self._report_interrupted(unit, command.mode)
        elif state == RUNNING:
            done = self.arrays["terminated"][rows] | self.arrays["truncated"][rows]
            mask = done & (self._mode == Autoreset.DISABLED)
        if mask.any():
            self._clear(rows.start + np.flatnonzero(self._reset_some(unit, mask)))

    def _reset_some(
        self,
        unit: int,
        mask: NDArray[np.bool_],
        seeds: Sequence[int | None] = (),
        options: Mapping[str, Any] | None = None,
    ) -> NDArray[np.bool_]:
        """Resets some environments of a sub-batch, or all if it was restarted. Returns which, ``bool [num_envs]``."""
        env, rows = self._envs[unit], self._unit_rows[unit]
        if self._episode[rows.start] in (CUT, ENDED):  # a restarted sub-batch has no episode to continue
            mask = np.ones(env.num_envs, bool)
        if self.arrays["to_seed"][rows].all():
            base = seed_of(self.arrays, rows.start, self.first_id + rows.start)
            seeds = () if base is None else range(base, base + env.num_envs)
        self.arrays["to_seed"][rows] = False
        if not mask.all():
            options = {**(options or {}), "reset_mask": mask.copy()}
        kwargs = {} if options is None else {"options": dict(options)}
        began_s = perf_counter()
        result = env.reset(seed=_seed_for(env, seeds), **kwargs)
        self._times[unit][1].recent.append(perf_counter() - began_s)
        obs, info = values_of("reset", 2, result)
        self._writers[unit](0, obs)
        self.arrays["episode"][rows] = RUNNING
        self._add_infos(unit, info, mask)
        return mask

    def _check_final(self, info: Any, done: NDArray[np.bool_]) -> None:
        """Checks that a step which reset environments says what they showed last."""
        if "final_obs" not in info or (done & ~mask_of("final_obs", info, len(done))).any():
            raise EnvError(
                "A native sub-batch has reset environments within a step, but info['final_obs'], with the mask "
                "info['_final_obs'], lacks their last observations. Return them, or use another autoreset_mode."
            )

    def _add_infos(self, unit: int, info: Any, among: NDArray[np.bool_] | None = None) -> None:
        """Adds infos of a sub-batch, or of some of its environments, to the answer."""
        if not info or (among is not None and not among.any()):
            return
        count, rows = self._envs[unit].num_envs, self._unit_rows[unit]
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

    def _call(self, unit: int, places: Any, command: Command) -> None:
        """Calls a method, or reads an attribute, of the outermost layer that has it.

        Single environments have a value each, and so has a list, tuple or array with a row for each environment. Any
        other value stands for all.
        """
        name, args, kwargs = command.rest
        env, count = layer_with(self._envs[unit], name), self._envs[unit].num_envs
        if has_single_envs(env) and name != "render":
            value = env.call(name, *args, **kwargs)
        else:
            value = getattr(env, name)
            value = value(*args, **kwargs) if callable(value) else value
        has_rows = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim > 0)
        values = value if has_rows and len(value) == count else [value] * count
        self._values |= {row: values[row - self._unit_rows[unit].start] for row in command.rows[places].tolist()}

    def _get_state(self, unit: int, _: Any, command: Command) -> None:
        """Returns nothing: the episodes of native sub-batches do not continue elsewhere."""

    def _set(self, unit: int, places: Any, command: Command) -> None:
        """Sets an attribute where :meth:`_call` reads it.

        Raises:
            ConfigError: The sub-batch has one attribute for all its environments, and the values differ.
        """
        name, values = command.rest[0], [command.rest[1][place] for place in places]
        env, count = layer_with(self._envs[unit], name), self._envs[unit].num_envs
        if has_single_envs(env):
            env.set_attr(name, values)
            return
        if len(values) < count or not all(np.array_equal(each, values[0]) for each in values):
            raise ConfigError(
                f"The environments of a native sub-batch share its attributes, but set_attr got values of {name!r} "
                f"that differ, or not for all {count}. Pass the same value for every environment of a sub-batch."
            )
        setattr(env, name, values[0])


def _seed_for(env: Any, seeds: Sequence[int | None]) -> Any:
    """Returns what `reset` of a vector environment gets as its seed: that of its first environment, or a list.

    Raises:
        ConfigError: Seeds that are not consecutive, of a sub-batch that takes one.
    """
    if has_single_envs(env.unwrapped):
        return list(seeds) or None
    bases = {seed - row for row, seed in enumerate(seeds) if seed is not None}
    if len(bases) > 1:
        raise ConfigError(
            f"A native sub-batch takes one seed, that of its first environment, but got {[*seeds][:8]}. Pass "
            "one int to reset, or consecutive seeds without None."
        )
    return bases.pop() if bases else None
