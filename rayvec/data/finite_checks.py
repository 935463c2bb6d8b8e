"""Observations and rewards that are not finite, found in each chunk."""

from __future__ import annotations

import numpy as np

from rayvec.data import Chunk
from rayvec.data.trees import tree_paths


def find_bad_obs(chunk: Chunk) -> str | None:
    """Describes an observation or reward that is NaN or infinite; None if all are finite.

    Of observations, only floating-point arrays can be. Rewards are tested as float32, in which learners compute.
    """
    with np.errstate(over="ignore"):
        rewards = np.where(chunk.valid, chunk.rew, 0).astype(np.float32)
    last_index = np.stack([np.full(chunk.num_envs, chunk.num_steps), np.arange(chunk.num_envs)], 1)
    trees = [
        (chunk.obs, "in the observation before", None),
        (rewards, "as the reward of", None),
        (chunk.final_obs, "in the last observation after", chunk.final_index),
        (chunk.last_obs, "in the observation before", last_index),
    ]
    for tree, what, places in trees:
        for path, leaf in tree_paths(tree):
            if leaf.dtype.kind in "fc" and not np.isfinite(leaf).all():
                index = tuple(np.argwhere(~np.isfinite(leaf))[0])
                t, n = index[:2] if places is None else places[index[0]]
                where = "".join(f"[{key!r}]" for key in path)
                number = f"{leaf[index]} at {where}" if path else f"{leaf[index]}"
                return f"{number} {what} step {chunk.first_step + t} of environment {chunk.env_ids[n]}"
    return None
