"""Updates of learners as the benchmarks run them: on ranks, on threads of one process, and by plain DDP."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rayvec.bench.harness.ddp import DataParallel
from rayvec.bench.harness.emulated import EmulatedSpec

__all__ = ["WAYS", "LearnerTask"]

_STEPS = {"ppo": 64, "sac": 4, "impala": 64}


@dataclass(frozen=True)
class LearnerTask:
    """What to update, and on how much.

    Attributes:
        algorithm: ``"ppo"``, ``"sac"`` or ``"impala"``.
        num_learners: Ranks, or threads.
        num_envs: Columns of the batch of one rank; of the whole batch with strong scaling.
        minibatch_size: Of one rank, likewise.
        weak: Whether batch and minibatch grow with the number of ranks.
        hidden_sizes: Of the nets.
        obs_size: Numbers in an observation.
        device: ``"cpu"`` or ``"cuda"``.
        address: Of a Ray cluster.
    """

    algorithm: str
    num_learners: int = 1
    num_envs: int = 16
    minibatch_size: int = 1024
    weak: bool = False
    hidden_sizes: tuple[int, ...] = (64, 64)
    obs_size: int = 17
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
    def rows(self) -> int:
        """Steps of the whole batch."""
        return self.columns * _STEPS[self.algorithm]

    @property
    def minibatch(self) -> int:
        """Rows of a minibatch of all ranks."""
        return min(self.minibatch_size * self.factor, self.rows)

    def config(self) -> Any:
        """Returns the settings of the algorithm."""
        from rayvec.config import CONFIGS

        common: dict[str, Any] = {
            "num_envs": self.columns,
            "num_steps": _STEPS[self.algorithm],
            "hidden_sizes": tuple(self.hidden_sizes),
            "learner_device": self.device,
        }
        if self.algorithm == "ppo":
            common["minibatch_size"] = self.minibatch
        elif self.algorithm == "sac":
            common |= {"batch_size": self.minibatch_size * self.factor, "learning_starts": 1, "replay_size": 100_000}
        else:
            common["num_minibatches"] = max(1, min(self.columns, self.rows // self.minibatch))
        return CONFIGS[self.algorithm](**common)

    def learner(self) -> Callable[[], Any]:
        """Returns what makes the learner."""
        from rayvec.training.runs import LEARNERS

        config, env = self.config(), EmulatedSpec(obs_size=self.obs_size)()
        return functools.partial(LEARNERS[type(config)], env.observation_space, env.action_space, config)

    def batch(self, learner: Any) -> Any:
        """Returns a batch of random observations and rewards, with the learner's own actions."""
        from rayvec.data import Batch, CollectStats
        from rayvec.envs.factory import EnvFactory
        from rayvec.policies.policy import Policy
        from rayvec.pools.serial import SerialPool
        from rayvec.rollout.loop import rollout

        pool = SerialPool(EnvFactory.build([EmulatedSpec(obs_size=self.obs_size)] * self.columns))
        chunk = rollout(pool, Policy(learner.module), _STEPS[self.algorithm])
        pool.close()
        rng = np.random.default_rng(0)
        obs = rng.standard_normal(chunk.obs.shape).astype(np.float32)
        chunk = replace(chunk, obs=obs, rew=rng.standard_normal(chunk.rew.shape))
        fields: dict[str, Any] = dict.fromkeys(CollectStats.__dataclass_fields__, 0)
        fields |= {"returns": np.zeros(0), "lens": np.zeros(0, np.int64), "time_split_s": {}}
        fields |= {"n_collected_steps": self.rows, "collect_time_s": 1.0, "steps_per_s": float(self.rows)}
        fields["weights_versions"] = (0, 0)
        return Batch((chunk,), CollectStats(**fields))


class Updates:
    """A learner, or a group of them, that updates on the same batch again and again."""

    transport = "none"

    def __init__(self, task: LearnerTask, learner: Any, batch: Any) -> None:
        self._task, self._learner, self._batch = task, learner, batch
        self._updates = 0

    def advance(self) -> int:
        """Updates once; returns how many rows of minibatches were learned from."""
        metrics = self._learner.update(self._batch)
        if self._task.algorithm == "sac":
            before, self._updates = self._updates, int(metrics.get("num_updates", 0))
            return (self._updates - before) * self._task.minibatch_size * self._task.factor
        return self._task.rows * (getattr(self._task.config(), "num_epochs", 1))

    def close(self) -> None:
        """Ends it."""
        if hasattr(self._learner, "close"):
            self._learner.close()


def threads(task: LearnerTask) -> Updates:
    """One process, torch computing with as many threads as there would be ranks."""
    import torch

    torch.set_num_threads(task.num_learners)
    learner = task.learner()()
    return Updates(task, learner, task.batch(learner))


def ranks(task: LearnerTask) -> Updates:
    """A :class:`rayvec.LearnerGroup`."""
    import rayvec

    if task.num_learners == 1:
        return threads(task)
    group = rayvec.LearnerGroup(task.learner(), task.num_learners, task.device, address=task.address)
    found = Updates(task, group, task.batch(group))
    found.transport = "ranks"
    return found


WAYS: dict[str, Callable[[LearnerTask], Any]] = {"ranks": ranks, "threads": threads, "ddp": DataParallel}
"""Ways to update, by the name that rows have."""
