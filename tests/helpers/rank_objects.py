"""Objects that ranks hold, for tests: importable by the ranks' own processes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helpers.rank_processes import fall
from rayvec.data import Batch
from rayvec.learners.ranks import Ranks


class Adder:
    """Adds up what all ranks are given."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.total = torch.zeros(3, dtype=torch.float64)

    def add(self, value: float) -> list[float]:
        """Adds this rank's value and those of all others; returns the total."""
        self.total += self._ranks.all_reduce_(torch.full((3,), value, dtype=torch.float64))
        return self.total.tolist()  # type: ignore[no-any-return]

    def add_and_fall(self, value: float, how: str | None) -> list[float]:
        """Adds as `add` does, twice; between the two sums the process falls as `how` says."""
        self.add(value)
        if how is not None:
            fall(how)
        return self.add(value)

    def returned_lock(self) -> Any:
        """Returns what can't be pickled."""
        return threading.Lock()

    def kind_of_ranks(self) -> tuple[str, int, int, int]:
        """Returns how this rank sums, who it is, and where it is."""
        return type(self._ranks).__name__, self._ranks.rank, self._ranks.size, torch.get_num_threads()

    def sum_many(self, sizes: list[int], seed: int) -> list[Tensor]:
        """Returns sums over all ranks of random tensors, different on each."""
        generator = torch.Generator().manual_seed(100 * seed + self._ranks.rank)
        return [self._ranks.all_reduce_(torch.randn(size, generator=generator)) for size in sizes]

    def close(self) -> None:
        """Does nothing."""


class CountsColumns:
    """A learner that says how many environments each chunk of a batch has; its weight counts its updates.

    Its process ends when it is asked for its state after `measure`.
    """

    _num_updates = 0
    _has_measured = False

    def update(self, batch: Batch) -> dict[str, float]:
        """Returns the numbers."""
        self._num_updates += 1
        return {str(place): chunk.num_envs for place, chunk in enumerate(batch.chunks)}

    def measure(self, batch: Batch) -> None:
        self._has_measured = True

    def weights(self) -> NDArray[np.float32]:
        return np.full(1, self._num_updates, np.float32)

    def state_dict(self) -> dict[str, Any]:
        if self._has_measured:
            fall("SIGKILL")
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is none."""
