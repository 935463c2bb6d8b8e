"""Updates of learners as the benchmarks run them: on ranks, on threads of one process, and by plain DDP."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
import torch.distributed as dist
from gymnasium import spaces

import rayvec
from rayvec.bench.harness.ddp import UPDATES
from rayvec.bench.harness.processes import Processes
from rayvec.bench.settings import LEARNER_STEPS
from rayvec.config import CONFIGS
from rayvec.data.partition import even_bounds
from rayvec.distributed.allreduce_shared_memory import SharedMemoryRanks
from rayvec.distributed.allreduce_torch import CollectiveRanks
from rayvec.training.runs import LEARNERS

__all__ = ["DDP", "Gloo", "Group", "LearnerTask", "OneShare", "ProcessGroup", "SharedMemory", "Threads"]


@dataclass(frozen=True)
class LearnerTask:
    """What to update, and on how much.

    Attributes:
        algorithm: ``"ppo"``, ``"sac"`` or ``"impala"``.
        num_learners: Ranks, or threads.
        num_envs: Columns of the batch of one rank; of the whole batch with strong scaling.
        num_steps: Steps of each; None for the algorithm's own number.
        minibatch_size: Of one rank; of all with strong scaling.
        weak: Whether batch and minibatch grow with the number of ranks.
        hidden_sizes: Of the nets.
        obs_size: Numbers in an observation.
        act_size: Numbers in an action; 0 for one of two.
        images: Whether observations are four frames of 84x84 pixels instead.
        compile: Whether rayvec's gradients are compiled.
        device: ``"cpu"`` or ``"cuda"``.
        address: Of a Ray cluster.
    """

    algorithm: str
    num_learners: int = 1
    num_envs: int = 16
    num_steps: int | None = None
    minibatch_size: int = 1024
    weak: bool = False
    hidden_sizes: tuple[int, ...] = (64, 64)
    obs_size: int = 17
    act_size: int = 0
    images: bool = False
    compile: bool = False
    device: str = "cpu"
    address: str | None = None

    @property
    def factor(self) -> int:
        """How many times the batch of one rank there is."""
        return self.num_learners if self.weak else 1

    @property
    def columns(self) -> int:
        """Environments of the whole batch."""
        return self.num_envs * self.factor

    @property
    def steps(self) -> int:
        """Steps of each environment."""
        return self.num_steps or LEARNER_STEPS[self.algorithm]

    @property
    def rows(self) -> int:
        """Steps of the whole batch."""
        return self.columns * self.steps

    @property
    def minibatch(self) -> int:
        """Rows of a minibatch of all ranks."""
        return min(self.minibatch_size * self.factor, self.rows)

    @property
    def samples(self) -> int:
        """Rows of minibatches in an update of the whole batch."""
        if self.algorithm == "sac":
            return self.rows * self.minibatch_size * self.factor
        return self.rows * int(getattr(self.config(), "num_epochs", 1))

    def config(self) -> Any:
        """Returns the settings of the algorithm."""
        own: dict[str, dict[str, Any]] = {
            "ppo": {
                "minibatch_size": self.minibatch,
                "num_epochs": 8,
                "compile": self.compile,
                "shared_trunk": self.images,
            },
            "sac": {
                "batch_size": self.minibatch_size * self.factor,
                "learning_starts": 1,
                "replay_size": 100_000,
                "compile": self.compile,
            },
            "impala": {
                "num_minibatches": max(1, min(self.columns, self.rows // self.minibatch)),
                "shared_trunk": self.images,
                "compile": self.compile,
            },
        }
        config_class: Any = CONFIGS[self.algorithm]
        return config_class(
            num_envs=self.columns,
            num_steps=self.steps,
            hidden_sizes=tuple(self.hidden_sizes),
            learner_device=self.device,
            **own[self.algorithm],
        )

    def env(self) -> _Noise:
        """Makes an environment with the observations and actions of the batch."""
        return _Noise(self)

    def learner(self, **changes: Any) -> Callable[[], Any]:
        """Returns a function that makes the learner, some of whose settings may be changed."""
        config, env = replace(self.config(), **changes), self.env()
        return functools.partial(LEARNERS[type(config)], env.observation_space, env.action_space, config)

    def batch(self, learner: Any) -> rayvec.Batch:
        """Returns a batch of random observations and rewards, with the learner's own actions."""
        with rayvec.RayVecEnv([self.env] * self.columns, num_nodes=0, workers_per_node=0) as env:
            return rayvec.Collector(env, rayvec.Policy(learner.module)).collect(n_step=self.rows)

    def share(self, learner: Any, rank: int) -> rayvec.Batch:
        """Returns the columns of the batch that belong to a rank."""
        batch = self.batch(learner)
        first, last = even_bounds(self.columns, self.num_learners)[rank : rank + 2]
        return rayvec.Batch((batch.chunks[0].columns(first, last),), batch.stats)


class _Noise(gymnasium.Env[Any, Any]):
    """An environment of random observations and rewards, whose episodes never end."""

    def __init__(self, task: LearnerTask) -> None:
        frames, numbers = spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Box(-np.inf, np.inf, (task.obs_size,))
        self.observation_space = frames if task.images else numbers
        self.action_space = spaces.Box(-1, 1, (task.act_size,)) if task.act_size else spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), float(self.np_random.standard_normal()), False, False, {}


class Threads:
    """One process, in which torch computes with as many threads as there would be ranks."""

    def __init__(self, task: LearnerTask) -> None:
        torch.set_num_threads(task.num_learners)
        self._learner = task.learner()()
        self._batch, self._samples = task.batch(self._learner), task.samples

    def advance(self) -> int:
        """Updates once; returns how many rows of minibatches were learned from."""
        self._learner.update(self._batch)
        return self._samples

    def close(self) -> None:
        """Ends it."""


class Group(Threads):
    """A :class:`rayvec.LearnerGroup` on Ray, or with ``num_nodes=0`` without it."""

    def __init__(self, task: LearnerTask, num_nodes: Literal[0] | None = None) -> None:
        where: dict[str, Any] = {"address": task.address} if num_nodes is None else {"num_nodes": num_nodes}
        self._learner = rayvec.LearnerGroup(task.learner(), task.num_learners, task.device, **where)
        self._batch, self._samples = task.batch(self._learner), task.samples

    def close(self) -> None:
        """Ends the ranks."""
        self._learner.close()


ProcessGroup = functools.partial(Group, num_nodes=0)


class OneShare(Threads):
    """One rank's share of the rows, learned from without the other ranks; samples count as if all had learned."""

    def __init__(self, task: LearnerTask) -> None:
        torch.set_num_threads(1)
        n, columns = task.num_learners, even_bounds(task.columns, task.num_learners)[1]
        smaller: dict[str, dict[str, Any]] = {  # as many minibatches, each of one share
            "ppo": {"minibatch_size": max(1, task.minibatch // n)},
            "sac": {
                "batch_size": max(1, task.minibatch_size * task.factor // n),
                "update_to_data": task.columns / columns,
            },
            "impala": {},
        }
        self._learner = task.learner(**smaller[task.algorithm])()
        self._batch, self._samples = task.share(self._learner, 0), task.samples


class SharedMemory:
    """rayvec's learner on ranks that are processes of this machine, without Ray.

    Args:
        task: What to update.
        sums: Of gradients: ``"shared-memory"``, ``"gloo"``, or ``"ddp"``, which is torch's own module.
    """

    def __init__(self, task: LearnerTask, sums: str = "shared-memory") -> None:
        with tempfile.TemporaryDirectory(prefix="rayvec-ranks-") as directory:  # all have met when they are made
            path = os.path.join(directory, "store")
            ranks = range(task.num_learners)
            self._ranks = Processes(_make_rank, [(task, sums, rank, path) for rank in ranks])
        self._samples = task.samples

    def advance(self) -> int:
        """Updates once."""
        self._ranks.ask(True)
        return self._samples

    def close(self) -> None:
        """Ends them."""
        self._ranks.close()


Gloo = functools.partial(SharedMemory, sums="gloo")
DDP = functools.partial(SharedMemory, sums="ddp")


def _make_rank(task: LearnerTask, sums: str, rank: int, path: str) -> Callable[[Any], Any]:
    """Returns what a rank does on each request, in its process."""
    torch.set_num_threads(1)
    size = task.num_learners
    store = dist.FileStore(path, size)  # type: ignore[attr-defined]
    if sums == "ddp":
        on_gpu = task.device == "cuda"
        dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=size)
        device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
        update = UPDATES[task.algorithm](task, device)
        return lambda _: update()
    learner = task.learner()()
    batch = task.share(learner, rank)
    if sums == "gloo":
        learner.ranks = CollectiveRanks(rank, size, store)
    elif rank:
        learner.ranks = SharedMemoryRanks(rank, size, store.get("block").decode())
    elif size > 1:
        learner.ranks = SharedMemoryRanks(0, size)
        store.set("block", learner.ranks.path)
    return lambda _: learner.update(batch) and None
