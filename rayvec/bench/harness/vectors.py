"""Vector environments: those of any library, and Gymnasium's own, which can step emulated environments too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from rayvec.bench.harness.task import Adapter, Task

__all__ = ["AsyncVector", "SyncVector", "VectorAdapter"]


class VectorAdapter(Adapter):
    """A vector environment of any library, which has `step` and `close`."""

    def __init__(self, env: Any, num_envs: int, transport: str, actions: list[Any]) -> None:
        self.env, self.num_envs, self.transport, self.actions = env, num_envs, transport, actions

    def advance(self) -> int:
        """Steps all."""
        self.env.step(self.next_actions())
        return self.num_envs

    def close(self) -> None:
        """Ends it."""
        self.env.close()


class SyncVector(VectorAdapter):
    """Gymnasium's ``SyncVectorEnv``."""

    kind: Callable[..., Any] = SyncVectorEnv

    def __init__(self, task: Task) -> None:
        super().__init__(type(self).kind([task.make] * task.num_envs), task.num_envs, self.transport, task.actions())
        self.env.reset(seed=0)

    def set_step(self, step_s: float, chunk_steps: int, inference: str | None) -> None:
        """Sets how long emulated environments take."""
        self.env.set_attr("step_s", step_s)


class AsyncVector(SyncVector):
    """Gymnasium's ``AsyncVectorEnv``: one process for each environment."""

    transport = "pipe, shm"
    kind = partial(AsyncVectorEnv, context="forkserver")
