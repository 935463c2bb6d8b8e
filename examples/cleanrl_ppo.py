"""PPO in one file, in the style of CleanRL's ppo.py, with environments on every node of a Ray cluster.

python examples/cleanrl_ppo.py

A script of CleanRL for Gymnasium 0.29 takes `RayVecEnv` of this file in the place of `gym.vector.SyncVectorEnv`.
"""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import rayvec


class RayVecEnv(rayvec.RayVecEnv):
    """Reports the last observation and info of an episode as Gymnasium 0.29 did, None for other environments."""

    def __init__(self, env_fns: list, **settings: Any) -> None:
        super().__init__(env_fns, autoreset_mode="SameStep", **settings)

    def step_wait(self, timeout: float | None = None) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Waits for `step_async`."""
        obs, rewards, terminated, truncated, infos = super().step_wait(timeout)
        if "final_info" in infos:
            ended, infos["final_observation"] = infos["_final_info"], infos["final_obs"]
            infos["final_info"] = [info_of(infos["final_info"], i) if ended[i] else None for i in range(self.num_envs)]
        return obs, rewards, terminated, truncated, infos


def info_of(infos: dict[str, Any], index: int) -> dict[str, Any]:
    """Returns the info of one environment; `infos` has a column for each key and masks under `_key`."""
    own = {key: value for key, value in infos.items() if not key.startswith("_") and infos[f"_{key}"][index]}
    return {key: info_of(value, index) if isinstance(value, dict) else value[index] for key, value in own.items()}


def make_env(env_id: str) -> gym.Env:
    """Makes one environment that reports the return of each episode."""
    return gym.wrappers.RecordEpisodeStatistics(gym.make(env_id))


def linear(num_inputs: int, num_outputs: int, gain: float = 2**0.5) -> nn.Linear:
    """Returns a layer with orthogonal weights and without biases at the start."""
    layer = nn.Linear(num_inputs, num_outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """A policy and a value function with two layers of 64 units each."""

    def __init__(self, num_inputs: int, num_actions: int) -> None:
        super().__init__()
        self.value, self.logits = (
            nn.Sequential(linear(num_inputs, 64), nn.Tanh(), linear(64, 64), nn.Tanh(), linear(64, num_outputs, gain))
            for num_outputs, gain in ((1, 1.0), (num_actions, 0.01))
        )


def advantages(
    rewards: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, last_value: torch.Tensor, gamma: float, lam: float
) -> torch.Tensor:
    """Generalised advantage estimation over `[T, N]`; `ends` says whose episode ended with the step."""
    result, carried, value_after = torch.zeros_like(rewards), torch.zeros_like(last_value), last_value
    for t in reversed(range(len(rewards))):
        goes_on = 1.0 - ends[t]
        error = rewards[t] + gamma * value_after * goes_on - values[t]
        carried = error + gamma * lam * goes_on * carried
        result[t], value_after = carried, values[t]
    return result


def main(
    total_steps: int = 100_000,
    env_id: str = "CartPole-v1",
    seed: int = 1,
    num_envs: int = 8,
    num_steps: int = 128,
    learning_rate: float = 1e-3,
    gamma: float = 0.99,
    gae_lambda: float = 0.95,
    num_minibatches: int = 4,
    num_epochs: int = 4,
    clip: float = 0.2,
    entropy_weight: float = 0.01,
    value_weight: float = 0.5,
    max_grad_norm: float = 0.5,
) -> float:
    """Trains; returns the mean return of the last 50 episodes."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    envs = RayVecEnv([partial(make_env, env_id)] * num_envs)
    agent = Agent(int(np.prod(envs.single_observation_space.shape)), int(envs.single_action_space.n))
    optimizer = torch.optim.Adam(agent.parameters(), learning_rate, eps=1e-5)
    shape = num_steps, num_envs
    obs = torch.zeros(*shape, *envs.single_observation_space.shape)
    actions = torch.zeros(shape, dtype=torch.int64)
    logps, rewards, ends, values = (torch.zeros(shape) for _ in range(4))
    returns: list[float] = []
    next_obs, _ = envs.reset(seed=seed)
    num_updates = max(1, total_steps // (num_steps * num_envs))
    for update in range(num_updates):
        optimizer.param_groups[0]["lr"] = learning_rate * (1 - update / num_updates)
        for t in range(num_steps):
            obs[t] = torch.as_tensor(next_obs)
            with torch.no_grad():
                policy = Categorical(logits=agent.logits(obs[t]))
                actions[t] = policy.sample()
                logps[t], values[t] = policy.log_prob(actions[t]), agent.value(obs[t]).squeeze(-1)
            next_obs, reward, terminated, truncated, infos = envs.step(actions[t].numpy())
            rewards[t] = torch.as_tensor(reward, dtype=torch.float32)
            ends[t] = torch.as_tensor(terminated | truncated, dtype=torch.float32)
            returns += [float(info["episode"]["r"]) for info in infos.get("final_info", ()) if info]
        with torch.no_grad():
            last_value = agent.value(torch.as_tensor(next_obs)).squeeze(-1)
            advantage = advantages(rewards, values, ends, last_value, gamma, gae_lambda).flatten()
        target = advantage + values.flatten()
        flat_obs, flat_actions, flat_logps = obs.flatten(0, 1), actions.flatten(), logps.flatten()
        for _ in range(num_epochs):
            order = torch.as_tensor(rng.permutation(len(target)))
            for rows in order.chunk(num_minibatches):
                policy = Categorical(logits=agent.logits(flat_obs[rows]))
                ratio = (policy.log_prob(flat_actions[rows]) - flat_logps[rows]).exp()
                scaled = (advantage[rows] - advantage[rows].mean()) / (advantage[rows].std() + 1e-8)
                gain = torch.min(ratio * scaled, ratio.clamp(1 - clip, 1 + clip) * scaled).mean()
                value_loss = 0.5 * (agent.value(flat_obs[rows]).squeeze(-1) - target[rows]).square().mean()
                loss = value_weight * value_loss - gain - entropy_weight * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), max_grad_norm)
                optimizer.step()
    envs.close()
    mean = float(np.mean(returns[-50:])) if returns else 0.0
    print(f"{len(returns)} episodes, mean return of the last ones {mean:.1f}")
    return mean


if __name__ == "__main__":
    main()
