"""Gymnasium's own vector environments, which can step emulated environments too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from rayvec.bench.harness.task import Adapter, Task

__all__ = ["AsyncVector", "SyncVector"]


class SyncVector(Adapter):
    """Gymnasium's ``SyncVectorEnv``."""

    kind: Callable[..., Any] = SyncVectorEnv

    def __init__(self, task: Task) -> None:
        self.num_envs = task.num_envs
        self.env: Any = type(self).kind([task.make] * task.num_envs)
        self.env.reset(seed=0)
        self.actions = task.actions()

    def advance(self) -> int:
        """Steps all."""
        self.env.step(self.next_actions())
        return self.num_envs

    def set_step(self, step_s: float, chunk_steps: int, inference: str | None) -> None:
        """Sets how long emulated environments take."""
        self.env.set_attr("step_s", step_s)

    def close(self) -> None:
        """Ends it."""
        self.env.close()


class AsyncVector(SyncVector):
    """Gymnasium's ``AsyncVectorEnv``: one process for each environment."""

    transport = "pipe, shm"
    kind = partial(AsyncVectorEnv, context="forkserver")
