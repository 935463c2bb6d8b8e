"""What a GPU makes of SAC's update: eager, compiled and captured, fp32 and bf16, beside the roofline. Needs no Ray.

python benchmarks/gpu_learner.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from measure import heading, markdown
from sac_peers import A, B, D
from torch import Tensor

from rayvec.learners.compiling import Compiled, CUDAGraph
from rayvec.learners.sac_math import AdamState, MLPLayout, Nets, Rows, SACMath


def sac(width: int) -> tuple[SACMath, Callable[..., Tensor], Callable[[], tuple[Any, ...]]]:
    """Returns the mathematics, a whole update, and what makes its arguments on the GPU."""
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

    def update(nets: Nets, rows: Rows, noise: Tensor, correction: Tensor) -> Tensor:
        grad, critic_stats = math.critic_gradient(nets, rows, noise[0])
        critic_norm = math.critic_step(nets, grad, correction)
        grad, actor_stats = math.actor_gradient(nets, rows, noise[1])
        return torch.cat([critic_stats, actor_stats, critic_norm, math.actor_step(nets, grad, correction)])

    def arguments() -> tuple[Any, ...]:
        generator = torch.Generator("cuda").manual_seed(0)
        draw = lambda *shape: torch.randn(shape, device="cuda", generator=generator)  # noqa: E731
        critic, actor = 0.05 * draw(math.critic.num_params), 0.05 * draw(math.actor.num_params + 1)
        adam = lambda flat: AdamState(flat, torch.zeros_like(flat), torch.zeros_like(flat))  # noqa: E731
        nets = Nets(adam(critic), critic.clone(), adam(actor), torch.ones(1, device="cuda"))
        rows = Rows(draw(B, D), draw(B, A).tanh(), draw(B), draw(B, D), 0 * draw(B), 0 * draw(B) + 1 / B)
        return nets, rows, draw(2, B, A), torch.ones(2, device="cuda")

    return math, update, arguments


def updates_per_s(function: Callable[..., Any], arguments: tuple[Any, ...], repeats: int) -> float:
    """Returns the median over `repeats` of updates per second, by the clock of the host around a synchronised run."""
    for _ in range(20):
        function(*arguments)
    rates = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(200):
            function(*arguments)
        torch.cuda.synchronize()
        rates.append(200 / (time.perf_counter() - begin))
    return statistics.median(rates)


def in_bf16(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Computes matrix products in bfloat16; parameters and the optimizer stay in float32."""

    def cast(*args: Any) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return function(*args)

    return cast


def roofline(math: SACMath) -> tuple[float, float]:
    """Returns the bytes and the floating-point operations that an update can't do without.

    Bytes: Adam reads and writes parameters and two moments and reads gradients, targets are read and written.
    Operations: two for each weight and row in a forward pass and in each of the two backward products.
    """
    critic, actor = math.critic.num_params, math.actor.num_params
    moved = 4.0 * (critic * (6 + 1 + 2) + actor * (6 + 1))
    return moved, 2.0 * B * (critic * (1 + 3 + 2) + actor * (1 + 3))


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA: this benchmark measures a GPU, and torch sees none on this machine", file=sys.stderr)
        return 1
    rows = []
    for width in options.widths:
        math, update, arguments = sac(width)
        for dtype, cast in (("fp32", lambda function: function), ("bf16", in_bf16)):
            eager, compiled = cast(update), Compiled(cast(update))
            kinds = {"eager": eager, "compiled": compiled, "captured": CUDAGraph(Compiled(cast(update)))}
            rates = [f"{updates_per_s(kind, arguments(), options.repeats):,.0f}" for kind in kinds.values()]
            moved, operations = roofline(math)
            rows.append([f"{width}x{width} {dtype}", *rates, f"{moved / 1e6:.1f}", f"{operations / 1e9:.2f}"])
    print(heading(("torch", "numpy")))
    print(torch.cuda.get_device_name())
    header = ["nets", "eager, updates/s", "compiled", "captured", "MB to move", "GFLOP to compute"]
    print(markdown(header, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
