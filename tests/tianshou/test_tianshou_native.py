"""Native sub-batches under Tianshou: the adapter by step, and the collector in chunks."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import numpy as np
import pytest
from helpers.native_envs import counting
from helpers.testing import CountingEnv
from helpers.tianshou_kit import Exact
from tianshou.data import VectorReplayBuffer
from tianshou.env import DummyVectorEnv

from rayvec.errors import ConfigError
from rayvec.tianshou import Collector, RayVectorEnv

local = partial(RayVectorEnv, native=True, num_nodes=0)


@pytest.mark.parametrize(
    "mode", ["NextStep", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("SameStep", "Disabled"))]
)
def test_a_collector_stores_true_transitions_only(mode: str) -> None:
    with closing(local([partial(counting, 3, mode)] * 2, workers_per_node=1)) as env:
        buffer = VectorReplayBuffer(600, 6)
        collector = Collector(Exact(), env, buffer)
        collector.reset_env(gym_reset_kwargs={"seed": 3})
        collector.collect(n_step=60)
        stats = collector.collect(n_episode=12)
        batch = buffer.sample(0)[0]
        assert stats.n_collected_episodes == 12 and len(batch) > 60
        np.testing.assert_array_equal(batch.obs[:, :2], batch.obs_next[:, :2])
        np.testing.assert_array_equal(batch.obs[:, 2:] + 1, batch.obs_next[:, 2:])
        np.testing.assert_array_equal(batch.rew, batch.obs_next[:, 3])


@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
def test_steps_are_those_of_single_environments(mode: str) -> None:
    with (
        closing(local([partial(counting, 3, mode)] * 2, workers_per_node=0)) as ours,
        closing(DummyVectorEnv([CountingEnv] * 6)) as theirs,
    ):
        np.testing.assert_array_equal(
            ours.reset(seed=3)[0], [env.reset(seed=3 + i)[0] for i, env in enumerate(theirs.workers)]
        )
        for _ in range(20):
            got, expected = (env.step(np.zeros(6, np.int64)) for env in (ours, theirs))
            for mine, other in zip(got, expected, strict=True):
                np.testing.assert_array_equal(mine, other)
            ended = np.flatnonzero(expected[2] | expected[3])
            if len(ended):
                np.testing.assert_array_equal(ours.reset(ended)[0], theirs.reset(ended)[0])


def test_what_cannot_work() -> None:
    with pytest.raises(ConfigError, match="steps as a whole"):
        local([partial(counting, 2)], wait_num=1)
    env = local([partial(counting, 2, "SameStep")], workers_per_node=0)
    env.reset()
    with pytest.raises(ConfigError, match="Tianshou resets environments by itself"):
        env.step(np.zeros(2, np.int64))


def test_mistakes_leave_it_open() -> None:
    with closing(local([partial(counting, 2)] * 2, workers_per_node=0)) as env:
        with pytest.raises(AttributeError, match="nothing"):
            env.get_env_attr("nothing", id=[3])
        expected = env.reset(seed=7)[0]
        np.testing.assert_array_equal(env.reset(seed=np.int32(7))[0], expected)
        with pytest.raises(ConfigError, match="seed"):
            env.reset(seed=[1, 2])
        with pytest.raises(ConfigError, match="level"):
            env.reset(level=3)
