"""Observations that are not finite: named, or kept.

Most tests step their environments in this process; one kind of each runs on worker processes of two nodes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from conftest import MakeVec
from gymnasium import spaces
from helpers.testing import CountingEnv

from rayvec.collect.collector import Collector
from rayvec.errors import EnvError
from rayvec.vector.ray_vec_env import RayVecEnv

EPISODE, STEP = 1, 2


class BadEnv(CountingEnv):
    """Some episodes have a NaN in the middle, some end with an infinity, some begin with one."""

    observation_space = spaces.Dict(
        {"count": CountingEnv.observation_space, "inner": spaces.Tuple([spaces.Box(-9, 9, (2,), np.float32)])}
    )

    def __init__(self, bad_from: int = 2) -> None:
        super().__init__()
        self._bad_from = bad_from
        self._over = False

    def reset(self, **kwargs: Any) -> Any:
        self._over = False
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        _, rew, terminated, truncated, info = super().step(action)
        self._over = terminated or truncated
        return self._obs(), rew, terminated, truncated, info

    def _obs(self) -> Any:
        count = super()._obs()
        episode, step = int(count[EPISODE]), int(count[STEP])
        kind = episode % 7 if episode >= self._bad_from else 0
        value = 0.5
        if kind == 2 and step == 2:
            value = np.nan
        if kind == 4 and self._over:
            value = -np.inf
        if kind == 5 and step == 0:
            value = np.inf
        return {"count": count, "inner": (np.array([1.0, value], np.float32),)}


def zeros(obs: Any) -> Any:
    return np.zeros(len(obs["count"]), int)


def local(envs: Any) -> RayVecEnv:
    return RayVecEnv(envs, num_nodes=0, workers_per_node=0)


ONE_BAD = [partial(BadEnv, 99), BadEnv, partial(BadEnv, 99)]


@pytest.fixture(scope="module")
def one_bad(make_module_vec: MakeVec) -> RayVecEnv:
    return make_module_vec(ONE_BAD, nodes=2)


def test_the_chunk_behind_a_bad_one_is_dropped() -> None:
    """Prefetching had started it; its episodes have lost their beginnings."""
    env = local([BadEnv] * 2)
    collector = Collector(env, zeros, seed=0, prefetch=True)
    with pytest.raises(EnvError, match="must be finite"):
        for _ in range(100):
            collector.collect(n_step=2 * 4)
    assert env.call("unwrapped"), "the environments are free"
    batch = collector.collect(n_step=2)
    assert batch.stats.n_surplus_steps == 2 * 4
    assert (batch.chunks[0].obs["count"][0, :, STEP] == 0).all(), "new episodes begin"
    collector.close()


@pytest.mark.parametrize(
    "how",
    [{}, {"inference": "driver"}, {"inference": "node"}, {"prefetch": True}, {"max_staleness": 2}],
    ids=["worker", "driver", "node", "pre", "async"],
)
def test_what_is_raised_names_environment_step_and_key(one_bad: RayVecEnv, how: Any) -> None:
    env = one_bad
    collector = Collector(env, zeros, seed=0, **how)
    reference = Collector(local(ONE_BAD), zeros, seed=0, on_bad_obs="keep")
    obs = reference.collect(n_step=3 * 40).chunks[0].obs["inner"][0]
    ((t, n), *_) = np.argwhere(np.isnan(obs).any(-1)).tolist()
    assert n == 1
    with pytest.raises(EnvError) as caught:
        for _ in range(100):  # "async" may deliver chunks of the other node first
            collector.collect(n_step=3 * 40)
    assert f"nan at ['inner'][0] in the observation before step {t} of environment 1" in str(caught.value)
    assert not env.closed
    if not how:
        batch = collector.collect(n_step=3)
        assert (batch.chunks[0].obs["count"][0, :, STEP] == 0).all(), "new episodes begin"
    collector.close()


class BadRewards(CountingEnv):
    """The reward of the third step of the third episode is not finite."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def step(self, action: Any) -> Any:
        obs, rew, *others = super().step(action)
        is_bad = obs[EPISODE] == 2 and obs[STEP] == 3
        return obs, self._value if is_bad else rew, *others


@pytest.mark.parametrize(("value", "shown"), [(np.nan, "nan"), (-np.inf, "-inf"), (1e39, "inf")])
def test_a_reward_is_treated_as_an_observation_is(value: float, shown: str) -> None:
    envs = [partial(BadRewards, 1.0), partial(BadRewards, value)]
    kept = Collector(local(envs), zeros_of_counts, seed=0, on_bad_obs="keep").collect(n_step=2 * 40).chunks[0]
    ((t, n),) = np.argwhere(~(np.abs(kept.rew) < 1e38)).tolist()
    assert n == 1
    with pytest.raises(EnvError, match=f"{shown} as the reward of step {t} of environment 1"):
        Collector(local(envs), zeros_of_counts, seed=0).collect(n_step=2 * 40)
    with pytest.raises(EnvError, match="reward"):
        Collector(local(envs), zeros_of_counts, seed=0).play(20)


def zeros_of_counts(obs: Any) -> Any:
    return np.zeros(len(obs), int)
