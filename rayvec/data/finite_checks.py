"""Observations and rewards that are not finite, found in each chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from rayvec.data import Chunk, Tree
from rayvec.data.trees import tree_paths
from rayvec.errors import EnvError

__all__ = ["bad_obs_error", "find_bad_obs"]

_Place = Callable[[tuple[int, ...]], tuple[int, int]]


def find_bad_obs(chunk: Chunk) -> str | None:
    """Describes the first observation or reward that is NaN or infinite; None if all are finite.

    Of observations, only floating-point arrays can be.
    """
    ends, num_steps = chunk.final_index, chunk.num_steps
    found = [
        *_bad_numbers(chunk.final_obs, lambda at: (ends[at[0], 0] + 1, ends[at[0], 1]), "in the last observation", -1),
        *_bad_numbers(chunk.obs, lambda at: (at[0], at[1]), "in the observation", 0),
        *_bad_numbers(chunk.last_obs, lambda at: (num_steps, at[0]), "in the observation", -1),
        *_bad_numbers(np.where(chunk.valid, chunk.rew, 0), lambda at: (at[0], at[1]), "as the reward", None),
    ]
    if not found:
        return None
    t, n, number, offset = min(found, key=lambda each: each[:2])
    step = chunk.first_step + t
    where = f" of step {step}" if offset is None else f" after step {step - 1}" if offset else f" before step {step}"
    return f"{number}{where} of environment {chunk.env_ids[n]}"


def _bad_numbers(tree: Tree, place_of: _Place, what: str, offset: int | None) -> Iterator[tuple[Any, ...]]:
    """Yields for each array the place of its first number that is not finite, and a description."""
    for path, leaf in tree_paths(tree):
        if leaf.dtype.kind in "fc" and not np.isfinite(leaf).all():
            index = tuple(np.argwhere(~np.isfinite(leaf))[0].tolist())
            where = f" at {''.join(f'[{key!r}]' for key in path)}" if path else ""
            yield *place_of(index), f"{leaf[index]}{where} {what}", offset


def bad_obs_error(first: str) -> EnvError:
    """Describes the first that was found."""
    return EnvError(
        f"{first}. Observations and rewards must be finite. Correct the environment, or let it raise with "
        "on_env_error='restart' to leave such episodes out."
    )
