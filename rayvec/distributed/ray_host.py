"""Ranks as actors of a Ray cluster."""

from __future__ import annotations

import contextlib
import functools
import math
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayvec.cluster.ray_session import check_connected, ray_session
from rayvec.distributed.rank import MakeStore, Rank, RankPlacement, lost
from rayvec.distributed.rank_placement import ResourceRequest, find_placements
from rayvec.distributed.rendezvous import RayArrivals, RayStore, delete_rendezvous
from rayvec.distributed.stragglers import Arrivals
from rayvec.errors import ConfigError, RemoteFailure, first_line


class _Actor(NamedTuple):
    """The actor of a rank."""

    placement: RankPlacement
    handle: Any


class _Call(NamedTuple):
    """A requested call, and Ray's reference to its result."""

    placement: RankPlacement
    ref: Any


class RayHost:
    """Runs ranks as Ray actors.

    Args:
        request: What each rank claims, and where.
        address: Of a running Ray cluster; see :func:`~rayvec.cluster.ray_session.ray_session`.
    """

    def __init__(self, request: ResourceRequest, address: str | None = None) -> None:
        self._request = request
        self._session = ray_session(address)
        self._name = uuid.uuid4().hex

    def place(self, num_ranks: int, *, fewer: bool = False) -> list[RankPlacement]:
        """Decides where ranks run.

        Args:
            num_ranks: Number of ranks.
            fewer: Whether fewer ranks, at least one, may be placed where there is no room for all.

        Raises:
            ConfigError: There is too little room for them.
        """
        return find_placements(num_ranks, self._request, fewer=fewer)

    def start(self, placement: RankPlacement, device: str, threads: int, timeout_s: float) -> _Actor:
        """Starts a rank; the arguments are those of its :class:`~rayvec.distributed.rank.Rank`."""
        options = {
            "num_cpus": self._request.num_cpus,
            "num_gpus": self._request.num_gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(placement.node_id, soft=False),
        }
        actor = ray.remote(Rank).options(**options)
        return _Actor(placement, actor.remote(placement, device, threads, timeout_s))

    def call(self, actor: _Actor, name: str, *args: Any) -> _Call:
        """Calls a method of a rank's object, after the calls before. A reference among `args` stands for its value."""
        check_connected()
        with _room_for("arguments of a rank"):
            return _Call(actor.placement, actor.handle.call.remote(name, *args))

    def put(self, value: Any) -> Any:
        """Puts a value into the object store."""
        check_connected()
        with _room_for("arguments of ranks"):
            return ray.put(value)

    def wait(self, calls: Sequence[_Call], timeout_s: float) -> list[_Call]:
        """Waits until one of these calls has ended, or its rank has; returns all that have."""
        check_connected()
        refs = [call.ref for call in calls]
        ray.wait(refs, num_returns=1, timeout=None if timeout_s == math.inf else max(0.0, timeout_s))
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        return [call for call in calls if call.ref in done]

    def result(self, call: _Call) -> Any:
        """Returns the result of a call that has ended.

        Raises:
            RankLostError: The rank's process has ended.
            ConfigError: The result finds no room in the object store.
        """
        check_connected()
        try:
            with _room_for("the result of a rank"):
                return ray.get(call.ref)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, Exception) and not isinstance(cause, ray.exceptions.RayError):
                return RemoteFailure.capture(cause, str(call.placement))  # what the rank returned can't be pickled
            raise lost(call.placement, f"{type(error).__name__}: {first_line(error)}") from error

    @contextlib.contextmanager
    def rendezvous(self) -> Iterator[MakeStore]:
        """Yields what makes a store in the cluster; only processes of the cluster can read and write it."""
        try:
            yield functools.partial(RayStore, self._name)
        finally:
            self._forget()

    def arrivals(self, num_ranks: int) -> Callable[[int], Arrivals]:
        """Returns what makes the `Arrivals` of a rank, given its number."""
        return functools.partial(RayArrivals, self._name)

    def kill(self, actors: Sequence[_Actor]) -> None:
        """Ends ranks, also those that hang; what they claim comes free soon after."""
        for actor in actors if ray.is_initialized() else []:  # they end with Ray, and a call would start another Ray
            with contextlib.suppress(Exception):  # it may have ended already
                ray.kill(actor.handle)

    def close(self) -> None:
        """Deletes what ranks have written, and releases Ray."""
        self._forget()
        self._session.close()

    def _forget(self) -> None:
        if ray.is_initialized():
            delete_rendezvous(self._name)


@contextlib.contextmanager
def _room_for(what: str) -> Iterator[None]:
    """Puts something into the object store, or gets it from there, in the block; `what` names it.

    Raises:
        ConfigError: The store is full, and so is the disk to which it moves what has no room.
    """
    try:
        yield
    except (ray.exceptions.OutOfDiskError, ray.exceptions.ObjectStoreFullError) as error:
        raise ConfigError(
            f"Ray's object store, and the disk of its temporary directory, have no room for {what}. Free that disk, "
            "start Ray with a larger --object-store-memory, or lower num_steps or num_envs."
        ) from error
