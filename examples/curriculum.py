"""A curriculum: a callback makes the task harder once the agent succeeds, and the share of successes is a metric.

python examples/curriculum.py
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import tyro
from gymnasium import spaces

import rayvec


class Reach(gymnasium.Env[np.ndarray, int]):
    """A point on a line has to reach a goal, which is farther away at each level.

    Args:
        level: The level to begin with.
    """

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, level: int = 1) -> None:
        self.level = level

    def set_level(self, level: int) -> None:
        """Sets the level of the episodes that begin from now on."""
        self.level = level

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begins an episode."""
        super().reset(seed=seed)
        self.distance = int(self.np_random.choice([-1, 1])) * 2 * self.level
        self.steps_left = 4 * self.level
        return self._obs(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Moves the point; the last info says whether it has reached the goal."""
        self.distance += 2 * int(action) - 1
        self.steps_left -= 1
        is_success = self.distance == 0
        is_over = self.steps_left == 0 and not is_success
        info = {"is_success": is_success} if is_success or is_over else {}
        return self._obs(), float(is_success) - 0.01, is_success, is_over, info

    def _obs(self) -> np.ndarray:
        return np.array([np.clip(self.distance / 10, -1, 1)], np.float32)


class Curriculum:
    """Raises the level once most of the last episodes succeed. The level is a part of checkpoints.

    Args:
        levels: The highest level.
    """

    def __init__(self, levels: int) -> None:
        self.levels = levels

    def on_start(self, context: rayvec.RunContext) -> None:
        """Sets the level where environments are new: at the start, after a resume, and after a loss of ranks."""
        context.env.call("set_level", context.progress.own.setdefault("level", 1))

    def on_iteration(self, context: rayvec.RunContext) -> None:
        """Looks at the share of successes."""
        progress = context.progress
        successes = progress.recent_metrics.get("is_success", [])[-50:]
        if len(successes) == 50 and sum(map(bool, successes)) > 40 and progress.own["level"] < self.levels:
            progress.own["level"] += 1
            context.env.call("set_level", progress.own["level"])
            progress.recent_metrics.clear()  # the next level begins to count
        context.log("level", progress.own["level"])

    def on_end(self, context: rayvec.RunContext) -> None:
        """Prints the level that was reached."""
        print(f"level {context.progress.own['level']} of {self.levels}")


def main(total_steps: int = 60_000, levels: int = 4) -> None:
    """Trains."""
    config = rayvec.PPOConfig(total_steps=total_steps, num_envs=8, eval_episodes=0, replay_calls=("set_level",))
    result = rayvec.train(config, env=Reach, callbacks=[Curriculum(levels)])
    print("metrics are in", result.run_dir)


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.Positional,))
