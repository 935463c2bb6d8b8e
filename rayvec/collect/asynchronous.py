"""Chunks of parts of the environments (workers or nodes), collected asynchronously: no part waits for another."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayvec.collect.pipeline import ChunkPipeline, PendingChunk
from rayvec.data import EpisodeStats, Rollout
from rayvec.data.batch import join_episodes
from rayvec.data.episodes import EpisodeTracker
from rayvec.data.join_chunks import join_chunks, join_summaries, pad_chunk, summarize
from rayvec.pools.base import MOST_CHUNKS
from rayvec.pools.publish_weights import WeightStore
from rayvec.vector.pool_adapter import PoolAdapter

__all__ = ["PartChunk", "PartsPipeline", "in_rounds", "join_parts"]

_PROMPT = 1
"""A part whose last chunk was at most this many versions old is requested ahead."""


class PartChunk(NamedTuple):
    """A finished chunk of some environments.

    Attributes:
        rollout: The chunk.
        envs: Indices of its environments.
    """

    rollout: Rollout
    envs: range


@dataclass(slots=True, eq=False)
class _Part:
    """A worker or a node.

    Attributes:
        envs: Its environments.
        chunks: Starts and finishes its chunks.
        is_prompt: Whether its last chunk was at most `_PROMPT` versions old.
    """

    envs: range
    chunks: ChunkPipeline
    is_prompt: bool = True


class PartsPipeline:
    """Requests chunks from each part of the environments by itself, and finds those that make a batch.

    A part has at most two pending chunks, which bounds the queue. A prompt part is requested to take the next chunk
    before it has finished the present one, so that it never waits. A slower part is requested when it has finished, so
    that its next chunk begins with the newest weights.

    Args:
        env: Takes the chunks.
        noise_seed: Seed of the policy's noise.
        max_staleness: How many versions may be published between the request of a chunk and the batch that has it. A
            batch waits for a part only if its chunk would become older. With 1, and
            weights that were published since the batch before, every batch has one chunk of each part.
    """

    def __init__(self, env: PoolAdapter, noise_seed: int, max_staleness: int) -> None:
        self._env = env
        self._max_staleness = max_staleness
        self._parts = [
            _Part(envs, ChunkPipeline(env, noise_seed, part=number)) for number, envs in enumerate(env.parts)
        ]
        self._num_envs = sum(len(part.envs) for part in self._parts)
        self._num_requests = 0

    @property
    def pipelines(self) -> list[ChunkPipeline]:
        """The pipeline of each part."""
        return [part.chunks for part in self._parts]

    @property
    def pending(self) -> list[PendingChunk]:
        """The pending chunks of all parts."""
        return [chunk for part in self._parts for chunk in part.chunks.pending]

    def start(self, store: WeightStore, num_steps: int, *, ahead: bool) -> None:
        """Starts a chunk of `num_steps` steps on each part that has none, and with `ahead` on each prompt part."""
        for part in self._parts:
            num_pending = len(part.chunks.pending)
            if not num_pending or (ahead and part.is_prompt and num_pending < MOST_CHUNKS):
                self._start(part, store, num_steps, is_ahead=num_pending > 0)

    def _start(self, part: _Part, store: WeightStore, num_steps: int, *, is_ahead: bool) -> None:
        part.chunks.start(store, num_steps, is_ahead=is_ahead, request=self._num_requests)
        self._num_requests += 1

    def collect(
        self,
        store: WeightStore,
        num_steps: int,
        kept: list[PartChunk],
        *,
        ahead: bool,
        checked: Callable[[Rollout], Rollout] = lambda rollout: rollout,
        most: float = math.inf,
    ) -> None:
        """Waits for the chunks of the present batch, and starts the next one of each part that finishes.

        An environment of a fast part may be in a batch several times, in the order of time, and one of a slow part not
        at all. The batch is complete when it has a column for each environment and as many steps as T for each, and no
        pending chunk is due. Chunks that an earlier call requested may have another number of steps.

        Args:
            store: The weights of the policy.
            num_steps: T of the chunks to start; 0 if the pending chunks are enough.
            kept: The chunks that the batch has so far. The others are appended, also if the wait is interrupted.
            ahead: Whether to start chunks for the next batch. If not, all pending chunks belong to this one.
            checked: Returns what of a finished chunk is to be used.
            most: How many chunks of a part the batch may have.
        """
        while among := self._wanted(store.version, num_steps, kept, ahead, most):
            number, rollout = self._env.part_wait(among)
            part = self._parts[number]
            part.is_prompt = store.version - part.chunks.pending[0].version <= _PROMPT
            kept.append(PartChunk(checked(part.chunks.finished(rollout)), part.envs))
            if ahead and not part.chunks.pending:
                self._start(part, store, num_steps, is_ahead=True)
        missing = num_steps - sum(chunk.rollout.summary.valid.size for chunk in kept) // self._num_envs
        if missing > 0 and not ahead:
            self.start(store, missing, ahead=False)
            self.collect(store, 0, kept, ahead=False, checked=checked, most=most)

    def _wanted(self, version: int, num_steps: int, kept: Sequence[PartChunk], ahead: bool, most: float) -> list[int]:
        """Returns the parts whose oldest chunk may come next into the batch; none at its end.

        Chunks with the oldest weights come first, and of these the one that was requested first.
        """
        counts = Counter(chunk.envs for chunk in kept)
        by_age = sorted(
            (self._due(part.chunks.pending[0]), part.chunks.pending[0].request, number)
            for number, part in enumerate(self._parts)
            if part.chunks.pending and counts[part.envs] < most
        )
        due = [number for newest, _, number in by_age if not ahead or newest <= version]
        sizes = [chunk.rollout.summary.valid.shape for chunk in kept]
        sizes += [(part.chunks.pending[0].num_steps, len(part.envs)) for part in (self._parts[k] for k in due)]
        has_columns = sum(width for _, width in sizes) >= self._num_envs
        has_steps = sum(length * width for length, width in sizes) >= num_steps * self._num_envs
        return due if has_columns and has_steps else [number for *_, number in by_age]

    def _due(self, chunk: PendingChunk) -> int:
        """Returns the newest version that may have been published before a chunk is in a batch.

        A chunk that was not started ahead is for the batch that was being collected then.
        """
        return chunk.version + self._max_staleness - (not chunk.is_ahead)


def in_rounds(chunks: Sequence[PartChunk]) -> list[list[PartChunk]]:
    """Groups chunks: first the first one of each part, in the order of environments, then the second ones, and so on.

    Args:
        chunks: The chunks, those of each part in the order of time.
    """
    counts: Counter[range] = Counter()
    rounds: list[list[PartChunk]] = []
    for chunk in chunks:
        if counts[chunk.envs] == len(rounds):
            rounds.append([])
        rounds[counts[chunk.envs]].append(chunk)
        counts[chunk.envs] += 1
    return [sorted(members, key=lambda chunk: chunk.envs.start) for members in rounds]


def join_parts(
    chunks: Sequence[PartChunk], tracker: EpisodeTracker, waited_s: float
) -> tuple[Rollout, EpisodeStats, NDArray[np.int64]]:
    """Joins chunks of parts side by side: first the first one of each part, then the second ones, and so on.

    Args:
        chunks: The chunks, those of each part in the order of time.
        tracker: Sums the episodes.
        waited_s: How long the caller waited for them, in seconds.

    Returns:
        The chunk, the episodes that ended in it, and the version of the weights of each column, ``int64 [N]``.
    """
    num_steps = max(chunk.rollout.summary.valid.shape[0] for chunk in chunks)
    rounds = in_rounds([each._replace(rollout=_padded(each.rollout, num_steps)) for each in chunks])
    stats = []
    for members in rounds:
        summary = join_summaries([chunk.rollout.summary for chunk in members])
        stats.append(tracker.add(summary, np.concatenate([np.array(chunk.envs) for chunk in members]))[0])
    rollouts = [chunk.rollout for members in rounds for chunk in members]
    summaries = [rollout.summary for rollout in rollouts]
    joined = join_chunks([rollout.chunk for rollout in rollouts if rollout.chunk is not None])
    num_taken = sum(chunk.rollout.summary.valid.size - chunk.rollout.num_padded for chunk in chunks)
    times = tuple(each for rollout in rollouts for each in rollout.times)
    versions = np.repeat(
        [summary.weights_version for summary in summaries], [len(summary.env_ids) for summary in summaries]
    )
    rollout = Rollout(join_summaries(summaries), joined, (), times, waited_s, joined.valid.size - num_taken)
    return rollout, join_episodes(stats), versions


def _padded(rollout: Rollout, num_steps: int) -> Rollout:
    """Returns a rollout of `num_steps` steps, since chunks of one batch may have been requested with different T."""
    if rollout.chunk is None or rollout.summary.valid.shape[0] == num_steps:
        return rollout
    chunk = pad_chunk(rollout.chunk, num_steps)
    return replace(rollout, summary=summarize(chunk), chunk=chunk)
