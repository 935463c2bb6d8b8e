"""Greedy evaluation: how good are these weights, on episodes that nobody trained on?"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rayvec.collect.collector import Collector
from rayvec.policies.policy import Policy
from rayvec.training.runs import load_run, make_env, make_learner
from rayvec.vector.ray_vec_env import RayVecEnv

__all__ = ["Evaluation", "evaluate", "evaluate_run"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Episodes that were played greedily.

    Attributes:
        returns: Undiscounted sums of rewards, ``float64 [F]``.
        lens: Numbers of steps, ``int64 [F]``.
    """

    returns: NDArray[np.float64]
    lens: NDArray[np.int64]

    @property
    def return_mean(self) -> float:
        """Mean of the returns; NaN where there are none."""
        return float(self.returns.mean()) if len(self.returns) else math.nan

    @property
    def return_std(self) -> float:
        """Standard deviation of the returns over episodes; NaN where there are none."""
        return float(self.returns.std()) if len(self.returns) else math.nan


def greedy_policy(module: Any, weights: NDArray[np.float32]) -> Policy:
    """Returns what takes the most probable action.

    Args:
        module: The net, as :class:`rayvec.Policy` takes it.
        weights: To act with in place of the module's own.
    """
    policy = Policy(module, deterministic=True)
    policy.load_weights(weights)
    return policy


def evaluate(
    env: RayVecEnv, policy: Any, num_episodes: int, *, seed: int, inference: Literal["worker", "driver"] = "worker"
) -> Evaluation:
    """Plays `num_episodes` episodes in `env`.

    Every environment has its quota beforehand, so that short episodes do not crowd out long ones. The
    episodes that were under way in `env` are abandoned.

    Args:
        env: Where to play.
        policy: What acts, such as a `greedy_policy`.
        num_episodes: F; 0 does nothing.
        seed: Environment i begins with `seed` + i; :meth:`rayvec.config.TrainConfig.eval_seed` gives one that
            training never uses.
        inference: Where the policy acts, ``"worker"`` or ``"driver"``.
    """
    if num_episodes == 0:
        return Evaluation(np.zeros(0), np.zeros(0, np.int64))
    collector = Collector(env, policy, inference=inference, seed=seed)
    try:
        collector.reset(seed=seed)
        stats = collector.collect(n_episode=num_episodes).stats
    finally:
        collector.close()
    return Evaluation(stats.returns, stats.lens)


def evaluate_run(run_dir: Path, *, num_episodes: int = 100, seed: int | None = None, **changes: Any) -> Evaluation:
    """Evaluates the last checkpoint of a run.

    Args:
        run_dir: Directory of the run.
        num_episodes: How many episodes.
        seed: Another seed for the episodes; the run's own gives those that were played at its end.
        changes: Settings of :data:`rayvec.config.ADJUSTABLE` in place of the run's own.

    Raises:
        ConfigError: `run_dir` is not the directory of a run.
        CheckpointError: Its checkpoint is missing or damaged.
    """
    config, state = load_run(run_dir)
    config = config.adjusted(**changes)
    config = config if seed is None else replace(config, seed=seed)
    with make_env(config) as env:
        module = make_learner(replace(config, learner_device="cpu"), env).module
        policy = greedy_policy(module, state["weights"].numpy())
        return evaluate(env, policy, num_episodes, seed=config.eval_seed(), inference=config.inference)
