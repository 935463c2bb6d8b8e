"""From chunks to episodes: the Collector knows where an episode begins and ends."""

from __future__ import annotations

import logging
import operator
import secrets
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rayvec.collect.quotas import EPISODE_CHUNK_STEPS, episode_quotas, within_quotas
from rayvec.collect.recording import Recording
from rayvec.collect.scheduler import ChunkScheduler, ScheduledChunk, join_lanes
from rayvec.data import Batch, CollectStats, EpisodeStats
from rayvec.data.batch import join_episodes
from rayvec.data.chunk import StopEarly
from rayvec.data.episodes import EpisodeTracker
from rayvec.data.finite_checks import find_bad_obs
from rayvec.data.plain_bytes import from_bytes, to_bytes
from rayvec.errors import ConfigError, EnvError, check_choice, check_count, check_flag, require
from rayvec.fleet.deferred_signals import uninterrupted
from rayvec.rollout.loop import CallablePolicy, Rollout, as_policy
from rayvec.vector.ray_vec_env import RayVecEnv

__all__ = ["Collector", "EpisodeTracker"]

logger = logging.getLogger(__name__)

_COUNTERS = ("noise_seed", "first_step", "version")


class Collector:
    """Lets a policy act in environments, and returns batches of steps with the statistics of their episodes.

    Episodes continue from call to call. If something else has reset or stepped the environments in between, such as
    another collector, the next call begins new episodes everywhere.

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
        record: Directory of a Minari dataset that gets the episodes of all batches, as by :func:`rayvec.record`.
            :meth:`close` completes it.

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
        max_staleness: int | None = None,
        on_bad_obs: Literal["raise", "keep"] = "raise",
        episode_metrics: Sequence[str] = (),
        record: str | Path | None = None,
    ) -> None:
        require(
            isinstance(env, RayVecEnv),
            f"{type(env).__module__}.{type(env).__qualname__} is not a rayvec.RayVecEnv, which rayvec.Collector "
            "requires. In place of a wrapper around all environments, pass RayVecEnv(..., wrappers=[...]). For "
            "other environments, use the collector of their library.",
        )
        self._seed = None if seed is None else check_count("seed", seed, 0)
        _check_settings(inference, on_bad_obs, max_staleness, prefetch)
        self._env, self._policy = env, as_policy(policy)
        self._recording = None if record is None else Recording(env, record)
        self._on_bad_obs = on_bad_obs
        self._max_staleness = max_staleness
        self._goes_ahead = prefetch or max_staleness is not None
        self._store = env.publish(self._policy, inference=inference)
        noise_seed = secrets.randbits(63) if self._seed is None else self._seed
        self._chunks = ChunkScheduler(env, noise_seed, max_staleness=max_staleness)
        self._counts: Counter[str] = Counter()  # dropped steps and restarts, for the statistics of the next batch
        self._closed = False
        self._tracker = EpisodeTracker(env.num_envs, tuple(episode_metrics))
        self._uses_seen: int | None = None  # `env.num_uses` after the last call; None: the next one resets

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Begins new episodes everywhere, and forgets unfinished ones.

        The steps of pending chunks are dropped, and counted as surplus of the next batch.

        Args:
            seed: Seed of the environments, base + index. With None, the first reset takes the seed of the collector;
                later, each environment continues with its own generator.
            options: Passed on to the ``reset`` of each environment.
        """
        self._check_open()
        self.drop_pending()
        of_collector, self._seed = self._seed, None
        self._env.reset(seed=of_collector if seed is None else seed, options=options)
        self._tracker.clear()
        if self._recording is not None:
            self._recording.begin_episodes()
        self._uses_seen = self._env.num_uses

    def set_weights(self, weights: NDArray[np.float32]) -> int:
        """Gives the policy new weights, one flat vector; every chunk that starts from now on is taken with them.

        A pending chunk keeps the weights that it started with, and this method does not wait for it.

        Returns:
            The version of the weights, which every chunk records that was taken with them.
        """
        self._check_open()
        if isinstance(self._policy, CallablePolicy):  # which has no weights, and says so
            self._policy.load_weights(weights)
        return self._store.publish(weights)

    def collect(
        self,
        n_step: int | None = None,
        n_episode: int | None = None,
        *,
        ahead: bool = True,
        cut: StopEarly | None = None,
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
        require(
            (n_step is None) != (n_episode is None),
            f"collect was called with n_step={n_step} and n_episode={n_episode}. Pass one of them, for example "
            "n_step=4096 or n_episode=20.",
        )
        self._check_episodes(n_episode) if n_step is None else check_count("n_step", n_step)
        begin = time.monotonic()
        with self._taking_steps():
            if n_step is None:
                rollouts, episodes = zip(*self._play(n_episode or 0), strict=True)
                if self._recording is None:  # which lacks the surplus steps: its next episodes begin with a reset
                    self._uses_seen = self._env.num_uses  # all their steps are in the batch
                return self._batch(rollouts, join_episodes(episodes), begin)
            num_steps = -(-n_step // self._env.num_envs)
            self._wait_for(num_steps, num_steps if ahead and self._goes_ahead else 0, cut)
            with uninterrupted():  # Ctrl-C loses no half of a batch
                self._uses_seen = self._env.num_uses
                return self._joined(self._chunks.take(), begin)

    def play(self, n_episode: int, *, max_len: int | None = None) -> EpisodeStats:
        """Plays whole episodes as ``collect(n_episode=...)`` does, and keeps only their returns and lengths.

        Args:
            n_episode: How many.
            max_len: An episode that goes on after so many steps is cut: it counts with the rewards so far, and its
                environment is reset. ``num_cut`` of the result says how many there were. Unset: no limit.

        Raises:
            Exception: As of `collect`.
        """
        self._check_episodes(n_episode)
        with self._taking_steps():
            episodes = join_episodes([each for _, each in self._play(n_episode, max_len)])
        self._counts.clear()
        return episodes

    def wait_pending(self) -> None:
        """Waits for the pending chunks, which the next ``collect`` returns; the environments are free after it."""
        self._chunks.wait()

    def drop_pending(self) -> None:
        """Waits for the pending chunks and drops them, and those that an interrupted call has kept.

        The episodes that they cut do not count; the next call begins new ones.

        Raises:
            Exception: What an environment or a policy raised in one of them.
        """
        for dropped in self._chunks.drop():
            self._uses_seen = None
            rollout = dropped.rollout
            self._counts.update(steps=rollout.num_taken, restarts=len(rollout.chunk.restarts))

    @contextmanager
    def _taking_steps(self) -> Iterator[None]:
        """Continues the episodes that this collector has begun, or begins new ones. The block takes the steps."""
        self._check_open()
        if self._uses_seen != self._env.num_uses:
            self.reset()
        try:
            yield
        finally:
            if self._uses_seen is not None:
                self._uses_seen = self._env.num_uses

    def _check_episodes(self, n_episode: Any) -> None:
        check_count("n_episode", n_episode)
        require(
            not self._goes_ahead,
            f"n_episode={n_episode} was passed to a collector with prefetch or max_staleness. Pass n_step. "
            "For episodes, call collect(n_step, ahead=False), and use another Collector on these environments.",
        )

    def _check_open(self) -> None:
        require(  # the workers do not have the policy and its weights
            not self._closed,
            "collect was called after close(). Make another Collector of the same environments and policy.",
        )

    def _wait_for(self, num_steps: int, num_ahead: int = 0, cut: StopEarly | None = None) -> None:
        """Waits for the chunks of a batch, and applies `on_bad_obs` to them."""
        chunks = self._chunks
        chunks.collect(self._store, num_steps, num_ahead=num_ahead, stop_early=cut)
        for chunk in (each.rollout.chunk for each in chunks.finished):
            bad = find_bad_obs(chunk) if self._on_bad_obs == "raise" else None
            if bad is not None:
                self._uses_seen = None  # the unfinished episodes lose a part
                chunks.take()
                self.drop_pending()
                raise EnvError(
                    f"{bad}. Observations and rewards must be finite. Correct the environment, or let it raise with "
                    "on_env_error='restart' to leave such episodes out."
                )

    def _play(self, n_episode: int, max_len: int | None = None) -> Iterator[tuple[Rollout, EpisodeStats]]:
        """Takes chunks until every environment has ended its quota of episodes; `valid` says which steps belong.

        Yields:
            Each chunk, and the episodes of the quotas that ended in it.
        """
        if self._tracker.lens.any() or not self._chunks.is_idle:
            self.reset()  # the unfinished episodes are the long ones: counting them would bias the mean
        self._uses_seen = None  # an interrupt leaves steps that are in no batch
        left = episode_quotas(n_episode, self._env.num_envs)
        while left.any():
            num_steps = EPISODE_CHUNK_STEPS
            if max_len is not None:
                num_steps = min(num_steps, max_len - int(self._tracker.lens[left > 0].max()))
            self._wait_for(num_steps)
            [rollout] = [chunk.rollout for chunk in self._chunks.take()]
            valid = within_quotas(rollout.chunk, left)
            episodes = self._tracker.add(rollout.chunk, counted=valid)
            if max_len is not None:
                is_long = (left > 0) & (self._tracker.lens >= max_len)
                left -= is_long
                episodes = join_episodes([episodes, self._cut(is_long, rollout.chunk.env_ids)])
            yield rollout._replace(chunk=replace(rollout.chunk, valid=valid)), episodes

    def _cut(self, is_long: NDArray[np.bool_], env_ids: NDArray[np.int64]) -> EpisodeStats:
        """Ends the episodes of some environments, ``bool [N]``, and begins others; returns them."""
        if is_long.any():
            self._env.reset(options={"reset_mask": is_long})
        return self._tracker.cut(np.flatnonzero(is_long), env_ids[is_long])

    def _joined(self, finished: Sequence[ScheduledChunk], begin: float) -> Batch:
        """Makes a batch of steps."""
        rollouts = [chunk.rollout for chunk in finished]
        if self._max_staleness is None:
            return self._batch(rollouts, join_episodes([self._tracker.add(each.chunk) for each in rollouts]), begin)
        chunk, episodes = join_lanes(finished, self._tracker)
        batch = self._batch(rollouts, episodes, begin)
        ages = [self._store.version - each.rollout.chunk.weights_version for each in finished for _ in each.envs]
        return Batch((chunk,), replace(batch.stats, staleness_counts=tuple(np.bincount(ages).tolist())))

    def _batch(self, rollouts: Sequence[Rollout], episodes: EpisodeStats, begin: float) -> Batch:
        taken = sum(rollout.num_taken for rollout in rollouts)
        valid = sum(int(rollout.chunk.valid.sum()) for rollout in rollouts)
        versions = [rollout.chunk.weights_version for rollout in rollouts]
        counts, self._counts = self._counts, Counter()
        elapsed_s = time.monotonic() - begin
        stats = CollectStats(
            returns=episodes.returns,
            lens=episodes.lens,
            n_collected_steps=valid,
            n_collected_episodes=len(episodes.returns),
            n_surplus_steps=taken - valid + counts["steps"],
            collect_time_s=elapsed_s,
            steps_per_s=taken / elapsed_s,
            time_split_s=_time_split_s(rollouts, elapsed_s, side_by_side=self._max_staleness is not None),
            weights_versions=(min(versions), max(versions)),
            staleness=self._store.version - min(versions),
            n_restarts=counts["restarts"] + sum(len(rollout.chunk.restarts) for rollout in rollouts),
            n_replaced=self._env.take_replaced(),
            metrics=episodes.metrics,
        )
        chunks = tuple(rollout.chunk for rollout in rollouts)
        if self._recording is not None:
            for chunk in chunks:
                self._recording.add(chunk)
        return Batch(chunks, stats)

    def close(self) -> None:
        """Ends collecting and lets the workers forget the policy; the environments stay open. May be called again.

        It waits for pending chunks and drops them. An error in one of them is logged. If Ctrl-C interrupts it, call
        it again to complete it.
        """
        if self._closed:
            return
        if not self._env.closed:
            try:
                self.drop_pending()
            except Exception:  # which has closed the environments
                logger.exception("a pending chunk failed")
            else:
                self._store.drop()
        if self._recording is not None:
            self._recording.close()
        self._closed = True  # last: Ctrl-C while it waits leaves the rest to the next call

    def state_dict(self) -> dict[str, Any]:
        """Returns what a later run needs to resume: seeds, counters and, under ``"envs"``, unfinished episodes.

        These are None where environments do not offer their states (:meth:`rayvec.RayVecEnv.get_states`), the policy
        has a memory, or chunks are pending: the run that resumes takes these again, from new episodes. A warning names
        what can't be saved.
        """
        chunks = self._chunks
        counters = {"noise_seed": chunks.noise_seed, "first_step": chunks.first_step, "version": self._store.version}
        return {**counters, "envs": self._episodes()}

    def _episodes(self) -> list[tuple[Any, ...]] | None:
        """Returns the state of each environment, and the sums of its episode."""
        has_memory = hasattr(self._policy, "begin_episodes")  # which is not saved
        if has_memory or not self._chunks.is_idle or self._uses_seen != self._env.num_uses:
            return None
        try:
            states = self._env.get_states()
            packed = None if states is None else [to_bytes(state) for state in states]
        except Exception as error:
            if self._env.closed:
                raise
            warnings.warn(f"A run that resumes begins new episodes. {type(error).__name__}: {error}", stacklevel=2)
            return None
        return None if packed is None else list(zip(packed, *self._tracker.state(), strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes where :meth:`state_dict` was taken. Call :meth:`reset` after it if that has no unfinished episodes.

        The policy is what it was when it was passed: it must have the weights of that time, or be given some.
        Pending chunks are waited for and dropped.

        Raises:
            ConfigError: It is not what :meth:`state_dict` returns.
        """
        try:
            noise_seed, first_step, version = (operator.index(state[name]) for name in _COUNTERS)
        except (KeyError, TypeError):
            raise ConfigError(f"The state is {repr(state)[:200]}. Pass what collector.state_dict() returned.") from None
        self.drop_pending()
        self._chunks = ChunkScheduler(self._env, noise_seed, max_staleness=self._max_staleness, first_step=first_step)
        self._store.drop()
        self._store = self._env.publish(self._policy, version, inference=self._store.inference)
        if self._recording is not None:
            self._uses_seen = None  # the recording lacks the first steps of these episodes: new ones begin
        elif state.get("envs"):
            packed, *sums = zip(*state["envs"], strict=True)
            self._env.set_states([from_bytes(each) for each in packed])
            self._tracker.load(sums)
            self._uses_seen = self._env.num_uses


def _check_settings(inference: str, on_bad_obs: str, max_staleness: int | None, prefetch: Any) -> None:
    """Raises ``ConfigError`` if settings of a collector are unknown, or can't be combined."""
    check_choice("inference", inference, ("worker", "driver", "node"))
    check_choice("on_bad_obs", on_bad_obs, ("raise", "keep"))
    check_flag("prefetch", prefetch)
    if max_staleness is not None:
        check_count("max_staleness", max_staleness)
    for name, value in {"prefetch": prefetch, "max_staleness": max_staleness}.items():
        require(
            not value or inference == "worker",
            f"{name}={value!r} was passed with inference={inference!r}. It requires 'worker'.",
        )


def _time_split_s(rollouts: Sequence[Rollout], elapsed_s: float, *, side_by_side: bool) -> dict[str, float]:
    """Returns what the wall time of a call was spent on; see :class:`CollectStats`.

    Args:
        rollouts: What the call waited for.
        elapsed_s: The wall time.
        side_by_side: Whether they were taken at the same time, and not one after another.
    """
    split = dict.fromkeys(("environment", "inference", "waiting"), 0.0)
    for together in [rollouts] if side_by_side else [[rollout] for rollout in rollouts]:
        whole_s, environment_s, inference_s, _ = np.array([each for rollout in together for each in rollout.times]).T
        waited_s = sum(rollout.waited_s for rollout in together)
        share = min(1.0, waited_s / whole_s.max())  # the rest was done before the call waited for it
        split["environment"] += share * float(environment_s.mean())
        split["inference"] += share * float(inference_s.mean())
        split["waiting"] += share * float(whole_s.max() - whole_s.mean())
    return {**split, "transport": elapsed_s - sum(split.values())}
