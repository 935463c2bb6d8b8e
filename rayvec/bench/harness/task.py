"""What an adapter steps, and the methods that the host calls on it."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rayvec.bench.harness.clocked import Clocked
from rayvec.bench.harness.emulated import EmulatedEnv

__all__ = ["ACTION_BATCHES", "Adapter", "Task", "receive", "reported"]

ACTION_BATCHES = 64
"""Batches of random actions that are drawn beforehand."""


@dataclass(frozen=True)
class Task:
    """What to step, and how.

    Attributes:
        num_envs: In all.
        workers: Processes in all, for peers that put several environments into one.
        nodes: Of the cluster, for adapters that use one.
        workers_per_node: Likewise.
        env_id: Gymnasium's; None for emulated environments.
        emulated: Arguments of :class:`EmulatedEnv`.
        inference: Of rayvec: ``"driver"`` or ``"worker"``.
        chunk_steps: T of a chunk of rayvec.
        groups: Of rayvec.
        prefetch: Whether rayvec collects the next chunk while it returns this one.
        address: Of a Ray cluster.
        clock_dir: Where real environments record when they step; None if they don't.
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
    address: str | None = None
    clock_dir: str | None = None

    def make(self) -> gymnasium.Env[Any, Any]:
        """Makes one environment."""
        if self.env_id is None:
            return EmulatedEnv(**(self.emulated or {}))
        module, _, name = self.env_id.rpartition(":")
        if module:  # some versions of Gymnasium fail when they import it a second time
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


@contextlib.contextmanager
def reported(pipe: Connection) -> Iterator[None]:
    """Sends an exception that is raised inside to the process at the other end."""
    try:
        yield
    except Exception as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
        raise


def receive(pipe: Connection) -> Any:
    """Returns what a process sends.

    Raises:
        RuntimeError: The process raised, or it exited.
    """
    try:
        found = pipe.recv()
    except EOFError:
        raise RuntimeError("a process of the benchmark exited") from None
    if isinstance(found, RuntimeError):
        raise found
    return found


class Adapter(ABC):
    """Something that steps environments.

    Attributes:
        num_envs: How many.
        transport: How actions and observations travel.
        actions: Batches that `next_actions` alternates between.
        spans_nodes: Whether it uses all nodes of a cluster.
        resets_within_steps: Whether an environment is reset in the step that ends its episode, not by the next call.
    """

    num_envs: int
    transport: str = "none"
    actions: list[Any]
    spans_nodes = False
    resets_within_steps = False
    _count = 0

    @abstractmethod
    def advance(self) -> int:
        """Takes some steps; returns how many in all."""

    def settle(self) -> None:  # noqa: B027
        """Waits for prefetched work, which is not counted."""

    def wake(self) -> None:  # noqa: B027
        """Resumes processes that `rest` stopped."""

    def rest(self) -> None:  # noqa: B027
        """Stops whatever would use CPU while others are measured."""

    def set_step(self, step_s: float, chunk_steps: int) -> None:
        """Sets how long emulated environments take."""
        raise NotImplementedError

    def set_inference(self, inference: str) -> None:
        """Sets where actions are chosen from now on."""
        raise NotImplementedError

    def steps_ahead(self) -> list[int] | None:
        """Steps of each worker in a chunk, where chunks are prefetched; else None."""
        return None

    def kinds_cpu_s(self) -> tuple[float, float]:
        """CPU time so far of the node actors, and of the workers, where known."""
        return 0.0, 0.0

    def clocks(self) -> list[NDArray[np.float64]]:
        """When the steps of each worker began and ended, of emulated environments."""
        raise NotImplementedError

    def worker_pids(self) -> list[int] | None:
        """The workers' process ids in the order of their environments, where the division of time needs them."""
        return None

    def call_inference_s(self) -> NDArray[np.float64] | None:
        """Seconds of inference of each worker in the last call; None where workers choose no actions."""
        return None

    def own_split(self) -> dict[str, float] | None:
        """Share of each state in the time so far, of adapters that record it themselves."""
        return None

    def packing_s(self) -> float:
        """Seconds of packing in each call, where known."""
        return 0.0

    @abstractmethod
    def close(self) -> None:
        """Ends it."""

    def next_actions(self) -> Any:
        """Returns the next batch."""
        self._count = (self._count + 1) % len(self.actions)
        return self.actions[self._count]
