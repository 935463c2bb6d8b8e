"""Train a policy with memory on CartPole without velocities.

One observation tells where cart and pole are, but not how they move. A policy without memory holds the pole for about
50 steps; one with a recurrent cell remembers what it saw before.

python examples/recurrent_cartpole.py 500000 gru 1
"""

from typing import Any

import gymnasium
import numpy as np
import tyro
from gymnasium import spaces
from numpy.typing import NDArray

import rayvec

ENV_ID = "CartPoleWithoutVelocities-v0"


class WithoutVelocities(gymnasium.ObservationWrapper[NDArray[np.float32], Any, NDArray[np.float32]]):
    """Shows the position of the cart and the angle of the pole alone."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns ``float32 [2]``."""
        return observation[[0, 2]]


def make(**kwargs: Any) -> gymnasium.Env[Any, Any]:
    """Returns CartPole, of at most 500 steps, without velocities."""
    return WithoutVelocities(gymnasium.make("CartPole-v1", **kwargs))


gymnasium.register(ENV_ID, make)


def main(total_steps: int = 500_000, recurrent: str = "gru", seed: int = 1) -> None:
    """Trains PPO, with memory unless `recurrent` is "none", and prints the result."""
    config = rayvec.PPOConfig(
        env_id=ENV_ID,
        total_steps=total_steps,
        recurrent=None if recurrent == "none" else recurrent,  # type: ignore[arg-type]
        num_envs=32,
        num_steps=64,
        sequence_length=32,
        minibatch_size=512,
        num_epochs=8,
        learning_rate=1e-3,
        gamma=0.99,
        gae_lambda=0.95,
        clip_value_loss=False,
        entropy_coef=0.0,
        seed=seed,
    )
    result = rayvec.train(config)
    print(f"mean greedy return {result.eval_return_mean:.1f} after {result.total_steps:,} steps")


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.Positional,))
