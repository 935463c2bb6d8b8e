"""Training on decentralized ranks: each has a share of the environments, and learns from its own steps (DD-PPO).

Wijmans et al., "DD-PPO: learning near-perfect PointGoal navigators from 2.5 billion frames", ICLR 2020,
arXiv:1911.00357. All ranks together compute the updates of one learner with all environments. The driver gets the
statistics of each iteration, and the state from time to time; ranks do not wait for it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from logging.handlers import MemoryHandler
from typing import Any

import numpy as np
from gymnasium.envs.registration import EnvSpec

from rayvec.config import TrainConfig
from rayvec.data import EpisodeStats
from rayvec.data.batch import join_episodes, join_stats
from rayvec.data.cores import give_cores, usable_cores
from rayvec.data.global_random import seed_globals
from rayvec.data.topology import even_bounds
from rayvec.distributed.process_host import ProcessHost
from rayvec.distributed.rank import divided_workers, pack, unpack
from rayvec.distributed.rank_group import RankGroup, RankHost
from rayvec.distributed.rank_state import give_ranks, join_state, rank_local_state, shared_state, split_state
from rayvec.distributed.stragglers import Arrivals, Stragglers
from rayvec.envs.factory import register_specs, registered_specs
from rayvec.errors import counted
from rayvec.learners.base import Learner
from rayvec.learners.compile_decision import decided
from rayvec.learners.ranks import Ranks
from rayvec.training.checkpoint import check_kept_spaces, restore, warn_of_wide_ranges
from rayvec.training.environments import choose_engine, make_env, open_env
from rayvec.training.runs import LEARNERS, open_learner, wait_limit_s
from rayvec.training.trainer import Iteration, Progress, Trainer, initial_state

logger = logging.getLogger(__name__)


class RankTrainer(Trainer):
    """What a rank holds: its share of the environments, and a learner that sums with the other ranks.

    Args:
        config: Settings of the run, with the number of workers of this rank.
        make_learner: Makes the learner from the spaces of one environment and the settings.
        specs: Environments that the driver has registered.
        make_arrivals: Makes what says which ranks have taken their steps, given the number of this rank.
        cores: This rank's share of its machine, by which the number of workers is chosen where it is not given.
        steps: Steps that the run has taken.
        ranks: The ranks.
    """

    def __init__(
        self,
        config: TrainConfig,
        make_learner: Callable[..., Learner],
        specs: Sequence[EnvSpec],
        make_arrivals: Callable[[int], Arrivals],
        cores: int,
        steps: int,
        ranks: Ranks,
    ) -> None:
        self._ranks, self._log = ranks, MemoryHandler(sys.maxsize)  # the driver logs what it holds
        self._log.setLevel(logging.WARNING)
        logging.getLogger("rayvec").addHandler(self._log)
        seed_globals(config.seed, ranks.rank, 3, steps)
        register_specs(specs)
        self._first_id, stop = even_bounds(config.num_envs, ranks.size)[ranks.rank : ranks.rank + 2]
        num_envs = stop - self._first_id
        give_cores(cores)
        self._stragglers = Stragglers(
            make_arrivals(ranks.rank),
            ranks.size,
            sync_fraction=config.sync_fraction,
            variable_lengths=config.variable_lengths,
        )
        self._config, self._env = config, make_env(config, num_envs, self._first_id)
        spaces = self._env.single_observation_space, self._env.single_action_space
        self.learner = make_learner(*spaces, decided(config, spaces[0]))
        give_ranks(self.learner, ranks)

    def describe(self) -> tuple[tuple[Any, Any], tuple[str, ...], Any]:
        """Returns what the driver needs to begin.

        Returns:
            The observation space and the action space of this rank's environments; the names of the rank-local parts of
            the learner's state; and on rank 0, packed, what all ranks share of it.
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
        if collector_state is not None:
            envs = collector_state.get("envs") or []
            collector_state = {**collector_state, "envs": envs[first_id : first_id + self._env.num_envs]}
        super().__init__(
            self._config, self._env, self.learner, progress, collector_state, stragglers=stragglers, first_id=first_id
        )

    def iterate(self, *, ahead: bool = False, keep: bool = False) -> Iteration:
        """Makes an iteration together with the other ranks."""
        iteration = super().iterate(ahead=ahead, keep=keep)
        records, self._log.buffer = self._log.buffer, []
        iteration.notes = [record.getMessage() for record in records]
        return iteration

    def parts(self) -> Any:
        """Returns the state of the run, packed: on rank 0 what all ranks share, and what belongs to this rank."""
        is_first = self._ranks.rank == 0
        state = self.state(shared_state(self.learner) if is_first else {})
        envs = state["collector"].pop("envs")
        return pack((state if is_first else None, rank_local_state(self.learner), envs))

    def close(self) -> None:
        """Closes the environments."""
        logging.getLogger("rayvec").removeHandler(self._log)  # this process shows later lines itself
        self._env.close()


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
        spaces, names, own = group.run("describe")[0]
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
            state=None if parts is None else _joined(self._group.gather(parts)),
        )

    def state(self) -> dict[str, Any]:
        """Returns the state of the run; see :meth:`rayvec.training.trainer.Trainer.state`."""
        return _joined(self._group.run("parts"))

    def evaluate(self) -> EpisodeStats:
        """Plays the episodes at the end of the run; each environment plays what it would with one process."""
        return join_episodes(self._on_all("evaluate"))


def _joined(packed: list[Any]) -> dict[str, Any]:
    """Returns the state of the run from the parts of all ranks."""
    parts = [unpack(each) for each in packed]
    state: dict[str, Any] = parts[0][0]
    envs = [part[2] for part in parts]
    state["collector"]["envs"] = None if None in envs else [each for of_rank in envs for each in of_rank]
    return {**state, "learner": join_state(state["learner"], [part[1] for part in parts])}


@contextlib.contextmanager
def open_trainer(
    config: TrainConfig,
    progress: Progress,
    state: Mapping[str, Any] | None,
    *,
    fewer: bool,
    cores: dict[str, int],
) -> Iterator[Trainer | DecentralizedTrainer]:
    """Yields what makes the iterations of a run; it prints on standard error where environments are.

    An error or a KeyboardInterrupt that passes ends decentralized ranks at once.

    Args:
        config: Settings of the run.
        progress: How far the run has come.
        state: State of the run to continue from; none begins it.
        fewer: Whether ranks may be fewer, where there is no room for all of them.
        cores: Cores of each node that elastic ranks of this run have used, by id; the nodes that they use are added.
    """
    config = choose_engine(config)
    if config.learner_mode != "decentralized":
        with open_env(config, trains=True) as env, open_learner(config, env, progress.steps, fewer=fewer) as learner:
            warn_of_wide_ranges(env.single_observation_space, config)
            spaces = env.single_observation_space, env.single_action_space
            if state:
                check_kept_spaces(spaces, state)
                restore(learner, state["learner"])
            elif config.init_from:
                restore(learner, initial_state(config, learner.state_dict(), spaces))
            yield Trainer(config, env, learner, progress, state["collector"] if state else None)
        return
    host, num_ranks, num_workers, has_changed = _places(config, fewer, cores)
    rank_config = replace(config, num_nodes=0, address=None)
    if config.workers_per_node is not None:
        rank_config = replace(rank_config, workers_per_node=num_workers)
    arrivals = host.arrivals(num_ranks)
    make_learner, specs = LEARNERS[type(config)], registered_specs()
    group = RankGroup(
        functools.partial(RankTrainer, rank_config, make_learner, specs, arrivals, max(1, num_workers), progress.steps),
        num_ranks,
        host,
        fewer=fewer or has_changed is not None,
        device=config.learner_device,
        threads=config.learner_threads,
        timeout_s=wait_limit_s(config),
    )
    try:
        trainer = DecentralizedTrainer(rank_config, group, progress, state, has_changed)
        nodes = len({placement.node for placement in group.placements})
        where = "on this machine, without Ray" if config.num_nodes == 0 else f"on Ray (nodes: {nodes})"
        ranks = counted(group.num_ranks, "rank")
        print(f"rayvec: {counted(config.num_envs, 'environment')} {where}: {ranks}", file=sys.stderr)
        yield trainer
    except BaseException:
        group.close(terminate=True)
        raise
    group.close()


def _places(
    config: TrainConfig, fewer: bool, cores_of_nodes: dict[str, int]
) -> tuple[RankHost, int, int, Callable[[Collection[str]], bool] | None]:
    """Returns where decentralized ranks run.

    The workers of a rank wait while it learns, so a rank claims the cores of its workers and none besides.

    Returns:
        What starts the ranks; their number; the number of workers of each; and of elastic ranks, which follow nodes
        that join and leave, whether there are other nodes than those that ranks are on, so that they should be placed
        again.
    """
    count = config.num_learners
    if config.num_nodes == 0:
        return ProcessHost(), count, divided_workers(config.workers_per_node, usable_cores(), count), None
    from rayvec.cluster.ray_session import ray_session  # these import Ray
    from rayvec.distributed.rank_placement import RankNodes, ResourceRequest, rank_share
    from rayvec.distributed.ray_host import RayHost

    with ray_session(config.address):
        num_gpus, threads = int(config.learner_device == "cuda"), config.learner_threads
        if isinstance(config.num_nodes, tuple):
            least = ResourceRequest(max(config.workers_per_node or 1, threads), num_gpus)
            nodes = RankNodes(config.num_nodes, count, cores_of_nodes, least)
            workers, ids = nodes.workers_per_rank(config.workers_per_node), nodes.node_ids
            request = ResourceRequest(max(workers, threads), num_gpus, nodes=ids, num_nodes=len(ids))
            return RayHost(request, config.address), nodes.num_ranks, workers, nodes.has_changed
        num_nodes, workers, cores = rank_share(count, config.num_nodes, config.workers_per_node, is_restart=fewer)
        request = ResourceRequest(max(cores, threads), num_gpus, num_nodes=num_nodes)
        return RayHost(request, config.address), count, workers, None
