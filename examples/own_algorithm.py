"""Your own algorithm in one file: REINFORCE with a learned baseline, trained by `rayvec.train`.

python examples/own_algorithm.py

On the command line: rayvec train --plugin own_algorithm reinforce --env-id CartPole-v1 (in this directory).

A learner turns batches into weights. It is plain torch and needs neither Ray nor the environments. This one has a state
that checkpoints keep, and a policy that acts in the worker processes without torch.
"""

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
import tyro
from gymnasium import spaces
from numpy.typing import NDArray

import rayvec
from rayvec.config import dataclass
from rayvec.policies.networks import ActorCritic, flat_weights
from rayvec.training.runs import register


@dataclass(frozen=True, kw_only=True)
class ReinforceConfig(rayvec.TrainConfig):
    """REINFORCE (Williams, 1992) with a baseline."""

    algorithm: ClassVar[str] = "reinforce"

    num_steps: int = 128
    """Steps that each environment takes in an iteration."""

    learning_rate: float = 5e-3
    """Step size of Adam."""

    gamma: float = 0.98
    """Discount for each step."""

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps between two updates of the weights."""
        return self.num_envs * self.num_steps


class ReinforceLearner:
    """Makes actions more likely whose return was above the baseline."""

    def __init__(
        self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], config: ReinforceConfig
    ) -> None:
        self.config = config
        self.module = ActorCritic(observation_space, action_space, seed=config.seed)
        self._optimizer = torch.optim.Adam(self.module.parameters(), lr=config.learning_rate)

    def update(self, batch: rayvec.Batch) -> dict[str, float]:
        """Takes one step of gradient ascent with all steps of the batch."""
        (chunk,) = batch.chunks
        rows = self.module.encode(chunk.obs)[torch.from_numpy(chunk.valid)]
        sample = self.module.distribution.recorded(chunk.act, chunk.extras)
        returns = torch.from_numpy(self._returns(chunk)[chunk.valid])
        params, value = self.module(rows)
        logp, entropy = self.module.distribution.logp_entropy(params, torch.from_numpy(sample[chunk.valid]))
        advantage = returns - value.detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy_loss, value_loss = -(logp * advantage).mean(), (value - returns).square().mean()
        self._optimizer.zero_grad()
        (policy_loss + 0.5 * value_loss).backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 0.5)
        self._optimizer.step()
        metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy.mean()}
        return {name: metric.item() for name, metric in metrics.items()}

    def _returns(self, chunk: rayvec.Chunk) -> NDArray[np.float32]:
        """Returns discounted returns, ``[T, N]``; the baseline estimates the rest of truncated episodes."""
        with torch.no_grad():
            beyond = self.module.value(self.module.encode(chunk.next_obs())).numpy()
        returns = np.zeros(chunk.rew.shape, np.float32)
        following = beyond[-1]
        for t in reversed(range(chunk.num_steps)):
            following = np.where(chunk.truncated[t], beyond[t], following)
            following = np.where(chunk.terminated[t], 0, following)
            following = returns[t] = chunk.rew[t] + self.config.gamma * following
        return returns

    def weights(self) -> NDArray[np.float32]:
        """Returns the weights for the policy in the workers."""
        return flat_weights(self.module)

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that the next update depends on."""
        return copy.deepcopy({"module": dict(self.module.state_dict()), "optimizer": self._optimizer.state_dict()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`."""
        self.module.load_state_dict(state["module"])
        self._optimizer.load_state_dict(state["optimizer"])


register(ReinforceConfig, ReinforceLearner)


def main(total_steps: int = 200_000) -> None:
    """Trains with the algorithm, with a run directory, checkpoints and an evaluation."""
    result = rayvec.train(ReinforceConfig(env_id="CartPole-v1", total_steps=total_steps, seed=1))
    print(f"mean greedy return {result.eval_return_mean:.1f} after {result.total_steps:,} steps in {result.run_dir}")
    rayvec.resume(result.run_dir)  # the run is complete, so this only evaluates it again


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.Positional,))
