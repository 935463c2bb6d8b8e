"""Tianshou's Collector, fed by whole chunks."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
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

from rayvec.collect.asynchronous import PartChunk, PartsPipeline, in_rounds
from rayvec.collect.episode_quotas import EpisodeQuotas
from rayvec.collect.pipeline import ChunkPipeline
from rayvec.data import Chunk, Rollout, objects, tree_map
from rayvec.data.join_chunks import counted_ends, join_chunks
from rayvec.errors import ConfigError, check_choice, check_count
from rayvec.pools.publish_weights import WeightStore
from rayvec.tianshou.collect.buffers import Added, ChunkInsertion, steps_per_env, truncate_open_episode
from rayvec.tianshou.collect.checks import (
    are_equal,
    can_take_chunks,
    check_policy_and_env,
    looks_at_episodes,
    looks_at_steps,
    uses_of,
)
from rayvec.tianshou.collect.prefetch import PrefetchCollectStats, check_prefetch, prefetch_error
from rayvec.tianshou.collect.schedules import Schedule, StepCount, TianshouEpisodes
from rayvec.tianshou.collect.worker_policy import WorkerPolicy
from rayvec.tianshou.env.assembly import assembled_chunk
from rayvec.tianshou.env.vector_env import RayVectorEnv
from rayvec.tianshou.policies import policy_entry

__all__ = ["Collector"]

logger = logging.getLogger(__name__)


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
            check_prefetch(policy, env, inference)
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
        """Creates the pipelines for `env` and forgets the state of the previous environments."""
        self._in_mid_episode = self._state_in_driver = False
        self._state_key: int | None = None  # of the store whose copies have the hidden state of episodes in progress
        self._num_uses = 0  # of the environments up to now; other vector environments than rayvec's do not count
        self._lost_steps = False  # whether steps may be missing in the buffer, since an exception ended a collect
        env = cast(RayVectorEnv, self.env)  # others collect a step at a time
        self._workers = WorkerPolicy(env, self.policy, self.exploration_noise)
        is_own = isinstance(env, RayVectorEnv)
        self._has_one_action_space = is_own and are_equal(self._action_space)
        noise_seed = env.next_noise_seed(torch.initial_seed()) if is_own else 0
        self._pipeline = ChunkPipeline(env, noise_seed)
        staleness = self._max_staleness
        self._parts = None if staleness is None else PartsPipeline(env, noise_seed, staleness)
        self._kept_parts: list[PartChunk] = []  # finished chunks of parts that are not in the buffer yet

    def _apply_changes(self) -> None:
        """Applies a `policy`, `exploration_noise` or `env` that was set since the last call."""
        has_other_env = self.env is not self._workers.env
        if not has_other_env and self._workers.has_policy(self.policy, self.exploration_noise):
            return
        check_policy_and_env(self.policy, self.env)
        if self._prefetch:
            check_prefetch(self.policy, self.env, self._inference)
        if has_other_env:
            self._validate_buffer()
            self._drop_pending()
            self._action_space = self.env.action_space
            self._pre_collect_obs_RO = None
            self._attach_env()
        else:
            self._workers.set_policy(self.policy, self.exploration_noise)

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
        self._state_in_driver = self._in_mid_episode = self._lost_steps = False
        self._state_key = None
        self._drop_pending()
        for env_id in range(self.env_num):
            truncate_open_episode(self.buffer, env_id)
        first = super().reset_env(gym_reset_kwargs)
        self._num_uses = uses_of(self.env)
        return first

    def _drop_pending(self) -> None:
        """Waits for the pending chunks, unless their environments are closed, and drops them."""
        for pipeline in [self._pipeline, *(self._parts.pipelines if self._parts else ())]:
            if pipeline.pending and self._workers.env.closed:
                pipeline.forget()
            while pipeline.pending:
                pipeline.finish()
        self._kept_parts.clear()

    def _collect(
        self,
        n_step: int | None = None,
        n_episode: int | None = None,
        random: bool = False,
        render: float | None = None,
        gym_reset_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self._apply_changes()
        if self._lost_steps:
            logger.warning(
                "an exception interrupted an earlier collect, so steps may be missing in the buffer: "
                "resetting all environments"
            )
            self.reset_env(gym_reset_kwargs)
        if self._pre_collect_obs_RO is not None and self._num_uses != uses_of(self.env):
            self.reset_env(gym_reset_kwargs)  # something else has reset or stepped them since the last collect
        is_plain = not (render or gym_reset_kwargs or (n_step and n_episode))
        try:
            if is_plain and self._takes_chunks(random):
                return self._collect_chunks(n_step, n_episode, random)
            return self._collect_steps(n_step, n_episode, random, render, gym_reset_kwargs)
        finally:
            self._num_uses = uses_of(self.env)

    # A step at a time.

    def _takes_chunks(self, random: bool) -> bool:
        """Whether this collect can be done in whole chunks."""
        env = self.env
        return (
            self._inference == "worker"
            and can_take_chunks(env)
            and cast(RayVectorEnv, env).gives_arrays
            and not self._state_in_driver
            and not looks_at_steps(self)
            and (self._has_one_action_space if random else self._publish())
        )

    def _publish(self) -> bool:
        """Gives the workers the policy as it is now; returns False where it must act in the driver."""
        if not self._workers.publish():
            return False
        store = self._workers.store
        if store is None or self._state_key in (None, store.key):
            return True
        if self._prefetch:
            raise prefetch_error(
                "a policy with a hidden state that stays as it is until the next reset",
                "one that was copied to the workers again in mid-episode",
                "Call reset() first.",
            )
        logger.warning(
            "the policy was copied to the workers again in mid-episode: its hidden state is kept in the driver, and "
            "the collector takes one step at a time until the next reset"
        )
        self._state_in_driver = True
        return False

    def _collect_steps(self, n_step: int | None, n_episode: int | None, *how: Any) -> Any:
        """Collects as Tianshou does; takes the arguments of `_collect`."""
        if self._prefetch:
            raise prefetch_error(
                "n_step alone, no rendering, no step hook, a picklable policy, "
                "observations in arrays, one action space for random=True",
                "a collect that takes one step at a time",
            )
        if n_episode and self._unbiased:
            raise ConfigError(
                "Unbiased episodes are collected in chunks.",
                expected="inference='worker', no hook on steps, no rendering, no arguments for resets, "
                "a RayVectorEnv with its own step and reset",
                got="a collect that takes one step at a time",
                remedy="Leave unbiased=True out, or what requires single steps.",
            )
        self._in_mid_episode = True
        self._lost_steps = self._pre_collect_obs_RO is not None
        try:
            stats = super()._collect(n_step, n_episode, *how)
        except StopIteration:  # from a finite data set that has ended, in a reset: its steps are stored
            self._lost_steps = False
            raise
        self._lost_steps = False
        self._state_in_driver = self._pre_collect_hidden_state_RH is not None
        return stats

    # A chunk at a time.

    def _collect_chunks(self, n_step: int | None, n_episode: int | None, random: bool) -> Any:
        parts = None if random else self._parts
        if self._pre_collect_obs_RO is None:
            raise ValueError(
                "Initial obs and info should not be None. "
                "Either reset the collector (using reset or reset_env) or pass reset_before_collect=True to collect.",
            )
        if self._prefetch and n_episode:
            raise prefetch_error("n_step", f"n_episode={n_episode}", "Use another collector for whole episodes.")
        if self._pipeline.pending and (n_episode or parts):
            self.reset_env()  # a call before was interrupted: its chunk need not have been for this one
        if n_episode and self._unbiased and self._in_mid_episode:
            raise ConfigError(
                "With unbiased=True, episodes begin in the call that counts them.",
                expected="environments at the beginning of an episode",
                got="some in mid-episode, begun by an earlier collect",
                remedy="Pass reset_before_collect=True, or call reset() first.",
            )
        if self._parts and not parts and (self._parts.pending or self._kept_parts):
            raise prefetch_error(
                "random=True in the first calls only, before the policy acts", "pending chunks", "Call reset() first."
            )
        if n_step and parts:
            stats = self._collect_parts(parts, n_step)
        else:
            stats = self._collect_scheduled(n_step, n_episode, random)
        self.collect_step += stats.n_collected_steps
        self.collect_episode += stats.n_collected_episodes
        if n_episode:
            self.reset_env()
        return stats

    def _collect_scheduled(self, n_step: int | None, n_episode: int | None, random: bool) -> Any:
        schedule: Schedule
        if n_step:
            schedule = StepCount(n_step, self.env_num)
        else:
            schedule = (EpisodeQuotas if self._unbiased else TianshouEpisodes)(n_episode or 0, self.env_num)
        stats = self.collect_stats_class()
        store = self._workers.at_random(self._action_space[0]) if random else self._workers.store
        assert store is not None
        self._in_mid_episode = True
        num_next = StepCount(n_step, self.env_num).next_steps() if n_step and self._prefetch and not random else 0
        is_last = False
        while not is_last:
            chunk, at_random, is_last = self._next_chunk(store, schedule, num_next)
            self._insert(chunk, stats, at_random, with_episodes=bool(n_episode))
            self._lost_steps = False
            if self._prefetch and hasattr(stats, "staleness") and not at_random:
                stats.staleness = max(stats.staleness, store.version - chunk.weights_version)
        if not (n_episode or self._prefetch):
            self._keep_last(chunk, random)
        return stats

    def _next_chunk(self, store: WeightStore, schedule: Schedule, num_next: int) -> tuple[Chunk, bool, bool]:
        """Takes the pending chunk, or a new one. After the last, workers start `num_next` steps for the next call.

        Returns:
            The chunk, its `valid` cleared where a step does not belong; whether it was taken at random; and whether it
            is the last that the schedule asks for.
        """
        pipeline = self._pipeline
        if not pipeline.pending:
            pipeline.start(store, schedule.next_steps())
        at_random = pipeline.pending[0].store is self._workers.random_store
        taken = self._chunk_of(pipeline.finish())
        chunk = replace(taken, valid=schedule.take(taken.valid, counted_ends(taken)))
        is_last = not schedule.next_steps()
        if num_next and is_last:
            pipeline.start(store, num_next)
        return chunk, at_random, is_last

    def _collect_parts(self, parts: PartsPipeline, n_step: int) -> Any:
        """Stores chunks of parts until there are as many as environments, and every chunk that is due."""
        store, num_steps = self._workers.store, -(-n_step // self.env_num)
        assert store is not None and self._max_staleness is not None
        self._in_mid_episode = True
        kept_steps = (part.rollout.summary.valid.shape[0] for part in self._kept_parts)
        longest = max([num_steps, *(chunk.num_steps for chunk in parts.pending), *kept_steps])
        most = min(steps_per_env(self.buffer) // longest, math.inf if self._max_staleness > 1 else 1)
        if most < min(2, self._max_staleness):
            raise ConfigError(
                "With `max_staleness` a fast worker may deliver several chunks to one call, none overwriting another.",
                expected=f"a buffer with room for two chunks of {longest} steps of each environment",
                got=f"room for {steps_per_env(self.buffer)} steps of each",
                remedy="Double the size of the buffer, or pass max_staleness=1.",
            )
        parts.start(store, num_steps, ahead=True)
        parts.collect(store, num_steps, self._kept_parts, ahead=True, most=most)
        stats = self.collect_stats_class()
        kept, self._kept_parts = self._kept_parts, []
        for members in in_rounds(kept):
            chunk = join_chunks([self._chunk_of(part.rollout) for part in members])
            self._insert(chunk, stats, random=False, with_episodes=False)
        self._lost_steps = False
        ages = [store.version - part.rollout.summary.weights_version for part in kept for _ in part.envs]
        if hasattr(stats, "staleness"):
            stats.staleness = max(ages)
        if hasattr(stats, "staleness_counts"):
            stats.staleness_counts = tuple(np.bincount(ages).tolist())
        return stats

    def _chunk_of(self, rollout: Rollout) -> Chunk:
        """Returns the chunk of a rollout in the form in which it is stored; the caller stores it next."""
        self._lost_steps = True
        if rollout.summary.bad_obs is not None and not self._bad_obs_reported:
            self._bad_obs_reported = True
            logger.warning("an observation or a reward is not finite: %s", rollout.summary.bad_obs)
        assert rollout.chunk is not None
        return assembled_chunk(rollout.chunk)

    def _insert(self, chunk: Chunk, stats: CollectStats, random: bool, with_episodes: bool) -> None:
        act: Any = chunk.extras.get("act", chunk.act)
        if random:
            lead = chunk.valid.shape
            act = self.policy.map_action_inverse(act.reshape(-1, *act.shape[2:])).reshape(*lead, *act.shape[2:])
        entry, store = policy_entry(chunk.extras), self._workers.store
        self._state_key = store.key if store is not None and "hidden_state" in entry else None
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

    def _keep_last(self, chunk: Chunk, random: bool) -> None:
        """Keeps the last observations and infos for a collect that takes one step at a time."""
        n, last = self.env_num, chunk.num_steps - 1
        obs = chunk.last_obs
        if isinstance(obs, dict):
            obs = objects([tree_map(lambda leaf: leaf[row], obs) for row in range(n)])  # noqa: B023
        infos: list[dict[str, Any]] = [{} if done else {"env_id": row} for row, done in enumerate(chunk.done[last])]
        for said, of_reset in ((chunk.infos, False), (chunk.reset_infos, True)):
            for item in said.where(lambda t, n: t == last):
                if chunk.done[last, item.n] == of_reset:
                    infos[item.n] = {**item.info, **infos[item.n]}
        self._pre_collect_obs_RO, self._pre_collect_info_R = obs, objects(infos)
        state = None if random else policy_entry(chunk.extras).get("hidden_state")
        if state is not None:
            state = state[last]
            self._reset_hidden_state_based_on_type(np.flatnonzero(chunk.done[last]), state)
        self._pre_collect_hidden_state_RH = state
