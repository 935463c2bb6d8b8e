"""Policies that act in the process that owns a pool, over all of its environments."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rayvec.data import ChunkRequest, Rollout
from rayvec.data.chunk import Cut
from rayvec.node.object_store import as_rollout
from rayvec.pools.base import Acting, EnvPool
from rayvec.rollout.inference import Inference
from rayvec.rollout.loop import ActingPolicy, as_policy

__all__ = ["NodeInference"]


@dataclass(slots=True)
class _Held:
    """A policy and its weights.

    Attributes:
        policy: The policy.
        version: Version of the weights that the policy has loaded.
        newest: The last published version and its weights, or None before the first publication.
    """

    policy: ActingPolicy
    version: int
    newest: tuple[int, NDArray[np.float32]] | None = None


@dataclass(frozen=True, slots=True)
class _PendingChunk:
    """A requested chunk that has not been executed.

    Attributes:
        held: The policy that acts.
        weights: Version and weights to act with, or None if none were published before the request.
        request: How many steps are requested, and which noise.
    """

    held: _Held
    weights: tuple[int, NDArray[np.float32]] | None
    request: ChunkRequest
    parts = (0,)


class NodeInference(Inference, Acting):
    """The policies that act in this process, and the pending chunks. Each policy is a copy of the one passed in.

    Args:
        num_envs: As of :class:`~rayvec.rollout.inference.Inference`.
        groups: Likewise.
    """

    def __init__(self, num_envs: int, groups: Sequence[NDArray[np.int64]] | None = None) -> None:
        super().__init__(num_envs, groups)
        self._policies: dict[int, _Held] = {}
        self._pending: list[_PendingChunk] = []

    def __contains__(self, key: int) -> bool:
        """Whether the policy with this key is one of these."""
        return key in self._policies

    def load(self, key: int, policy: bytes, version: int = 0, *, on_node: bool = True) -> None:
        """See :class:`~rayvec.pools.base.Acting`."""
        self._policies[key] = _Held(as_policy(pickle.loads(policy)), version)

    def publish(self, key: int, version: int, weights: NDArray[np.float32]) -> None:
        """See :class:`~rayvec.pools.base.Acting`."""
        self._policies[key].newest = version, weights.copy()

    def drop(self, key: int) -> None:
        """See :class:`~rayvec.pools.base.Acting`."""
        self._policies.pop(key, None)

    def begin(self, key: int, request: ChunkRequest) -> None:
        """Records a requested chunk and the weights that it uses."""
        assert self.has_room(key), "more chunks were requested than may be pending"
        held = self._policies[key]
        self._pending.append(_PendingChunk(held, held.newest, request))

    def finish(self, pool: EnvPool, cut: Cut | None = None) -> Rollout:
        """Executes the oldest pending chunk and returns it."""
        pending = self._pending.pop(0)
        held = pending.held
        if pending.weights is not None and pending.weights[0] != held.version:
            held.policy.load_weights(pending.weights[1])
            held.version = pending.weights[0]
        chunk, times = self.take(pool, held.policy, pending.request, held.version, cut)
        if pool.layout is None:  # objects that the pool's next steps may change
            chunk = replace(chunk, last_obs=deepcopy(chunk.last_obs))
        return as_rollout(chunk, pending.request.by_reference, (times,), times.whole_s)
