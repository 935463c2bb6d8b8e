"""Vector environments of Gymnasium and of Tianshou, which can step emulated environments too."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rayvec.bench.harness.emulated import clock_offsets
from rayvec.bench.harness.task import Adapter, Task

__all__ = ["GymnasiumVector", "TianshouVector"]


class GymnasiumVector(Adapter):
    """Gymnasium's own vector environments."""

    def __init__(self, task: Task, asynchronous: bool) -> None:
        self.num_envs = task.num_envs
        env_fns = [task.make] * task.num_envs
        self.env: Any = (
            gymnasium.vector.AsyncVectorEnv(env_fns, context="forkserver")
            if asynchronous
            else gymnasium.vector.SyncVectorEnv(env_fns)
        )
        self.env.reset(seed=0)
        self.transport = "pipe, shm" if asynchronous else "none"
        self.actions = task.actions(self.env.action_space)

    def advance(self) -> int:
        """Steps all."""
        self.env.step(self.next_actions())
        return self.num_envs

    def set_step(self, step_s: float, chunk_steps: int) -> None:
        """Sets how long emulated environments take."""
        self.env.set_attr("step_s", step_s)

    def clocks(self) -> list[NDArray[np.float64]]:
        """One worker for each environment, or one for all."""
        clocks = list(self.env.call("clock"))
        if self.transport == "none":
            joined = np.concatenate(clocks)
            return [joined[np.argsort(joined[:, 0])]]
        return clocks

    def close(self) -> None:
        """Ends it."""
        self.env.close()


class TianshouVector(Adapter):
    """Tianshou's; it does not reset by itself, so episodes begin anew through Gymnasium's wrapper."""

    def __init__(self, task: Task, kind: str) -> None:
        import tianshou.env

        if kind == "RayVectorEnv":
            import ray

            ray.init(address=task.address or "local", log_to_driver=False, logging_level=40)
        self.num_envs = task.num_envs
        make: Any = task.make if task.env_id is None else lambda: gymnasium.wrappers.Autoreset(task.make())
        self.env: Any = getattr(tianshou.env, kind)([make] * task.num_envs)
        self.env.seed(0)
        self.env.reset()
        self.transport = {"RayVectorEnv": "ray actors", "ShmemVectorEnv": "pipe, shm"}.get(kind, "pipe")
        self.actions = task.single_actions(task.make().action_space)

    def advance(self) -> int:
        """Steps all."""
        self.env.step(self.next_actions())
        return self.num_envs

    def set_step(self, step_s: float, chunk_steps: int) -> None:
        """Sets how long emulated environments take."""
        self.env.set_env_attr("step_s", step_s)

    def clocks(self) -> list[NDArray[np.float64]]:
        """One worker for each environment."""
        offsets = clock_offsets(self.env.get_env_attr)
        return [clock - offset for clock, offset in zip(self.env.get_env_attr("clock"), offsets, strict=True)]

    def close(self) -> None:
        """Ends it."""
        self.env.close()
