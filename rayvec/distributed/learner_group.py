"""A learner on several ranks, which together compute the updates of one learner."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import nn

from rayvec.data import Batch, Chunk
from rayvec.distributed.rank_actor import pack, unpack
from rayvec.distributed.rank_group import RankGroup
from rayvec.distributed.rank_state import give_ranks, join_state, rank_local_state, shared_state, split_state
from rayvec.distributed.shards import RemoteShard, copy_batch, cut_batch, fetch_shard, rank_bounds, split_refs
from rayvec.errors import LearnerError, check_count
from rayvec.learners.base import Learner, MeasuresObservations
from rayvec.learners.ranks import Ranks
from rayvec.node.object_store import room_for
from rayvec.policies.networks import copy_to_cpu

__all__ = ["LearnerGroup"]

logger = logging.getLogger(__name__)


class LearnerGroup(contextlib.AbstractContextManager["LearnerGroup"]):
    """A learner on several ranks, Ray actors or processes of this machine, which divide every batch among themselves.

    All ranks together compute what one learner computes from the whole batch. They begin with the weights of rank 0,
    each gets a range of the batch's environments, and gradients are summed before they are clipped, so that all ranks
    have the same weights after every update. The loss of a rank in an update costs time, but changes no number: all
    ranks restart with the state before the update and repeat it. See :class:`~rayvec.distributed.rank_group.RankGroup`.

    Rank-local state, such as the replay of SAC, is not part of that state: it is empty after a restart, with a
    warning. It is part of `state_dict`, and can be loaded into as many ranks as it came from.

    Args:
        make_learner: Makes the learner, on each rank. With several ranks the learner has an attribute ``ranks``, as
            those of rayvec do.
        num_learners: Number of ranks.
        device: Where the learner computes, ``"cpu"``, or ``"cuda"`` with a GPU for each rank. `make_learner` must put
            its module there.
        learner_threads: Number of threads that torch may use on each rank.
        num_cpus: Cores that each rank claims; by default as many as `learner_threads`.
        ranks_per_node: The most ranks of a node; by default as many as fit, on as few nodes as possible.
        nodes: Ray's ids of the nodes that may be used; by default all.
        avoid_nodes: Ids of nodes that may not be used, such as those on which environments step.
        timeout_s: How long ranks wait for each other, in seconds.
        num_nodes: 0 runs the ranks as processes of this machine, without Ray. Unset: as Ray actors.
        address: Of a running Ray cluster.

    Raises:
        ConfigError: Settings that can't work, a learner that can't be on several ranks, or a cluster without capacity.
        Exception: What `make_learner` raised, its ``__cause__`` a `LearnerError` with the remote traceback.
    """

    def __init__(
        self,
        make_learner: Callable[[], Learner],
        num_learners: int = 1,
        device: str = "cpu",
        *,
        learner_threads: int = 1,
        num_cpus: int | None = None,
        ranks_per_node: int | None = None,
        nodes: Collection[str] | None = None,
        avoid_nodes: Collection[str] = (),
        timeout_s: float = 60.0,
        num_nodes: Literal[0] | None = None,
        address: str | None = None,
    ) -> None:
        self.num_learners = check_count("num_learners", num_learners)
        self._weights: NDArray[np.float32] | None = None
        self._num_starts = 1
        self._group = RankGroup(
            functools.partial(_RankLearner, make_learner),
            num_learners,
            device=device,
            threads=learner_threads,
            num_cpus=num_cpus,
            ranks_per_node=ranks_per_node,
            nodes=nodes,
            avoid_nodes=avoid_nodes,
            timeout_s=timeout_s,
            num_nodes=num_nodes,
            address=address,
        )
        try:
            self._rank_local_names: tuple[str, ...] = self._group.ask("rank_local_names")
        except BaseException:
            self._group.close()
            raise

    @property
    def group(self) -> RankGroup:
        """The ranks themselves: where they are, and their processes."""
        return self._group

    @property
    def module(self) -> nn.Module:
        """A copy of what learns, with the present weights."""
        module: nn.Module = self._group.ask("module")
        return module

    def update(self, batch: Batch) -> dict[str, float]:
        """Learns from a batch on all ranks; returns the metrics of the whole batch.

        Args:
            batch: Its chunks are here, or in the object store, from where each rank fetches what it needs.

        Raises:
            LearnerError: As the learner raises it; or ranks were lost again and again; or a chunk was lost with its
                node. The ranks are then as before the update, apart from rank-local state such as SAC's replay, which
                is lost where ranks restarted.
        """
        if not batch.chunks and not batch.chunk_refs:
            raise LearnerError(
                "A learner learns from chunks.",
                expected="a batch with chunks or chunk_refs",
                got="a batch with neither",
                remedy="Collect one with rayvec.Collector",
            )
        if batch.stats.staleness_counts and self.num_learners > 1:
            raise LearnerError(
                "Each rank learns from environments of its own, one column of a chunk for each.",
                expected="a batch of a collector without max_staleness",
                got="a batch in which an environment may have several columns, or none",
                remedy="Leave max_staleness out, or learn in the driver.",
            )
        metrics, self._weights = self._run("update", batch, keep=bool(self._rank_local_names))
        if self._num_starts != self._group.num_starts:
            self._num_starts = self._group.num_starts
            if self._rank_local_names:
                names = ", ".join(self._rank_local_names)
                logger.warning("all ranks were restarted without their rank-local state: the %s refills", names)
        return dict(metrics)

    def measure(self, batch: Batch) -> None:
        """Adds the observations of a batch to the moments that normalise later ones; see ``PPOLearner.measure``."""
        self._run("measure", batch)

    def _run(self, name: str, batch: Batch, *, keep: bool = False) -> Any:
        """Gives each rank its part of a batch; returns the result of rank 0."""
        self._weights = None
        args: list[tuple[Any, ...]]
        if batch.chunk_refs:
            args = [(shard,) for shard in split_refs(batch, self.num_learners)]
            keep = True  # a node may be lost with its chunks, so that the call can't be repeated
        elif self.num_learners == 1:  # chunks of a batch with max_staleness may differ in their environments
            args = [(self._group.put(batch),)]
        elif self._group.reads_memory:
            whole = self._group.put(batch)
            args = [(whole, *bounds) for bounds in rank_bounds(batch, self.num_learners)]
        else:
            shards = [cut_batch(batch, *bounds) for bounds in rank_bounds(batch, self.num_learners)]
            args = [(self._group.put(copy_batch(shard)),) for shard in shards]
        return self._group.run(name, args, keep=keep)[0]

    def weights(self) -> NDArray[np.float32]:
        """Returns a copy of the weights, flat, in the form that ``Policy.load_weights`` takes."""
        if self._weights is None:
            self._weights = self._group.ask("weights")
        return self._weights.copy()

    def state_dict(self) -> dict[str, Any]:
        """Returns the learner's state: tensors and plain values only.

        It is the state that all ranks share; one learner can continue from it, too. With several ranks, the
        rank-local parts are in the list ``rank_local``, if the learner has such parts.
        """
        parts = [unpack(part) for part in self._group.ask_all("parts")]
        return join_state(parts[0][0], [local for _, local in parts])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets all ranks continue exactly where the learner was when `state` was taken.

        Rank-local state, such as a replay, goes to as many ranks as it came from; into another number of ranks it is
        not loaded, with a warning.

        Raises:
            CheckpointError: `state` is of another kind of learner or network.
        """
        self._weights = None
        shared, rank_local = split_state(state, self._rank_local_names, self.num_learners)
        self._group.load_state_dict(shared, rank_local)
        self._num_starts = self._group.num_starts

    def close(self) -> None:
        """Ends the ranks. May be called again."""
        self._group.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _RankLearner:
    """The learner of one rank, in the rank's own process."""

    def __init__(self, make_learner: Callable[[], Learner], ranks: Ranks) -> None:
        self._learner = make_learner()
        self._ranks = ranks
        give_ranks(self._learner, ranks)

    def update(self, batch: Batch | RemoteShard, *bounds: int) -> tuple[dict[str, float], NDArray[np.float32] | None]:
        """Learns; returns metrics, and on rank 0 the weights, which saves the driver a call.

        Args:
            batch: This rank's part, or the whole batch.
            bounds: The first environment of this rank's part of the whole batch, and one after its last.
        """
        metrics = self._learner.update(_own_part(batch, *bounds))
        return metrics, self._learner.weights() if self._ranks.rank == 0 else None

    def measure(self, batch: Batch | RemoteShard, *bounds: int) -> None:
        """Adds observations to the moments of the learner, if it has some; arguments as of `update`."""
        if isinstance(self._learner, MeasuresObservations):
            self._learner.measure(_own_part(batch, *bounds))

    def weights(self) -> NDArray[np.float32]:
        return self._learner.weights()

    def module(self) -> nn.Module:
        module: nn.Module = copy_to_cpu(self._learner.module)
        return module

    def state_dict(self) -> dict[str, Any]:
        """Returns what all ranks share."""
        return shared_state(self._learner)

    def rank_local_names(self) -> tuple[str, ...]:
        """Returns the names of the rank-local parts of the state."""
        return tuple(rank_local_state(self._learner))

    def parts(self) -> Any:
        """Returns what all ranks share, on rank 0 only, and what is rank-local, packed."""
        return pack((self.state_dict() if self._ranks.rank == 0 else None, rank_local_state(self._learner)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._learner.load_state_dict(state)


def _own_part(batch: Batch | RemoteShard, *bounds: int) -> Batch:
    if isinstance(batch, RemoteShard):
        return fetch_shard(batch, _fetch)
    return cut_batch(batch, *bounds) if bounds else batch


def _fetch(ref: Any) -> Chunk:
    """Returns a chunk from the object store.

    Raises:
        LearnerError: It was lost with its node or process.
        ConfigError: The store of its node, or of this one, is full.
    """
    import ray  # only chunks of Ray's nodes are in an object store

    try:
        with room_for("a part of the batch"):
            chunk: Chunk = ray.get(ref)
    except ray.exceptions.ObjectLostError as error:
        raise LearnerError(
            "A chunk stays in the object store until the update is done.",
            expected="a chunk from each node where environments step",
            got=f"{type(error).__name__}: a node or a process was lost with its part of the batch",
            remedy="Leave this batch out and collect the next one, or resume from the last checkpoint",
        ) from error
    return chunk
