"""The policies that act over some environments, in a worker, in a node's process or in the driver."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Chunk, ChunkRequest, RolloutTimes, Tree
from rayvec.data.chunk import Cut
from rayvec.rollout.column_recorder import Empty
from rayvec.rollout.inference import Inference
from rayvec.rollout.loop import ActingPolicy, as_policy
from rayvec.rollout.stepper import Stepper

__all__ = ["ChunkOrder", "ChunkPlace", "PolicyHost", "TakenChunk"]


class ChunkPlace(NamedTuple):
    """Where the workers of a machine write a chunk.

    Attributes:
        number: Number of the chunk, from 1.
        slot: Number of the slot.
        first_row: The machine's row of the chunk's first column.
        num_envs: N, of all workers that take the chunk.
        num_weights: P; 0 for a policy that keeps its weights.
    """

    number: int
    slot: int
    first_row: int
    num_envs: int
    num_weights: int


class ChunkOrder(NamedTuple):
    """What a command for a rollout asks for.

    Attributes:
        key: The key of the policy.
        request: How many steps, and which noise.
        version: Version of the weights.
        weights: The weights to act with, ``float32 [P]``; None for those that the policy has.
        place: Where workers of a machine write the chunk, and read the weights; the machine's fleet says so.
    """

    key: int
    request: ChunkRequest
    version: int = 0
    weights: NDArray[np.float32] | None = None
    place: ChunkPlace | None = None


class TakenChunk(NamedTuple):
    """A chunk and the times of its rollout."""

    chunk: Chunk
    times: RolloutTimes

    @property
    def last_obs(self) -> Tree:
        """The last observation of each environment; its episode continues from there."""
        return self.chunk.last_obs


@dataclass(slots=True)
class _Held:
    """A policy, and the version of the weights that it has loaded."""

    policy: ActingPolicy
    version: int = 0


class PolicyHost:
    """Lets policies take chunks of steps.

    Args:
        stepper: The environments.
        groups: Partition of their rows: the policy acts on one group while the next one steps. One group by default.
    """

    def __init__(self, stepper: Stepper, groups: Sequence[NDArray[np.int64]] | None = None) -> None:
        self._stepper = stepper
        self._inference = Inference(stepper.num_envs, groups)
        self._held: dict[int, _Held] = {}

    def load(self, key: int, policy: bytes) -> None:
        """Loads a pickled policy."""
        self._held[key] = _Held(as_policy(pickle.loads(policy)))

    def drop(self, key: int) -> None:
        """Removes a policy."""
        self._held.pop(key, None)

    def note_reset(self, rows: Any) -> None:
        """Records environments that are reset outside of chunks."""
        self._inference.note_reset(rows)

    def note_absence(self) -> None:
        """Records steps outside of chunks: the policy that acts next has not seen them."""
        self._inference.note_absence()

    def take(self, order: ChunkOrder, cut: Cut | None = None, empty: Empty = np.empty) -> TakenChunk:
        """Takes a chunk. The arguments are those of :func:`rayvec.rollout.loop.rollout`."""
        held = self._held[order.key]
        if order.weights is not None and order.version != held.version:
            held.policy.load_weights(order.weights)
            held.version = order.version
        return TakenChunk(*self._inference.take(self._stepper, held.policy, order.request, order.version, cut, empty))
