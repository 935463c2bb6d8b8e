"""What a GPU makes of updates: eager and compiled, beside plain PyTorch. Needs no Ray and no Tianshou.

    PYTHONPATH=. python benchmarks/gpu_learner.py

A row is whole updates of a learner, as ``train`` calls them, in samples/s: PPO with an MLP and with a Nature-CNN, SAC,
and IMPALA. Beside PPO stand the update of a script in the way of CleanRL (eager modules, autograd, torch's Adam) and
that of a script in the way of LeanRL (the same, compiled, with CUDA graphs), with the same minibatches and data.

On a GPU, what is compiled is captured as a CUDA graph too. ``--device cpu`` runs the same on a CPU, where time is that
of the process, which other programs hardly change.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from cleanrl_style import ppo_loss
from learner_task import LearnerTask
from torch import Tensor, nn

from rayvec.bench.terminal import spread

D, A = 17, 6
CHOICES = 2
"""Actions where observations are images."""

Updates = Callable[[], Any]


def ours(task: LearnerTask, precision: str, kind: str) -> Updates:
    """Returns an update of our learner; `kind` is "eager" or "compiled"."""
    learner = task.learner(precision=precision, compile=kind == "compiled", total_steps=10**9)
    return partial(learner.update, task.batch(learner))


class Agent(nn.Module):
    """A policy and a value as CleanRL's scripts write them."""

    def __init__(self, task: LearnerTask) -> None:
        super().__init__()
        relu, flat = nn.ReLU, nn.Flatten
        cnn = (nn.Conv2d(4, 32, 8, 4), relu(), nn.Conv2d(32, 64, 4, 2), relu(), nn.Conv2d(64, 64, 3, 1), relu(), flat())
        self.images = task.images
        self.trunk = nn.Sequential(*cnn, nn.Linear(3136, 512), relu()) if task.images else nn.Identity()
        if task.images:
            self.actor, self.critic = nn.Linear(512, CHOICES), nn.Linear(512, 1)
        else:
            self.actor, self.critic = (self.mlp(task.hidden_sizes[0], outs) for outs in (A, 1))
            self.log_std = nn.Parameter(torch.zeros(A))

    @staticmethod
    def mlp(width: int, outs: int) -> Any:
        """Returns an MLP with tanh."""
        return nn.Sequential(nn.Linear(D, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outs))

    def evaluate(self, obs: Tensor, act: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns log-probabilities, entropies and values, ``[B]`` each."""
        features = self.trunk(obs.float() / 255 if self.images else obs)
        params, value = self.actor(features), self.critic(features).squeeze(-1)
        if self.images:
            logp = params.log_softmax(-1)
            return logp.gather(-1, act[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1), value
        normal = torch.distributions.Normal(params, self.log_std.exp(), validate_args=False)
        return normal.log_prob(act).sum(-1), normal.entropy().sum(-1) + 0 * value, value


def plain(task: LearnerTask, precision: str, *, lean: bool) -> Updates:
    """Returns the update of a script: the samples on the device, minibatches, loss, autograd, clip, Adam."""
    device, epochs = task.device, task.config().num_epochs
    agent = Agent(task).to(device)
    on_gpu = device == "cuda"
    rate: Any = torch.tensor(2.5e-4, device=device) if lean and on_gpu else 2.5e-4
    adam = torch.optim.Adam(agent.parameters(), lr=rate, eps=1e-5, capturable=lean and on_gpu, fused=lean or None)
    (chunk,) = task.batch(task.learner()).chunks
    rows = task.rows
    logp = chunk.extras["logp"].reshape(-1)
    numbers = np.random.default_rng(1).normal(size=(3, rows)).astype(np.float32)

    def step(obs: Tensor, act: Tensor, logp: Tensor, adv: Tensor, target: Tensor, old: Tensor) -> Tensor:
        adam.zero_grad()
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
            new, entropy, value = agent.evaluate(obs, act)
        ratio = (new.float() - logp).exp()
        loss = ppo_loss(ratio, adv, value, old, target, entropy)
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5, foreach=True)
        adam.step()
        return loss.detach()

    call = torch.compile(step, mode="reduce-overhead" if on_gpu else None) if lean else step

    def update() -> Any:
        obs = torch.from_numpy(chunk.obs).to(device).flatten(0, 1)
        act = torch.from_numpy(chunk.act).to(device).flatten(0, 1)
        others = [torch.from_numpy(each).to(device) for each in (logp, *numbers)]
        for _ in range(epochs):
            for index in torch.randperm(rows, device=device).split(task.minibatch_size):
                call(obs[index], act[index], *(each[index] for each in others))
        return next(agent.parameters()).sum().item()

    return update


def samples_per_s(update: Updates, task: LearnerTask) -> float:
    """Returns the speed of one update, until the device has finished."""
    on_gpu = task.device == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    began = clock()
    update()
    if on_gpu:
        torch.cuda.synchronize()
    return task.samples / (clock() - began)


def rows(options: argparse.Namespace) -> Iterator[list[str]]:
    """Yields the rows of the table; all ways and precisions of a task are interleaved."""
    for task in tasks(options):
        kinds = {"sac": ["eager", "compiled"], "impala": ["eager"]}.get(task.algorithm, COLUMNS)
        ways: dict[str, Updates] = {}
        for precision, kind in itertools.product(options.precisions, [kind for kind in kinds if kind in options.kinds]):
            own = kind in ("eager", "compiled")
            make = ours(task, precision, kind) if own else plain(task, precision, lean=kind == "leanrl")
            ways[f"{kind} {precision}"] = make
        for update in ways.values():
            update(), update()  # which compile and capture
        turns = [{name: samples_per_s(ways[name], task) for name in ways} for _ in range(options.repeats)]
        for precision in options.precisions:
            names = [f"{kind} {precision}" for kind in COLUMNS]
            found = [[turn[name] for turn in turns if name in turn] for name in names]
            net = "Nature-CNN" if task.images else "x".join(map(str, task.hidden_sizes))
            yield [f"{task.algorithm.upper()}, {net}, {task.minibatch_size}, {precision}", *map(spread, found)]


COLUMNS = ["eager", "compiled", "cleanrl", "leanrl"]
TASKS = ["ppo", "ppo-cnn", "impala", "impala-cnn", "sac"]


def tasks(options: argparse.Namespace) -> Iterator[LearnerTask]:
    """Yields what is updated."""
    for name in options.tasks:
        algorithm, _, images = name.partition("-")
        shape: dict[str, Any] = {"num_envs": 64, "num_steps": options.num_steps, "images": bool(images)}
        sizes: list[dict[str, Any]] = [{"minibatch_size": each} for each in options.minibatches]
        if algorithm == "sac":
            shape = {"num_envs": 4, "num_steps": 8, "minibatch_size": 256}
            sizes = [{"hidden_sizes": (each, each)} for each in options.widths]
        for size in sizes:
            act_size = 0 if images else A
            yield LearnerTask(algorithm, **shape, **size, obs_size=D, act_size=act_size, device=options.device)


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--kinds", nargs="+", choices=COLUMNS, default=COLUMNS)
    parser.add_argument("--precisions", nargs="+", choices=["float32", "tf32", "bf16"], default=["float32", "bf16"])
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 1024], help="of SAC's hidden layers")
    parser.add_argument("--minibatches", type=int, nargs="+", default=[256, 1024], help="of PPO and IMPALA, in samples")
    parser.add_argument("--num-steps", type=int, default=64, help="of each of 64 environments, in an update")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one small task, eager, in float32: less than a minute")
    options = parser.parse_args()
    if options.quick:
        options.tasks, options.kinds, options.precisions = ["ppo"], ["eager", "cleanrl"], ["float32"]
        options.minibatches, options.num_steps, options.repeats = [1024], 16, 2
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA: this benchmark measures a GPU, and torch sees none on this machine", file=sys.stderr)
        return 1
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"`python {' '.join(sys.argv)}`, {device}, torch {torch.__version__}, samples/s\n")
    print("| | " + " | ".join(COLUMNS) + " |\n|" + "---|" * (1 + len(COLUMNS)))
    for cells in rows(options):
        print("| " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
