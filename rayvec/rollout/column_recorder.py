"""Writes what happens in a rollout into a chunk: of ordinary environments and of native ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rayvec.data import Chunk, StepBatch, Tree, tree_map
from rayvec.data.columns import Columns, mask_of
from rayvec.data.infos import ChunkInfos
from rayvec.data.join_chunks import check_extras
from rayvec.data.layouts import ArrayLayout, tree_writer
from rayvec.errors import ConfigError
from rayvec.fleet.restarts import RESTARTED
from rayvec.wrappers import MASK_KEY

__all__ = ["ColumnRecorder", "Empty", "restarted_in"]

Empty = Callable[[tuple[int, ...], DTypeLike], NDArray[Any]]
"""Allocates an array of a shape and data type, as ``np.empty`` does."""


def restarted_in(columns: Any, num_envs: int) -> NDArray[np.bool_]:
    """Returns which environments infos mark as restarted, ``bool [num_envs]``."""
    if not isinstance(columns, Mapping) or RESTARTED not in columns:
        return np.zeros(num_envs, bool)
    restarted: NDArray[np.bool_] = np.asarray(columns[RESTARTED], bool) & mask_of(RESTARTED, dict(columns), num_envs)
    return restarted


class ColumnRecorder:
    """Writes what happens in a rollout into the arrays of a chunk.

    Args:
        num_steps: T.
        env_ids: Global index of the environment in each column, ``int64 [N]``.
        columns: Index of each group's columns.
        batches: What the environments of each group have shown before the first step.
        action_layout: How actions lie in arrays; None where they are objects.
        empty: Allocates the arrays ``[T, N, ...]``.
        next_step: Whether environments are reset in the step after the one that ended their episode. That step is not
            `valid`, and its info is that of a reset.

    Attributes:
        num_steps: T; it may be lowered to end the rollout early.
    """

    def __init__(
        self,
        num_steps: int,
        env_ids: NDArray[np.int64],
        columns: Sequence[Any],
        batches: Sequence[StepBatch],
        action_layout: ArrayLayout | None,
        empty: Empty,
        *,
        next_step: bool,
    ) -> None:
        self.num_steps, self._columns, self._next_step = num_steps, columns, next_step
        self._action_layout, self._empty = action_layout, empty
        lead = num_steps, len(env_ids)
        obs = batches[0].obs
        self._chunk = Chunk(
            env_ids=env_ids,
            obs=empty_like(obs, lead, empty),
            act=None,
            rew=empty(lead, np.float64),
            terminated=empty(lead, np.bool_),
            truncated=empty(lead, np.bool_),
            valid=empty(lead, np.bool_),
            last_obs=empty_like(obs, lead[1:]),
            final_index=places_of(()),
            final_obs=None,
        )
        self._chunk.valid[:] = True
        self._act: Tree = None
        self._extras: dict[str, NDArray[Any]] = {}
        self._forms: dict[int, list[Any]] = {}
        self._states: list[NDArray[np.float32]] = []
        self._finals: list[tuple[NDArray[np.int64], NDArray[np.int64], Tree]] = []
        self._infos: list[tuple[int, NDArray[np.bool_], Columns]] = []
        self._reset_infos: list[tuple[int, NDArray[np.bool_], Columns]] = []
        self._restarts: list[tuple[int, int]] = []
        self._cuts: list[tuple[int, int]] = []
        self._ended = np.zeros((num_steps + 1, len(env_ids)), bool)  # before step t; only where the next step resets
        self._asked = np.zeros((len(columns), len(env_ids)), bool)
        for group, batch in enumerate(batches):
            self._asked[group, columns[group]] = True
            self._ended[0, columns[group]] = next_step & (batch.terminated | batch.truncated)
            self._add_infos(-1, group, batch)

    def add_obs(self, t: int, group: int, obs: Tree) -> None:
        """Records what the policy sees before step t; after the last step, what it would see next."""
        if t < self.num_steps:
            assign(self._chunk.obs, (t, self._columns[group]), obs)
        else:
            assign(self._chunk.last_obs, self._columns[group], obs)

    def to_act_on(self, t: int, group: int, obs: Tree) -> Tree:
        """Returns what the policy is given of the observations before step t.

        The action mask of environments that step t resets allows everything: their actions have no effect, and the mask
        of an episode's last observation may allow nothing.
        """
        if not self._next_step or not isinstance(obs, dict) or MASK_KEY not in obs:
            return obs
        mask = np.array(obs[MASK_KEY])
        mask[self._ended[t, self._columns[group]]] = 1
        return {**obs, MASK_KEY: mask}

    def begun_in(self, t: int, batch: StepBatch) -> NDArray[np.int64]:
        """Returns the columns of the environments that step t has reset. `batch` has its results."""
        if self._next_step:
            return np.flatnonzero(self._ended[t])
        return batch.env_ids[batch.terminated | batch.truncated]

    def add_actions(self, t: int, group: int, actions: Tree, extras: dict[str, Any]) -> None:
        """Records what the policy returned at step t.

        Raises:
            ConfigError: It has not one action of the right shape, and one row of each extra, for each environment, or
                the extras are others than at the first step.
        """
        at = t, self._columns[group]
        extras = {name: np.asarray(extra) for name, extra in extras.items()}
        is_array = type(actions) is np.ndarray
        forms = [(name, leaf.shape, leaf.dtype) for name, leaf in ({"": actions} | extras).items()] if is_array else []
        if not is_array or forms != self._forms.get(group):
            check_rows(actions, extras, int(self._asked[group].sum()), self._action_layout)
            self._make_room(actions, extras)
            self._forms[group] = forms
        assign(self._act, at, actions)
        for name, extra in extras.items():
            self._extras[name][at] = extra

    def _make_room(self, actions: Tree, extras: dict[str, Any]) -> None:
        """Allocates arrays for what the policy returns, in a data type that holds what it has returned so far too."""
        if self._act is None:
            self._act = empty_like(actions, self._chunk.rew.shape, self._empty)
            self._extras = empty_like(extras, self._chunk.rew.shape, self._empty)
        found = {name: extra.shape[1:] for name, extra in extras.items()}
        check_extras({name: array.shape[2:] for name, array in self._extras.items()}, found, "at the first step")
        self._act = tree_map(self._widened, self._act, actions)
        self._extras = {name: self._widened(array, extras[name]) for name, array in self._extras.items()}

    def _widened(self, array: NDArray[Any], rows: Any) -> NDArray[Any]:
        """Returns `array`, in a data type that holds `rows` too."""
        rows = np.asarray(rows)
        if rows.dtype == array.dtype:
            return array
        wide = self._empty(array.shape, np.promote_types(array.dtype, rows.dtype))
        with np.errstate(invalid="ignore"):  # rows of later steps hold anything
            wide[:] = array
        return wide

    def add_state(self, state: NDArray[np.float32]) -> None:
        """Records the hidden state of every environment, ``float32 [N, D]``, before a step that begins a sequence."""
        self._states.append(state.copy())

    def add_results(self, t: int, group: int, batch: StepBatch) -> None:
        """Records rewards, ends of episodes and infos of step t."""
        columns, chunk = self._columns[group], self._chunk
        chunk.rew[t, columns] = batch.rew
        chunk.terminated[t, columns] = batch.terminated
        chunk.truncated[t, columns] = batch.truncated
        if batch.info:
            self._add_infos(t, group, batch)
        if self._next_step:
            self._ended[t + 1, columns] = batch.terminated | batch.truncated

    def _add_infos(self, t: int, group: int, batch: StepBatch) -> None:
        columns, asked = dict(batch.info), self._asked[group]
        final_obs, ended = columns.pop("final_obs", None), columns.pop("_final_obs", None)
        final_info = columns.pop("final_info", None)
        columns.pop("_final_info", None)
        of_reset = asked & self._ended[t] if t >= 0 else asked
        if t < 0:
            restarted = restarted_in(columns, len(asked)) & asked
            self._restarts += [(-1, n) for n in np.flatnonzero(restarted).tolist()]
        elif self._next_step or final_obs is None:
            self._take_back(t, columns, asked)
        else:
            done = self._chunk.terminated[t] | self._chunk.truncated[t] if ended is None else np.asarray(ended, bool)
            of_reset = asked & done
            final_info = final_info if isinstance(final_info, dict) else {}
            last = of_reset & ~self._take_back(t, final_info, of_reset)
            rows = np.flatnonzero(last)
            shown = tree_map(lambda leaf: np.asarray(leaf)[rows], final_obs)
            self._finals.append((np.full(len(rows), t), rows, shown))
            self._infos.append((t, last, final_info))
        for infos, among in ((self._infos, asked & ~of_reset), (self._reset_infos, of_reset)):
            if columns and among.any():
                infos.append((t, among, columns))

    def _take_back(self, t: int, columns: Any, among: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Marks steps that failed: their episodes were cut after the step before, at the observation before step t.

        Args:
            t: The step.
            columns: Infos that say which environments were restarted.
            among: Whose infos count, ``bool [N]``.

        Returns:
            Whose step failed, ``bool [N]``.
        """
        chunk = self._chunk
        failed: NDArray[np.bool_] = among & restarted_in(columns, len(among)) & chunk.truncated[t]
        rows = np.flatnonzero(failed)
        self._restarts += [(t, n) for n in rows.tolist()]
        chunk.valid[t, rows] = chunk.truncated[t, rows] = False
        if t > 0 and len(rows):
            ended = ~chunk.valid[t - 1] | chunk.terminated[t - 1] | chunk.truncated[t - 1] | self._ended[t - 1]
            cut = rows[~ended[rows]]
            chunk.truncated[t - 1, cut] = True
            self._cuts += [(t - 1, n) for n in cut.tolist()]
            if not self._next_step:
                shown = tree_map(lambda leaf: leaf[t][cut], chunk.obs)
                self._finals.append((np.full(len(cut), t - 1), cut, shown))
        return failed

    def chunk(self, first_step: int, weights_version: int) -> Chunk:
        """Returns the chunk."""
        chunk, num_steps = self._chunk, self.num_steps
        if self._next_step:
            is_step = ~self._ended[:-1]  # not a reset: that is no transition, without reward and end of an episode
            for flags in (chunk.valid, chunk.terminated, chunk.truncated):
                flags &= is_step
            chunk.rew[~is_step] = 0.0
            self._add_shown_finals()
        final_index, final_obs = self._final_arrays()
        steps = {"act": self._act, "extras": self._extras}
        steps |= {name: getattr(chunk, name) for name in ("obs", "rew", "terminated", "truncated", "valid")}
        return replace(
            chunk,
            **{name: tree_map(lambda leaf: leaf[:num_steps], tree) for name, tree in steps.items()},
            final_index=final_index,
            final_obs=final_obs,
            states=np.stack(self._states) if self._states else chunk.states,
            infos=ChunkInfos.of_steps(self._infos),
            reset_infos=ChunkInfos.of_steps(self._reset_infos),
            restarts=places_of(sorted(self._restarts)),
            cuts=places_of(sorted(self._cuts)),
            weights_version=weights_version,
            first_step=first_step,
        )

    def _add_shown_finals(self) -> None:
        """Adds the last observations of episodes: the policy has seen them before the step that resets."""
        chunk, num_steps = self._chunk, self.num_steps
        t, n = np.nonzero((chunk.terminated | chunk.truncated)[:num_steps])
        inner, last = np.flatnonzero(t < num_steps - 1), np.flatnonzero(t == num_steps - 1)
        after = tree_map(lambda leaf: leaf[t[inner] + 1, n[inner]], chunk.obs)
        self._finals.append((t[inner], n[inner], after))
        self._finals.append((t[last], n[last], tree_map(lambda leaf: leaf[n[last]], chunk.last_obs)))

    def _final_arrays(self) -> tuple[NDArray[np.int64], Tree]:
        """Returns the places ``(t, n)`` of ends of episodes, in order, and the observations there."""
        found = [np.stack([t, rows], 1) for t, rows, _ in self._finals]
        places = np.concatenate([places_of(()), *found])
        final_obs = empty_like(self._chunk.last_obs, (len(places),))
        write, start = tree_writer(final_obs), 0
        for _, rows, obs in self._finals:
            if isinstance(obs, np.ndarray) and obs.dtype.hasobject:  # an observation in each row
                for row, each in enumerate(obs, start):
                    write(row, each)
            else:
                assign(final_obs, slice(start, start + len(rows)), obs)
            start += len(rows)
        order = np.argsort(places @ (self._chunk.num_envs, 1), kind="stable")  # fast where they are in order
        return places[order], tree_map(lambda leaf: leaf[order], final_obs)


def places_of(places: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Returns steps of environments as an array ``[k, 2]``."""
    return np.array(places, np.int64).reshape(-1, 2)


def check_rows(actions: Tree, extras: dict[str, NDArray[Any]], count: int, layout: ArrayLayout | None) -> None:
    """Raises ``ConfigError`` unless a policy returned one action of the right shape for each environment."""
    try:
        leaves = [actions] if layout is None else layout.flatten(actions)
        shapes = [np.shape(leaf) for leaf in leaves]
        fits = [(count,)] if layout is None else [(count, *shape) for _, shape in layout.leaves]
        got = f"shapes {shapes}"
        is_fit = shapes == fits
    except ValueError as error:
        got, is_fit = str(error), False
    for name, extra in extras.items():
        if extra.shape[:1] != (count,):
            got, is_fit = f"{name} of shape {extra.shape}", False
    if not is_fit:
        raise ConfigError(
            f"A policy has returned {got} for {count} observations. It must return one action, and one row of each "
            "extra, for each: an array [k, *act_shape] for observations [k, *obs_shape], or a list of k objects."
        )


def empty_like(tree: Tree, leading: tuple[int, ...], empty: Empty = np.empty) -> Tree:
    """Allocates arrays shaped like a batch, its one leading axis replaced by others."""
    return tree_map(lambda leaf: empty((*leading, *np.shape(leaf)[1:]), np.asarray(leaf).dtype), tree)


def assign(target: Tree, index: Any, source: Tree) -> None:
    """Writes a batch into some rows of a tree, whatever the order of its keys."""
    if isinstance(target, dict):
        for key, part in target.items():
            assign(part, index, source[key])
    elif isinstance(target, tuple):
        for part, value in zip(target, source, strict=True):
            assign(part, index, value)
    else:
        target[index] = source
