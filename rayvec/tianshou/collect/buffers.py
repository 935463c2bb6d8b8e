"""Adds whole chunks to Tianshou's replay buffers, as if their steps had been added one after another.

``ReplayBufferManager.add`` takes one step of some environments, and loops over these in Python. A chunk is many
steps: indices and data are computed for all of them at once. The result is the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

from rayvec.data import Chunk, ChunkInfo, Tree, objects, tree_leaves, tree_map
from rayvec.data.chunk import counted_ends
from rayvec.data.episodes import add_rewards

_IN_BULK = {
    cls.add for cls in (ReplayBuffer, ReplayBufferManager, PrioritizedReplayBuffer, PrioritizedReplayBufferManager)
}
"""The ``add`` methods whose effect is known here; a buffer with another one gets its steps one by one."""
_REGULAR = (int, float, complex, np.number, np.bool_, np.ndarray, str)
"""Of values of infos that are columns."""
Ended = tuple[NDArray[np.float64], NDArray[np.int64]]
"""For each step the return and the length of the episode that ended in it, ``[T, N, ...]`` and ``[T, N]``."""


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


def add_chunk(
    buffer: ReplayBuffer,
    chunk: Chunk,
    infos: Sequence[ChunkInfo],
    *,
    act: Tree | None = None,
    policy: Batch | None = None,
) -> Ended:
    """Adds a chunk to a buffer, as ``buffer.add`` would add its valid steps one after another.

    Each row is what Tianshou's Collector adds: observation, action, reward, ends, the true next observation, info with
    ``env_id``, and the policy's entry. Where an environment was restarted, the transition before is truncated, also if
    it came with an earlier chunk, and its episode is not counted.

    Args:
        buffer: A VectorReplayBuffer or any other of Tianshou's; for one environment also a ReplayBuffer.
        chunk: What to add; rewards of several agents, ``rew [T, N, *rew_shape]``, step by step.
        infos: The infos of its steps that are not empty.
        act: Actions to store instead of those of the chunk, tree of ``[T, N, ...]``.
        policy: The policy's entry, arrays or tensors ``[T, N, ...]``; empty by default.

    Returns:
        Returns and lengths of the episodes that ended, in the order of steps.
    """
    for t, n in chunk.restarts.tolist():
        if t <= 0:
            truncate_open_episode(buffer, int(chunk.env_ids[n]))
    fields: dict[str, Any] = {
        "obs": chunk.obs,
        "act": chunk.act if act is None else act,
        "policy": {} if policy is None else policy.to_dict(),
        "rew": chunk.rew,
        "terminated": chunk.terminated,
        "truncated": chunk.truncated,
        "done": chunk.done,
    }
    if buffer._save_obs_next:
        fields["obs_next"] = chunk.next_obs()
    infos = [item for item in infos if chunk.valid[item.t, item.n]]
    in_bulk = type(buffer).add in _IN_BULK and chunk.rew.ndim == 2
    columns = None
    if in_bulk and all(leaf.dtype != object for leaf in tree_leaves(chunk.obs)):
        rows = ((t * chunk.num_envs + n, info) for t, n, info in infos)
        columns = _info_columns(rows, chunk.valid.size, buffer._meta.get("info"))
    if columns is None:
        returns, lens = _add_in_order(buffer, chunk, fields, infos)
    else:
        columns["env_id"] = np.tile(chunk.env_ids, chunk.num_steps)
        fields["info"] = tree_map(lambda column: column.reshape(*chunk.valid.shape, *column.shape[1:]), columns)
        returns, lens = _add_in_bulk(buffer, chunk, fields)
    ended = counted_ends(chunk)
    return returns[ended], lens[ended]


def _add_in_bulk(buffer: ReplayBuffer, chunk: Chunk, fields: dict[str, Any]) -> Ended:
    valid, done = chunk.valid, chunk.done & chunk.valid
    subs, offsets = _sub_buffers(buffer, chunk.env_ids)
    first, begin, held, sizes = (
        np.array([getattr(sub, name) for sub in subs])
        for name in ("_insertion_idx", "_ep_start_idx", "_size", "maxsize")
    )
    taken = valid.cumsum(0)
    begin = np.where(done.any(0), (done * (first + taken)).max(0), begin)  # the step after the last end
    total = np.array([sub._ep_return for sub in subs], float)
    length = np.array([sub._ep_len for sub in subs])
    returns, lens = add_rewards(chunk, total, length)
    states = zip(
        subs,
        taken[-1].tolist(),
        ((first + taken[-1]) % sizes).tolist(),
        np.minimum(held + taken[-1], sizes).tolist(),
        total.tolist(),
        length.tolist(),
        (begin % sizes).tolist(),
        strict=True,
    )
    for sub, moved, insertion, size, *episode in states:
        if moved:
            sub.last_index[0] = (insertion - 1) % sub.maxsize
            sub._insertion_idx, sub._size = insertion, size
            sub._ep_return, sub._ep_len, sub._ep_start_idx = episode
    if isinstance(buffer, ReplayBufferManager):
        moved = taken[-1] > 0
        last, lengths = np.array([(sub.last_index[0], sub._size) for sub in subs]).T
        buffer.last_index[chunk.env_ids[moved]] = (last + offsets)[moved]
        buffer._lengths[chunk.env_ids[moved]] = lengths[moved]
    keep = valid & (taken > taken[-1] - sizes)  # steps that no later one overwrites
    if keep.any():
        index = ((first + taken - 1) % sizes + offsets)[keep]
        _write(buffer, index, _batch(_rows(_frames(buffer, fields), keep)))
        if isinstance(buffer, PrioritizedReplayBuffer):
            buffer.init_weight(index)
    return returns, lens


def _write(buffer: ReplayBuffer, index: NDArray[np.int64], rows: Any) -> None:
    """Writes rows as ``add`` does, with memory for keys that the buffer has not seen."""
    try:
        buffer._meta[index] = rows
    except ValueError:
        if buffer._meta.get_keys():
            alloc_by_keys_diff(buffer._meta, rows, buffer.maxsize, False)
        else:
            buffer._meta = cast(Any, create_value(rows, buffer.maxsize, stack=False))
        if isinstance(buffer, ReplayBufferManager):
            buffer._set_batch_for_children()
        buffer._meta[index] = rows


def _frames(buffer: ReplayBuffer, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields with the last of stacked frames alone, if only that is stored."""
    if not buffer._save_only_last_obs:
        return fields
    names = [name for name in ("obs", "obs_next") if name in fields]
    return {**fields, **{name: tree_map(lambda leaf: leaf[:, :, -1], fields[name]) for name in names}}


def _add_in_order(buffer: ReplayBuffer, chunk: Chunk, fields: dict[str, Any], infos: Sequence[ChunkInfo]) -> Ended:
    """Adds step by step, by the buffer's own `add`."""
    returns, lens = np.zeros(chunk.rew.shape), np.zeros(chunk.valid.shape, np.int64)
    by_step: dict[int, list[ChunkInfo]] = {}
    for item in infos:
        by_step.setdefault(item.t, []).append(item)
    for t, valid in enumerate(chunk.valid):
        columns = np.flatnonzero(valid)
        if len(columns):
            ids = chunk.env_ids[columns]
            batch = Batch(tree_map(lambda leaf: leaf[t][columns], fields))  # noqa: B023
            batch.info = _info_rows(by_step.get(t, ()), columns, ids)
            _, returns[t, columns], lens[t, columns], _ = buffer.add(cast(Any, batch), buffer_ids=ids)
    return returns, lens


def _sub_buffers(buffer: ReplayBuffer, ids: NDArray[np.int64]) -> tuple[list[Any], NDArray[np.int64]]:
    """Returns the sub-buffers of some environments, and where each begins in the buffer."""
    subs: Any = [buffer]
    offsets = np.zeros(1, np.int64)
    if isinstance(buffer, CachedReplayBuffer):
        subs, offsets = buffer.cached_buffers, buffer._offset[1:]
    elif isinstance(buffer, ReplayBufferManager):
        subs, offsets = buffer.buffers, buffer._offset
    return [subs[i] for i in ids.tolist()], offsets[ids]


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


def _info_columns(infos: Iterable[tuple[int, dict[Any, Any]]], size: int, held: Any) -> dict[str, Any] | None:
    """Returns infos as columns ``[size, ...]``, nested as the infos are.

    Tianshou turns the info dicts of every step into a Batch: one row for each environment, with 0 or None where it
    lacks a key. As long as a key's values are of one type, that gives the same step by step as for all steps together.

    Args:
        infos: Infos with the row that each belongs to.
        size: The number of rows.
        held: The infos that the buffer holds already, a Batch, or None.

    Returns:
        Columns, with 0 or None where a row has no such key; None if they depend on the step that they are of.
    """
    gathered: dict[Any, tuple[list[int], list[Any]]] = {}
    for row, info in infos:
        for key, value in info.items():
            rows, values = gathered.setdefault(key, ([], []))
            rows.append(row)
            values.append(value)
    columns: dict[str, Any] = {}
    for key, (rows, values) in gathered.items():
        before = held.get(key) if isinstance(held, Batch) else None
        if set(map(type, values)) == {dict} and all(values) and (before is None or isinstance(before, Batch)):
            columns[key] = _info_columns(zip(rows, values, strict=True), size, before)
        else:
            columns[key] = _column(rows, values, size, before)
        if columns[key] is None or not isinstance(key, str):
            return None
    return columns


def _column(rows: list[int], values: list[Any], size: int, held: Any) -> NDArray[Any] | None:
    """Returns one column; None unless all values, and what the buffer holds, are of one form."""
    kind, *others = set(map(type, values))
    forms = {(each.dtype, each.shape) for each in values} if kind is np.ndarray else ()
    if others or len(forms) > 1 or not issubclass(kind, _REGULAR):
        return None
    array = objects(values) if kind is str else np.array(values)
    fits = held is None or (isinstance(held, np.ndarray) and (held.dtype.kind == "O") == (kind is str))
    if not fits or (kind is not str and array.dtype.kind not in "biufc"):
        return None
    column = np.full((size, *array.shape[1:]), None if kind is str else 0, array.dtype)
    column[rows] = array
    return column


def _info_rows(infos: Sequence[ChunkInfo], columns: NDArray[np.intp], env_ids: NDArray[np.int64]) -> NDArray[Any]:
    """Returns the infos of one step as Tianshou's vector environments do: dicts with ``env_id``, ``object [k]``.

    Args:
        infos: The infos of the step that are not empty.
        columns: Columns of the environments that took the step, ``[k]``.
        env_ids: Their indices, ``int64 [k]``.
    """
    by_column = {item.n: item.info for item in infos}
    pairs = zip(columns.tolist(), env_ids.tolist(), strict=True)
    return objects([{**by_column.get(column, {}), "env_id": env_id} for column, env_id in pairs])
