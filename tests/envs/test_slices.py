"""What environments and vector environments return from a step, and environments that are made again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from rayvec import RayVecEnv
from rayvec.fleet.restarts import restart_seed


class Steps(gymnasium.Env[Any, Any]):
    """Shows episode, step and seed."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)
    length, episode, taken = 4, 0, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.taken = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.taken += 1
        return self._obs(), 1.0, False, self.taken >= self.length, {}

    def _obs(self) -> Any:
        return np.array([self.episode, self.taken, float(self.np_random_seed or 0)])


NO_NUMBER = r"reward of a step is .*one number: let step\(\) return float\(reward\)"


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ((np.zeros(3), 1.0, False, {}), "returned 4 values"),
        (None, "returned NoneType"),
        *(((np.zeros(3), reward, False, False, {}), NO_NUMBER) for reward in ("much", np.ones(1), np.ones(2))),
        ((np.zeros(3), 1.0, False, False, None), "info of a step or reset was NoneType"),
        ((np.zeros(3), 1.0, False, False, [1]), "info of a step or reset was list"),
        ((np.zeros(4), 1.0, False, False, {}), "Its shape must be"),
        ((np.zeros(3, complex), 1.0, False, False, {}), "complex128"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_results_that_are_none_of_a_step(result: Any, words: str, workers: int) -> None:
    class Wrong(Steps):
        def step(self, action: Any) -> Any:
            return result

    env = RayVecEnv([Steps, Wrong], num_nodes=0, workers_per_node=workers)
    env.reset(seed=5)
    with pytest.raises((RuntimeError, ValueError, TypeError), match=words) as caught:
        env.step([0, 0])
    assert "environment 1, seed 6" in str(caught.value.__cause__) and env.closed


class Leaks(Steps):
    """Notes in a file of its own each time that it is made."""

    def __init__(self, env_index: int, folder: Path) -> None:
        self.length = 2
        with (folder / str(env_index)).open("a") as file:
            file.write("x")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_made_again_after_some_episodes_with_a_seed_of_its_own(
    tmp_path: Path, mode: AutoresetMode, workers: int
) -> None:
    where: dict[str, Any] = {"num_nodes": 0, "workers_per_node": workers, "autoreset_mode": mode}
    with RayVecEnv(Leaks, 2, env_kwargs={"folder": tmp_path}, restart_env_every=2, **where) as env:
        seen = [env.reset(seed=5)[0]]
        for _ in range(12):
            obs, _, _, truncated, info = env.step([0, 0])
            assert "env_restarted" not in info
            assert truncated.all() == (obs[:, 1] == (2 if mode == AutoresetMode.NEXT_STEP else 0)).all()
            seen += [obs] if not obs[:, 1].any() else []
        for env_id in range(2):
            seeds = [5 + env_id, *(restart_seed(5 + env_id, env_id, k) for k in (1, 2, 3))]
            began = [(episode + 1, float(seed or 0)) for seed in seeds for episode in range(2)]
            assert [(obs[env_id, 0], obs[env_id, 2]) for obs in seen] == began[: len(seen)]
            assert (tmp_path / str(env_id)).read_text() == "x" * ((len(seen) + 1) // 2)
        env.reset(seed=9)
        for _ in range(4):
            env.step([0, 0])
        assert env.reset(seed=9)[0][:, 2].tolist() == [9, 10]
