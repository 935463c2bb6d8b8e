"""Ranks that are placed, started, connected and called together.

A `RankGroup` knows nothing of learning. It makes one object on every rank with a function ``make(ranks)``, where
`ranks` is this rank's :class:`~rayvec.learners.ranks.Ranks`, and calls methods of these objects::

    group = RankGroup(make, 4, open_host(num_nodes=0))
    results = group.run("update", [(shard_0,), (shard_1,), (shard_2,), (shard_3,)])
    calls = group.post("iterate")                      # the driver does something else meanwhile
    results = group.gather(calls)
    group.close()

A group does not outlive one of its ranks: when a rank is lost, or its object raises, all ranks end, and the caller
makes a new group from the state that it has. A rank is lost when its process or its actor ends, or when it does not
take part in a sum within the time limit of sums; a rank that hangs elsewhere is waited for.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import cloudpickle

from rayvec.distributed.rank import RankPlacement, lost
from rayvec.envs.pickled_parts import carrying_sys, pickle_by_value_what_cannot_be_imported
from rayvec.errors import LearnerError, RankLostError, RemoteFailure
from rayvec.learners.ranks import Ranks

if TYPE_CHECKING:
    from rayvec.distributed.process_host import ProcessHost
    from rayvec.distributed.ray_host import RayHost

_GRACE_S = 5.0
"""How long other ranks may take to give the cause, once a rank has waited for another in vain."""
_ANSWER_S = 60.0
"""How long a rank may take to start, or to answer a call in which it waits for no other."""
_CLOSE_S = 10.0

RankHost: TypeAlias = "ProcessHost | RayHost"
"""Starts ranks, each a :class:`~rayvec.distributed.rank.Rank` in a process, and carries calls to them."""

logger = logging.getLogger(__name__)


def _distance(error: Exception) -> int:
    """Returns how far an error of a rank is from its cause: the least is raised."""
    if not isinstance(error, RankLostError):
        return 0  # the object raised
    is_remote = getattr(error.__cause__, "raised_in", None) is not None
    return 2 if is_remote else 1  # the rank waited for another rank in vain; its process has ended


class RankGroup(contextlib.AbstractContextManager["RankGroup"]):
    """One object on each of several ranks, called together; see the module.

    Args:
        make: Called on every rank with its `Ranks`; returns the object, which has a method ``close``.
        num_ranks: Number of ranks.
        host: Where they run; the group closes it.
        fewer: Whether fewer ranks may run, at least 1, where there is no room for all of them.
        device: ``"cpu"``, or ``"cuda"`` for one GPU for each rank.
        threads: Number of threads that torch may use on each rank.
        timeout_s: How long ranks wait for each other in a sum, in seconds; it must exceed the longest time that one
            rank computes while another waits for it.

    Attributes:
        placements: Where the ranks are.
        pids: Processes of the ranks, each on its own node.

    Raises:
        ConfigError: Settings that can't work, or too little room for the ranks.
        RankLostError: A rank was lost while it started.
        Exception: What `make` raised, its ``__cause__`` a `LearnerError` with the remote traceback.
    """

    def __init__(
        self,
        make: Callable[[Ranks], Any],
        num_ranks: int,
        host: RankHost,
        *,
        fewer: bool = False,
        device: str = "cpu",
        threads: int = 1,
        timeout_s: float = 60.0,
    ) -> None:
        self._host, self._answer_s = host, max(timeout_s, _ANSWER_S)
        self._ranks: list[Any] = []
        try:
            self.placements: tuple[RankPlacement, ...] = tuple(host.place(num_ranks, fewer=fewer))
            for placement in self.placements:
                self._ranks.append(host.start(placement, device, threads, timeout_s))
            prepared = self.gather(self.post("prepare"), self._answer_s)
            self.pids = tuple(pid for pid, _ in prepared)
            pickle_by_value_what_cannot_be_imported()
            pickled = carrying_sys(cloudpickle.dumps(make))
            with host.rendezvous() as make_store:
                self.run("join", [(make_store, prepared[0][1], pickled)] * self.num_ranks)
        except BaseException:
            self.close(terminate=True)
            raise

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.placements)

    @property
    def has_ended(self) -> bool:
        """Whether the ranks have ended: the group was closed, or a rank was lost."""
        return not self._ranks

    def put(self, value: Any) -> Any:
        """Returns what stands for a value in the arguments of several ranks, as it is when a call is posted."""
        return self._host.put(value)

    def post(self, name: str, args: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Asks every rank to call a method of its object, after the calls before; returns the calls.

        Args:
            name: Of the method.
            args: Positional arguments for each rank; none by default.

        Raises:
            LearnerError: The group has ended.
        """
        if not self._ranks:
            raise LearnerError("RankGroup has ended: it was closed, or a rank was lost. Make a new one.")
        for_each_rank = args or [()] * len(self._ranks)
        return [self._host.call(rank, name, *each) for rank, each in zip(self._ranks, for_each_rank, strict=True)]

    def gather(self, calls: Sequence[Any], limit_s: float = math.inf) -> list[Any]:
        """Waits for calls that `post` returned; returns their results.

        Args:
            calls: The calls.
            limit_s: The longest wait, in seconds.

        Raises:
            RankLostError: A rank was lost; all have ended.
            Exception: What was raised on a rank, its ``__cause__`` a `LearnerError`; all ranks have ended.
        """
        try:
            return self._gather(calls, time.monotonic() + limit_s)
        except BaseException:
            self.close(terminate=True)
            raise

    def _gather(self, calls: Sequence[Any], deadline: float) -> list[Any]:
        pending, results, failures = list(calls), dict[Any, Any](), list[Exception]()
        while pending and all(_distance(error) == 2 for error in failures):
            done = self._host.wait(pending, deadline - time.monotonic())
            if not done:
                late = self.placements[calls.index(pending[0])]
                failures = failures or [lost(late, "it did not answer in time")]
                break
            for call in done:
                pending.remove(call)
                try:
                    results[call] = self._result(call)
                except Exception as error:
                    failures.append(error)
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if failures:
            raise min(failures, key=_distance)
        return [results[call] for call in calls]

    def _result(self, call: Any) -> Any:
        result = self._host.result(call)
        if isinstance(result, RemoteFailure):
            raise result.rebuild(LearnerError)
        return result

    def run(self, name: str, args: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Posts a call and gathers its results."""
        return self.gather(self.post(name, args))

    def ask(self, name: str) -> list[Any]:
        """Calls a method in which ranks do not wait for each other, for a limited time; returns the results."""
        return self.gather(self.post(name), self._answer_s)

    def close(self, *, terminate: bool = False) -> None:
        """Ends the ranks. May be called again.

        Args:
            terminate: Whether they end at once, without `close` of their objects.
        """
        if self._ranks and not terminate:
            try:
                self.gather(self.post("close"), _CLOSE_S)
            except Exception as error:
                logger.warning("killed ranks that did not close in time: %s", error)
        ranks, self._ranks = self._ranks, []
        self._host.kill(ranks)
        self._host.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def open_host(
    *,
    device: str = "cpu",
    num_cpus: int = 1,
    avoid_nodes: Collection[str] = (),
    num_nodes: Literal[0] | None = None,
    address: str | None = None,
) -> RankHost:
    """Returns what runs ranks: as few nodes of a Ray cluster as possible, or processes of this machine.

    Args:
        device: ``"cpu"``, or ``"cuda"`` for one GPU for each rank.
        num_cpus: Cores that each rank claims.
        avoid_nodes: Ids of nodes that may not be used.
        num_nodes: 0 runs the ranks as processes of this machine, without Ray; `num_cpus` and `avoid_nodes` have no
            effect then. Unset: as Ray actors.
        address: Of a running Ray cluster.
    """
    if num_nodes == 0 and address is None:
        from rayvec.distributed.process_host import ProcessHost

        return ProcessHost()
    from rayvec.distributed.rank_placement import ResourceRequest  # these import Ray
    from rayvec.distributed.ray_host import RayHost

    return RayHost(ResourceRequest(num_cpus, int(device == "cuda"), avoid_nodes=avoid_nodes), address)
