"""Writes what happens in a rollout of native sub-batches into the arrays of a chunk: whole columns, no single rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Chunk, ChunkInfo, StepBatch, SubBatchInfo, Tree, tree_map
from rayvec.data.layouts import tree_writer
from rayvec.data.sub_batch_infos import info_blocks
from rayvec.pools.restart_state import are_restarted
from rayvec.rollout.recorder import Recorder
from rayvec.wrappers import MASK_KEY

__all__ = ["NativeRecorder"]


class NativeRecorder(Recorder):
    """A recorder of native sub-batches.

    Args:
        args: As of :class:`Recorder`.
        next_step: Whether environments are reset in the step after the one that ended their episode. That step is not
            `valid`, and its info is that of a reset.
    """

    def __init__(self, *args: Any, next_step: bool) -> None:
        self._next_step = next_step
        groups: Sequence[NDArray[np.int64]]
        batches: Sequence[StepBatch]
        num_steps, env_ids, groups, batches, *_ = args
        self._ended = np.zeros((num_steps + 1 if next_step else 1, len(env_ids)), bool)  # before step t
        if next_step:
            for ids, batch in zip(groups, batches, strict=True):
                self._ended[0, ids] = batch.terminated | batch.truncated
        self._final_parts: list[tuple[NDArray[np.int64], Tree]] = []
        super().__init__(*args)

    def add_results(self, t: int, group: int, batch: StepBatch) -> None:
        """Records rewards, ends of episodes and infos of step t."""
        super().add_results(t, group, batch)
        if self._next_step:
            self._ended[t + 1, self.columns[group]] = batch.terminated | batch.truncated

    def to_act_on(self, t: int, group: int, obs: Tree) -> Tree:
        """Returns observations in which the action mask of environments that step t resets allows everything.

        Their actions have no effect, and the mask of an episode's last observation may allow nothing.
        """
        if not self._next_step or not isinstance(obs, dict) or MASK_KEY not in obs:
            return obs
        mask = np.array(obs[MASK_KEY])
        mask[self._ended[t, self.columns[group]]] = 1
        return {**obs, MASK_KEY: mask}

    def begun_in(self, t: int, batch: StepBatch) -> NDArray[np.int64]:
        """Returns the columns of the environments that step t has reset."""
        return np.flatnonzero(self._ended[t]) if self._next_step else super().begun_in(t, batch)

    def chunk(self, first_step: int, weights_version: int) -> Chunk:
        """Returns the chunk."""
        if self._next_step:
            self._leave_out_resets()
        return super().chunk(first_step, weights_version)

    def _leave_out_resets(self) -> None:
        """Marks the steps that reset an environment: no transition, no reward, no end of an episode."""
        chunk, reset = self._chunk, self._ended[: self.num_steps]
        for flags in (chunk.valid, chunk.terminated, chunk.truncated):
            flags[: self.num_steps] &= ~reset
        chunk.rew[: self.num_steps][reset] = 0.0

    def _add_finals(self, t: int, columns: NDArray[np.int64], obs: Tree) -> None:
        places = np.stack([np.full(len(columns), t, np.int64), columns], axis=1)
        self._final_parts.append((places, obs))

    def _add_infos(self, t: int, batch: StepBatch) -> None:
        for info in batch.info:
            self._add_columns(t, info, info.env_id - self._first_id)

    def _add_columns(self, t: int, info: SubBatchInfo, first: int) -> None:
        columns = dict(info.columns)
        rows = slice(first, first + info.num_envs)
        final_obs, final_info = columns.pop("final_obs", None), columns.pop("final_info", None)
        ended = columns.pop("_final_obs", None)
        columns.pop("_final_info", None)
        has_final = t >= 0 and not self._next_step and final_obs is not None
        of_reset = self._infos_of_reset(t, rows, has_final=has_final)
        is_cut = t >= 0 and self._chunk.truncated[t, rows].all()
        if has_final and is_cut and are_restarted(final_info):
            self._take_back_all(t, rows)
        elif has_final:
            last_rows = np.flatnonzero(of_reset if ended is None else ended)
            self._add_finals(t, first + last_rows, self._stacked(final_obs, last_rows))
            self._add_final_info(t, first, final_info, of_reset)
        elif t < 0 and are_restarted(columns):
            self._restarts += [(-1, n) for n in range(rows.start, rows.stop)]
        elif is_cut and are_restarted(columns):
            self._take_back_all(t, rows)
        self._infos.blocks += info_blocks(t, first, columns, ~of_reset)
        self._reset_infos.blocks += info_blocks(t, first, columns, of_reset)

    def _infos_of_reset(self, t: int, rows: slice, *, has_final: bool) -> NDArray[np.bool_]:
        """Returns which environments have infos of a reset at step t, ``bool [n]``."""
        if t < 0:
            return np.ones(rows.stop - rows.start, bool)
        if self._next_step:
            return self._ended[t, rows]
        ended: NDArray[np.bool_] = self._chunk.terminated[t, rows] | self._chunk.truncated[t, rows]
        return ended & has_final

    def _add_final_info(self, t: int, first: int, final_info: Any, ended: NDArray[np.bool_]) -> None:
        if isinstance(final_info, Mapping):
            self._infos.blocks += info_blocks(t, first, dict(final_info), ended)
        elif final_info is not None:  # an array of dicts
            rows = np.flatnonzero(ended)
            self._infos.rows += [ChunkInfo(t, first + int(row), final_info[row]) for row in rows if final_info[row]]

    def _stacked(self, final_obs: Any, rows: NDArray[np.int64]) -> Tree:
        """Returns the last observations of some environments, from an array of objects or a tree of arrays."""
        if isinstance(final_obs, np.ndarray) and final_obs.dtype.hasobject:
            stacked = self.empty_rows(len(rows))
            write = tree_writer(stacked)
            for place, row in enumerate(rows.tolist()):
                write(place, final_obs[row])
            return stacked
        return tree_map(lambda _, leaf: np.asarray(leaf)[rows], self._chunk.obs, final_obs)  # keys as in the space

    def _take_back_all(self, t: int, rows: slice) -> None:
        """Marks a step of a whole sub-batch that failed: its episodes were cut after the step before."""
        chunk = self._chunk
        columns = np.arange(rows.start, rows.stop)
        self._restarts += [(t, n) for n in columns.tolist()]
        chunk.valid[t, rows] = chunk.truncated[t, rows] = False
        if t > 0:
            running = chunk.valid[t - 1, rows] & ~chunk.terminated[t - 1, rows] & ~chunk.truncated[t - 1, rows]
            if self._next_step:
                running &= ~self._ended[t - 1, rows]
            cut = columns[running]
            if len(cut):
                chunk.truncated[t - 1, cut] = True
                self._cuts += [(t - 1, n) for n in cut.tolist()]
                if not self._next_step:
                    self._add_finals(t - 1, cut, tree_map(lambda leaf: leaf[t][cut], chunk.obs))

    def _final_arrays(self) -> tuple[NDArray[np.int64], Tree]:
        if self._next_step:
            return self._following()
        if not self._final_parts:
            return super()._final_arrays()
        places = np.concatenate([part[0] for part in self._final_parts])
        order = np.lexsort(places.T[::-1])
        obs = tree_map(lambda *leaves: np.concatenate(leaves)[order], *[part[1] for part in self._final_parts])
        return places[order], obs

    def _following(self) -> tuple[NDArray[np.int64], Tree]:
        """Returns the ends of episodes, and the observations recorded after them: the reset is a later step."""
        num_steps, num_envs = self.num_steps, self._ended.shape[1]
        done = (self._chunk.terminated | self._chunk.truncated) & self._chunk.valid
        at = np.flatnonzero(done[:num_steps])
        inner = int(np.searchsorted(at, (num_steps - 1) * num_envs))

        t, n = np.divmod(at, num_envs)

        def following(obs: NDArray[Any], last: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate([obs[t[:inner] + 1, n[:inner]], last[n[inner:]]])

        return np.stack([t, n], axis=1), tree_map(following, self._chunk.obs, self._chunk.last_obs)
