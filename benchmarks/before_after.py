"""What a change costs or gains: pieces of rayvec in two checkouts, alternately, on the same cores.

    git worktree add ../before COMMIT
    python benchmarks/before_after.py ../before
    python benchmarks/before_after.py ../before --only "env.step, shm" "chunks, shm" --repeats 15
    python benchmarks/before_after.py ../before --quick

Each piece runs in a process of its own in each checkout, which is the first entry of its PYTHONPATH; both run the code
of this directory. A row has the median rate in both checkouts, and the median ratio of neighbouring windows: after over
before, by the clock and per second of CPU time of all processes. More is better.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import tyro
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from measure import check_only, heading, interleaved, simulated_cluster
from peer_process import HERE, Measured, PeerProcess

import rayvec
from rayvec.bench.terminal import ratio, show_table, spread

Advance = Callable[[], int]


def alternating(obs: Any) -> Any:
    """Returns one of two actions for each observation."""
    return np.arange(len(obs)) % 2


@contextlib.contextmanager
def placed(remote: bool) -> Iterator[dict[str, Any]]:
    """Yields where two workers run: on this machine without Ray, or on a simulated node that TCP reaches."""
    if not remote:
        yield {"num_nodes": 0, "workers_per_node": 2}
        return
    with simulated_cluster(0, 2):
        yield {"num_nodes": 1, "workers_per_node": 2}


class Images(gymnasium.Env[Any, Any]):
    """Images of 100 kB, all the same, in episodes without an end."""

    observation_space = gymnasium.spaces.Box(0, 255, (320, 312), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)
    _image = np.zeros((320, 312), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins an episode."""
        return self._image, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Returns the image."""
        return self._image, 0.0, False, False, {}


def stepping(
    make: Any = "CartPole-v1", num_envs: int = 64, remote: bool = False, chunk_steps: int = 0
) -> Iterator[Advance]:
    """`env.step`, or chunks of so many steps with the policy in the workers and the next one prefetched."""
    with placed(remote) as where:
        env = (
            rayvec.RayVecEnv([make] * 2, native=True, **where)
            if isinstance(make, partial)
            else rayvec.RayVecEnv(make, num_envs, **where)
        )
        env.reset(seed=0)
        actions = np.arange(env.num_envs) % 2
        collector = rayvec.Collector(env, alternating, prefetch=True) if chunk_steps else None

        def advance() -> int:
            if collector is not None:
                return int(collector.collect(n_step=chunk_steps * env.num_envs).stats.n_collected_steps)
            env.step(actions)
            return int(env.num_envs)

        yield advance
        env.close()


def tianshou() -> Iterator[Advance]:
    """Rayvec's Collector for Tianshou over 32 CartPoles, with a discrete actor."""
    import torch
    from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
    from tianshou.data import VectorReplayBuffer
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.discrete import DiscreteActor

    import rayvec.tianshou

    torch.set_num_threads(1)
    with placed(remote=True) as where:
        env = rayvec.tianshou.RayVectorEnv([partial(gymnasium.make, "CartPole-v1")] * 32, **where)
        actor = DiscreteActor(preprocess_net=Net(state_shape=(4,), hidden_sizes=[64, 64]), action_shape=2)
        policy = DiscreteActorPolicy(actor=actor, action_space=env.action_space[0])
        collector = rayvec.tianshou.Collector(policy, env, VectorReplayBuffer(20_000, 32))
        collector.reset()
        yield lambda: int(collector.collect(n_step=32 * 64).n_collected_steps)
        collector.close()


def start() -> Iterator[Advance]:
    """Starts, resets and ends 96 CartPoles in two workers."""

    def advance() -> int:
        with rayvec.RayVecEnv("CartPole-v1", 96, num_nodes=0, workers_per_node=2) as env:
            env.reset(seed=0)
        return 96

    yield advance


def update(
    algorithm: str, compile: bool = False, num_learners: int = 1, rows: int = 256, images: bool = False
) -> Iterator[Advance]:
    """Updates on minibatches of some rows."""
    import torch
    from learner_task import LearnerTask

    torch.set_num_threads(1)
    sizes: dict[str, Any] = {"num_envs": 1, "num_steps": 16, "hidden_sizes": (256, 256)} if algorithm == "sac" else {}
    if num_learners > 1:
        sizes = {"num_steps": rows // 16, "images": images}
    task = LearnerTask(algorithm, minibatch_size=rows, act_size=6, compile=compile, **sizes)
    batch = task.batch(task.learner())
    group: Any = rayvec.LearnerGroup(task.learner, num_learners, num_nodes=0) if num_learners > 1 else None
    with group or contextlib.nullcontext(task.learner()) as learner:

        def advance() -> int:
            learner.update(batch)
            return task.samples

        yield advance


NATIVE = partial(CartPoleVectorEnv, 1024)
"""One of two native sub-batches."""
PIECES: dict[str, tuple[Callable[..., Iterator[Advance]], dict[str, Any]]] = {
    "env.step, shm": (stepping, {}),
    "env.step, tcp": (stepping, {"remote": True}),
    "images, shm": (stepping, {"make": Images, "num_envs": 16}),
    "images, tcp": (stepping, {"make": Images, "num_envs": 16, "remote": True}),
    "chunks, shm": (stepping, {"chunk_steps": 128}),
    "chunks, tcp": (stepping, {"chunk_steps": 128, "remote": True}),
    "native, env.step": (stepping, {"make": NATIVE}),
    "native, chunks": (stepping, {"make": NATIVE, "chunk_steps": 32}),
    "Tianshou's collector": (tianshou, {}),
    "start of 96 environments": (start, {}),
    "PPO": (update, {"algorithm": "ppo"}),
    "PPO, compiled": (update, {"algorithm": "ppo", "compile": True}),
    "PPO, two ranks": (update, {"algorithm": "ppo", "num_learners": 2, "rows": 4096}),
    "PPO, two ranks, images": (update, {"algorithm": "ppo", "num_learners": 2, "images": True}),
    "PPO, two ranks, compiled": (update, {"algorithm": "ppo", "num_learners": 2, "rows": 4096, "compile": True}),
    "SAC": (update, {"algorithm": "sac"}),
    "SAC, compiled": (update, {"algorithm": "sac", "compile": True}),
    "IMPALA": (update, {"algorithm": "impala"}),
}
"""What makes a piece, and its arguments. Rates are environment steps/s, environments/s, or rows of minibatches/s."""


def piece(task: dict[str, Any]) -> Iterator[Advance]:
    """Makes a piece by its name; see :mod:`peer_process`."""
    make, arguments = PIECES[task["name"]]
    yield from make(**arguments)


def compare(name: str, checkouts: dict[str, Path], seconds: float, repeats: int) -> list[str]:
    """Returns the row of a piece."""
    with contextlib.ExitStack() as stack:
        ways: dict[str, Callable[[], Measured]] = {}
        for label, checkout in checkouts.items():
            process = stack.enter_context(PeerProcess("before_after:piece", {"name": name}, checkout=checkout))
            if process.missing:
                return [name, f"{label}: {process.missing}", "", "", ""]
            process.measure(0.0)
            ways[label] = lambda process=process: process.measure(seconds)  # type: ignore[misc]
        found = interleaved(ways, repeats)
    rates = {label: [each.count / each.wall_s for each in windows] for label, windows in found.items()}
    by_cpu = {label: [each.count / max(each.cpu_s, 1e-3) for each in windows] for label, windows in found.items()}
    spreads = [spread(rates[label]) for label in checkouts]
    return [name, *spreads, ratio(rates["after"], rates["before"]), ratio(by_cpu["after"], by_cpu["before"])]


def main(
    old: tyro.conf.Positional[Path],
    new: Path = HERE.parent,
    only: tuple[str, ...] = tuple(PIECES),
    repeats: int = 7,
    window: float = 1.0,
    quick: bool = False,
) -> None:
    """Measures and prints a table.

    Args:
        old: Checkout before the change.
        new: Checkout after it.
        only: Which pieces.
        repeats: Windows of each piece in each checkout.
        window: Seconds of a window at least.
        quick: Two short windows of the pieces that start no Ray and compile nothing: less than a minute.
    """
    check_only(only, PIECES)
    if quick:
        slow = ("tcp", "Tianshou", "compiled", "ranks")
        only = tuple(name for name in only if not any(word in name for word in slow))
        repeats, window = 2, 0.3
    checkouts = {"before": old.resolve(), "after": new.resolve()}
    print(heading())
    rows = []
    for name in only:
        rows.append(compare(name, checkouts, window, repeats))
        print(" · ".join(rows[-1]), file=sys.stderr, flush=True)
    show_table(f"{old} and {new}", ["", "before, 1/s", "after, 1/s", "after / before", "by CPU time"], rows)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
