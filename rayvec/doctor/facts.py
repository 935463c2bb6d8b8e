"""What is read on a node to examine it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pickle
import platform
import resource
import shutil
import socket
import statistics
import threading
import timeit
from typing import Any

from rayvec import __version__
from rayvec.cluster.node_facts import started_with
from rayvec.data.cores import quota_cores
from rayvec.envs.step_time import StepTime, measure_step
from rayvec.node.worker_share import gpus_of_machine

_PACKAGES = ("ray", "numpy", "gymnasium", "torch", "tianshou")
_CONNECT_S, _SERVE_S, _ROUNDS = 5.0, 60.0, 50


def read_facts() -> dict[str, Any]:
    """Returns what this process finds on its machine, as plain values.

    Returns:
        ``versions`` by package, "missing" where it is; ``cores`` that the process may use, and ``quota_cores`` of its
        container; ``niceness``; ``files``, the most that it may open, -1 without a limit; ``shm_free`` and
        ``shm_total`` in bytes; ``gpus`` of the machine, and ``visible_gpus``, the value of ``CUDA_VISIBLE_DEVICES``
        with which Ray has started this process, None where it is unset.
    """
    versions = {"python": platform.python_version(), "rayvec": __version__} | dict.fromkeys(_PACKAGES, "missing")
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    shm_total, _, shm_free = shutil.disk_usage("/dev/shm")
    return {
        "versions": versions,
        "cores": len(os.sched_getaffinity(0)),
        "quota_cores": quota_cores(),
        "niceness": os.nice(0),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "shm_free": shm_free,
        "shm_total": shm_total,
        "gpus": gpus_of_machine(),
        "visible_gpus": started_with().get("CUDA_VISIBLE_DEVICES"),
    }


def echo(address: str) -> int:
    """Starts a thread that accepts one connection and returns what it receives; returns its port."""
    server = socket.create_server((address, 0))
    server.settimeout(_SERVE_S)
    threading.Thread(target=_serve, args=(server,), daemon=True).start()
    return int(server.getsockname()[1])


def _serve(server: socket.socket) -> None:
    with contextlib.suppress(OSError), server, server.accept()[0] as connection:
        while data := connection.recv(64):
            connection.sendall(data)


def round_trip(address: str, port: int) -> float | str:
    """Returns the median round trip to an `echo` in seconds, or what went wrong."""
    try:
        with socket.create_connection((address, port), _CONNECT_S) as connection:
            exchange = 'connection.sendall(b"x"); connection.recv(1)'
            return statistics.median(timeit.repeat(exchange, globals=locals(), number=1, repeat=_ROUNDS))
    except OSError as error:
        return f"{type(error).__name__}: {error}"


def measure_env(factory: bytes) -> StepTime | str:
    """Makes an environment by a pickled factory and steps it; returns its times, or what it raised."""
    try:
        with contextlib.closing(pickle.loads(factory).make(0)) as env:
            return measure_step(env)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
