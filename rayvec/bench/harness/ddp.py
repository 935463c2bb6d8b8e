"""The baseline for learner ranks: PPO, SAC and IMPALA written by hand with ``DistributedDataParallel``.

Each process takes its share of every minibatch from random data, and DDP averages gradients in the backward pass.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["SHARES"]

_GAMMA, _ACTIONS = 0.99, 2


class _Nets(nn.Module):
    """Tanh nets of one size side by side; each gives so many numbers for an observation."""

    def __init__(self, task: Any, outs: tuple[int, ...]) -> None:
        super().__init__()
        self._is_image = task.images
        sizes = [64 * 7 * 7 if task.images else task.obs_size, *task.hidden_sizes]
        self.parts = nn.ModuleList()
        convolutions = [nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1)]
        self.body = nn.Sequential(*convolutions, nn.ReLU(), nn.Flatten()) if task.images else nn.Identity()
        for out in outs:
            layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())]
            self.parts.append(nn.Sequential(*layers, nn.Linear(sizes[-1], out)))

    def forward(self, obs: Tensor) -> list[Tensor]:
        if self._is_image:
            obs = self.body(obs.flatten(0, -4) / 255.0).unflatten(0, obs.shape[:-3])
        return [part(obs) for part in self.parts]


class _Share:
    """One process's share of an algorithm's updates.

    Args:
        task: What to update, a :class:`~rayvec.bench.harness.learners.LearnerTask`.
        device: Where.
    """

    def __init__(self, task: Any, device: torch.device) -> None:
        self.task, self.device = task, device
        self.rows = task.rows // task.num_learners

    def ddp(self, *outs: int) -> DistributedDataParallel:
        """Returns nets in DDP."""
        return DistributedDataParallel(_Nets(self.task, outs).to(self.device))

    def obs(self, *shape: int) -> Tensor:
        """Returns random observations."""
        if self.task.images:
            return torch.randint(0, 256, (*shape, 4, 84, 84), dtype=torch.uint8, device=self.device)
        return self.normal(*shape, self.task.obs_size)

    def normal(self, *shape: int) -> Tensor:
        """Returns random numbers."""
        return torch.randn(shape, device=self.device)

    def actions(self, *shape: int) -> Tensor:
        """Returns random actions."""
        return torch.randint(0, _ACTIONS, shape, device=self.device)


class _OnPolicyShare(_Share):
    """An actor and a critic with one optimizer."""

    def __init__(self, task: Any, device: torch.device) -> None:
        super().__init__(task, device)
        self._net = self.ddp(_ACTIONS, 1)
        self._optimizer = torch.optim.Adam(self._net.parameters(), 2.5e-4)

    def descend(self, loss: Tensor) -> None:
        _descend(self._optimizer, loss, self._net)


class PPOShare(_OnPolicyShare):
    """PPO's loss over shuffled minibatches."""

    def __init__(self, task: Any, device: torch.device) -> None:
        super().__init__(task, device)
        self._obs, self._act = self.obs(self.rows), self.actions(self.rows)
        self._advantage, self._target = self.normal(self.rows), self.normal(self.rows)

    def update(self) -> int:
        """Updates from the whole batch; returns how many rows of minibatches this process learned from."""
        each = max(1, self.task.minibatch // self.task.num_learners)
        epochs = self.task.config().num_epochs
        for _ in range(epochs):
            order = torch.randperm(self.rows, device=self.device)
            for at in torch.split(order[: self.rows // each * each], each):
                logits, value = self._net(self._obs[at])
                logp = logits.log_softmax(-1).gather(-1, self._act[at, None]).squeeze(-1)
                ratio, advantage = (logp + 0.69).exp(), self._advantage[at]
                gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                self.descend(0.5 * (value.squeeze(-1) - self._target[at]).square().mean() - gain.mean())
        return int(self.rows // each * each * epochs)


class IMPALAShare(_OnPolicyShare):
    """V-trace over some environments at a time, in one pass."""

    def __init__(self, task: Any, device: torch.device) -> None:
        super().__init__(task, device)
        self._columns = task.columns // task.num_learners
        self._steps = self.rows // self._columns
        shape = (self._steps, self._columns)
        self._obs, self._act = self.obs(self._steps + 1, self._columns), self.actions(*shape)
        self._rew = self.normal(*shape)

    def update(self) -> int:
        """See :meth:`PPOShare.update`."""
        num_minibatches = min(self.task.config().num_minibatches, self._columns)
        each = self._columns // num_minibatches
        for begin in range(0, each * num_minibatches, each):
            columns = slice(begin, begin + each)
            logits, value = self._net(self._obs[:, columns])
            value = value.squeeze(-1)
            logp_all = logits[:-1].log_softmax(-1)
            logp = logp_all.gather(-1, self._act[:, columns, None]).squeeze(-1)
            target, advantage = _v_trace(value.detach(), logp.detach() + 0.69, self._rew[:, columns])
            entropy = -(logp_all.exp() * logp_all).sum(-1).mean()
            self.descend(0.5 * (value[:-1] - target).square().mean() - (advantage * logp).mean() - 0.01 * entropy)
        return int(each * num_minibatches * self._steps)


def _v_trace(value: Tensor, log_ratio: Tensor, rew: Tensor) -> tuple[Tensor, Tensor]:
    """Returns targets and advantages, as in :func:`rayvec.learners.returns.vtrace` where no episode ends."""
    rho = log_ratio.exp().clamp(max=1.0)
    delta = rho * (rew + _GAMMA * value[1:] - value[:-1])
    excess, target = torch.zeros_like(rew[0]), torch.empty_like(rew)
    for t in range(len(rew) - 1, -1, -1):
        excess = delta[t] + _GAMMA * rho[t] * excess
        target[t] = value[t] + excess
    following = torch.cat([target[1:], value[-1:]])
    return target, rho * (rew + _GAMMA * following - value[:-1])


class SACShare(_Share):
    """Soft actor-critic with two critics for discrete actions, an update for every step of the batch."""

    def __init__(self, task: Any, device: torch.device) -> None:
        super().__init__(task, device)
        self._actor, self._critics = self.ddp(_ACTIONS), self.ddp(_ACTIONS, _ACTIONS)
        self._targets = copy.deepcopy(self._critics.module)
        self._log_alpha = torch.zeros((), device=device, requires_grad=True)
        parameters = [self._actor.parameters(), self._critics.parameters(), [self._log_alpha]]
        self._optimizers = [torch.optim.Adam(each, 3e-4) for each in parameters]
        self._obs, self._act = self.obs(10_000), self.actions(10_000)
        self._rew = self.normal(10_000)

    def update(self) -> int:
        """See :meth:`PPOShare.update`."""
        each = self.task.minibatch_size * self.task.factor // self.task.num_learners
        for _ in range(self.task.rows):
            at = torch.randint(0, len(self._obs) - 1, (each,), device=self.device)
            self._update_once(self._obs[at], self._act[at, None], self._rew[at], self._obs[at + 1])
        return int(self.task.rows * each)

    def _update_once(self, obs: Tensor, act: Tensor, rew: Tensor, next_obs: Tensor) -> None:
        actor_optimizer, critic_optimizer, alpha_optimizer = self._optimizers
        alpha = self._log_alpha.detach().exp()
        with torch.no_grad():
            logp = self._actor(next_obs)[0].log_softmax(-1)
            lower = torch.minimum(*self._targets(next_obs))
            target = rew + _GAMMA * (logp.exp() * (lower - alpha * logp)).sum(-1)
        errors = [value.gather(-1, act).squeeze(-1) - target for value in self._critics(obs)]
        _descend(critic_optimizer, errors[0].square().mean() + errors[1].square().mean())
        logp = self._actor(obs)[0].log_softmax(-1)
        with torch.no_grad():
            lower = torch.minimum(*self._critics(obs))
        _descend(actor_optimizer, (logp.exp() * (alpha * logp - lower)).sum(-1).mean())
        surplus = -(logp.detach().exp() * logp.detach()).sum(-1).mean() - 0.5
        _descend(alpha_optimizer, self._log_alpha.exp() * surplus)
        with torch.no_grad():
            torch._foreach_lerp_(list(self._targets.parameters()), list(self._critics.parameters()), 0.005)


def _descend(optimizer: torch.optim.Optimizer, loss: Tensor, clipped: nn.Module | None = None) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    if clipped is not None:
        torch.nn.utils.clip_grad_norm_(clipped.parameters(), 0.5)
    optimizer.step()


SHARES: dict[str, Any] = {"ppo": PPOShare, "sac": SACShare, "impala": IMPALAShare}
