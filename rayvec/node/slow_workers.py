"""Which workers end a chunk before the others, since all others would wait for their next step."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rayvec.data.chunk import Cut

__all__ = ["EnoughSteps", "StepTimes"]

_FASTER = 4.0
"""A worker ends a chunk early only for the sake of workers that are at least this many times faster."""


@dataclass(frozen=True, slots=True)
class EnoughSteps:
    """Cuts a chunk once its environments have taken a number of steps together, whichever of them took the steps.

    A process pool that gets it as a :data:`~rayvec.data.chunk.Cut` lets slow workers end the chunk before that, so that
    no worker begins a step for which all others would wait.

    Attributes:
        num_steps: The number of steps.
        or_if: Cuts the chunk too.
    """

    num_steps: int
    or_if: Cut

    def __call__(self, taken: int) -> bool:
        """See :data:`~rayvec.data.chunk.Cut`."""
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
        self._stopped = np.zeros(len(self._num_envs), bool)

    def too_slow(
        self, taken: NDArray[np.int64], num_steps: int, most: int, now_s: float | None = None
    ) -> NDArray[np.bool_]:
        """Returns which workers should end the chunk after the step that they are taking, ``bool [W]``.

        Such a worker is slow: the much faster ones can take all missing steps, would then wait for its next step, and
        could take more steps meanwhile than that step gives.

        Args:
            taken: How many steps of the chunk each environment of a worker has taken, ``int64 [W]``.
            num_steps: How many steps all environments are to take together.
            most: The most steps of the chunk that each environment may take.
            now_s: The present time, by default ``time.monotonic()``.
        """
        now_s = time.monotonic() if now_s is None else now_s
        self._measure(taken, now_s)
        is_faster = _FASTER * self._step_s[:, None] <= self._step_s  # [i, j]: worker i than worker j
        missing = num_steps - int(taken @ self._num_envs)
        left = np.where(self._stopped, 0, most - taken) * self._num_envs
        rate = (self._num_envs / self._step_s * (left > 0)) @ is_faster  # steps/s of the workers faster than each
        with np.errstate(divide="ignore", invalid="ignore"):
            all_taken_s = now_s + missing / rate
            wait_s = self._moved_s + 2 * self._step_s - all_taken_s  # until the end of a worker's next step
            late: NDArray[np.bool_] = np.isfinite(self._step_s) & (wait_s * rate > self._num_envs)
        late &= left @ is_faster >= missing
        self._stopped |= late
        return late

    def _measure(self, taken: NDArray[np.int64], now_s: float) -> None:
        """Notes which workers have taken steps since the last look, and how long their steps take on average."""
        has_moved = taken > self._taken
        self._step_s[has_moved] = (now_s - self._began_s) / taken[has_moved]
        self._moved_s[has_moved], self._taken = now_s, taken.copy()
