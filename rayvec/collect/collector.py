"""From chunks to episodes: the Collector knows where an episode begins and ends."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rayvec.collect.asynchronous import PartChunk, PartsPipeline, join_parts
from rayvec.collect.checks import check_env, check_open, check_seed, check_settings, check_state
from rayvec.collect.episode_quotas import EpisodeQuotas
from rayvec.collect.pipeline import ChunkPipeline
from rayvec.collect.time_split import time_split_s
from rayvec.data import Batch, CollectStats, EpisodeStats, Rollout
from rayvec.data.batch import join_episodes
from rayvec.data.episodes import EpisodeTracker
from rayvec.data.finite_checks import bad_obs_error
from rayvec.data.join_chunks import counted_ends
from rayvec.errors import ConfigError, check_count
from rayvec.pools.base import Cut
from rayvec.pools.publish_weights import WeightStore
from rayvec.rollout.loop import CallablePolicy, as_policy
from rayvec.vector.ray_vec_env import RayVecEnv

__all__ = ["Collector", "EpisodeTracker"]

logger = logging.getLogger(__name__)


@dataclass
class _Counts:
    """What has happened since the last batch was returned, for the statistics of the next one."""

    restarts: int = 0
    dropped_steps: int = 0


class Collector:
    """Lets a policy act in environments, and returns batches of steps with the statistics of their episodes.

    The environments may be reset or stepped between two calls, also by another collector. The next call continues from
    there. With `n_episode` it begins new episodes. With `n_step` the episodes that it finds are in the chunks, but
    returns and lengths count only after a reset of all environments, which begins them.

    Args:
        env: The environments.
        policy: A callable from observations to actions, or a :class:`rayvec.Policy`. New weights go through
            :meth:`set_weights`: what the policy object itself loads later does not reach the workers.
        inference: Where the policy acts: ``"worker"``, over each worker's slice; ``"node"``, in the process that owns
            the workers of a node, over all of them; or ``"driver"``, in this process. See :meth:`RayVecEnv.rollout`.
        prefetch: Whether the workers take the next chunk while the caller consumes this one. ``collect(n_step)``
            then returns the steps that the call before started, and starts the next ones before it returns. In
            between the environments are busy: stepping or resetting them raises ``AlreadyPendingCallError``.
            Weights that are published between two calls act one call later. Requires ``inference="worker"``.
        seed: Seed of the environments (base + index) and of the noise. Without it neither can be repeated.
        by_reference: Whether chunks stay in Ray's object store, on the nodes where they were taken. The batch then has
            `chunk_refs` instead of `chunks`, and the same statistics. Requires ``inference="worker"``.
        max_staleness: Collects asynchronously: each part of the environments (a worker on one machine, a node on a
            cluster) goes on to its next chunk by itself, and ``collect(n_step)`` returns whichever chunks are finished,
            at least `n_step` steps of them, without waiting for slow parts. No step is lost and none is in two batches.
            Where `n_step` changes between calls, a batch may have more columns than environments, some of them padded.
            The number is how many weights may be published between the request of a chunk and its batch: a call waits
            for a part whose chunk would become older. With 1, and new weights before each call, each batch has one
            chunk of each part, as with `prefetch`. Requires ``inference="worker"``. Unset: chunks of all environments
            together.
        on_bad_obs: What to do with an observation or a reward that is NaN or infinite. ``"raise"`` raises an
            ``EnvError`` that names environment, step and key. ``"keep"`` takes it as it is.
        episode_metrics: Names of numbers in the info of an episode's last step, such as ``("is_success",)``, which
            are in ``stats.metrics``.

    Raises:
        ConfigError: No :class:`rayvec.RayVecEnv`, or settings that can't be combined.
    """

    def __init__(
        self,
        env: RayVecEnv,
        policy: Any,
        inference: Literal["worker", "driver", "node"] = "worker",
        prefetch: bool = False,
        *,
        seed: int | None = None,
        by_reference: bool = False,
        max_staleness: int | None = None,
        on_bad_obs: Literal["raise", "keep"] = "raise",
        episode_metrics: Sequence[str] = (),
    ) -> None:
        check_env(env)
        seed = check_seed(seed)
        check_settings(
            inference=inference,
            prefetch=prefetch,
            by_reference=by_reference,
            max_staleness=max_staleness,
            on_bad_obs=on_bad_obs,
        )
        self._env = env
        self._policy = as_policy(policy)
        self._store: WeightStore | None = None
        if inference != "driver":
            self._store = env.publish(self._policy, on_node=inference == "node")
        self._on_node = inference == "node"
        self._seed = seed
        self._prefetch = prefetch
        self._by_reference = by_reference
        self._on_bad_obs = on_bad_obs
        noise_seed = secrets.randbits(63) if seed is None else seed
        self._pipeline = ChunkPipeline(env, noise_seed, by_reference=by_reference)
        self._parts = None if max_staleness is None else PartsPipeline(env, noise_seed, max_staleness)
        self._pipelines = self._parts.pipelines if self._parts else [self._pipeline]
        self._kept_parts: list[PartChunk] = []  # finished chunks of parts for the next batch
        self._kept: list[tuple[Rollout, EpisodeStats]] = []  # finished chunks for the next batch
        self._counts = _Counts()
        self._version = 0
        self._closed = False
        self._tracker = EpisodeTracker(env.num_envs, tuple(episode_metrics))
        self._uses_seen: int | None = None  # `env.num_uses` after the last call; None: the next one resets

    def reset(self, seed: int | None = None) -> None:
        """Begins new episodes everywhere, and forgets unfinished ones.

        The steps of pending chunks are dropped, and counted as surplus of the next batch.

        Args:
            seed: Seed of the environments, base + index. With None, the first reset takes the seed of the collector;
                later, each environment continues with its own generator.
        """
        check_open(self._closed)
        self.drop_pending()
        of_collector, self._seed = self._seed, None
        self._env.reset(seed=of_collector if seed is None else seed)
        self._tracker.clear()
        self._uses_seen = self._env.num_uses

    def set_weights(self, weights: NDArray[np.float32]) -> int:
        """Gives the policy new weights, one flat vector; every chunk that starts from now on is taken with them.

        A pending chunk keeps the weights that it started with, and this method does not wait for it.

        Returns:
            The version of the weights, which every chunk records that was taken with them.
        """
        check_open(self._closed)
        if self._store is None or isinstance(self._policy, CallablePolicy):  # which has no weights, and says so
            self._policy.load_weights(weights)
            self._version += 1
        else:
            self._version = self._store.publish(weights)
        return self._version

    def collect(
        self,
        n_step: int | None = None,
        n_episode: int | None = None,
        *,
        ahead: bool = True,
        cut: Cut | None = None,
    ) -> Batch:
        """Collects steps or episodes; exactly one of the two counts is given.

        Args:
            n_step: How many steps in all. Every environment takes the same number, so what is not divisible
                is rounded up. Unfinished episodes continue in the next call. With `prefetch`, the call before has
                started as many steps as it returned. If that is less, the rest is taken now, in a second chunk;
                if it is more, the batch has more.
            n_episode: How many whole episodes, all begun in this call: environments in mid-episode are reset.
                Each environment is assigned its share beforehand, so that short episodes are not favoured.
                Steps beyond it are marked as not valid and counted as surplus.
            ahead: False starts no further chunk, also with `prefetch`. Use it in the last call: the environments are
                free afterwards, and no step is taken in vain.
            cut: Called about every millisecond (in one process after each step), while a chunk for `n_step` is taken,
                with the number of steps of all environments together. Once it returns True, the environments end the
                chunk after their present step, and the batch has what they have taken. Requires environments with
                ``num_nodes=0``.

        Raises:
            ConfigError: Not exactly one count, or one that is not positive; episodes with `prefetch`; a
                collector that is closed.
            EnvError: An observation or a reward is not finite; the next call begins new episodes.
            Exception: What an environment or a policy raised, also in a pending chunk.
        """
        self._check_counts(n_step, n_episode)
        begin = time.monotonic()
        with self._taking_steps():
            if n_episode is not None:
                collected: list[tuple[Rollout, EpisodeStats]] = []
                self._take_episodes(n_episode, lambda *taken: collected.append(taken))
                return self._batch(collected, begin)
            assert n_step is not None
            num_steps = -(-n_step // self._env.num_envs)
            if self._parts is not None and self._store is not None:
                self._parts.start(self._store, num_steps, ahead=ahead)
                return self._parts_batch(self._parts, self._store, num_steps, begin, ahead=ahead)
            self._collect_steps(num_steps, cut, ahead=ahead and self._prefetch)
            return self._kept_batch(begin)

    def _collect_steps(self, num_steps: int, cut: Cut | None, *, ahead: bool) -> None:
        """Keeps chunks of `num_steps` steps or more, the pending ones first; with `ahead` starts the next chunk."""
        num_pending = len(self._pipeline.pending)  # more than one after an interrupted wait in the call before
        kept_steps = sum(rollout.summary.num_steps for rollout, _ in self._kept)
        left = num_steps - self._pipeline.pending_steps - kept_steps
        starts_first = ahead and num_pending == 1 and left <= 0
        if starts_first:  # the workers need not wait until the pending chunk has been handed over
            self._start(num_steps)
        for _ in range(num_pending):
            self._keep(self._checked(self._pipeline.finish(cut)))
        if left > 0:
            self._keep(self._rollout(left, cut))
        if ahead and not starts_first:
            self._start(num_steps)

    def play(self, n_episode: int, *, max_len: int | None = None) -> EpisodeStats:
        """Plays whole episodes as ``collect(n_episode=...)`` does, and keeps only their returns and lengths.

        Args:
            n_episode: How many.
            max_len: An episode that goes on after so many steps is cut: it counts with the rewards so far, and its
                environment is reset. ``num_cut`` of the result says how many there were. Unset: no limit.

        Raises:
            Exception: As of `collect`.
        """
        self._check_counts(None, n_episode)
        played: list[EpisodeStats] = []
        with self._taking_steps():
            self._take_episodes(n_episode, lambda _, stats: played.append(stats), max_len)
        self._counts = _Counts()
        return join_episodes(played)

    def drain(self) -> Batch | None:
        """Returns the pending chunks as a batch, and starts none; None where none is pending.

        The environments are free after it, for example for an evaluation.
        """
        begin = time.monotonic()
        self.wait_pending()
        if self._parts is not None and self._store is not None and self._kept_parts:
            return self._parts_batch(self._parts, self._store, 0, begin, ahead=False)
        return self._kept_batch(begin) if self._kept else None

    def wait_pending(self) -> None:
        """Waits for the pending chunks, which the next ``collect`` returns; the environments are free after it."""
        if self._parts is not None and self._store is not None:
            if self._parts.pending:
                self._parts.collect(self._store, 0, self._kept_parts, ahead=False, checked=self._checked)
        while self._pipeline.pending:
            self._keep(self._checked(self._pipeline.finish()))

    def drop_pending(self) -> None:
        """Waits for the pending chunks and drops them, and those that an interrupted call has kept.

        The next chunk would not continue them. The episodes that they cut do not count.

        Raises:
            Exception: What an environment or a policy raised in one of them.
        """
        for kept in [*(rollout for rollout, _ in self._kept), *(chunk.rollout for chunk in self._kept_parts)]:
            self._tracker.skip_unfinished()
            self._counts.dropped_steps += kept.summary.valid.size - kept.num_padded
        self._kept.clear()
        self._kept_parts.clear()
        for pipeline in self._pipelines:
            while pipeline.pending:
                self._tracker.skip_unfinished()
                rollout = pipeline.finish()
                self._counts.dropped_steps += rollout.summary.valid.size - rollout.num_padded
                self._counts.restarts += len(rollout.summary.restarts)

    def _keep(self, rollout: Rollout) -> None:
        """Keeps a chunk until it is handed over, by a later call if this one is interrupted."""
        self._kept.append((rollout, self._tracker.add(rollout.summary)[0]))

    def _kept_batch(self, begin: float) -> Batch:
        kept, self._kept = self._kept, []
        return self._batch(kept, begin)

    def _parts_batch(
        self, parts: PartsPipeline, store: WeightStore, num_steps: int, begin: float, *, ahead: bool
    ) -> Batch:
        """Waits for the chunks of a batch, and joins them."""
        parts.collect(store, num_steps, self._kept_parts, ahead=ahead, checked=self._checked)
        rollout, stats, versions = join_parts(self._kept_parts, self._tracker, time.monotonic() - begin)
        self._kept_parts = []
        batch = self._batch([(rollout, stats)], begin)
        counts = tuple(np.bincount(self._version - versions).tolist())
        spread = int(versions.min()), int(versions.max())
        return replace(batch, stats=replace(batch.stats, weights_versions=spread, staleness_counts=counts))

    @contextmanager
    def _taking_steps(self) -> Iterator[None]:
        """Continues from where the environments are; resets them if no episode has begun. The block takes the steps."""
        check_open(self._closed)
        if self._uses_seen is None:
            self.reset()
        elif self._env.num_uses != self._uses_seen:
            if self._kept or self._kept_parts or any(pipeline.pending for pipeline in self._pipelines):
                self.reset()  # else the next chunk would not continue those that are kept or pending
            self._env._assert_idle("collect")  # else the pending chunk of another collector would be taken
            if self._env.num_uses == self._env.fresh_at:
                self._tracker.clear()
            else:
                self._tracker.skip_unfinished()
        try:
            yield
        finally:
            if self._uses_seen is not None:
                self._uses_seen = self._env.num_uses

    def _check_counts(self, n_step: Any, n_episode: Any) -> None:
        if (n_step is None) == (n_episode is None):
            raise ConfigError(
                f"collect was called with n_step={n_step} and n_episode={n_episode}. Pass one of them, for "
                "example n_step=4096 or n_episode=20."
            )
        check_count("n_step" if n_episode is None else "n_episode", n_step if n_episode is None else n_episode)
        if n_episode is not None and (self._prefetch or self._by_reference or self._parts):
            raise ConfigError(
                f"n_episode={n_episode} was passed to a collector with prefetch, max_staleness or by_reference. "
                "Pass n_step, or call drain() and use another Collector on these environments for episodes."
            )

    def _rollout(self, num_steps: int, cut: Cut | None = None) -> Rollout:
        """Takes a chunk from start to end."""
        if self._store is not None:
            self._start(num_steps)
            return self._checked(self._pipeline.finish(cut))
        pipeline = self._pipeline
        rollout = self._env.rollout_driver(
            self._policy, num_steps, pipeline.first_step, pipeline.noise_seed, self._version, cut
        )
        pipeline.first_step += num_steps
        return self._checked(rollout)

    def _start(self, num_steps: int) -> None:
        assert self._store is not None
        self._pipeline.start(self._store, num_steps)

    def _checked(self, rollout: Rollout) -> Rollout:
        """Applies `on_bad_obs` to a finished chunk; returns it."""
        self._counts.restarts += len(rollout.summary.restarts)
        bad = rollout.summary.bad_obs
        if bad is not None and self._on_bad_obs == "raise":
            self._uses_seen = None  # the unfinished episodes lose a part
            self.drop_pending()
            raise bad_obs_error(bad)
        return rollout

    def _take_episodes(
        self, n_episode: int, take: Callable[[Rollout, EpisodeStats], None], max_len: int | None = None
    ) -> None:
        """Collects chunks until every environment has ended its quota of episodes; calls `take` with each.

        A generator would turn a ``StopIteration`` of an environment into a ``RuntimeError``.
        """
        if self._tracker.unfinished.any() or self._pipeline.pending or self._kept:
            self.reset()  # the unfinished episodes are the long ones: counting them would bias the mean
        quotas = EpisodeQuotas(n_episode, self._env.num_envs)
        while num_steps := quotas.next_steps():
            if max_len is not None:
                num_steps = min(num_steps, max_len - int(self._tracker.lens[quotas.unfinished].max()))
            rollout = self._rollout(num_steps)
            summary = rollout.summary
            stats, places = self._tracker.add(summary)
            valid = quotas.take(summary.valid, counted_ends(summary))
            counts = valid[tuple(places.T)]
            if max_len is not None:
                is_long = quotas.unfinished & (self._tracker.lens >= max_len)
                stats = self._cut(is_long, quotas, stats.where(counts), summary.env_ids)
                counts = np.ones(len(stats.lens), bool)
            assert rollout.chunk is not None
            rollout = replace(rollout, summary=replace(summary, valid=valid), chunk=replace(rollout.chunk, valid=valid))
            take(rollout, stats.where(counts))

    def _cut(
        self, is_long: NDArray[np.bool_], quotas: EpisodeQuotas, stats: EpisodeStats, env_ids: NDArray[np.int64]
    ) -> EpisodeStats:
        """Ends the episodes of some environments, ``bool [N]``, and begins others; returns them after `stats`."""
        if not is_long.any():
            return stats
        quotas.cut(is_long)
        self._env.reset(options={"reset_mask": is_long})
        return join_episodes([stats, self._tracker.cut(np.flatnonzero(is_long), env_ids[is_long])])

    def _batch(self, collected: list[tuple[Rollout, EpisodeStats]], begin: float) -> Batch:
        rollouts = [rollout for rollout, _ in collected]
        taken = sum(rollout.summary.valid.size - rollout.num_padded for rollout in rollouts)
        valid = sum(int(rollout.summary.valid.sum()) for rollout in rollouts)
        versions = [rollout.summary.weights_version for rollout in rollouts]
        episodes = join_episodes([stats for _, stats in collected])
        counts, self._counts = self._counts, _Counts()
        elapsed_s = time.monotonic() - begin
        stats = CollectStats(
            returns=episodes.returns,
            lens=episodes.lens,
            n_collected_steps=valid,
            n_collected_episodes=len(episodes.returns),
            n_surplus_steps=taken - valid + counts.dropped_steps,
            collect_time_s=elapsed_s,
            steps_per_s=taken / elapsed_s,
            time_split_s=time_split_s(rollouts, elapsed_s),
            weights_versions=(min(versions), max(versions)),
            staleness=self._version - min(versions),
            n_restarts=counts.restarts,
            n_replaced=self._env.take_replaced(),
            metrics=episodes.metrics,
        )
        chunks = tuple(rollout.chunk for rollout in rollouts if rollout.chunk is not None)
        return Batch(chunks, stats, tuple(rollout.refs for rollout in rollouts) if self._by_reference else ())

    def close(self) -> None:
        """Ends collecting and lets the workers forget the policy; the environments stay open. May be called again.

        It waits for pending chunks and drops them. An error in one of them is logged.
        """
        if self._store is not None and not self._env.closed:
            try:
                self.drop_pending()
            except Exception:  # which has closed the environments
                logger.exception("a pending chunk failed")
            else:
                self._store.drop()
        self._store = None
        self._closed = True
        for pipeline in self._pipelines:
            pipeline.forget()

    def state_dict(self) -> dict[str, int]:
        """Returns what a later run needs to resume: seeds and counters, without unfinished episodes.

        A pending chunk is not in it either: the run that resumes takes it again, from new episodes.
        """
        first_step = max(pipeline.first_step for pipeline in self._pipelines)
        return {"noise_seed": self._pipelines[0].noise_seed, "first_step": first_step, "version": self._version}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resumes where :meth:`state_dict` was taken, with new episodes; call :meth:`reset` after it.

        The policy is what it was when it was passed: it must have the weights of that time, or be given some.
        Pending chunks are waited for and dropped.

        Raises:
            ConfigError: It is not what :meth:`state_dict` returns.
        """
        state = check_state(state)
        self.drop_pending()
        for pipeline in self._pipelines:
            pipeline.noise_seed, pipeline.first_step = state["noise_seed"], state["first_step"]
        self._version = state["version"]
        if self._store is not None:
            self._store.drop()
            self._store = self._env.publish(self._policy, self._version, on_node=self._on_node)
