"""The same learner on several ranks, which together do what one does."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from torch import nn

from rayvec.data import Batch, Chunk
from rayvec.distributed.rank_actor import pack, unpack
from rayvec.distributed.rank_group import RankGroup
from rayvec.distributed.shards import RemoteShard, fetch_shard, split_batch, split_refs
from rayvec.errors import ConfigError, LearnerError, check_count
from rayvec.learners.base import KeepsOwnState, Learner
from rayvec.learners.ranks import Ranks

__all__ = ["LearnerGroup"]

logger = logging.getLogger(__name__)


class LearnerGroup:
    """A learner on several ranks, each a Ray actor, which divide every batch among themselves.

    All ranks together do what one learner does with the whole batch: they begin with the weights of rank 0, each gets
    a range of the batch's columns, and gradients are summed before they are clipped. All have the same weights after
    every update. A rank that is lost in an update costs time, but changes no number: all are started again with the
    state before the update, and the update is done again. See :class:`~rayvec.distributed.rank_group.RankGroup`.

    What a learner keeps on its own rank, SAC its replay, is not among that state: whenever ranks are started again, all
    of it begins anew, with a warning. It is in `state_dict`, and goes to as many ranks as it came from.

    Args:
        make_learner: Makes the learner, on each rank; with several, it has an attribute ``ranks``, as those of rayvec
            do.
        num_learners: How many ranks.
        device: Where the learner computes, ``"cpu"`` or ``"cuda"``, with a GPU for each rank. `make_learner` must put
            its module there.
        learner_threads: How many threads torch may use on each rank.
        num_cpus: Cores that each rank claims; by default as many as `learner_threads`.
        ranks_per_node: The most ranks of a node; by default as many as there is room for, on as few nodes as possible.
        nodes: Ray's ids of the nodes that may be used; by default all.
        avoid_nodes: Ids of nodes that may not be used, such as those on which environments step.
        timeout_s: How long ranks wait for each other, in seconds.
        address: Of a running Ray cluster.

    Raises:
        ConfigError: Settings that can't work, a learner that can't be on several ranks, or a cluster without room.
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
        address: str | None = None,
    ) -> None:
        self.num_learners = check_count("num_learners", num_learners)
        self._weights: NDArray[np.float32] | None = None
        self._num_starts = 1

        def make(ranks: Ranks) -> _RankLearner:
            return _RankLearner(make_learner, ranks)

        self._group = RankGroup(
            make,
            num_learners,
            device=device,
            threads=learner_threads,
            num_cpus=num_cpus,
            ranks_per_node=ranks_per_node,
            nodes=nodes,
            avoid_nodes=avoid_nodes,
            timeout_s=timeout_s,
            address=address,
        )

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
            batch: Its chunks here, or in the object store, from where each rank fetches what it needs.

        Raises:
            LearnerError: As the learner raises it, or ranks were lost again and again, or a chunk was lost with its
                node; the ranks are then as before the update.
        """
        if not batch.chunks and not batch.chunk_refs:
            raise LearnerError(
                "A learner learns from chunks.",
                expected="a batch with chunks or chunk_refs",
                got="a batch with neither",
                remedy="Collect one with rayvec.Collector",
            )
        self._weights = None
        shards: list[Any]
        if batch.chunk_refs:
            shards = list(split_refs(batch, self.num_learners))
        else:
            shards = [ray.put(shard) for shard in split_batch(batch, self.num_learners)]
        results = self._group.run("update", [(shard,) for shard in shards])
        metrics, self._weights = results[0]
        self._warn_of_losses()
        return dict(metrics)

    def _warn_of_losses(self) -> None:
        if self._num_starts == self._group.num_starts:
            return
        if names := self._group.ask("own_names"):
            logger.warning("all ranks were started again, without what each kept: the %s refills", ", ".join(names))
        self._num_starts = self._group.num_starts

    def weights(self) -> NDArray[np.float32]:
        """Returns a copy of the weights, flat, in the form that ``Policy.load_weights`` takes."""
        if self._weights is None:
            self._weights = self._group.ask("weights")
        return self._weights.copy()

    def state_dict(self) -> dict[str, Any]:
        """Returns the learner's state: tensors and plain values only.

        It is what all ranks share; one learner can go on from it, too. What each of several ranks keeps is in
        ``of_ranks``, a list, if a learner keeps anything there.
        """
        parts = [unpack(part) for part in self._group.ask_all("parts")]
        shared: dict[str, Any] = parts[0][0]
        of_ranks = [own for _, own in parts]
        if self.num_learners == 1:
            return {**shared, **of_ranks[0]}
        return {**shared, "of_ranks": of_ranks} if any(of_ranks) else shared

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets all ranks go on exactly where the learner was that `state` was taken from.

        What ranks kept, such as a replay, goes to as many ranks; if there are more or fewer now, it refills, with a
        warning.

        Raises:
            CheckpointError: `state` is of another kind of learner or net.
        """
        self._weights = None
        shared = dict(state)
        of_ranks = shared.pop("of_ranks", None)
        own = {name: shared.pop(name) for name in self._group.ask("own_names") if name in shared}
        if of_ranks is None and own:
            of_ranks = [own]
        if of_ranks is not None and len(of_ranks) != self.num_learners:
            names, count = ", ".join(of_ranks[0]), len(of_ranks)
            logger.warning("the %s of %d rank(s) does not fit %d, and refills", names, count, self.num_learners)
            of_ranks = None
        self._group.load_state_dict(shared, of_ranks)
        self._num_starts = self._group.num_starts

    def close(self) -> None:
        """Ends the ranks. May be called again."""
        self._group.close()

    def __enter__(self) -> LearnerGroup:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _RankLearner:
    """The learner of one rank, in the rank's own process."""

    def __init__(self, make_learner: Callable[[], Learner], ranks: Ranks) -> None:
        self._learner = make_learner()
        self._ranks = ranks
        if hasattr(self._learner, "ranks"):
            self._learner.ranks = ranks
        elif ranks.size > 1:
            raise ConfigError(
                "A learner on several ranks sums over them.",
                expected="a learner with an attribute `ranks`, see rayvec.learners.ranks",
                got=f"{type(self._learner).__name__}, which has none",
                remedy="Pass num_learners=1, or let the learner sum its gradients by self.ranks.sum_",
            )

    def update(self, shard: Batch | RemoteShard) -> tuple[dict[str, float], NDArray[np.float32] | None]:
        """Learns; returns metrics, and on rank 0 the weights, so that nobody has to ask for them."""
        batch = fetch_shard(shard, _fetch) if isinstance(shard, RemoteShard) else shard
        metrics = self._learner.update(batch)
        return metrics, self._learner.weights() if self._ranks.rank == 0 else None

    def weights(self) -> NDArray[np.float32]:
        return self._learner.weights()

    def module(self) -> nn.Module:
        """Returns a copy on the CPU; its parameters are its own, since a view would carry the whole flat buffer."""
        learning = self._learner.module
        module = copy.deepcopy(learning).cpu()
        for parameter in module.parameters():
            parameter.grad = None
            parameter.data = parameter.data.clone()
        return module

    def state_dict(self) -> dict[str, Any]:
        """Returns what all ranks share."""
        learner = self._learner
        return learner.shared_state() if isinstance(learner, KeepsOwnState) else learner.state_dict()

    def own_names(self) -> tuple[str, ...]:
        """Returns the names of what belongs to this rank alone."""
        return tuple(self._own_state())

    def parts(self) -> Any:
        """Returns what all ranks share, on rank 0 only, and what belongs to this one, packed."""
        return pack((self.state_dict() if self._ranks.rank == 0 else None, self._own_state()))

    def _own_state(self) -> dict[str, Any]:
        return self._learner.own_state() if isinstance(self._learner, KeepsOwnState) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._learner.load_state_dict(state)


def _fetch(ref: Any) -> Chunk:
    """Returns a chunk that lies in the object store.

    Raises:
        LearnerError: It is gone, with the node or the process where it was taken.
    """
    try:
        chunk: Chunk = ray.get(ref)
    except ray.exceptions.ObjectLostError as error:
        raise LearnerError(
            "A chunk that was left in the object store lies there until the update is done.",
            expected="a chunk from each node where environments step",
            got=f"{type(error).__name__}: a node or a process was lost with its part of the batch",
            remedy="Leave this batch out and collect the next one, or go on from the last checkpoint",
        ) from error
    return chunk
