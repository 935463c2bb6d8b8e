"""Which chunks are requested, and which of them make a batch: the scheduler of every collector."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest

import numpy as np

from rayvec.data import Chunk, EpisodeStats
from rayvec.data.batch import join_episodes
from rayvec.data.chunk import StopEarly, join_chunks
from rayvec.data.episodes import EpisodeTracker
from rayvec.fleet.deferred_signals import uninterrupted
from rayvec.rollout.loop import Rollout
from rayvec.vector.chunks import ChunkAdapter, WeightStore

_MAX_PENDING = 2
"""The most pending chunks of a lane."""
_PROMPT = 1
"""A lane whose last chunk was at most this many versions old is requested ahead."""


@dataclass(slots=True, eq=False)
class ScheduledChunk:
    """A chunk that was requested.

    Attributes:
        envs: Indices of its environments.
        num_steps: How many steps were requested.
        due: The newest version of the weights that may have been published before it is in a batch.
        number: How many chunks were requested before it.
        rollout: The result, once it has finished.
    """

    envs: range
    num_steps: int
    due: float
    number: int
    rollout: Rollout = field(init=False)


@dataclass(slots=True, eq=False)
class _Lane:
    """Environments that take their chunks together, in the order of the requests.

    Attributes:
        part: The worker or the node that they belong to, by its index in ``env.parts``; None for all environments.
        envs: Their indices.
        first_step: How many steps each could take in the chunks that have finished.
        pending: The chunks that have not, oldest first.
        is_prompt: Whether the last chunk was at most `_PROMPT` versions old.
    """

    part: int | None
    envs: range
    first_step: int
    pending: deque[ScheduledChunk] = field(default_factory=deque)
    is_prompt: bool = True


class ChunkScheduler:
    """Requests chunks, also ahead of their use, and holds those that have finished until a batch takes them.

    All environments take their chunks together. With `max_staleness`, those of each worker or node take theirs alone.
    A lane that is fast is then in a batch several times, in the order of time, and one that is slow not at all. A
    wait that is interrupted loses nothing: what has finished and what is pending is for the next batch. Where the
    policy acts in this process, an interrupt closes the environments.

    Args:
        env: Takes the chunks.
        noise_seed: Seed of the policy's noise.
        max_staleness: How many versions of the weights may be published between the request of a chunk and the batch
            that has it. A batch waits for a lane only if its chunk would become older. With 1, and weights that were
            published since the batch before, every batch has one chunk of each lane.
        first_step: How many steps each environment could take before.

    Attributes:
        env: As given.
        noise_seed: As given.
        finished: The chunks that wait for a batch, in the order in which they finished.
    """

    def __init__(
        self, env: ChunkAdapter, noise_seed: int, *, max_staleness: int | None = None, first_step: int = 0
    ) -> None:
        self.env = env
        self.noise_seed = noise_seed
        self._max_staleness = math.inf if max_staleness is None else max_staleness
        parts = env.parts
        self._num_envs = sum(map(len, parts))
        together: Iterable[tuple[int | None, range]] = [(None, range(self._num_envs))]
        lanes = together if max_staleness is None else enumerate(parts)
        self._lanes = [_Lane(part, envs, first_step) for part, envs in lanes]
        self._num_requests = 0
        self.finished: list[ScheduledChunk] = []

    @property
    def first_step(self) -> int:
        """The most steps that an environment could take in the chunks that have finished."""
        return max(lane.first_step for lane in self._lanes)

    @property
    def is_idle(self) -> bool:
        """Whether no chunk is pending, and no finished one waits for a batch."""
        return not self.finished and not any(lane.pending for lane in self._lanes)

    def collect(
        self,
        store: WeightStore,
        num_steps: int,
        *,
        num_ahead: int = 0,
        stop_early: StopEarly | None = None,
    ) -> None:
        """Waits for the chunks of a batch, which :meth:`take` returns.

        The batch is complete when it has a column for each environment and as many steps as `num_steps` for each, and
        no pending chunk is due.

        Args:
            store: The policy and its weights.
            num_steps: What the batch needs of each environment. What earlier calls have requested counts, and may
                be more.
            num_ahead: Steps of the chunks to request for the next batch. With 0, all pending chunks are for this one.
            stop_early: Asked about every millisecond whether to end the chunk; not with `max_staleness`.
        """
        for lane in self._lanes:
            max_pending = _MAX_PENDING if num_ahead and lane.is_prompt else 1
            self._request(lane, store, num_steps, num_ahead, max_pending)
        while lanes := self._wanted(store.version, num_steps, num_ahead):
            lane = self._wait(lanes, stop_early)
            lane.is_prompt = store.version - self.finished[-1].rollout.chunk.weights_version <= _PROMPT
            self._request(lane, store, num_steps, num_ahead)

    def wait(self) -> None:
        """Waits for all pending chunks; the next batch has them.

        Raises:
            Exception: What an environment or a policy raised in one of them.
        """
        for lane in self._lanes:
            while lane.pending:
                self._wait([lane])

    def drop(self) -> list[ScheduledChunk]:
        """Waits for all pending chunks, and returns all that no batch has: the next one will not follow them."""
        self.wait()
        return self.take()

    def take(self) -> list[ScheduledChunk]:
        """Returns the chunks that have finished, in their order."""
        taken, self.finished = self.finished, []
        return taken

    def _request(self, lane: _Lane, store: WeightStore, num_steps: int, num_ahead: int, max_pending: int = 1) -> None:
        """Requests the steps that a batch lacks of a lane, or else a chunk ahead, if fewer than so many are pending."""
        pending_steps = sum(chunk.num_steps for chunk in lane.pending)
        missing = num_steps - pending_steps - sum(each.num_steps for each in self.finished if each.envs == lane.envs)
        count = missing if missing > 0 else num_ahead
        if len(lane.pending) >= max_pending or not count:
            return
        first_step = lane.first_step + pending_steps
        due = store.version + self._max_staleness - (missing > 0)  # what this batch lacks counts from the one before
        with uninterrupted():
            self.env.rollout_async(store, count, first_step, self.noise_seed, part=lane.part)
            lane.pending.append(ScheduledChunk(lane.envs, count, due, self._num_requests))
            self._num_requests += 1

    def _wait(self, lanes: Sequence[_Lane], stop_early: StopEarly | None = None) -> _Lane:
        """Waits until one of some lanes has finished its oldest chunk, in the order of preference; returns the lane."""

        def accept(index: int, rollout: Rollout) -> None:
            lane = lanes[index]
            chunk = lane.pending.popleft()
            chunk.rollout = rollout
            lane.first_step += chunk.num_steps
            self.finished.append(chunk)

        index, _ = self.env.receive([lane.part for lane in lanes], accept, cut=stop_early)
        return lanes[index]

    def _wanted(self, version: int, num_steps: int, num_ahead: int) -> list[_Lane]:
        """Returns the lanes whose oldest chunk may come next into the batch; none at its end.

        Chunks with the oldest weights come first, and of these the one that was requested first.
        """
        waiting = [lane for lane in self._lanes if lane.pending]
        waiting.sort(key=lambda lane: (lane.pending[0].due, lane.pending[0].number))
        due = [lane for lane in waiting if lane.pending[0].due <= version]
        sizes = [(chunk.num_steps, len(chunk.envs)) for chunk in self.finished]
        sizes += [(lane.pending[0].num_steps, len(lane.envs)) for lane in due]
        has_columns = sum(width for _, width in sizes) >= self._num_envs
        has_steps = sum(length * width for length, width in sizes) >= num_steps * self._num_envs
        return due if num_ahead and has_columns and has_steps else waiting


def _in_rounds(chunks: Sequence[ScheduledChunk]) -> list[list[ScheduledChunk]]:
    """Groups chunks: first the first one of each lane, in the order of environments, then the second ones, and so on.

    Args:
        chunks: The chunks, those of each lane in the order of time.
    """
    in_order = sorted(chunks, key=lambda chunk: chunk.envs.start)
    by_lane = [[*members] for _, members in groupby(in_order, key=lambda chunk: chunk.envs.start)]
    return [[chunk for chunk in members if chunk is not None] for members in zip_longest(*by_lane)]


def join_lanes(finished: Sequence[ScheduledChunk], tracker: EpisodeTracker) -> tuple[Chunk, EpisodeStats]:
    """Joins chunks of lanes: side by side the first one of each lane, then the second ones, and so on.

    Args:
        finished: The chunks, those of each lane in the order of time. Shorter ones are padded.
        tracker: Sums the episodes.

    Returns:
        The chunk, and the episodes that ended in it.
    """
    rounds = _in_rounds(finished)
    joined = join_chunks([each.rollout.chunk for members in rounds for each in members])
    episodes, start = [], 0
    for members in rounds:
        envs = np.concatenate([np.array(each.envs) for each in members])
        episodes.append(tracker.add(joined.columns(start, start + len(envs)), envs))
        start += len(envs)
    return joined, join_episodes(episodes)
