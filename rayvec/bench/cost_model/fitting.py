"""Fits the model's costs to measurements, of nodes that share this machine's cores or of a cluster's own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from rayvec.bench.cost_model.model import Costs, Cpu, Fit, Setting, known_s, shared_s

__all__ = ["Observation", "fit", "fit_line"]


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
        others: Cores of this machine that other processes took: Ray's own, other work.
        slowest_s: Wall time of the slowest turn; `step_s` is that of the fastest.
    """

    setting: Setting
    step_s: float
    work_s: float
    driver_s: float
    node_s: float
    worker_s: float
    spread_s: float
    others: float = 0.0
    slowest_s: float = 0.0

    @property
    def overhead_s(self) -> float:
        """Time per step less the step's own duration."""
        return self.step_s - self.setting.meant_s


def fit_line(
    features: Iterable[Sequence[float]], values: Sequence[float], relative_to: Sequence[float] | None = None
) -> list[float]:
    """Returns coefficients of at least 0 that explain the values.

    Least squares over every subset of the features, since there are few; the best without a negative coefficient.

    Args:
        features: A row for each value.
        values: To explain.
        relative_to: What the error of each is taken relative to; by default the values themselves.
    """
    y = np.array(values, float)
    weight = 1.0 / np.maximum(np.abs(y if relative_to is None else np.array(relative_to, float)), 1e-9)
    x, y = np.array(list(features), float) * weight[:, None], y * weight
    best, least = np.zeros(x.shape[1]), math.inf
    for size in range(1, x.shape[1] + 1):
        for columns in itertools.combinations(range(x.shape[1]), size):
            found, *_ = np.linalg.lstsq(x[:, columns], y, rcond=None)
            error = float(np.square(x[:, columns] @ found - y).sum())
            if (found >= 0).all() and error < 0.999 * least:
                best, least = np.zeros(x.shape[1]), error
                best[list(columns)] = found
    return [float(value) for value in best]


def fit(observations: Sequence[Observation], shared_cores: int | None, policy: tuple[float, float] = (0.0, 0.0)) -> Fit:
    """Fits costs to observations.

    Args:
        observations: Of both kinds of inference at each of some step durations, of several numbers of nodes, workers
            and environments, and of two sizes of observations.
        shared_cores: Of the machine that simulated the nodes; None of a cluster.
        policy: Seconds of a forward pass, and of each row.
    """
    others = (0.0, 0.0)
    if shared_cores is not None:
        nodes = [(1.0, each.setting.nodes) for each in observations]
        taken = [each.others for each in observations]
        constant, per_node = fit_line(nodes, taken, relative_to=[1.0] * len(taken))
        others = constant, per_node
    found = Fit({"driver": {}, "worker": {}}, *policy, *others)
    durations = sorted({each.setting.step_s for each in observations})
    for inference, step_s in itertools.product(found.costs, durations):
        alike = [each for each in observations if (each.setting.inference, each.setting.step_s) == (inference, step_s)]
        found.costs[inference][step_s] = _fit_costs(alike, found, shared_cores)
    return found


def _fit_costs(observations: Sequence[Observation], found: Fit, shared_cores: int | None) -> Costs:
    small = min(each.setting.obs_bytes for each in observations)
    plain = [each for each in observations if each.setting.obs_bytes == small]
    single = [each for each in plain if each.setting.envs == min(other.setting.envs for other in plain)]
    settings = [each.setting for each in plain]
    fewest = min(each.nodes * each.workers for each in settings)  # there no worker waits for a core
    alone = [each for each in plain if each.setting.nodes * each.setting.workers == fewest]
    worker_call_s, env_s = fit_line([(s.calls, s.envs) for s in settings], [each.worker_s for each in plain])
    costs = Costs(
        driver=_fit_cpu([(each.setting, each.setting.nodes, each.driver_s) for each in single]),
        node=_fit_cpu([(each.setting, each.setting.workers, each.node_s) for each in single]),
        worker=Cpu(worker_call_s, 0.0, env_s),
        oversleep_s=max(0.0, median(each.work_s / each.setting.envs - each.setting.step_s for each in alone)),
        spread_s=median(math.sqrt(max(0.0, each.spread_s**2 - each.setting.jitter_s**2)) for each in plain),
    )
    features, rest = [], []
    for each in observations:
        crowd_s = 0.0
        if shared_cores is not None:
            crowd_s = shared_s(costs, each.setting, found.free_cores(each.setting.nodes, shared_cores))
        features.append((each.setting.calls, crowd_s, each.setting.num_bytes))
        rest.append(each.step_s - known_s(costs, each.setting, shared_cores is not None))
    latency_s, crowding, byte_s = fit_line(features, rest, relative_to=[each.overhead_s for each in observations])
    fitted = {"latency_s": latency_s, "crowding": crowding, "byte_s": byte_s}
    return Costs(**{**vars(costs), **fitted})


def _fit_cpu(measured: Sequence[tuple[Setting, int, float]]) -> Cpu:
    """Returns the CPU time of a process from settings, the number of its parts, and its CPU time per step."""
    features = [(setting.calls, setting.calls * parts, 1.0) for setting, parts, _ in measured]
    return Cpu(*fit_line(features, [seconds for *_, seconds in measured]))
