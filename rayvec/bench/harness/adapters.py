"""Who can step environments, by name.

Each imports its library when it is made, so that a library that is missing is missing for its own peer alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rayvec.bench.harness.floors import ClusterFloor, Floor
from rayvec.bench.harness.foreign import Rllib, envpool, stable_baselines3, torchrl
from rayvec.bench.harness.puffer import pufferlib
from rayvec.bench.harness.task import Adapter, Task
from rayvec.bench.harness.vectors import GymnasiumVector, TianshouVector

__all__ = ["ADAPTERS"]


def _ours(task: Task) -> Adapter:
    from rayvec.bench.harness.ours import Ours

    return Ours(task)


ADAPTERS: dict[str, Callable[[Task], Any]] = {
    "floor": Floor,
    "cluster-floor": ClusterFloor,
    "rayvec": _ours,
    "gymnasium-sync": lambda task: GymnasiumVector(task, asynchronous=False),
    "gymnasium-async": lambda task: GymnasiumVector(task, asynchronous=True),
    "tianshou-subproc": lambda task: TianshouVector(task, "SubprocVectorEnv"),
    "tianshou-shmem": lambda task: TianshouVector(task, "ShmemVectorEnv"),
    "tianshou-ray": lambda task: TianshouVector(task, "RayVectorEnv"),
    "stable-baselines3": stable_baselines3,
    "envpool": envpool,
    "pufferlib": pufferlib,
    "torchrl": torchrl,
    "rllib": Rllib,
}
"""What steps environments, by the name it has on the command line."""
