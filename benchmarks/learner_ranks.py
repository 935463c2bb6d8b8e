"""Two ranks on two cores against one on one, for whole PPO updates on the same batch; and the bare sums. Needs no Ray.

    python benchmarks/learner_ranks.py updates
    python benchmarks/learner_ranks.py updates --nets cnn --minibatches 256 --compile
    python benchmarks/learner_ranks.py sums

Every way to learn has processes of its own, which wait on a pipe while another way is measured; all take turns,
so that what else the machine does falls on all alike. A ratio is that of two neighbours in time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gymnasium import spaces
from measure import heading, markdown, ratio
from torch import Tensor, nn

from rayvec.config import PPOConfig
from rayvec.data import Batch, Chunk, CollectStats
from rayvec.distributed.collective import CollectiveRanks
from rayvec.distributed.shared_memory import SharedMemoryRanks
from rayvec.learners.ppo import PPOLearner
from rayvec.learners.ranks import ALONE, Ranks
from rayvec.policies.policy import Policy


@dataclass(frozen=True)
class Net:
    """A net and the batch that it learns from: T steps of N environments."""

    obs: spaces.Box
    act: spaces.Space[Any]
    hidden_sizes: tuple[int, ...]
    num_steps: int
    num_envs: int
    num_epochs: int


_VECTOR, _IMAGES = spaces.Box(-np.inf, np.inf, (17,), np.float32), spaces.Box(0, 255, (4, 84, 84), np.uint8)
_BOX, _DISCRETE = spaces.Box(-1, 1, (6,), np.float32), spaces.Discrete(4)
NETS = {
    "64": Net(_VECTOR, _BOX, (64, 64), 128, 64, 4),
    "256": Net(_VECTOR, _BOX, (256, 256), 128, 64, 2),
    "cnn": Net(_IMAGES, _DISCRETE, (512,), 64, 16, 1),
}


@dataclass(frozen=True)
class Way:
    """How many processes learn together, with how many threads each, and how they sum."""

    name: str
    size: int
    threads: int
    sums: str
    """"half" is one rank's part without another beside it: what two could gain at most."""


WAYS = (
    Way("one rank", 1, 1, "alone"),
    Way("one rank, 2 threads", 1, 2, "alone"),
    Way("half the rows alone", 1, 1, "half"),
    Way("2 ranks, shared memory", 2, 1, "shared memory"),
    Way("2 ranks, gloo", 2, 1, "gloo"),
    Way("2 ranks, DDP over gloo", 2, 1, "ddp"),
)


def make_ranks(way: str, rank: int, size: int, pipe: Connection) -> Any:
    """Lets a process meet the others of its way; rank 0 tells the address."""
    if size == 1:
        return ALONE
    if way == "shared memory":
        ranks = SharedMemoryRanks(rank, size, None if rank == 0 else pipe.recv())
        if rank == 0:
            pipe.send(ranks.path)
        return ranks
    path = f"{tempfile.mkdtemp(prefix='rayvec-ranks-')}/store" if rank == 0 else pipe.recv()
    if rank == 0:
        pipe.send(path)
    if way == "ddp":
        dist.init_process_group("gloo", store=dist.FileStore(f"{path}-ddp", size), rank=rank, world_size=size)
    return CollectiveRanks(rank, size, dist.FileStore(path, size))


class _Averaged(nn.Module):
    """A module whose gradients DistributedDataParallel averages; all else is the module's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=False)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner.module, name)

    def forward(self, rows: Any) -> Any:
        return self.inner(rows)


class _DDPRanks:
    """Sums by a collective, but for the gradient, of which DDP has made the mean already."""

    def __init__(self, ranks: Ranks, grad: Tensor) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self._ranks, self._grad = ranks, grad

    def sum_(self, tensor: Tensor) -> Tensor:
        return tensor.mul_(self.size) if tensor is self._grad else self._ranks.sum_(tensor)


def make_learner(net: Net, minibatch_size: int, compile: bool) -> PPOLearner:
    """Makes a learner with the usual settings."""
    config = PPOConfig(
        total_steps=10**9,
        num_envs=net.num_envs,
        num_steps=net.num_steps,
        minibatch_size=minibatch_size,
        num_epochs=net.num_epochs,
        hidden_sizes=net.hidden_sizes,
        shared_trunk=net.obs is _IMAGES,
        learning_rate=1e-4,
        compile=compile,
    )
    return PPOLearner(net.obs, net.act, config)


def make_batch(net: Net, learner: PPOLearner) -> Batch:
    """Makes random observations and rewards, and the actions that the policy takes on them."""
    rng, lead = np.random.default_rng(0), (net.num_steps, net.num_envs)
    shape = (net.num_steps + 1, net.num_envs, *net.obs.shape)
    is_image = net.obs.dtype == np.uint8
    obs = rng.integers(0, 255, shape, np.uint8) if is_image else rng.normal(size=shape).astype(np.float32)
    policy = Policy(learner.module)
    noise = (
        rng.random((*lead, policy.noise.lanes))
        if policy.noise.kind == "uniform"
        else rng.normal(size=(*lead, policy.noise.lanes))
    )
    steps = [policy.act(obs[t], noise[t]) for t in range(net.num_steps)]
    none = np.zeros(lead, bool)
    chunk = Chunk(
        env_ids=np.arange(net.num_envs),
        obs=obs[:-1],
        act=np.stack([act for act, _ in steps]),
        rew=rng.normal(size=lead),
        terminated=none,
        truncated=none,
        valid=~none,
        last_obs=obs[-1],
        final_index=np.zeros((0, 2), np.int64),
        final_obs=obs[-1][:0],
        extras={name: np.stack([extras[name] for _, extras in steps]) for name in steps[0][1]},
    )
    stats = CollectStats(np.zeros(0), np.zeros(0, np.int64), none.size, 0, 0, 1.0, 1.0, {}, (0, 0))
    return Batch((chunk,), stats)


def learn(way: Way, rank: int, net: Net, minibatch_size: int, compile: bool, pipe: Connection) -> None:
    """Is one rank: updates whenever it is told how often, and answers with seconds for each update."""
    torch.set_num_threads(way.threads)
    ranks, parts = make_ranks(way.sums, rank, way.size, pipe), 2 if way.sums == "half" else way.size
    learner = make_learner(net, minibatch_size * way.size // parts, compile)
    batch = make_batch(net, learner)
    bounds = [net.num_envs * k // parts for k in range(parts + 1)]
    shard = Batch((batch.chunks[0].columns(bounds[rank], bounds[rank + 1]),), batch.stats)
    if way.sums == "ddp":
        ranks = _DDPRanks(ranks, learner._flat.grad)
        learner.module = _Averaged(learner.module)  # type: ignore[assignment]
    learner.ranks = ranks
    while count := pipe.recv():
        ranks.sum_(torch.zeros(1))  # so that all begin together
        begin_s = time.perf_counter()
        for _ in range(count):
            learner.update(shard)
        pipe.send((time.perf_counter() - begin_s) / count)


def sum_all(sums: str, rank: int, sizes: list[int], pipe: Connection) -> None:
    """Is one rank: for every size that it is told to, sums often, and answers with seconds for each sum."""
    torch.set_num_threads(1)
    ranks = make_ranks(sums, rank, 2, pipe)
    tensors = {size: torch.zeros(size) for size in sizes}
    while size := pipe.recv():
        count = max(20, min(1000, 10_000_000 // size))
        times_s = []
        for _ in range(count):
            begin_s = time.perf_counter()
            ranks.sum_(tensors[size])
            times_s.append(time.perf_counter() - begin_s)
        pipe.send(statistics.median(times_s))


class Processes:
    """Ranks in processes of their own, asked together."""

    def __init__(self, size: int, target: Callable[..., None], args: Callable[[int], tuple[Any, ...]]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(*args(rank), theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        if size > 1:
            address = self._pipes[0].recv()
            for pipe in self._pipes[1:]:
                pipe.send(address)

    def ask(self, question: int) -> float:
        """Returns the answer of the slowest."""
        for pipe in self._pipes:
            pipe.send(question)
        return float(max(pipe.recv() for pipe in self._pipes))

    def close(self) -> None:
        """Ends them."""
        for pipe in self._pipes:
            pipe.send(0)
        for process in self._processes:
            process.join(10)
            process.kill()


def updates(args: argparse.Namespace) -> None:
    """Speed-up of whole updates over one rank on one core."""
    ways = [way for way in WAYS if way.sums != "ddp" or not args.compile]  # DDP's hooks have no place in our graph
    rows = []
    for name in args.nets:
        net = NETS[name]
        for minibatch_size in args.minibatches:
            if minibatch_size > net.num_steps * net.num_envs:
                continue
            all_ways = [
                Processes(way.size, learn, lambda rank, way=way: (way, rank, net, minibatch_size, args.compile))  # noqa: B023
                for way in ways
            ]
            count = max(1, round(args.seconds / min(each.ask(1) for each in all_ways)))
            times_s = [[each.ask(count) for each in all_ways] for _ in range(args.repeats)]
            for each in all_ways:
                each.close()
            columns = list(zip(*times_s, strict=True))
            alone = f"{statistics.median(columns[0]) * 1e3:.1f}"
            rows.append([name, minibatch_size, alone, *(ratio(columns[0], column) for column in columns[1:])])
            print(rows[-1], flush=True)
    print()
    print(heading(("torch", "numpy")))
    print("Speed-up over one rank on one core: median, and smallest to largest, of whole updates of the same batch.\n")
    print(markdown(["net", "minibatch", "one rank, ms", *(way.name for way in ways[1:])], rows))


def sums(args: argparse.Namespace) -> None:
    """Time of one sum over two processes."""
    ways = ("shared memory", "gloo")
    pairs = [Processes(2, sum_all, lambda rank, way=way: (way, rank, args.sizes)) for way in ways]  # type: ignore[misc]
    rows = []
    for size in args.sizes:
        measured = [[pair.ask(size) * 1e6 for pair in pairs] for _ in range(args.repeats)]
        columns = list(zip(*measured, strict=True))
        rows.append([f"{size:,}", *(f"{statistics.median(c):.0f} ({min(c):.0f} to {max(c):.0f})" for c in columns)])
    for pair in pairs:
        pair.close()
    print(heading(("torch", "numpy")))
    print("Microseconds for the sum of float32 over two processes, median of medians.\n")
    print(markdown(["floats", *ways], rows))


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("updates", help=updates.__doc__)
    command.add_argument("--nets", nargs="+", default=list(NETS), choices=NETS)
    command.add_argument("--minibatches", nargs="+", type=int, default=[256, 1024, 4096])
    command.add_argument("--compile", action="store_true", help="all ways, so without DDP")
    command.add_argument("--repeats", type=int, default=7)
    command.add_argument("--seconds", type=float, default=1.0, help="about how long to measure one way at a time")
    command.set_defaults(run=updates)
    command = commands.add_parser("sums", help=sums.__doc__)
    command.add_argument("--sizes", nargs="+", type=int, default=[1_000, 10_000, 70_000, 300_000, 1_700_000])
    command.add_argument("--repeats", type=int, default=7)
    command.set_defaults(run=sums)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
