"""Fits the model's costs to measurements, of nodes that share this machine's cores or of a cluster's own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rayvec.bench.cost_model.model import Costs, Fit, Setting, alone_s, cpu_s, jitter_s, shared_s, slowest_s, stepping_s

__all__ = ["Observation", "fit", "fit_line"]

_LEAST_CROWDING = 0.5
"""Half of a call's CPU time is used on the way there, before the last environment begins: no step hides that."""
_COLDS = tuple(0.05 * step for step in range(41))
"""By what shares calls may take longer after a sleep; the one that explains most is taken."""


@dataclass(frozen=True)
class Observation:
    """A setting and what was measured of it, each per step of all environments.

    Attributes:
        setting: Which.
        step_s: Wall time.
        work_s: Time that a worker's environments took, sleep and oversleep.
        driver_s: CPU time of the driver.
        node_s: CPU time of a node's actor.
        worker_s: CPU time of a worker.
        spread_s: Standard deviation of what an environment's step takes.
        others: Cores of this machine that were taken by anybody else: Ray's own processes, other work.
        turns_s: Wall time of each turn, of which the quickest is this one.
    """

    setting: Setting
    step_s: float
    work_s: float
    driver_s: float
    node_s: float
    worker_s: float
    spread_s: float
    others: float = 0.0
    turns_s: tuple[float, ...] = ()


def fit_line(
    features: Sequence[Sequence[float]], values: Sequence[float], relative_to: Sequence[float] | None = None
) -> list[float]:
    """Returns coefficients of at least 0 that explain the values.

    Least squares over every subset of the features, since there are few; the best with no negative coefficient.

    Args:
        features: A row for each value.
        values: To explain.
        relative_to: What the error of each is taken relative to; by default the values themselves.
    """
    x, y = np.array(features, float), np.array(values, float)
    weight = 1.0 / np.maximum(np.abs(y if relative_to is None else np.array(relative_to, float)), 1e-9)
    best, least = np.zeros(x.shape[1]), math.inf
    for size in range(1, x.shape[1] + 1):
        for columns in itertools.combinations(range(x.shape[1]), size):
            found, *_ = np.linalg.lstsq(x[:, columns] * weight[:, None], y * weight, rcond=None)
            if (found < 0).any():
                continue
            error = float((((x[:, columns] @ found) - y) * weight) @ (((x[:, columns] @ found) - y) * weight))
            if error < 0.999 * least:
                best, least = np.zeros(x.shape[1]), error
                best[list(columns)] = found
    return [float(value) for value in best]


def fit(observations: Sequence[Observation], shared_cores: int | None, policy: tuple[float, float] = (0.0, 0.0)) -> Fit:
    """Fits costs to observations.

    Args:
        observations: Of both kinds of inference, of some numbers of nodes, workers and environments, and of two
            sizes of what an environment returns.
        shared_cores: Of the machine that simulated the nodes; None of a cluster.
        policy: Seconds of a forward pass, and of each row.
    """
    others, per_node = 0.0, 0.0
    if shared_cores is not None and observations:
        counts = [(1.0, each.setting.nodes) for each in observations]
        others, per_node = fit_line(counts, _of(observations, "others"), relative_to=[1.0] * len(counts))
    found = Fit(Costs(), Costs(), *policy, others, per_node)
    driver, worker = (
        _fit_kind([each for each in observations if each.setting.inference == kind], found, shared_cores)
        for kind in ("driver", "worker")
    )
    return replace(found, driver=driver, worker=worker)


def _fit_kind(observations: Sequence[Observation], found: Fit, shared_cores: int | None) -> Costs:
    small = min((each.setting.obs_bytes for each in observations), default=0)
    plain = [each for each in observations if each.setting.obs_bytes == small]
    if not plain:
        return Costs()
    fewest = min(each.setting.nodes * each.setting.workers for each in plain)  # there nobody waits for a core
    alone = [each for each in plain if each.setting.nodes * each.setting.workers == fewest]
    late = [max(1e-9, each.work_s / each.setting.envs - each.setting.step_s) for each in alone]
    oversleep_s, oversleep_share = fit_line([(1.0, each.setting.step_s) for each in alone], late)
    spreads = [math.sqrt(max(0.0, each.spread_s**2 - jitter_s(each.setting) ** 2)) for each in plain]
    costs = replace(
        _fit_cpu(plain),
        oversleep_s=oversleep_s,
        oversleep_share=oversleep_share,
        spread_s=float(np.median(spreads)),
    )
    return _fit_wall(costs, observations, found, shared_cores)


def _fit_cpu(plain: Sequence[Observation]) -> Costs:
    """Returns the costs in CPU time, which was measured of each process by itself."""
    in_chunks = plain[0].setting.inference == "worker"
    rows = [(each.setting.calls, each.setting) for each in plain]
    driver = _fit_process([(c, c * s.nodes) for c, s in rows], plain, "driver_s", idles=in_chunks)
    node = _fit_process([(c, c * s.workers) for c, s in rows], plain, "node_s", idles=in_chunks)
    worker = _fit_process([(c, s.envs) for c, s in rows], plain, "worker_s", idles=False)
    return Costs(
        *(*driver[:2], *node[:2], *worker[:2]),
        driver_cold=driver[2],
        node_cold=node[2],
        worker_cold=worker[2],
        driver_idle=driver[3],
        node_idle=node[3],
    )


def _fit_process(
    features: Sequence[tuple[float, float]], plain: Sequence[Observation], name: str, *, idles: bool
) -> tuple[float, float, float, float]:
    """Returns what explains the CPU time of a process: two costs, how much cold caches add, and what it takes idly.

    From the driver every step is a call, and what grows with a step's duration can't be told from cold caches.

    Args:
        features: What the costs are paid for in each observation.
        plain: The observations.
        name: Of the CPU time.
        idles: Whether a share of the time is looked for that the process takes without any call.
    """
    values = np.array(_of(plain, name))
    best, least = (0.0, 0.0, 0.0, 0.0), math.inf
    for cold in _COLDS:
        factors = [1.0 + cold * each.setting.rest for each in plain]
        x = [
            (factor * first, factor * second, each.step_s if idles else 0.0)
            for (first, second), factor, each in zip(features, factors, plain, strict=True)
        ]
        found = fit_line(x, values.tolist())
        error = float(np.square((np.array(x) @ found - values) / np.maximum(values, 1e-9)).sum())
        if error < 0.999 * least:
            best, least = (found[0], found[1], cold, found[2]), error
    return best


def _fit_wall(costs: Costs, observations: Sequence[Observation], found: Fit, shared_cores: int | None) -> Costs:
    """Returns costs with what wall time there is beside CPU time; errors are weighed by the overhead."""
    overheads = [each.step_s - each.setting.envs * each.setting.step_s for each in observations]
    rest, features = [], []
    for each in observations:
        setting = each.setting
        known_s, shared = slowest_s(costs, setting) + alone_s(costs, setting), (0.0, 0.0)
        if shared_cores is None:
            known_s = slowest_s(costs, setting) + sum(cpu_s(costs, setting)) + stepping_s(costs, setting)
        else:
            shared = shared_s(costs, setting, shared_cores, found.free_cores(setting.nodes, shared_cores))
        rest.append(each.step_s - known_s)
        features.append((setting.calls, setting.envs, *shared, setting.num_bytes))
    latency_s, per_env_s, crowding, queueing, byte_s = fit_line(features, rest, relative_to=overheads)
    if shared_cores is not None and crowding < _LEAST_CROWDING:
        crowding = _LEAST_CROWDING
        rest = [each - crowding * waits[2] for each, waits in zip(rest, features, strict=True)]
        others = [(*waits[:2], *waits[3:]) for waits in features]
        latency_s, per_env_s, queueing, byte_s = fit_line(others, rest, relative_to=overheads)
    return replace(costs, latency_s=latency_s, per_env_s=per_env_s, crowding=crowding, queueing=queueing, byte_s=byte_s)


def _of(observations: Sequence[Observation], name: str) -> list[Any]:
    return [getattr(each, name) for each in observations]
