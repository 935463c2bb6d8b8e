"""A policy with a hidden state, in a module that a worker imports quickly."""

from __future__ import annotations

from typing import Any

import numpy as np

from rayvec.policies.noise import NO_NOISE


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
