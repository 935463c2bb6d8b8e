"""From chunks to episodes: the Collector knows where an episode begins and ends."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Batch, CollectStats, EpisodeStats, Rollout, tree_leaves
from rayvec.data.chunk_ops import summarize
from rayvec.data.episodes import EpisodeTracker
from rayvec.data.finite import bad_obs_error, drop_bad_episodes
from rayvec.errors import ConfigError, check_choice, check_count
from rayvec.pools.weights import WeightStore
from rayvec.rollout.loop import as_policy
from rayvec.vector.ray_vec_env import RayVecEnv

__all__ = ["Collector", "CollectorProtocol", "EpisodeTracker"]

logger = logging.getLogger(__name__)
_CHUNK_STEPS = 64
"""Steps of a chunk where episodes are counted, so that little is stepped beyond the last."""
_MOST_DROPPED = 100
"""Episodes dropped for each that is asked for, before an environment is taken to have no good ones."""


class CollectorProtocol(Protocol):
    """What whoever trains may ask of a collector, this one or :class:`rayvec.tianshou.Collector`."""

    def collect(self, n_step: int | None = None, n_episode: int | None = None) -> Any:
        """Collects that many steps or episodes; what it returns, or its ``stats``, counts ``n_collected_steps``."""
        ...

    def reset(self) -> Any:
        """Begins new episodes everywhere."""
        ...


class Collector:
    """Lets a policy act in environments, and returns batches of steps with what is known of their episodes.

    Args:
        env: What to step.
        policy: A callable from observations to actions, or a :class:`rayvec.Policy`.
        inference: Where it acts: ``"worker"``, over each worker's slice, or ``"driver"``, in this process.
        prefetch: Whether the workers take the next chunk while the caller consumes this one: ``collect(n_step)``
            returns the steps that the call before began, and begins the next ones before it returns. The environments
            are busy in between: stepping or resetting them raises ``AlreadyPendingCallError``. What is published
            between two calls acts one call later. Needs ``inference="worker"``.
        seed: Of the environments (base + index) and of the noise. Without it neither can be repeated.
        by_reference: Whether chunks stay in Ray's object store, on the nodes where they were taken: the batch has
            `chunk_refs` in the place of `chunks`, and its statistics are as ever. Needs ``inference="worker"``.
        on_bad_obs: What becomes of an observation that is NaN or infinite: ``"raise"`` raises an ``EnvError`` that
            names environment, step and key; ``"drop"`` leaves its episode out (`valid` is cleared, it is not counted,
            and the environment begins another); ``"keep"`` takes it as it is.

    Raises:
        ConfigError: Settings that can't work together.
    """

    def __init__(
        self,
        env: RayVecEnv,
        policy: Any,
        inference: Literal["worker", "driver"] = "worker",
        prefetch: bool = False,
        *,
        seed: int | None = None,
        by_reference: bool = False,
        on_bad_obs: Literal["raise", "drop", "keep"] = "raise",
    ) -> None:
        check_choice("inference", inference, ("worker", "driver"))
        for name, value in (("prefetch", prefetch), ("by_reference", by_reference)):
            if value and inference == "driver":
                raise ConfigError(
                    "What the driver itself does, it neither does ahead nor refers to.",
                    expected="inference='worker'",
                    got=f"{name}=True with inference='driver'",
                    remedy=f"Let the policy act in the workers, or leave {name} out.",
                )
        check_choice("on_bad_obs", on_bad_obs, ("raise", "drop", "keep"))
        if by_reference and on_bad_obs == "drop":
            raise ConfigError(
                "What stays in the object store can't be marked any more.",
                expected="on_bad_obs='raise' or 'keep'",
                got="on_bad_obs='drop' with by_reference=True",
                remedy="Leave by_reference out.",
            )
        self._env = env
        self._policy = as_policy(policy)
        self._store: WeightStore | None = None
        if inference == "worker":
            self._store = env.publish(self._policy)
        self._seed = seed
        self._noise_seed = secrets.randbits(63) if seed is None else seed
        self._prefetch = prefetch
        self._by_reference = by_reference
        self._on_bad_obs = on_bad_obs
        self._in_flight: deque[int] = deque()  # numbers of steps
        self._kept: list[tuple[Rollout, EpisodeStats]] = []  # have landed, for the next batch
        self._first_step = 0
        self._counts: Counter[str] = Counter()
        self._version = 0
        self._tracker = EpisodeTracker(env.num_envs)
        self._started = False

    def reset(self, seed: int | None = None) -> None:
        """Begins new episodes everywhere; what was under way is forgotten.

        The steps of a chunk in flight are dropped, and counted among the surplus of the next batch.

        Args:
            seed: Of the environments, base + index; None lets each go on with its own generator.
        """
        self._drop_flight()
        for rollout, _ in self._kept:
            self._counts["dropped steps"] += rollout.summary.valid.size
        self._kept.clear()
        self._env.reset(seed=seed)
        self._tracker.clear()
        self._started = True

    def set_weights(self, weights: NDArray[np.float32]) -> int:
        """Gives the policy new weights, one flat vector; every chunk that begins from now on is taken with them.

        A chunk in flight goes on with those that it began with; nobody waits for it.

        Returns:
            Their version, which stands in every chunk that they acted in.
        """
        if self._store is None:
            self._policy.load_weights(weights)
            self._version += 1
        else:
            self._version = self._store.publish(weights)
        return self._version

    def collect(self, n_step: int | None = None, n_episode: int | None = None, *, ahead: bool = True) -> Batch:
        """Collects steps or episodes; exactly one of the two counts is given.

        Args:
            n_step: How many steps in all. Every environment takes the same number, so what is not divisible
                is rounded up. Episodes under way go on in the next call. With `prefetch`, the call before has begun
                as many as it was asked for: if that is less, the rest is taken now, in a second chunk; if it is
                more, the batch has more.
            n_episode: How many whole episodes, begun in this call: environments in the midst of one are reset.
                Each environment is given its share beforehand, so that short episodes are not favoured;
                steps beyond it are marked as not valid and counted as surplus.
            ahead: False begins no further chunk, also with `prefetch`: for the last call, after which the environments
                are free and no step is taken in vain.

        Raises:
            ConfigError: Not exactly one count, or one that is not positive; episodes with `prefetch`.
            EnvError: An observation is not finite; the next call begins new episodes.
            Exception: What an environment or a policy raised, also in a chunk in flight.
        """
        self._check_counts(n_step, n_episode)
        begin = time.monotonic()
        if not self._started:
            seed, self._seed = self._seed, None
            self.reset(seed)
        if n_episode is not None:
            if self._tracker.under_way.any() or self._in_flight or self._kept:
                self.reset()  # half an episode is none, and those under way are the long ones
            return self._episodes(n_episode, begin)
        assert n_step is not None
        num_steps = -(-n_step // self._env.num_envs)
        begin_next = self._prefetch and ahead
        num_begun = len(self._in_flight)  # more than one where the wait in the call before was interrupted
        left = num_steps - sum(self._in_flight) - sum(rollout.summary.num_steps for rollout, _ in self._kept)
        if begin_next and num_begun == 1 and left <= 0 and self._on_bad_obs != "drop":  # which resets in between
            self._take_off(num_steps)  # the workers need not wait until this chunk has been handed over
            begin_next = False
        for _ in range(num_begun):
            self._keep(self._land())
        if left > 0:
            self._keep(self._rollout(left))
        if begin_next:
            self._take_off(num_steps)
        return self._kept_batch(begin)

    def drain(self) -> Batch | None:
        """Returns what is in flight as a batch, and begins nothing; None where nothing is in flight.

        The environments are free after it, for an evaluation, say.
        """
        begin = time.monotonic()
        while self._in_flight:
            self._keep(self._land())
        return self._kept_batch(begin) if self._kept else None

    def _keep(self, rollout: Rollout) -> None:
        """Keeps what was taken until it is handed over, by a later call if this one is interrupted."""
        self._kept.append((rollout, self._tracker.add(rollout.summary)[0]))

    def _kept_batch(self, begin: float) -> Batch:
        kept, self._kept = self._kept, []
        return self._batch([rollout for rollout, _ in kept], [episodes for _, episodes in kept], begin)

    def _check_counts(self, n_step: Any, n_episode: Any) -> None:
        if (n_step is None) == (n_episode is None):
            raise ConfigError(
                "collect takes one count.",
                expected="n_step or n_episode",
                got=f"n_step={n_step}, n_episode={n_episode}",
                remedy="Pass n_step=4096, or n_episode=20.",
            )
        check_count("n_step" if n_episode is None else "n_episode", n_step if n_episode is None else n_episode)
        if n_episode is not None and (self._prefetch or self._by_reference):
            raise ConfigError(
                "Whole episodes begin within the call that counts them, and what is beyond them is marked.",
                expected="n_step",
                got=f"n_episode={n_episode} of a collector with prefetch or by_reference",
                remedy="Call drain() and use another Collector on the same environments for episodes.",
            )

    def _rollout(self, num_steps: int) -> Rollout:
        """Takes steps."""
        if self._store is not None:
            self._take_off(num_steps)
            return self._land()
        rollout = self._env.rollout_driver(self._policy, num_steps, self._first_step, self._noise_seed, self._version)
        return self._landed(rollout)

    def _take_off(self, num_steps: int) -> None:
        """Lets the workers begin a chunk."""
        assert self._store is not None
        first_step = self._first_step + sum(self._in_flight)
        self._env.rollout_async(self._store, num_steps, first_step, self._noise_seed, by_reference=self._by_reference)
        self._in_flight.append(num_steps)

    def _land(self) -> Rollout:
        """Waits for the oldest chunk in flight."""
        rollout = self._env.rollout_wait()
        self._in_flight.popleft()
        return self._landed(rollout)

    def _landed(self, rollout: Rollout) -> Rollout:
        """Looks at what has been taken; returns what of it is to be used."""
        self._first_step += rollout.summary.num_steps
        self._counts["restarts"] += len(rollout.summary.restarts)
        bad = rollout.summary.bad_obs
        if bad is None or self._on_bad_obs == "keep":
            return rollout
        if self._on_bad_obs == "raise":
            self._started = False  # the episodes that go on have lost a part
            self._drop_flight()
            raise bad_obs_error(bad)
        assert rollout.chunk is not None
        chunk, goes_on, count = drop_bad_episodes(rollout.chunk, bad, self._tracker.under_way)
        self._counts["dropped episodes"] += count
        logger.warning("%d episodes are left out: %s", count, bad.first)
        if goes_on.any():
            obs, _ = self._env.reset(options={"reset_mask": goes_on})
            for kept, new in zip(tree_leaves(chunk.last_obs), tree_leaves(obs), strict=True):
                kept[goes_on] = new[goes_on]
        return replace(rollout, chunk=chunk, summary=replace(summarize(chunk), bad_obs=bad))

    def _drop_flight(self) -> None:
        while self._in_flight:
            rollout = self._env.rollout_wait()
            self._in_flight.popleft()
            self._first_step += rollout.summary.num_steps
            self._counts["dropped steps"] += rollout.summary.valid.size
            self._counts["restarts"] += len(rollout.summary.restarts)

    def _episodes(self, n_episode: int, begin: float) -> Batch:
        """Collects chunks until every environment has ended its quota of episodes."""
        n = self._env.num_envs
        left = n_episode // n + (np.arange(n) < n_episode % n).astype(np.int64)
        rollouts, episodes = [], []
        while left.any():
            rollout = self._rollout(_CHUNK_STEPS)
            if self._counts["dropped episodes"] > _MOST_DROPPED * n_episode and rollout.summary.bad_obs is not None:
                raise bad_obs_error(rollout.summary.bad_obs)
            stats, places = self._tracker.add(rollout.summary)
            counts = np.zeros(len(places), bool)
            valid = rollout.summary.valid & (left > 0)
            for i, (t, column) in enumerate(places.tolist()):
                if left[column] > 0:
                    counts[i] = True
                    left[column] -= 1
                    if left[column] == 0:
                        valid[t + 1 :, column] = False
            episodes.append(EpisodeStats(stats.env_ids[counts], stats.returns[counts], stats.lens[counts]))
            rollouts.append(_with_valid(rollout, valid))
        return self._batch(rollouts, episodes, begin)

    def _batch(self, rollouts: Sequence[Rollout], episodes: Sequence[EpisodeStats], begin: float) -> Batch:
        summaries = [rollout.summary for rollout in rollouts]
        taken = sum(summary.valid.size for summary in summaries)
        collected = sum(int(summary.valid.sum()) for summary in summaries)
        versions = [summary.weights_version for summary in summaries]
        returns = np.concatenate([stats.returns for stats in episodes])
        counts, self._counts = self._counts, Counter()
        elapsed_s = time.monotonic() - begin
        stats = CollectStats(
            returns=returns,
            lens=np.concatenate([stats.lens for stats in episodes]),
            n_collected_steps=collected,
            n_collected_episodes=len(returns),
            n_surplus_steps=taken - collected + counts["dropped steps"],
            collect_time_s=elapsed_s,
            steps_per_s=taken / elapsed_s,
            time_split_s=_time_split_s(rollouts, elapsed_s),
            weights_versions=(min(versions), max(versions)),
            staleness=self._version - min(versions),
            n_restarts=counts["restarts"],
            n_dropped_episodes=counts["dropped episodes"],
        )
        chunks = tuple(rollout.chunk for rollout in rollouts if rollout.chunk is not None)
        return Batch(chunks, stats, tuple(rollout.refs for rollout in rollouts) if self._by_reference else ())

    def close(self) -> None:
        """Lets the workers forget the policy; the environments stay open. May be called again.

        The steps of a chunk in flight are waited for and dropped; what went wrong in it is logged.
        """
        if self._store is not None and not self._env.closed:
            try:
                self._drop_flight()
            except Exception:  # which has closed the environments
                logger.exception("the chunk in flight came to nothing")
            else:
                self._store.drop()
        self._store = None
        self._in_flight.clear()

    def state_dict(self) -> dict[str, int]:
        """Returns what a later run needs to go on: seeds and counters; episodes under way are not in it.

        A chunk in flight is not in it either: whoever goes on takes it again, from new episodes.
        """
        return {"noise_seed": self._noise_seed, "first_step": self._first_step, "version": self._version}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on where :meth:`state_dict` was taken, with new episodes; call :meth:`reset` after it.

        The policy is what it was when it was passed: it must have the weights of that time, or be given some.
        A chunk in flight is waited for and dropped.
        """
        self._drop_flight()
        self._noise_seed = int(state["noise_seed"])
        self._first_step = int(state["first_step"])
        self._version = int(state["version"])
        if self._store is not None:
            self._store.drop()
            self._store = self._env.publish(self._policy, self._version)


def _with_valid(rollout: Rollout, valid: NDArray[np.bool_]) -> Rollout:
    assert rollout.chunk is not None
    return replace(rollout, summary=replace(rollout.summary, valid=valid), chunk=replace(rollout.chunk, valid=valid))


def _time_split_s(rollouts: Sequence[Rollout], elapsed_s: float) -> dict[str, float]:
    """Returns what the wall time of a call went to; see :class:`CollectStats`."""
    split = dict.fromkeys(("environment", "inference", "waiting"), 0.0)
    for rollout in rollouts:
        whole_s, environment_s, inference_s = np.array(rollout.times).T
        share = min(1.0, rollout.waited_s / whole_s.max())  # the rest was done before anybody waited
        split["environment"] += share * float(environment_s.mean())
        split["inference"] += share * float(inference_s.mean())
        split["waiting"] += share * float(whole_s.max() - whole_s.mean())
    return {**split, "transport": elapsed_s - sum(split.values())}
