"""Ranks as Ray actors: placed, told apart, called together, and started again where they were when one is lost.

A `RankGroup` knows nothing of learning. It makes one object on every rank with a function ``make(ranks)``, where
`ranks` is this rank's :class:`~rayvec.learners.ranks.Ranks`, and calls methods of these objects::

    group = RankGroup(make, num_ranks=4)
    results = group.run("update", [(shard_0,), (shard_1,), (shard_2,), (shard_3,)])   # changes what the objects hold
    weights = group.ask("weights")                                                    # asks rank 0, changes nothing
    state = group.state_dict()
    group.close()

What it asks of the objects:

*   ``state_dict()`` returns everything that the next call depends on, tensors and plain values only, and
    ``load_state_dict(state)`` goes on from it.
*   Objects of all ranks have the same state before and after every `run`. They begin with that of rank 0. What
    belongs to one rank alone is left out of ``state_dict()``, and is lost with the ranks; it comes in by
    `load_state_dict` only.
*   The same call from the same state gives the same result, so that it may be done again.

Arguments that are Ray object references are fetched by the rank that gets them, if they are arguments themselves;
inside lists or tuples they stay references, which the object may fetch itself or not.

After every `run` rank 0's state is put in the object store while the caller goes on. When a rank is lost (its process
or its node ended, or it did not come to a sum in time), all ranks are ended and started again from the last such
state, and the call is done again. Whoever loses ranks more than three times in a row gets a `LearnerError`. An
exception raised by an object's method is raised by `run` with its own type; the group is then as it was before the
call.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import cloudpickle
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayvec.cluster.session import RaySession
from rayvec.distributed.rank_actor import Meeting, RankActor, Seat, pack, unpack
from rayvec.distributed.rank_placement import Wish, find_seats
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

    seat: Seat
    actor: Any
    pid: int = 0


class RankGroup:
    """One object on each of several ranks, called together; see the module for the contract.

    Args:
        make: Called on every rank with its `Ranks`; returns the object.
        num_ranks: How many ranks.
        device: ``"cpu"``, or ``"cuda"`` for one GPU for each rank.
        threads: How many torch may use on each rank.
        num_cpus: Cores that each rank claims; by default as many as `threads`. With 0 none is claimed.
        ranks_per_node: The most ranks of a node; by default as many as there is room for, on as few nodes as possible.
        nodes: Ray's ids of the nodes that may be used; by default all.
        avoid_nodes: Ids of nodes that may not be used, such as those on which environments step.
        timeout_s: How long ranks wait for each other, in seconds; it must exceed the longest time that one rank
            computes while another waits for it.
        address: Of a running Ray cluster; see :class:`~rayvec.cluster.session.RaySession`.

    Raises:
        ConfigError: Settings that can't work, or a cluster without room for the ranks: found out within 10 s, or,
            if somebody else took it meanwhile, within a minute or `timeout_s`, whichever is longer.
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
        self._wish = Wish(cpus, int(device == "cuda"), ranks_per_node, nodes, avoid_nodes)
        self._ranks: list[_Rank] = []
        self._saved: Any = None
        self._saving: Any = None
        self._since: list[_Call] = []
        self._num_losses = 0
        self._num_starts = 0
        self._closed = False
        self._session = RaySession(address)
        try:
            self._surely(lambda: None)
        except BaseException:
            self.close()
            raise

    @property
    def seats(self) -> tuple[Seat, ...]:
        """Where the ranks are."""
        return tuple(rank.seat for rank in self._ranks)

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes of the ranks, each on its own node."""
        return tuple(rank.pid for rank in self._ranks)

    @property
    def num_starts(self) -> int:
        """How often all ranks have been started: once, and once more for each time that they were ended."""
        return self._num_starts

    def run(self, name: str, args: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Calls a method on all ranks together, which may change what they hold; returns each one's result.

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
            saving = self._ranks[0].actor.state_dict.remote()  # right behind its call
            return self._gather(calls), saving

        results, saving = self._surely(work)
        self._since.append(call)
        self._saving = saving
        return results

    def ask(self, name: str, *args: Any) -> Any:
        """Calls a method of rank 0's object that changes nothing; returns the result. Raises as `run` does."""
        return self._surely(lambda: self._answers([self._ranks[0].actor.call.remote(name, *args)])[0])

    def ask_all(self, name: str) -> list[Any]:
        """Calls a method of every rank's object that changes nothing; returns the results. Raises as `run` does."""
        return self._surely(lambda: self._answers(self._begin(name, [()] * self.num_ranks)))

    def state_dict(self) -> Any:
        """Returns the state that all ranks have, in the driver's own memory. Raises as `run` does."""
        return self._surely(lambda: unpack(ray.get(self._saved)))

    def load_state_dict(self, state: Mapping[str, Any], of_ranks: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Gives all ranks the same state, and each its entry of `of_ranks` besides. Raises as `run` does."""
        ref = ray.put(pack(state))
        own = [ray.put(pack(each)) for each in of_ranks or [{}] * self.num_ranks]

        def load() -> None:
            pairs = zip(self._ranks, own, strict=True)
            self._answers([rank.actor.load_state_dict.remote(ref, each) for rank, each in pairs])

        self._surely(load)
        self._saved, self._saving, self._since = ref, None, []

    def _surely(self, work: Callable[[], _T]) -> _T:
        """Does `work` on ranks that live and have the present state, again if some are lost meanwhile."""
        self._check_open()
        while True:
            try:
                if not self._ranks:
                    self._start()
                self._keep_state()
                result = work()
            except RankLostError as error:
                self._end_ranks()
                self._num_losses += 1
                if self._num_losses > _MOST_LOSSES:
                    raise _crash_loop(error) from error
                logger.warning("starting all ranks again: %s", error)
                time.sleep(_PAUSE_S * (self._num_losses - 1))  # a node that is gone is listed for a while
            except BaseException:
                self._end_ranks()  # some may have stopped half way: the next call starts them where they were
                raise
            else:
                self._num_losses = 0
                return result

    def _check_open(self) -> None:
        if self._closed:
            raise LearnerError(
                "A group that was closed has no ranks any more.",
                expected="calls before close()",
                got="one after it",
                remedy="Make a new group",
            )

    def _keep_state(self) -> None:
        """Waits until the state after the last call lies where it outlives all ranks."""
        if self._saving is None:
            return
        self._answers([self._saving])
        self._saved, self._saving, self._since = self._saving, None, []

    def _start(self) -> None:
        """Starts all ranks with the last state that was kept, and does again what came after it."""
        seats = self._find_seats()
        try:
            self._ranks = [_Rank(seat, self._make_actor(seat)) for seat in seats]
            offers = [rank.actor.offer.remote() for rank in self._ranks]
            self._await_places(offers)
            meetings = self._gather(offers)
            for rank, meeting in zip(self._ranks, meetings, strict=True):
                rank.pid = meeting.pid
            self._join(meetings)
            if self._saved is None:
                self._saving = self._ranks[0].actor.state_dict.remote()
                self._keep_state()
            self._answers([rank.actor.load_state_dict.remote(self._saved) for rank in self._ranks])
            for call in self._since:
                self._call(*call)
            if self._since:
                self._saving = self._ranks[0].actor.state_dict.remote()
            self._num_starts += 1
        except BaseException:
            self._end_ranks()
            raise

    def _await_places(self, offers: list[Any]) -> None:
        """Waits until all ranks run; one whose claim somebody else took meanwhile would be waited for without end."""
        limit_s = max(self._timeout_s, _START_S)
        _, late = ray.wait(offers, num_returns=len(offers), timeout=limit_s)
        if not late:
            return
        kind = ConfigError if self._saved is None else LearnerError
        names = ", ".join(rank.seat.name for rank, offer in zip(self._ranks, offers, strict=True) if offer in late)
        raise kind(
            "Every rank has a place, with cores and with CUDA a GPU, soon after the group asks for it.",
            expected=f"{len(offers)} rank(s) that run within {limit_s:g} s",
            got=f"no answer yet from {names}",
            remedy="End what claimed cores or GPUs at the same time, or pass a longer timeout_s to a slow cluster",
        )

    def _find_seats(self) -> list[Seat]:
        try:
            return find_seats(self.num_ranks, self._wish)
        except ConfigError as error:
            if self._saved is None:
                raise
            raise LearnerError(f"Ranks were lost, and there is no room to start them again. {error}") from error

    def _make_actor(self, seat: Seat) -> Any:
        options = {
            "num_cpus": self._wish.num_cpus,
            "num_gpus": self._wish.num_gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(seat.node_id, soft=False),
        }
        actor = ray.remote(RankActor).options(**options)
        return actor.remote(seat, self._device, self._threads, self._timeout_s)

    def _join(self, meetings: Sequence[Meeting]) -> None:
        shares_memory = all(meeting.shares_memory for meeting in meetings)
        paths = {rank.seat.node: each.path for rank, each in zip(self._ranks, meetings, strict=True) if each.path}
        joining = []
        for rank in self._ranks:
            meeting = replace(
                meetings[0], shares_memory=shares_memory, path=paths.get(rank.seat.node), store=meetings[0].store
            )
            joining.append(rank.actor.join.remote(meeting, self._make))
        self._gather(joining)

    def _begin(self, name: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [rank.actor.call.remote(name, *each) for rank, each in zip(self._ranks, args, strict=True)]

    def _call(self, name: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._gather(self._begin(name, args))

    def _answers(self, refs: list[Any]) -> list[Any]:
        """Waits as `_gather` does for calls in which no rank waits for another: for so long at most."""
        return self._gather(refs, max(self._timeout_s, _ANSWER_S))

    def _gather(self, refs: list[Any], first_s: float | None = None) -> list[Any]:
        """Waits for one result of each of the first ranks.

        All ranks compute together: once one has returned, the others do within the time that ranks wait for each
        other, and once one has failed, soon.

        Args:
            refs: Of the results.
            first_s: How long to wait for the first of them, in seconds; by default without end.

        Raises:
            RankLostError: A rank is gone, or did not return in time.
            Exception: What was raised on a rank.
        """
        first, others = ray.wait(refs, num_returns=1, timeout=first_s)
        if not first:
            raise _lost(self._ranks[0], f"no answer within {first_s:g} s")
        if others:
            limit_s = self._timeout_s if _succeeded(first[0]) else _GRACE_S
            _, late = ray.wait(others, num_returns=len(others), timeout=limit_s)
        else:
            late = []
        results, losses = [], []
        for rank, ref in zip(self._ranks, refs, strict=False):
            if ref in late:
                losses.append(_lost(rank, "it did not return in time"))
                continue
            try:
                result = ray.get(ref)
            except ray.exceptions.RayError as error:
                reason = str(error).splitlines()[0] if str(error) else "no reason given"
                losses.insert(0, _lost(rank, f"{type(error).__name__}: {reason}"))
                continue
            if isinstance(result, RemoteFailure):
                failure = result.rebuild(LearnerError)
                if not isinstance(failure, RankLostError):
                    raise failure
                losses.append(failure)
            results.append(result)
        if losses:
            raise losses[0]
        return results

    def _end_ranks(self) -> None:
        """Ends all ranks, also those that hang; their claims come free soon after."""
        ranks, self._ranks, self._saving = self._ranks, [], None
        for rank in ranks if ray.is_initialized() else []:  # they end with Ray, and asking would start another
            with contextlib.suppress(Exception):  # it may have ended already
                ray.kill(rank.actor)

    def close(self) -> None:
        """Ends all ranks. May be called again."""
        if self._closed:
            return
        self._closed = True
        self._end_ranks()
        self._saved = self._saving = None
        self._since = []
        self._session.release()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _succeeded(ref: Any) -> bool:
    """Says whether a call that has ended brought a result."""
    try:
        return not isinstance(ray.get(ref), RemoteFailure)
    except ray.exceptions.RayError:
        return False


def _lost(rank: _Rank, reason: str) -> RankLostError:
    return RankLostError(
        "A rank lives until its group is closed.",
        expected=f"{rank.seat.name} (process {rank.pid or 'not yet known'}) to answer",
        got=reason,
        remedy="Look into the log of its node for what ended it",
    )


def _crash_loop(error: RankLostError) -> LearnerError:
    return LearnerError(
        "A group whose ranks are lost goes on from its last state.",
        expected=f"at most {_MOST_LOSSES} losses in a row",
        got=f"another one: {error}",
        remedy="Look for what ends the ranks, such as too little memory",
    )
