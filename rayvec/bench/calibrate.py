"""Measurements that the model is fitted to and held against."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rayvec.bench.model import Observation, Setting

if TYPE_CHECKING:
    from rayvec.bench.peers import PeerProcess
    from rayvec.bench.simulate import Nodes
    from rayvec.bench.terminal import Ticker

__all__ = ["CHECK_NODES", "check_settings", "fit_settings", "measure_policy", "measure_settings"]

CHECK_NODES, CHECK_WORKERS = (4, 8), 2
_DURATIONS_S = (0.01, 0.001)
_CHUNKS = (16, 128)
_LARGE_OBS_BYTES = 40_000
_CALLS_OF_WINDOW = 12


def _of_topology(base: Setting, durations_s: Sequence[float] = _DURATIONS_S) -> Iterator[Setting]:
    """Yields what is measured on nodes and workers of one kind, from the driver and in chunks."""
    for step_s in durations_s:
        yield replace(base, step_s=step_s, inference="driver")
        for chunk_steps in _CHUNKS:
            yield replace(base, step_s=step_s, inference="worker", chunk_steps=chunk_steps)


def fit_settings(sigma: float = 0.0, obs_bytes: int = 16) -> list[Setting]:
    """Returns what the model is fitted to: one and two nodes, few workers, some with several environments."""
    found: list[Setting] = []
    for nodes in (1, 2):
        for workers in (1, 2, 4):
            found += _of_topology(Setting(nodes, workers, sigma=sigma, obs_bytes=obs_bytes))
    found += _of_topology(Setting(1, 2, envs=4, sigma=sigma, obs_bytes=obs_bytes), (0.001,))
    found += _of_topology(Setting(1, 2, sigma=sigma, obs_bytes=max(_LARGE_OBS_BYTES, 2 * obs_bytes)), (0.001,))
    return found


def check_settings(sigma: float = 0.0, obs_bytes: int = 16) -> list[Setting]:
    """Returns what the fitted model is held against: more nodes than it was fitted to."""
    found: list[Setting] = []
    for nodes in CHECK_NODES:
        found += _of_topology(Setting(nodes, CHECK_WORKERS, sigma=sigma, obs_bytes=obs_bytes))
    return found


def measure_settings(
    settings: Sequence[Setting], nodes: Nodes, cores: int, window_s: float, ticker: Ticker
) -> list[Observation]:
    """Measures settings, those that can share environments one after another.

    Args:
        settings: What to measure.
        nodes: Simulated, or of a cluster.
        cores: Of each node.
        window_s: Seconds of a window at least; it holds some calls too.
        ticker: Advanced by 1 for each setting.
    """
    from rayvec.bench.peers import peer_process

    found = []
    with ExitStack() as stack:
        process, current = None, None
        for setting in sorted(settings, key=_topology):
            nodes.grow(setting.nodes, cores)
            if _topology(setting) != current:
                stack.close()
                task = _task(setting, nodes.address)
                process, _ = stack.enter_context(peer_process("rayvec", nodes.environment, task))
                current = _topology(setting)
            assert process is not None
            ticker.say(f"{setting.nodes} nodes x {setting.workers} x {setting.envs}, {setting.inference}")
            found.append(_observe(process, setting, window_s))
            ticker.advance(1.0)
    return found


def _topology(setting: Setting) -> tuple[Any, ...]:
    return setting.nodes, setting.workers, setting.envs, setting.obs_bytes, setting.groups, setting.sigma


def _task(setting: Setting, address: str) -> dict[str, Any]:
    return {
        "num_envs": setting.num_envs,
        "workers": setting.nodes * setting.workers,
        "nodes": setting.nodes,
        "workers_per_node": setting.workers,
        "groups": setting.groups,
        "emulated": {"sigma": setting.sigma, "obs_size": setting.obs_bytes // 4},
        "address": address,
    }


def _observe(process: PeerProcess, setting: Setting, window_s: float) -> Observation:
    chunk_steps = setting.chunk_steps if setting.inference == "worker" or setting.groups == 2 else 1
    process.do("set_step", step_s=setting.step_s, chunk_steps=chunk_steps, inference=setting.inference)
    seconds = max(window_s, min(4.0, _CALLS_OF_WINDOW * chunk_steps * setting.envs * setting.step_s))
    window = process.do("measure", seconds=seconds, with_split=True)
    steps = window["steps"] / setting.num_envs
    return Observation(
        setting,
        step_s=window["elapsed_s"] / steps,
        work_s=window["split"]["environment"] * window["elapsed_s"] / steps,
        driver_s=window["driver_cpu_s"] / steps,
        node_s=window["node_cpu_s"] / steps / setting.nodes,
        worker_s=window["worker_cpu_s"] / steps / (setting.nodes * setting.workers),
    )


def measure_policy(obs_size: int, hidden_size: int) -> tuple[float, float]:
    """Returns seconds of a forward pass of a net of two tanh layers in NumPy, and of each of its rows."""
    from rayvec.bench.hosted.adapters import Task
    from rayvec.bench.hosted.emulated import EmulatedEnv
    from rayvec.bench.model import fit_line

    matrices = Task(1, hidden_size=hidden_size).net(EmulatedEnv(obs_size=obs_size).observation_space)
    sizes, times = (1, 8, 64, 256), []
    for rows in sizes:
        obs, samples = np.zeros((rows, obs_size), np.float32), []
        for _ in range(51):
            begin = time.perf_counter()
            hidden = obs
            for matrix in matrices:
                hidden = np.tanh(hidden @ matrix)
            samples.append(time.perf_counter() - begin)
        times.append(float(np.median(samples)))
    call_s, row_s = fit_line([(1.0, rows) for rows in sizes], times)
    return call_s, row_s
