"""Writes what happens in a rollout into a chunk, with infos as columns: of ordinary environments and of native ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import StepBatch, Tree, tree_map
from rayvec.data.columns import mask_of
from rayvec.data.layouts import index_tree
from rayvec.data.sub_batch_infos import info_blocks
from rayvec.fleet.restarts import RESTARTED
from rayvec.rollout.sub_batch_recorder import NativeRecorder

__all__ = ["ColumnRecorder", "restarted_in"]


def restarted_in(columns: Any, num_envs: int) -> NDArray[np.bool_]:
    """Returns which environments infos mark as restarted, ``bool [num_envs]``."""
    mark = columns.get(RESTARTED) if isinstance(columns, Mapping) else None
    if mark is None:
        return np.zeros(num_envs, bool)
    restarted: NDArray[np.bool_] = np.asarray(mark, bool) & mask_of(RESTARTED, dict(columns), num_envs)
    return restarted


class ColumnRecorder(NativeRecorder):
    """A recorder of environments whose infos are columns, with a row for each environment of the chunk."""

    def _add_infos(self, t: int, batch: StepBatch) -> None:
        columns = dict(batch.info)
        num_envs = self._ended.shape[1]
        asked, done = np.zeros((2, num_envs), bool)
        asked[batch.env_ids] = True
        done[batch.env_ids] = batch.terminated | batch.truncated
        final_obs, final_info = columns.pop("final_obs", None), columns.pop("final_info", None)
        ends = columns.pop("_final_obs", done)
        columns.pop("_final_info", None)
        if t < 0:
            of_reset = asked
            restarted = restarted_in(columns, num_envs) & asked
            self._restarts += [(-1, n) for n in np.flatnonzero(restarted).tolist()]
        elif self._next_step or final_obs is None:
            of_reset = self._ended[t] if self._next_step else np.zeros(num_envs, bool)
            self._take_back_rows(t, columns, asked)
        else:
            of_reset = asked & np.asarray(ends, bool)
            last = of_reset & ~self._take_back_rows(t, final_info, of_reset)
            self._add_final_obs(t, np.flatnonzero(last), final_obs)
            if final_info:
                self._add_final_info(t, 0, final_info, last)
        if columns:
            self._infos.blocks += info_blocks(t, 0, columns, asked & ~of_reset)
            self._reset_infos.blocks += info_blocks(t, 0, columns, asked & of_reset)

    def _add_final_obs(self, t: int, rows: NDArray[np.int64], final_obs: Any) -> None:
        if isinstance(final_obs, np.ndarray) and final_obs.dtype.hasobject:
            self._finals += [(t, row, final_obs[row]) for row in rows.tolist()]
        elif len(rows):
            self._add_finals(t, rows, self._stacked(final_obs, rows))

    def _take_back_rows(self, t: int, columns: Any, among: NDArray[np.bool_]) -> NDArray[np.bool_]:
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
        if t > 0:
            running = chunk.valid[t - 1, rows] & ~chunk.terminated[t - 1, rows] & ~chunk.truncated[t - 1, rows]
            if self._next_step:
                running &= ~self._ended[t - 1, rows]
            cut = rows[running]
            chunk.truncated[t - 1, cut] = True
            self._cuts += [(t - 1, n) for n in cut.tolist()]
            if len(cut) and not self._next_step:
                self._add_finals(t - 1, cut, tree_map(lambda leaf: leaf[t][cut], chunk.obs))
        return failed

    def _final_arrays(self) -> tuple[NDArray[np.int64], Tree]:
        if self._finals:
            for places, obs in self._final_parts:
                self._finals += [(t, n, index_tree(obs, row)) for row, (t, n) in enumerate(places.tolist())]
            self._final_parts = []
        return super()._final_arrays()
