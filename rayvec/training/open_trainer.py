"""What a run trains with: one process, learners on ranks beside the environments, or decentralized ranks."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from rayvec.config import TrainConfig
from rayvec.data.cores import usable_cores
from rayvec.distributed.process_host import ProcessHost
from rayvec.distributed.rank import divided_workers
from rayvec.distributed.rank_group import RankGroup, RankHost
from rayvec.envs.factory import registered_specs
from rayvec.errors import counted
from rayvec.training.initial_network import initial_state
from rayvec.training.rank_trainer import DecentralizedTrainer, RankTrainer
from rayvec.training.run_state import Progress, restore
from rayvec.training.runs import LEARNERS, choose_engine, open_env, open_learner, wait_limit_s
from rayvec.training.space_checks import check_kept_spaces, warn_of_wide_ranges
from rayvec.training.trainer import Trainer

__all__ = ["open_trainer"]


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
        with open_env(config, trains=True) as env, open_learner(config, env, fewer=fewer) as learner:
            warn_of_wide_ranges(env.single_observation_space, config)
            spaces = env.single_observation_space, env.single_action_space
            if state:
                check_kept_spaces(spaces, state)
                restore(learner, state["learner"])
            elif config.init_from:
                restore(learner, initial_state(config, learner.state_dict(), spaces))
            yield Trainer(config, env, learner, progress, state["collector"] if state else None)
        return
    places = _places(config, fewer, cores)
    probe = config.probe and config.workers_per_node is None
    rank_config = replace(config, num_nodes=0, workers_per_node=places.num_workers, address=None)
    arrivals = places.host.arrivals(places.num_ranks)
    group = RankGroup(
        functools.partial(RankTrainer, rank_config, LEARNERS[type(config)], registered_specs(), arrivals, probe),
        places.num_ranks,
        places.host,
        fewer=fewer or places.has_changed is not None,
        device=config.learner_device,
        threads=config.learner_threads,
        timeout_s=wait_limit_s(config),
    )
    try:
        trainer = DecentralizedTrainer(rank_config, group, progress, state, places.has_changed)
        nodes = len({placement.node for placement in group.placements})
        where = "on this machine, without Ray" if config.num_nodes == 0 else f"on Ray (nodes: {nodes})"
        ranks = counted(group.num_ranks, "rank")
        print(f"rayvec: {counted(config.num_envs, 'environment')} {where}: {ranks}", file=sys.stderr)
        yield trainer
    except BaseException:
        group.close(terminate=True)
        raise
    group.close()


class _Places(NamedTuple):
    """Where decentralized ranks run.

    Attributes:
        host: What starts them.
        num_ranks: Number of ranks.
        num_workers: Number of workers of each rank.
        has_changed: Of elastic ranks, which follow nodes that join and leave: whether there are other nodes than those
            that ranks are on, so that they should be placed again.
    """

    host: RankHost
    num_ranks: int
    num_workers: int
    has_changed: Callable[[Collection[str]], bool] | None = None


def _places(config: TrainConfig, fewer: bool, cores_of_nodes: dict[str, int]) -> _Places:
    """Returns where decentralized ranks run, and how many workers each of them has.

    The workers of a rank wait while it learns, so a rank claims the cores of its workers and none besides.
    """
    count = config.num_learners
    if config.num_nodes == 0:
        return _Places(ProcessHost(), count, divided_workers(config.workers_per_node, usable_cores(), count))
    from rayvec.cluster.ray_session import RaySession  # these import Ray
    from rayvec.distributed.rank_placement import RankNodes, ResourceRequest, rank_share
    from rayvec.distributed.ray_host import RayHost

    with RaySession(config.address):
        num_gpus, threads = int(config.learner_device == "cuda"), config.learner_threads
        if isinstance(config.num_nodes, tuple):
            least = ResourceRequest(max(config.workers_per_node or 1, threads), num_gpus)
            nodes = RankNodes(config.num_nodes, count, cores_of_nodes, least)
            workers, ids = nodes.workers_per_rank(config.workers_per_node), nodes.node_ids
            request = ResourceRequest(max(workers, threads), num_gpus, nodes=ids, num_nodes=len(ids))
            return _Places(RayHost(request, config.address), nodes.num_ranks, workers, nodes.has_changed)
        num_nodes, workers, cores = rank_share(count, config.num_nodes, config.workers_per_node, is_restart=fewer)
        request = ResourceRequest(max(cores, threads), num_gpus, num_nodes=num_nodes)
        return _Places(RayHost(request, config.address), count, workers)
