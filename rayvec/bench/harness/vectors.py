"""Gymnasium's own vector environments, which can step emulated environments too."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from numpy.typing import NDArray

from rayvec.bench.harness.task import Adapter, Task

__all__ = ["AsyncVector", "SyncVector"]


class SyncVector(Adapter):
    """Gymnasium's ``SyncVectorEnv``."""

    def __init__(self, task: Task) -> None:
        self.num_envs = task.num_envs
        self.env: Any = self._made([task.make] * task.num_envs)
        self.env.reset(seed=0)
        self.actions = task.actions(self.env.action_space)

    def _made(self, env_fns: list[Any]) -> Any:
        return SyncVectorEnv(env_fns)

    def advance(self) -> int:
        """Steps all."""
        self.env.step(self.next_actions())
        return self.num_envs

    def set_step(self, step_s: float, chunk_steps: int) -> None:
        """Sets how long emulated environments take."""
        self.env.set_attr("step_s", step_s)

    def clocks(self) -> list[NDArray[np.float64]]:
        """One worker for all environments."""
        joined = np.concatenate(self.env.call("clock"))
        return [joined[np.argsort(joined[:, 0])]]

    def close(self) -> None:
        """Ends it."""
        self.env.close()


class AsyncVector(SyncVector):
    """Gymnasium's ``AsyncVectorEnv``: one process for each environment."""

    transport = "pipe, shm"

    def _made(self, env_fns: list[Any]) -> Any:
        return AsyncVectorEnv(env_fns, context="forkserver")

    def clocks(self) -> list[NDArray[np.float64]]:
        """One worker for each environment."""
        return list(self.env.call("clock"))
