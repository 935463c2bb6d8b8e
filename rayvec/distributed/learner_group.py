"""A learner on several ranks, which together compute the updates of one learner."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import pickle
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import nn

from rayvec.data import Batch
from rayvec.data.topology import even_bounds
from rayvec.distributed.rank import pack, unpack
from rayvec.distributed.rank_group import RankGroup, open_host
from rayvec.distributed.rank_state import give_ranks, join_state, rank_local_state, shared_state, split_state
from rayvec.envs.pickled_parts import pickled_for_workers
from rayvec.errors import LearnerError, check_count
from rayvec.learners.base import Learner, set_learning_rate
from rayvec.learners.ranks import Ranks
from rayvec.policies.networks import copy_to_cpu

_SAVE_INTERVAL_S = 1.0
"""How old the state may be from which new ranks continue, beyond the update in which a rank was lost."""

logger = logging.getLogger(__name__)


class LearnerGroup(contextlib.AbstractContextManager["LearnerGroup"]):
    """A learner on several ranks, Ray actors or processes of this machine, which divide every batch among themselves.

    All ranks together compute what one learner computes from the whole batch. They begin with the weights of rank 0,
    each gets a range of the batch's environments, and gradients are summed before they are clipped, so that all ranks
    have the same weights after every update.

    A rank that is lost in an update raises a `LearnerError`, and so does what a learner raises; all ranks end then.
    `weights` still returns the weights of the last completed update. The next call starts new ranks, which continue
    from the state of a completed update that was at most a second older, or from that of a later `state_dict` or
    `load_state_dict`. Rank-local state, such as the replay of SAC, is empty then. (A run of :func:`rayvec.train`
    continues from its checkpoint instead.)

    Args:
        make_learner: Makes the learner, on each rank. With several ranks the learner has an attribute ``ranks``, as
            those of rayvec do.
        num_learners: Number of ranks.
        device: Where the learner computes, ``"cpu"``, or ``"cuda"`` with a GPU for each rank. `make_learner` must put
            its module there.
        learner_threads: Number of threads that torch may use on each rank.
        num_cpus: Cores that each rank claims; by default as many as `learner_threads`.
        avoid_nodes: Ray's ids of nodes that may not be used, such as those on which environments step.
        timeout_s: How long ranks wait for each other, in seconds.
        num_nodes: 0 runs the ranks as processes of this machine, without Ray. Unset: as Ray actors.
        address: Of a running Ray cluster.
        fewer: Whether fewer ranks may run, at least 1, where there is no room for all of them.
        saves_state: Whether the driver saves the state of completed updates; else new ranks continue from the latest
            `state_dict` or `load_state_dict`, or start again from the beginning.

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
        avoid_nodes: Collection[str] = (),
        timeout_s: float = 60.0,
        num_nodes: Literal[0] | None = None,
        address: str | None = None,
        fewer: bool = False,
        saves_state: bool = True,
    ) -> None:
        check_count("num_learners", num_learners)
        self._weights: NDArray[np.float32] | None = None
        self._state: Any = None
        self._saves_state, self._saved_at_s = saves_state, 0.0
        self._is_closed = False
        self._open_host = functools.partial(
            open_host,
            device=device,
            num_cpus=learner_threads if num_cpus is None else num_cpus,
            avoid_nodes=avoid_nodes,
            num_nodes=num_nodes,
            address=address,
        )
        self._open_group = functools.partial(
            RankGroup,
            functools.partial(_RankLearner, make_learner),
            num_learners,
            device=device,
            threads=learner_threads,
            timeout_s=timeout_s,
            fewer=fewer,
        )
        self._group = self._start()

    def _start(self) -> RankGroup:
        """Starts ranks with the saved state, or at first with that of rank 0."""
        group = self._open_group(self._open_host())
        shared, rank_local = group.ask("parts")[0]
        self._rank_local_names = tuple(unpack(rank_local))
        if self._state is None:
            self._state = shared
        elif names := ", ".join(self._rank_local_names):
            logger.warning("new ranks start without their rank-local state: the %s refills", names)
        group.run("load_state_dict", [(group.put(self._state), pack({}))] * group.num_ranks)
        return group

    @property
    def group(self) -> RankGroup:
        """The ranks themselves: where they are, and their processes. It starts new ones if a rank was lost."""
        if self._is_closed:
            raise LearnerError("LearnerGroup is closed. Make a new one.")
        if self._group.has_ended:
            self._group = self._start()
        return self._group

    @property
    def num_learners(self) -> int:
        """Number of ranks."""
        return self._group.num_ranks

    @property
    def module(self) -> nn.Module:
        """A copy of what learns, with the present weights.

        Raises:
            TypeError: It can't be pickled.
        """
        module: nn.Module = pickle.loads(self.group.ask("module")[0])
        return module

    def update(self, batch: Batch) -> dict[str, float]:
        """Learns from a batch on all ranks; returns the metrics of the whole batch.

        Args:
            batch: What a collector returned.

        Raises:
            LearnerError: As the learner raises it; or a rank was lost.
        """
        if batch.stats.staleness_counts and self.num_learners > 1:
            raise LearnerError(
                "The batch comes from a collector with max_staleness, in which an environment may have several columns "
                "or none; each rank learns from environments of its own. Leave max_staleness out, or learn in the "
                "driver."
            )
        metrics, self._weights = self._run("update", batch)[0]
        if self._saves_state and time.monotonic() - self._saved_at_s >= _SAVE_INTERVAL_S:
            self._save(self._group.ask("shared")[0])
        return dict(metrics)

    def measure(self, batch: Batch) -> None:
        """Adds the observations of a batch to the moments that normalise later ones; see ``PPOLearner.measure``."""
        self._run("measure", batch)
        state = self._group.ask("shared")[0]  # a rank that is lost here leaves the weights of the last update
        self._weights = None
        self._save(state)

    def _run(self, name: str, batch: Batch) -> list[Any]:
        """Gives each rank its part of a batch; returns the results."""
        group = self.group
        if group.num_ranks == 1:  # chunks of a batch with max_staleness may differ in their environments
            parts = [group.put(batch)]
        else:
            parts = [group.put(shard) for shard in split_batch(batch, group.num_ranks)]
        return group.run(name, [(part,) for part in parts])

    def _save(self, state: Any) -> None:
        self._state, self._saved_at_s = state, time.monotonic()

    def weights(self) -> NDArray[np.float32]:
        """Returns a copy of the weights, flat, in the form that ``Policy.load_weights`` takes."""
        if self._weights is None:
            self._weights = self.group.ask("weights")[0]
        return self._weights.copy()

    def state_dict(self) -> dict[str, Any]:
        """Returns the learner's state: tensors and plain values only.

        It is the state that all ranks share; one learner can continue from it, too. With several ranks, the
        rank-local parts are in the list ``rank_local``, if the learner has such parts.
        """
        parts = self.group.run("parts")
        self._save(parts[0][0])
        return join_state(unpack(parts[0][0]), [unpack(local) for _, local in parts])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets all ranks continue exactly where the learner was when `state` was taken.

        Rank-local state, such as a replay, goes to as many ranks as it came from; into another number of ranks it is
        not loaded, with a warning.

        Raises:
            CheckpointError: `state` is of another kind of learner or network.
        """
        group = self.group
        shared, rank_local = split_state(state, self._rank_local_names, group.num_ranks)
        packed = copy.deepcopy(pack(shared))
        whole = group.put(packed)
        group.run("load_state_dict", [(whole, group.put(pack(local))) for local in rank_local])
        self._weights = None
        self._save(packed)

    def set_learning_rate(self, value: float | None) -> None:
        """Lets all ranks use a learning rate from the next update on; None: the schedule of the learner."""
        self.group.run("set_learning_rate", [(value,)] * self.num_learners)

    def close(self) -> None:
        """Ends the ranks. May be called again."""
        self._is_closed = True
        self._group.close(terminate=True)

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _RankLearner:
    """The learner of one rank, in the rank's own process."""

    def __init__(self, make_learner: Callable[[], Learner], ranks: Ranks) -> None:
        self._learner = make_learner()
        self._is_first = ranks.rank == 0
        give_ranks(self._learner, ranks)

    def update(self, part: Batch) -> tuple[dict[str, float], Any]:
        """Learns from this rank's part of a batch; returns metrics, and on rank 0 the weights."""
        metrics = self._learner.update(part)
        return metrics, self._learner.weights() if self._is_first else None

    def measure(self, part: Batch) -> None:
        """Adds observations to the moments of the learner, if it has some."""
        if hasattr(self._learner, "measure"):
            self._learner.measure(part)

    def weights(self) -> NDArray[np.float32]:
        return self._learner.weights()

    def module(self) -> bytes:
        """Returns a copy of the module by cloudpickle, on rank 0."""
        module = copy_to_cpu(self._learner.module) if self._is_first else None
        return pickled_for_workers(
            module,
            "a rank's network",
            'Compute updates in the driver, learners="driver", or let ranks act, learners="decentralized".',
        )

    def parts(self) -> tuple[Any, Any]:
        """Returns what all ranks share of the state, on rank 0, and what is rank-local, packed."""
        return self.shared(), pack(rank_local_state(self._learner))

    def load_state_dict(self, shared: Any, rank_local: Any) -> None:
        """Continues from what all ranks share and what is rank-local, packed."""
        self._learner.load_state_dict({**unpack(shared), **unpack(rank_local)})

    def set_learning_rate(self, value: float | None) -> None:
        set_learning_rate(self._learner, value)

    def shared(self) -> Any:
        """Returns what all ranks share of the state, on rank 0."""
        return pack(shared_state(self._learner)) if self._is_first else None


def split_batch(batch: Batch, num_ranks: int) -> list[Batch]:
    """Divides the environments of a batch, ascending with rank, as evenly as possible; a rank may get none."""
    bounds = pairwise(even_bounds(batch.chunks[0].num_envs, num_ranks))
    return [replace(batch, chunks=tuple(chunk.columns(*each) for chunk in batch.chunks)) for each in bounds]
