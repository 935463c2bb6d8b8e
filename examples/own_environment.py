"""Your own environment: a class, its arguments, and a wrapper, trained by PPO.

python examples/own_environment.py

On the command line: rayvec train ppo --env-id own_environment:make_grid (in this directory).
"""

from typing import Any

import gymnasium
import numpy as np
import tyro
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from numpy.typing import NDArray

import rayvec

MOVES = np.array([(0, 1), (1, 0), (0, -1), (-1, 0)])


class Grid(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Find the shortest way to a goal at a random place.

    Args:
        size: Height and width.
    """

    def __init__(self, size: int = 6) -> None:
        self.observation_space = spaces.Box(0, 1, (4,), np.float32)
        self.action_space = spaces.Discrete(4)
        self._size = size

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Draws both places."""
        super().reset(seed=seed)
        self._place, self._goal = self.np_random.integers(0, self._size, (2, 2))
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Moves by one place; walls stop it."""
        self._place = (self._place + MOVES[action]).clip(0, self._size - 1)
        has_arrived = bool((self._place == self._goal).all())
        return self._observe(), 1.0 if has_arrived else -0.05, has_arrived, False, {}

    def _observe(self) -> NDArray[np.float32]:
        return np.concatenate([self._place, self._goal]).astype(np.float32) / (self._size - 1)


def make_grid(size: int = 6) -> gymnasium.Env[Any, Any]:
    """Returns an environment whose episodes end after 50 steps at the latest."""
    return TimeLimit(Grid(size), 50)


def main(total_steps: int = 150_000) -> None:
    """Trains an agent."""
    config = rayvec.PPOConfig(total_steps=total_steps, env_kwargs={"size": 8}, seed=1)
    result = rayvec.train(config, env=make_grid)
    print(f"mean greedy return {result.eval_return_mean:.2f} after {result.total_steps:,} steps in {result.run_dir}")


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.Positional,))
