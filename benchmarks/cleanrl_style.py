"""PPO and SAC as single functions, in the way of CleanRL and with its published settings.

They need torch and Gymnasium alone. Nothing is logged or saved while training, which the scripts of CleanRL do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from judge import Act
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

CLIP = 0.2
OnStep = Callable[[int, Act], None]
"""Called with the steps taken so far and the greedy policy."""


def make_envs(env_id: str, num_envs: int, seed: int) -> SyncVectorEnv:
    """Returns seeded environments, which begin a new episode in the step that ends one."""
    np.random.seed(seed)
    torch.manual_seed(seed)
    envs = SyncVectorEnv([lambda: gymnasium.make(env_id)] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    envs.action_space.seed(seed)
    return envs


def orthogonal(ins: int, outs: int, gain: float = 2**0.5) -> nn.Linear:
    """Returns a linear layer with orthogonal weights and without biases at the start."""
    layer = nn.Linear(ins, outs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def ppo_loss(
    ratio: Tensor, advantage: Tensor, value: Tensor, old_value: Tensor, target: Tensor, entropy: Tensor
) -> Any:
    """Returns the clipped loss of a minibatch, of columns ``[B]`` each, advantages normalised within it."""
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
    near = old_value + (value - old_value).clamp(-CLIP, CLIP)
    value_loss = 0.5 * torch.max((value - target) ** 2, (near - target) ** 2).mean()
    return policy_loss - 0.01 * entropy.mean() + 0.5 * value_loss


def ppo(env_id: str, seed: int, on_step: OnStep, total_steps: int = 500_000) -> None:
    """Proximal policy optimisation for Discrete actions."""
    num_envs, num_steps, num_minibatches, num_epochs = 4, 128, 4, 4
    gamma, lam, learning_rate = 0.99, 0.95, 2.5e-4
    envs = make_envs(env_id, num_envs, seed)
    ins, outs = int(np.prod(envs.single_observation_space.shape or ())), int(envs.single_action_space.n)  # type: ignore

    def mlp(last: int, gain: float) -> nn.Sequential:
        return nn.Sequential(orthogonal(ins, 64), nn.Tanh(), orthogonal(64, 64), nn.Tanh(), orthogonal(64, last, gain))

    actor, critic = mlp(outs, 0.01), mlp(1, 1.0)
    parameters = [*critic.parameters(), *actor.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=learning_rate, eps=1e-5)
    obs = torch.zeros(num_steps, num_envs, ins)
    act, logp, rew, done, value = (torch.zeros(num_steps, num_envs) for _ in range(5))

    @torch.no_grad()
    def greedy(rows: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(actor(torch.as_tensor(rows)).argmax(1).numpy())

    next_obs, next_done = torch.as_tensor(envs.reset(seed=seed)[0]), torch.zeros(num_envs)
    batch = num_envs * num_steps
    num_updates = total_steps // batch
    for update in range(num_updates):
        optimizer.param_groups[0]["lr"] = learning_rate * (1 - update / num_updates)
        for t in range(num_steps):
            obs[t], done[t] = next_obs, next_done
            with torch.no_grad():
                policy = torch.distributions.Categorical(logits=actor(next_obs))
                act[t] = drawn = policy.sample()
                logp[t], value[t] = policy.log_prob(drawn), critic(next_obs).flatten()
            observed, reward, terminated, truncated, _ = envs.step(drawn.numpy())
            next_obs, next_done = torch.as_tensor(observed), torch.as_tensor(terminated | truncated).float()
            rew[t] = torch.as_tensor(reward)

        with torch.no_grad():
            advantage, last, value_t, done_t = torch.zeros_like(rew), torch.zeros(num_envs), critic(next_obs), next_done
            value_t = value_t.flatten()
            for t in reversed(range(num_steps)):
                delta = rew[t] + gamma * value_t * (1 - done_t) - value[t]
                advantage[t] = last = delta + gamma * lam * (1 - done_t) * last
                value_t, done_t = value[t], done[t]
        columns = [each.flatten(0, 1) for each in (obs, act, logp, value, advantage, advantage + value)]
        for _ in range(num_epochs):
            for index in torch.as_tensor(np.random.permutation(batch)).chunk(num_minibatches):
                o, a, old_logp, old_value, adv, target = (column[index] for column in columns)
                policy = torch.distributions.Categorical(logits=actor(o))
                ratio = (policy.log_prob(a) - old_logp).exp()
                loss = ppo_loss(ratio, adv, critic(o).flatten(), old_value, target, policy.entropy())
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
        on_step((update + 1) * batch, greedy)
    envs.close()


class SquashedActor(nn.Module):
    """Two hidden layers, mean and standard deviation, squashed into the bounds of the action space."""

    def __init__(self, ins: int, space: gymnasium.spaces.Box, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(ins, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.mean, self.log_std = nn.Linear(width, space.shape[0]), nn.Linear(width, space.shape[0])
        self.scale = torch.as_tensor((space.high - space.low) / 2)
        self.middle = torch.as_tensor((space.high + space.low) / 2)

    def draw(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns actions ``[B, C]``, their log-probabilities ``[B, 1]`` and the greedy actions ``[B, C]``."""
        hidden = self.body(obs)
        mean, log_std = self.mean(hidden), -5 + 3.5 * (torch.tanh(self.log_std(hidden)) + 1)
        normal = torch.distributions.Normal(mean, log_std.exp())
        x = normal.rsample()
        y = torch.tanh(x)
        logp = normal.log_prob(x) - torch.log(self.scale * (1 - y.pow(2)) + 1e-6)
        return y * self.scale + self.middle, logp.sum(1, keepdim=True), torch.tanh(mean) * self.scale + self.middle


class SAC:
    """Two critics, their targets, an actor and a temperature, each part with an optimizer of its own.

    Args:
        ins: Numbers in an observation.
        space: Of the actions.
        width: Units of the two hidden layers.
    """

    gamma, tau, policy_lr, q_lr = 0.99, 0.005, 3e-4, 1e-3

    def __init__(self, ins: int, space: gymnasium.spaces.Box, width: int = 256) -> None:
        self.outs = space.shape[0]

        def critic() -> nn.Sequential:
            hidden = nn.Linear(ins + self.outs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
            return nn.Sequential(*hidden, nn.Linear(width, 1))

        self.actor = SquashedActor(ins, space, width)
        self.critics, self.targets = [critic(), critic()], [critic(), critic()]
        for fast, slow in zip(self.critics, self.targets, strict=True):
            slow.load_state_dict(fast.state_dict())
        self._q_optimizer = torch.optim.Adam([each for net in self.critics for each in net.parameters()], lr=self.q_lr)
        self._actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=self.policy_lr)
        self._log_alpha = torch.zeros(1, requires_grad=True)
        self._alpha, self._alpha_optimizer = 1.0, torch.optim.Adam([self._log_alpha], lr=self.q_lr)

    @staticmethod
    def _q(nets: list[nn.Sequential], obs: Tensor, act: Tensor) -> list[Tensor]:
        joined = torch.cat([obs, act], 1)
        return [net(joined) for net in nets]

    def update(
        self, obs: Tensor, act: Tensor, rew: Tensor, next_obs: Tensor, ended: Tensor, actor_updates: int
    ) -> None:
        """Updates the critics once, and the actor and the temperature so many times, from columns ``[B, ...]``."""
        with torch.no_grad():
            next_act, next_logp, _ = self.actor.draw(next_obs)
            lower = torch.min(*self._q(self.targets, next_obs, next_act)) - self._alpha * next_logp
            y = rew + (1 - ended) * self.gamma * lower
        one, two = self._q(self.critics, obs, act)
        self._q_optimizer.zero_grad()
        (F.mse_loss(one, y) + F.mse_loss(two, y)).backward()
        self._q_optimizer.step()
        for _ in range(actor_updates):
            pi, logp, _ = self.actor.draw(obs)
            self._actor_optimizer.zero_grad()
            (self._alpha * logp - torch.min(*self._q(self.critics, obs, pi))).mean().backward()
            self._actor_optimizer.step()
            with torch.no_grad():
                logp = self.actor.draw(obs)[1]
            self._alpha_optimizer.zero_grad()
            (-self._log_alpha.exp() * (logp - self.outs)).mean().backward()
            self._alpha_optimizer.step()
            self._alpha = self._log_alpha.exp().item()
        for net, target in zip(self.critics, self.targets, strict=True):
            for fresh, old in zip(net.parameters(), target.parameters(), strict=True):
                old.data.copy_(self.tau * fresh.data + (1 - self.tau) * old.data)


def sac(env_id: str, seed: int, on_step: OnStep, total_steps: int = 1_000_000) -> None:
    """Soft actor-critic for a bounded Box."""
    learning_starts, batch, delay = 5_000, 256, 2
    envs = make_envs(env_id, 1, seed)
    space = envs.single_action_space
    assert isinstance(space, gymnasium.spaces.Box)
    ins, outs = int(np.prod(envs.single_observation_space.shape or ())), space.shape[0]
    agent = SAC(ins, space)
    size = min(total_steps, 1_000_000)
    replay = [np.zeros((size, width), np.float32) for width in (ins, outs, 1, ins, 1)]

    @torch.no_grad()
    def greedy(rows: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(agent.actor.draw(torch.as_tensor(rows, dtype=torch.float32))[2].numpy())

    obs = envs.reset(seed=seed)[0].astype(np.float32)
    for step in range(total_steps):
        if step < learning_starts:
            act = np.stack([space.sample()])
        else:
            act = agent.actor.draw(torch.as_tensor(obs))[0].detach().numpy()
        observed, reward, terminated, truncated, infos = envs.step(act)
        next_obs = observed.astype(np.float32)
        real = np.stack(infos["final_obs"]).astype(np.float32) if terminated[0] or truncated[0] else next_obs
        row = step % size
        for column, cells in zip(replay, (obs, act, reward[:, None], real, terminated[:, None]), strict=True):
            column[row] = cells[0]
        obs = next_obs
        if step > learning_starts:
            index = np.random.randint(0, min(step + 1, size), batch)
            columns = (torch.as_tensor(column[index]) for column in replay)
            agent.update(*columns, actor_updates=delay if step % delay == 0 else 0)
        on_step(step + 1, greedy)
    envs.close()
