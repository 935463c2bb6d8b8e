"""A model of what a step costs: costs that were fitted to few nodes predict many.

Everything here is a pure function of numbers. A step of all environments takes what the slowest worker's environments
take, and an overhead. With actions from the driver every step is a call; with actions in the workers a chunk of T steps
is one call, so its cost is divided by T. The overhead of a call is

- the CPU time that passes one after another: of the driver (per call and per node), of the process that owns one node's
  workers (per call and per worker) and of one worker (per call and per environment's step);
- a latency, and time per byte;
- on nodes that are *simulated* on one machine, a fitted share (`crowding`) of the CPU time of all other processes,
  divided by the cores that Ray's own processes and other work leave.

On a cluster every node has cores of its own, so only the driver's CPU time adds up over nodes. Decentralized ranks have
no driver: each owns the workers of its node and collects chunks from them, by shared memory.

A process that slept for long finds cold caches. So costs are fitted at two step durations, and predictions in between
are interpolated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np

__all__ = [
    "ASSUMPTIONS",
    "Cluster",
    "Costs",
    "Fit",
    "Observation",
    "Setting",
    "all_reduce_s",
    "expected_maximum",
    "fit",
    "fit_line",
    "predict_alone_s",
    "predict_step_s",
    "recommend",
    "settings_for",
    "steps_per_s",
]

ASSUMPTIONS = (
    "Every core of the cluster is as fast as those that were measured, and every worker has one of its own.",
    "The nodes' CPU work runs in parallel; the driver's adds up over nodes, and no other process uses its core.",
    "Step durations are independent of each other, and the slowest of many is that of a normal distribution.",
    "The network costs only the given latency and bandwidth; no packet is lost.",
    "Nodes do not fail, and weights are published so rarely that they cost nothing.",
    "Decentralized ranks wait for each other only in the all-reduce, which is a ring over the given network and is not "
    "hidden behind sampling.",
)
_CHUNKS = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Setting:
    """One way to step environments.

    Attributes:
        nodes: How many.
        workers: On each node.
        envs: Environments of each worker.
        inference: ``"driver"``, ``"worker"``, or ``"rank"``: workers act, and a rank on each node collects.
        chunk_steps: T of a chunk, unless the driver acts.
        groups: 1 or 2, with driver inference.
        step_s: Mean duration of a step.
        sigma: Standard deviation of the logarithm of durations.
        obs_bytes: Of an observation.
    """

    nodes: int
    workers: int
    envs: int = 1
    inference: str = "driver"
    chunk_steps: int = 128
    groups: int = 1
    step_s: float = 0.01
    sigma: float = 0.0
    obs_bytes: int = 16

    @property
    def num_envs(self) -> int:
        """In all."""
        return self.nodes * self.workers * self.envs

    @property
    def num_bytes(self) -> int:
        """Bytes sent in a step of all: observations, and 18 for reward, flags and action of each."""
        return self.num_envs * (self.obs_bytes + 18)

    @property
    def calls(self) -> float:
        """Calls of the driver for each step."""
        return 1.0 if self.inference == "driver" else 1.0 / self.chunk_steps

    @property
    def meant_s(self) -> float:
        """What a worker's environments take for a step without any overhead."""
        return self.envs * self.step_s

    @property
    def late_s(self) -> float:
        """How much longer than the mean the slowest worker's environments take, in chunks of several steps less."""
        jitter_s = self.step_s * math.sqrt(math.expm1(self.sigma**2))
        return expected_maximum(self.nodes * self.workers) * jitter_s * math.sqrt(self.envs * self.calls)


@dataclass(frozen=True)
class Observation:
    """A setting and what was measured of it, each per step of all environments.

    Attributes:
        setting: Which.
        step_s: Wall time.
        driver_s: CPU time of the driver.
        node_s: CPU time of a node's actor, or of a rank.
        worker_s: CPU time of a worker.
        others: Cores of this machine that other processes took: Ray's own, other work.
        slowest_s: Wall time of the slowest turn; `step_s` is that of the fastest.
    """

    setting: Setting
    step_s: float
    driver_s: float
    node_s: float
    worker_s: float
    others: float = 0.0
    slowest_s: float = 0.0

    @property
    def overhead_s(self) -> float:
        """Time per step less the step's own duration."""
        return self.step_s - self.setting.meant_s


@dataclass(frozen=True)
class Cluster:
    """What the nodes run on.

    Attributes:
        shared_cores: Cores that simulated nodes share; None where each node has its own.
        latency_s: One way through the network, in addition to what was measured.
        bytes_per_s: Bandwidth of the driver's network.
    """

    shared_cores: int | None = None
    latency_s: float = 0.0
    bytes_per_s: float = math.inf


@dataclass(frozen=True)
class Costs:
    """Costs in seconds, for one kind of inference and one step duration.

    Attributes:
        driver: CPU time of the driver: per call, per call and node, and per step.
        node: CPU time of a node's actor or of a rank: per call, per call and worker, and per step.
        worker: CPU time of a worker: per call, and per step of an environment.
        step_s: What a step takes longer than it is meant to.
        latency_s: Wall time per call beside CPU time: switches, wake-ups, queues.
        crowding: Wall time for each second of other processes' CPU time that is spread over shared cores.
        byte_s: Wall time per byte, both sides together.
    """

    driver: tuple[float, ...] = (0.0, 0.0, 0.0)
    node: tuple[float, ...] = (0.0, 0.0, 0.0)
    worker: tuple[float, ...] = (0.0, 0.0)
    step_s: float = 0.0
    latency_s: float = 0.0
    crowding: float = 0.0
    byte_s: float = 0.0

    def cpu_s(self, setting: Setting) -> tuple[float, float]:
        """Returns the CPU time of a step that passes one after another, and that of all processes."""
        calls = setting.calls
        driver_s = _dot(self.driver, (calls, calls * setting.nodes, 1.0))
        node_s = _dot(self.node, (calls, calls * setting.workers, 1.0))
        worker_s = _dot(self.worker, (calls, setting.envs))
        return driver_s + node_s + worker_s, driver_s + setting.nodes * (node_s + setting.workers * worker_s)


@dataclass(frozen=True)
class Fit:
    """Fitted costs.

    Attributes:
        costs: By kind of inference, at each fitted step duration, shortest first.
        policy_s: Of a forward pass, and of each of its rows; 0 without a policy.
        others: Cores that other processes take on a machine that simulates nodes, and more of them for each node.
        alone_s: Seconds of a step of an environment in a loop without rayvec, by step duration.
    """

    costs: dict[str, dict[float, Costs]]
    policy_s: tuple[float, ...] = (0.0, 0.0)
    others: tuple[float, ...] = (0.0, 0.0)
    alone_s: dict[float, float] = field(default_factory=dict)

    def free_cores(self, nodes: int, shared_cores: int) -> float:
        """Returns the cores left for steps on a machine that simulates so many nodes, at least half."""
        return max(0.5 * shared_cores, shared_cores - _dot(self.others, (1.0, nodes)))


def _dot(coefficients: Sequence[float], features: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(coefficients, features, strict=True))


def expected_maximum(count: float) -> float:
    """Returns about how many standard deviations the largest of `count` normal numbers lies above the mean.

    By G. Blom, Statistical estimates and transformed beta-variables, 1958: the quantile of (n - 3/8) / (n + 1/4).

    >>> [round(expected_maximum(n), 2) for n in (1, 2, 10, 100)]
    [0.0, 0.59, 1.55, 2.5]
    """
    return 0.0 if count <= 1 else NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def all_reduce_s(num_bytes: float, ranks: int, network: Cluster) -> float:
    """Returns how long ranks take to sum a gradient of so many bytes, in a ring.

    Each rank sends and receives 2 (R - 1) messages of 1/R of the bytes (P. Patarasuk and X. Yuan, Bandwidth optimal
    all-reduce algorithms for clusters of workstations, 2009).

    >>> all_reduce_s(4e6, 4, Cluster(latency_s=1e-4, bytes_per_s=1e9))
    0.0066
    """
    return 2 * (ranks - 1) * (network.latency_s + num_bytes / ranks / network.bytes_per_s)


def predict_step_s(found: Fit, setting: Setting, cluster: Cluster) -> float:
    """Returns the wall time of one step of all environments."""
    by_duration = found.costs[setting.inference]
    durations = list(by_duration)
    times = [_step_s(found, costs, setting, cluster) for costs in by_duration.values()]
    return float(np.interp(setting.step_s, durations, times))


def predict_alone_s(found: Fit, step_s: float) -> float:
    """Returns the wall time of a step of an environment in a loop without rayvec: a sleep lasts longer than asked."""
    overruns = [alone_s - asked_s for asked_s, alone_s in found.alone_s.items()]
    return step_s + float(np.interp(step_s, list(found.alone_s), overruns))


def _step_s(found: Fit, costs: Costs, setting: Setting, cluster: Cluster) -> float:
    in_line_s, all_s = costs.cpu_s(setting)
    step_s = setting.meant_s + setting.late_s + setting.envs * costs.step_s + in_line_s
    step_s += setting.calls * (costs.latency_s + 2.0 * cluster.latency_s)
    step_s += setting.num_bytes * (costs.byte_s + 1.0 / cluster.bytes_per_s)
    busy_s = 0.0
    if cluster.shared_cores is not None:
        free = found.free_cores(setting.nodes, cluster.shared_cores)
        step_s += costs.crowding * (all_s - in_line_s) / free
        busy_s = all_s / free
    rows = setting.num_envs / setting.groups if setting.inference == "driver" else setting.envs
    policy_s = _dot(found.policy_s, (1.0, rows))
    if setting.groups == 2:  # one group steps while the driver serves the other
        driver_s = _dot(costs.driver, (1.0, setting.nodes, 1.0))
        return max(busy_s, step_s - driver_s, 2.0 * (policy_s + driver_s))
    return max(busy_s, step_s + policy_s)


def steps_per_s(found: Fit, setting: Setting, cluster: Cluster) -> float:
    """Returns environment steps per second."""
    return setting.num_envs / predict_step_s(found, setting, cluster)


def settings_for(base: Setting, num_envs: int, most_workers: int) -> Iterator[Setting]:
    """Yields all ways to step so many environments on the nodes of `base` with equally many for each worker."""
    each = num_envs // base.nodes
    for workers in range(1, min(each, most_workers) + 1):
        if each % workers:
            continue
        setting = replace(base, workers=workers, envs=each // workers)
        for chunk_steps in _CHUNKS:
            yield replace(setting, inference="worker", chunk_steps=chunk_steps, groups=1)
        for groups in (1, 2) if setting.envs > 1 else (1,):
            yield replace(setting, inference="driver", groups=groups)


def recommend(found: Fit, base: Setting, num_envs: int, most_workers: int, cluster: Cluster) -> Setting:
    """Returns the setting with the most steps/s; of those within 2 % of it the one with the shortest chunks.

    Short chunks mean actions by newer weights.
    """
    rates = {each: steps_per_s(found, each, cluster) for each in settings_for(base, num_envs, most_workers)}
    good = [each for each, rate in rates.items() if rate > 0.98 * max(rates.values())]
    return min(good, key=lambda each: (each.chunk_steps * (each.inference == "worker"), -rates[each]))


def fit_line(
    features: Iterable[Sequence[float]], values: Sequence[float], relative_to: Sequence[float] | None = None
) -> tuple[float, ...]:
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
    return tuple(map(float, best))


def fit(
    observations: Sequence[Observation],
    shared_cores: int | None,
    policy_s: tuple[float, ...],
    alone_s: dict[float, float],
) -> Fit:
    """Fits costs to observations.

    Args:
        observations: Of every kind of inference at each of some step durations, of several numbers of nodes, workers
            and environments, and of two sizes of observations.
        shared_cores: Of the machine that simulated the nodes; None of a cluster.
        policy_s: Seconds of a forward pass, and of each row.
        alone_s: Seconds of a step of an environment in a loop without rayvec, by step duration.
    """
    others: tuple[float, ...] = (0.0, 0.0)
    if shared_cores is not None:
        taken = [each.others for each in observations]
        others = fit_line([(1.0, each.setting.nodes) for each in observations], taken, relative_to=[1.0] * len(taken))
    found = Fit({"driver": {}, "worker": {}, "rank": {}}, policy_s, others, alone_s)
    for inference, step_s in itertools.product(found.costs, sorted({each.setting.step_s for each in observations})):
        alike = [each for each in observations if (each.setting.inference, each.setting.step_s) == (inference, step_s)]
        found.costs[inference][step_s] = _fit_costs(alike, found, shared_cores)
    return found


def _fit_costs(observations: Sequence[Observation], found: Fit, shared_cores: int | None) -> Costs:
    small = min(each.setting.obs_bytes for each in observations)
    plain = [each for each in observations if each.setting.obs_bytes == small]  # large ones cost copies
    single = [each for each in plain if each.setting.envs == 1]  # several take longer, so that caches are colder
    driver = [(s.calls, s.calls * s.nodes, 1.0) for s in (each.setting for each in single)]
    node = [(s.calls, s.calls * s.workers, 1.0) for s in (each.setting for each in single)]
    worker = [(each.setting.calls, each.setting.envs) for each in plain]
    costs = Costs(
        driver=fit_line(driver, [each.driver_s for each in single]),
        node=fit_line(node, [each.node_s for each in single]),
        worker=fit_line(worker, [each.worker_s for each in plain]),
    )
    features, rest = [], []
    for each in observations:
        setting = each.setting
        in_line_s, all_s = costs.cpu_s(setting)
        free = math.inf if shared_cores is None else found.free_cores(setting.nodes, shared_cores)
        features.append((setting.envs, setting.calls, (all_s - in_line_s) / free, setting.num_bytes))
        rest.append(each.overhead_s - setting.late_s - in_line_s)
    step_s, latency_s, crowding, byte_s = fit_line(features, rest, [each.overhead_s for each in observations])
    return replace(costs, step_s=step_s, latency_s=latency_s, crowding=crowding, byte_s=byte_s)
