"""Writes what happens in a rollout into a chunk: of ordinary environments and of native ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rayvec.data import Chunk, StepBatch, Tree, as_slice, tree_map
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
    mark = columns.get(RESTARTED) if isinstance(columns, Mapping) else None
    if mark is None:
        return np.zeros(num_envs, bool)
    restarted: NDArray[np.bool_] = np.asarray(mark, bool) & mask_of(RESTARTED, dict(columns), num_envs)
    return restarted


class ColumnRecorder:
    """Writes what happens in a rollout into the arrays of a chunk.

    Args:
        num_steps: T.
        env_ids: Global index of the environment in each column, ``int64 [N]``.
        groups: The columns of each group.
        batches: What the environments of each group have shown before the first step.
        action_layout: How actions lie in arrays; None where they are objects.
        empty: Allocates the arrays ``[T, N, ...]``.
        next_step: Whether environments are reset in the step after the one that ended their episode. That step is not
            `valid`, and its info is that of a reset.

    Attributes:
        columns: Index of each group's columns.
        num_steps: T; it may be lowered to end the rollout early.
    """

    def __init__(
        self,
        num_steps: int,
        env_ids: NDArray[np.int64],
        groups: Sequence[NDArray[np.int64]],
        batches: Sequence[StepBatch],
        action_layout: ArrayLayout | None,
        empty: Empty,
        *,
        next_step: bool,
    ) -> None:
        self.columns, self.num_steps = [as_slice(ids) for ids in groups], num_steps
        self._sizes, self._action_layout, self._empty = [len(ids) for ids in groups], action_layout, empty
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
        self._forms: dict[int, list[Any] | None] = {}
        self._states: list[NDArray[np.float32]] = []
        self._finals: list[tuple[int, NDArray[np.int64], Tree]] = []
        self._infos: list[tuple[int, NDArray[np.bool_], Columns]] = []
        self._reset_infos: list[tuple[int, NDArray[np.bool_], Columns]] = []
        self._restarts: list[tuple[int, int]] = []
        self._cuts: list[tuple[int, int]] = []
        self._next_step = next_step
        self._ended = np.zeros((num_steps + 1, len(env_ids)), bool)  # before step t; only where the next step resets
        self._asked = np.zeros((len(groups), len(env_ids)), bool)
        for group, batch in enumerate(batches):
            self._asked[group, self.columns[group]] = True
            self._ended[0, self.columns[group]] = next_step & (batch.terminated | batch.truncated)
            self._add_infos(-1, group, batch)

    def add_obs(self, t: int, group: int, obs: Tree) -> None:
        """Records what the policy sees before step t; after the last step, what it would see next."""
        if t < self.num_steps:
            assign(self._chunk.obs, (t, self.columns[group]), obs)
        else:
            assign(self._chunk.last_obs, self.columns[group], obs)

    def to_act_on(self, t: int, group: int, obs: Tree) -> Tree:
        """Returns what the policy is given of the observations before step t.

        The action mask of environments that step t resets allows everything: their actions have no effect, and the mask
        of an episode's last observation may allow nothing.
        """
        if not self._next_step or not isinstance(obs, dict) or MASK_KEY not in obs:
            return obs
        mask = np.array(obs[MASK_KEY])
        mask[self._ended[t, self.columns[group]]] = 1
        return {**obs, MASK_KEY: mask}

    def begun_in(self, t: int, batch: StepBatch) -> NDArray[np.int64]:
        """Returns the columns of the environments that step t has reset. `batch` has its results."""
        if self._next_step:
            return np.flatnonzero(self._ended[t])
        return batch.env_ids[batch.terminated | batch.truncated]

    def add_actions(self, t: int, group: int, actions: Tree, extras: dict[str, NDArray[Any]]) -> None:
        """Records what the policy returned at step t.

        Raises:
            ConfigError: It has not one action of the right shape, and one row of each extra, for each environment, or
                the extras are others than at the first step.
        """
        extras = {name: np.asarray(extra) for name, extra in extras.items()}
        forms = [actions.shape, actions.dtype, *map(form, extras.items())] if type(actions) is np.ndarray else None
        if forms is None or forms != self._forms.get(group):
            check_rows(actions, extras, self._sizes[group], self._action_layout)
            self._make_room(actions, extras)
            self._forms[group] = forms
        assign(self._act, (t, self.columns[group]), actions)
        for name, extra in extras.items():
            self._extras[name][t, self.columns[group]] = extra

    def _make_room(self, actions: Tree, extras: dict[str, NDArray[Any]]) -> None:
        """Allocates arrays for what the policy returns, in a data type that holds what it has returned so far too."""
        lead = self._chunk.rew.shape
        if self._act is None:
            self._act = empty_like(actions, lead, self._empty)
            self._extras = empty_like(extras, lead, self._empty)
            return
        found = {name: extra.shape[1:] for name, extra in extras.items()}
        check_extras({name: array.shape[2:] for name, array in self._extras.items()}, found, "at the first step")
        self._act = tree_map(self._widened, self._act, actions)
        self._extras = {name: self._widened(array, extras[name]) for name, array in self._extras.items()}

    def _widened(self, array: NDArray[Any], rows: Any) -> NDArray[Any]:
        """Returns `array` in a data type that holds `rows` too."""
        dtype = np.promote_types(array.dtype, np.asarray(rows).dtype)
        if dtype == array.dtype:
            return array
        wide = self._empty(array.shape, dtype)
        with np.errstate(invalid="ignore"):  # rows of later steps hold anything
            wide[:] = array
        return wide

    def add_state(self, state: NDArray[np.float32]) -> None:
        """Records the hidden state of every environment, ``float32 [N, D]``, before a step that begins a sequence."""
        self._states.append(state.copy())

    def add_results(self, t: int, group: int, batch: StepBatch) -> None:
        """Records rewards, ends of episodes and infos of step t."""
        columns, chunk = self.columns[group], self._chunk
        chunk.rew[t, columns] = batch.rew
        chunk.terminated[t, columns] = batch.terminated
        chunk.truncated[t, columns] = batch.truncated
        if batch.info:
            self._add_infos(t, group, batch)
        if self._next_step:
            done = self._ended[t + 1, columns] = batch.terminated | batch.truncated
            last = np.flatnonzero(done & chunk.valid[t, columns] & ~self._ended[t, columns])
            self._finals.append((t, batch.env_ids[last], tree_map(lambda leaf: leaf[last], batch.obs)))

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
            of_reset = last = asked & done
            final_info = final_info if isinstance(final_info, dict) else {}
            if RESTARTED in final_info:
                last = of_reset & ~self._take_back(t, final_info, of_reset)
            rows = np.flatnonzero(last)
            self._finals.append((t, rows, tree_map(lambda leaf: np.asarray(leaf)[rows], final_obs)))
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
        if not isinstance(columns, Mapping) or RESTARTED not in columns:
            return np.zeros_like(among)
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
            self._finals.append((t - 1, cut, tree_map(lambda leaf: leaf[t][cut], chunk.obs)))
        return failed

    def chunk(self, first_step: int, weights_version: int) -> Chunk:
        """Returns the chunk."""
        final_index, final_obs = self._final_arrays()
        chunk, num_steps = self._chunk, self.num_steps
        if self._next_step:
            is_step = ~self._ended[:-1]  # not a reset: that is no transition, without reward and end of an episode
            for flags in (chunk.valid, chunk.terminated, chunk.truncated):
                flags &= is_step
            chunk.rew[~is_step] = 0.0
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

    def _final_arrays(self) -> tuple[NDArray[np.int64], Tree]:
        """Returns the places ``(t, n)`` of ends of episodes, in order, and the observations there."""
        counts = [len(rows) for _, rows, _ in self._finals]
        steps = np.repeat(np.array([t for t, *_ in self._finals], np.int64), counts)
        places = np.stack([steps, np.concatenate([np.zeros(0, np.int64), *(rows for _, rows, _ in self._finals)])], 1)
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


def form(extra: tuple[str, NDArray[Any]]) -> tuple[str, tuple[int, ...], np.dtype[Any]]:
    """Returns what of an extra is the same at every step."""
    return extra[0], extra[1].shape, extra[1].dtype


def check_rows(actions: Tree, extras: dict[str, NDArray[Any]], count: int, action_layout: ArrayLayout | None) -> None:
    """Raises ``ConfigError`` unless a policy returned one action of the right shape for each environment."""
    if action_layout is None:
        fits = not isinstance(actions, dict) and len(actions) == count
        got = f"{type(actions).__name__} of {len(actions)}"
    else:
        try:
            shapes = [np.shape(leaf) for leaf in action_layout.flatten(actions)]
            fits, got = shapes == [(count, *shape) for _, shape in action_layout.leaves], f"shapes {shapes}"
        except ValueError as error:
            fits, got = False, str(error)
    for name, extra in extras.items():
        if np.shape(extra)[:1] != (count,):
            fits, got = False, f"{name} of shape {np.shape(extra)}"
    if not fits:
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
