"""A pool whose environments belong to several owners: the workers of a machine, or the nodes of a cluster."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Rollout, StepBatch
from rayvec.data.chunk import Cut
from rayvec.data.layouts import ArrayLayout
from rayvec.node.pipe import LOOK_S
from rayvec.node.process_watch import readable
from rayvec.pools.base import Autoreset, NotReady, deadline_in, seconds_until
from rayvec.pools.ids_by_owner import Plan, Plans

__all__ = ["PartedPool"]


class PartedPool(ABC):
    """What the pools of several owners have in common.

    Args:
        starts: Index of the first environment of each owner, ascending.
        num_envs: The number of environments N.
        unit_bounds: Bounds of native sub-batches, or None.
    """

    steps_here = False
    native_mode: Autoreset | None = None
    _look_s = LOOK_S

    def __init__(self, starts: Sequence[int], num_envs: int, unit_bounds: NDArray[np.int64] | None = None) -> None:
        self.num_envs = num_envs
        self.parts = tuple(range(*bounds) for bounds in pairwise([*starts, num_envs]))
        self.layout: ArrayLayout | None = None
        self.action_layout: ArrayLayout | None = None
        self._plans = Plans(np.array(starts), num_envs, unit_bounds)
        self._pending = np.zeros(num_envs, bool)

    @property
    @abstractmethod
    def event_fds(self) -> Sequence[int]:
        """File descriptors of which one is readable once a command completes. Call :meth:`completed_ids` then."""

    @abstractmethod
    def completed_ids(self) -> NDArray[np.int64]:
        """Returns the ids whose results :meth:`take` returns, ``int64 [k]``."""

    @abstractmethod
    def wait(self, env_ids: NDArray[np.int64], deadline: float) -> None:
        """Waits until the commands of some environments have completed.

        Raises:
            NotReady: The `deadline`, a ``time.monotonic`` time, was reached. The commands stay pending.
        """

    @abstractmethod
    def take(self, env_ids: NDArray[np.int64]) -> StepBatch:
        """Returns the results of completed commands. The commands are no longer pending."""

    def recv(
        self,
        env_ids: NDArray[np.int64] | None = None,
        min_completed: int | None = None,
        timeout_s: float | None = None,
    ) -> StepBatch:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        deadline = deadline_in(timeout_s)
        if env_ids is None:
            env_ids = np.flatnonzero(self._pending)
            if min_completed is not None and min_completed < len(env_ids):
                env_ids = self._wait_for_some(min_completed, deadline)
        self.wait(env_ids, deadline)
        return self.take(env_ids)

    def _wait_for_some(self, min_completed: int, deadline: float) -> NDArray[np.int64]:
        """Returns the completed ids once there are enough of them."""
        while True:
            env_ids = self.completed_ids()
            if len(env_ids) >= min_completed:
                return env_ids
            if time.monotonic() >= deadline:
                raise NotReady(f"{len(env_ids)} of {min_completed} environments have answered in time")
            readable(self.event_fds, min(LOOK_S, seconds_until(deadline)))

    @abstractmethod
    def _first_finished(self, parts: Sequence[int]) -> int | None:
        """Returns the first of some parts that has finished its oldest pending chunk; None if none of them has."""

    @abstractmethod
    def finish_rollout(
        self, timeout_s: float | None = None, cut: Cut | None = None, part: int | None = None
    ) -> Rollout:
        """See :class:`~rayvec.pools.base.ActingPool`."""

    def finish_any(self, parts: Sequence[int]) -> tuple[int, Rollout]:
        """See :class:`~rayvec.pools.base.ActingPool`."""
        while (part := self._first_finished(parts)) is None:
            readable(self.event_fds, self._look_s)
        return part, self.finish_rollout(part=part)

    def call(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], env_ids: NDArray[np.int64]
    ) -> Callable[[float | None], list[Any]]:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        plan = self._plans.of(env_ids)
        collect = self._call_owners(plan, name, args, kwargs)
        return lambda timeout_s: plan.in_order(collect(timeout_s))

    @abstractmethod
    def _call_owners(
        self, plan: Plan, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[float | None], Sequence[Sequence[Any]]]:
        """Starts a call. The returned function waits, and returns the results of each part of the plan."""
