"""SerialPool against Gymnasium's SyncVectorEnv, and what it promises beyond."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import iterate
from helpers.exact import SpaceEnv
from helpers.kinds import ALL_SPACES, env_fns, factory
from helpers.odd_envs import OneInfo, ReusedObject
from helpers.testing import CountingEnv, FaultyEnv, assert_identical, counting_errors

from rayvec.data import tree_map
from rayvec.errors import EnvError
from rayvec.pools.base import Autoreset, RestartPolicy
from rayvec.pools.step_and_autoreset import SerialPool
from rayvec.rollout.loop import CallablePolicy, rollout
from rayvec.vector.ray_vec_env import RayVecEnv


@pytest.mark.parametrize("mode", [Autoreset.NEXT_STEP, Autoreset.SAME_STEP])
@pytest.mark.parametrize("kind", ALL_SPACES)
def test_equals_sync_vector_env_row_by_row(kind: str, mode: Autoreset) -> None:
    """Merging infos and batching objects is done elsewhere; here every row is compared."""
    space = ALL_SPACES[kind]
    fns = env_fns(3, space, space)
    sync = SyncVectorEnv(fns, autoreset_mode=AutoresetMode[mode.name])
    ids = np.arange(3)

    def assert_same_obs(obs: Any) -> None:
        if pool.layout is None:
            assert_identical(list(batch.obs), list(iterate(sync.observation_space, obs)))
        else:
            assert_identical(tree_map(np.array, batch.obs), obs)

    with closing(SerialPool(factory(fns))) as pool, closing(sync):
        pool.reset(ids, [7, 8, 9])
        batch = pool.recv(ids)
        assert_same_obs(sync.reset(seed=7)[0])
        sync.action_space.seed(0)
        for _ in range(10):
            actions = sync.action_space.sample()
            obs, *flags, _ = sync.step(actions)
            pool.send(ids, list(iterate(sync.action_space, actions)), mode)
            batch = pool.recv(ids)
            assert_same_obs(obs)
            assert_identical([batch.rew, batch.terminated, batch.truncated], flags)


def test_the_environment_decides_what_step_before_reset_does() -> None:
    fns = [partial(gymnasium.make, "CartPole-v1")]
    for mode in Autoreset:
        with closing(SerialPool(factory(fns))) as pool:
            pool.send(np.arange(1), np.zeros(1, int), mode)
            with pytest.raises(gymnasium.error.ResetNeeded):
                pool.recv(np.arange(1))


def test_only_environments_that_say_something_have_infos() -> None:
    with closing(SerialPool(factory([CountingEnv] * 3), first_id=10)) as pool:
        ids = np.array([2, 0])
        pool.reset(ids, [0, 0])
        assert [(info.env_id, info.info) for info in pool.recv(ids).info] == [(12, {"began": 0}), (10, {"began": 0})]
        pool.send(ids, np.zeros(2, int), Autoreset.NEXT_STEP)
        assert pool.recv(ids).info == ()


def test_one_info_dict_used_for_ever_does_not_change_what_was_said() -> None:
    with closing(SerialPool(factory([OneInfo]))) as pool:
        ids = np.arange(1)
        pool.reset(ids, [0])
        said = [pool.recv(ids).info[0]]
        for _ in range(4):
            pool.send(ids, np.zeros(1, int), Autoreset.SAME_STEP)
            said.append(pool.recv(ids).info[0])
        assert [info.info["at"] for info in said] == ["reset 0", "step 1", "reset 1", "step 1", "reset 2"]
        assert [info.final_info for info in said if info.final_info] == [{"at": "step 2"}, {"at": "step 2"}]
        chunk = rollout(pool, CallablePolicy(lambda obs: np.zeros(len(obs), int)), 4)
        assert [info.info["at"] for info in chunk.infos] == ["step 1", "step 2"] * 2


def test_an_object_used_for_ever_does_not_change_what_was_seen() -> None:
    with closing(SerialPool(factory([ReusedObject]))) as pool:
        pool.reset(np.arange(1), [0])
        pool.recv(np.arange(1))
        chunk = rollout(pool, CallablePolicy(lambda obs: np.zeros(len(obs), int)), 5)
        assert [obs["numbers"].tolist() for obs in chunk.obs[:, 0]] == [[0.0], [1.0], [2.0], [0.0], [1.0]]
        assert chunk.final_obs[0]["numbers"].tolist() == [3.0]


def test_begin_episodes_resets_only_what_is_between_episodes() -> None:
    with closing(SerialPool(factory([partial(CountingEnv, 1), partial(CountingEnv, 50)]))) as pool:
        ids = np.arange(2)
        pool.reset(ids, [0, 9])
        pool.recv(ids)
        pool.send(ids, np.zeros(2, int), Autoreset.DISABLED)
        assert pool.recv(ids).terminated.tolist() == [True, False]
        pool.begin_episodes(ids)
        assert pool.recv(ids).obs.tolist() == [[0, 1, 0, 1], [9, 0, 1, 1]]


@pytest.mark.parametrize("mode", list(Autoreset))
def test_one_failure_does_not_keep_the_others_from_their_step(mode: Autoreset) -> None:
    with closing(SerialPool(factory([CountingEnv, partial(FaultyEnv, "raise"), CountingEnv]))) as pool:
        ids = np.arange(3)
        pool.reset(ids, [4, 5, 6])
        pool.recv(ids)
        pool.send(ids, np.zeros(3, int), mode)
        with pytest.raises(ValueError, match="broken") as caught:
            pool.recv(ids)
        assert isinstance(caught.value.__cause__, EnvError) and "environment 1, seed 5" in str(caught.value.__cause__)
        assert pool.rew.tolist() == [1.0, 0.0, 1.0]


class OldGym(CountingEnv):
    """Returns what environments of the old gym library did."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def reset(self, **kwargs: Any) -> Any:
        result = super().reset(**kwargs)
        return result[0] if self._what == "reset" else result

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated or truncated, info


@pytest.mark.parametrize(
    ("what", "words"),
    [("reset", r"reset\(\) to return obs, info. Got: ndarray"), ("step", r"step\(\) to return .*Got: 4 values")],
)
def test_results_of_the_old_gym_api(what: str, words: str) -> None:
    env = RayVecEnv([partial(OldGym, what)], num_nodes=0, workers_per_node=0)
    with pytest.raises(EnvError, match=words):
        env.reset(seed=0)
        env.step(np.zeros(1, int))
    assert env.closed


@pytest.mark.parametrize("obs", [np.zeros(2), {"a": 0, "b": 1}], ids=["array", "dict"])
def test_an_observation_of_two_parts_is_not_taken_for_obs_and_info(obs: Any) -> None:
    env = CountingEnv()
    env.reset = lambda **kwargs: obs  # type: ignore[method-assign]
    with closing(SerialPool(factory([lambda: env]))) as pool, pytest.raises(EnvError, match=r"obs, info\. Got: "):
        pool.reset(np.arange(1), [0])
        pool.recv(np.arange(1))


def test_the_seed_is_still_known_after_automatic_resets() -> None:
    with closing(SerialPool(factory([partial(FaultyEnv, "raise", "step", 3)]))) as pool:
        ids = np.arange(1)
        pool.reset(ids, [1234])
        pool.recv(ids)
        pool.send(ids, np.zeros(1, int), Autoreset.DISABLED)
        pool.recv(ids)
        pool.reset(ids, [None])
        pool.recv(ids)
        with pytest.raises(ValueError, match="broken") as caught:
            rollout(pool, CallablePolicy(lambda obs: np.zeros(len(obs), int)), 5)
        assert "seed 1234" in str(caught.value.__cause__)


def test_a_constructor_that_raises_closes_what_was_made(tmp_path: Any) -> None:
    from helpers.odd_envs import WritesWhenClosed

    from rayvec.pools.in_process_base import EnvsFailed

    fns = [partial(WritesWhenClosed, str(tmp_path / "closed")), partial(FaultyEnv, "raise", "init")]
    with pytest.raises(EnvsFailed):
        SerialPool(factory(fns))
    assert (tmp_path / "closed").exists()


def test_a_restart_that_returns_the_environment_of_another_row() -> None:
    other = CountingEnv()
    made = iter([FaultyEnv("raise")])
    fns = [lambda: other, lambda: next(made, other)]
    with closing(SerialPool(factory(fns), restart_policy=RestartPolicy(restart=True))) as pool:
        ids = np.arange(2)
        pool.reset(ids, [0, 1])
        pool.recv(ids)
        pool.send(ids, np.zeros(2, int), Autoreset.DISABLED)
        with pytest.raises(EnvError, match="an environment of its own"):
            pool.recv(ids)


def test_chunks_over_any_number_of_steps_follow_each_other() -> None:
    with closing(SerialPool(factory([CountingEnv] * 3))) as pool:
        pool.reset(np.arange(3), [0, 1, 2])
        pool.recv(np.arange(3))
        policy = CallablePolicy(lambda obs: np.zeros(len(obs), int))
        chunks = [rollout(pool, policy, steps) for steps in (1, 7, 2, 30)]
        assert counting_errors(chunks) == []


def test_spaces_of_the_environments_are_reported() -> None:
    fns = [partial(SpaceEnv, spaces.Box(0.0, float(high), (2,)), render_mode="rgb_array") for high in (1, 2)]
    with closing(SerialPool(factory(fns))) as pool:
        found = pool.spaces
        assert found.observation == spaces.Box(0.0, 1.0, (2,))
        assert found.observations == (spaces.Box(0.0, 1.0, (2,)), spaces.Box(0.0, 2.0, (2,)))
        assert (found.render_mode, found.metadata["kind"]) == ("rgb_array", "space")
        assert found.misfit(found.observation) is None and found.misfit(spaces.Box(0.0, 1.0, (3,))) == 0
