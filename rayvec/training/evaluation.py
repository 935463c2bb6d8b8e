"""Greedy evaluation: the returns of a policy on episodes that training never uses."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rayvec.collect.collector import Collector
from rayvec.policies.policy import Policy
from rayvec.training.run_dir import load_run
from rayvec.training.runs import make_learner, open_env
from rayvec.vector.ray_vec_env import RayVecEnv

__all__ = ["Evaluation", "evaluate", "evaluate_run"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Returns and lengths of episodes that were played greedily.

    Attributes:
        returns: Undiscounted sums of rewards, ``float64 [F]``.
        lens: Numbers of steps, ``int64 [F]``.
    """

    returns: NDArray[np.float64]
    lens: NDArray[np.int64]

    @property
    def return_mean(self) -> float:
        """Mean of the returns; NaN without episodes."""
        return float(self.returns.mean()) if len(self.returns) else math.nan

    @property
    def return_std(self) -> float:
        """Standard deviation of the returns over episodes; NaN without episodes."""
        return float(self.returns.std()) if len(self.returns) else math.nan


def greedy_policy(module: Any, weights: NDArray[np.float32]) -> Policy:
    """Returns a policy that takes the most probable action.

    Args:
        module: The network, as :class:`rayvec.Policy` takes it.
        weights: Weights to act with in place of the module's own.
    """
    policy = Policy(module, deterministic=True)
    policy.load_weights(weights)
    return policy


def evaluate(
    env: RayVecEnv,
    policy: Any,
    num_episodes: int,
    *,
    seed: int,
    inference: Literal["worker", "driver", "node"] = "worker",
) -> Evaluation:
    """Plays `num_episodes` episodes in `env`.

    Each environment gets its quota of episodes beforehand, so that short episodes do not crowd out long ones. All
    environments are reset first.

    Args:
        env: The environments.
        policy: The policy, such as a `greedy_policy`.
        num_episodes: F, the number of episodes; 0 plays none.
        seed: Environment i begins with `seed` + i; :meth:`rayvec.config.TrainConfig.eval_seed` gives a seed that
            training never uses.
        inference: Where the policy acts, ``"worker"``, ``"node"`` or ``"driver"``.
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
        num_episodes: How many episodes to play.
        seed: The seed of the episodes; unset: the run's own, which gives the episodes of the evaluation at its end.
        changes: Settings of :data:`rayvec.config.ADJUSTABLE` to use in place of the run's own.

    Raises:
        ConfigError: `run_dir` is not the directory of a run.
        CheckpointError: Its checkpoint is missing or damaged.
    """
    config, state = load_run(run_dir)
    config = config.adjusted(**changes)
    config = config if seed is None else replace(config, seed=seed)
    with open_env(config) as env:
        module = make_learner(replace(config, learner_device="cpu"), env).module
        policy = greedy_policy(module, state["weights"].numpy())
        return evaluate(env, policy, num_episodes, seed=config.eval_seed(), inference=config.inference)
