"""A program: EnvPool as native sub-batches. EnvPool keeps references, which other tests would count as leaks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any

import envpool
import numpy as np
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from rayvec import RayVecEnv


def check(wrappers: Sequence[Any]) -> None:
    """Steps two pools of EnvPool in a worker, beside the same pools here."""
    make = partial(envpool.make, "CartPole-v1", env_type="gymnasium", num_threads=1)
    makers = [partial(make, num_envs=3, seed=s) for s in (1, 5)]
    with closing(RayVecEnv(makers, wrappers=wrappers, native=True, num_nodes=0, workers_per_node=1)) as env:
        alone = [make(num_envs=3, seed=s) for s in (1, 5)]
        obs, info = env.reset()
        np.testing.assert_array_equal(obs, np.concatenate([each.reset()[0] for each in alone]))
        assert set(info) == {"elapsed_step"}
        for step in range(60):
            actions = np.full(6, step % 3 > 0, np.int64)
            expected = [each.step(actions[:3]) for each in alone]
            for got, *parts in zip(env.step(actions)[:4], *[each[:4] for each in expected], strict=True):
                np.testing.assert_array_equal(got, np.concatenate(parts))


if __name__ == "__main__":
    check(())
    check((RecordEpisodeStatistics,))
