"""The pool of no node at all: environments in the driver's own process, without Ray.

For looking into environments with a debugger, and for those whose step costs less than telling another process of it.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections import deque
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from rayvec.chunks import edges_of
from rayvec.envs import EnvFactory
from rayvec.errors import ConfigError, message
from rayvec.pools.base import RAISE, Autoreset, Supervision
from rayvec.pools.bulk import MOST_CHUNKS
from rayvec.pools.memory import ArrayLayout
from rayvec.pools.serial import EnvsFailed, SerialPool
from rayvec.rollout import ActingPolicy, Stopwatch, as_policy, rollout
from rayvec.types import Chunk, ChunkRef, NodeSlice, Rollout, StepBatch, Topology, Tree, tree_map

__all__ = ["LocalPool"]

logger = logging.getLogger(__name__)


class LocalPool(SerialPool):
    """Steps environments in the driver's process, one after another, when their answer is asked for.

    To whoever holds it, it is what :class:`~rayvec.pools.ray.RayPool` is, on one node of one worker. Nobody can end a
    step from outside, so that no wait has a timeout.

    Args:
        factory: Makes all environments.
        supervision: What becomes of environments that raise.

    Attributes:
        acting: The policies that act in chunks.

    Raises:
        Exception: What the constructor of an environment raised, its ``__cause__`` an ``EnvError``.
    """

    transports = ("local",)
    steps_here = True

    def __init__(self, factory: EnvFactory, supervision: Supervision = RAISE) -> None:
        self.topology = Topology((NodeSlice("driver", "localhost", (0, factory.num_envs), 0),))
        self.acting = _LocalActing()
        try:
            super().__init__(factory, where="the driver's process", supervision=supervision)
        except EnvsFailed as failed:
            error = failed.failures[0][1].rebuild()
        else:
            return
        raise error

    def allocate(self, observation: Space[Any], action: Space[Any]) -> None:
        """Makes the arrays for these spaces."""
        self.action_layout = ArrayLayout.of(action)
        self.attach_own(ArrayLayout.of(observation))

    def send(self, env_ids: NDArray[np.int64], actions: Tree, autoreset: Autoreset) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`; actions are copied, since environments may keep them."""
        copied = deepcopy(actions) if self.action_layout is None else tree_map(np.copy, actions)
        super().send(env_ids, copied, autoreset)

    def recv(
        self,
        env_ids: NDArray[np.int64] | None = None,
        min_ready: int | None = None,
        timeout_s: float | None = None,
    ) -> StepBatch:
        """See :class:`~rayvec.pools.base.EnvPool`; what was started is done now."""
        batch = super().recv(env_ids)
        for note in self.notes:
            logger.warning(note)
        self.notes.clear()
        return batch

    def call(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], env_ids: NDArray[np.int64]
    ) -> Callable[[float | None], list[Any]]:
        """See :class:`~rayvec.pools.base.EnvPool`; results are copies, as those of another process are."""
        results = deepcopy(super().call(name, args, kwargs, env_ids)(None))
        return lambda timeout_s: results

    def begin_rollout(
        self, key: int, num_steps: int, first_step: int, noise_seed: int, *, by_reference: bool = False
    ) -> None:
        """See :class:`~rayvec.pools.base.ActingPool`; only note is taken of it, and of the weights of now."""
        self.acting.begin(key, (num_steps, first_step, noise_seed), by_reference)

    def finish_rollout(self, timeout_s: float | None = None) -> Rollout:
        """See :class:`~rayvec.pools.base.ActingPool`; the steps are taken now."""
        return self.acting.finish(self)

    def worker_pids(self) -> dict[str, list[int]]:
        """This process, by the node's name."""
        return {node.name: [os.getpid()] for node in self.topology.nodes}

    def close(self, timeout_s: float | None = None) -> None:
        """Closes the environments; may be called again."""
        try:
            super().close()
        except Exception:
            logger.exception("an environment did not close in order")


@dataclass(slots=True)
class _Held:
    """A policy, the version of the weights that it has, and the newest with their version, if any were published."""

    policy: ActingPolicy
    version: int
    newest: tuple[int, NDArray[np.float32]] | None = None


@dataclass(frozen=True, slots=True)
class _Flight:
    """A chunk that was asked for: who acts, with which weights if any were published, and how far."""

    held: _Held
    weights: tuple[int, NDArray[np.float32]] | None
    extent: tuple[int, int, int]
    by_reference: bool


class _LocalActing:
    """Policies that act in this process, each a copy of what was passed, and the chunks that were asked for."""

    def __init__(self) -> None:
        self._policies: dict[int, _Held] = {}
        self._flights: deque[_Flight] = deque()
        self._acted: _Held | None = None

    @property
    def num_under_way(self) -> int:
        return len(self._flights)

    @property
    def has_room(self) -> bool:
        return len(self._flights) < MOST_CHUNKS

    def load(self, key: int, policy: bytes, version: int = 0) -> None:
        self._policies[key] = _Held(as_policy(pickle.loads(policy)), version)

    def publish(self, key: int, version: int, weights: NDArray[np.float32]) -> None:
        self._policies[key].newest = version, weights.copy()

    def drop(self, key: int) -> None:
        self._policies.pop(key, None)

    def begin(self, key: int, extent: tuple[int, int, int], by_reference: bool) -> None:
        assert self.has_room, "a chunk more than may be asked for"
        held = self._policies[key]
        self._flights.append(_Flight(held, held.newest, extent, by_reference))

    def finish(self, pool: SerialPool) -> Rollout:
        flight, stopwatch = self._flights.popleft(), Stopwatch()
        held = flight.held
        if flight.weights is not None and flight.weights[0] != held.version:
            held.policy.load_weights(flight.weights[1])
            held.version = flight.weights[0]
        begun = None if held is self._acted else np.arange(pool.num_envs)
        self._acted = held
        num_steps, first_step, noise_seed = flight.extent
        chunk = rollout(
            pool,
            held.policy,
            num_steps,
            noise_seed=noise_seed,
            first_step=first_step,
            weights_version=held.version,
            begun=begun,
            stopwatch=stopwatch,
        )
        times = stopwatch.read()
        edges = edges_of(chunk)
        if not flight.by_reference:
            return Rollout(edges, chunk, (), (times,), times.whole_s)
        ref = ChunkRef(edges.env_ids, edges.num_steps, _put(chunk))
        return Rollout(edges, None, (ref,), (times,), times.whole_s)


def _put(chunk: Chunk) -> Any:
    """Puts a chunk into the object store of the Ray that the learner's ranks have started."""
    import ray  # for whoever has no ranks, a third of a second for nothing

    if not ray.is_initialized():
        raise ConfigError(
            message(
                "A chunk stays in the object store of a Ray that runs.",
                expected="an initialised Ray, such as that of a LearnerGroup",
                got="by_reference=True with environments in this process, and no Ray",
                remedy="Leave by_reference out, or make the LearnerGroup first.",
            )
        )
    return ray.put(chunk)
