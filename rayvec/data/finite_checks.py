"""Observations and rewards that are not finite: found in each chunk, raised as errors, or left out by episode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import BadObs, Chunk, ChunkSummary, Tree, tree_leaves
from rayvec.errors import EnvError

__all__ = ["bad_obs_error", "drop_bad_episodes", "find_bad_obs", "join_bad_obs"]


def find_bad_obs(chunk: Chunk) -> BadObs | None:
    """Returns where observations or rewards are NaN or infinite, or None if all are finite.

    Of observations, only floating-point arrays can be. A reward is marked in the row of its step.
    """
    where, finals = _nothing_bad(chunk)
    named: list[tuple[tuple[int, int], str]] = []
    bad_rew = chunk.valid & _rows(chunk.rew, 2)
    where[:-1] |= bad_rew
    for t, n in np.argwhere(bad_rew)[:1].tolist():
        step = f"step {chunk.first_step + t} of environment {chunk.env_ids[n]}"
        named.append(((t, n), f"{_values(chunk.rew[t, n])} as the reward of {step}"))
    trees = zip(_paths(chunk.obs), tree_leaves(chunk.last_obs), tree_leaves(chunk.final_obs), strict=True)
    for (path, obs), last, final in trees:
        if obs.dtype.kind not in "fc" or all(np.isfinite(array).all() for array in (obs, last, final)):
            continue
        bad = np.concatenate([_rows(obs, 2), _rows(last, 1)[None]])
        bad_finals = _rows(final, 1)
        where |= bad
        finals |= bad_finals
        key = f" at {path}" if path else ""
        for t, n in np.argwhere(bad)[:1].tolist():
            value = obs[t, n] if t < len(obs) else last[n]
            what = "the observation before step" if t < len(obs) else "the observation after step"
            step = chunk.first_step + min(t, len(obs) - 1)
            named.append(((t, n), f"{_values(value)}{key} in {what} {step} of environment {chunk.env_ids[n]}"))
        for row in np.flatnonzero(bad_finals)[:1].tolist():
            t, n = chunk.final_index[row].tolist()
            where_it_was = f"the last observation, after step {chunk.first_step + t}, of environment {chunk.env_ids[n]}"
            named.append(((t + 1, n), f"{_values(final[row])}{key} in {where_it_was}"))
    return BadObs(where, finals, min(named)[1]) if named else None


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


def _values(value: NDArray[Any]) -> str:
    flat = np.asarray(value).ravel()
    return str(flat[~np.isfinite(flat)][0])


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
        remedy="Correct the environment. rayvec.Collector(..., on_bad_obs='drop') leaves such episodes out.",
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
        stops = (np.flatnonzero(ends[:, n]) + 1).tolist()
        for start, stop in zip([0, *stops], [*stops, chunk.num_steps], strict=True):
            last = stop == chunk.num_steps and not (stop and ends[stop - 1, n])
            is_bad = bad.where[start:stop, n].any() or (last and bad.where[-1, n]) or bad_final[start:stop, n].any()
            if start < stop and is_bad:
                valid[start:stop, n] = False
                continues[n] |= last
                count += 1
                if start == 0 and unfinished[n]:
                    lost.append((-1, n))
        continues[n] |= bool(bad.where[-1, n])
    _put_zeros(chunk)
    restarts = np.array(sorted({*lost, *map(tuple, chunk.restarts.tolist())}), np.int64).reshape(-1, 2)
    return replace(chunk, valid=valid, restarts=restarts), continues, count


def _put_zeros(chunk: Chunk) -> None:
    for tree in (chunk.obs, chunk.last_obs, chunk.final_obs, chunk.rew):
        for leaf in tree_leaves(tree):
            if leaf.dtype.kind in "fc":
                leaf[~np.isfinite(leaf)] = 0
