"""A model of what a step costs: from costs that were fitted to few nodes, it predicts many.

Everything here is a pure function of numbers. A step of all environments takes the slowest worker's own work, which
the model knows from the step duration and its variance, and beside it:

- driver inference: a latency, the driver's CPU time (per call and per node), the node's (per frame and per worker),
  the worker's wake-up, and what bytes cost. A process that slept for long finds its caches cold, and takes longer;
- worker inference: per step the inference and bookkeeping of a worker, and per chunk of T steps a call (per chunk, per
  node, per byte), divided by T.

On a cluster every node has cores of its own, and only the driver's CPU time adds up over nodes. Nodes *simulated* on
one machine share its cores, of which Ray's own processes on each node, and whatever else runs there, take a part. Then
what all processes compute for a call, nodes and workers in one wave, is divided by the cores that are left; sleepers
that wake between two calls of a chunk wait for a core as often as all are taken, which is their share of the cores'
time; and nothing is quicker than all CPU time together spread over the cores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = [
    "ASSUMPTIONS",
    "Cluster",
    "Costs",
    "Fit",
    "Setting",
    "alone_s",
    "cpu_s",
    "expected_maximum",
    "jitter_s",
    "predict_step_s",
    "recommend",
    "settings_for",
    "shared_s",
    "slowest_s",
    "stepping_s",
    "steps_per_s",
]

ASSUMPTIONS = (
    "Every core of the cluster is as fast as those that were measured, and every worker has one of its own.",
    "The nodes' CPU work runs in parallel; the driver's adds up over nodes, and nothing else shares its core.",
    "Durations of steps are independent of each other, and the slowest of many is that of a normal distribution.",
    "The network is not the bottleneck beyond the latency and the bandwidth given; no packet is lost.",
    "Nodes do not fail, and weights are published so rarely that they cost nothing.",
)
_CHUNKS = (8, 16, 32, 64, 128, 256)
_COLD_AFTER_S = 0.01


@dataclass(frozen=True)
class Setting:
    """One way to step environments.

    Attributes:
        nodes: How many.
        workers: On each node.
        envs: Environments of each worker.
        inference: ``"driver"`` or ``"worker"``.
        chunk_steps: T of a chunk, where the workers choose actions.
        groups: 1 or 2, where the driver does.
        step_s: Mean duration of a step.
        sigma: Standard deviation of the logarithm of durations.
        obs_bytes: Of an observation.
        policy: Whether a net chooses actions, so that inference costs what it was measured to cost.
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
        """That travel in a step of all: observations, and 18 for reward, flags and action of each."""
        return self.num_envs * (self.obs_bytes + 18)

    @property
    def calls(self) -> float:
        """Calls of the driver for each step."""
        return 1.0 / self.chunk_steps if self.inference == "worker" else 1.0

    @property
    def rest(self) -> float:
        """For how much of 10 ms, after which caches are as cold as they get, processes sleep in a step."""
        return min(1.0, self.envs * self.step_s / _COLD_AFTER_S)


@dataclass(frozen=True)
class Cluster:
    """What the nodes run on.

    Attributes:
        shared_cores: Cores that simulated nodes share; None where each node has its own.
        latency_s: One way through the network, beside what was measured on one machine.
        bytes_per_s: Bandwidth of the driver's network.
    """

    shared_cores: int | None = None
    latency_s: float = 0.0
    bytes_per_s: float = math.inf


@dataclass(frozen=True)
class Costs:
    """Seconds, for one kind of inference; *per call* means per step from the driver, or per chunk.

    Attributes:
        call_s: Driver's CPU time per call.
        frame_s: Driver's CPU time per node and call.
        node_call_s: CPU time of a node's actor per call.
        node_worker_s: CPU time of a node's actor per worker and call.
        worker_call_s: CPU time of a worker per call.
        env_s: CPU time of a worker per step of an environment.
        oversleep_s: What a step takes longer than it is meant to.
        spread_s: Standard deviation of what a step takes.
        latency_s: Wall time per call beside CPU time: switches, wake-ups, waiting in queues.
        per_env_s: Wall time per step of an environment, likewise.
        crowding: Wall time for each second of CPU time of a call that is spread over shared cores.
        queueing: Wall time for each second of CPU time of a chunk's step that finds no core free.
        oversleep_share: What a step takes longer for each second of its duration, of 10 ms at most.
        byte_s: Wall time per byte that travels, both sides together.
        driver_cold: By what share a call takes the driver more CPU time after a sleep of 10 ms or more.
        node_cold: Likewise of a node's actor.
        worker_cold: Likewise of a worker, of its call and its steps.
        driver_idle: Cores that the driver takes between the calls of a chunk, for Ray's threads in it.
        node_idle: Likewise of a node's actor.
    """

    call_s: float = 0.0
    frame_s: float = 0.0
    node_call_s: float = 0.0
    node_worker_s: float = 0.0
    worker_call_s: float = 0.0
    env_s: float = 0.0
    oversleep_s: float = 0.0
    spread_s: float = 0.0
    latency_s: float = 0.0
    per_env_s: float = 0.0
    crowding: float = 1.0
    queueing: float = 1.0
    oversleep_share: float = 0.0
    byte_s: float = 0.0
    driver_cold: float = 0.0
    node_cold: float = 0.0
    worker_cold: float = 0.0
    driver_idle: float = 0.0
    node_idle: float = 0.0


@dataclass(frozen=True)
class Fit:
    """Costs by kind of inference, and of the inference itself.

    Attributes:
        driver: Where the driver chooses actions.
        worker: Where the workers do.
        policy_call_s: Of a forward pass.
        policy_row_s: Of each of its rows.
        others: Cores of a machine that simulates nodes which somebody else takes.
        others_per_node: Likewise for each node: Ray's own processes.
    """

    driver: Costs
    worker: Costs
    policy_call_s: float = 0.0
    policy_row_s: float = 0.0
    others: float = 0.0
    others_per_node: float = 0.0

    def of(self, setting: Setting) -> Costs:
        """Returns the costs of a setting's kind of inference."""
        return self.worker if setting.inference == "worker" else self.driver

    def policy_s(self, rows: float) -> float:
        """Returns what a forward pass of so many rows takes."""
        return self.policy_call_s + rows * self.policy_row_s

    def free_cores(self, nodes: int, shared_cores: int) -> float:
        """Returns the cores that are left for steps on a machine that simulates so many nodes.

        Half at least: whoever would always work gets no more of a core than whoever wants it as well.
        """
        return max(0.5 * shared_cores, shared_cores - self.others - nodes * self.others_per_node)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        return asdict(self)


def expected_maximum(count: float) -> float:
    """Returns about how many standard deviations the largest of `count` normal numbers lies above the mean.

    By G. Blom, Statistical estimates and transformed beta-variables, 1958: the quantile of (n - 3/8) / (n + 1/4).

    >>> [round(expected_maximum(n), 2) for n in (1, 2, 10, 100)]
    [0.0, 0.59, 1.55, 2.5]
    """
    from statistics import NormalDist

    return 0.0 if count <= 1 else NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def cpu_s(costs: Costs, setting: Setting) -> tuple[float, float, float]:
    """Returns the CPU time of the driver, of a node's actor and of a worker for calls, each per step of all.

    What a worker uses for its environments between two calls of a chunk is :func:`stepping_s`.
    """
    calls = setting.calls
    return (
        calls * (costs.call_s + setting.nodes * costs.frame_s) * (1.0 + costs.driver_cold * setting.rest),
        calls * (costs.node_call_s + setting.workers * costs.node_worker_s) * (1.0 + costs.node_cold * setting.rest),
        calls * costs.worker_call_s * (1.0 + costs.worker_cold * setting.rest),
    )


def stepping_s(costs: Costs, setting: Setting) -> float:
    """Returns the CPU time of a worker for a step of its environments."""
    return setting.envs * costs.env_s * (1.0 + costs.worker_cold * setting.rest)


def jitter_s(setting: Setting) -> float:
    """Returns the standard deviation of step durations as they are meant to be."""
    return setting.step_s * math.sqrt(math.expm1(setting.sigma**2))


def slowest_s(costs: Costs, setting: Setting) -> float:
    """Returns what the slowest worker's environments take, averaged over the steps between two calls."""
    steps = setting.envs / setting.calls  # of one worker between two calls
    spread = math.hypot(costs.spread_s, jitter_s(setting))
    late = expected_maximum(setting.nodes * setting.workers) * spread * math.sqrt(steps) * setting.calls
    over_s = costs.oversleep_s + costs.oversleep_share * min(setting.step_s, _COLD_AFTER_S)
    return setting.envs * (setting.step_s + over_s) + late


def alone_s(costs: Costs, setting: Setting) -> float:
    """Returns the CPU time that passes one after another also where cores are shared: driver's and own worker's."""
    call_s = setting.calls * costs.call_s * (1.0 + costs.driver_cold * setting.rest)
    return call_s + (stepping_s(costs, setting) if setting.inference == "worker" else 0.0)


def shared_s(costs: Costs, setting: Setting, shared_cores: int, free_cores: float) -> tuple[float, float]:
    """Returns what is spread over shared cores: the CPU time of a call's wave, and of steps that find no core free."""
    driver_s, node_s, worker_s = cpu_s(costs, setting)
    workers, own_s = setting.nodes * setting.workers, stepping_s(costs, setting)
    frames_s = driver_s - setting.calls * costs.call_s * (1.0 + costs.driver_cold * setting.rest)
    wave_s = frames_s + setting.nodes * node_s + workers * worker_s
    if setting.inference == "driver":
        return (wave_s + workers * own_s) / free_cores, 0.0
    stepped_s = setting.envs * (setting.step_s + costs.oversleep_s) + own_s
    idle = costs.driver_idle + setting.nodes * costs.node_idle
    taken = (workers * own_s / stepped_s + idle + shared_cores - free_cores) / shared_cores
    return wave_s / free_cores, own_s * min(1.0, taken)


def predict_step_s(found: Fit, setting: Setting, cluster: Cluster) -> float:
    """Returns the wall time of one step of all environments."""
    costs = found.of(setting)
    driver_s, node_s, worker_s = cpu_s(costs, setting)
    own_s = stepping_s(costs, setting)
    work_s = slowest_s(costs, setting) + setting.envs * costs.per_env_s
    busy_s = 0.0  # of each core
    if cluster.shared_cores is None:
        beside_s = driver_s + node_s + worker_s + own_s
    else:
        free_cores = found.free_cores(setting.nodes, cluster.shared_cores)
        wave_s, queue_s = shared_s(costs, setting, cluster.shared_cores, free_cores)
        beside_s = alone_s(costs, setting) + costs.crowding * wave_s + costs.queueing * queue_s
        busy_s = (driver_s + setting.nodes * (node_s + setting.workers * (worker_s + own_s))) / free_cores
    travel_s = setting.num_bytes * (costs.byte_s + 1.0 / cluster.bytes_per_s)
    travel_s += setting.calls * (costs.latency_s + 2.0 * cluster.latency_s)
    if setting.inference == "worker":
        policy_s = found.policy_s(setting.envs) if setting.policy else 0.0
        return max(busy_s, work_s + beside_s + travel_s + policy_s)
    policy_s = found.policy_s(setting.num_envs / setting.groups) if setting.policy else 0.0
    if setting.groups == 2:  # one group steps while the driver works for the other
        hidden_s = driver_s if cluster.shared_cores is None else alone_s(costs, setting)
        return max(busy_s, work_s + beside_s - hidden_s + travel_s, 2.0 * (policy_s + driver_s))
    return max(busy_s, work_s + beside_s + travel_s + policy_s)


def steps_per_s(found: Fit, setting: Setting, cluster: Cluster) -> float:
    """Returns environment steps per second."""
    return setting.num_envs / predict_step_s(found, setting, cluster)


def settings_for(base: Setting, num_envs: int, most_workers: int) -> Iterator[Setting]:
    """Yields all ways to step so many environments on the nodes of `base`, in which all workers have equally many."""
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


def recommend(found: Fit, base: Setting, num_envs: int, most_workers: int, cluster: Cluster) -> Setting:
    """Returns the quickest setting by the model; of those within 2 % of it the one with the shortest chunks.

    Short chunks mean actions by newer weights.
    """
    rated = [(steps_per_s(found, each, cluster), each) for each in settings_for(base, num_envs, most_workers)]
    best = max(rate for rate, _ in rated)
    chunk = {each: each.chunk_steps * (each.inference == "worker") for _, each in rated}
    return min(((chunk[each], -rate, each) for rate, each in rated if rate > 0.98 * best), key=lambda item: item[:2])[2]
