"""Adds whole chunks to Tianshou's replay buffers, as if their steps had been added one after another.

``ReplayBufferManager.add`` takes one step of some environments, and loops over these in Python. A chunk is many
steps: indices, accumulators of unfinished episodes and data are computed for all of them at once. The result is the
same to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from tianshou.data import (
    Batch,
    CachedReplayBuffer,
    HERReplayBuffer,
    HERReplayBufferManager,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ReplayBufferManager,
)
from tianshou.data.batch import alloc_by_keys_diff, create_value
from tianshou.data.buffer.manager import PrioritizedReplayBufferManager

from rayvec.data import Chunk, Tree, tree_leaves, tree_map
from rayvec.data.join_chunks import counted_ends
from rayvec.errors import ConfigError
from rayvec.tianshou.collect.infos import info_columns, info_rows

__all__ = ["Added", "ChunkInsertion", "steps_per_env", "truncate_open_episode"]

_IN_BULK = {
    cls.add for cls in (ReplayBuffer, ReplayBufferManager, PrioritizedReplayBuffer, PrioritizedReplayBufferManager)
}
"""The ``add`` methods whose effect is known here; a buffer with another one gets its steps one by one."""


@dataclass(frozen=True, slots=True)
class Added:
    """What ``add`` returns, for S steps of N environments; 0 where a step was not added, or ended no episode.

    Attributes:
        index: Where each step lies in the buffer, ``int64 [S, N]``; -1 where it was not added.
        returns: Returns of the episodes that ended, ``float64 [S, N, *rew_shape]``.
        lens: Their lengths, ``int64 [S, N]``.
        starts: Where the episode of each step begins in the buffer, ``int64 [S, N]``.
        ended: Where an episode ended that counts, ``bool [S, N]``; one that a fault has cut does not.
    """

    index: NDArray[np.int64]
    returns: NDArray[np.float64]
    lens: NDArray[np.int64]
    starts: NDArray[np.int64]
    ended: NDArray[np.bool_]


def steps_per_env(buffer: ReplayBuffer) -> int:
    """Returns how many steps of an environment the smallest sub-buffer has room for."""
    subs = buffer.buffers if isinstance(buffer, ReplayBufferManager) else [buffer]
    return min(sub.maxsize for sub in subs)


def truncate_open_episode(buffer: ReplayBuffer, buffer_id: int) -> None:
    """Marks the last transition of one environment's unfinished episode as truncated; the episode is not counted.

    Args:
        buffer: The buffer; it is left as it is if the environment has no unfinished episode.
        buffer_id: The environment's sub-buffer.
    """
    [sub], [offset] = _sub_buffers(buffer, np.array([buffer_id]))
    if sub._ep_len == 0:
        return
    if isinstance(buffer, HERReplayBuffer | HERReplayBufferManager):
        buffer._restore_cache()  # of whole rows, which would undo the mark
    if sub._size > 0:
        last = int(sub.last_index[0]) + offset
        buffer._meta.truncated[last] = buffer._meta.done[last] = True
    sub._ep_return, sub._ep_len, sub._ep_start_idx = 0.0, 0, sub._insertion_idx
    if isinstance(buffer, CachedReplayBuffer):
        index = buffer.main_buffer.update(sub)
        sub.reset()
        buffer._lengths[0], buffer._lengths[buffer_id + 1] = len(buffer.main_buffer), 0
        buffer.last_index[0] = index[-1] if len(index) else -1
        buffer.last_index[buffer_id + 1] = offset


class ChunkInsertion:
    """Adds a chunk to a buffer, as ``buffer.add`` would add its valid steps one after another.

    Each row is what Tianshou's Collector adds: observation, action, reward, ends, the true next observation, info with
    ``env_id``, and the policy's entry. Where an environment was restarted, the transition before is truncated, also if
    it came with an earlier chunk, and its episode is not counted.

    Args:
        buffer: A VectorReplayBuffer or any other of Tianshou's; for one environment also a ReplayBuffer.
        chunk: What to add; rewards of several agents, ``rew [T, N, *rew_shape]``, step by step.
        act: Actions to store instead of those of the chunk, tree of ``[T, N, ...]``.
        policy: The policy's entry, arrays or tensors ``[T, N, ...]``; empty by default.

    Raises:
        ConfigError: The observations have tuples.
    """

    def __init__(
        self, buffer: ReplayBuffer, chunk: Chunk, *, act: Tree | None = None, policy: Batch | None = None
    ) -> None:
        self._buffer = buffer
        self._chunk = chunk
        self._ids = chunk.env_ids
        self._subs, self._offsets = _sub_buffers(buffer, self._ids)
        if _has_tuple(chunk.obs):
            raise ConfigError(
                "The observations have tuples, which Tianshou's buffers do not hold. Turn the Tuple space into a Dict "
                "space with a wrapper."
            )
        held = buffer._meta.get("info")
        in_bulk = type(buffer).add in _IN_BULK and chunk.rew.ndim == 2
        columns = info_columns(chunk, chunk.env_ids, held) if in_bulk else None
        self._bulk = columns is not None and all(leaf.dtype != object for leaf in tree_leaves(chunk.obs))
        self._fields: dict[str, Any] = {
            "obs": chunk.obs,
            "act": chunk.act if act is None else act,
            "policy": {} if policy is None else policy.to_dict(),
            "rew": chunk.rew,
            "terminated": chunk.terminated,
            "truncated": chunk.truncated,
            "done": chunk.done,
            "info": columns or {},
        }
        self._ended = counted_ends(chunk)

    def add(self, start: int, stop: int) -> Added:
        """Adds steps `start` to `stop` - 1; pieces are added in their order."""
        if start == 0:
            for t, n in self._chunk.restarts.tolist():
                if t <= 0:
                    truncate_open_episode(self._buffer, int(self._ids[n]))
        return self._add_in_bulk(start, stop) if self._bulk else self._add_in_order(start, stop)

    # In bulk.

    def _add_in_bulk(self, start: int, stop: int) -> Added:
        added, keep = self._advance(slice(start, stop))
        if keep.any():
            self._write(start, stop, added.index, keep)
            if isinstance(self._buffer, PrioritizedReplayBuffer):
                self._buffer.init_weight(added.index[keep])
        return added

    def _advance(self, steps: slice) -> tuple[Added, NDArray[np.bool_]]:
        """Advances indices and accumulators; returns also which steps no later one overwrites."""
        valid, subs = self._chunk.valid[steps], self._subs
        done = self._chunk.done[steps] & valid
        sizes = np.array([sub.maxsize for sub in subs])
        first = np.array([sub._insertion_idx for sub in subs])
        begun = np.array([sub._ep_start_idx for sub in subs])
        held = np.array([sub._size for sub in subs])
        open_lens = np.array([sub._ep_len for sub in subs])
        taken = valid.cumsum(0)
        count = taken[-1]
        index = (first + taken - 1) % sizes + self._offsets
        before = _taken_before(done, taken)
        starts = np.where(before < 0, begun, (first + before) % sizes) + self._offsets
        lens = taken - np.where(before < 0, -open_lens, before)
        sums, ep_return = _sums(np.array([sub._ep_return for sub in subs], float), self._chunk.rew[steps], valid, done)
        ended = self._ended[steps]
        until = np.where(done, taken, -1).max(0)  # taken when the last episode ended
        state = zip(
            subs,
            count.tolist(),
            ((first + count) % sizes).tolist(),
            np.minimum(held + count, sizes).tolist(),
            ep_return.tolist(),
            (count - np.where(until < 0, -open_lens, until)).tolist(),
            np.where(until < 0, begun, (first + until) % sizes).tolist(),
            strict=True,
        )
        for sub, moved, insertion, size, total, length, begin in state:
            if moved:
                sub.last_index[0] = (insertion - 1) % sub.maxsize
                sub._insertion_idx, sub._size = insertion, size
                sub._ep_return, sub._ep_len, sub._ep_start_idx = total, length, begin
        self._advance_manager(count > 0)
        added = Added(
            index=np.where(valid, index, -1),
            returns=np.where(ended, sums, 0.0),
            lens=np.where(ended, lens, 0),
            starts=np.where(valid, starts, 0),
            ended=ended,
        )
        return added, valid & (taken > count - sizes)

    def _advance_manager(self, moved: NDArray[np.bool_]) -> None:
        buffer = self._buffer
        if isinstance(buffer, ReplayBufferManager):
            ids = self._ids[moved]
            last = np.array([sub.last_index[0] for sub in self._subs])
            buffer.last_index[ids] = (last + self._offsets)[moved]
            buffer._lengths[ids] = np.array([sub._size for sub in self._subs])[moved]

    def _write(self, start: int, stop: int, index: NDArray[np.int64], keep: NDArray[np.bool_]) -> None:
        """Writes the steps to keep, as ``add`` does; the observations after them without an array of all of them."""
        fields = tree_map(lambda leaf: leaf[start:stop], self._fields)
        rows = _batch({**_rows(fields, keep), "obs": _rows(self._frames(fields["obs"], 2), keep)})
        try:
            self._assign(rows, index[keep])
        except ValueError:  # the buffer has not seen these keys
            self._allocate(rows)
            self._assign(rows, index[keep])
        if self._buffer._save_obs_next:
            self._write_next(self._buffer._meta.obs_next, start, stop, index, keep)

    def _assign(self, rows: Batch, index: NDArray[np.int64]) -> None:
        held = Batch()
        held.__dict__.update({key: value for key, value in self._buffer._meta.items() if key != "obs_next"})
        held[index] = rows

    def _allocate(self, rows: Batch) -> None:
        buffer, template = self._buffer, Batch()
        template.__dict__.update(rows.__dict__)
        if buffer._save_obs_next:
            template.__dict__["obs_next"] = rows.obs
        if buffer._meta.get_keys():
            alloc_by_keys_diff(buffer._meta, cast(Any, template), buffer.maxsize, False)
        else:
            buffer._meta = cast(Any, create_value(template, buffer.maxsize, stack=False))
        if isinstance(buffer, ReplayBufferManager):
            buffer._set_batch_for_children()

    def _write_next(self, held: Any, start: int, stop: int, index: NDArray[np.int64], keep: NDArray[np.bool_]) -> None:
        chunk = self._chunk
        inner = min(stop, chunk.num_steps - 1) - start
        following = tree_map(lambda leaf: leaf[start + 1 : start + 1 + inner], chunk.obs)
        held[index[:inner][keep[:inner]]] = _batch(_rows(self._frames(following, 2), keep[:inner]))
        if stop == chunk.num_steps:
            held[index[-1][keep[-1]]] = _batch(_rows(self._frames(chunk.last_obs, 1), keep[-1]))
        t, n = chunk.final_index.T
        among = np.flatnonzero((t >= start) & (t < stop))
        among = among[keep[t[among] - start, n[among]]]
        finals = tree_map(lambda leaf: leaf[among], self._frames(chunk.final_obs, 1))
        held[index[t[among] - start, n[among]]] = _batch(finals)

    def _frames(self, obs: Tree, axis: int) -> Any:
        """Returns the last of the frames that are stacked on this axis, if only that is stored."""
        frame = (slice(None),) * axis + (-1,)
        return tree_map(lambda leaf: leaf[frame], obs) if self._buffer._save_only_last_obs else obs

    # In the order of steps, by the buffer's own `add`.

    def _add_in_order(self, start: int, stop: int) -> Added:
        shape = (stop - start, self._chunk.num_envs)
        index, lens, starts = np.full(shape, -1), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        returns, ended = np.zeros((*shape, *self._chunk.rew.shape[2:])), self._ended[start:stop]
        following = self._chunk.next_obs()
        infos: dict[int, list[Any]] = {}
        for item in self._chunk.infos:
            infos.setdefault(item.t, []).append(item)
        for row, t in enumerate(range(start, stop)):
            columns = np.flatnonzero(self._chunk.valid[t])
            if len(columns):
                fields = {**self._fields, "obs_next": following}
                del fields["info"]
                batch = Batch(tree_map(lambda leaf: leaf[t][columns], fields))  # noqa: B023
                batch.info = info_rows(infos.get(t, ()), columns, self._chunk.env_ids[columns])
                result = self._buffer.add(batch, buffer_ids=self._ids[columns])
                index[row, columns], returns[row, columns], lens[row, columns], starts[row, columns] = result
        returns[~ended], lens[~ended] = 0.0, 0
        return Added(index, returns, lens, starts, ended)


def _sums(
    total: NDArray[np.float64], rew: NDArray[np.float64], valid: NDArray[np.bool_], done: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Adds rewards up in the order of steps; returns the sum after each step, and those of unfinished episodes."""
    rew = rew if valid.all() else np.where(valid, rew, 0.0)
    sums = np.empty(rew.shape)
    ends: Any = done.any(1).tolist()
    for t in range(len(rew)):
        total += rew[t]
        sums[t] = total
        if ends[t]:
            total[done[t]] = 0.0
    return sums, total


def _taken_before(done: NDArray[np.bool_], taken: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many steps an environment had taken when the episode before that of a step ended; -1 if none did."""
    until = np.maximum.accumulate(np.where(done, taken, -1), axis=0)
    return np.concatenate([np.full((1, done.shape[1]), -1), until[:-1]])


def _sub_buffers(buffer: ReplayBuffer, ids: NDArray[np.int64]) -> tuple[list[Any], NDArray[np.int64]]:
    """Returns the sub-buffers of some environments, and where each begins in the buffer."""
    subs: Any = [buffer]
    offsets = np.zeros(1, np.int64)
    if isinstance(buffer, CachedReplayBuffer):
        subs, offsets = buffer.cached_buffers, buffer._offset[1:]
    elif isinstance(buffer, ReplayBufferManager):
        subs, offsets = buffer.buffers, buffer._offset
    return [subs[i] for i in ids.tolist()], offsets[ids]


def _has_tuple(obs: Tree) -> bool:
    return isinstance(obs, tuple) or (isinstance(obs, dict) and any(map(_has_tuple, obs.values())))


def _rows(tree: Any, keep: NDArray[np.bool_]) -> Any:
    """Returns the rows to keep, one after another, without a copy if these are all."""
    if keep.all():
        return tree_map(lambda leaf: leaf.reshape(keep.size, *leaf.shape[keep.ndim :]), tree)
    return tree_map(lambda leaf: leaf[keep], tree)


def _batch(tree: Any) -> Any:
    """Returns a tree with batches in place of dicts; the arrays stay as they are."""
    if not isinstance(tree, dict):
        return tree
    batch = Batch()
    batch.__dict__.update({key: _batch(part) for key, part in tree.items()})
    return batch
