"""The baseline for learner ranks: the same algorithms as one writes them with ``DistributedDataParallel``.

Each process takes its share of every minibatch from random data, and DDP averages gradients in the backward pass.
"""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import socket
from abc import ABC, abstractmethod
from multiprocessing.connection import Connection
from typing import Any

from rayvec.bench.harness.task import receive, told

__all__ = ["DataParallel"]

_GAMMA, _ACTIONS = 0.99, 2


class Share(ABC):
    """One process's share of an algorithm's updates.

    Args:
        task: What to update, a :class:`~rayvec.bench.harness.learners.LearnerTask`.
        device: Where.
    """

    def __init__(self, task: Any, device: Any) -> None:
        self.task, self.device = task, device
        self.rows = task.rows // task.num_learners

    @abstractmethod
    def update(self) -> int:
        """Updates from the whole batch; returns how many rows of minibatches this process learned from."""

    def net(self, *outs: int) -> Any:
        """Returns tanh nets of one size side by side, in DDP; each gives so many numbers for an observation."""
        import torch
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        sizes = [self.task.obs_size, *self.task.hidden_sizes]

        def mlp(out: int) -> nn.Module:
            layers: list[nn.Module] = []
            for pair in itertools.pairwise(sizes):
                layers += [nn.Linear(*pair), nn.Tanh()]
            return nn.Sequential(*layers, nn.Linear(sizes[-1], out))

        class Nets(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.parts = nn.ModuleList(map(mlp, outs))

            def forward(self, obs: torch.Tensor) -> list[torch.Tensor]:
                return [part(obs) for part in self.parts]

        return DistributedDataParallel(Nets().to(self.device))

    def normal(self, *shape: int) -> Any:
        """Returns random numbers."""
        import torch

        return torch.randn(shape, device=self.device)

    def actions(self, *shape: int) -> Any:
        """Returns random actions."""
        import torch

        return torch.randint(0, _ACTIONS, shape, device=self.device)


class PPOShare(Share):
    """PPO's loss over shuffled minibatches."""

    def __init__(self, task: Any, device: Any) -> None:
        import torch

        super().__init__(task, device)
        self._net = self.net(_ACTIONS, 1)
        self._optimizer = torch.optim.Adam(self._net.parameters(), 2.5e-4)
        self._obs, self._act = self.normal(self.rows, task.obs_size), self.actions(self.rows)
        self._advantage, self._target = self.normal(self.rows), self.normal(self.rows)
        self._old_logp = torch.full((self.rows,), -0.69, device=device)
        self._epochs = task.config().num_epochs

    def update(self) -> int:
        """See :class:`Share`."""
        import torch

        each = max(1, self.task.minibatch // self.task.num_learners)
        for _ in range(self._epochs):
            order = torch.randperm(self.rows, device=self.device)
            for begin in range(0, self.rows - each + 1, each):
                at = order[begin : begin + each]
                logits, value = self._net(self._obs[at])
                logp = logits.log_softmax(-1).gather(-1, self._act[at, None]).squeeze(-1)
                ratio = (logp - self._old_logp[at]).exp()
                gain = torch.minimum(ratio * self._advantage[at], ratio.clamp(0.8, 1.2) * self._advantage[at])
                loss = -gain.mean() + 0.5 * (value.squeeze(-1) - self._target[at]).square().mean()
                descend(self._optimizer, loss, self._net)
        return int(self.rows // each * each * self._epochs)


class IMPALAShare(Share):
    """V-trace over some environments at a time, in one pass."""

    def __init__(self, task: Any, device: Any) -> None:
        import torch

        super().__init__(task, device)
        self._net = self.net(_ACTIONS, 1)
        self._optimizer = torch.optim.Adam(self._net.parameters(), 2.5e-4)
        self._columns = task.columns // task.num_learners
        steps = self.rows // self._columns
        self._obs, self._act = self.normal(steps + 1, self._columns, task.obs_size), self.actions(steps, self._columns)
        self._rew = self.normal(steps, self._columns)
        self._old_logp = torch.full((steps, self._columns), -0.69, device=device)
        self._num_minibatches = min(task.config().num_minibatches, self._columns)

    def update(self) -> int:
        """See :class:`Share`."""
        import torch

        each = self._columns // self._num_minibatches
        for begin in range(0, each * self._num_minibatches, each):
            columns = slice(begin, begin + each)
            logits, value = self._net(self._obs[:, columns])
            value = value.squeeze(-1)
            logp_all = logits[:-1].log_softmax(-1)
            logp = logp_all.gather(-1, self._act[:, columns, None]).squeeze(-1)
            with torch.no_grad():
                target, advantage = self._v_trace(value, logp - self._old_logp[:, columns], self._rew[:, columns])
            entropy = -(logp_all.exp() * logp_all).sum(-1).mean()
            loss = -(advantage * logp).mean() + 0.5 * (value[:-1] - target).square().mean() - 0.01 * entropy
            descend(self._optimizer, loss, self._net)
        return int(each * self._num_minibatches * len(self._rew))

    @staticmethod
    def _v_trace(value: Any, log_ratio: Any, rew: Any) -> tuple[Any, Any]:
        """Returns targets and advantages, as in :func:`rayvec.learners.returns.vtrace` where no episode ends."""
        import torch

        rho = log_ratio.exp().clamp(max=1.0)
        delta = rho * (rew + _GAMMA * value[1:] - value[:-1])
        excess, target = torch.zeros_like(rew[0]), torch.empty_like(rew)
        for t in range(len(rew) - 1, -1, -1):
            excess = delta[t] + _GAMMA * rho[t] * excess
            target[t] = value[t] + excess
        following = torch.cat([target[1:], value[-1:]])
        return target, rho * (rew + _GAMMA * following - value[:-1])


class SACShare(Share):
    """Soft actor-critic with two critics for discrete actions, an update for every step of the batch."""

    def __init__(self, task: Any, device: Any) -> None:
        import torch

        super().__init__(task, device)
        self._actor, self._critics = self.net(_ACTIONS), self.net(_ACTIONS, _ACTIONS)
        self._targets = copy.deepcopy(self._critics.module)
        self._log_alpha = torch.zeros((), device=device, requires_grad=True)
        self._actor_optimizer = torch.optim.Adam(self._actor.parameters(), 3e-4)
        self._critic_optimizer = torch.optim.Adam(self._critics.parameters(), 3e-4)
        self._alpha_optimizer = torch.optim.Adam([self._log_alpha], 3e-4)
        self._obs, self._act = self.normal(10_000, task.obs_size), self.actions(10_000)
        self._rew = self.normal(10_000)

    def update(self) -> int:
        """See :class:`Share`."""
        import torch

        each = self.task.minibatch_size * self.task.factor // self.task.num_learners
        for _ in range(self.task.rows):
            at = torch.randint(0, len(self._obs) - 1, (each,), device=self.device)
            self._update_once(self._obs[at], self._act[at, None], self._rew[at], self._obs[at + 1])
        return int(self.task.rows * each)

    def _update_once(self, obs: Any, act: Any, rew: Any, next_obs: Any) -> None:
        import torch

        alpha = self._log_alpha.detach().exp()
        with torch.no_grad():
            logp = self._actor(next_obs)[0].log_softmax(-1)
            lower = torch.minimum(*self._targets(next_obs))
            target = rew + _GAMMA * (logp.exp() * (lower - alpha * logp)).sum(-1)
        errors = [value.gather(-1, act).squeeze(-1) - target for value in self._critics(obs)]
        descend(self._critic_optimizer, sum(error.square().mean() for error in errors))
        logp = self._actor(obs)[0].log_softmax(-1)
        with torch.no_grad():
            lower = torch.minimum(*self._critics(obs))
        descend(self._actor_optimizer, (logp.exp() * (alpha * logp - lower)).sum(-1).mean())
        surplus = -(logp.detach().exp() * logp.detach()).sum(-1).mean() - 0.5
        descend(self._alpha_optimizer, self._log_alpha.exp() * surplus)
        with torch.no_grad():
            torch._foreach_lerp_(list(self._targets.parameters()), list(self._critics.parameters()), 0.005)


def descend(optimizer: Any, loss: Any, clipped: Any = None) -> None:
    """Takes a step down a loss, with the norm of the gradient clipped where a net is given."""
    import torch

    optimizer.zero_grad()
    loss.backward()
    if clipped is not None:
        torch.nn.utils.clip_grad_norm_(clipped.parameters(), 0.5)
    optimizer.step()


SHARES: dict[str, type[Share]] = {"ppo": PPOShare, "sac": SACShare, "impala": IMPALAShare}


def _rank(task: Any, rank: int, port: int, pipe: Connection) -> None:
    """Updates when it is told to."""
    with told(pipe):
        _serve(task, rank, port, pipe)


def _serve(task: Any, rank: int, port: int, pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    cuda = task.device == "cuda"
    torch.distributed.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=task.num_learners
    )
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    share = SHARES[task.algorithm](task, device)
    pipe.send(None)
    while pipe.recv():
        pipe.send(share.update())
    torch.distributed.destroy_process_group()


class DataParallel:
    """Processes with ``DistributedDataParallel``, a minibatch divided among them.

    Args:
        task: As of :class:`Share`; `num_learners` says how many processes.
    """

    transport = "gloo"

    def __init__(self, task: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(task.num_learners):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(task, rank, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            receive(pipe)

    def advance(self) -> int:
        """Updates once."""
        for pipe in self._pipes:
            pipe.send(True)
        return sum(receive(pipe) for pipe in self._pipes)

    def close(self) -> None:
        """Ends them."""
        for pipe in self._pipes:
            pipe.send(False)
        for process in self._processes:
            process.join()
