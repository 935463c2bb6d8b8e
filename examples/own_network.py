"""Your own network: a module with residual layers, trained by PPO.

python examples/own_network.py

On the command line: rayvec train ppo --env-id CartPole-v1 --network own_network:make_network (in this directory).
"""

from typing import Any

import torch
import tyro
from gymnasium import spaces
from torch import Tensor, nn

import rayvec


class Residual(nn.Module):
    """Adds a layer's output to its input."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(units), nn.Linear(units, units), nn.ReLU())

    def forward(self, features: Tensor) -> Tensor:
        """Returns features of the same shape."""
        changed: Tensor = features + self.layers(features)
        return changed


class ResidualNet(nn.Module):
    """From observations ``[B, D]`` to logits ``[B, n]`` and values ``[B]``."""

    def __init__(self, num_obs: int, num_actions: int, units: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(num_obs, units), Residual(units), Residual(units))
        self.policy, self.value = nn.Linear(units, num_actions), nn.Linear(units, 1)
        nn.init.orthogonal_(self.policy.weight, 0.01)  # nearly equal probabilities at the start

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what PPO trains."""
        features = torch.tanh(self.body(obs))
        return self.policy(features), self.value(features).squeeze(-1)


def make_network(
    observation_space: spaces.Box, action_space: spaces.Discrete, config: rayvec.TrainConfig
) -> ResidualNet:
    """Returns the network for the spaces of one environment."""
    return ResidualNet(observation_space.shape[0], int(action_space.n))


def main(total_steps: int = 100_000) -> None:
    """Trains it, and evaluates the run again."""
    config: Any = rayvec.PPOConfig(env_id="CartPole-v1", total_steps=total_steps, seed=1)
    result = rayvec.train(config, network=make_network)
    print(f"mean greedy return {result.eval_return_mean:.1f} after {result.total_steps:,} steps in {result.run_dir}")
    rayvec.resume(result.run_dir, network=make_network)  # a function of a script must be passed again


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.Positional,))
