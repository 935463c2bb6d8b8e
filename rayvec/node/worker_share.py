"""What a worker gets of its machine: its GPUs, threads, and cores that no other worker uses."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise, takewhile
from pathlib import Path
from typing import NamedTuple

from rayvec.data.cores import usable_cores
from rayvec.data.resources import EnvResources
from rayvec.errors import ConfigError, counted

_CORE = "\0rayvec-core-{}"
"""A name that one process of the machine has at a time, until that process ends."""
_bound: list[socket.socket] = []


class WorkerShare(NamedTuple):
    """What one worker gets.

    Attributes:
        gpus: The GPUs that it sees, as ``CUDA_VISIBLE_DEVICES`` names them; None for all that its owner sees.
        threads: The threads of linear algebra, where the user has not set their number.
        cores: To how many cores it is bound; 0 for all that its owner has.
    """

    gpus: tuple[str, ...] | None = None
    threads: int = 1
    cores: int = 0

    def variables(self) -> dict[str, str]:
        """Returns the environment variables that differ from those of other workers."""
        if self.gpus is None:
            return {}
        found = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}
        if self.gpus and self.gpus[0].isdigit() and "MUJOCO_EGL_DEVICE_ID" not in os.environ:
            found["MUJOCO_EGL_DEVICE_ID"] = self.gpus[0]
        return found


def gpus_of_machine() -> int:
    """Returns how many GPUs NVIDIA's driver has found."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def visible_gpus() -> list[str]:
    """Returns the GPUs that this process may use: ``CUDA_VISIBLE_DEVICES``, or all of the machine if it is unset."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(gpus_of_machine())) if visible is None else map(str.strip, visible.split(","))
    return list(takewhile(lambda name: name not in ("", "-1"), names))  # CUDA reads no further, either


def check_here(resources: EnvResources, num_envs: int) -> None:
    """Checks that environments find what they need on this machine without Ray.

    Raises:
        ConfigError: They don't.
    """
    there = {"CPU": usable_cores(), "GPU": len(visible_gpus())}
    for name, amount in resources.claim(num_envs).items():
        if amount > there.get(name, 0):
            raise ConfigError(
                f"{counted(num_envs, 'environment')} need {amount:g} {name}, but this machine has "
                f"{there.get(name, 0)}. Make fewer environments, or lower cores_per_env or gpus_per_env. Resources by "
                "name belong to nodes of Ray: leave num_nodes=0 out."
            )


def worker_shares(
    resources: EnvResources | None, bounds: Sequence[int], gpus: Sequence[str] | None = None
) -> list[WorkerShare]:
    """Returns what each worker of a machine gets.

    Args:
        resources: What an environment needs; None for nothing.
        bounds: Worker k has the environments ``range(bounds[k], bounds[k + 1])``.
        gpus: The GPUs that are claimed for all environments; None for those that this process sees.

    Raises:
        ConfigError: A worker has environments of several GPUs.
    """
    if resources is None:
        return [WorkerShare()] * (len(bounds) - 1)
    gpus = visible_gpus() if gpus is None else gpus
    shares = []
    for first, stop in pairwise(bounds):
        seen = {tuple(resources.gpus_of(env - bounds[0], gpus)) for env in range(first, stop)}
        if resources.gpus and len(seen) > 1:
            raise ConfigError(
                f"A worker with {stop - first} environments of gpus_per_env={resources.gpus:g} needs several GPUs. "
                "Leave workers_per_node out: each environment then has a worker of its own."
            )
        cores = int(resources.cores) * (stop - first)
        shares.append(WorkerShare(seen.pop() if resources.gpus else None, max(1, int(resources.cores)), cores))
    return shares


def bind_cores(count: int) -> None:
    """Binds this process, and what it starts, to cores to which no other worker of this machine is bound.

    Where there are too few of them, it may use all cores.
    """
    locks: dict[int, socket.socket] = {}
    for core in sorted(os.sched_getaffinity(0)):
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with suppress(OSError):  # it is another worker's
            lock.bind(_CORE.format(core))
            locks[core] = lock
        if len(locks) == count:
            os.sched_setaffinity(0, locks)
            _bound.extend(locks.values())
            return
