"""Ranks that sample and learn: each owns its environments, and only gradients and statistics leave it."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from rayvec.distributed.rank_host import RankHost, RankPlacement
from rayvec.distributed.running_ranks import RankSet
from rayvec.distributed.stragglers import Arrivals, MakeArrivals, SharedArrivals, shared_arrivals
from rayvec.envs.pickled_parts import carrying_sys
from rayvec.errors import ConfigError, RankLostError, without_remedy
from rayvec.learners.ranks import ClosableRanks

__all__ = ["DecentralizedGroup"]

logger = logging.getLogger(__name__)

_CLOSE_S = 10.0


class DecentralizedGroup(RankSet):
    """One object on each of several ranks, which the ranks let run ahead of the driver.

    The driver posts calls and gathers their results later, so that ranks need not wait for it. A lost rank ends all of
    them: every call raises from then on, and the caller makes a new group from the last state that it has kept.

    Args:
        make: Called on every rank with its `Ranks` and what it sees of the `Arrivals`; returns the object.
        num_ranks: Number of ranks.
        host: Where they run; the group closes it.
        fewer: Whether fewer ranks may run, at least 1, where there is no room for all of them.
        device: ``"cpu"``, or ``"cuda"`` for one GPU for each rank.
        threads: Number of threads that torch may use on each rank.
        timeout_s: How long ranks wait for each other in a sum, in seconds.

    Attributes:
        num_ranks: Number of ranks that run.

    Raises:
        ConfigError: There is too little room for the ranks.
        RankLostError: A rank was lost while it started.
        Exception: What `make` raised, its ``__cause__`` a `LearnerError` with the remote traceback.
    """

    def __init__(
        self,
        make: Callable[[ClosableRanks, Arrivals], Any],
        num_ranks: int,
        host: RankHost,
        *,
        fewer: bool = False,
        device: str = "cpu",
        threads: int = 1,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(host, device, threads, timeout_s, may_idle=True)
        self._stack = contextlib.ExitStack()
        self._stack.callback(host.close)
        self._stack.callback(self.end)
        try:
            placements = host.place(num_ranks, fewer=fewer)
            self.num_ranks = len(placements)
            arrivals = self._arrivals = self._make_arrivals(placements)  # an actor ends with its last handle
            late = RankLostError if fewer else ConfigError
            on_rank = functools.partial(_make_on_rank, make, arrivals)
            self.start(placements, carrying_sys(cloudpickle.dumps(on_rank)), late)
        except BaseException:
            self._stack.close()
            raise

    def _make_arrivals(self, placements: Sequence[RankPlacement]) -> MakeArrivals:
        if not placements[0].node_id:
            path = self._stack.enter_context(shared_arrivals(len(placements)))
            return functools.partial(SharedArrivals, path)
        from rayvec.distributed.stragglers_on_ray import RayArrivals, start_counter  # imports Ray

        return functools.partial(RayArrivals, start_counter())

    def run(self, name: str, args: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Posts a call and gathers its results."""
        return self.gather(self.post(name, args))

    def close(self, *, terminate: bool = False) -> None:
        """Ends the ranks. May be called again.

        Args:
            terminate: Whether they end at once, without closing their objects.
        """
        if self.ranks and not terminate:
            try:
                self.gather(self.post("close"), _CLOSE_S)
            except Exception as error:
                logger.warning("killed ranks that did not close in time: %s", without_remedy(error))
        self._stack.close()


def _make_on_rank(
    make: Callable[[ClosableRanks, Arrivals], Any], make_arrivals: MakeArrivals, ranks: ClosableRanks
) -> Any:
    return make(ranks, make_arrivals(ranks.rank, ranks.size))
