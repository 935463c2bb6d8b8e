"""What an adapter steps, and the methods that the host calls on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rayvec.bench.harness.emulated import EmulatedEnv
from rayvec.bench.harness.recording import Clocked

__all__ = ["ACTION_BATCHES", "Adapter", "Task"]

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
        hidden_sizes: Of the policy net that chooses actions; without any they are random.
        address: Of a Ray cluster.
        clock_dir: Where environments record when they step; None if they don't.
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
    hidden_sizes: tuple[int, ...] = ()
    address: str | None = None
    clock_dir: str | None = None

    def make(self) -> gymnasium.Env[Any, Any]:
        """Makes one environment."""
        module, _, name = (self.env_id or "").rpartition(":")
        if module:  # some versions of Gymnasium fail when they import it a second time
            __import__(module)
        env = gymnasium.make(name) if name else EmulatedEnv(**(self.emulated or {}))
        return env if self.clock_dir is None else Clocked(env, self.clock_dir)

    def actions(self) -> list[NDArray[Any]]:
        """Returns batches of random actions."""
        space = self.make().action_space
        space.seed(0)
        return [np.stack([space.sample() for _ in range(self.num_envs)]) for _ in range(ACTION_BATCHES)]


class Adapter(ABC):
    """Something that steps environments.

    Attributes:
        num_envs: How many.
        transport: How actions and observations travel.
        actions: Batches that `next_actions` alternates between.
        spans_nodes: Whether it uses all nodes of a cluster.
        resets_within_steps: Whether an environment is reset in the step that ends its episode, not by the next call.
        node_pids: Processes by Ray's id of their node: its actor, then its workers in the order of their
            environments; empty where that is not known.
    """

    num_envs: int
    transport: str = "none"
    actions: list[Any]
    spans_nodes = False
    resets_within_steps = False
    node_pids: dict[str, list[int]] = {}  # noqa: RUF012
    _count = 0

    @abstractmethod
    def advance(self) -> int:
        """Takes some steps; returns how many in all."""

    @abstractmethod
    def close(self) -> None:
        """Ends it."""

    def settle(self) -> None:  # noqa: B027
        """Waits for prefetched work, which is not counted."""

    def wake(self) -> None:  # noqa: B027
        """Resumes processes that `rest` stopped."""

    def rest(self) -> None:  # noqa: B027
        """Stops whatever would use CPU while others are measured."""

    def set_step(self, step_s: float, chunk_steps: int, inference: str | None) -> None:
        """Sets how long emulated environments take, and where actions are chosen if that is to change."""
        raise NotImplementedError

    def steps_ahead(self) -> list[int] | None:
        """Steps of each worker in a chunk, where chunks are prefetched; else None."""
        return None

    def call_inference_s(self) -> NDArray[np.float64] | None:
        """Seconds of inference of each worker in the last call; None where that is not known."""
        return None

    def network_bytes(self) -> int:
        """Bytes that crossed from node to node in the last call, as far as messages of rayvec count."""
        return 0

    def packing_s(self) -> float:
        """Seconds of packing in each call, where known."""
        return 0.0

    def next_actions(self) -> Any:
        """Returns the next batch."""
        self._count = (self._count + 1) % len(self.actions)
        return self.actions[self._count]
