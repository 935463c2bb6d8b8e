"""Greedy evaluation: the returns of a policy on episodes that training never uses."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rayvec.collect.collector import Collector
from rayvec.config import TrainConfig
from rayvec.policies.policy import Policy
from rayvec.training.own_env_and_network import with_own_parts
from rayvec.training.run_dir import load_checkpoint, load_config
from rayvec.training.run_state import acting_weights
from rayvec.training.runs import choose_engine, make_env, network_of, open_env
from rayvec.training.space_checks import check_kept_spaces
from rayvec.vector.ray_vec_env import RayVecEnv

__all__ = ["Evaluation", "Evaluator", "evaluate", "evaluate_run", "greedy_policy", "open_evaluator", "time_limit"]


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


def time_limit(env: RayVecEnv) -> int | None:
    """Returns the steps after which an environment is registered to truncate an episode; None without a limit."""
    return None if env.spec is None else env.spec.max_episode_steps


def evaluate(
    config: TrainConfig,
    env: RayVecEnv,
    module: Any,
    weights: NDArray[np.float32],
    num_episodes: int | None = None,
    *,
    seed: int,
) -> Evaluation:
    """Plays greedy episodes in `env`.

    Each environment gets its quota of episodes beforehand, so that short episodes do not crowd out long ones. All
    environments are reset first. A Ctrl-C closes them, and ends their workers at once.

    Args:
        config: Settings of the run, which say where the policy acts and how long an episode may be.
        env: The environments.
        module: The network, as :class:`rayvec.Policy` takes it.
        weights: Its acting weights, ``float32 [P]``.
        num_episodes: F, the number of episodes; 0 plays none. By default as the settings say.
        seed: Environment i begins with `seed` + i; :meth:`rayvec.config.TrainConfig.eval_seed` gives a seed that
            training never uses.

    Raises:
        ConfigError: An episode has not ended after :meth:`rayvec.config.TrainConfig.longest_eval_episode` steps.
    """
    limit = time_limit(env)
    if num_episodes is None:
        num_episodes = config.num_eval_episodes(limit)
    if num_episodes == 0:
        return Evaluation(np.zeros(0), np.zeros(0, np.int64))
    collector = Collector(env, greedy_policy(module, weights), inference=config.inference, seed=seed)
    try:
        collector.reset(seed=seed)
        stats = collector.play(num_episodes, max_len=config.longest_eval_episode(limit))
    except KeyboardInterrupt:
        env.close(terminate=True)  # else the collector would wait for its pending chunks
        raise
    finally:
        collector.close()
    return Evaluation(stats.returns, stats.lens)


class Evaluator:
    """Plays greedy episodes during training, on environments of its own, and does not affect training.

    Args:
        config: Settings of the run.
        steps: Environment steps taken so far.
        env: The environments.
        interval_steps: Steps between two evaluations.
    """

    def __init__(self, config: TrainConfig, steps: int, env: RayVecEnv, interval_steps: int) -> None:
        self._config, self._env, self._interval_steps = config, env, interval_steps
        self._num_done = steps // interval_steps
        with torch.random.fork_rng(devices=[]):  # an algorithm may draw its weights from the global generator
            self._module = network_of(config, env.single_observation_space, env.single_action_space)

    def is_due(self, steps: int) -> bool:
        """Whether the weights after `steps` environment steps are to be evaluated."""
        return steps // self._interval_steps > self._num_done

    def evaluate(self, steps: int, weights: NDArray[np.float32]) -> Evaluation:
        """Plays the episodes of an evaluation, which are the same every time.

        Args:
            steps: Environment steps taken so far.
            weights: The acting weights, ``float32 [P]``.
        """
        self._num_done = steps // self._interval_steps
        seed = self._config.eval_seed(is_final=False)
        return evaluate(self._config, self._env, self._module, weights, seed=seed)


@contextlib.contextmanager
def open_evaluator(config: TrainConfig, steps: int) -> Iterator[Evaluator | None]:
    """Yields what plays the greedy episodes during training, on this machine without Ray.

    Args:
        config: Settings of the run; None is yielded without `eval_interval_steps`.
        steps: Environment steps taken so far.
    """
    if config.eval_interval_steps is None:
        yield None
        return
    workers = config.workers_per_node if choose_engine(config).num_nodes == 0 else None
    here = replace(config, num_nodes=0, workers_per_node=workers, address=None, stagger_starts=False)
    # a sub-batch of games takes certain numbers of environments only: that of the run fits
    num_envs = config.num_envs if config.native is not None else min(config.num_envs, config.eval_episodes)
    with make_env(here, num_envs, seed=config.eval_seed(is_final=False)) as env:
        try:
            yield Evaluator(config, steps, env, config.eval_interval_steps)
        except KeyboardInterrupt:
            env.close(terminate=True)
            raise


def evaluate_run(
    run_dir: Path | str,
    *,
    num_episodes: int = 100,
    seed: int | None = None,
    checkpoint: str = "checkpoint.pt",
    env: Any = None,
    network: Callable[..., Any] | None = None,
    **changes: Any,
) -> Evaluation:
    """Evaluates a checkpoint of a run.

    Args:
        run_dir: Directory of the run.
        num_episodes: How many episodes to play.
        seed: The seed of the episodes; unset: the run's own, which gives the episodes of the evaluation at its end.
        checkpoint: File in that directory, by default the last checkpoint; as of :func:`rayvec.load`.
        env: The environment of the run, where it was passed in Python and has no name.
        network: The network of the run, likewise.
        changes: Settings of :data:`rayvec.config.ADJUSTABLE` to use in place of the run's own.

    Raises:
        ConfigError: `run_dir` is not the directory of a run, or the environments have other spaces than in training.
        CheckpointError: Its checkpoint is missing or damaged.
    """
    run_dir = Path(run_dir)
    config, state = load_config(run_dir), load_checkpoint(run_dir, checkpoint)
    config = with_own_parts(config.adjusted(**changes), env, network, begun=True)
    config = config if seed is None else replace(config, seed=seed)
    with open_env(config) as envs:
        check_kept_spaces((envs.single_observation_space, envs.single_action_space), state)
        module = network_of(config, envs.single_observation_space, envs.single_action_space)
        return evaluate(config, envs, module, acting_weights(state), num_episodes, seed=config.eval_seed())
