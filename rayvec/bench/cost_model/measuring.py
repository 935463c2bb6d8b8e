"""Measurements that the model is fitted to and compared with."""

from __future__ import annotations

import functools
import itertools
import statistics
import timeit
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.bench.cost_model.model import Fit, Observation, Setting, fit, fit_line
from rayvec.bench.harness.emulated import EmulatedEnv
from rayvec.bench.measured_processes import PeerProcess, peer_process
from rayvec.bench.results import Results
from rayvec.bench.simulate import Nodes, Place
from rayvec.bench.terminal import ticking
from rayvec.errors import ConfigError

__all__ = [
    "CHECK_NODES",
    "CHECK_WORKERS",
    "FIT_NODES",
    "FIT_WORKERS",
    "Measured",
    "check_settings",
    "fit_settings",
    "measure_alone",
    "measure_policy",
    "measure_settings",
]

FIT_NODES, FIT_WORKERS = (1, 2), (1, 2, 8)
"""What the model is fitted to. Two nodes of 8 workers crowd shared cores as much as the largest setting of a check."""
CHECK_NODES, CHECK_WORKERS = (4, 8), 2
_DURATIONS_S = (0.001, 0.01)
_CHUNKS = (16, 128)
_LARGE_OBS_BYTES = 40_000
_TURNS = 3
_ALONE_STEPS = 200
_CALLS_OF_WINDOW, _MOST_WINDOW_S = 4, 1.3


@dataclass
class Measured:
    """What a model is fitted to, as a result file keeps it.

    Attributes:
        observations: Of nodes: simulated, hosts, or of a cluster.
        shared_cores: Of the machine that they share; None of a cluster.
        policy_s: Seconds of a forward pass of the policy, and of each of its rows.
        alone_s: Seconds of a step of an environment in a loop without rayvec, by step duration.
        check_observations: What the fitted model is compared with, if that was measured.
        search_observations: Every setting for a few environments, likewise.
        checked_on: What nodes these two were measured on.
    """

    observations: list[Observation]
    shared_cores: int | None
    policy_s: tuple[float, ...] = (0.0, 0.0)
    alone_s: dict[float, float] = field(default_factory=dict)
    check_observations: list[Observation] = field(default_factory=list)
    search_observations: list[Observation] = field(default_factory=list)
    checked_on: Place = "simulated"

    def fit(self) -> Fit:
        """Fits the model."""
        return fit(self.observations, self.shared_cores, self.policy_s, self.alone_s)

    @classmethod
    def read(cls, path: Path) -> Measured:
        """Returns the measurements in a result file.

        Raises:
            ConfigError: It is no result file of ``rayvec bench model``, or holds no measurements.
        """
        content = Results.read(path, "model").extra
        try:
            if content.get("interrupted"):
                raise ValueError(f"interrupted after {len(content['observations'])} settings")
            found = cls(
                _observations(content["observations"]),
                content["shared_cores"],
                tuple(content["policy_s"]),
                {float(step_s): alone_s for step_s, alone_s in content["alone_s"].items()},
                _observations(content.get("check_observations", [])),
                _observations(content.get("search_observations", [])),
                content.get("checked_on", "simulated"),
            )
            if not any(each.setting.inference == "rank" for each in found.observations):
                raise ValueError("no decentralized rank was measured")
            return found
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                "--fit names a model.json that holds measurements.",
                expected="observations, shared_cores, policy_s and alone_s",
                got=f"{path} ({type(error).__name__}: {error})",
                remedy="Measure again, without --fit.",
            ) from error


def _observations(rows: Iterable[Mapping[str, Any]]) -> list[Observation]:
    return [Observation(**{**row, "setting": Setting(**row["setting"])}) for row in rows]


def _of_topology(base: Setting) -> Iterator[Setting]:
    """Yields what is measured on nodes and workers of one kind: from the driver, in chunks, on one node by a rank."""
    for step_s in _DURATIONS_S:
        yield replace(base, step_s=step_s, inference="driver")
        in_chunks = ("worker", "rank") if base.nodes == 1 else ("worker",)
        for inference, chunk_steps in itertools.product(in_chunks, _CHUNKS):
            yield replace(base, step_s=step_s, inference=inference, chunk_steps=chunk_steps)


def fit_settings(sigma: float = 0.0, obs_bytes: int = 16, most_workers: int = max(FIT_WORKERS)) -> list[Setting]:
    """Returns what the model is fitted to: one and two nodes, few and many workers, some with several environments."""
    counts = sorted({min(count, most_workers) for count in FIT_WORKERS})
    bases = [Setting(*pair, sigma=sigma, obs_bytes=obs_bytes) for pair in itertools.product(FIT_NODES, counts)]
    two = Setting(1, min(2, most_workers), sigma=sigma, obs_bytes=obs_bytes)
    bases += [replace(two, envs=4), replace(two, obs_bytes=max(_LARGE_OBS_BYTES, 2 * obs_bytes))]
    return [setting for base in bases for setting in _of_topology(base)]


def check_settings(sigma: float = 0.0, obs_bytes: int = 16) -> list[Setting]:
    """Returns what the fitted model is compared with: more nodes than it was fitted to."""
    bases = (Setting(nodes, CHECK_WORKERS, sigma=sigma, obs_bytes=obs_bytes) for nodes in CHECK_NODES)
    return [setting for base in bases for setting in _of_topology(base)]


def measure_settings(
    settings: Sequence[Setting],
    nodes: Nodes,
    cores: int,
    window_s: float,
    keep: Callable[[list[Observation]], None] = lambda found: None,
) -> list[Observation]:
    """Measures settings, interleaving those that share environments, and returns the fastest turn of each.

    The fastest, because other work on a machine only adds to what a step costs.

    Args:
        settings: What to measure.
        nodes: Simulated, hosts, or of a cluster.
        cores: Of each node.
        window_s: Seconds of each setting at least; every turn holds some calls too.
        keep: Called with all observations so far, whenever there are more.
    """
    found = []
    with ticking(len(settings) * _TURNS) as tick:
        for _, group in itertools.groupby(sorted(settings, key=_topology), _topology):
            alike = list(group)
            nodes.grow(alike[0].nodes, cores)
            turns: dict[Setting, list[Observation]] = {setting: [] for setting in alike}
            task = _task(alike[0], nodes.address)
            with peer_process("rayvec", nodes.environment, task, enter=nodes.enter) as (process, _):
                for setting in alike * _TURNS:
                    tick(f"{setting.nodes} nodes x {setting.workers} x {setting.envs}, {setting.inference}", 1.0)
                    turns[setting].append(_observe(process, setting, window_s / _TURNS))
            for each in turns.values():
                by_time = sorted(each, key=lambda observation: observation.step_s)
                found.append(replace(by_time[0], slowest_s=by_time[-1].step_s))
            keep(found)
    return found


def _topology(setting: Setting) -> tuple[Any, ...]:
    own = setting.inference == "rank"
    return own, setting.nodes, setting.workers, setting.envs, setting.obs_bytes, setting.groups, setting.sigma


def _task(setting: Setting, address: str) -> dict[str, Any]:
    return {
        "num_envs": setting.num_envs,
        "workers": setting.nodes * setting.workers,
        "nodes": 0 if setting.inference == "rank" else setting.nodes,
        "workers_per_node": setting.workers,
        "groups": setting.groups,
        "emulated": {"sigma": setting.sigma, "obs_size": setting.obs_bytes // 4},
        "address": None if setting.inference == "rank" else address,
    }


def _observe(process: PeerProcess, setting: Setting, window_s: float) -> Observation:
    is_rank = setting.inference == "rank"
    chunk_steps = setting.chunk_steps if setting.inference != "driver" or setting.groups == 2 else 1
    inference = "worker" if is_rank else setting.inference
    process.do("set_step", step_s=setting.step_s, chunk_steps=chunk_steps, inference=inference)
    seconds = max(window_s, min(_MOST_WINDOW_S, _CALLS_OF_WINDOW * chunk_steps * setting.meant_s))
    window = process.do("measure", seconds=seconds, with_split=False)
    steps = window["steps"] / setting.num_envs
    driver_s, node_s, worker_s = (window[f"{name}_cpu_s"] / steps for name in ("driver", "node", "worker"))
    return Observation(
        setting,
        step_s=window["elapsed_s"] / steps,
        driver_s=0.0 if is_rank else driver_s,
        node_s=(driver_s + node_s if is_rank else node_s) / setting.nodes,
        worker_s=worker_s / (setting.nodes * setting.workers),
        others=max(0.0, window["machine_cpu_s"] / steps - driver_s - node_s - worker_s) * steps / window["elapsed_s"],
    )


def measure_alone(sigma: float) -> dict[float, float]:
    """Returns the seconds of a step of an environment that this process steps in a loop, by step duration."""
    found = {}
    for step_s in _DURATIONS_S:
        env = EmulatedEnv(step_s, sigma=sigma)
        env.reset(seed=0)
        found[step_s] = timeit.timeit(functools.partial(env.step, 0), number=_ALONE_STEPS) / _ALONE_STEPS
    return found


def measure_policy(obs_size: int, hidden_size: int) -> tuple[float, ...]:
    """Returns seconds of a forward pass of a net of two tanh layers in NumPy, and of each of its rows."""
    if not hidden_size:
        return 0.0, 0.0
    shapes = (obs_size, hidden_size), (hidden_size, hidden_size), (hidden_size, 2)
    matrices = [np.full(shape, 0.1, np.float32) for shape in shapes]

    def forward(obs: NDArray[np.float32]) -> None:
        for matrix in matrices:
            obs = np.tanh(obs @ matrix)

    inputs = [np.zeros((rows, obs_size), np.float32) for rows in (1, 8, 64, 256)]
    times = [timeit.repeat(functools.partial(forward, obs), number=1, repeat=51) for obs in inputs]
    return fit_line([(1.0, len(obs)) for obs in inputs], list(map(statistics.median, times)))
