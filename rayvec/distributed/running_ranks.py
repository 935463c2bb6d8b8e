"""Ranks that run: placed, started, connected, and called together. When one is lost, all of them end."""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from rayvec.distributed.memory_file import MemoryFile
from rayvec.distributed.rank_host import RankHost, RankPlacement, RunningRank, lost
from rayvec.errors import ConfigError, LearnerError, RankLostError, RayvecError, RemoteFailure, counted
from rayvec.pools.base import deadline_in, seconds_until
from rayvec.pools.waited_time import WaitedTime

__all__ = ["RankSet"]

_GRACE_S = 5.0
_START_S = 60.0
_ANSWER_S = 60.0
_LOOK_S = 1.0


class _Failure(IntEnum):
    """How a call failed. The least is raised: it is the cause of the others."""

    RAISED = 0
    """The object raised."""
    ENDED = 1
    """The process has ended."""
    PEER_LOST = 2
    """The rank waited for another rank in vain."""


class RankSet:
    """One object on each of several ranks.

    Args:
        host: Where they run.
        device: ``"cpu"``, or ``"cuda"`` for one GPU for each rank.
        threads: Number of threads that torch may use on each rank.
        timeout_s: How long ranks wait for each other, in seconds.
        may_idle: Whether ranks wait for environments, too, and not only for each other. If they don't, ranks hang when
            none of them uses CPU time for half of `timeout_s`. A rank whose process is stopped hangs in any case.

    Attributes:
        ranks: The ranks; none before `start` and after `end`.
    """

    def __init__(self, host: RankHost, device: str, threads: int, timeout_s: float, may_idle: bool = False) -> None:
        self.ranks: list[RunningRank] = []
        self._host = host
        self._device, self._threads, self._timeout_s, self._may_idle = device, threads, timeout_s, may_idle

    @property
    def placements(self) -> tuple[RankPlacement, ...]:
        """Where the ranks are."""
        return tuple(rank.placement for rank in self.ranks)

    def start(self, placements: Sequence[RankPlacement], make: bytes, late: type[RayvecError] = ConfigError) -> None:
        """Starts a rank at each place, connects them, and makes their objects.

        Args:
            placements: Where.
            make: Pickled function of a rank's `Ranks` that returns its object.
            late: The class of the error for ranks that do not get their cores in time.

        Raises:
            RankLostError: A rank was lost meanwhile.
            Exception: What `make` raised.
        """
        try:
            for place in placements:
                self.ranks.append(self._host.start(place, self._device, self._threads, self._timeout_s))
            self._connect(self._await_offers(late), make)
        except BaseException:
            self.end()
            raise

    def _await_offers(self, late: type[RayvecError]) -> list[Any]:
        """Waits until all ranks run or one has failed.

        Ray waits without a limit for cores that another program claimed meanwhile.
        """
        limit_s = max(self._timeout_s, _START_S)
        probe = MemoryFile(secrets.token_bytes())
        pending = [
            self._host.call(rank, "offer", probe.path, probe.content())
            if self._host.is_here(rank.placement)
            else self._host.call(rank, "offer")
            for rank in self.ranks
        ]
        waited, outcome_of, done = WaitedTime(), functools.cache(self._outcome), list[Any]()
        has_failed = False
        while len(done) < len(pending) and not has_failed and waited.look() < limit_s:
            done = self._host.wait(pending, len(done) + 1, min(_LOOK_S, limit_s - waited.seconds))
            has_failed = any(outcome_of(each)[0] is not None for each in done)
        missing = [str(rank.placement) for rank, each in zip(self.ranks, pending, strict=True) if each not in done]
        if missing and not has_failed:
            raise late(
                "Every rank runs soon after the group asks for it: it gets its cores, and with CUDA a GPU.",
                expected=f"{counted(len(pending), 'rank')} running within {limit_s:g} s",
                got=f"no answer yet from {', '.join(missing)}",
                remedy="End what claimed cores or GPUs at the same time, continue a rank's process that is stopped, or "
                "try again when the machines are less busy",
            )
        offers = self.gather(pending)
        for rank, offer in zip(self.ranks, offers, strict=True):
            rank.pid, rank.reads_memory = offer.pid, offer.reads_memory
        self._host.watch(self.ranks)
        return offers

    def _connect(self, offers: Sequence[Any], make: bytes) -> None:
        share_memory = all(offer.shares_memory for offer in offers)
        paths = {rank.placement.node: each.path for rank, each in zip(self.ranks, offers, strict=True) if each.path}
        with self._host.rendezvous() as make_store:
            joined = [
                self._host.call(rank, "join", make_store, paths.get(rank.placement.node), share_memory, make)
                for rank in self.ranks
            ]
            self.gather(joined)

    def post(self, name: str, args: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Asks every rank to call a method of its object, after the calls before; returns references to the results.

        Args:
            name: Of the method.
            args: Positional arguments for each rank; none by default.
        """
        everyone = args or [()] * len(self.ranks)
        return [self._host.call(rank, "call", name, *each) for rank, each in zip(self.ranks, everyone, strict=True)]

    def answers(self, refs: Sequence[Any]) -> list[Any]:
        """Waits as `gather` does for calls in which no rank waits for another: for a limited time."""
        return self.gather(refs, max(self._timeout_s, _ANSWER_S))

    def gather(self, refs: Sequence[Any], limit_s: float = math.inf) -> list[Any]:
        """Waits for one result of each of the first ranks.

        Ranks that only compute do so together: once one has returned, the others do within the time that ranks wait for
        each other. After a failure it waits up to 5 s for the other ranks, since one of them may hold the cause. If a
        process has ended and no object has raised, it does not wait: all ranks are restarted.

        Args:
            refs: Of the results.
            limit_s: The longest wait for the first result, and after it for the others, in seconds. A rank that hangs
                ends the wait earlier.

        Raises:
            RankLostError: A rank exited, hangs, or did not return in time.
            Exception: What was raised on a rank.
        """
        outcome_of = functools.cache(self._outcome)  # each result is fetched once

        def worst(done: Sequence[Any]) -> _Failure | None:
            return min((how for how, _ in map(outcome_of, done) if how is not None), default=None)

        done = self._await(refs, 1, limit_s)
        if not done:
            raise lost(self.ranks[0], f"no answer within {limit_s:g} s")
        while self._may_idle and limit_s == math.inf and len(done) < len(refs) and worst(done) is None:
            done = self._await(refs, len(done) + 1)  # ranks wait for their environments, each for its own
        if worst(done) is None:
            done = self._host.wait(refs, len(refs), min(self._timeout_s, limit_s))
        deadline = deadline_in(_GRACE_S)  # for the rank that holds the cause of a failure
        while len(done) < len(refs) and worst(done) not in (None, _Failure.ENDED) and seconds_until(deadline):
            done = self._host.wait(refs, len(done) + 1, seconds_until(deadline))
        outcomes = [
            outcome_of(ref) if ref in done else (_Failure.PEER_LOST, lost(rank, "it did not return in time"))
            for rank, ref in zip(self.ranks, refs, strict=False)
        ]
        errors = [(how, value) for how, value in outcomes if how is not None]
        if errors:
            raise min(errors, key=lambda error: error[0])[1]
        return [value for _, value in outcomes]

    def _await(self, refs: Sequence[Any], num_results: int, limit_s: float = math.inf) -> list[Any]:
        """Waits for so many results, for a limited time and as long as no rank hangs; returns those that have come."""
        waited, pause_s, before = WaitedTime(), self._timeout_s / 2, None
        look_at_s = pause_s / 4  # early, since the next look compares with this one
        while True:
            done = self._host.wait(refs, num_results, max(0.0, min(pause_s, _LOOK_S, limit_s - waited.seconds)))
            if len(done) >= num_results or waited.look() >= limit_s:
                return done
            if (rank := self._host.unreachable(self.ranks)) is not None:
                raise lost(rank, "the network no longer reaches its node")
            if waited.seconds < look_at_s:
                continue
            pending = [each for each in refs if each not in done]
            signs = self._host.signs(self.ranks, max(self._timeout_s, _ANSWER_S), pending)
            if signs and before:
                pairs = list(zip(self.ranks, before, signs, strict=True))
                stopped = [rank for rank, then, now in pairs if then.is_stopped and now.is_stopped]
                if stopped:
                    raise lost(stopped[0], f"its process has been stopped for {pause_s:g} s")
                if not self._may_idle and all(then.cpu_s == now.cpu_s for _, then, now in pairs):
                    raise lost(self.ranks[0], f"no rank has used any CPU time for {pause_s:g} s")
            before, look_at_s = signs, waited.seconds + pause_s

    def _outcome(self, ref: Any) -> tuple[_Failure | None, Any]:
        """Returns None and the result of a call that has ended, or how it failed and the exception."""
        try:
            result = self._host.result(ref)
        except RankLostError as error:
            return _Failure.ENDED, error
        if not isinstance(result, RemoteFailure):
            return None, result
        rebuilt = result.rebuild(LearnerError)
        return (_Failure.PEER_LOST if isinstance(rebuilt, RankLostError) else _Failure.RAISED), rebuilt

    def end(self) -> None:
        """Ends all ranks, also those that hang."""
        ranks, self.ranks = self.ranks, []
        self._host.end(ranks)
