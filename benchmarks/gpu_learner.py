"""What a GPU makes of updates: eager, compiled and captured, fp32 and bf16. Needs no Ray.

    python benchmarks/gpu_learner.py

SAC's whole update, in updates/s, and PPO's minibatch with a Nature-CNN, in frames/s: rows by their index, loss and
gradient, clipping, and the optimizer's step.
``--device cpu`` runs the same on a CPU, to see that it works.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from measure import heading
from sac_update import A, B, D
from torch import Tensor

from rayvec.bench.terminal import show_table, spread
from rayvec.config import PPOConfig
from rayvec.learners import sac_math
from rayvec.learners.compiled_step import CompiledStep
from rayvec.learners.compiling import Compiled, CUDAGraph
from rayvec.learners.ppo import Minibatch, PPOLearner, Samples
from rayvec.learners.sac_math import AdamState, MLPLayout, Nets, SACMath

FRAMES = (4, 84, 84)
KINDS = ["eager", "compiled", "captured"]


def sac(width: int, device: str) -> tuple[Callable[..., Tensor], Callable[[], tuple[Any, ...]]]:
    """Returns a whole update, and what makes its arguments on the device."""
    math = SACMath(
        critic=MLPLayout(2, (D + A, width, width, 1)),
        actor=MLPLayout(1, (D, width, width, 2 * A)),
        is_discrete=False,
        gamma=0.99,
        tau=0.005,
        target_entropy=-float(A),
        autotune=True,
        policy_lr=3e-4,
        q_lr=1e-3,
        alpha_lr=1e-3,
    )

    def update(nets: Nets, rows: sac_math.Minibatch, noise: Tensor, correction: Tensor) -> Tensor:
        grad, critic_stats = math.critic_gradient(nets, rows, noise[0])
        critic_norm = math.critic_step(nets, grad, correction)
        grad, actor_stats = math.actor_gradient(nets, rows, noise[1])
        return torch.cat([critic_stats, actor_stats, critic_norm, math.actor_step(nets, grad, correction)])

    def arguments() -> tuple[Any, ...]:
        generator = torch.Generator(device).manual_seed(0)
        draw = lambda *shape: torch.randn(shape, device=device, generator=generator)  # noqa: E731
        critic, actor = 0.05 * draw(math.critic.num_params), 0.05 * draw(math.actor.num_params + 1)
        adam = lambda flat: AdamState(flat, torch.zeros_like(flat), torch.zeros_like(flat))  # noqa: E731
        nets = Nets(adam(critic), critic.clone(), adam(actor), torch.ones(1, device=device))
        rows = sac_math.Minibatch(draw(B, D), draw(B, A).tanh(), draw(B), draw(B, D), 0 * draw(B), 0 * draw(B) + 1 / B)
        return nets, rows, draw(2, B, A), torch.ones(2, device=device)

    return update, arguments


def ppo(minibatch: int, device: str, *, compile: bool, capture: bool) -> Callable[[], Tensor]:
    """Returns a whole update of a Nature-CNN from a minibatch that lies on the device already."""
    config = PPOConfig(num_envs=1, num_steps=minibatch, minibatch_size=minibatch, learning_rate=1e-6, compile=compile)
    learner = PPOLearner(spaces.Box(0, 255, FRAMES, np.uint8), spaces.Discrete(4), config, device=device)
    if compile:
        parts = learner.module, learner._compiled_loss, learner._optimizer, config.max_grad_norm, 5
        learner._compiled = CompiledStep(*parts, capture=capture)
    rng = np.random.default_rng(0)
    obs = torch.from_numpy(rng.integers(0, 256, (minibatch, *FRAMES), np.uint8))
    sample = torch.from_numpy(learner.module.distribution.recorded(rng.integers(0, 4, minibatch), {}))
    numbers = [torch.from_numpy(rng.normal(size=minibatch).astype(np.float32)) for _ in range(3)]
    logp = torch.full((minibatch,), -float(np.log(4)))
    rows = Samples(*(column.to(device) for column in (obs, sample, logp, *numbers)))
    if learner._compiled is not None:
        learner._compiled.begin(tuple(rows))
    part = Minibatch(torch.arange(minibatch, device=device), rows.advantage, minibatch, None)
    return lambda: learner._learn(rows, part)


def updates_per_s(function: Callable[..., Any], arguments: tuple[Any, ...], repeats: int, count: int) -> list[float]:
    """Returns updates per second of each repeat, by the clock of the host around a synchronised run."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(min(20, count)):
        function(*arguments)
    rates = []
    for _ in range(repeats):
        synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            function(*arguments)
        synchronize()
        rates.append(count / (time.perf_counter() - begin))
    return rates


def in_bf16(function: Callable[..., Tensor], device: str) -> Callable[..., Tensor]:
    """Computes matrix products in bfloat16; parameters and the optimizer stay in float32."""

    def cast(*args: Any) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return function(*args)

    return cast


def sac_rows(options: argparse.Namespace) -> Iterator[list[str]]:
    """Yields a line of the table for each width and precision."""
    on_gpu = options.device == "cuda"
    for width in options.widths:
        update, arguments = sac(width, options.device)
        for dtype, cast in precisions(options.device):
            kinds: list[Callable[..., Any]] = [cast(update), Compiled(cast(update))]
            kinds += [CUDAGraph(Compiled(cast(update)))] if on_gpu else []
            rates = [updates_per_s(kind, arguments(), options.repeats, options.updates) for kind in kinds]
            yield line(f"SAC, {width}x{width}, {dtype}, updates/s", rates)


def ppo_rows(options: argparse.Namespace) -> Iterator[list[str]]:
    """Yields a line of the table for each size of a minibatch and precision."""
    for minibatch in options.minibatches:
        for dtype, cast in precisions(options.device):
            rates = []
            for kind in KINDS[: 3 if options.device == "cuda" else 2]:
                update = ppo(minibatch, options.device, compile=kind != "eager", capture=kind == "captured")
                found = updates_per_s(cast(update), (), options.repeats, options.updates)
                rates.append([minibatch * each for each in found])
            yield line(f"PPO, Nature-CNN, {minibatch} frames, {dtype}, frames/s", rates)


def precisions(device: str) -> list[tuple[str, Callable[..., Callable[..., Tensor]]]]:
    """Returns what turns a function into one of each precision."""
    return [("fp32", lambda function: function), ("bf16", lambda function: in_bf16(function, device))]


def line(name: str, rates: list[list[float]]) -> list[str]:
    """Returns the cells of a line: eager, compiled and captured rates with their spread."""
    return [name, *(spread(each) for each in rates), *["none"] * (3 - len(rates))]


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=["sac", "ppo"], default=["sac", "ppo"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 1024], help="of SAC's hidden layers")
    parser.add_argument("--minibatches", type=int, nargs="+", default=[256, 2048], help="of PPO, in frames")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--updates", type=int, default=200, help="in each repeat")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA: this benchmark measures a GPU, and torch sees none on this machine", file=sys.stderr)
        return 1
    print(heading())
    print(torch.cuda.get_device_name() if options.device == "cuda" else "CPU: these are not the figures looked for")
    for algorithm, rows in {"sac": sac_rows, "ppo": ppo_rows}.items():
        if algorithm in options.algorithms:
            show_table(algorithm.upper(), ["", *KINDS], list(rows(options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
