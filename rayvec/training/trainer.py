"""One iteration of a training: collect steps, update the learner, publish its weights.

The same loop body runs in the driver and on every decentralized rank. A rank has its share of the environments, other
ranks with which its learner sums, and the rule for stragglers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from rayvec.config import TrainConfig
from rayvec.data import CollectStats
from rayvec.distributed.stragglers import Stragglers
from rayvec.learners.base import Learner, MeasuresObservations, set_learning_rate
from rayvec.training.evaluation import Evaluation, evaluate
from rayvec.training.run_state import Progress, begin_collecting
from rayvec.training.saved_spaces import space_to_plain
from rayvec.vector.ray_vec_env import RayVecEnv

__all__ = ["Iteration", "RunEnvs", "RunTrainer", "Trainer"]


@dataclass(slots=True)
class Iteration:
    """What one iteration did.

    Attributes:
        stats: Statistics of the collected steps.
        metrics: Metrics of the update; none if the learner only stored the steps.
        times_s: Wall time by activity, in seconds.
        num_cut: How many ranks stopped early because the others had their steps.
        sent_bytes: What ranks have sent over the network in sums.
        notes: Lines for the driver to log, where a rank made the iteration, such as which workers were restarted.
        state: The state of the run after the iteration, if it was asked for; see :meth:`RunTrainer.state`.
        evaluation: The greedy evaluation of its weights, where there was one.
    """

    stats: CollectStats
    metrics: Mapping[str, float]
    times_s: dict[str, float]
    num_cut: int = 0
    sent_bytes: int = 0
    notes: list[str] = field(default_factory=list)
    state: dict[str, Any] | None = None
    evaluation: Evaluation | None = None

    @property
    def all_times_s(self) -> dict[str, float]:
        """Wall time by activity, and with a slash by what environments and workers did while steps were collected."""
        return {**self.times_s, **{f"collect/{name}": s for name, s in self.stats.time_split_s.items()}}


class RunTrainer(Protocol):
    """What the training loop drives: one process, or several decentralized ranks."""

    @property
    def has_pending(self) -> bool:
        """Whether an iteration has begun of which the loop does not know the result."""
        ...

    @property
    def is_outdated(self) -> bool:
        """Whether the nodes of the cluster have changed, so that the run should continue with other ranks."""
        ...

    @property
    def learner(self) -> Any:
        """The learner, or the :class:`rayvec.LearnerGroup`; None with decentralized ranks, which have one each."""
        ...

    def iterate(self, *, ahead: bool, keep: bool) -> Iteration:
        """Makes an iteration.

        Args:
            ahead: Whether the next one may begin.
            keep: Whether the result has the state after this iteration.
        """
        ...

    def on_envs(self, method: str, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the vector environment between two chunks: see :class:`RunEnvs`."""
        ...

    def set_learning_rate(self, value: float | None) -> None:
        """Lets the learner use a learning rate from the next update on; None: its own schedule again."""
        ...

    def state(self) -> dict[str, Any]:
        """Returns ``weights``, ``learner`` and ``collector``: tensors and plain values, for a checkpoint."""
        ...

    def evaluate(self) -> Evaluation:
        """Plays the greedy episodes at the end of the run; no iteration may follow."""
        ...


class RunEnvs:
    """The environments of a run, as a callback reaches them: all of them, on whatever workers, nodes and ranks.

    A call waits for the chunk that workers are taking, so it takes effect between two steps of each environment. The
    environments of evaluations are others.

    Args:
        trainer: Makes the iterations.
        num_envs: How many environments there are.
    """

    def __init__(self, trainer: RunTrainer, num_envs: int) -> None:
        self._trainer, self.num_envs = trainer, num_envs

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls a method of each environment; returns the results in their order."""
        return tuple(self._trainer.on_envs("call", name, *args, **kwargs))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Returns an attribute of each environment."""
        return tuple(self._trainer.on_envs("get_attr", name))

    def set_attr(self, name: str, value: Any) -> None:
        """Sets an attribute of all environments, where the wrappers find it, to one value."""
        self._trainer.on_envs("set_attr", name, value)


class Trainer:
    """Makes iterations with environments and a learner; see :class:`RunTrainer`.

    Args:
        config: Settings of the run.
        env: The environments of this process.
        learner: The learner, with the weights to begin with.
        progress: How far the run has come.
        collector_state: State of the collector to continue from.
        stragglers: When to stop collecting, on a decentralized rank.
        first_id: Global index of the first environment.
    """

    has_pending = False
    is_outdated = False  # elastic environments move by themselves

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
        self._config, self._env, self._learner = config, env, learner
        self._stragglers, self._first_id = stragglers, first_id
        self._num_steps = -(-config.steps_per_iteration // config.num_envs) * env.num_envs
        self.collector = begin_collecting(config, env, learner, progress, collector_state, first_id)
        is_new = collector_state is None and config.init_from is None and not config.random_steps
        if is_new and isinstance(learner, MeasuresObservations):
            if getattr(learner.module, "obs_mean", None) is not None:
                self._measure(learner)
                self.collector.reset(seed=config.train_seed(progress.steps) + first_id)

    def _measure(self, learner: MeasuresObservations) -> None:
        """Takes the steps of an iteration, which do not count, to measure observations, and lets the policy know."""
        if self._stragglers is not None:
            self._stragglers.begin(self._num_steps)
        batch = self.collector.collect(n_step=self._num_steps, ahead=False)
        if self._stragglers is not None:
            self._stragglers.wait()
        learner.measure(batch)
        self.collector.set_weights(self._learner.weights())

    @property
    def learner(self) -> Any:
        """See :class:`RunTrainer`."""
        return self._learner

    def on_envs(self, method: str, name: str, *args: Any, **kwargs: Any) -> Any:
        """See :class:`RunTrainer`."""
        self.collector.wait_pending()
        if method == "set_attr":
            args = ([args[0]] * self._env.num_envs,)  # a list or tuple is one value, too
        return getattr(self._env, method)(name, *args, **kwargs)

    def set_learning_rate(self, value: float | None) -> None:
        """See :class:`RunTrainer`.

        Raises:
            ConfigError: The learner has no method of this name.
        """
        set_learning_rate(self._learner, value)

    def iterate(self, *, ahead: bool = False, keep: bool = False) -> Iteration:
        """See :class:`RunTrainer`."""
        laps, stragglers = Laps(), self._stragglers
        num_steps, cut = (self._num_steps, None) if stragglers is None else stragglers.begin(self._num_steps)
        batch = self.collector.collect(n_step=num_steps, ahead=ahead, cut=cut)
        laps.end("collect")
        if stragglers is not None:
            stragglers.wait()
            laps.end("wait")
        metrics = {name: _plain(value) for name, value in self._learner.update(batch).items()}
        laps.end("learn")
        if metrics:
            self.collector.set_weights(self._learner.weights())
            laps.end("publish")
        num_cut = int(stragglers is not None and stragglers.has_cut)
        return Iteration(
            batch.stats,
            metrics,
            laps.times_s,
            num_cut,
            state=self.state() if keep else None,
        )

    def state(self) -> dict[str, Any]:
        """See :class:`RunTrainer`."""
        return {
            "weights": torch.from_numpy(self._learner.weights()),
            "learner": self._learner.state_dict(),
            "collector": self.collector.state_dict(),
            "spaces": self.spaces,
        }

    @property
    def spaces(self) -> list[Any] | None:
        """The spaces of one environment in the form of a checkpoint; None if they have none."""
        env = self._env
        described = [space_to_plain(space) for space in (env.single_observation_space, env.single_action_space)]
        return None if None in described else described

    def evaluate(self, num_episodes: int | None = None) -> Evaluation:
        """See :class:`RunTrainer`.

        Args:
            num_episodes: How many episodes; by default as the settings say.
        """
        self.collector.drop_pending()  # an error in one of them ends the run, and close() would only log it
        self.collector.close()
        return evaluate(
            self._config,
            self._env,
            self._learner.module,
            self._learner.weights(),
            num_episodes,
            seed=self._config.eval_seed(),
            first_id=self._first_id,
        )


@dataclass
class Laps:
    """Wall time by activity, in seconds."""

    times_s: dict[str, float] = field(default_factory=dict)
    _began_s: float = field(default_factory=time.monotonic)

    def end(self, activity: str) -> None:
        """Gives the time since the last call, or since the start, to `activity`."""
        now_s = time.monotonic()
        self.times_s[activity] = now_s - self._began_s
        self._began_s = now_s


def _plain(number: Any) -> float:
    """Returns a number as one of Python: a learner of a user may return those of NumPy and torch."""
    plain: float = number.item() if hasattr(number, "item") else number
    return plain
