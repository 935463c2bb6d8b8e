"""Checks every transition against the one before it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from rayvec.data import Chunk
from rayvec.data.chunk import counted_ends
from soak.witness import COUNT, EPISODE, EPISODE_STEPS, INDEX, INSTANCE, large_info


class Auditor:
    """Knows the last observation of every environment and checks the next.

    Args:
        obs: What the reset of all environments returned, ``[N, 4]``.
        indices: The index that each environment says; by default its own.

    Attributes:
        done: Whether the next step of an environment begins an episode, ``bool [N]``.
        seen: How many transitions, restarts, chunks and large infos were checked.
    """

    def __init__(self, obs: Any, indices: Any = None) -> None:
        self._last = obs.copy()
        self._indices = np.arange(len(obs)) if indices is None else indices
        self.done = np.zeros(len(obs), bool)
        self.seen: Counter[str] = Counter(transitions=0, restarts=0)

    def _begins(self, n: int, obs: Any) -> None:
        same = obs[INSTANCE] == self._last[n][INSTANCE]
        assert obs[INDEX] == self._indices[n] and obs[COUNT] == 0, (n, obs, self._last[n])
        assert obs[EPISODE] == (self._last[n][EPISODE] + 1 if same else 1), (n, obs, self._last[n])

    def _continues(self, n: int, before: Any, obs: Any, rew: float) -> None:
        assert (obs[:COUNT] == before[:COUNT]).all() and obs[COUNT] == before[COUNT] + 1 == rew, (n, before, obs, rew)
        self.seen["transitions"] += 1

    def step(self, obs: Any, rew: Any, terminated: Any, truncated: Any, info: dict[str, Any]) -> None:
        """Checks one step of all environments, NEXT_STEP."""
        restarted = info.get("env_restarted", np.zeros(len(obs), bool))
        for n in range(len(obs)):
            if restarted[n] and not self.done[n]:
                answer = (n, obs[n], self._last[n], rew[n], terminated[n], truncated[n])
                assert (obs[n] == self._last[n]).all() and rew[n] == 0 and truncated[n] and not terminated[n], answer
                self.seen["restarts"] += 1
            elif self.done[n]:
                self._begins(n, obs[n])
                assert rew[n] == 0 and not terminated[n] and not truncated[n]
            else:
                self._continues(n, self._last[n], obs[n], rew[n])
                assert terminated[n] == (obs[n][COUNT] >= EPISODE_STEPS) and not truncated[n]
        for n in np.flatnonzero(info.get("_large", ())):
            assert info["large"][n] == large_info(obs[n][INDEX], obs[n][COUNT]), n
            self.seen["large infos"] += 1
        self._last, self.done = obs.copy(), terminated | truncated

    def chunk(self, chunk: Chunk | None, version: int = 0) -> None:
        """Checks every column of a chunk, the weights it was taken with, and where it joins what went before."""
        assert chunk is not None
        acted_with = chunk.extras.get("version", np.full(chunk.valid.shape, version))
        assert chunk.weights_version == version and (acted_with[chunk.valid] == version).all()
        following = chunk.next_obs()
        restarts = {(t, n) for t, n in chunk.restarts.tolist()}
        cut = [(t - 1, n) for t, n in sorted(restarts) if t > 0 and chunk.valid[t - 1, n]]
        assert chunk.cuts.tolist() == [[t, n] for t, n in cut if not chunk.terminated[t, n]], (chunk.cuts, restarts)
        assert (counted_ends(chunk) == (chunk.terminated & chunk.valid)).all()
        for n in range(len(self.done)):
            if self.done[n] or (-1, n) in restarts:
                self._begins(n, chunk.obs[0, n])
                self.seen["restarts"] += (-1, n) in restarts
            else:
                assert (chunk.obs[0, n] == self._last[n]).all(), (n, chunk.obs[0, n], self._last[n])
            for t in range(chunk.num_steps):
                obs = chunk.obs[t, n]
                if not chunk.valid[t, n]:
                    assert (t, n) in restarts
                    self.seen["restarts"] += 1
                else:
                    self._continues(n, obs, following[t, n], chunk.rew[t, n])
                    done = chunk.terminated[t, n] or chunk.truncated[t, n]
                    assert chunk.terminated[t, n] == (following[t, n][COUNT] >= EPISODE_STEPS)
                    assert chunk.truncated[t, n] == ((t + 1, n) in restarts and not chunk.terminated[t, n])
                    after = chunk.obs[t + 1, n] if t + 1 < chunk.num_steps else chunk.last_obs[n]
                    assert (after[COUNT] == 0) == bool(chunk.terminated[t, n]), (n, t, after)
                    assert done or (after == following[t, n]).all()
        self._last, self.done = chunk.last_obs.copy(), np.zeros(len(self.done), bool)
        self.seen["chunks"] += 1
