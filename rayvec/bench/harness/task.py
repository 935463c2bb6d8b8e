"""What is to be stepped, and the few methods that whoever steps it has."""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rayvec.bench.harness.clocked import Clocked
from rayvec.bench.harness.emulated import EmulatedSpec

__all__ = ["ACTION_BATCHES", "Adapter", "Task", "receive", "told"]

ACTION_BATCHES = 64
"""Batches of random actions that are drawn beforehand."""


@dataclass(frozen=True)
class Task:
    """What to step, and how.

    Attributes:
        num_envs: In all.
        workers: Processes in all, where a peer can put several environments into one.
        nodes: Of the cluster, for those who know of nodes.
        workers_per_node: Likewise.
        env_id: Gymnasium's; None for emulated environments.
        emulated: Arguments of :class:`EmulatedSpec`.
        inference: Of ours: ``"driver"`` or ``"worker"``.
        chunk_steps: T of a chunk of ours.
        groups: Of ours.
        prefetch: Whether ours takes chunks as a prefetching collector does: the next one while this one is handed over.
        hidden_size: Units of two hidden layers of a net that ours evaluates; 0 for none.
        address: Of a Ray cluster.
        clock_dir: Where real environments write down when they step; None if they don't.
    """

    num_envs: int
    workers: int = 1
    nodes: int | None = None
    workers_per_node: int | None = None
    env_id: str | None = None
    emulated: dict[str, Any] | None = None
    inference: str = "driver"
    chunk_steps: int = 1
    groups: int = 1
    prefetch: bool = False
    hidden_size: int = 0
    address: str | None = None
    clock_dir: str | None = None

    def make(self) -> gymnasium.Env[Any, Any]:
        """Makes one environment."""
        if self.env_id is None:
            return EmulatedSpec(**(self.emulated or {}))()
        module, _, name = self.env_id.rpartition(":")
        if module:  # Gymnasium's own import goes wrong in some versions when it is repeated
            __import__(module)
        env = gymnasium.make(name)
        return env if self.clock_dir is None else Clocked(env, self.clock_dir)

    def actions(self, space: Any) -> list[Any]:
        """Returns batches of random actions from a batched space."""
        space.seed(0)
        return [space.sample() for _ in range(ACTION_BATCHES)]

    def single_actions(self, space: Any) -> list[Any]:
        """Returns batches of random actions from the space of one environment."""
        space.seed(0)
        return [np.stack([space.sample() for _ in range(self.num_envs)]) for _ in range(ACTION_BATCHES)]

    def net(self, space: Any) -> tuple[NDArray[np.float32], ...]:
        """Returns the matrices of a net from observations to one number for each of two actions."""
        sizes = [int(np.prod(space.shape)), self.hidden_size, self.hidden_size, 2]
        rng = np.random.default_rng(0)
        return tuple(rng.normal(0, 0.1, pair).astype(np.float32) for pair in itertools.pairwise(sizes))


@contextlib.contextmanager
def told(pipe: Connection) -> Iterator[None]:
    """Tells whoever waits at the other end what is raised here."""
    try:
        yield
    except Exception as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
        raise


def receive(pipe: Connection) -> Any:
    """Returns what a process sends.

    Raises:
        RuntimeError: What it raised, or that it has ended.
    """
    try:
        found = pipe.recv()
    except EOFError:
        raise RuntimeError("one of its processes has ended") from None
    if isinstance(found, RuntimeError):
        raise found
    return found


class Adapter(ABC):
    """Something that steps environments.

    Attributes:
        num_envs: How many.
        transport: How actions and observations travel.
        actions: Batches to take in turns.
        resets_within_steps: Whether an environment whose episode ends is reset at once, and not by the next call.
    """

    num_envs: int
    transport: str
    actions: list[Any]
    resets_within_steps = False
    _count = 0

    @abstractmethod
    def advance(self) -> int:
        """Takes some steps; returns how many in all."""

    def settle(self) -> None:
        """Waits for what has been begun ahead, which nobody counts."""
        return

    def wake(self) -> None:
        """Begins its turn: processes that rested go on."""
        return

    def rest(self) -> None:
        """Ends its turn: whatever would work while others are measured stops."""
        return

    def set_step(self, step_s: float, chunk_steps: int) -> None:
        """Sets how long emulated environments take."""
        raise NotImplementedError

    def steps_ahead(self) -> list[int] | None:
        """Steps of each worker in a chunk, where the next chunk is begun while this one is handed over; else None."""
        return None

    def set_inference(self, inference: str) -> None:
        """Sets who chooses actions from now on, where there is a choice."""
        raise NotImplementedError

    def kinds_cpu_s(self) -> tuple[float, float]:
        """CPU time so far of what stands between the driver and the workers, and of the workers, where it is known."""
        return 0.0, 0.0

    def clocks(self) -> list[NDArray[np.float64]]:
        """When the steps of each worker began and ended, of emulated environments."""
        raise NotImplementedError

    def worker_pids(self) -> list[int] | None:
        """The workers' processes in the order of their environments, where that matters to the division of time."""
        return None

    def call_inference_s(self) -> NDArray[np.float64] | None:
        """Seconds of inference of each worker in the last call; None where the workers choose no actions."""
        return None

    def packing_s(self) -> float:
        """Seconds of packing in each call, where that is known."""
        return 0.0

    @abstractmethod
    def close(self) -> None:
        """Ends it."""

    def next_actions(self) -> Any:
        """Returns the next batch."""
        self._count = (self._count + 1) % len(self.actions)
        return self.actions[self._count]
