"""The baseline for learner ranks: PPO, SAC and IMPALA written by hand with ``DistributedDataParallel``.

Each process takes its share of every minibatch from random data, and DDP averages gradients in the backward pass. Each
function below returns what updates once, and returns how many rows of minibatches this process learned from.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rayvec.learners.returns import vtrace

__all__ = ["UPDATES"]

_GAMMA, _ACTIONS = 0.99, 2


class _Nets(nn.Module):
    """Tanh nets of one size side by side; each gives so many numbers for an observation."""

    def __init__(self, task: Any, outs: tuple[int, ...]) -> None:
        super().__init__()
        sizes = [64 * 7 * 7 if task.images else task.obs_size, *task.hidden_sizes]
        convolutions = [nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1)]
        self.body = nn.Sequential(*convolutions, nn.ReLU(), nn.Flatten()) if task.images else None
        self.parts = nn.ModuleList()
        for out in outs:
            layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())]
            self.parts.append(nn.Sequential(*layers, nn.Linear(sizes[-1], out)))

    def forward(self, obs: Tensor) -> list[Tensor]:
        if self.body is not None:
            obs = self.body(obs.flatten(0, -4) / 255.0).unflatten(0, obs.shape[:-3])
        return [part(obs) for part in self.parts]


def _parallel(task: Any, device: torch.device, *outs: int) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    net = DistributedDataParallel(_Nets(task, outs).to(device))
    return net, torch.optim.Adam(net.parameters(), 2.5e-4)


def _obs(task: Any, device: torch.device, *shape: int) -> Tensor:
    if task.images:
        return torch.randint(0, 256, (*shape, 4, 84, 84), dtype=torch.uint8, device=device)
    return torch.randn(*shape, task.obs_size, device=device)


def _descend(optimizer: torch.optim.Optimizer, loss: Tensor, clipped: nn.Module | None = None) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    if clipped is not None:
        nn.utils.clip_grad_norm_(clipped.parameters(), 0.5)
    optimizer.step()


def ppo(task: Any, device: torch.device) -> Callable[[], int]:
    """PPO's loss over shuffled minibatches."""
    rows, each = task.rows // task.num_learners, max(1, task.minibatch // task.num_learners)
    net, optimizer = _parallel(task, device, _ACTIONS, 1)
    obs, act = _obs(task, device, rows), torch.randint(0, _ACTIONS, (rows, 1), device=device)
    advantages, targets = torch.randn(2, rows, device=device)
    epochs, whole = task.config().num_epochs, rows // each * each

    def update() -> int:
        for _ in range(epochs):
            for at in torch.split(torch.randperm(rows, device=device)[:whole], each):
                logits, value = net(obs[at])
                ratio = (logits.log_softmax(-1).gather(-1, act[at]).squeeze(-1) + 0.69).exp()
                gain = torch.minimum(ratio * advantages[at], ratio.clamp(0.8, 1.2) * advantages[at])
                _descend(optimizer, 0.5 * (value.squeeze(-1) - targets[at]).square().mean() - gain.mean(), net)
        return int(whole * epochs)

    return update


def impala(task: Any, device: torch.device) -> Callable[[], int]:
    """V-trace over some environments at a time, in one pass."""
    columns = task.columns // task.num_learners
    steps = task.rows // task.columns
    num_minibatches = min(task.config().num_minibatches, columns)
    each = columns // num_minibatches
    net, optimizer = _parallel(task, device, _ACTIONS, 1)
    obs, act = _obs(task, device, steps + 1, columns), torch.randint(0, _ACTIONS, (steps, columns, 1), device=device)
    rew, never = torch.randn(steps, columns).numpy(), np.zeros((steps, columns), bool)

    def update() -> int:
        for begin in range(0, each * num_minibatches, each):
            part = slice(begin, begin + each)
            logits, value = net(obs[:, part])
            value, logp_all = value.squeeze(-1), logits[:-1].log_softmax(-1)
            logp = logp_all.gather(-1, act[:, part]).squeeze(-1)
            ratio, values = (each.detach().cpu().numpy() for each in (logp + 0.69, value))
            found = vtrace(rew[:, part], values[:-1], values[1:], ratio, never[:, part], never[:, part], gamma=_GAMMA)
            target, advantage = (torch.as_tensor(each, dtype=torch.float32, device=device) for each in found)
            entropy = -(logp_all.exp() * logp_all).sum(-1).mean()
            value_loss = 0.5 * (value[:-1] - target).square().mean()
            _descend(optimizer, value_loss - (advantage * logp).mean() - 0.01 * entropy, net)
        return int(each * num_minibatches * steps)

    return update


def sac(task: Any, device: torch.device) -> Callable[[], int]:
    """Soft actor-critic with two critics for discrete actions, an update for every step of the batch."""
    each = task.minibatch_size * task.factor // task.num_learners
    actor, actor_optimizer = _parallel(task, device, _ACTIONS)
    critics, critic_optimizer = _parallel(task, device, _ACTIONS, _ACTIONS)
    targets = copy.deepcopy(critics.module).requires_grad_(False)
    log_alpha = torch.zeros((), device=device, requires_grad=True)
    alpha_optimizer = torch.optim.Adam([log_alpha], 2.5e-4)
    replay = 10_000
    obs, act = _obs(task, device, replay), torch.randint(0, _ACTIONS, (replay, 1), device=device)
    rew = torch.randn(replay, device=device)

    def update() -> int:
        for _ in range(task.rows):
            at = torch.randint(0, replay - 1, (each,), device=device)
            alpha = log_alpha.detach().exp()
            with torch.no_grad():
                logp = actor(obs[at + 1])[0].log_softmax(-1)
                lower = torch.minimum(*targets(obs[at + 1]))
                target = rew[at] + _GAMMA * (logp.exp() * (lower - alpha * logp)).sum(-1)
            one, two = (value.gather(-1, act[at]).squeeze(-1) - target for value in critics(obs[at]))
            _descend(critic_optimizer, one.square().mean() + two.square().mean())
            logp = actor(obs[at])[0].log_softmax(-1)
            with torch.no_grad():
                lower = torch.minimum(*critics(obs[at]))
            _descend(actor_optimizer, (logp.exp() * (alpha * logp - lower)).sum(-1).mean())
            surplus = -(logp.detach().exp() * logp.detach()).sum(-1).mean() - 0.5
            _descend(alpha_optimizer, log_alpha.exp() * surplus)
            with torch.no_grad():
                torch._foreach_lerp_(list(targets.parameters()), list(critics.parameters()), 0.005)
        return int(task.rows * each)

    return update


UPDATES: dict[str, Callable[[Any, torch.device], Callable[[], int]]] = {"ppo": ppo, "sac": sac, "impala": impala}
