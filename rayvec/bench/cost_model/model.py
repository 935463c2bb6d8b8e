"""A model of what a step costs: costs that were fitted to few nodes predict many.

Everything here is a pure function of numbers. A step of all environments takes the slowest worker's own step, which
follows from the step duration and its variance, plus an overhead:

- driver inference: every step is a call. It takes CPU time of the driver (per call and per node), of a node's actor
  (per call and per worker) and of a worker (per call and per environment), a latency, and time per byte;
- worker inference: the same per chunk of T steps, divided by T, and per step the worker's own bookkeeping.

On a cluster every node has cores of its own, and only the driver's CPU time adds up over nodes. Nodes *simulated* on
one machine share its cores, of which Ray's own processes on each node and other work take a part: there the CPU time
of all processes is divided by the cores that are left, and a fitted share of that, `crowding`, adds to each step.

A process that slept for long finds cold caches. So costs are fitted at two step durations, and predictions in between
are interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist

__all__ = [
    "ASSUMPTIONS",
    "Cluster",
    "Costs",
    "Cpu",
    "Fit",
    "Setting",
    "cpu_s",
    "expected_maximum",
    "known_s",
    "predict_step_s",
    "recommend",
    "settings_for",
    "shared_s",
    "steps_per_s",
]

ASSUMPTIONS = (
    "Every core of the cluster is as fast as those that were measured, and every worker has one of its own.",
    "The nodes' CPU work runs in parallel; the driver's adds up over nodes, and no other process uses its core.",
    "Step durations are independent of each other, and the slowest of many is that of a normal distribution.",
    "The network costs only the given latency and bandwidth; no packet is lost.",
    "Nodes do not fail, and weights are published so rarely that they cost nothing.",
)
_CHUNKS = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Setting:
    """One way to step environments.

    Attributes:
        nodes: How many.
        workers: On each node.
        envs: Environments of each worker.
        inference: ``"driver"`` or ``"worker"``.
        chunk_steps: T of a chunk, with worker inference.
        groups: 1 or 2, with driver inference.
        step_s: Mean duration of a step.
        sigma: Standard deviation of the logarithm of durations.
        obs_bytes: Of an observation.
        policy: Whether a net chooses actions, so that inference costs what was measured for it.
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
    policy: bool = False

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
        return 1.0 / self.chunk_steps if self.inference == "worker" else 1.0

    @property
    def meant_s(self) -> float:
        """What a worker's environments take for a step without any overhead."""
        return self.envs * self.step_s

    @property
    def jitter_s(self) -> float:
        """Standard deviation of step durations."""
        return self.step_s * math.sqrt(math.expm1(self.sigma**2))


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
class Cpu:
    """CPU time of one process in seconds: per call, per call and part (node, worker), and per step of its parts."""

    call_s: float = 0.0
    part_s: float = 0.0
    step_s: float = 0.0

    def per_step_s(self, calls: float, parts: int, steps: int = 1) -> float:
        """Returns the CPU time in a step of all environments."""
        return calls * (self.call_s + parts * self.part_s) + steps * self.step_s


@dataclass(frozen=True)
class Costs:
    """Costs in seconds, for one kind of inference and one step duration.

    Attributes:
        driver: CPU time of the driver; its parts are nodes.
        node: CPU time of a node's actor; its parts are workers.
        worker: CPU time of a worker, per call and per step of an environment.
        oversleep_s: What a step takes longer than it is meant to.
        spread_s: Standard deviation of what a step takes.
        latency_s: Wall time per call beside CPU time: switches, wake-ups, queues.
        crowding: Wall time for each second of CPU time that is spread over shared cores.
        byte_s: Wall time per byte, both sides together.
    """

    driver: Cpu = Cpu()
    node: Cpu = Cpu()
    worker: Cpu = Cpu()
    oversleep_s: float = 0.0
    spread_s: float = 0.0
    latency_s: float = 0.0
    crowding: float = 1.0
    byte_s: float = 0.0


@dataclass(frozen=True)
class Fit:
    """Fitted costs.

    Attributes:
        costs: By kind of inference, at each fitted step duration, shortest first.
        policy_call_s: Of a forward pass.
        policy_row_s: Of each of its rows.
        others: Cores that other processes take on a machine that simulates nodes.
        others_per_node: Likewise for each node: Ray's own processes.
    """

    costs: dict[str, dict[float, Costs]]
    policy_call_s: float = 0.0
    policy_row_s: float = 0.0
    others: float = 0.0
    others_per_node: float = 0.0

    def free_cores(self, nodes: int, shared_cores: int) -> float:
        """Returns the cores left for steps on a machine that simulates so many nodes, at least half."""
        return max(0.5 * shared_cores, shared_cores - self.others - nodes * self.others_per_node)


def expected_maximum(count: float) -> float:
    """Returns about how many standard deviations the largest of `count` normal numbers lies above the mean.

    By G. Blom, Statistical estimates and transformed beta-variables, 1958: the quantile of (n - 3/8) / (n + 1/4).

    >>> [round(expected_maximum(n), 2) for n in (1, 2, 10, 100)]
    [0.0, 0.59, 1.55, 2.5]
    """
    return 0.0 if count <= 1 else NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def cpu_s(costs: Costs, setting: Setting) -> tuple[float, float, float]:
    """Returns the CPU time of the driver, of a node's actor and of a worker in a step of all."""
    return (
        costs.driver.per_step_s(setting.calls, setting.nodes),
        costs.node.per_step_s(setting.calls, setting.workers),
        costs.worker.per_step_s(setting.calls, 0, setting.envs),
    )


def known_s(costs: Costs, setting: Setting, is_shared: bool) -> float:
    """Returns what a step takes without latency, crowding and bytes.

    That is the slowest worker's environments, averaged over the steps between two calls, and CPU time that passes one
    after another: of driver, node and worker on a cluster, of the driver's call alone on shared cores.
    """
    steps = setting.envs / setting.calls  # of one worker between two calls
    spread = math.hypot(costs.spread_s, setting.jitter_s)
    late_s = expected_maximum(setting.nodes * setting.workers) * spread * math.sqrt(steps) * setting.calls
    in_line_s = setting.calls * costs.driver.call_s if is_shared else sum(cpu_s(costs, setting))
    return setting.meant_s + setting.envs * costs.oversleep_s + late_s + in_line_s


def shared_s(costs: Costs, setting: Setting, free_cores: float) -> float:
    """Returns the CPU time of all processes in a step, spread over the free cores."""
    driver_s, node_s, worker_s = cpu_s(costs, setting)
    return (driver_s + setting.nodes * (node_s + setting.workers * worker_s)) / free_cores


def predict_step_s(fit: Fit, setting: Setting, cluster: Cluster) -> float:
    """Returns the wall time of one step of all environments."""
    by_duration = list(fit.costs[setting.inference].items())
    (short_s, short), (long_s, long) = by_duration[0], by_duration[-1]
    first_s = _step_s(fit, short, setting, cluster)
    if setting.meant_s <= short_s or short_s == long_s:
        return first_s
    weight = min(1.0, (setting.meant_s - short_s) / (long_s - short_s))
    return (1.0 - weight) * first_s + weight * _step_s(fit, long, setting, cluster)


def _step_s(fit: Fit, costs: Costs, setting: Setting, cluster: Cluster) -> float:
    driver_s = cpu_s(costs, setting)[0]
    step_s = known_s(costs, setting, cluster.shared_cores is not None)
    step_s += setting.num_bytes * (costs.byte_s + 1.0 / cluster.bytes_per_s)
    step_s += setting.calls * (costs.latency_s + 2.0 * cluster.latency_s)
    busy_s, hidden_s = 0.0, driver_s
    if cluster.shared_cores is not None:
        busy_s = shared_s(costs, setting, fit.free_cores(setting.nodes, cluster.shared_cores))
        step_s += costs.crowding * busy_s
        hidden_s = setting.calls * costs.driver.call_s
    policy_s = 0.0
    if setting.policy:
        rows = setting.envs if setting.inference == "worker" else setting.num_envs / setting.groups
        policy_s = fit.policy_call_s + rows * fit.policy_row_s
    if setting.groups == 2 and setting.inference == "driver":  # one group steps while the driver serves the other
        return max(busy_s, step_s - hidden_s, 2.0 * (policy_s + driver_s))
    return max(busy_s, step_s + policy_s)


def steps_per_s(fit: Fit, setting: Setting, cluster: Cluster) -> float:
    """Returns environment steps per second."""
    return setting.num_envs / predict_step_s(fit, setting, cluster)


def settings_for(base: Setting, num_envs: int, most_workers: int) -> Iterator[Setting]:
    """Yields all ways to step so many environments on the nodes of `base` with equally many for each worker."""
    each = num_envs // base.nodes
    for workers in range(1, min(each, most_workers) + 1):
        if each % workers:
            continue
        setting = replace(base, workers=workers, envs=each // workers)
        for chunk_steps in _CHUNKS:
            yield replace(setting, inference="worker", chunk_steps=chunk_steps, groups=1)
        yield replace(setting, inference="driver", groups=1)
        if setting.envs > 1:
            yield replace(setting, inference="driver", groups=2)


def recommend(fit: Fit, base: Setting, num_envs: int, most_workers: int, cluster: Cluster) -> Setting:
    """Returns the setting with the most steps/s; of those within 2 % of it the one with the shortest chunks.

    Short chunks mean actions by newer weights.
    """
    rates = {each: steps_per_s(fit, each, cluster) for each in settings_for(base, num_envs, most_workers)}
    good = [each for each, rate in rates.items() if rate > 0.98 * max(rates.values())]
    return min(good, key=lambda each: (each.chunk_steps * (each.inference == "worker"), -rates[each]))
