"""One iteration of a training: collect steps, update the learner, publish its weights.

The same loop body runs in the driver and on every decentralized rank. A rank has its share of the environments, other
ranks with which its learner sums, and the rule for stragglers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from gymnasium import Space

from rayvec.collect.collector import Collector
from rayvec.collect.quotas import episode_quotas
from rayvec.config import TrainConfig
from rayvec.data import Batch, CollectStats, EpisodeStats
from rayvec.distributed.stragglers import Stragglers
from rayvec.errors import ConfigError
from rayvec.learners.base import Learner, set_learning_rate
from rayvec.policies.policy import Policy
from rayvec.training.atomic_files import local_path
from rayvec.training.checkpoint import check_kept_spaces, restore, spaces_to_bytes
from rayvec.training.evaluation import eval_limits, evaluate
from rayvec.training.run_dir import load_run
from rayvec.training.runs import LEARNERS
from rayvec.vector.ray_vec_env import RayVecEnv

WINDOW = 100
"""Returns and lengths in metrics are about this many last episodes."""


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        steps: Environment steps taken.
        episodes: Episodes ended.
        iterations: Rounds of sampling and learning.
        wall_s: Wall time up to the last checkpoint, in seconds.
        recent_returns: Returns of the last `WINDOW` episodes.
        recent_lens: Their lengths in steps.
        recent_metrics: By name, numbers in the info of their last steps; NaN where it had none.
        eval_return: Mean return of the latest greedy evaluation.
        best_return: Largest mean return of the greedy evaluations.
        tracker_run: Id of the run of Weights & Biases that belongs to it.
        own: What callbacks keep in checkpoints, by name: tensors and plain values.
        has_cut: Whether a warning has said that episodes of evaluations are cut.
        learning_rate: The learning rate that a callback has set; None: the schedule holds.
    """

    steps: int = 0
    episodes: int = 0
    iterations: int = 0
    wall_s: float = 0.0
    recent_returns: list[float] = field(default_factory=list)
    recent_lens: list[int] = field(default_factory=list)
    recent_metrics: dict[str, list[float]] = field(default_factory=dict)
    eval_return: float | None = None
    best_return: float | None = None
    tracker_run: str | None = None
    own: dict[str, Any] = field(default_factory=dict)
    has_cut: bool = False
    learning_rate: float | None = None

    def add(self, stats: CollectStats) -> None:
        """Counts an iteration."""
        self.steps += stats.n_collected_steps
        self.episodes += stats.n_collected_episodes
        self.iterations += 1
        self.recent_returns = [*self.recent_returns, *stats.returns.tolist()][-WINDOW:]
        self.recent_lens = [*self.recent_lens, *stats.lens.tolist()][-WINDOW:]
        for name, values in stats.metrics.items():
            self.recent_metrics[name] = [*self.recent_metrics.get(name, []), *values.tolist()][-WINDOW:]


@dataclass(slots=True)
class Iteration:
    """What one iteration did.

    Attributes:
        stats: Statistics of the collected steps.
        metrics: Metrics of the update; none if the learner only stored the steps.
        times_s: Wall time by activity, in seconds.
        num_cut: How many ranks stopped early because the others had their steps.
        notes: Lines for the driver to log, where a rank made the iteration, such as which workers were restarted.
        state: The state of the run after the iteration, if it was asked for; see :meth:`Trainer.state`.
        evaluation: The greedy evaluation of its weights, where there was one.
    """

    stats: CollectStats
    metrics: Mapping[str, float]
    times_s: dict[str, float]
    num_cut: int = 0
    notes: list[str] = field(default_factory=list)
    state: dict[str, Any] | None = None
    evaluation: EpisodeStats | None = None

    @property
    def all_times_s(self) -> dict[str, float]:
        """Wall time by activity, and with a slash by what environments and workers did while steps were collected."""
        return {**self.times_s, **{f"collect/{name}": s for name, s in self.stats.time_split_s.items()}}


class RunEnvs:
    """The environments of a run, as a callback reaches them: all of them, on whatever workers, nodes and ranks.

    A call waits for the chunk that workers are taking, so it takes effect between two steps of each environment. The
    environments of evaluations are others.

    Args:
        trainer: Makes the iterations.
        num_envs: How many environments there are.
    """

    def __init__(self, trainer: Any, num_envs: int) -> None:
        self._trainer, self.num_envs = trainer, num_envs

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls a method of each environment; returns the results in their order."""
        return tuple(self._trainer.on_envs("call", name, args, kwargs))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Returns an attribute of each environment."""
        return tuple(self._trainer.on_envs("get_attr", name, (), {}))

    def set_attr(self, name: str, value: Any) -> None:
        """Sets an attribute of all environments, where the wrappers find it, to one value."""
        self._trainer.on_envs("set_attr", name, (value,), {})


class Trainer:
    """Makes iterations with environments and a learner.

    Args:
        config: Settings of the run.
        env: The environments of this process.
        learner: The learner, or the :class:`rayvec.LearnerGroup`, with the weights to begin with.
        progress: How far the run has come.
        collector_state: State of the collector to continue from.
        stragglers: When to stop collecting, on a decentralized rank.
        first_id: Global index of the first environment.

    Attributes:
        has_pending: Whether an iteration has begun of which the loop does not know the result.
        is_outdated: Whether the nodes of the cluster have changed, so that the run should continue with other ranks.
            Elastic environments move by themselves.
        learner: As given.
        collector: Collects the steps.

    Raises:
        CheckpointError: `collector_state` is that of another collector.
    """

    has_pending = False
    is_outdated = False

    def __init__(
        self,
        config: TrainConfig,
        env: RayVecEnv,
        learner: Learner,
        progress: Progress,
        collector_state: Mapping[str, Any] | None = None,
        *,
        stragglers: Stragglers | None = None,
        first_id: int = 0,
    ) -> None:
        self._config, self._env, self.learner = config, env, learner
        self._stragglers, self._first_id = stragglers, first_id
        self._num_steps = -(-config.steps_per_iteration // config.num_envs) * env.num_envs
        has_learned = config.init_from is not None or bool(collector_state and collector_state.get("version", 0) > 0)
        is_random = config.random_steps > 0 and not has_learned
        policy = Policy(learner.module, random_start=is_random, device=_acting_device(config))
        if has_learned:
            policy.load_weights(learner.weights())
        self.collector = _collector(config, env, policy)
        if collector_state is not None:
            restore(self.collector, collector_state)
        seed = config.train_seed(progress.steps) + first_id
        if collector_state is None or not collector_state.get("envs"):  # else the episodes continue
            self.collector.reset(seed=seed)
        is_new = collector_state is None and config.init_from is None and not config.random_steps
        normalizes = getattr(learner.module, "obs_mean", None) is not None
        if is_new and normalizes and hasattr(learner, "measure"):
            learner.measure(self._collect(ahead=False)[0])  # these steps do not count
            self.collector.set_weights(learner.weights())
            self.collector.reset(seed=seed)

    def _collect(self, *, ahead: bool) -> tuple[Batch, dict[str, float], bool]:
        """Collects the steps of an iteration; returns them, wall times, and whether this rank stopped early."""
        began_s, stragglers = time.monotonic(), self._stragglers
        if stragglers is None:
            batch = self.collector.collect(n_step=self._num_steps, ahead=ahead)
            return batch, {"collect": time.monotonic() - began_s}, False
        num_steps, cut = stragglers.begin(self._num_steps)
        batch = self.collector.collect(n_step=num_steps, ahead=ahead, cut=cut)
        collected_s = time.monotonic()
        stragglers.wait()
        times_s = {"collect": collected_s - began_s, "wait": time.monotonic() - collected_s}
        return batch, times_s, stragglers.has_cut

    def iterate(self, *, ahead: bool = False, keep: bool = False) -> Iteration:
        """Makes an iteration.

        Args:
            ahead: Whether the next one may begin.
            keep: Whether the result has the state after this iteration.
        """
        batch, times_s, is_cut = self._collect(ahead=ahead)
        began_s = time.monotonic()
        updated: Mapping[str, Any] = self.learner.update(batch)  # a learner of a user may return numbers of NumPy
        metrics = {name: value.item() if hasattr(value, "item") else value for name, value in updated.items()}
        learned_s = time.monotonic()
        times_s["learn"] = learned_s - began_s
        if metrics:
            self.collector.set_weights(self.learner.weights())
            times_s["publish"] = time.monotonic() - learned_s
        return Iteration(batch.stats, metrics, times_s, int(is_cut), state=self.state() if keep else None)

    def on_envs(self, method: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a method of the vector environment between two chunks: see :class:`RunEnvs`."""
        self.collector.wait_pending()
        if method == "set_attr":
            args = ([args[0]] * self._env.num_envs,)  # a list or tuple is one value, too
        return getattr(self._env, method)(name, *args, **kwargs)

    def set_learning_rate(self, value: float | None) -> None:
        """Lets the learner use a learning rate from the next update on; None: its own schedule again.

        Raises:
            ConfigError: The learner has no method of this name.
        """
        set_learning_rate(self.learner, value)

    def state(self, learner: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns ``weights``, ``learner``, ``collector`` and ``spaces``: tensors and plain values, for a checkpoint.

        The spaces are those of one environment; None if they have no plain form.

        Args:
            learner: The state of the learner, in place of its whole one.
        """
        env = self._env
        return {
            "weights": torch.from_numpy(self.learner.weights()),
            "learner": self.learner.state_dict() if learner is None else learner,
            "collector": self.collector.state_dict(),
            "spaces": spaces_to_bytes(env.single_observation_space, env.single_action_space),
        }

    def evaluate(self) -> EpisodeStats:
        """Plays the greedy episodes of these environments at the end of the run; no iteration may follow."""
        self.collector.drop_pending()  # an error in one of them ends the run, and close() would only log it
        self.collector.close()
        config, env, first_id = self._config, self._env, self._first_id
        quotas = episode_quotas(eval_limits(config, env)[0], config.num_envs)
        own = int(quotas[first_id : first_id + env.num_envs].sum())
        learner, seed = self.learner, config.eval_seed()
        return evaluate(config, env, learner.module, learner.weights(), own, seed=seed, first_id=first_id)


def _collector(config: TrainConfig, env: RayVecEnv, policy: Policy) -> Collector:
    in_workers = config.inference == "worker"
    return Collector(
        env,
        policy,
        inference=config.inference,
        seed=config.seed,
        prefetch=in_workers and config.collects_ahead,
        max_staleness=getattr(config, "max_staleness", None) if in_workers else None,
        on_bad_obs=config.on_bad_obs,
        episode_metrics=config.episode_metrics,
    )


def _acting_device(config: TrainConfig) -> str:
    """Returns the device on which the policy acts."""
    return config.learner_device if config.inference == "node" and not getattr(config, "recurrent", None) else "cpu"


def initial_state(config: TrainConfig, own: dict[str, Any], own_spaces: Sequence[Space[Any]]) -> dict[str, Any]:
    """Returns the state that the learner of a new run begins with: its own, with the network of `config.init_from`.

    The optimizer, the schedule and the counters are its own.

    Args:
        config: Settings of the new run.
        own: State of its learner, whose rank-local part may be missing.
        own_spaces: Observation space and action space of one of its environments.

    Raises:
        ConfigError: There is no such run, it has other spaces, or the learner can't begin with one.
        CheckpointError: The checkpoint of that run is missing or damaged.
    """
    if config.init_from is None:
        return own
    _, other = load_run(local_path(config.init_from))
    check_kept_spaces(own_spaces, other)
    learner: Any = LEARNERS[type(config)]
    try:
        begun: dict[str, Any] = learner.with_network(own, other["learner"], config)
    except (AttributeError, KeyError) as error:
        raise ConfigError(
            f"The learner can't begin with the network of {config.init_from} ({type(error).__name__}: {error}). Use a "
            "run of the same algorithm, whose learner has a method with_network."
        ) from error
    return begun
