"""Global random generators: workers and ranks draw different numbers, and with equal seeds the same ones again."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from helpers.own_parts import TwoHeads
from numpy.typing import NDArray

import rayvec

KINDS = ["random", "numpy", "torch"]


class Draws(gymnasium.Env[NDArray[np.float64], np.int64]):
    """Shows what the three global generators give: of its constructor first, then of each reset and step."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (2, 3), np.float64)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self) -> None:
        self._first = _draw()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray[np.float64], dict[str, Any]]:
        super().reset(seed=seed)
        self._num_steps = 0
        return np.stack([self._first, _draw()]), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.float64], float, bool, bool, dict[str, Any]]:
        if action == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        self._num_steps += 1
        drawn = _draw()
        return np.stack([self._first, drawn]), float(drawn[0]), self._num_steps == 8, False, {}


def _draw() -> NDArray[np.float64]:
    import torch  # in a worker that has not preloaded it, the first draw imports it

    return np.array([random.random(), np.random.rand(), torch.rand((), dtype=torch.float64).item()])


def explore(obs: NDArray[np.float64]) -> NDArray[np.int64]:
    return torch.randint(2, (len(obs),)).numpy()


def drawn(seed: int | None, workers: int = 2, preload: Sequence[str] = ("torch",)) -> NDArray[np.float64]:
    """Returns what four environments draw in a reset and two steps, ``[time, environment, generator]``."""
    with rayvec.RayVecEnv(Draws, 4, num_nodes=0, workers_per_node=workers, preload=preload) as env:
        seen = [env.reset(seed=seed)[0], *(env.step(np.zeros(4, np.int64))[0] for _ in range(2))]
    return np.stack(seen)[:, :, 1]


class TestEnvironments:
    @pytest.mark.parametrize("seed", [None, 3])
    def test_no_two_environments_draw_the_same(self, seed: int | None) -> None:
        values = drawn(seed)
        for kind, name in enumerate(KINDS):
            assert len(np.unique(values[:, :, kind])) == values[:, :, kind].size, name

    def test_equal_seeds_give_equal_draws_and_others_give_others(self) -> None:
        first, other = drawn(3), drawn(4)
        np.testing.assert_array_equal(first, drawn(3, preload=()))
        assert not np.isin(other, first).any()

    def test_a_replacement_worker_draws_other_numbers_the_same_ones_in_each_run(self) -> None:
        def run() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
            settings = dict(num_nodes=0, workers_per_node=2, preload=("torch",), on_env_error="restart")
            with rayvec.RayVecEnv(Draws, 2, **settings) as env:
                before, _ = env.reset(seed=3)
                assert env.step(np.array([0, 2]))[3].tolist() == [False, True]
                after, *_ = env.step(np.zeros(2, np.int64))  # resets environment 1
            return before[1], after[1]

        before, after = run()
        np.testing.assert_array_equal(run()[1], after)
        assert not np.isin(after, before).any()


def test_a_policy_that_samples_explores_differently_in_each_worker() -> None:
    with rayvec.RayVecEnv(Draws, 4, num_nodes=0, workers_per_node=2, preload=("torch",)) as env:
        first, again = (env.rollout(explore, num_steps=64, seed=0).act for _ in range(2))
    assert len(np.unique(first, axis=1).T) == 4
    np.testing.assert_array_equal(first, again)


class Dropping(TwoHeads):
    """A network whose weights and whose dropout are drawn from the global generator."""

    def __init__(self, observation_space: Any, action_space: Any, config: rayvec.PPOConfig) -> None:
        super().__init__(observation_space, action_space)
        self.body.append(torch.nn.Dropout(0.5))


class NeverDies(gymnasium.ActionWrapper[NDArray[np.float64], np.int64, np.int64]):
    def action(self, action: np.int64) -> np.int64:
        return action % 2


class TestTraining:
    @pytest.mark.parametrize(
        "settings",
        [
            dict(workers_per_node=0),
            dict(workers_per_node=4),
            dict(workers_per_node=2, num_learners=2),
            dict(workers_per_node=4, num_learners=2, learners="decentralized"),
        ],
        ids=str,
    )
    def test_equal_seeds_give_equal_runs(self, tmp_path: Path, settings: dict[str, Any]) -> None:
        def curve(name: str) -> list[dict[str, Any]]:
            sizes = dict(total_steps=256, num_envs=4, num_steps=16, minibatch_size=32, eval_episodes=2)
            config = rayvec.PPOConfig(seed=1, num_nodes=0, run_dir=tmp_path / name, **sizes, **settings)
            result = rayvec.train(config, env=make_draws, network=Dropping)
            lines = map(json.loads, (result.run_dir / "metrics.jsonl").read_text().splitlines())
            names = ("return_mean", "policy_loss", "value_loss", "entropy")
            return [{name: line[name] for name in names if name in line} for line in lines]

        first = curve("a")
        assert first == curve("b")
        assert len({line["return_mean"] for line in first}) > 1

    def test_the_script_draws_afterwards_what_it_would_have_drawn(self, tmp_path: Path) -> None:
        random.seed(7), np.random.seed(7), torch.manual_seed(7)
        expected = _draw()
        random.seed(7), np.random.seed(7), torch.manual_seed(7)
        sizes = dict(total_steps=32, num_envs=2, num_steps=16, minibatch_size=32, eval_episodes=0)
        config = rayvec.PPOConfig(num_nodes=0, workers_per_node=0, run_dir=tmp_path / "run", **sizes)
        rayvec.train(config, env=make_draws)
        np.testing.assert_array_equal(_draw(), expected)


def make_draws() -> gymnasium.Env[NDArray[np.float64], np.int64]:
    return NeverDies(Draws())
