"""What a pool of environments is, at every level: process, node, cluster.

A pool steps N environments and lets some of them step while others are answered. That is all that double
buffering, Tianshou's subsets and its asynchronous mode need, so no level has a second interface.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from gymnasium import Space
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from numpy.typing import NDArray

from rayvec.data import StepBatch, Tree
from rayvec.errors import ConfigError, check_choice

if TYPE_CHECKING:
    from rayvec.data import Rollout, Topology
    from rayvec.pools.memory import ArrayLayout

__all__ = ["RAISE", "Acting", "ActingPool", "Autoreset", "EnvPool", "NotReady", "PoolSpaces", "Supervision"]


class Autoreset(IntEnum):
    """When an environment is reset whose episode has ended.

    The names are Gymnasium's; the numbers travel in frames.
    """

    NEXT_STEP = 0
    """The next step resets it and ignores the action."""
    SAME_STEP = 1
    """The step that ended the episode resets it; the final observation stands in the info."""
    DISABLED = 2
    """Nobody but the caller resets it."""


@dataclass(frozen=True, slots=True)
class Supervision:
    """What becomes of environments that raise, hang, or whose process ends.

    Attributes:
        restart: Whether they are made anew, with a seed of (seed, environment, restart), and their episode
            ends as truncated; else what happened is raised.
        step_timeout_s: A worker that takes longer for a command is taken to hang, and is killed; None for
            no limit.
        start_timeout_s: Likewise a worker that takes longer to make its environments.
    """

    restart: bool = False
    step_timeout_s: float | None = None
    start_timeout_s: float = 300.0

    @classmethod
    def of(cls, on_env_error: str, step_timeout_s: float | None, start_timeout_s: float = 300.0) -> Supervision:
        """Returns what the arguments of a vector environment ask for.

        Raises:
            ConfigError: They can't work.
        """
        check_choice("on_env_error", on_env_error, ("raise", "restart"))
        if step_timeout_s is not None and not step_timeout_s > 0:
            raise ConfigError(
                "step_timeout_s is how long a worker may take for a step of its environments.",
                expected="seconds, more than 0, or None for no limit",
                got=repr(step_timeout_s),
                remedy="Leave it out, or pass several times what the slowest step takes.",
            )
        if not start_timeout_s > 0:
            raise ConfigError(
                "start_timeout_s is how long a worker may take to make its environments.",
                expected="seconds, more than 0",
                got=repr(start_timeout_s),
                remedy="Leave it out for 300 s, or pass several times what the slowest constructor takes.",
            )
        return cls(on_env_error == "restart", step_timeout_s, start_timeout_s)


RAISE = Supervision()
"""Nothing is restarted, and nothing takes too long."""


@dataclass(frozen=True, slots=True)
class PoolSpaces:
    """What a pool has learnt from its environments once they are made.

    Attributes:
        observation: Space of the first environment's observations.
        action: Space of the first environment's actions.
        metadata: Metadata of the first environment.
        render_mode: Render mode of the first environment.
        observations: The observation space of every environment, in order, only where they are not all
            equal; else empty.
        actions_differ: Index of an environment whose action space is another, or None.
    """

    observation: Space[Any]
    action: Space[Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    render_mode: str | None = None
    observations: tuple[Space[Any], ...] = ()
    actions_differ: int | None = None

    @classmethod
    def join(cls, parts: Sequence[tuple[int, PoolSpaces]]) -> PoolSpaces:
        """Joins what consecutive slices report: pairs of the number of environments and their spaces."""
        first = parts[0][1]
        every = [space for count, part in parts for space in (part.observations or (part.observation,) * count)]
        differ, start = None, 0
        for count, part in parts:
            if differ is None and part.action != first.action:
                differ = start
            if differ is None and part.actions_differ is not None:
                differ = start + part.actions_differ
            start += count
        same = all(part.observation == first.observation and not part.observations for _, part in parts)
        return cls(
            first.observation,
            first.action,
            first.metadata,
            first.render_mode,
            () if same else tuple(every),
            differ,
        )

    def misfit(self, space: Space[Any]) -> int | None:
        """Returns the index of an environment whose observations don't fit into arrays of `space`, or None."""
        for index, candidate in enumerate(self.observations or (self.observation,)):
            if not is_space_dtype_shape_equiv(candidate, space):
                return index
        return None


class NotReady(TimeoutError):
    """A wait that ended before what it waited for; an environment's own ``TimeoutError`` is none."""


class EnvPool(Protocol):
    """N environments, addressed by ids from 0 to N-1.

    `send`, `reset` and `ready` start something, `recv` returns its answer. At most one of them is under way
    for an environment, and the ids of a `recv` are those of one such call. Arrays in a
    :class:`~rayvec.data.StepBatch` may be views of memory that the next step of these environments
    overwrites: who keeps them copies them.
    """

    num_envs: int

    @property
    def layout(self) -> ArrayLayout | None:
        """How observations lie in arrays; None where they are objects, in arrays of ``dtype=object``."""
        ...

    @property
    def action_layout(self) -> ArrayLayout | None:
        """How actions lie in arrays; None where they are objects, in lists."""
        ...

    def send(self, env_ids: NDArray[np.int64], actions: Tree, autoreset: Autoreset) -> None:
        """Starts one step of some environments.

        Args:
            env_ids: Which, ``int64 [k]``, without repetition.
            actions: Tree of ``[k, *act_shape]`` in the order of `env_ids`, or a list of k objects.
            autoreset: When to reset those whose episode ends.
        """
        ...

    def recv(
        self,
        env_ids: NDArray[np.int64] | None = None,
        min_ready: int | None = None,
        timeout_s: float | None = None,
    ) -> StepBatch:
        """Waits for steps and returns their answers.

        Args:
            env_ids: Whose; all of those under way where it is left out.
            min_ready: Without `env_ids`: return as soon as this many are ready.
            timeout_s: How long to wait; for ever where it is left out.

        Returns:
            The answers in the order of `env_ids`, or in ascending order of ids.

        Raises:
            NotReady: They were not ready in time; the steps stay under way.
            WorkerLostError: A process that held some of them is gone.
            Exception: What an environment raised, its ``__cause__`` an ``EnvError``.
        """
        ...

    def reset(
        self, env_ids: NDArray[np.int64], seeds: Sequence[int | None], options: Mapping[str, Any] | None = None
    ) -> None:
        """Starts a reset of some environments, each with its seed; :meth:`recv` returns first observations."""
        ...

    def ready(self, env_ids: NDArray[np.int64], *, begin: bool = True) -> None:
        """Asks for current observations, which :meth:`recv` returns.

        Args:
            env_ids: Whose, ``int64 [k]``.
            begin: Whether environments that are between two episodes are reset first, without a seed.
        """
        ...

    def take_begun(self, batch: StepBatch) -> NDArray[np.int64]:
        """Returns ids of environments that began an episode since the last call, the newest answers being `batch`."""
        ...

    def call(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], env_ids: NDArray[np.int64]
    ) -> Callable[[float | None], list[Any]]:
        """Starts to call a method of each environment, or to get an attribute, through its wrappers.

        Returns:
            A function that waits for up to so many seconds and returns one result for each environment.
        """
        ...

    def set_attr(self, name: str, values: Sequence[Any], env_ids: NDArray[np.int64]) -> None:
        """Sets an attribute of each environment, through its wrappers, to its value."""
        ...

    def close(self) -> None:
        """Closes the environments and everything that ran them; may be called again."""
        ...


class Acting(Protocol):
    """The policies that a pool holds, by key."""

    @property
    def num_under_way(self) -> int:
        """How many chunks are under way."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether another may be asked for."""
        ...

    def load(self, key: int, policy: bytes, version: int = 0) -> None:
        """Takes a pickled policy that brings weights of a version along."""
        ...

    def publish(self, key: int, version: int, weights: NDArray[np.float32]) -> None:
        """Takes new weights of a policy, with which every chunk is taken that is asked for from now on."""
        ...

    def drop(self, key: int) -> None:
        """Forgets a policy and its weights."""
        ...


class ActingPool(EnvPool, Protocol):
    """All environments of a vector environment, in which policies can be let act."""

    steps_here: bool
    """Whether environments step in the driver's own process, while their answer is awaited."""

    @property
    def spaces(self) -> PoolSpaces:
        """What the environments say of themselves."""
        ...

    @property
    def acting(self) -> Acting:
        """The policies."""
        ...

    @property
    def topology(self) -> Topology:
        """Which node holds which environments."""
        ...

    @property
    def transports(self) -> tuple[str, ...]:
        """How each node is reached."""
        ...

    def allocate(self, observation: Space[Any], action: Space[Any]) -> None:
        """Makes the arrays for these spaces; before it, nothing can be stepped."""
        ...

    def begin_rollout(
        self, key: int, num_steps: int, first_step: int, noise_seed: int, *, by_reference: bool = False
    ) -> None:
        """Asks for a chunk of steps with a policy; :meth:`finish_rollout` returns it.

        Args:
            key: Of the policy.
            num_steps: T.
            first_step: How many steps the environments had taken in chunks before.
            noise_seed: Of the noise.
            by_reference: Whether the chunk stays in Ray's object store, and only its summary comes.
        """
        ...

    def finish_rollout(self, timeout_s: float | None = None) -> Rollout:
        """Waits for the oldest chunk that was asked for.

        Raises:
            NotReady: It takes longer; the chunk stays under way.
        """
        ...

    def worker_pids(self) -> dict[str, list[int]]:
        """Returns the processes of each node, by its name."""
        ...

    def close(self, timeout_s: float | None = None) -> None:
        """Closes everything; after so many seconds, 10 by default, by force."""
        ...
