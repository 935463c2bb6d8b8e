"""Episodes that are assigned beforehand, and those by Tianshou's rule."""

from __future__ import annotations

from typing import Any

import numpy as np
from helpers.examples import examples
from hypothesis import given, strategies as st

from rayvec.collect.episode_quotas import EpisodeQuotas
from rayvec.tianshou.collect.schedules import TianshouEpisodes


def by_definition(n_episode: int, ended: np.ndarray, quotas: bool) -> np.ndarray:
    """Walks through steps one after another; returns which belong, ``bool [T, N]``."""
    n = ended.shape[1]
    left = [n_episode // n + (i < n_episode % n) for i in range(n)]
    total, takes_part = n_episode, [i < n_episode for i in range(n)]
    belongs = np.zeros_like(ended)
    for t, row in enumerate(ended):
        belongs[t] = [left[i] > 0 if quotas else takes_part[i] for i in range(n)]
        over = [i for i in range(n) if row[i] and belongs[t, i]]
        total -= len(over)
        for i in over:
            left[i] -= 1
            if sum(takes_part) > total:
                takes_part[i] = False
    return belongs


@examples(200)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 12), st.sampled_from([EpisodeQuotas, TianshouEpisodes]))
def test_episodes_are_those_that_a_walk_through_the_steps_finds(
    seed: int, num_envs: int, n_episode: int, kind: Any
) -> None:
    schedule, chunks, rng = kind(n_episode, num_envs), [], np.random.default_rng(seed)
    taken = []
    while schedule.next_steps():
        chunks.append(rng.random((7, num_envs)) < 0.2)
        taken.append(schedule.take(np.ones((7, num_envs), bool), chunks[-1]))
    ended, belongs = np.concatenate(chunks), np.concatenate(taken)
    np.testing.assert_array_equal(belongs, by_definition(n_episode, ended, kind is EpisodeQuotas))
    assert (ended & belongs).sum() == n_episode
    assert not schedule.take(np.ones((7, num_envs), bool), ended[:7]).any()
