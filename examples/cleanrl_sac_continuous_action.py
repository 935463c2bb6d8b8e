"""SAC in one file, in the style of CleanRL's sac_continuous_action.py, with environments on a Ray cluster.

python examples/cleanrl_sac_continuous_action.py

`docs/cleanrl.md` shows the line that differs from a script with Gymnasium's SyncVectorEnv.
"""

from copy import deepcopy
from functools import partial

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Normal
from torch.nn import functional

from rayvec.adapters.cleanrl import RayVecEnv


def make_env(env_id: str) -> gym.Env:
    """Makes one environment that reports the return of each episode."""
    return gym.wrappers.RecordEpisodeStatistics(gym.make(env_id))


class Buffer:
    """The last transitions, overwritten in the order in which they came."""

    def __init__(self, size: int, num_inputs: int, num_actions: int) -> None:
        widths = {"obs": num_inputs, "act": num_actions, "rew": 1, "next_obs": num_inputs, "terminated": 1}
        self.arrays = {name: np.zeros((size, width), np.float32) for name, width in widths.items()}
        self.size, self.count = size, 0

    def add(self, **rows: np.ndarray) -> None:
        """Adds a transition of each environment."""
        number = len(rows["obs"])
        places = (self.count + np.arange(number)) % self.size
        for name, values in rows.items():
            self.arrays[name][places] = np.asarray(values).reshape(number, -1)
        self.count += number

    def sample(self, count: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """Draws transitions with replacement."""
        rows = rng.integers(min(self.count, self.size), size=count)
        return {name: torch.as_tensor(array[rows]) for name, array in self.arrays.items()}


class Critic(nn.Module):
    """Two independent estimates of the value of an action."""

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.both = nn.ModuleList(
            nn.Sequential(nn.Linear(num_inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
            for _ in range(2)
        )

    def forward(self, obs: torch.Tensor, act: torch.Tensor) -> torch.Tensor:
        """Returns the estimates, ``[2, k, 1]``."""
        return torch.stack([critic(torch.cat([obs, act], -1)) for critic in self.both])


class Actor(nn.Module):
    """A Gaussian that tanh limits to the bounds of the action space."""

    def __init__(self, num_inputs: int, space: gym.spaces.Box) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(num_inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.head = nn.Linear(128, 2 * int(np.prod(space.shape)))
        self.register_buffer("scale", torch.as_tensor((space.high - space.low) / 2))
        self.register_buffer("middle", torch.as_tensor((space.high + space.low) / 2))

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns sampled actions and their log-probabilities, ``[k, 1]``."""
        mean, log_std = self.head(self.body(obs)).chunk(2, -1)
        gaussian = Normal(mean, log_std.clamp(-5, 2).exp())
        raw = gaussian.rsample()
        squashed = torch.tanh(raw)
        logp = gaussian.log_prob(raw) - torch.log(self.scale * (1 - squashed.square()) + 1e-6)
        return self.middle + self.scale * squashed, logp.sum(-1, keepdim=True)


def main(
    total_steps: int = 20_000,
    env_id: str = "Pendulum-v1",
    seed: int = 1,
    num_envs: int = 4,
    buffer_size: int = 100_000,
    warmup_steps: int = 1_000,
    batch_size: int = 256,
    updates_per_step: int = 4,
    gamma: float = 0.99,
    tau: float = 0.005,
    learning_rate: float = 1e-3,
) -> float:
    """Trains; returns the mean return of the last 20 episodes."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    envs = RayVecEnv([partial(make_env, env_id)] * num_envs)
    num_inputs, num_actions = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    actor, critic = Actor(num_inputs, envs.single_action_space), Critic(num_inputs + num_actions)
    target_critic = deepcopy(critic)
    log_alpha = torch.zeros(1, requires_grad=True)
    optimizers = [
        torch.optim.Adam(part, learning_rate) for part in (actor.parameters(), critic.parameters(), [log_alpha])
    ]
    buffer = Buffer(buffer_size, num_inputs, num_actions)
    returns: list[float] = []
    obs, _ = envs.reset(seed=seed)
    envs.action_space.seed(seed)
    for step in range(max(1, total_steps // num_envs)):
        if step * num_envs < warmup_steps:
            actions = envs.action_space.sample()
        else:
            with torch.no_grad():
                actions = actor(torch.as_tensor(obs))[0].numpy()
        next_obs, rewards, terminated, truncated, infos = envs.step(actions)
        after = next_obs.copy()
        for n in np.flatnonzero(terminated | truncated):
            after[n] = infos["final_observation"][n]
        returns += [float(info["episode"]["r"]) for info in infos.get("final_info", ()) if info]
        buffer.add(obs=obs, act=actions, rew=rewards, next_obs=after, terminated=terminated)
        obs = next_obs
        if step * num_envs < warmup_steps:
            continue
        for _ in range(updates_per_step):
            batch, alpha = buffer.sample(batch_size, rng), log_alpha.exp().detach()
            with torch.no_grad():
                act, logp = actor(batch["next_obs"])
                value = target_critic(batch["next_obs"], act).min(0).values - alpha * logp
                wanted = batch["rew"] + gamma * (1 - batch["terminated"]) * value
            critic_loss = sum(functional.mse_loss(each, wanted) for each in critic(batch["obs"], batch["act"]))
            apply(optimizers[1], critic_loss)
            act, logp = actor(batch["obs"])
            apply(optimizers[0], (alpha * logp - critic(batch["obs"], act).min(0).values).mean())
            apply(optimizers[2], -(log_alpha * (logp.detach() - num_actions)).mean())
            with torch.no_grad():
                for old, new in zip(target_critic.parameters(), critic.parameters(), strict=True):
                    old.lerp_(new, tau)
    envs.close()
    mean = float(np.mean(returns[-20:])) if returns else 0.0
    print(f"{len(returns)} episodes, mean return of the last ones {mean:.1f}")
    return mean


def apply(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Takes one step down the gradient of a loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


if __name__ == "__main__":
    main()
