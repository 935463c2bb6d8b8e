"""PPO for continuous actions in one file, in the style of CleanRL's ppo_continuous_action.py, on a Ray cluster.

python examples/cleanrl_ppo_continuous_action.py

`docs/cleanrl.md` shows the line that differs from a script with Gymnasium's SyncVectorEnv.
"""

from functools import partial

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Normal

from rayvec.adapters.cleanrl import RayVecEnv


def clipped(values: np.ndarray) -> np.ndarray:
    """Limits normalised observations to ±10."""
    return np.clip(values, -10, 10)


def make_env(env_id: str, gamma: float) -> gym.Env:
    """Makes one environment with the usual wrappers for continuous control; they run on the worker."""
    env = gym.wrappers.FlattenObservation(gym.make(env_id))
    env = gym.wrappers.RecordEpisodeStatistics(env)
    env = gym.wrappers.ClipAction(env)
    env = gym.wrappers.NormalizeObservation(env)
    env = gym.wrappers.TransformObservation(env, clipped, env.observation_space)
    env = gym.wrappers.NormalizeReward(env, gamma=gamma)
    return gym.wrappers.TransformReward(env, clipped)


class Agent(nn.Module):
    """A Gaussian policy whose deviation does not depend on the observation, and a value function."""

    def __init__(self, num_inputs: int, num_actions: int) -> None:
        super().__init__()
        self.value = nn.Sequential(nn.Linear(num_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.mean = nn.Sequential(
            nn.Linear(num_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_actions)
        )
        self.log_std = nn.Parameter(torch.zeros(num_actions))

    def policy(self, obs: torch.Tensor) -> Normal:
        """Returns the distribution of actions, one row for each observation."""
        return Normal(self.mean(obs), self.log_std.exp())


def main(
    total_steps: int = 300_000,
    env_id: str = "Pendulum-v1",
    seed: int = 1,
    num_envs: int = 8,
    num_steps: int = 256,
    learning_rate: float = 1e-3,
    gamma: float = 0.9,
    gae_lambda: float = 0.95,
    minibatch_size: int = 64,
    num_epochs: int = 10,
    clip: float = 0.2,
    value_weight: float = 0.5,
    max_grad_norm: float = 0.5,
) -> float:
    """Trains; returns the mean return of the last 50 episodes."""
    torch.manual_seed(seed)
    envs = RayVecEnv([partial(make_env, env_id, gamma)] * num_envs)
    agent = Agent(int(np.prod(envs.single_observation_space.shape)), int(np.prod(envs.single_action_space.shape)))
    optimizer = torch.optim.Adam(agent.parameters(), learning_rate, eps=1e-5)
    shape = num_steps, num_envs
    obs = torch.zeros(*shape, *envs.single_observation_space.shape)
    actions = torch.zeros(*shape, *envs.single_action_space.shape)
    logps, rewards, ends, values = (torch.zeros(shape) for _ in range(4))
    returns: list[float] = []
    next_obs, _ = envs.reset(seed=seed)
    for _ in range(max(1, total_steps // (num_steps * num_envs))):
        for t in range(num_steps):
            obs[t] = torch.as_tensor(next_obs, dtype=torch.float32)
            with torch.no_grad():
                policy = agent.policy(obs[t])
                actions[t] = policy.sample()
                logps[t], values[t] = policy.log_prob(actions[t]).sum(-1), agent.value(obs[t]).squeeze(-1)
            next_obs, reward, terminated, truncated, infos = envs.step(actions[t].numpy())
            rewards[t] = torch.as_tensor(reward, dtype=torch.float32)
            ends[t] = torch.as_tensor(terminated | truncated, dtype=torch.float32)
            for n in np.flatnonzero(truncated):  # a time limit is no end: its value counts
                last = torch.as_tensor(infos["final_observation"][n], dtype=torch.float32)
                with torch.no_grad():
                    rewards[t, n] += gamma * agent.value(last).item()
            returns += [float(info["episode"]["r"]) for info in infos.get("final_info", ()) if info]
        advantage, carried = torch.zeros(shape), torch.zeros(num_envs)
        with torch.no_grad():
            following = agent.value(torch.as_tensor(next_obs, dtype=torch.float32)).squeeze(-1)
        for t in reversed(range(num_steps)):
            goes_on = 1.0 - ends[t]
            error = rewards[t] + gamma * following * goes_on - values[t]
            advantage[t] = carried = error + gamma * gae_lambda * goes_on * carried
            following = values[t]
        target = (advantage + values).flatten()
        flat = [tensor.flatten(0, 1) for tensor in (obs, actions, logps, advantage)]
        for _ in range(num_epochs):
            for rows in torch.randperm(len(target)).split(minibatch_size):
                seen, acted, logp, gain = (tensor[rows] for tensor in flat)
                ratio = (agent.policy(seen).log_prob(acted).sum(-1) - logp).exp()
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                policy_loss = -torch.min(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain).mean()
                value_loss = 0.5 * (agent.value(seen).squeeze(-1) - target[rows]).square().mean()
                optimizer.zero_grad()
                (policy_loss + value_weight * value_loss).backward()
                nn.utils.clip_grad_norm_(agent.parameters(), max_grad_norm)
                optimizer.step()
    envs.close()
    mean = float(np.mean(returns[-50:])) if returns else 0.0
    print(f"{len(returns)} episodes, mean return of the last ones {mean:.1f}")
    return mean


if __name__ == "__main__":
    main()
