"""Ranks as Ray actors: placed, connected, called together, and restarted from a checkpoint when one is lost.

A `RankGroup` knows nothing of learning. It makes one object on every rank with a function ``make(ranks)``, where
`ranks` is this rank's :class:`~rayvec.learners.ranks.Ranks`, and calls methods of these objects::

    group = RankGroup(make, num_ranks=4)
    results = group.run("update", [(shard_0,), (shard_1,), (shard_2,), (shard_3,)])   # changes what the objects hold
    weights = group.ask("weights")                                                    # calls rank 0, changes nothing
    state = group.state_dict()
    group.close()

The objects keep these rules:

*   ``state_dict()`` returns everything that the next call depends on, tensors and plain values only, and
    ``load_state_dict(state)`` continues from it.
*   Objects of all ranks have the same state before and after every `run`. They begin with that of rank 0.
    Rank-local state is left out of ``state_dict()`` and is lost with the ranks; only `load_state_dict` restores it.
*   The same call from the same state gives the same result, so that it may be repeated.

An argument that is a Ray object reference is fetched by the rank that gets it. A reference inside a list or tuple
stays a reference, which the object may fetch itself.

After every `run` the group puts rank 0's state in the object store, as its checkpoint, while the caller continues.
When a rank is lost (its process or its node ended, it hangs, or it did not take part in a sum in time), the group
ends all ranks, restarts them from the checkpoint, and repeats the calls since. After more than three losses in a row
it raises a `LearnerError`. An exception that an object's method raises is raised by `run` with its own type; the group
is then as it was before the call.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayvec.cluster.session import RaySession
from rayvec.distributed.rank_actor import RankActor, RankOffer, RankPlacement, pack, unpack
from rayvec.distributed.rank_placement import ResourceRequest, find_placements
from rayvec.distributed.rendezvous import delete_rendezvous
from rayvec.errors import ConfigError, LearnerError, RankLostError, RemoteFailure, check_choice, check_count
from rayvec.learners.ranks import Ranks

__all__ = ["RankGroup"]

_MOST_LOSSES = 3
_GRACE_S = 5.0
_PAUSE_S = 1.0
_START_S = 60.0
_ANSWER_S = 60.0
_T = TypeVar("_T")
_Call = tuple[str, list[tuple[Any, ...]]]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Rank:
    """A rank as the driver sees it."""

    placement: RankPlacement
    actor: Any
    pid: int = 0


class RankGroup:
    """One object on each of several ranks, called together; see the module for the rules.

    Args:
        make: Called on every rank with its `Ranks`; returns the object.
        num_ranks: Number of ranks.
        device: ``"cpu"``, or ``"cuda"`` for one GPU for each rank.
        threads: Number of threads that torch may use on each rank.
        num_cpus: Cores that each rank claims; by default as many as `threads`. With 0 a rank claims none.
        ranks_per_node: The most ranks of a node; by default as many as fit, on as few nodes as possible.
        nodes: Ray's ids of the nodes that may be used; by default all.
        avoid_nodes: Ids of nodes that may not be used, such as those on which environments step.
        timeout_s: How long ranks wait for each other, in seconds; it must exceed the longest time that one rank
            computes while another waits for it. Ranks whose processes use no CPU time for half as long are lost, too.
        address: Of a running Ray cluster; see :class:`~rayvec.cluster.session.RaySession`.

    Raises:
        ConfigError: Settings that can't work, or a cluster without capacity for the ranks. The group looks for 10 s;
            ranks whose cores another program claims meanwhile have a minute or `timeout_s`, whichever is longer.
        Exception: What `make` raised, its ``__cause__`` a `LearnerError` with the remote traceback.
    """

    def __init__(
        self,
        make: Callable[[Ranks], Any],
        num_ranks: int = 1,
        *,
        device: str = "cpu",
        threads: int = 1,
        num_cpus: int | None = None,
        ranks_per_node: int | None = None,
        nodes: Collection[str] | None = None,
        avoid_nodes: Collection[str] = (),
        timeout_s: float = 60.0,
        address: str | None = None,
    ) -> None:
        self.num_ranks = check_count("num_ranks", num_ranks)
        check_choice("device", device, ("cpu", "cuda"))
        check_count("threads", threads)
        if ranks_per_node is not None:
            check_count("ranks_per_node", ranks_per_node)
        self._make = cloudpickle.dumps(make)
        self._device, self._threads, self._timeout_s = device, threads, timeout_s
        cpus = threads if num_cpus is None else num_cpus
        self._request = ResourceRequest(cpus, int(device == "cuda"), ranks_per_node, nodes, avoid_nodes)
        self._ranks: list[_Rank] = []
        self._checkpoint: Any = None
        self._pending_checkpoint: Any = None
        self._calls_since_checkpoint: list[_Call] = []
        self._num_losses = 0
        self._num_starts = 0
        self._closed = False
        self._session = RaySession(address)
        try:
            self._retry_on_rank_loss(lambda: None)
        except BaseException:
            self.close()
            raise

    @property
    def placements(self) -> tuple[RankPlacement, ...]:
        """Where the ranks are."""
        return tuple(rank.placement for rank in self._ranks)

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes of the ranks, each on its own node."""
        return tuple(rank.pid for rank in self._ranks)

    @property
    def num_starts(self) -> int:
        """Number of times that all ranks were started: 1, and 1 more for each restart."""
        return self._num_starts

    def run(self, name: str, args: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Calls a method on all ranks together, which may change what they hold; returns each rank's result.

        Args:
            name: Of the method.
            args: Positional arguments for each rank; none by default.

        Raises:
            LearnerError: Ranks were lost again and again.
            Exception: What the method raised, its ``__cause__`` a `LearnerError` with the remote traceback.
        """
        call = name, [()] * self.num_ranks if args is None else list(args)

        def work() -> tuple[list[Any], Any]:
            calls = self._begin(*call)
            checkpoint = self._ranks[0].actor.state_dict.remote()  # it runs right after the call
            return self._gather(calls), checkpoint

        results, self._pending_checkpoint = self._retry_on_rank_loss(work)
        self._calls_since_checkpoint.append(call)
        return results

    def ask(self, name: str, *args: Any) -> Any:
        """Calls a method of rank 0's object that changes nothing; returns the result. Raises as `run` does."""
        return self._retry_on_rank_loss(lambda: self._answers([self._ranks[0].actor.call.remote(name, *args)])[0])

    def ask_all(self, name: str) -> list[Any]:
        """Calls a method of every rank's object that changes nothing; returns the results. Raises as `run` does."""
        return self._retry_on_rank_loss(lambda: self._answers(self._begin(name, [()] * self.num_ranks)))

    def state_dict(self) -> Any:
        """Returns the state that all ranks share, in the driver's own memory. Raises as `run` does."""
        return self._retry_on_rank_loss(lambda: unpack(ray.get(self._checkpoint)))

    def load_state_dict(self, state: Mapping[str, Any], rank_local: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Gives all ranks the same state, and each rank its entry of `rank_local` besides. Raises as `run` does."""
        shared = ray.put(pack(state))
        local = [ray.put(pack(each)) for each in rank_local or [{}] * self.num_ranks]

        def load() -> None:
            pairs = zip(self._ranks, local, strict=True)
            self._answers([rank.actor.load_state_dict.remote(shared, each) for rank, each in pairs])

        self._retry_on_rank_loss(load)
        self._keep(shared)

    def _retry_on_rank_loss(self, work: Callable[[], _T]) -> _T:
        """Returns what `work` returns on ranks with the present state; restarts them and repeats it if one is lost."""
        if self._closed:
            raise LearnerError(
                "A group that was closed has no ranks any more.",
                expected="calls before close()",
                got="one after it",
                remedy="Make a new group",
            )
        while True:
            try:
                if not self._ranks:
                    self._start()
                self._finish_checkpoint()
                result = work()
            except RankLostError as error:
                self._end_ranks()
                self._num_losses += 1
                if self._num_losses > _MOST_LOSSES:
                    raise _crash_loop(error) from error
                logger.warning("restarting all ranks: %s", error)
                time.sleep(_PAUSE_S * (self._num_losses - 1))  # Ray lists a node for a while after it is gone
            except BaseException:
                self._end_ranks()  # some may have stopped half way: the next call restarts them
                raise
            else:
                self._num_losses = 0
                return result

    def _finish_checkpoint(self) -> None:
        """Waits until the state after the last call lies where it outlives all ranks."""
        if self._pending_checkpoint is not None:
            self._answers([self._pending_checkpoint])
            self._keep(self._pending_checkpoint)

    def _keep(self, checkpoint: Any) -> None:
        self._checkpoint, self._pending_checkpoint, self._calls_since_checkpoint = checkpoint, None, []

    def _start(self) -> None:
        """Starts all ranks from the checkpoint and repeats the calls since."""
        placements = self._find_placements()
        try:
            self._ranks = [_Rank(placement, self._make_actor(placement)) for placement in placements]
            self._connect(self._await_offers())
            if self._checkpoint is None:
                self._pending_checkpoint = self._ranks[0].actor.state_dict.remote()
                self._finish_checkpoint()
            self._answers([rank.actor.load_state_dict.remote(self._checkpoint) for rank in self._ranks])
            for call in self._calls_since_checkpoint:
                self._gather(self._begin(*call))
            if self._calls_since_checkpoint:
                self._pending_checkpoint = self._ranks[0].actor.state_dict.remote()
            self._num_starts += 1
        except BaseException:
            self._end_ranks()
            raise

    def _find_placements(self) -> list[RankPlacement]:
        try:
            return find_placements(self.num_ranks, self._request)
        except ConfigError as error:
            if self._checkpoint is None:
                raise
            raise LearnerError(f"Ranks were lost, and there is no room to restart them. {error}") from error

    def _make_actor(self, placement: RankPlacement) -> Any:
        options = {
            "num_cpus": self._request.num_cpus,
            "num_gpus": self._request.num_gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(placement.node_id, soft=False),
        }
        actor = ray.remote(RankActor).options(**options)
        return actor.remote(placement, self._device, self._threads, self._timeout_s)

    def _await_offers(self) -> list[RankOffer]:
        """Waits until all ranks run; Ray waits without a limit for cores that another program claimed meanwhile."""
        limit_s = max(self._timeout_s, _START_S)
        pending = [rank.actor.offer.remote() for rank in self._ranks]
        _, late = ray.wait(pending, num_returns=len(pending), timeout=limit_s)
        if late:
            kind = ConfigError if self._checkpoint is None else LearnerError
            names = ", ".join(
                str(rank.placement) for rank, each in zip(self._ranks, pending, strict=True) if each in late
            )
            raise kind(
                "Every rank gets its cores, and with CUDA a GPU, soon after the group asks for it.",
                expected=f"{len(pending)} rank(s) that run within {limit_s:g} s",
                got=f"no answer yet from {names}",
                remedy="End what claimed cores or GPUs at the same time, or pass a longer timeout_s to a slow cluster",
            )
        offers: list[RankOffer] = self._gather(pending)
        for rank, offer in zip(self._ranks, offers, strict=True):
            rank.pid = offer.pid
        return offers

    def _connect(self, offers: Sequence[RankOffer]) -> None:
        share_memory = all(offer.shares_memory for offer in offers)
        pairs = list(zip(self.placements, offers, strict=True))
        paths = {placement.node: offer.path for placement, offer in pairs if offer.path}
        rendezvous = uuid.uuid4().hex
        try:
            self._gather(
                [
                    rank.actor.join.remote(rendezvous, paths.get(rank.placement.node), share_memory, self._make)
                    for rank in self._ranks
                ]
            )
        finally:
            delete_rendezvous(rendezvous)

    def _begin(self, name: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [rank.actor.call.remote(name, *each) for rank, each in zip(self._ranks, args, strict=True)]

    def _answers(self, refs: list[Any]) -> list[Any]:
        """Waits as `_gather` does for calls in which no rank waits for another: for a limited time."""
        return self._gather(refs, max(self._timeout_s, _ANSWER_S))

    def _gather(self, refs: list[Any], limit_s: float | None = None) -> list[Any]:
        """Waits for one result of each of the first ranks.

        All ranks compute together: once one has returned, the others do within the time that ranks wait for each
        other, and once one has failed, soon.

        Args:
            refs: Of the results.
            limit_s: How long to wait for the first result, in seconds; by default as long as the ranks compute.

        Raises:
            RankLostError: A rank exited, hangs, or did not return in time.
            Exception: What was raised on a rank.
        """
        first = self._await_first(refs) if limit_s is None else ray.wait(refs, num_returns=1, timeout=limit_s)[0]
        if not first:
            raise _lost(self._ranks[0], f"no answer within {limit_s:g} s")
        has_failed = isinstance(_outcome(self._ranks[0], first[0]), Exception)
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=_GRACE_S if has_failed else self._timeout_s)
        outcomes = [
            _outcome(rank, ref) if ref in ready else _lost(rank, "it did not return in time")
            for rank, ref in zip(self._ranks, refs, strict=False)
        ]
        errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if errors:
            raise min(errors, key=_consequence)
        return outcomes

    def _await_first(self, refs: list[Any]) -> list[Any]:
        """Waits for the first result as long as any rank uses CPU time: one that hangs uses none."""
        pause_s, used_before_s = self._timeout_s / 2, None
        while not (first := ray.wait(refs, num_returns=1, timeout=pause_s)[0]):
            used_s = self._cpu_times_s()
            if used_s is not None and used_s == used_before_s:
                raise _lost(self._ranks[0], f"no rank has used any CPU time for {pause_s:g} s")
            used_before_s = used_s
        return first

    def _cpu_times_s(self) -> list[int] | None:
        """Returns the CPU time that each rank has used, or None where a node does not say so in time."""
        measured = [
            ray.remote(_cpu_ticks)
            .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(rank.placement.node_id, soft=False))
            .remote(rank.pid)
            for rank in self._ranks
        ]
        try:
            return ray.get(measured, timeout=max(self._timeout_s, _ANSWER_S))
        except ray.exceptions.RayError:
            return None  # the result of the rank says what is wrong

    def _end_ranks(self) -> None:
        """Ends all ranks, also those that hang; their claims come free soon after."""
        ranks, self._ranks, self._pending_checkpoint = self._ranks, [], None
        for rank in ranks if ray.is_initialized() else []:  # they end with Ray, and a call would start another Ray
            with contextlib.suppress(Exception):  # it may have ended already
                ray.kill(rank.actor)

    def close(self) -> None:
        """Ends all ranks. May be called again."""
        if not self._closed:
            self._closed = True
            self._end_ranks()
            self._keep(None)
            self._session.release()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _cpu_ticks(pid: int) -> int:
    """Returns the CPU time that a process of this machine has used, in clock ticks; see proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _outcome(rank: _Rank, ref: Any) -> Any:
    """Returns the result of a call that has ended, or the exception that it ended with."""
    try:
        result = ray.get(ref)
    except ray.exceptions.RayError as error:
        reason = str(error).splitlines()[0] if str(error) else "no reason given"
        lost = _lost(rank, f"{type(error).__name__}: {reason}")
        lost.__cause__ = error
        return lost
    return result.rebuild(LearnerError) if isinstance(result, RemoteFailure) else result


def _consequence(error: Exception) -> int:
    """Orders errors of one call: what an object raised and what ended a process make other ranks fail."""
    if not isinstance(error, RankLostError):
        return 0
    return 1 if isinstance(error.__cause__, ray.exceptions.RayError) else 2


def _lost(rank: _Rank, reason: str) -> RankLostError:
    return RankLostError(
        "A rank lives until its group is closed.",
        expected=f"{rank.placement} (process {rank.pid or 'not yet known'}) to answer",
        got=reason,
        remedy="Look into the log of its node for what ended it",
    )


def _crash_loop(error: RankLostError) -> LearnerError:
    return LearnerError(
        "A group whose ranks are lost continues from its checkpoint.",
        expected=f"at most {_MOST_LOSSES} losses in a row",
        got=f"another one: {error}",
        remedy="Look for what ends the ranks, such as too little memory",
    )
