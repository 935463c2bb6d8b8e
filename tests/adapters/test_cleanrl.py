"""The ends of episodes as CleanRL's scripts read them."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics
from helpers.native_envs import counting
from helpers.testing import assert_identical

from rayvec.adapters.cleanrl import RayVecEnv
from rayvec.errors import ConfigError


def make_env() -> Any:
    return RecordEpisodeStatistics(gymnasium.make("CartPole-v1"))


@pytest.mark.parametrize("workers", [0, 1])
def test_episodes_end_as_in_gymnasium_0_29(workers: int) -> None:
    theirs = SyncVectorEnv([make_env] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    with closing(RayVecEnv([make_env] * 3, num_nodes=0, workers_per_node=workers)) as ours, closing(theirs):
        assert_identical(ours.reset(seed=2)[0], theirs.reset(seed=2)[0])
        count = 0
        for _ in range(60):
            *got, infos = ours.step(np.ones(3, np.int64))
            *expected, of_step = theirs.step(np.ones(3, np.int64))
            assert_identical(got, expected)
            ended = expected[2] | expected[3]
            assert ("final_info" in infos) == ("final_observation" in infos) == bool(ended.any())
            for row in range(3) if ended.any() else ():
                assert (infos["final_info"][row] is None) == (not ended[row])
                if ended[row]:
                    np.testing.assert_array_equal(infos["final_observation"][row], of_step["final_obs"][row])
                    for key in "rl":
                        assert infos["final_info"][row]["episode"][key] == of_step["final_info"]["episode"][key][row]
                    count += 1
        assert count >= 9


def test_native_sub_batches() -> None:
    with closing(RayVecEnv([partial(counting, 3, "SameStep")], native=True, num_nodes=0, workers_per_node=0)) as env:
        env.reset(seed=1)
        for _ in range(8):
            obs, _, terminated, truncated, infos = env.step(np.zeros(3, np.int64))
            for row in np.flatnonzero(terminated | truncated):
                total = infos["final_observation"][row][3]
                assert infos["final_info"][row] == ({} if total % 3 else {"step": total})
                assert infos["final_observation"][row][1] == obs[row, 1] - 1


@pytest.mark.parametrize("settings", [{"autoreset_mode": "NextStep"}, {"native": True}])
def test_another_autoreset_mode(settings: dict[str, Any]) -> None:
    makes: Any = [partial(counting, 2)] if "native" in settings else [make_env]
    with pytest.raises(ConfigError, match="within the step that ends an episode"):
        RayVecEnv(makes, num_nodes=0, workers_per_node=0, **settings)
