"""Policies of tests, in a module that a worker imports quickly."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from helpers.exact import TablePolicy
from rayvec.policies.noise import NO_NOISE


class Weighs:
    """Records the sum of the weights it has, and on how many environments it acts."""

    noise = NO_NOISE

    def __init__(self) -> None:
        self._weights: Any = np.zeros(1, np.float32)

    def load_weights(self, weights: Any) -> None:
        self._weights = weights.copy()

    def act(self, obs: Any, noise: Any) -> Any:
        return np.zeros(len(obs), int), {
            "sum": np.full(len(obs), self._weights.sum()),
            "rows": np.full(len(obs), len(obs)),
        }


def raises_at_ten(obs: Any) -> Any:
    if (obs[:, 3] >= 10).any():
        raise LookupError("the policy gave up")
    return np.zeros(len(obs), int)


class Noting(TablePolicy):
    """Records which process acts, and on how many environments."""

    def act(self, obs: Any, noise: Any) -> tuple[Any, dict[str, Any]]:
        act, extras = super().act(obs, noise)
        return act, {**extras, "pid": np.full(len(act), os.getpid()), "rows": np.full(len(act), len(act))}


def still(obs: Any) -> Any:
    return np.zeros(len(obs), np.int64)


class Diarist:
    """Records for each environment the first episode it saw since the last ``begin_episodes``; another is an error."""

    noise = NO_NOISE

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, ...]] = {}

    def begin_episodes(self, rows: Any) -> None:
        for row in rows.tolist():
            self._seen.pop(row, None)

    def act(self, obs: Any, noise: Any) -> Any:
        now = [tuple(row) for row in obs[:, :2].tolist()]
        mixed_up = [self._seen.setdefault(row, episode) != episode for row, episode in enumerate(now)]
        return np.zeros(len(obs), int), {"mixed_up": np.array(mixed_up)}

    def load_weights(self, weights: Any) -> None:
        raise NotImplementedError
