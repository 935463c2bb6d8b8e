"""Ranks as actors of a Ray cluster."""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayvec.cluster.ray_session import RaySession
from rayvec.cluster.reachability import NodeWatch, can_call_ray, check_connected, check_head, put
from rayvec.distributed.memory_file import MemoryFile
from rayvec.distributed.rank_actor import RankActor
from rayvec.distributed.rank_host import MakeStore, RankPlacement, RunningRank, VitalSigns, lost, vital_signs
from rayvec.distributed.rank_placement import ResourceRequest, find_placements
from rayvec.distributed.rendezvous import RayStore, delete_rendezvous
from rayvec.errors import RemoteFailure, first_line
from rayvec.node.object_store import room_for
from rayvec.pools.base import deadline_in, seconds_until

__all__ = ["RayHost"]

_LOOK_S = 2.0


class RayHost:
    """Runs ranks as Ray actors; see :class:`~rayvec.distributed.rank_host.RankHost`.

    Args:
        request: What each rank claims, and where.
        address: Of a running Ray cluster; see :class:`~rayvec.cluster.ray_session.RaySession`.
    """

    def __init__(self, request: ResourceRequest, address: str | None = None) -> None:
        self._request = request
        self._watch = NodeWatch()
        self._session = RaySession(address)

    def place(self, num_ranks: int, *, fewer: bool = False) -> list[RankPlacement]:
        """Decides where ranks run.

        Args:
            num_ranks: Number of ranks.
            fewer: Whether fewer ranks, at least one, may be placed where there is no room for all.

        Raises:
            ConfigError: There is too little room for them.
        """
        return find_placements(num_ranks, self._request, fewer=fewer)

    def start(self, placement: RankPlacement, device: str, threads: int, timeout_s: float) -> RunningRank:
        """Starts a rank; the arguments are those of its :class:`~rayvec.distributed.rank_actor.RankActor`."""
        options = {
            "num_cpus": self._request.num_cpus,
            "num_gpus": self._request.num_gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(placement.node_id, soft=False),
        }
        actor = ray.remote(RankActor).options(**options)
        return RunningRank(placement, actor.remote(placement, device, threads, timeout_s))

    def is_here(self, placement: RankPlacement) -> bool:
        """Says whether a rank is on the driver's node of Ray, which may be one of several simulated on a machine."""
        return placement.node_id == ray.get_runtime_context().get_node_id()

    def call(self, rank: RunningRank, method: str, *args: Any) -> Any:
        """Calls a method of a rank's actor, after the calls before; returns a reference to the result.

        A reference among `args` stands for its result, a :class:`~rayvec.distributed.memory_file.MemoryFile` for its
        value.
        """
        check_connected()
        sent = [self.put(arg.value()) if isinstance(arg, MemoryFile) and not rank.reads_memory else arg for arg in args]
        with room_for("arguments of a rank"):
            return rank, getattr(rank.handle, method).remote(*map(_ref, sent))

    def put(self, value: Any) -> Any:
        """Puts a value into the object store."""
        return put(value, "arguments of ranks")

    def wait(self, refs: Sequence[Any], num_results: int, timeout_s: float | None) -> list[Any]:
        """Waits until so many calls have ended, or their ranks have; returns the references of those that have."""
        check_connected()
        done, _ = ray.wait([_ref(each) for each in refs], num_returns=num_results, timeout=timeout_s)
        return [each for each in refs if _ref(each) in done]

    def result(self, ref: Any) -> Any:
        """Waits for the result of a call.

        Raises:
            RankLostError: The rank's process has ended.
            ConfigError: The result finds no room in the object store.
        """
        check_connected()
        try:
            with room_for("the result of a rank"):
                return ray.get(_ref(ref))
        except ray.exceptions.RayError as error:
            if not isinstance(ref, tuple):
                raise
            cause = getattr(error, "cause", None)
            if isinstance(cause, Exception) and not isinstance(cause, ray.exceptions.RayError):
                return RemoteFailure.capture(cause, str(ref[0].placement))  # what the rank returned can't be pickled
            raise lost(ref[0], f"{type(error).__name__}: {first_line(error)}") from error

    def signs(
        self, ranks: Sequence[RunningRank], timeout_s: float, pending: Sequence[Any] = ()
    ) -> list[VitalSigns] | None:
        """Returns CPU time and state of each rank's process, or None where one has ended or its node does not answer.

        A node that the network no longer reaches says nothing. So the first result of a `pending` call ends the wait.
        """
        check_head()  # else Ray would wait for it, and then end this process
        measured = [
            ray.remote(vital_signs)
            .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(rank.placement.node_id, soft=False))
            .remote(rank.pid)
            for rank in ranks
        ]
        missing, results, deadline = list(measured), [_ref(each) for each in pending], deadline_in(timeout_s)
        while missing:
            done, _ = ray.wait([*missing, *results], num_returns=1, timeout=min(_LOOK_S, seconds_until(deadline)))
            if done and done[0] not in results:
                missing.remove(done[0])
            elif done or time.monotonic() >= deadline or self.unreachable(ranks) is not None:
                return None
        try:
            signs: list[VitalSigns | None] = ray.get(measured)
        except ray.exceptions.RayError:
            return None
        alive = [each for each in signs if each]
        return alive if len(alive) == len(ranks) else None  # the result of the rank says what is wrong

    def watch(self, ranks: Sequence[RunningRank]) -> None:
        """Begins to watch the nodes of ranks: one that answers now is unreachable once it no longer does."""
        self._watch.lost({rank.placement.node_id for rank in ranks})

    def unreachable(self, ranks: Sequence[RunningRank]) -> RunningRank | None:
        """Returns a rank whose node the network no longer reaches, or None; call it every few seconds of a wait."""
        gone = self._watch.lost({rank.placement.node_id for rank in ranks})
        return next((rank for rank in ranks if rank.placement.node_id in gone), None)

    @contextlib.contextmanager
    def rendezvous(self) -> Iterator[MakeStore]:
        """Yields what makes a store in the cluster; only processes of the cluster can read and write it."""
        name = uuid.uuid4().hex
        try:
            yield functools.partial(RayStore, name)
        finally:
            if can_call_ray():
                delete_rendezvous(name)

    def end(self, ranks: Sequence[RunningRank]) -> None:
        """Ends ranks, also those that hang; what they claim comes free soon after."""
        is_up = bool(ranks) and can_call_ray()
        for rank in ranks if is_up else []:  # they end with Ray, and a call would start another Ray
            with contextlib.suppress(Exception):  # it may have ended already
                ray.kill(rank.handle)

    def close(self) -> None:
        """Releases Ray."""
        self._session.release()


def _ref(value: Any) -> Any:
    """Returns Ray's reference for what `call` returned; other values as they are."""
    return value[1] if isinstance(value, tuple) and value and isinstance(value[0], RunningRank) else value
