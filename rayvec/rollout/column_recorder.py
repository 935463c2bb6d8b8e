"""Writes what happens in a rollout into a chunk: of ordinary environments and of native ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rayvec.data import Chunk, StepBatch, Tree, objects, tree_map
from rayvec.data.chunk import ChunkInfos, check_extras, map_steps
from rayvec.data.columns import Columns, having, mask_of, merge, select
from rayvec.data.trees import ArrayLayout, tree_writer
from rayvec.errors import ConfigError
from rayvec.fleet.restarts import RESTARTED
from rayvec.wrappers import MASK_KEY

Empty = Callable[[tuple[int, ...], DTypeLike], NDArray[Any]]
"""Allocates an array of a shape and data type, as ``np.empty`` does."""

_FINAL = ("final_obs", "_final_obs", "final_info", "_final_info")


def restarted_in(columns: Columns, num_envs: int) -> NDArray[np.bool_]:
    """Returns which environments infos mark as restarted, ``bool [num_envs]``."""
    marked = columns.get(RESTARTED, np.zeros(num_envs, bool))
    return np.asarray(marked, bool) & mask_of(RESTARTED, columns, num_envs)


class ColumnRecorder:
    """Writes what happens in a rollout into the arrays of a chunk.

    Args:
        num_steps: T.
        env_ids: Global index of the environment in each column, ``int64 [N]``.
        columns: Index of each group's columns.
        batches: What the environments of each group have shown before the first step.
        action_layout: How actions lie in arrays.
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
        action_layout: ArrayLayout,
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
            final_index=np.zeros((0, 2), np.int64),
            final_obs=None,
        )
        self._chunk.valid[:] = True
        self._forms: dict[int, Any] = {}  # of what the policy has returned for each group
        self._states: list[NDArray[np.float32]] = []
        self._finals: list[tuple[NDArray[np.int64], NDArray[Any]]] = []  # ``t * N + n``, and the observations there
        self._infos: list[tuple[int, bool, Columns]] = []  # and whether they are those of an episode's last step
        self._ended = np.zeros((num_steps + 1, len(env_ids)), bool)  # before step t; only where the next step resets
        for group, batch in enumerate(batches):
            self._ended[0, columns[group]] = next_step & (batch.terminated | batch.truncated)
            self._add_infos(-1, batch)

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

    def add_actions(self, t: int, group: int, actions: Any, extras: dict[str, Any]) -> Tree:
        """Records what the policy returned at step t. Returns the actions as arrays.

        Raises:
            ConfigError: It has not one action of the right shape, and one row of each extra, for each environment, or
                the extras are others than at the first step.
        """
        columns, form = self._columns[group], None
        rows = {name: np.asarray(extra) for name, extra in extras.items()}
        if type(actions) is np.ndarray:
            form = [(name, leaf.shape, leaf.dtype) for name, leaf in ({"": actions} | rows).items()]
        if form is None or form != self._forms.get(group):
            actions = stacked(actions, rows, len(self._chunk.env_ids[columns]), self._action_layout)
            self._make_room({"act": actions, "extras": rows})
            self._forms[group] = form
        assign(self._chunk.act, (t, columns), actions)
        assign(self._chunk.extras, (t, columns), rows)
        return actions

    def _make_room(self, acted: dict[str, Any]) -> None:
        """Allocates arrays for what the policy returns, in a data type that holds what it has returned so far too."""
        room = {name: getattr(self._chunk, name) for name in acted}
        if self._chunk.act is None:
            room = empty_like(acted, self._chunk.rew.shape, self._empty)
        expected = {name: array.shape[2:] for name, array in room["extras"].items()}
        found = {name: extra.shape[1:] for name, extra in acted["extras"].items()}
        check_extras(expected, found, "at the first step")
        self._chunk = replace(self._chunk, **tree_map(self._widened, room, acted))

    def _widened(self, array: NDArray[Any], rows: NDArray[Any]) -> NDArray[Any]:
        """Returns `array`, in a data type that holds `rows` too."""
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
        if self._next_step:
            self._ended[t + 1, columns] = batch.terminated | batch.truncated
        if batch.info:
            self._add_infos(t, batch)

    def _add_infos(self, t: int, batch: StepBatch) -> None:
        final_obs, final_info = batch.info.get("final_obs"), batch.info.get("final_info")
        infos = {key: values for key, values in batch.info.items() if key not in _FINAL}
        num_envs = self._chunk.num_envs
        if infos:
            self._infos.append((t, False, infos))
        if final_obs is not None and t >= 0 and not self._next_step:
            rows = self.begun_in(t, batch)
            rows = rows[~restarted_in(infos, num_envs)[rows]]
            self._finals.append((t * num_envs + rows, final_obs[rows]))
            if final_info and isinstance(final_info, dict):
                self._infos.append((t, True, final_info))

    def chunk(self, first_step: int, weights_version: int) -> Chunk:
        """Returns the chunk."""
        chunk = map_steps(lambda leaf: leaf[: self.num_steps], self._chunk)
        infos = self._add_faults(chunk)
        if self._next_step:
            is_step = ~self._ended[: self.num_steps]  # not a reset: that is no transition, without an end of an episode
            for flags in (chunk.valid, chunk.terminated, chunk.truncated):
                flags &= is_step
            np.copyto(chunk.rew, 0.0, where=~is_step)
        final_index, final_obs = self._final_arrays(chunk)
        states = np.stack(self._states) if self._states else chunk.states
        infos |= {"first_step": first_step, "weights_version": weights_version}
        return replace(chunk, final_index=final_index, final_obs=final_obs, states=states, **infos)

    def _add_faults(self, chunk: Chunk) -> dict[str, Any]:
        """Marks steps that failed: their episodes were cut after the step before, at the observation before the step.

        Returns:
            Infos, restarts and cuts of the chunk.
        """
        if not self._infos:  # which would say that environments were restarted
            return {}
        num_envs, rows = chunk.num_envs, len(self._infos) * chunk.num_envs
        infos = merge([(slice(k * num_envs, (k + 1) * num_envs), each[2]) for k, each in enumerate(self._infos)], rows)
        # Steps count from 0 here, the reset before the chunk's first step.
        t = np.repeat(np.array([t + 1 for t, _, _ in self._infos], np.int64), num_envs)
        n = np.tile(np.arange(num_envs), len(self._infos))
        is_final = np.repeat(np.array([each[1] for each in self._infos], bool), num_envs)
        failed = np.zeros((chunk.num_steps + 1, num_envs), bool)
        restarted = restarted_in(infos, rows)
        failed[t[restarted], n[restarted]] = True
        failed[1:] &= chunk.truncated
        begins = np.ones_like(failed)
        begins[1:] = self._ended[: chunk.num_steps] if self._next_step else chunk.done
        is_end = is_final & (begins & ~failed)[t, n]
        of_reset = ~is_final & begins[t, n]

        def chunk_infos(keep: NDArray[np.bool_]) -> ChunkInfos:
            found = np.flatnonzero(keep & having(infos, rows))
            found = found[np.lexsort((n[found], t[found]))]
            return ChunkInfos(np.stack([t[found] - 1, n[found]], 1), select(infos, found))

        chunk.valid[failed[1:]] = chunk.truncated[failed[1:]] = False
        cuts = failed[2:] & (chunk.valid & ~chunk.done & ~self._ended[: chunk.num_steps])[:-1]
        chunk.truncated[:-1] |= cuts
        return {
            "infos": chunk_infos(is_end | ~(is_final | of_reset)),
            "reset_infos": chunk_infos(of_reset),
            "restarts": np.argwhere(failed) - (1, 0),
            "cuts": np.argwhere(cuts),
        }

    def _final_arrays(self, chunk: Chunk) -> tuple[NDArray[np.int64], Tree]:
        """Returns the places ``(t, n)`` of ends of episodes, in order, and the observations there.

        The policy has seen them before the next step, unless that is the first of another episode.
        """
        keys = np.flatnonzero(chunk.done)
        t, n = np.divmod(keys, chunk.num_envs)
        inner = t < chunk.num_steps - 1

        def following(leaf: NDArray[Any], last: NDArray[Any]) -> NDArray[Any]:
            found = last[n]
            found[inner] = leaf[t[inner] + 1, n[inner]]
            return found

        final_obs = tree_map(following, chunk.obs, chunk.last_obs)
        if self._finals:
            places = np.searchsorted(keys, np.concatenate([shown_at for shown_at, _ in self._finals]))
            shown = [each for _, each in self._finals]
            if not any(each.dtype.hasobject for each in shown):
                final_obs[places] = np.concatenate(shown)
            else:
                write = tree_writer(final_obs)
                for place, obs in zip(places.tolist(), chain(*shown), strict=True):
                    write(place, obs)
        return np.stack([t, n], 1), final_obs


def stacked(actions: Any, extras: dict[str, NDArray[Any]], count: int, layout: ArrayLayout) -> Tree:
    """Returns a policy's actions as arrays; objects are in one array of them, ``object [k]``.

    Raises:
        ConfigError: They are not one action of the right shape, or an extra has not one row, for each environment.
    """
    with suppress(ValueError):  # of another structure
        given = objects(actions) if layout.objects and isinstance(actions, list | tuple) else actions
        leaves = [np.asarray(leaf) for leaf in layout.flatten(given)]
        fits = [leaf.shape for leaf in leaves] == [(count, *shape) for _, shape in layout.leaves]
        if fits and all(extra.shape[:1] == (count,) for extra in extras.values()):
            return layout.tree(leaves)
    beside = {name: extra.shape for name, extra in extras.items()}
    raise ConfigError(
        f"A policy has returned the actions {actions!r:.200} and extras of the shapes {beside} for {count} "
        "observations. It must return one action, and one row of each extra, for each: an array [k, *act_shape] for "
        "observations [k, *obs_shape], or a list of k objects."
    )


def empty_like(tree: Tree, leading: tuple[int, ...], empty: Empty = np.empty) -> Tree:
    """Allocates arrays shaped like a batch, its one leading axis replaced by others."""
    return tree_map(lambda leaf: empty((*leading, *np.shape(leaf)[1:]), np.asarray(leaf).dtype), tree)


def assign(target: Tree, index: Any, source: Tree) -> None:
    """Writes a batch into some rows of a tree, whatever the order of its keys."""
    if type(target) is np.ndarray:
        target[index] = source
    else:
        tree_map(lambda part, rows: assign(part, index, rows), target, source)
