"""Greedy evaluation: how good are these weights, on episodes that nobody trained on?"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rayvec.collector import Collector
from rayvec.policies import Policy
from rayvec.runs import load_run, make_env, make_learner
from rayvec.vector import RayVecEnv

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


def evaluate(
    env: RayVecEnv, module: Any, num_episodes: int, *, seed: int, inference: Literal["worker", "driver"] = "worker"
) -> Evaluation:
    """Plays `num_episodes` episodes in `env`, always taking the most probable action.

    Every environment has its quota beforehand, so that short episodes do not crowd out long ones. The
    episodes that were under way in `env` are abandoned.

    Args:
        env: Where to play.
        module: The net, as :class:`rayvec.Policy` takes it.
        num_episodes: F; 0 does nothing.
        seed: Environment i begins with `seed` + i; :meth:`rayvec.config.TrainConfig.eval_seed` gives one that
            training never uses.
        inference: Where the policy acts, ``"worker"`` or ``"driver"``.
    """
    if num_episodes == 0:
        return Evaluation(np.zeros(0), np.zeros(0, np.int64))
    policy = Policy(module, deterministic=True)
    collector = Collector(env, policy, inference=inference, seed=seed)
    try:
        collector.reset(seed=seed)
        stats = collector.collect(n_episode=num_episodes).stats
    finally:
        collector.close()
    return Evaluation(stats.returns, stats.lens)


def evaluate_run(run_dir: Path, *, num_episodes: int = 100, seed: int | None = None) -> Evaluation:
    """Evaluates the last checkpoint of a run.

    Args:
        run_dir: Directory of the run.
        num_episodes: How many episodes.
        seed: Another seed for the episodes; the run's own gives those that were played at its end.

    Raises:
        ConfigError: `run_dir` is not the directory of a run.
        CheckpointError: Its checkpoint is missing or damaged.
    """
    config, state = load_run(run_dir)
    config = config if seed is None else replace(config, seed=seed)
    with make_env(config) as env:
        learner = make_learner(config, env)
        learner.load_state_dict(state["learner"])
        return evaluate(env, learner.module, num_episodes, seed=config.eval_seed(), inference=config.inference)
