"""Writes what happens in a rollout into the arrays of a chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rayvec.data import Chunk, ChunkInfo, ChunkInfos, StepBatch, Tree, as_slice, tree_map
from rayvec.data.infos import InfoBlock
from rayvec.data.join_chunks import check_extras
from rayvec.data.layouts import ArrayLayout, index_tree, tree_writer
from rayvec.errors import ConfigError
from rayvec.pools.restart_state import is_restarted

__all__ = ["Empty", "Recorder", "assign", "check_rows", "empty_like", "form", "places_of"]

Empty = Callable[[tuple[int, ...], DTypeLike], NDArray[Any]]
"""Allocates an array of a shape and data type, as ``np.empty`` does."""


@dataclass(slots=True)
class InfoList:
    """The infos of a chunk so far.

    Attributes:
        rows: Infos of single environments.
        blocks: Infos of native sub-batches.
    """

    rows: list[ChunkInfo] = field(default_factory=list)
    blocks: list[InfoBlock] = field(default_factory=list)

    def joined(self) -> ChunkInfos:
        """Returns all of them."""
        infos = ChunkInfos.of(self.rows)
        return ChunkInfos.join([infos, ChunkInfos(self.blocks)], [0, 0]) if self.blocks else infos


class Recorder:
    """Writes what happens in a rollout into the arrays of a chunk.

    Args:
        num_steps: T.
        env_ids: Global index of the environment in each column, ``int64 [N]``.
        groups: The columns of each group.
        batches: What the pool returned for each group before the first step.
        action_layout: How actions lie in arrays; None where they are objects.
        empty: Allocates the large arrays.

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
    ) -> None:
        self.columns = [as_slice(ids) for ids in groups]
        self._sizes = [len(ids) for ids in groups]
        self._first_id = int(env_ids[0])
        self._action_layout = action_layout
        self._empty = empty
        self.num_steps = num_steps
        self._lead = lead = (num_steps, len(env_ids))
        obs = batches[0].obs
        self._chunk = Chunk(
            env_ids=env_ids,
            obs=empty_like(obs, lead, empty),
            act=None,
            rew=empty(lead, np.float64),
            terminated=empty(lead, np.bool_),
            truncated=empty(lead, np.bool_),
            valid=empty(lead, np.bool_),
            last_obs=empty_like(obs, lead[1:], np.empty),
            final_index=places_of(()),
            final_obs=None,
        )
        self._chunk.valid[:] = True
        self._act: Tree = None
        self._extras: dict[str, NDArray[Any]] = {}
        self._states: list[NDArray[np.float32]] = []
        self._finals: list[tuple[int, int, Any]] = []
        self._infos = InfoList()
        self._reset_infos = InfoList()
        self._restarts: list[tuple[int, int]] = []
        self._cuts: list[tuple[int, int]] = []
        self._forms: dict[int, list[Any] | None] = {}
        for batch in batches:
            self._add_infos(-1, batch)

    def add_obs(self, t: int, group: int, obs: Tree) -> None:
        """Records what the policy sees before step t; after the last step, what it would see next."""
        if t < self.num_steps:
            assign(self._chunk.obs, (t, self.columns[group]), obs)
        else:
            assign(self._chunk.last_obs, self.columns[group], obs)

    def to_act_on(self, t: int, group: int, obs: Tree) -> Tree:
        """Returns what the policy is given of the observations before step t."""
        return obs

    def begun_in(self, t: int, batch: StepBatch) -> NDArray[np.int64]:
        """Returns the columns of the environments that step t has reset. `batch` has its results."""
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
        if self._act is None:
            self._act = empty_like(actions, self._lead, self._empty)
            self._extras = empty_like(extras, self._lead, self._empty)
            return
        found = {name: extra.shape[1:] for name, extra in extras.items()}
        expected = {name: array.shape[2:] for name, array in self._extras.items()}
        check_extras(expected, found, "at the first step")
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
            self._add_infos(t, batch)

    def _add_infos(self, t: int, batch: StepBatch) -> None:
        of_step = self._reset_infos if t < 0 else self._infos
        for env_id, info, final_obs, final_info in batch.info:
            n = env_id - self._first_id
            if final_info is None:
                if t < 0 and is_restarted(info):
                    self._restarts.append((-1, n))
                of_step.rows.append(ChunkInfo(t, n, info))
                continue
            if is_restarted(final_info) and self._chunk.truncated[t, n]:
                self._take_back(t, n)
            else:
                self._finals.append((t, n, final_obs))
                if final_info:
                    self._infos.rows.append(ChunkInfo(t, n, final_info))
            if info:
                self._reset_infos.rows.append(ChunkInfo(t, n, info))

    def _take_back(self, t: int, n: int) -> None:
        """Marks a step that failed: the episode was cut after the step before, at the observation recorded for step t.

        The policy may have written into the arrays that it was given, so the chunk's own copy is used.
        """
        chunk = self._chunk
        self._restarts.append((t, n))
        chunk.valid[t, n] = chunk.truncated[t, n] = False
        if t > 0 and chunk.valid[t - 1, n] and not (chunk.terminated[t - 1, n] or chunk.truncated[t - 1, n]):
            chunk.truncated[t - 1, n] = True
            self._cuts.append((t - 1, n))
            obs = index_tree(tree_map(lambda leaf: leaf[t], chunk.obs), n)
            self._finals.append((t - 1, n, deepcopy(obs)))

    def chunk(self, first_step: int, weights_version: int) -> Chunk:
        """Returns the chunk."""
        final_index, final_obs = self._final_arrays()

        def taken(tree: Tree) -> Tree:
            return tree_map(lambda leaf: leaf[: self.num_steps], tree)

        chunk = self._chunk
        return replace(
            chunk,
            obs=taken(chunk.obs),
            act=taken(self._act),
            rew=taken(chunk.rew),
            terminated=taken(chunk.terminated),
            truncated=taken(chunk.truncated),
            valid=taken(chunk.valid),
            final_index=final_index,
            final_obs=final_obs,
            extras=taken(self._extras),
            states=np.stack(self._states) if self._states else chunk.states,
            infos=self._infos.joined(),
            reset_infos=self._reset_infos.joined(),
            restarts=places_of(sorted(self._restarts)),
            cuts=places_of(sorted(self._cuts)),
            weights_version=weights_version,
            first_step=first_step,
        )

    def _final_arrays(self) -> tuple[NDArray[np.int64], Tree]:
        """Returns the places ``(t, n)`` of ends of episodes, in order, and the observations there."""
        finals = sorted(self._finals, key=itemgetter(0, 1))
        final_obs = self.empty_rows(len(finals))
        write = tree_writer(final_obs)
        for row, (_, _, obs) in enumerate(finals):
            write(row, obs)
        return places_of([final[:2] for final in finals]), final_obs

    def empty_rows(self, count: int) -> Tree:
        """Allocates observations, tree of ``[count, *obs_shape]``."""
        return empty_like(self._chunk.last_obs, (count,), np.empty)


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
            "A policy must return one action, and one row of each extra, for each observation.",
            expected=f"{count} rows; actions of the action space, stacked",
            got=got,
            remedy="Let it return an array [k, *act_shape] for observations [k, *obs_shape], or a list of k objects.",
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
