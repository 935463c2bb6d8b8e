"""The interface of an environment pool. Process, node and cluster pools all implement it.

A pool holds N environments and steps any subset of them. While one subset steps, the caller may receive the results
of another. Double buffering, Tianshou's subsets and its asynchronous mode need nothing else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from gymnasium import Space
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from rayvec.data import ChunkRequest, StepBatch, Tree
from rayvec.errors import ConfigError, check_choice

if TYPE_CHECKING:
    from rayvec.data import Rollout, Topology
    from rayvec.pools.shared_memory import ArrayLayout

__all__ = [
    "MOST_CHUNKS",
    "NO_RESTARTS",
    "Acting",
    "ActingPool",
    "Autoreset",
    "Cut",
    "EnvPool",
    "NotReady",
    "PoolSpaces",
    "RestartPolicy",
    "deadline_in",
    "seconds_until",
]

Cut = Callable[[int], bool]
"""Whether to cut a chunk, given the number of steps that its environments have taken together so far."""


class Autoreset(IntEnum):
    """When an environment is reset after its episode has ended.

    The names are those of Gymnasium's ``AutoresetMode``. The numbers are part of the frame format.
    """

    NEXT_STEP = 0
    """The next step resets the environment and ignores the action."""
    SAME_STEP = 1
    """The step that ends the episode also resets the environment. The info holds the final observation."""
    DISABLED = 2
    """Only an explicit call of ``reset`` resets the environment."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The restart policy for environments that raise or hang, and for workers that exit.

    Attributes:
        restart: Whether a failed environment is restarted. The new seed is a function of the original seed, the
            environment id and the restart number, and the episode ends as truncated. If False, the pool raises
            the error.
        step_timeout_s: A worker that takes longer for one step counts as hung and is killed. None sets no limit.
        start_timeout_s: A worker that takes longer to make its environments, or to load a policy, counts as hung and is
            killed.
    """

    restart: bool = False
    step_timeout_s: float | None = None
    start_timeout_s: float = 300.0

    @classmethod
    def of(cls, on_env_error: str, step_timeout_s: float | None, start_timeout_s: float = 300.0) -> RestartPolicy:
        """Returns the restart policy for the arguments of a vector environment.

        Raises:
            ConfigError: `on_env_error` is unknown, or a timeout is not positive.
        """
        check_choice("on_env_error", on_env_error, ("raise", "restart"))
        if step_timeout_s is not None and not _is_time(step_timeout_s):
            raise ConfigError(
                "step_timeout_s is how long a worker may take for a step of its environments.",
                expected="seconds, more than 0, or None for no limit",
                got=repr(step_timeout_s),
                remedy="Leave it out, or pass several times what the slowest step takes.",
            )
        if not _is_time(start_timeout_s):
            raise ConfigError(
                "start_timeout_s is how long a worker may take to make its environments, or to load a policy.",
                expected="seconds, more than 0",
                got=repr(start_timeout_s),
                remedy="Leave it out for 300 s, or pass several times what the slowest constructor or import takes.",
            )
        return cls(on_env_error == "restart", step_timeout_s, start_timeout_s)


def _is_time(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and float(value) > 0


NO_RESTARTS = RestartPolicy()
"""Failed environments are not restarted, and a step may take any time."""

MOST_CHUNKS = 2
"""The most chunks that may be pending, or in a worker's memory: the worker fills one, the pool copies the other."""


@dataclass(frozen=True, slots=True)
class PoolSpaces:
    """The spaces and metadata that a pool reads from its environments.

    Attributes:
        observation: Space of the first environment's observations.
        action: Space of the first environment's actions.
        metadata: Metadata of the first environment.
        render_mode: Render mode of the first environment.
        observations: The observation space of each environment, in order. Empty if all are equal.
        actions_differ: Index and action space of the first environment whose action space differs from `action`.
        sub_batches: Number of environments of each native sub-batch, in order. Empty for ordinary environments.
    """

    observation: Space[Any]
    action: Space[Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    render_mode: str | None = None
    observations: tuple[Space[Any], ...] = ()
    actions_differ: tuple[int, Space[Any]] | None = None
    sub_batches: tuple[int, ...] = ()

    @property
    def num_envs(self) -> int | None:
        """How many environments there are, if they are native."""
        return sum(self.sub_batches) or None

    @property
    def unit_bounds(self) -> NDArray[np.int64] | None:
        """Bounds of the native sub-batches, ``int64 [sub-batches + 1]``, or None."""
        return np.cumsum([0, *self.sub_batches]) if self.sub_batches else None

    @property
    def native_mode(self) -> Autoreset | None:
        """The autoreset mode of native sub-batches, or None."""
        return Autoreset[self.metadata["autoreset_mode"].name] if self.sub_batches else None

    @classmethod
    def join(cls, parts: Sequence[tuple[int, PoolSpaces]]) -> PoolSpaces:
        """Joins the spaces of consecutive slices, given as pairs (number of environments, their spaces)."""
        first = parts[0][1]
        for mode in (part.metadata.get("autoreset_mode") for _, part in parts if part.sub_batches):
            if mode != first.metadata.get("autoreset_mode"):
                raise ConfigError(
                    "All native sub-batches reset their environments at the same time.",
                    expected=f"the mode of the first sub-batch, {first.metadata.get('autoreset_mode')}",
                    got=mode,
                    remedy="Make them with one autoreset_mode.",
                )
        every = [space for count, part in parts for space in (part.observations or (part.observation,) * count)]
        starts = accumulate((count for count, _ in parts[:-1]), initial=0)
        others = [(0, part.action) if part.action != first.action else part.actions_differ for _, part in parts]
        differ = next(((start + each[0], each[1]) for start, each in zip(starts, others, strict=True) if each), None)
        same = all(part.observation == first.observation and not part.observations for _, part in parts)
        return cls(
            first.observation,
            first.action,
            first.metadata,
            first.render_mode,
            () if same else tuple(every),
            differ,
            tuple(size for _, part in parts for size in part.sub_batches),
        )

    def check_native(self, num_envs: int | None, mode: AutoresetMode | None) -> None:
        """Checks what a caller demands of native sub-batches: their number of environments and autoreset mode.

        Raises:
            ConfigError: They have another.
        """
        if self.sub_batches and num_envs not in (None, self.num_envs):
            raise ConfigError(
                "With native=True, num_envs is the number of environments of all sub-batches together.",
                expected=f"num_envs={self.num_envs}, for sub-batches of {list(self.sub_batches)[:8]}, or no num_envs",
                got=num_envs,
                remedy="With a list of callables, leave num_envs out. Otherwise let num_envs and workers_per_node give "
                "each worker as many rows as its vector environment can have: for games, a multiple of the number of "
                "agents. Where that number is fixed, pass workers_per_node=1.",
            )
        if self.sub_batches and mode not in (None, self.metadata["autoreset_mode"]):
            raise ConfigError(
                "Native sub-batches reset environments themselves, whose episode has ended.",
                expected=f"autoreset_mode={self.metadata['autoreset_mode']}, or no autoreset_mode",
                got=mode,
                remedy="Leave autoreset_mode out, or make the sub-batches with another; make_vec passes "
                "env_kwargs={'autoreset_mode': ...} to the vector entry point.",
            )

    def misfit(self, space: Space[Any]) -> int | None:
        """Returns the index of the first environment whose observations don't fit arrays of `space`, or None."""
        candidates = enumerate(self.observations or (self.observation,))
        return next((i for i, each in candidates if not is_space_dtype_shape_equiv(each, space)), None)


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
