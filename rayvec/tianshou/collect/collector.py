"""Tianshou's Collector, fed by whole chunks."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, cast

import gymnasium
import numpy as np
import tianshou.data
import torch
from numpy.typing import NDArray
from tianshou.algorithm.algorithm_base import Algorithm, Policy
from tianshou.config import ENABLE_VALIDATION
from tianshou.data import CollectStats, ReplayBuffer
from tianshou.data.collector import EpisodeRolloutHookProtocol, StepHookProtocol, TCollectStats
from tianshou.env import BaseVectorEnv

from rayvec.collect.episode_quotas import EpisodeQuotas
from rayvec.collect.scheduler import ChunkScheduler, ScheduledChunk, in_rounds
from rayvec.data import Chunk
from rayvec.data.join_chunks import counted_ends, join_chunks
from rayvec.errors import ConfigError, check_choice, check_count
from rayvec.tianshou.collect.buffers import Added, ChunkInsertion, steps_per_env, truncate_open_episode
from rayvec.tianshou.collect.checks import (
    are_equal,
    can_take_chunks,
    check_learns_off_policy,
    check_policy_and_env,
    looks_at_episodes,
    looks_at_steps,
    single_steps_error,
    uses_of,
)
from rayvec.tianshou.collect.schedules import MAX_STEPS, Schedule, StepCount, TianshouEpisodes
from rayvec.tianshou.collect.worker_policy import WorkerPolicy
from rayvec.tianshou.env.assembly import assembled_chunk
from rayvec.tianshou.env.vector_env import RayVectorEnv
from rayvec.tianshou.policies import TianshouPolicy, policy_entry
from rayvec.vector.chunks import WeightStore

__all__ = ["Collector", "PrefetchCollectStats"]

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class PrefetchCollectStats(CollectStats):
    """Statistics of one call of ``collect`` of a prefetching collector."""

    staleness: int = 0
    """How many times the policy had changed after it started to take the oldest of these steps."""

    staleness_counts: tuple[int, ...] = ()
    """With `max_staleness`: with how many of these columns (one chunk of one environment) it had changed 0, 1, 2, ...
    times."""


class Collector(tianshou.data.Collector[TCollectStats], Generic[TCollectStats]):
    """Collects steps into a buffer, as ``tianshou.data.Collector`` does, a chunk at a time.

    Over a :class:`rayvec.tianshou.RayVectorEnv` the policy acts in the workers, and whole chunks go into the buffer.
    The collector takes one step of all environments at a time, as Tianshou does, where something requires it: a hook
    on steps, rendering, arguments for resets, a stats class that looks at every step, observations
    that are no arrays, random actions of different action spaces, another vector environment, a subclass of
    RayVectorEnv with a `step` or `reset` of its own.

    Two things differ from Tianshou's Collector. Where environments are reset in mid-episode (by ``reset``, after
    ``collect(n_episode=n)``, which resets all of them, or in the first ``collect`` after something else stepped them),
    their last stored transition is marked as truncated. Tianshou leaves it open: ``buffer.next`` joins two episodes,
    and n-step returns and GAE run across the reset. The cut episode is not counted. And the length of an episode is its
    number of steps, also if it is longer than its sub-buffer.

    Args:
        policy: A policy or an algorithm of Tianshou.
        env: The environments.
        buffer: Where steps are stored; by default a ``VectorReplayBuffer`` for 10,000 steps of each environment.
        exploration_noise: Whether to add the policy's exploration noise.
        on_episode_done_hook: Called with every whole episode, as in Tianshou.
        on_step_hook: Called with every step, as in Tianshou.
        raise_on_nan_in_buffer: Whether to look for NaN in the buffer after every collect.
        collect_stats_class: What ``collect`` returns.
        inference: Where the policy acts: ``"worker"``, or ``"driver"``, one step at a time. A policy that can't be
            pickled acts in the driver.
        unbiased: Whether ``n_episode`` assigns every environment its share of episodes beforehand, instead of
            Tianshou's rule, by which short episodes come more often.
        prefetch: Whether the workers take the next chunk while the algorithm updates, with the policy as it was before:
            ``collect(n_step=...)`` returns the steps that the call before started. Stats say how old the policy was
            that acted (:class:`PrefetchCollectStats`; a class of your own gets it if it has the field). Supported by
            off-policy algorithms and :class:`rayvec.tianshou.IMPALA`, and for ``n_step`` alone. The
            environments are busy in between.
        max_staleness: Collects asynchronously, as :class:`rayvec.Collector` does: each worker (on a cluster, each node)
            goes on to its next chunk by itself, and ``collect(n_step=...)`` stores the chunks that are finished, at
            least `n_step` steps of them, without waiting for slow workers. No chunk is stored more than this many
            changes of the policy after it was requested: a call waits for it. With 1, every call stores one chunk of
            each worker, the one that the call before requested. With more, the buffer needs room for two chunks of each
            environment, and a call stores at most as many as there is room for, even if `n_step` grew.

    Raises:
        ConfigError: A policy or environments of another library, settings that can't be combined, or `prefetch` or
            `max_staleness` for an algorithm that can learn only from steps of its present policy.
        ValueError: The buffer has no room for so many environments.
    """

    def __init__(
        self,
        policy: Policy | Algorithm[Any, Any],
        env: gymnasium.Env[Any, Any] | BaseVectorEnv,
        buffer: ReplayBuffer | None = None,
        exploration_noise: bool = False,
        on_episode_done_hook: EpisodeRolloutHookProtocol | None = None,
        on_step_hook: StepHookProtocol | None = None,
        raise_on_nan_in_buffer: bool = ENABLE_VALIDATION,
        collect_stats_class: type[CollectStats] = CollectStats,
        *,
        inference: Literal["worker", "driver"] = "worker",
        unbiased: bool = False,
        prefetch: bool = False,
        max_staleness: int | None = None,
    ) -> None:
        check_policy_and_env(policy, env)
        check_choice("inference", inference, ("worker", "driver"))
        if max_staleness is not None:
            check_count("max_staleness", max_staleness)
        prefetch = prefetch or max_staleness is not None
        if prefetch:
            check_learns_off_policy(policy)
            if collect_stats_class is CollectStats:
                collect_stats_class = PrefetchCollectStats
        super().__init__(
            policy,
            env,
            buffer,
            exploration_noise,
            on_episode_done_hook,
            on_step_hook,
            raise_on_nan_in_buffer,
            cast(type[TCollectStats], collect_stats_class),
        )
        self._inference = inference
        self._unbiased = unbiased
        self._prefetch = prefetch
        self._max_staleness = max_staleness
        self._bad_obs_reported = False
        self._attach_env()

    def _attach_env(self) -> None:
        """Decides whether `env` takes chunks; without a scheduler the collector takes one step at a time."""
        env = cast(RayVectorEnv, self.env)
        self._attached_env = env
        self._way: Literal["chunks", "steps", "lost"] | None = None  # of the steps after the last reset
        self._has_state = False  # whether the policy has a hidden state
        self._num_uses = 0  # of the environments up to now; other vector environments than rayvec's do not count
        self._chunks: ChunkScheduler | None = None
        noise_seed = env.next_noise_seed(torch.initial_seed()) if isinstance(env, RayVectorEnv) else 0
        if self._inference == "worker" and can_take_chunks(env) and _is_picklable(self.policy):
            self._workers = WorkerPolicy(env)
            self._chunks = ChunkScheduler(env, noise_seed, max_staleness=self._max_staleness)
        elif self._prefetch:
            raise single_steps_error("prefetch or max_staleness")

    def _apply_changes(self) -> None:
        """Checks a `policy` or an `env` that was set since the last call, and applies the latter."""
        check_policy_and_env(self.policy, self.env)
        if self._prefetch:
            check_learns_off_policy(self.policy)
        if self.env is not self._attached_env:
            self._validate_buffer()
            self._drop_pending()
            self._action_space = self.env.action_space
            self._pre_collect_obs_RO = None
            self._attach_env()

    def collect(self, *args: Any, **kwargs: Any) -> Any:
        """Collects steps or episodes; arguments and result as of ``tianshou.data.Collector.collect``."""
        stats = super().collect(*args, **kwargs)
        self.collect_time += stats.collect_time
        return stats

    def _validate_n_step_n_episode(self, n_episode: int | None, n_step: int | None) -> None:
        for name, count in (("n_step", n_step), ("n_episode", n_episode)):
            if count:  # Tianshou's own check is of zeros and None
                check_count(name, count)
        super()._validate_n_step_n_episode(n_episode, n_step)

    def reset_env(self, gym_reset_kwargs: dict[str, Any] | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
        """Begins new episodes everywhere; returns first observations and infos.

        A pending chunk is dropped. The last stored transition of an episode that is cut here becomes truncated.
        """
        self._apply_changes()
        self._drop_pending()
        self._way = None
        for env_id in range(self.env_num):
            truncate_open_episode(self.buffer, env_id)
        first = super().reset_env(gym_reset_kwargs)
        self._num_uses = uses_of(self.env)
        return first

    def _drop_pending(self) -> None:
        """Waits for the pending chunks, unless their environments are closed, and drops them."""
        if self._chunks is not None:
            if self._attached_env.closed:
                self._chunks.forget()
            self._chunks.drop()

    def _collect(
        self,
        n_step: int | None = None,
        n_episode: int | None = None,
        random: bool = False,
        render: float | None = None,
        gym_reset_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self._apply_changes()
        needs_steps = bool(render or gym_reset_kwargs or (n_step and n_episode)) or looks_at_steps(self)
        chunks = None if needs_steps or (random and not are_equal(self._action_space)) else self._chunks
        way = "steps" if chunks is None else "chunks"
        if self._way == "lost":
            logger.warning(
                "an exception interrupted an earlier collect, so steps may be missing in the buffer: "
                "resetting all environments"
            )
        if self._pre_collect_obs_RO is None:
            raise ValueError(
                "Initial obs and info should not be None. "
                "Either reset the collector (using reset or reset_env) or pass reset_before_collect=True to collect.",
            )
        if self._way not in (None, way) or self._num_uses != uses_of(self.env):
            self.reset_env(gym_reset_kwargs)  # also where something else has reset or stepped them
        try:
            if chunks is not None:
                return self._collect_chunks(chunks, n_step, n_episode, random)
            return self._collect_steps(n_step, n_episode, random, render, gym_reset_kwargs)
        finally:
            self._num_uses = uses_of(self.env)

    def _collect_steps(self, n_step: int | None, n_episode: int | None, *how: Any) -> Any:
        """Collects as Tianshou does; takes the arguments of `_collect`."""
        if self._prefetch or (n_episode and self._unbiased):
            raise single_steps_error("prefetch or max_staleness" if self._prefetch else "unbiased=True")
        self._way = "lost"
        try:
            stats = super()._collect(n_step, n_episode, *how)
        except StopIteration:  # from a finite data set that has ended, in a reset: its steps are stored
            self._way = "steps"
            raise
        self._way = self._way and "steps"  # after whole episodes Tianshou resets
        return stats

    def _collect_chunks(
        self, chunks: ChunkScheduler, n_step: int | None, n_episode: int | None, random: bool
    ) -> CollectStats:
        if n_episode and self._prefetch:
            raise ConfigError(
                f"n_episode={n_episode} was passed with prefetch or max_staleness, which take steps ahead. "
                "Pass n_step, or use another collector for whole episodes."
            )
        if n_episode and self._unbiased and self._way is not None:
            raise ConfigError(
                "Some environments are in mid-episode. With unbiased=True, episodes begin in the call that counts "
                "them: pass reset_before_collect=True, or call reset() first."
            )
        if random and self._max_staleness and not chunks.is_idle:
            raise ConfigError(
                "random=True was passed while chunks of the policy are pending. With max_staleness, pass it in the "
                "first calls only, or call reset() first."
            )
        if n_episode and not chunks.is_idle:
            self.reset_env()  # a call before was interrupted: its chunk need not have been for this one
        store, stats = self._published(random), self.collect_stats_class()
        self._fill(chunks, store, n_step, n_episode, stats, goes_ahead=self._prefetch and not random)
        self.collect_step += stats.n_collected_steps
        self.collect_episode += stats.n_collected_episodes
        if n_episode:
            self.reset_env()
        return stats

    def _published(self, random: bool) -> WeightStore:
        """Returns what acts in the workers: the policy as it is now, or random actions."""
        if random:
            return self._workers.at_random(self._action_space[0])
        store, is_copied_again = self._workers.publish(self.policy, self.exploration_noise)
        if is_copied_again and self._has_state and self._way is not None:
            logger.warning(
                "the policy was copied to the workers again in mid-episode, without its hidden state: "
                "resetting all environments"
            )
            self.reset_env()
        return store

    def _fill(
        self,
        chunks: ChunkScheduler,
        store: WeightStore,
        n_step: int | None,
        n_episode: int | None,
        stats: CollectStats,
        *,
        goes_ahead: bool,
    ) -> None:
        """Collects chunks until there are as many steps or episodes as requested, and stores them."""
        is_asynchronous = goes_ahead and self._max_staleness is not None
        steps = StepCount(n_step or 0, self.env_num, n_step if is_asynchronous and n_step else MAX_STEPS)
        schedule: Schedule = steps
        if n_episode:
            schedule = (EpisodeQuotas if self._unbiased else TianshouEpisodes)(n_episode, self.env_num)
        max_chunks = self._max_chunks(max(steps.left, chunks.longest)) if is_asynchronous else math.inf
        num_next = steps.next_steps() if goes_ahead else 0
        self._way = self._way or "chunks"
        while num_steps := schedule.next_steps():
            num_ahead = num_next if steps.left <= num_steps else 0
            finished = chunks.collect(store, num_steps, num_ahead=num_ahead, max_chunks=max_chunks)
            self._way = "lost"
            for members in in_rounds(finished):
                parts = [self._chunk_of(member) for member in members]
                chunk = join_chunks(parts) if len(parts) > 1 else parts[0]
                chunk = replace(chunk, valid=schedule.take(chunk.valid, counted_ends(chunk)))
                is_random = members[0].store is self._workers.random_store
                self._insert(chunk, stats, is_random, with_episodes=bool(n_episode))
            self._way = "chunks"
            if goes_ahead:
                self._note_ages(stats, finished)
            if is_asynchronous:
                return

    def _max_chunks(self, num_steps: int) -> float:
        """Returns how many chunks of an environment a call may store, so that none overwrites another."""
        assert self._max_staleness is not None
        most = min(steps_per_env(self.buffer) // num_steps, math.inf if self._max_staleness > 1 else 1)
        if most < min(2, self._max_staleness):
            raise ConfigError(
                f"The buffer has room for {steps_per_env(self.buffer)} steps of each environment. A fast worker may "
                f"deliver two chunks of {num_steps} steps to one call: double the buffer, or pass max_staleness=1."
            )
        return most

    def _note_ages(self, stats: Any, finished: list[ScheduledChunk]) -> None:
        """Notes how many times the policy had changed since it began the chunks."""
        assert self._workers.store is not None
        version, random_store = self._workers.store.version, self._workers.random_store
        taken = [chunk for chunk in finished if chunk.store is not random_store]
        ages = [version - chunk.rollout.summary.weights_version for chunk in taken for _ in chunk.envs]
        if hasattr(stats, "staleness"):
            stats.staleness = max([stats.staleness, *ages])
        if hasattr(stats, "staleness_counts") and self._max_staleness is not None:
            stats.staleness_counts = tuple(np.bincount(ages).tolist())

    def _chunk_of(self, taken: ScheduledChunk) -> Chunk:
        """Returns a chunk in the form in which it is stored."""
        bad, chunk = taken.rollout.summary.bad_obs, taken.rollout.chunk
        if bad is not None and not self._bad_obs_reported:
            self._bad_obs_reported = True
            logger.warning("an observation or a reward is not finite: %s", bad)
        assert chunk is not None
        return assembled_chunk(chunk)

    def _insert(self, chunk: Chunk, stats: CollectStats, random: bool, with_episodes: bool) -> None:
        act: Any = chunk.extras.get("act", chunk.act)
        if random:
            lead = chunk.valid.shape
            act = self.policy.map_action_inverse(act.reshape(-1, *act.shape[2:])).reshape(*lead, *act.shape[2:])
        entry = policy_entry(chunk.extras)
        self._has_state = "hidden_state" in entry
        insertion = ChunkInsertion(self.buffer, chunk, act=act, policy=entry)
        stats.n_collected_steps += int(chunk.valid.sum())
        if "dist_std" in chunk.extras:
            parts = [] if stats.pred_dist_std_array is None else [stats.pred_dist_std_array]
            stats.pred_dist_std_array = np.concatenate([*parts, chunk.extras["dist_std"][chunk.valid]])
        if not looks_at_episodes(self):
            self._count(stats, insertion.add(0, chunk.num_steps))
            return
        ends = (np.flatnonzero((chunk.done & chunk.valid).any(1)) + 1).tolist()
        start = 0
        for stop in dict.fromkeys([*ends, chunk.num_steps]):  # a hook finds the buffer as it is after the step
            added = insertion.add(start, stop)
            self._finish_episodes(added, stats, with_episodes)
            start = stop

    @staticmethod
    def _count(stats: CollectStats, added: Added) -> None:
        returns = added.returns[added.ended]
        if len(returns):
            stats.returns = np.concatenate([stats.returns, returns]) if len(stats.returns) else returns
        stats.lens = np.concatenate([stats.lens, added.lens[added.ended]])
        stats.n_collected_episodes += int(added.ended.sum())

    def _finish_episodes(self, added: Added, stats: CollectStats, with_episodes: bool) -> None:
        """Calls the hook and the stats class with the episodes that ended in the last of these steps."""
        for column in np.flatnonzero(added.ended[-1]).tolist():
            start, stop = int(added.starts[-1, column]), int(added.index[-1, column]) + 1
            indices = self.buffer.get_buffer_indices(start, stop)
            episode: Any = self.buffer[indices]
            additions = self.run_on_episode_done(episode)
            if additions is not None and not with_episodes:
                raise ValueError(
                    "An on_episode_done_hook with non-empty returns is not supported for n_step collection."
                    "Such hooks should only be used when collecting full episodes. Got a on_episode_done_hook "
                    f"that would add the following fields to the buffer: {list(additions)}.",
                )
            for key, values in (additions or {}).items():
                self.buffer.set_array_at_key(values, key, index=indices)
                episode.set_array_at_key(values, key)
            episode_return = added.returns[-1, column]
            stats.update_at_episode_done(
                episode_batch=episode,
                episode_return=episode_return if episode_return.ndim else float(episode_return),
            )


def _is_picklable(policy: Policy) -> bool:
    """Whether workers can act with a policy; else it acts in the driver."""
    try:
        TianshouPolicy(policy).structure()
    except ConfigError as error:
        logger.warning("the policy acts in the driver: %s", error)
        return False
    return True
