"""Native sub-batches under Tianshou: the adapter by step, and the collector in chunks."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
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


class FailsPartially(SyncVectorEnv):
    """Raises from a reset of some of its environments."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if options and "reset_mask" in options:
            raise RuntimeError("no partial reset")
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_call_for_any_row_raises_what_its_sub_batch_raises(workers: int) -> None:
    make = partial(FailsPartially, [CountingEnv] * 3)
    with closing(local([partial(counting, 3), make], workers_per_node=workers)) as env:
        env.reset()
        with pytest.raises(AttributeError, match="nothing"):
            env.get_env_attr("nothing", id=[4])
        with pytest.raises(RuntimeError, match="no partial reset"):
            env.reset([4])


def test_what_cannot_work() -> None:
    with pytest.raises(ConfigError, match="steps as a whole"):
        local([partial(counting, 2)], wait_num=1)
    env = local([partial(counting, 2, "SameStep")], workers_per_node=0)
    env.reset()
    with pytest.raises(ConfigError, match="Tianshou resets environments by itself"):
        env.step(np.zeros(2, np.int64))


def test_a_seed_of_a_reset_is_any_whole_number_and_other_arguments_are_refused() -> None:
    with closing(local([partial(counting, 2)] * 2, workers_per_node=0)) as env:
        expected = env.reset(seed=7)[0]
        for seed in (np.int64(7), np.int32(7)):
            np.testing.assert_array_equal(env.reset(seed=seed)[0], expected)
        with pytest.raises(ConfigError, match="seed"):
            env.reset(seed=[1, 2])
        with pytest.raises(ConfigError, match="level"):
            env.reset(level=3)
