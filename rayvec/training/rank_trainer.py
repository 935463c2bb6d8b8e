"""Training on decentralized ranks: each has a share of the environments, and learns from its own steps (DD-PPO).

Wijmans et al., "DD-PPO: learning near-perfect PointGoal navigators from 2.5 billion frames", ICLR 2020,
arXiv:1911.00357. All ranks together compute the updates of one learner with all environments. The driver gets the
statistics of each iteration, and the state from time to time; ranks do not wait for it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from gymnasium.envs.registration import EnvSpec

from rayvec.collect.episode_quotas import episode_quotas
from rayvec.config import TrainConfig
from rayvec.data.batch import join_stats
from rayvec.data.global_random import seed_globals
from rayvec.data.partition import even_bounds
from rayvec.distributed.rank import pack, unpack
from rayvec.distributed.rank_group import RankGroup
from rayvec.distributed.rank_state import give_ranks, join_state, rank_local_state, shared_state, split_state
from rayvec.distributed.stragglers import Arrivals, Stragglers
from rayvec.envs.factory import register_specs
from rayvec.learners.base import Learner
from rayvec.learners.compile_decision import decided
from rayvec.learners.ranks import ClosableRanks
from rayvec.node.log_lines import LogLines
from rayvec.node.processes import remove_folder
from rayvec.training.evaluation import Evaluation, time_limit
from rayvec.training.initial_network import initial_state
from rayvec.training.run_state import Progress, restore
from rayvec.training.runs import make_env, probed_workers
from rayvec.training.space_checks import check_kept_spaces, check_same_spaces, warn_of_wide_ranges
from rayvec.training.trainer import Iteration, Trainer

__all__ = ["DecentralizedTrainer", "RankTrainer"]

logger = logging.getLogger(__name__)


class RankTrainer(Trainer):
    """What a rank holds: its share of the environments, and a learner that sums with the other ranks.

    Args:
        config: Settings of the run, with the number of workers of this rank.
        make_learner: Makes the learner from the spaces of one environment and the settings.
        specs: Environments that the driver has registered.
        make_arrivals: Makes what says which ranks have taken their steps, given the number of this rank.
        probe: Whether `config` has the number of cores in the place of the number of workers: environments that wait
            get a worker each.
        ranks: The ranks.
    """

    def __init__(
        self,
        config: TrainConfig,
        make_learner: Callable[..., Learner],
        specs: Sequence[EnvSpec],
        make_arrivals: Callable[[int], Arrivals],
        probe: bool,
        ranks: ClosableRanks,
    ) -> None:
        self._log, self._ranks = LogLines(), ranks
        seed_globals(config.seed, ranks.rank, 3)
        register_specs(specs)
        self._first_id, stop = even_bounds(config.num_envs, ranks.size)[ranks.rank : ranks.rank + 2]
        num_envs = stop - self._first_id
        if probe and config.workers_per_node:
            config = replace(config, workers_per_node=probed_workers(config, num_envs, config.workers_per_node))
        self._stragglers = Stragglers(
            make_arrivals(ranks.rank),
            ranks.size,
            sync_fraction=config.sync_fraction,
            variable_lengths=config.variable_lengths,
        )
        self._config, self._env = config, make_env(config, num_envs, self._first_id)
        try:
            spaces = self._env.single_observation_space, self._env.single_action_space
            self.learner = make_learner(*spaces, decided(config, spaces[0]))
            give_ranks(self.learner, ranks)
        except BaseException:
            self._env.close()
            raise

    def describe(self) -> tuple[tuple[Any, Any], tuple[str, ...], Any]:
        """Returns what the driver needs to begin.

        Returns:
            The observation space and the action space of this rank's environments; the names of the rank-local parts
            of the learner's state; and on rank 0, packed, what all ranks share of it.
        """
        shared = pack(shared_state(self.learner)) if self._ranks.rank == 0 else None
        spaces = self._env.single_observation_space, self._env.single_action_space
        return spaces, tuple(rank_local_state(self.learner)), shared

    def begin(self, progress: Progress, learner_state: Any, collector_state: Mapping[str, Any] | None) -> None:
        """Continues from a state.

        Args:
            progress: How far the run has come.
            learner_state: What all ranks share and what belongs to this rank, packed.
            collector_state: State of the collector.
        """
        restore(self.learner, {name: part for each in learner_state for name, part in unpack(each).items()})
        stragglers, first_id = self._stragglers, self._first_id
        super().__init__(
            self._config, self._env, self.learner, progress, collector_state, stragglers=stragglers, first_id=first_id
        )

    def iterate(self, *, ahead: bool = False, keep: bool = False) -> Iteration:
        """Makes an iteration together with the other ranks."""
        before = self._ranks.sent_bytes
        iteration = super().iterate(ahead=ahead, keep=keep)
        iteration.sent_bytes = self._ranks.sent_bytes - before
        iteration.notes = self._log.take()
        return iteration

    def num_eval_episodes(self) -> int:
        """Returns how many episodes all ranks play in an evaluation."""
        return self._config.num_eval_episodes(time_limit(self._env))

    def parts(self) -> Any:
        """Returns the state of the run, packed: on rank 0 what all ranks share, and what belongs to this rank."""
        shared = self.state(shared_state(self.learner)) if self._ranks.rank == 0 else None
        return pack((shared, rank_local_state(self.learner)))

    def close(self) -> None:
        """Closes the environments. The process has no use for workers afterwards."""
        self._log.close()
        self._env.close()
        remove_folder()  # here, because Ray kills this process


class DecentralizedTrainer:
    """Drives decentralized ranks as a :class:`~rayvec.training.trainer.Trainer` drives one process.

    Args:
        config: Settings of the run.
        group: The ranks, each with a :class:`RankTrainer`.
        progress: How far the run has come.
        state: State of the run to continue from.
        has_changed: Whether there are other nodes than those that ranks are on, so that they should be placed again.

    Attributes:
        learner: None: each rank has one.
    """

    learner = None

    def __init__(
        self,
        config: TrainConfig,
        group: RankGroup,
        progress: Progress,
        state: Mapping[str, Any] | None,
        has_changed: Callable[[Collection[str]], bool] | None = None,
    ) -> None:
        self._config, self._group, self._has_changed = config, group, has_changed
        self._pending: deque[list[Any]] = deque()
        self._has_iterated = False
        found = group.run("describe")
        check_same_spaces([spaces for spaces, _, _ in found])
        spaces, names, own = found[0]
        if state:
            check_kept_spaces(spaces, state)
        warn_of_wide_ranges(spaces[0], config)
        learner_state = state["learner"] if state else initial_state(config, unpack(own), spaces)
        shared, rank_local = split_state(learner_state, names, group.num_ranks)
        collector_state = state["collector"] if state else None
        packed = pack(shared)
        group.run("begin", [(progress, (packed, pack(local)), collector_state) for local in rank_local])

    @property
    def has_pending(self) -> bool:
        """Whether an iteration has begun of which the loop does not know the result."""
        return bool(self._pending)

    @property
    def is_outdated(self) -> bool:
        """Whether nodes have changed; not before an iteration, so that each start brings one."""
        if self._has_changed is None or not self._has_iterated:
            return False
        return self._has_changed({placement.node_id for placement in self._group.placements})

    def _on_all(self, method: str, *args: Any) -> list[Any]:
        return self._group.run(method, [args] * self._group.num_ranks)

    def on_envs(self, method: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a method of the vector environment of each rank, after the iterations that have begun."""
        return [each for answer in self._on_all("on_envs", method, name, args, kwargs) for each in answer or ()]

    def set_learning_rate(self, value: float | None) -> None:
        """Lets the learners use a learning rate from the next update on; None: their own schedule again."""
        self._on_all("set_learning_rate", value)

    def iterate(self, *, ahead: bool, keep: bool) -> Iteration:
        """Makes an iteration; see :class:`~rayvec.training.trainer.Trainer`."""
        if not self._pending:
            self._pending.append(self._group.post("iterate"))
        parts = self._group.post("parts") if keep else None
        if ahead:
            self._pending.append(self._group.post("iterate"))
        iterations: list[Iteration] = self._group.gather(self._pending.popleft())
        for placement, each in zip(self._group.placements, iterations, strict=True):
            for note in each.notes:
                logger.warning("%s: %s", placement, note)
        self._has_iterated = True
        names = dict.fromkeys(name for each in iterations for name in each.times_s)
        return replace(  # metrics are those of the whole on every rank
            iterations[0],
            stats=join_stats([each.stats for each in iterations]),
            times_s={name: float(np.mean([each.times_s.get(name, 0.0) for each in iterations])) for name in names},
            num_cut=sum(each.num_cut for each in iterations),
            sent_bytes=sum(each.sent_bytes for each in iterations),
            state=None if parts is None else _joined(self._group.gather(parts)),
        )

    def state(self) -> dict[str, Any]:
        """Returns the state of the run; see :meth:`rayvec.training.trainer.Trainer.state`."""
        return _joined(self._group.run("parts"))

    def evaluate(self) -> Evaluation:
        """Plays the episodes at the end of the run; each environment plays what it would with one process."""
        quotas = episode_quotas(self._on_all("num_eval_episodes")[0], self._config.num_envs)
        bounds = even_bounds(self._config.num_envs, self._group.num_ranks)
        shares = [(int(quotas[low:high].sum()),) for low, high in pairwise(bounds)]
        parts: list[Evaluation] = self._group.run("evaluate", shares)
        returns, lens = zip(*((each.returns, each.lens) for each in parts), strict=True)
        return Evaluation(np.concatenate(returns), np.concatenate(lens), sum(each.num_cut for each in parts))


def _joined(packed: list[Any]) -> dict[str, Any]:
    """Returns the state of the run from the parts of all ranks."""
    parts = [unpack(each) for each in packed]
    state: dict[str, Any] = parts[0][0]
    return {**state, "learner": join_state(state["learner"], [local for _, local in parts])}
