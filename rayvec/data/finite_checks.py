"""Observations and rewards that are not finite: found in each chunk, raised as errors, or left out by episode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import BadObs, Chunk, ChunkSummary, Tree, tree_leaves
from rayvec.errors import EnvError

__all__ = ["bad_obs_error", "drop_bad_episodes", "find_bad_obs", "join_bad_obs", "put_first_obs"]


def find_bad_obs(chunk: Chunk) -> BadObs | None:
    """Returns where observations or rewards are NaN or infinite, or None if all are finite.

    Of observations, only floating-point arrays can be. A reward is marked in the row of its step.
    """
    where, finals = _nothing_bad(chunk)
    where[:-1] = chunk.valid & _rows(chunk.rew, 2)
    for obs, last, final in zip(*map(tree_leaves, (chunk.obs, chunk.last_obs, chunk.final_obs)), strict=True):
        if obs.dtype.kind in "fc" and not all(np.isfinite(array).all() for array in (obs, last, final)):
            where |= np.concatenate([_rows(obs, 2), _rows(last, 1)[None]])
            finals |= _rows(final, 1)
    if not (where.any() or finals.any()):
        return None
    return BadObs(where, finals, _first_bad(chunk, where, finals))


def _first_bad(chunk: Chunk, where: NDArray[np.bool_], finals: NDArray[np.bool_]) -> str:
    """Describes the first number that is not finite."""
    rows = np.flatnonzero(finals)
    found: list[tuple[list[int], int | None]] = []
    found += [([t + 1, n], row) for row, (t, n) in zip(rows.tolist(), chunk.final_index[rows].tolist(), strict=True)]
    found += [([t, n], None) for t, n in np.argwhere(where)[:1].tolist()]
    (t, n), row = min(found, key=itemgetter(0))
    of_environment = f"of environment {chunk.env_ids[n]}"
    if row is not None:
        value = _bad_number(chunk.final_obs, row)
        return f"{value} in the last observation, after step {chunk.first_step + t - 1}, {of_environment}"
    if t == chunk.num_steps:
        value = _bad_number(chunk.last_obs, n)
        return f"{value} in the observation after step {chunk.first_step + t - 1} {of_environment}"
    value = _bad_number(chunk.obs, (t, n))
    if value is not None:
        return f"{value} in the observation before step {chunk.first_step + t} {of_environment}"
    return f"{_bad_number(chunk.rew, (t, n))} as the reward of step {chunk.first_step + t} {of_environment}"


def _bad_number(tree: Tree, place: int | tuple[int, int]) -> str | None:
    """Returns the first number that is not finite at one place of all arrays, and its key; None if there is none."""
    for path, leaf in _paths(tree):
        if leaf.dtype.kind not in "fc":
            continue
        numbers = np.asarray(leaf[place])
        if not np.isfinite(numbers).all():
            return str(numbers[~np.isfinite(numbers)].flat[0]) + (f" at {path}" if path else "")
    return None


def _nothing_bad(chunk: Chunk | ChunkSummary) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    return np.zeros((chunk.num_steps + 1, len(chunk.env_ids)), bool), np.zeros(len(chunk.final_index), bool)


def _paths(tree: Tree, path: str = "") -> Iterator[tuple[str, NDArray[Any]]]:
    """Yields the arrays of a tree, with the keys and places that lead to them."""
    if isinstance(tree, (dict, tuple)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _paths(value, f"{path}[{key!r}]")
    else:
        yield path, tree


def _rows(array: NDArray[Any], num_axes: int) -> NDArray[np.bool_]:
    """Returns which rows, over the first axes, are not finite everywhere."""
    bad: NDArray[np.bool_] = ~np.isfinite(array).all(axis=tuple(range(num_axes, array.ndim)))
    return bad


def join_bad_obs(parts: Sequence[ChunkSummary], order: NDArray[np.intp]) -> BadObs | None:
    """Joins what was found in chunks side by side.

    Args:
        parts: Summaries of the chunks.
        order: Where each row of the joined `finals` comes from, among those of all parts one after another.
    """
    found = [part.bad_obs.first for part in parts if part.bad_obs]
    if not found:
        return None
    every = [part.bad_obs or BadObs(*_nothing_bad(part), "") for part in parts]
    where = np.concatenate([bad.where for bad in every], axis=1)
    return BadObs(where, np.concatenate([bad.finals for bad in every])[order], found[0])


def bad_obs_error(bad: BadObs) -> EnvError:
    """Describes the first that was found."""
    return EnvError(
        "Observations and rewards must be finite.",
        expected="finite numbers in every observation and reward",
        got=bad.first,
        remedy="Correct the environment. rayvec.Collector(..., on_bad_obs='drop') leaves such episodes out. It "
        "can't be combined with max_staleness or by_reference.",
    )


def drop_bad_episodes(chunk: Chunk, bad: BadObs, unfinished: NDArray[np.bool_]) -> tuple[Chunk, NDArray[np.bool_], int]:
    """Clears `valid` for episodes in which an observation or a reward is not finite, and replaces such numbers by 0.

    If such an episode began in an earlier chunk, `restarts` names it at t = -1, so that its earlier steps don't count.

    Args:
        chunk: Changed in place where numbers are replaced.
        bad: What was found in it.
        unfinished: Whose episode began in an earlier chunk, ``bool [N]``.

    Returns:
        The chunk without these episodes; the environments in which such an episode is unfinished and must be ended,
        ``bool [N]``; and how many episodes were dropped.
    """
    valid, continues, count = chunk.valid.copy(), np.zeros(chunk.num_envs, bool), 0
    ends = chunk.done
    inner = chunk.restarts[chunk.restarts[:, 0] >= 0]
    ends[inner[:, 0], inner[:, 1]] = True  # what follows a step that failed is another episode
    bad_final = np.zeros_like(ends)
    bad_final[tuple(chunk.final_index[bad.finals].T)] = True
    lost = []
    for n in np.flatnonzero(bad.where.any(0) | bad_final.any(0)).tolist():
        for start, stop, continues_after in _episodes(ends[:, n]):
            steps = slice(start, stop)
            if bad.where[steps, n].any() or bad_final[steps, n].any() or (continues_after and bad.where[-1, n]):
                valid[steps, n] = False
                continues[n] |= continues_after
                count += 1
                if start == 0 and unfinished[n]:
                    lost.append((-1, n))
        continues[n] |= bool(bad.where[-1, n])
    _put_zeros(chunk.obs, chunk.last_obs, chunk.final_obs, chunk.rew)
    restarts = np.array(sorted({*lost, *map(tuple, chunk.restarts.tolist())}), np.int64).reshape(-1, 2)
    return replace(chunk, valid=valid, restarts=restarts), continues, count


def _episodes(ends: NDArray[np.bool_]) -> Iterator[tuple[int, int, bool]]:
    """Yields where the steps of each episode of one environment start and stop, and whether it continues afterwards."""
    for start, stop in pairwise([0, *(np.flatnonzero(ends) + 1).tolist(), len(ends)]):
        if start < stop:
            yield start, stop, not ends[stop - 1]


def put_first_obs(chunk: Chunk, among: NDArray[np.bool_], obs: Tree) -> None:
    """Writes the first observations of new episodes into ``last_obs``.

    NaN and infinity become 0. The next chunk begins with the original numbers.

    Args:
        chunk: The chunk, which is changed.
        among: Environments whose episode is new, ``bool [N]``.
        obs: The present observations, tree of ``[N, *obs_shape]``.
    """
    for kept, new in zip(tree_leaves(chunk.last_obs), tree_leaves(obs), strict=True):
        kept[among] = new[among]
    _put_zeros(chunk.last_obs)


def _put_zeros(*trees: Tree) -> None:
    for tree in trees:
        for leaf in tree_leaves(tree):
            if leaf.dtype.kind in "fc":
                leaf[~np.isfinite(leaf)] = 0
