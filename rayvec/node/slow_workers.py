"""Which workers end a chunk before the others, since all others would wait for their next step."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rayvec.pools.base import Cut

__all__ = ["EnoughSteps", "StepTimes"]

_FASTER = 4.0
"""A worker ends a chunk early only for the sake of workers whose steps take at most this fraction of its own."""


@dataclass(frozen=True, slots=True)
class EnoughSteps:
    """Cuts a chunk once its environments have taken a number of steps together, whichever of them took the steps.

    A process pool that gets it as a :data:`~rayvec.pools.base.Cut` lets slow workers end the chunk before that, so that
    no worker begins a step for which all others would wait.

    Attributes:
        num_steps: The number of steps.
        or_if: Cuts the chunk too.
    """

    num_steps: int
    or_if: Cut

    def __call__(self, taken: int) -> bool:
        """See :data:`~rayvec.pools.base.Cut`."""
        return taken >= self.num_steps or self.or_if(taken)


class StepTimes:
    """How long a step of each worker takes, measured while the workers take chunks.

    Args:
        num_envs: How many environments each worker has, ``int64 [W]``.
    """

    def __init__(self, num_envs: NDArray[np.int64]) -> None:
        self._num_envs = num_envs
        self._step_s = np.full(len(num_envs), np.inf)  # of the last chunk, or of this one; inf: not known

    def begin(self, now_s: float | None = None) -> None:
        """Notes that the workers begin a chunk."""
        self._began_s = time.monotonic() if now_s is None else now_s
        self._moved_s = np.full(len(self._num_envs), self._began_s)
        self._taken = np.zeros(len(self._num_envs), np.int64)

    def too_slow(self, taken: NDArray[np.int64], num_steps: int, now_s: float | None = None) -> NDArray[np.bool_]:
        """Returns which workers should end the chunk after the step that they are taking, ``bool [W]``.

        These are the workers for whose next step the others would wait, once they have taken what is missing, and could
        take more steps meanwhile than that step gives.

        Args:
            taken: How many steps of the chunk each environment of a worker has taken, ``int64 [W]``.
            num_steps: How many steps all environments are to take together.
            now_s: The present time, by default ``time.monotonic()``.
        """
        now_s = time.monotonic() if now_s is None else now_s
        moved = taken > self._taken
        self._step_s[moved] = (now_s - self._began_s) / taken[moved]
        self._moved_s[moved], self._taken = now_s, taken.copy()
        faster = _FASTER * self._step_s[:, None] <= self._step_s[None, :]
        rate = (self._num_envs / self._step_s) @ faster  # steps/s of the workers that are faster than each
        with np.errstate(divide="ignore", invalid="ignore"):
            enough_s = now_s + (num_steps - int(taken @ self._num_envs)) / rate
            wait_s = self._moved_s + 2 * self._step_s - enough_s
            late: NDArray[np.bool_] = np.isfinite(self._step_s) & (wait_s * rate > self._num_envs)
        return late
