"""RayVecEnv beside DummyVecEnv of Stable-Baselines3, step for step, and under Stable-Baselines3's own tools."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from helpers.kinds import ARRAY_SPACES, env_fns
from helpers.odd_values import OddValues
from helpers.own_envs import Optional, Outer
from helpers.testing import CountingEnv, FaultyEnv, assert_identical
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack, VecMonitor, VecNormalize

from rayvec.errors import ConfigError
from rayvec.stable_baselines3 import RayVecEnv

COUNTING = [CountingEnv] * 5
OWN_FINALS = [partial(OddValues, info=lambda env: {"final_info": env.t} if env.t else {})] * 3


@pytest.fixture(scope="module")
def optional() -> Iterator[RayVecEnv]:
    """Five environments of :class:`Optional` in two workers; every test resets them."""
    fns = [Optional, lambda: Outer(Optional()), Optional, Optional, Optional]
    with closing(RayVecEnv(fns, num_nodes=0, workers_per_node=2)) as env:
        yield env


def plain(value: Any) -> Any:
    """Returns what an environment returned, its ordered dicts as dicts."""
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return dict(value) if isinstance(value, dict) else value


def in_lockstep(ours: VecEnv, theirs: VecEnv, num_steps: int) -> None:
    """Steps both with random actions; everything must be the same, bit for bit."""
    ours.action_space.seed(0)
    assert ours.seed(7) == theirs.seed(7)
    assert_identical(plain(ours.reset()), plain(theirs.reset()))
    for _ in range(num_steps):
        actions: Any = [ours.action_space.sample() for _ in range(ours.num_envs)]
        if isinstance(actions[0], np.ndarray | np.generic):
            actions = np.array(actions)
        assert_identical(plain(ours.step(actions)), plain(theirs.step(actions)))
        assert_identical(ours.reset_infos, theirs.reset_infos)


class TestEquality:
    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("fns", [COUNTING, OWN_FINALS], ids=["counting", "own finals"])
    def test_steps_infos_and_resets(self, fns: Any, workers: int) -> None:
        with (
            closing(RayVecEnv(fns, num_nodes=0, workers_per_node=workers)) as ours,
            closing(DummyVecEnv(list(fns))) as theirs,
        ):
            in_lockstep(ours, theirs, 40)

    @pytest.mark.parametrize("kind", [kind for kind in ARRAY_SPACES if kind != "nested"])
    def test_every_space(self, kind: str) -> None:
        fns = env_fns(3, ARRAY_SPACES[kind], ARRAY_SPACES[kind])
        with (
            closing(RayVecEnv(fns, num_nodes=0, workers_per_node=0)) as ours,
            closing(DummyVecEnv(list(fns))) as theirs,
        ):
            in_lockstep(ours, theirs, 10)

    @pytest.mark.parametrize("wrap", [VecMonitor, VecNormalize, partial(VecFrameStack, n_stack=3)])
    def test_under_wrappers(self, wrap: Callable[[VecEnv], VecEnv]) -> None:
        fns = [partial(gymnasium.make, "CartPole-v1", max_episode_steps=9)] * 4
        with (
            closing(wrap(RayVecEnv(fns, num_nodes=0, workers_per_node=0))) as ours,
            closing(wrap(DummyVecEnv(list(fns)))) as theirs,
        ):
            ours.seed(3), theirs.seed(3)
            assert_identical(ours.reset(), theirs.reset())
            for step in range(30):
                mine, other = (env.step(np.full(4, step % 2)) for env in (ours, theirs))
                for info in [*mine[3], *other[3]]:
                    info.get("episode", {}).pop("t", None)  # seconds
                assert_identical(mine, other)


class TestSingleEnvironments:
    def test_attributes(self, optional: RayVecEnv) -> None:
        assert optional.get_attr("label") == ["plain"] * 5
        assert not optional.has_attr("number")
        with pytest.raises(AttributeError):
            optional.get_attr("number")
        optional.set_attr("number", 4, indices=[0, -1])
        optional.set_attr("number", 6, indices=range(1, 4))
        assert optional.has_attr("number")
        assert optional.get_attr("number") == [4, 6, 6, 6, 4]
        assert optional.get_attr("number", indices=np.array([3, 0])) == [6, 4]
        assert optional.get_attr("number", indices=4) == optional.get_attr("number", -1) == [4]
        assert optional.get_attr("number", indices=[0, 1, 0]) == [4, 6, 4]
        assert optional.get_attr("number", indices=[]) == []
        with pytest.raises(IndexError):
            optional.get_attr("number", indices=[5])

    def test_methods(self, optional: RayVecEnv) -> None:
        optional.reset()
        totals = optional.env_method("add", 0)  # steps that other tests have taken
        assert optional.env_method("add", 3, other=2) == [total + 5 for total in totals]
        assert optional.env_method("add", 1, indices=[1, 3]) == [totals[1] + 1, totals[3] + 1]
        assert callable(optional.get_attr("add", indices=0)[0])
        with pytest.raises(AttributeError):
            optional.env_method("subtract")

    def test_wrappers(self, optional: RayVecEnv) -> None:
        assert optional.env_is_wrapped(Outer) == [False, True, False, False, False]
        assert optional.env_is_wrapped(Outer, indices=1) == [True]

    def test_seeds_and_options_count_once(self, optional: RayVecEnv) -> None:
        optional.seed(30)
        optional.set_options([{"level": 1}, {"level": 1}, {}, {"array": np.zeros(2)}, {"level": 2}])
        assert optional.reset()[:, 0].tolist() == [30, 31, 32, 33, 34]
        assert optional.reset_infos == [{"began": 0}] * 5
        options = optional.get_attr("options")
        assert [options[i] for i in (0, 1, 2, 4)] == [{"level": 1}, {"level": 1}, None, {"level": 2}]
        assert optional.reset()[:, 1].tolist() == [1] * 5  # the next episode, not the first
        assert optional.get_attr("options") == [None] * 5
        optional.set_options({"level": 3})
        optional.reset()
        assert optional.get_attr("options") == [{"level": 3}] * 5

    def test_a_reset_drops_a_pending_step(self, optional: RayVecEnv) -> None:
        optional.seed(1)
        optional.reset()
        optional.step_async(np.zeros(5, int))
        assert optional.reset()[:, 2].tolist() == [0] * 5
        with pytest.raises(gymnasium.error.NoAsyncCallError):
            optional.step_wait()


@pytest.mark.parametrize(("fault", "workers"), [("raise", 0), ("raise", 1), ("kill", 2)])
def test_a_restarted_environment_is_truncated_at_its_last_true_observation(fault: Any, workers: int) -> None:
    fns = [partial(CountingEnv, 1000), partial(FaultyEnv, fault, at=2)]
    with closing(RayVecEnv(fns, num_nodes=0, workers_per_node=workers, on_env_error="restart")) as env:
        env.seed(5)
        env.reset()
        for _ in range(2):
            obs, *_ = env.step(np.zeros(2, int))
        last = obs[1].copy()
        obs, rewards, dones, infos = env.step(np.zeros(2, int))
        assert dones.tolist() == [False, True] and rewards[1] == 0.0
        assert infos[1]["env_restarted"] and infos[1]["TimeLimit.truncated"]
        np.testing.assert_array_equal(infos[1]["terminal_observation"], last)
        assert obs[1][2] == 0 and obs[0][2] == 3  # the first of a new episode; the other continues
        assert env.reset_infos[1] == {"began": 0}


class TestBadInput:
    def test_observations_that_no_array_holds(self) -> None:
        with pytest.raises(ConfigError, match="The observation space is Text"):
            RayVecEnv(env_fns(2, spaces.Text(3)), num_nodes=0, workers_per_node=0)

    @pytest.mark.parametrize("kind", ["observation", "action"])
    def test_different_spaces(self, kind: str) -> None:
        small, large = spaces.Box(0, 1, (2,)), spaces.Box(0, 1, (3,))
        others = (large, small) if kind == "observation" else (small, large)
        fns = [*env_fns(1, small, small), *env_fns(1, *others)]
        words = rf"nvironment 1 has the {kind} space {re.escape(str(large))}.*{re.escape(str(small))}"
        with pytest.raises(RuntimeError, match=words):
            RayVecEnv(fns, num_nodes=0, workers_per_node=0)

    def test_a_missing_package(self) -> None:
        program = (
            "import sys; sys.modules['stable_baselines3'] = None\n"
            "import rayvec.stable_baselines3 as ours\n"
            "from rayvec.errors import ConfigError\n"
            "try:\n    ours.RayVecEnv\n"
            "except ConfigError as error:\n    assert isinstance(error, ImportError) and 'pip install' in str(error)\n"
            "else:\n    raise AssertionError"
        )
        subprocess.run([sys.executable, "-c", program], check=True)


class TestTraining:
    def test_ppo_learns_the_same_weights_as_on_dummy_vec_env(self) -> None:
        weights = []
        fns = [partial(gymnasium.make, "CartPole-v1")] * 4
        for make in (DummyVecEnv, partial(RayVecEnv, num_nodes=0, workers_per_node=2)):
            with closing(make(list(fns))) as env:  # type: ignore[operator]
                model = PPO("MlpPolicy", env, n_steps=16, batch_size=32, n_epochs=1, seed=1, device="cpu")
                model.learn(128)
                weights.append({name: value.numpy() for name, value in model.policy.state_dict().items()})
        assert_identical(*weights)

    @pytest.mark.slow
    def test_ppo_and_callbacks_on_two_nodes(self, ray_cluster: object, tmp_path: Any) -> None:
        from stable_baselines3.common.callbacks import EvalCallback

        settings = {"num_nodes": 2, "workers_per_node": 1, "preload": ("stable_baselines3",)}
        env, test_env = (
            make_vec_env("CartPole-v1", 4, vec_env_cls=RayVecEnv, vec_env_kwargs=settings, seed=seed)  # type: ignore[type-var]
            for seed in (1, 2)
        )
        with closing(env), closing(test_env):
            assert env.env_is_wrapped(Monitor) == [True] * 4
            callback = EvalCallback(test_env, eval_freq=16, n_eval_episodes=4, log_path=str(tmp_path), verbose=0)
            PPO("MlpPolicy", env, n_steps=32, batch_size=64, device="cpu").learn(256, callback=callback)
            assert callback.n_calls == 64 and np.isfinite(callback.best_mean_reward)
