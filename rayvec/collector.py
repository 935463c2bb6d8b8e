"""From chunks to episodes: the Collector knows where an episode begins and ends."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from rayvec.errors import ConfigError, check_choice, check_count, message
from rayvec.rollout import as_policy, counted_ends
from rayvec.types import Batch, Chunk, CollectStats, EpisodeStats
from rayvec.vector import RayVecEnv
from rayvec.weights import WeightStore

__all__ = ["Collector", "CollectorProtocol", "EpisodeTracker"]

_CHUNK_STEPS = 64
"""Steps of a chunk where episodes are counted, so that little is stepped beyond the last."""


class CollectorProtocol(Protocol):
    """What whoever trains may ask of a collector, this one or :class:`rayvec.tianshou.Collector`."""

    def collect(self, n_step: int | None = None, n_episode: int | None = None) -> Any:
        """Collects that many steps or episodes; what it returns, or its ``stats``, counts ``n_collected_steps``."""
        ...

    def reset(self) -> Any:
        """Begins new episodes everywhere."""
        ...


class EpisodeTracker:
    """Adds up rewards and steps of the episodes under way, from chunk to chunk.

    Args:
        num_envs: How many environments.
    """

    def __init__(self, num_envs: int) -> None:
        self._returns = np.zeros(num_envs)
        self._lens = np.zeros(num_envs, np.int64)

    def add(self, chunk: Chunk) -> tuple[EpisodeStats, NDArray[np.int64]]:
        """Takes note of a chunk. An episode that a fault has cut is forgotten: it did not end.

        Returns:
            The episodes that ended in it, and the places ``(t, n)`` of their last steps, ``int64 [F, 2]``.
        """
        ends = counted_ends(chunk)
        cut_before = {(t, n) for t, n in chunk.restarts.tolist()}
        self._forget([n for t, n in cut_before if t < 0])
        returns, lens, places = [], [], []
        for t in range(chunk.num_steps):
            self._forget([n for at, n in cut_before if at == t])
            self._returns += np.where(chunk.valid[t], chunk.rew[t], 0.0)
            self._lens += chunk.valid[t]
            ended = np.flatnonzero(ends[t])
            if len(ended):
                returns.append(self._returns[ended])
                lens.append(self._lens[ended])
                places += [(t, n) for n in ended.tolist()]
                self._returns[ended] = 0.0
                self._lens[ended] = 0
        at = np.array(places, np.int64).reshape(-1, 2)
        stats = EpisodeStats(
            chunk.env_ids[at[:, 1]],
            np.concatenate([np.zeros(0), *returns]),
            np.concatenate([np.zeros(0, np.int64), *lens]),
        )
        return stats, at

    @property
    def any_under_way(self) -> bool:
        """Whether some environment has taken a step since its last episode ended."""
        return bool(self._lens.any())

    def clear(self) -> None:
        """Forgets the episodes under way."""
        self._forget(slice(None))

    def _forget(self, columns: Any) -> None:
        self._returns[columns] = 0.0
        self._lens[columns] = 0


class Collector:
    """Lets a policy act in environments, and returns batches of steps with what is known of their episodes.

    Args:
        env: What to step.
        policy: A callable from observations to actions, or a :class:`rayvec.Policy`.
        inference: Where it acts: ``"worker"``, over each worker's slice, or ``"driver"``, in this process.
        seed: Of the environments (base + index) and of the noise. Without it neither can be repeated.
    """

    def __init__(
        self,
        env: RayVecEnv,
        policy: Any,
        inference: Literal["worker", "driver"] = "worker",
        seed: int | None = None,
    ) -> None:
        check_choice("inference", inference, ("worker", "driver"))
        self._env = env
        self._policy = as_policy(policy)
        self._store: WeightStore | None = None
        if inference == "worker":
            self._store = env.publish(self._policy)
        self._seed = seed
        self._noise_seed = secrets.randbits(63) if seed is None else seed
        self._first_step = 0
        self._version = 0
        self._tracker = EpisodeTracker(env.num_envs)
        self._started = False

    def reset(self, seed: int | None = None) -> None:
        """Begins new episodes everywhere; what was under way is forgotten.

        Args:
            seed: Of the environments, base + index; None lets each go on with its own generator.
        """
        self._env.reset(seed=seed)
        if hasattr(self._policy, "begin_episodes"):  # what acts in workers is told there
            self._policy.begin_episodes(np.arange(self._env.num_envs))
        self._tracker.clear()
        self._started = True

    def set_weights(self, weights: NDArray[np.float32]) -> int:
        """Gives the policy new weights, one flat vector; every step from now on is taken with them.

        Returns:
            Their version, which stands in every chunk that they acted in.
        """
        if self._store is None:
            self._policy.load_weights(weights)
            self._version += 1
        else:
            self._version = self._store.publish(weights)
        return self._version

    def collect(self, n_step: int | None = None, n_episode: int | None = None) -> Batch:
        """Collects steps or episodes; exactly one of the two counts is given.

        Args:
            n_step: How many steps in all. Every environment takes the same number, so what is not divisible
                is rounded up. Episodes under way go on in the next call.
            n_episode: How many whole episodes, begun in this call: environments in the midst of one are reset.
                Each environment is given its share beforehand, so that short episodes are not favoured;
                steps beyond it are marked as not valid and counted as surplus.

        Raises:
            ConfigError: Not exactly one count, or one that is not positive.
        """
        if (n_step is None) == (n_episode is None):
            raise ConfigError(
                message(
                    "collect takes one count.",
                    expected="n_step or n_episode",
                    got=f"n_step={n_step}, n_episode={n_episode}",
                    remedy="Pass n_step=4096, or n_episode=20.",
                )
            )
        check_count("n_step" if n_episode is None else "n_episode", n_step if n_episode is None else n_episode)
        begin = time.monotonic()
        if not self._started:
            self.reset(self._seed)
        if n_episode is not None and self._tracker.any_under_way:
            self.reset()  # half an episode is none, and those under way are the long ones
        if n_step is not None:
            taken = [self._chunk(-(-n_step // self._env.num_envs))]
            parts = [(chunk, *self._tracker.add(chunk), rollout_s) for chunk, rollout_s in taken]
            return self._batch(parts, begin)
        assert n_episode is not None
        return self._batch(self._episodes(n_episode), begin)

    def _episodes(self, n_episode: int) -> list[tuple[Chunk, EpisodeStats, NDArray[np.int64], float]]:
        """Collects chunks until every environment has ended its quota of episodes."""
        n = self._env.num_envs
        left = n_episode // n + (np.arange(n) < n_episode % n).astype(np.int64)
        parts = []
        while left.any():
            chunk, rollout_s = self._chunk(_CHUNK_STEPS)
            stats, places = self._tracker.add(chunk)
            counts = np.zeros(len(places), bool)
            valid = chunk.valid & (left > 0)
            for i, (t, column) in enumerate(places.tolist()):
                if left[column] > 0:
                    counts[i] = True
                    left[column] -= 1
                    if left[column] == 0:
                        valid[t + 1 :, column] = False
            stats = EpisodeStats(stats.env_ids[counts], stats.returns[counts], stats.lens[counts])
            parts.append((replace(chunk, valid=valid), stats, places[counts], rollout_s))
        return parts

    def _chunk(self, num_steps: int) -> tuple[Chunk, float]:
        """Takes steps; returns them and the seconds that the slowest node stepped."""
        if self._store is not None:
            chunk, rollout_s = self._env.rollout_workers(self._store, num_steps, self._first_step, self._noise_seed)
        else:
            begin = time.monotonic()
            chunk = self._env.rollout_driver(self._policy, num_steps, self._first_step, self._noise_seed, self._version)
            rollout_s = time.monotonic() - begin
        self._first_step += num_steps
        return chunk, rollout_s

    def _batch(self, parts: list[tuple[Chunk, EpisodeStats, NDArray[np.int64], float]], begin: float) -> Batch:
        chunks = tuple(chunk for chunk, _, _, _ in parts)
        episodes = [stats for _, stats, _, _ in parts]
        taken = sum(chunk.valid.size for chunk in chunks)
        collected = sum(int(chunk.valid.sum()) for chunk in chunks)
        rollout_s = sum(seconds for _, _, _, seconds in parts)
        versions = [chunk.weights_version for chunk in chunks]
        returns = np.concatenate([stats.returns for stats in episodes])
        elapsed_s = time.monotonic() - begin
        return Batch(
            chunks,
            CollectStats(
                returns=returns,
                lens=np.concatenate([stats.lens for stats in episodes]),
                n_collected_steps=collected,
                n_collected_episodes=len(returns),
                n_surplus_steps=taken - collected,
                collect_time_s=elapsed_s,
                steps_per_s=taken / elapsed_s,
                time_split_s={"rollout": rollout_s, "transport": elapsed_s - rollout_s},
                weights_versions=(min(versions), max(versions)),
            ),
        )

    def close(self) -> None:
        """Lets the workers forget the policy; the environments stay open. May be called again."""
        if self._store is not None and not self._env.closed:
            self._store.drop()
        self._store = None

    def state_dict(self) -> dict[str, int]:
        """Returns what a later run needs to go on: seeds and counters; episodes under way are not in it."""
        return {"noise_seed": self._noise_seed, "first_step": self._first_step, "version": self._version}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on where :meth:`state_dict` was taken, with new episodes; call :meth:`reset` after it."""
        self._noise_seed = int(state["noise_seed"])
        self._first_step = int(state["first_step"])
        self._version = int(state["version"])
        if self._store is not None:
            self._store.version = self._version
