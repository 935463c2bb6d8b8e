"""Keeps steps that failed out of the buffer while Tianshou's own loop takes one step at a time.

The loop has a row for every environment in every iteration, also for one that was restarted because its step failed.
Such a row is not stored. The transition before it is truncated, and no hook and no statistic sees its episode.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tianshou.data import Batch, ReplayBuffer

from rayvec.pools.restart_state import RESTARTED
from rayvec.tianshou.collect.buffers import truncate_open_episode

__all__ = ["AbsentRows", "without_absent_rows"]

_NOWHERE = -1
_CUT: Any = Batch()
"""What the loop gets instead of an episode that a fault has cut."""


class AbsentRows:
    """A buffer that does not store steps that failed; everything else goes to the buffer that it wraps.

    It passes for an object of the buffer's class. A copy of it, or what is unpickled, is a copy of the buffer.

    Args:
        buffer: The buffer to wrap.

    Attributes:
        buffer: The same.
        count: How many rows were left out.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        self.buffer = buffer
        self.count = 0

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.buffer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.buffer, name)

    def __copy__(self) -> ReplayBuffer:
        return copy.copy(self.buffer)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.buffer,)

    def __len__(self) -> int:
        return len(self.buffer)

    def __getitem__(self, index: Any) -> Any:
        return _CUT if index is None else self.buffer[index]

    def get_buffer_indices(self, start: int, stop: int) -> NDArray[Any] | None:
        """As the buffer's own; None for an episode that was cut."""
        return None if start == _NOWHERE else self.buffer.get_buffer_indices(start, stop)

    def add(self, batch: Any, buffer_ids: Any = None) -> tuple[NDArray[Any], ...]:
        """As the buffer's own; a step that failed has index -1 in the result."""
        marks = batch.info.get(RESTARTED, ())
        absent = np.array([bool(mark) for mark in marks]) if len(marks) else np.zeros(len(batch), bool)
        absent &= np.asarray(batch.truncated, bool)
        if not absent.any():
            return tuple(self.buffer.add(batch, buffer_ids=buffer_ids))
        ids = np.arange(len(batch)) if buffer_ids is None else np.asarray(buffer_ids)
        self.count += int(absent.sum())
        for buffer_id in ids[absent].tolist():
            truncate_open_episode(self.buffer, buffer_id)
        count, returns = len(batch), np.zeros((len(batch), *np.shape(batch.rew)[1:]))
        results = (np.full(count, _NOWHERE), returns, np.zeros(count, int), np.full(count, _NOWHERE))
        if not absent.all():
            kept = batch[~absent]
            kept.info.pop(RESTARTED, None)  # only failed rows have it, so the buffer needs no column
            added = self.buffer.add(kept, buffer_ids=ids[~absent])
            for result, part in zip(results, added, strict=True):
                result[~absent] = part
        return results


def _same(buffer: ReplayBuffer) -> ReplayBuffer:
    return buffer


@contextlib.contextmanager
def without_absent_rows(collector: Any) -> Iterator[AbsentRows]:
    """Lets a collector's loop run without steps that failed; the caller corrects the loop's counts of them."""
    rows = AbsentRows(collector.buffer)
    shown, stats_class = collector.run_on_episode_done, collector.collect_stats_class
    own = vars(collector).get("run_on_episode_done")  # a function that was set on the object

    class Stats(stats_class):  # type: ignore[misc,valid-type]
        """Counts no episode that was cut."""

        def update_at_episode_done(self, episode_batch: Any, *args: Any, **kwargs: Any) -> None:
            if episode_batch is not _CUT:
                super().update_at_episode_done(episode_batch, *args, **kwargs)

    collector.buffer, collector.collect_stats_class = rows, Stats
    collector.run_on_episode_done = lambda episode: None if episode is _CUT else shown(episode)
    try:
        yield rows
    finally:
        collector.buffer, collector.collect_stats_class = rows.buffer, stats_class
        if own is None:
            del collector.run_on_episode_done
        else:
            collector.run_on_episode_done = own
