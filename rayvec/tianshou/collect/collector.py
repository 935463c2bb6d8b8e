"""Tianshou's Collector, fed by whole chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Literal, cast

import gymnasium
import numpy as np
import tianshou.data
import torch
from numpy.typing import NDArray
from tianshou.algorithm.algorithm_base import Algorithm, OffPolicyAlgorithm, OnPolicyAlgorithm, Policy
from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
from tianshou.config import ENABLE_VALIDATION
from tianshou.data import CollectStats, ReplayBuffer
from tianshou.data.collector import EpisodeRolloutHookProtocol, StepHookProtocol, TCollectStats
from tianshou.env import BaseVectorEnv

from rayvec.collect.quotas import EPISODE_CHUNK_STEPS, episode_quotas, within_quotas
from rayvec.collect.scheduler import ChunkScheduler
from rayvec.data import Chunk
from rayvec.data.chunk import counted_ends
from rayvec.errors import ConfigError, check_choice, check_count, require
from rayvec.tianshou.collect.buffers import add_chunk, truncate_open_episode
from rayvec.tianshou.env.pool_env import assembled_chunk
from rayvec.tianshou.env.vector_env import RayVectorEnv
from rayvec.tianshou.policies import TianshouPolicy, policy_entry, records_logp
from rayvec.vector.chunks import WeightStore

_MAX_STEPS = 128
"""Steps of a chunk where their number is known beforehand; it bounds the memory that chunks take."""


@dataclass(kw_only=True)
class PrefetchCollectStats(CollectStats):
    """Statistics of one call of ``collect`` of a prefetching collector."""

    staleness: int = 0
    """How many times the policy had changed after it started to take the oldest of these steps."""


class Collector(tianshou.data.Collector[TCollectStats], Generic[TCollectStats]):
    """Collects steps into a buffer, as ``tianshou.data.Collector`` does, a chunk at a time.

    Over a :class:`rayvec.tianshou.RayVectorEnv` the policy acts in the workers, and whole chunks go into the buffer.
    The collector takes one step of all environments at a time, by Tianshou's own loop, where something requires it:
    hooks, rendering, arguments for resets, a stats class that looks at steps or episodes, observations that are no
    arrays, random actions, another vector environment, a subclass of RayVectorEnv with a `step` or `reset` of its own.

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
        inference: Where the policy acts: ``"worker"``, or ``"driver"``, one step at a time. By default the driver for
            an off-policy algorithm, which collects a step or two of each environment between updates, unless
            `prefetch` or `unbiased` needs chunks; else the workers.
        unbiased: Whether ``n_episode`` assigns every environment its share of episodes beforehand, instead of
            Tianshou's rule, by which short episodes come more often. Every environment begins them with a reset.
        prefetch: Whether the workers take the next chunk while the algorithm updates, with the policy as it was before:
            ``collect(n_step=...)`` returns the steps that the call before started. Stats say how old the policy was
            that acted (:class:`PrefetchCollectStats`). Supported by off-policy algorithms and
            :class:`rayvec.tianshou.IMPALA`. The environments are busy in between; episodes and random actions drop the
            pending chunk.

    Raises:
        ConfigError: A policy or environments of another library, settings that can't be combined, or `prefetch` for
            an algorithm that can learn only from steps of its present policy.
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
        inference: Literal["worker", "driver"] | None = None,
        unbiased: bool = False,
        prefetch: bool = False,
    ) -> None:
        _check_policy_and_env(policy, env)
        check_choice("inference", inference, ("worker", "driver", None))
        self._prefetch, self._unbiased = prefetch, unbiased
        if inference is None:
            takes_few_steps = isinstance(policy, OffPolicyAlgorithm) and not (prefetch or unbiased)
            inference = "driver" if takes_few_steps else "worker"
        if prefetch:
            _check_learns_off_policy(policy)
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
        self._way: Literal["chunks", "steps"] | None = None  # of the steps after the last reset
        self._num_uses = 0  # of the environments up to now; other vector environments than rayvec's do not count them
        self._acting: Policy | None = None  # the policy that `_store` was made of
        self._store: WeightStore | None = None
        self._weights = b""
        self._chunks: ChunkScheduler | None = None
        if inference == "worker" and isinstance(env, RayVectorEnv) and env.takes_chunks:
            env.num_collectors += 1
            entropy = np.random.SeedSequence([torch.initial_seed() % 2**64, env.num_collectors])
            self._chunks = ChunkScheduler(env, int(entropy.generate_state(1)[0]))
        elif prefetch:
            raise _single_steps_error("prefetch=True")

    def reset_env(self, gym_reset_kwargs: dict[str, Any] | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
        """Begins new episodes everywhere; returns first observations and infos.

        A pending chunk is dropped. The last stored transition of an episode that is cut here becomes truncated.
        """
        if self._chunks is not None:
            self._chunks.drop()
        self._way = None
        for env_id in range(self.env_num):
            truncate_open_episode(self.buffer, env_id)
        first = super().reset_env(gym_reset_kwargs)
        self._num_uses = getattr(self.env, "num_uses", 0)
        return first

    def _collect(
        self,
        n_step: int | None = None,
        n_episode: int | None = None,
        random: bool = False,
        render: float | None = None,
        gym_reset_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for name, count in (("n_step", n_step), ("n_episode", n_episode)):
            if count:  # Tianshou's own check is of zeros and None
                check_count(name, count)
        needs_steps = bool(random or render or gym_reset_kwargs or (n_step and n_episode)) or self._has_hooks()
        chunks = None if needs_steps else self._chunks
        if chunks is None and self._prefetch and not random:
            raise _single_steps_error("prefetch=True")
        if chunks is None and self._unbiased and n_episode:
            raise _single_steps_error("unbiased=True")
        if self._pre_collect_obs_RO is None:
            return super()._collect(n_step, n_episode, random, render, gym_reset_kwargs)  # raises
        way: Literal["chunks", "steps"] = "steps" if chunks is None else "chunks"
        if (
            self._way not in (None, way)
            or self._num_uses != getattr(self.env, "num_uses", 0)  # something else has reset or stepped them
            or (n_episode and self._unbiased and self._way)
            or (chunks and not chunks.is_idle and n_episode)
        ):
            self.reset_env(gym_reset_kwargs)
        self._way, self._num_uses = way, -1  # an exception loses steps: the next call resets
        if chunks is not None:
            stats = self._collect_chunks(chunks, n_step, n_episode)
        else:
            stats = super()._collect(n_step, n_episode, random, render, gym_reset_kwargs)
        self._num_uses = getattr(self.env, "num_uses", 0)
        return stats

    def _has_hooks(self) -> bool:
        """Whether a hook or the stats class is called with every step or every episode."""
        stats, names = self.collect_stats_class, ("update_at_step_batch", "update_at_episode_done")
        is_own = any(getattr(stats, name) is not getattr(CollectStats, name) for name in names)
        return is_own or bool(self.get_on_step_hook() or self.get_on_episode_done_hook())

    def _collect_chunks(self, chunks: ChunkScheduler, n_step: int | None, n_episode: int | None) -> Any:
        """Collects chunks until there are as many steps or episodes as requested, and stores them."""
        stats: Any = self.collect_stats_class()
        store = self._published()
        num_steps = -(-(n_step or 0) // self.env_num)
        for start in range(0, num_steps, _MAX_STEPS):
            is_last = start + _MAX_STEPS >= num_steps
            num_ahead = min(num_steps, _MAX_STEPS) if self._prefetch and is_last else 0
            chunks.collect(store, min(num_steps - start, _MAX_STEPS), num_ahead=num_ahead)
            for chunk in (each.rollout.chunk for each in chunks.take()):
                self._insert(chunk, stats)
                if self._prefetch:
                    stats.staleness = max(getattr(stats, "staleness", 0), store.version - chunk.weights_version)
        left = np.array([n_episode or 0])
        belongs: Callable[..., NDArray[np.bool_]] = partial(_first_to_end, np.arange(self.env_num) < left)
        if self._unbiased:
            left, belongs = episode_quotas(n_episode or 0, self.env_num), within_quotas
        while left.any():
            chunks.collect(store, EPISODE_CHUNK_STEPS)
            for chunk in (each.rollout.chunk for each in chunks.take()):
                self._insert(replace(chunk, valid=belongs(chunk, left)), stats)
        self.collect_step += stats.n_collected_steps
        self.collect_episode += stats.n_collected_episodes
        if n_episode:
            self.reset_env()
        return stats

    def _published(self) -> WeightStore:
        """Returns what acts in the workers: the policy as it is now."""
        env = cast(RayVectorEnv, self.env)
        acting = TianshouPolicy(self.policy, exploration_noise=self.exploration_noise)
        if self._store is None or self._acting is not self.policy:
            self._store = env.publish(acting, self._store.version + 1 if self._store else 0)
            self._acting, self._weights = self.policy, acting.weights().tobytes()
        elif (weights := acting.weights()).tobytes() != self._weights:
            self._store.weights = None  # the new ones may have another size
            self._store.publish(weights)
            self._weights = weights.tobytes()
        return self._store

    def _insert(self, chunk: Chunk, stats: CollectStats) -> None:
        act: Any = chunk.extras.get("act", chunk.act)
        assembled, infos = assembled_chunk(chunk)
        returns, lens = add_chunk(self.buffer, assembled, infos, act=act, policy=policy_entry(chunk.extras))
        if len(returns):
            stats.returns = np.concatenate([stats.returns, returns]) if len(stats.returns) else returns
        stats.lens = np.concatenate([stats.lens, lens])
        stats.n_collected_episodes += len(lens)
        stats.n_collected_steps += int(chunk.valid.sum())
        if "dist_std" in chunk.extras:
            parts = [] if stats.pred_dist_std_array is None else [stats.pred_dist_std_array]
            stats.pred_dist_std_array = np.concatenate([*parts, chunk.extras["dist_std"][chunk.valid]])


def _first_to_end(takes_part: NDArray[np.bool_], chunk: Chunk, left: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Returns which steps of a chunk belong to a number of episodes, by the rule of Tianshou's Collector.

    When fewer episodes are left than environments take part, the first of those that have just ended one leave, so
    short episodes come more often.

    Args:
        takes_part: The environments that take part, ``bool [N]``: at first, no more than there are episodes. Those that
            leave are removed.
        chunk: The chunk.
        left: How many episodes are left, ``int64 [1]``; those that end in the chunk are subtracted.
    """
    ended, belongs = counted_ends(chunk), chunk.valid & takes_part
    for t in np.flatnonzero(ended.any(1)).tolist():
        columns = np.flatnonzero(ended[t] & takes_part)
        left -= len(columns)
        leaving = columns[: max(0, int(takes_part.sum() - left[0]))]
        takes_part[leaving] = False
        belongs[t + 1 :, leaving] = False
    return belongs


def _check_policy_and_env(policy: Any, env: Any) -> None:
    """Raises ``ConfigError`` if a policy or environments are of another library."""
    require(
        isinstance(policy, Policy | Algorithm),
        f"{type(policy).__name__} is not a Tianshou 2 policy or algorithm. Put a network into a policy, for "
        "example DiscreteActorPolicy(actor=net, action_space=space).",
    )
    require(
        env is not None and (not isinstance(env, gymnasium.vector.VectorEnv) or hasattr(type(env), "__len__")),
        f"{type(env).__name__} is not a vector environment of Tianshou. Pass rayvec.tianshou.RayVectorEnv("
        "env_fns), another tianshou.env.BaseVectorEnv or one gymnasium.Env; rayvec.Collector takes a RayVecEnv.",
    )


def _check_learns_off_policy(policy: Policy | Algorithm[Any, Any]) -> None:
    """Raises ``ConfigError`` if `policy` learns only from steps of its present policy, which are not taken ahead."""
    acting = policy.policy if isinstance(policy, Algorithm) else policy
    on_policy = isinstance(policy, OnPolicyAlgorithm) or isinstance(acting, ProbabilisticActorPolicy)
    require(
        not on_policy or records_logp(acting),
        f"{type(policy).__name__} learns from steps of its present policy. prefetch takes steps with an "
        "earlier one: use an off-policy algorithm or rayvec.tianshou.IMPALA, or leave it out.",
    )


def _single_steps_error(setting: str) -> ConfigError:
    """Returns the error of a setting that requires chunks, in a collect that takes one step at a time."""
    return ConfigError(
        f"collect would take one step at a time, but {setting} requires chunks: a RayVectorEnv without wait_num and "
        "timeout, step and reset not overridden, observations in arrays, inference='worker', no random actions, no "
        f"hooks, no rendering, no arguments for resets. Leave {setting} out, or what requires single steps."
    )
