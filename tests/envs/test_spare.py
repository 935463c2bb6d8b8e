"""An environment that is reset ahead takes the place of one whose episode has ended."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from helpers.testing import PlainEnv
from helpers.waiting import DEADLINE_S

import rayvec.stable_baselines3
import rayvec.tianshou
from rayvec.errors import EnvError
from rayvec.vector.ray_vec_env import RayVecEnv


class Play(PlainEnv):
    """Shows which environment of its process it is, its episode, its step and its level; some resets raise, once."""

    observation_space = spaces.Box(-1, 99, (4,), np.float64)
    length, level, made = 2, 0, 0

    def __init__(self, failed: Path | None = None) -> None:
        self._number, Play.made = Play.made, Play.made + 1
        self._episode, self._failed = 0, failed

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._episode += 1
        obs, _ = super().reset(seed=seed)
        if self._failed and self._episode == 2 and not self._failed.exists():
            self._failed.touch()
            raise OSError("no reset")
        return obs, {"luck": self.np_random.random()}

    def observe(self) -> Any:
        return np.array([self._number, self._episode, self.steps, self.level], np.float64)


def played(env: Any, num_steps: int) -> list[list[Any]]:
    """Steps; returns observations and what the resets drew."""
    shown = []
    for _ in range(num_steps):
        obs, *_, info = env.step(np.zeros(env.num_envs, np.int64))
        shown.append([obs.tolist(), np.asarray(info.get("luck", 0)).tolist()])
    return shown


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_episodes_alternate_with_the_spare_and_are_the_same_again(mode: AutoresetMode, workers: int) -> None:
    seen = []
    for _ in range(2):
        Play.made = 0
        where: dict[str, Any] = {"num_nodes": 0, "workers_per_node": workers}
        with RayVecEnv([Play] * 2, spare_envs=1, autoreset_mode=mode, **where) as env:
            env.reset(seed=5)
            seen.append(played(env, 12))
    assert seen[0] == seen[1]
    began = [obs for obs, _ in seen[0] if obs[0][2] == 0]
    assert [[int(number) for number, *_ in obs] for obs in began][:4] == [[2, 0], [1, 2], [0, 1], [2, 0]]
    lucks = [luck for _, episode in seen[0] for luck in np.ravel(episode) if luck]
    assert len(set(lucks)) == len(lucks), "no two episodes are alike"


def test_steps_go_on_while_a_thread_resets_ahead() -> None:
    gate, resets_here = threading.Event(), []

    class Slow(Play):
        def reset(self, **kwargs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                resets_here.append(kwargs)
            else:
                assert gate.wait(DEADLINE_S)
            return super().reset(**kwargs)

    with RayVecEnv([Slow], spare_envs=1, num_nodes=0, workers_per_node=0) as env:
        env.reset(seed=1)
        env.step([0])  # the reset of the spare has begun and goes on
        gate.set()
        steps = [obs[0][2] for obs, _ in played(env, 6)]
    assert steps == [2, 0, 1, 2, 0, 1]
    assert resets_here == [{"seed": 1}]


def test_calls_reach_the_spare_where_they_are_replayed() -> None:
    with RayVecEnv([Play] * 2, spare_envs=1, replay_calls=("level",), num_nodes=0, workers_per_node=1) as env:
        env.reset(seed=1)
        env.set_attr("level", [3, 4])
        for obs, _ in played(env, 9):
            assert [row[3] for row in obs if row[2]] == [3, 4][: sum(row[2] > 0 for row in obs)]


def test_the_spare_is_made_again_after_as_many_episodes_as_others() -> None:
    with RayVecEnv([Play], spare_envs=1, restart_env_every=3, num_nodes=0, workers_per_node=0) as env:
        env.reset(seed=1)
        ended = Counter(obs[0][0] for obs, _ in played(env, 40) if obs[0][2] == 2)
        assert max(ended.values()) == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reset_ahead_that_raises(tmp_path: Path, workers: int) -> None:
    where: dict[str, Any] = {"num_nodes": 0, "workers_per_node": workers, "env_kwargs": {"failed": tmp_path / "failed"}}
    with RayVecEnv(Play, 1, spare_envs=1, **where) as env, pytest.raises(OSError, match="no reset") as caught:
        env.reset(seed=1)
        played(env, 12)
    assert isinstance(caught.value.__cause__, EnvError)
    (tmp_path / "failed").unlink()
    with RayVecEnv(Play, 1, spare_envs=1, on_env_error="restart", **where) as env:
        env.reset(seed=1)
        steps = [obs[0][2] for obs, _ in played(env, 12)]
        assert steps == [1, 2, 0] * 4
        assert env.take_replaced() == {} and (tmp_path / "failed").exists()


@pytest.mark.parametrize("kind", ["tianshou", "stable_baselines3"])
def test_other_adapters_have_spare_environments_and_make_them_again(kind: str) -> None:
    """They are not imported above, since workers import this module."""
    Play.made = 0
    adapter: Any = rayvec.tianshou.RayVectorEnv if kind == "tianshou" else rayvec.stable_baselines3.RayVecEnv
    env = adapter([Play], spare_envs=1, restart_env_every=2, num_nodes=0, workers_per_node=0)
    env.reset()
    numbers = set()
    for _ in range(16):
        obs, *_ = env.step(np.zeros(1, np.int64))
        numbers.add(int(obs[0, 0]))
        if kind == "tianshou" and obs[0, 2] == 2:
            env.reset([0])
    assert numbers >= {0, 1, 2}
    env.close()
