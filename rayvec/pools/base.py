"""The interface of an environment pool. Process, node and cluster pools all implement it.

A pool holds N environments and steps any subset of them. While one subset steps, the caller may receive the results
of another. Double buffering, Tianshou's subsets and its asynchronous mode need nothing else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from rayvec.data import ChunkRequest, StepBatch, Tree
from rayvec.data.chunk import Cut
from rayvec.envs.spaces import PoolSpaces
from rayvec.fleet.commands import Autoreset
from rayvec.fleet.restarts import NO_RESTARTS, RestartPolicy

if TYPE_CHECKING:
    from rayvec.data import Rollout, Topology
    from rayvec.data.layouts import ArrayLayout

__all__ = [
    "MOST_CHUNKS",
    "NO_RESTARTS",
    "Acting",
    "ActingPool",
    "Autoreset",
    "EnvPool",
    "NotReady",
    "PoolSpaces",
    "RestartPolicy",
    "deadline_in",
    "seconds_until",
]

MOST_CHUNKS = 2
"""The most chunks that may be pending, or in a worker's memory: the worker fills one, the pool copies the other."""


class NotReady(TimeoutError):
    """A pool's wait reached its timeout. A ``TimeoutError`` that an environment raises is never a `NotReady`."""


def deadline_in(timeout_s: float | None) -> float:
    """Returns the ``time.monotonic`` time at which a timeout expires. It is infinite without a timeout."""
    return math.inf if timeout_s is None else time.monotonic() + timeout_s


def seconds_until(deadline: float) -> float:
    """Returns the seconds that are left until a deadline, at least 0."""
    return max(0.0, deadline - time.monotonic())


class EnvPool(Protocol):
    """N environments, addressed by ids from 0 to N-1.

    `send`, `reset`, `begin_episodes` and `observe` start a command, and `recv` returns its results. Each environment
    has at most one pending command.

    Arrays in a :class:`~rayvec.data.StepBatch` may be views of memory that the next step of these environments
    overwrites. Copy an array to keep it longer.
    """

    num_envs: int
    first_id: int
    """Global index of the first environment, by which infos, chunks, noise and errors go."""
    native_mode: Autoreset | None
    """The autoreset mode of native sub-batches; None for ordinary environments."""

    @property
    def layout(self) -> ArrayLayout | None:
        """The array layout of observations. None if observations are objects, in arrays of ``dtype=object``."""
        ...

    @property
    def action_layout(self) -> ArrayLayout | None:
        """The array layout of actions. None if actions are objects, in lists."""
        ...

    def send(self, env_ids: NDArray[np.int64], actions: Tree, autoreset: Autoreset) -> None:
        """Starts one step of some environments.

        Args:
            env_ids: Environment ids, ``int64 [k]``, without repetition.
            actions: Tree of ``[k, *act_shape]`` in the order of `env_ids`, or a list of k objects.
            autoreset: When to reset environments whose episode has ended.
        """
        ...

    def recv(
        self,
        env_ids: NDArray[np.int64] | None = None,
        min_completed: int | None = None,
        timeout_s: float | None = None,
    ) -> StepBatch:
        """Waits for pending commands and returns their results.

        Args:
            env_ids: Environment ids, ``int64 [k]``. None selects all environments with a pending command.
            min_completed: Without `env_ids`, return as soon as this many environments have completed.
            timeout_s: The longest wait. None waits without limit.

        Returns:
            The results in the order of `env_ids`, or in ascending order of ids.

        Raises:
            NotReady: The timeout was reached. The commands stay pending.
            WorkerLostError: A worker that held some of the environments exited.
            Exception: The exception that an environment raised. Its ``__cause__`` is an ``EnvError``.
        """
        ...

    def reset(
        self, env_ids: NDArray[np.int64], seeds: Sequence[int | None], options: Mapping[str, Any] | None = None
    ) -> None:
        """Starts a reset of some environments, each with its seed. :meth:`recv` returns the first observations."""
        ...

    def begin_episodes(self, env_ids: NDArray[np.int64]) -> None:
        """Starts a reset, without a seed, of the environments that are between two episodes.

        :meth:`recv` returns the current observations of all the given environments.
        """
        ...

    def observe(self, env_ids: NDArray[np.int64]) -> None:
        """Requests current observations, which :meth:`recv` returns. No environment is reset."""
        ...

    def call(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], env_ids: NDArray[np.int64]
    ) -> Callable[[float | None], list[Any]]:
        """Starts calling a method or reading an attribute of each environment, through its wrappers.

        Returns:
            A function that takes a timeout in seconds, waits, and returns one result for each environment.
        """
        ...

    def set_attr(self, name: str, values: Sequence[Any], env_ids: NDArray[np.int64]) -> None:
        """Sets an attribute of each environment, through its wrappers. `values` holds one value for each."""
        ...

    def close(self) -> None:
        """Closes the environments and ends their processes. Further calls do nothing."""
        ...


class Acting(Protocol):
    """The policies that act inside a pool, by key, and the pending chunks."""

    _pending: list[Any]

    @property
    def num_pending(self) -> int:
        """The number of pending chunks."""
        return len(self._pending)

    def has_room(self, key: int, part: int | None = None) -> bool:
        """Whether another chunk with a policy may be requested of all parts, or of one.

        False while a chunk is pending whose policy acts in another process (in the workers, or in the process that owns
        them): the steps would be out of order.
        """
        return len(self._pending_of(part)) < MOST_CHUNKS

    def _pending_of(self, part: int | None) -> list[Any]:
        """Returns the pending chunks of all parts, or of one, oldest first."""
        return [chunk for chunk in self._pending if part is None or part in chunk.parts]

    def load(self, key: int, policy: bytes, version: int = 0, *, on_node: bool = False) -> None:
        """Loads a pickled policy.

        Args:
            key: The key of the policy.
            policy: The pickled policy.
            version: The version of the weights that it contains.
            on_node: Whether it acts in the process that owns the workers, over all of them, and not in each worker.
        """
        ...

    def publish(self, key: int, version: int, weights: NDArray[np.float32]) -> None:
        """Publishes new weights of a policy, ``float32 [P]``. Every chunk requested from now on uses them."""
        ...

    def drop(self, key: int) -> None:
        """Removes a policy and its weights."""
        ...


class ActingPool(EnvPool, Protocol):
    """A pool of all environments of a vector environment, in which policies can act."""

    steps_here: bool
    """Whether environments step in the driver's process, inside :meth:`recv`."""

    @property
    def spaces(self) -> PoolSpaces:
        """The spaces and metadata of the environments."""
        ...

    @property
    def acting(self) -> Acting:
        """The policies that act in this pool."""
        ...

    @property
    def topology(self) -> Topology:
        """Which node holds which environments."""
        ...

    @property
    def transports(self) -> tuple[str, ...]:
        """The transport to each node."""
        ...

    def allocate(self, observation: Space[Any], action: Space[Any]) -> None:
        """Allocates the arrays for these spaces. No environment can step before this call."""
        ...

    def begin_rollout(self, key: int, request: ChunkRequest, part: int | None = None) -> None:
        """Requests a chunk of steps with a policy. :meth:`finish_rollout` returns the chunk.

        Each part may have `MOST_CHUNKS` pending chunks, which it takes in order. While a part has pending chunks of its
        own, no chunk of all parts may be requested.

        Args:
            key: The key of the policy.
            request: How many steps, which noise, and whether the chunk stays in the object store.
            part: The part whose environments take the chunk, independently of other parts; None for all parts.
        """
        ...

    def finish_rollout(
        self, timeout_s: float | None = None, cut: Cut | None = None, part: int | None = None
    ) -> Rollout:
        """Waits for the oldest pending chunk of all parts, or of one, and returns it.

        Args:
            timeout_s: The longest wait. None waits without limit.
            cut: Called about every millisecond. Once it returns True, every worker ends the chunk after its present
                step. The chunk then has as many steps as the fastest worker took; the others' last ones are not
                `valid`.
            part: The index of the part.

        Raises:
            NotReady: The timeout was reached. The chunk stays pending.
        """
        ...

    def take_replaced(self) -> dict[str, int]:
        """Returns how many workers and nodes were replaced since the last call, by kind: ``worker``, ``node``."""
        ...

    @property
    def parts(self) -> tuple[range, ...]:
        """The ids of the environments that each part steps: a worker of one machine, or a node of a cluster."""
        ...

    def finish_any(self, parts: Sequence[int]) -> tuple[int, Rollout]:
        """Waits until one of some parts has finished its oldest pending chunk.

        Args:
            parts: The parts, in the order of preference if several have finished.

        Returns:
            The part, and the chunk of its environments.
        """
        ...

    def worker_pids(self) -> dict[str, list[int]]:
        """Returns the process ids of each node, by node name."""
        ...

    def close(self, timeout_s: float | None = None) -> None:
        """Closes the environments and ends the workers. Workers still running after `timeout_s` (10 s) are killed."""
        ...
