"""The settings of ``rayvec bench``: the options of its subcommands, with no code that measures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from rayvec.config.base import Count, NonNegative, Positive
from rayvec.config.schema import Bounds
from rayvec.errors import ConfigError

__all__ = [
    "LEARNER_STEPS",
    "PRICES",
    "Compare",
    "Cost",
    "LearnerBench",
    "Model",
    "Scaling",
    "check_any",
    "jitter_sigma",
]

PRICES = Path(__file__).with_name("prices_2023.yaml")
LEARNER_STEPS = {"ppo": 64, "sac": 4, "impala": 64}
"""Steps of each environment in the batch of ``rayvec bench learner``, by algorithm."""


@dataclass(frozen=True, kw_only=True)
class _Emulated:
    """What commands that emulate cores have in common."""

    step_duration: tuple[Positive, ...] = (1.0, 0.1, 0.01, 0.001)
    """Seconds that an environment takes for a step."""

    jitter: str | None = None
    """How durations vary around their mean, such as lognormal:0.5; unset: not at all."""

    obs_size: Count = 4
    """Numbers in an observation, float32."""

    address: str | None = None
    """Measure on the Ray cluster at this address; unset: simulate nodes on this machine."""


@dataclass(frozen=True, kw_only=True)
class Scaling(_Emulated):
    """Measure steps/s over nodes and step durations, beside peers and independent processes.

    Without --address the nodes are simulated on this machine: environments that sleep emulate cores. With --hosts,
    hosts in network namespaces are measured beside them.
    """

    nodes: tuple[Count, ...] = (1, 2, 4)
    """Numbers of nodes."""

    cores_per_node: Count = 8
    """Environments on each node, one for each core."""

    inference: tuple[Literal["driver", "worker"], ...] = ("driver", "worker")
    """Where rayvec's policy acts: in the driver at every step, or in the workers for whole chunks."""

    learners: tuple[Literal["driver", "decentralized"], ...] | None = None
    """Where steps go: to the driver, as inference says; or to one decentralized rank on each node, which sums
    gradients with the others; unset: to the driver, with --hosts both."""

    peer: tuple[str, ...] = ("gymnasium-async",)
    """Measured beside rayvec: gymnasium-sync, gymnasium-async, or module:name of an adapter that Python can import.
    The upper bound (independent processes) is always measured."""

    work: Literal["sleep", "busy"] = "sleep"
    """Whether a step sleeps, like a core of its own, or uses that much CPU time."""

    chunk_steps: Count | None = None
    """Steps of a chunk; unset: about two seconds' worth, at most 128."""

    repeats: Count = 3
    """Windows of each cell, alternating with windows of the upper bound."""

    window: Positive = 1.5
    """Shortest window in seconds; a window holds at least 20 steps, or 6 where a step takes half a second or more."""

    quick: bool = False
    """At most 2 nodes, steps of at most 0.1 s, short windows, and no third-party peers: under three minutes."""

    resume: Path | None = None
    """Continue this result file with its own settings."""

    hosts: bool = False
    """Also measure on hosts, beside simulated nodes: network namespaces of this machine, each with an address of its
    own; needs root."""

    out: Path = Path("runs/bench-scaling")
    """Directory for scaling.json, scaling.csv and the plots."""

    def narrowed(self) -> Scaling:
        """Returns the settings that apply, with the limits of --quick."""
        if not self.quick:
            return self
        return replace(
            self,
            nodes=tuple(n for n in self.nodes if n <= 2) or (min(self.nodes),),
            step_duration=tuple(d for d in self.step_duration if d <= 0.1) or (min(self.step_duration),),
            peer=tuple(name for name in self.peer if ":" not in name),
            repeats=min(self.repeats, 2),
            window=min(self.window, 0.8),
        )


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Measure steps/s and steps per CPU-second of rayvec and its peers, in real environments with random actions.

    Every peer is measured with each number of environments; its best row is marked. Then each starts once more with
    environments that record when they step, to divide its time.
    """

    env_id: tuple[str, ...] = ("CartPole-v1",)
    """Gymnasium ids, such as CartPole-v1 HalfCheetah-v5 ale_py:ALE/Breakout-v5."""

    peer: tuple[str, ...] = ("upper-bound", "gymnasium-sync", "gymnasium-async")
    """Measured beside rayvec: upper-bound (independent processes, one per core), gymnasium-sync, gymnasium-async,
    process-pool (rayvec's pool of one node, without Ray), rayvec-tcp (rayvec on a simulated node that is not the
    driver's), or module:name of an adapter that Python can import."""

    peer_venv: tuple[str, ...] = ()
    """Virtual environments of peers, each name=path; those in RAYVEC_BENCH_VENVS, separated by colons, count too."""

    reference: str = "upper-bound"
    """The peer that each row is divided by; its windows alternate with the row's."""

    num_envs: tuple[Count, ...] = (8, 64)
    """Numbers of environments."""

    hidden_sizes: tuple[Count, ...] = ()
    """Hidden layers of the policy net that chooses rayvec's actions; unset: actions are random, as in the peers."""

    workers: Count | None = None
    """Processes or threads of peers that put several environments into one; unset: one per core."""

    repeats: Count = 3
    """Windows of each row."""

    window: Positive = 1.0
    """Seconds of a window."""

    out: Path = Path("runs/bench-compare")
    """Directory for compare.json and compare.csv; existing files are replaced."""


@dataclass(frozen=True, kw_only=True)
class LearnerBench:
    """Measure samples/s of updates over ranks, beside as many threads of one process, and plain DDP.

    A sample is a row of a minibatch; efficiency is samples/s over those of one rank times the number of ranks.
    """

    num_learners: tuple[Count, ...] = (1, 2, 4)
    """Numbers of ranks, or of threads."""

    scaling: Literal["strong", "weak"] = "strong"
    """Whether the batch keeps its size, or grows with the number of ranks."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where updates are computed; with cuda each rank has a GPU of its own."""

    algorithm: tuple[Literal["ppo", "sac", "impala"], ...] | None = None
    """Algorithms to measure; unset: PPO, SAC and IMPALA, with --images PPO and IMPALA."""

    way: tuple[Literal["ranks", "processes", "shared-memory", "gloo", "threads", "ddp", "share"], ...] = (
        "ranks", "threads", "ddp"
    )  # fmt: skip
    """ranks, processes: rayvec's LearnerGroup, on Ray and without it; shared-memory, gloo: its learner on processes
    that hold their part of the batch already, with sums by either; threads: one process; ddp: DistributedDataParallel,
    written by hand; share: one rank's share of the batch without the other ranks, which bounds what ranks can gain."""

    minibatch_size: tuple[Count, ...] | None = None
    """Rows of a minibatch, of one rank where the scaling is weak; unset: 1,024, or the batch if it is smaller. PPO's
    and IMPALA's are parts of the batch: at most num_envs times num_steps, and for IMPALA at least num_steps."""

    num_envs: Count = 64
    """Environments of the batch, of one rank where the scaling is weak."""

    num_steps: Count | None = None
    """Steps of each environment in the batch; unset: 64 for PPO and IMPALA, 4 for SAC."""

    hidden_sizes: tuple[Count, ...] = (64, 64)
    """Units in each hidden layer."""

    obs_size: Count = 17
    """Numbers in an observation."""

    images: bool = False
    """Observations are four frames of 84x84 pixels, for a Nature-CNN (PPO and IMPALA)."""

    compile: bool = False
    """Compile the gradients of rayvec's learners."""

    window: Positive = 2.0
    """Seconds of each row at least; two updates at least."""

    address: str | None = None
    """Of a running Ray cluster; unset: ranks on this machine."""

    out: Path = Path("runs/bench-learner")
    """Directory for learner.json and learner.csv; existing files are replaced."""


@dataclass(frozen=True, kw_only=True)
class Model(_Emulated):
    """Predict steps/s on a larger cluster from measurements on one and two nodes.

    Recommends inference, chunk length, groups, workers and environments per worker.
    """

    nodes: tuple[Count, ...] = (2, 4, 8, 16, 32)
    """Numbers of nodes to predict."""

    cores_per_node: Count = 48
    """Cores of each."""

    hidden_size: Annotated[int, Bounds(0)] = 64
    """Units of the two hidden layers of the policy that settings are recommended for; 0: no policy."""

    envs_per_core: Count = 1
    """Environments for each core, to recommend settings for."""

    parameters: Count = 1_700_000
    """Of the net whose gradients decentralized ranks sum, float32; those of a Nature-CNN by default."""

    network_latency_us: NonNegative | None = None
    """Microseconds one way between nodes, in addition to what was measured; unset: 100 where nodes were simulated, 0
    where a cluster was measured."""

    network_gbit: Positive | None = None
    """Bandwidth of the driver's network in Gbit/s, in addition to the measured cost of bytes; unset: 10 where nodes
    were simulated, without limit where a cluster was measured."""

    window: Positive = 1.0
    """Seconds of a window at least."""

    fit: Path | None = None
    """Use the measurements in this model.json instead of measuring."""

    check: bool = False
    """Compare predictions with four and eight nodes, and the recommendation with a search; checks that the file in
    --fit already has are not measured again."""

    hosts: bool = False
    """Measure on hosts in place of simulated nodes: network namespaces of this machine, each with an address of its
    own; needs root. With --fit, compare a model that was fitted elsewhere."""

    out: Path = Path("runs/bench-model")
    """Directory for model.json and model.csv; existing files are replaced."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Find the cheapest mix of machines for so many steps/s, or for so many cores and GPUs.

    The defaults are the published case: 64 sampling cores and 8 GPUs.
    """

    price_file: Path = PRICES
    """YAML with the cores, the GPUs and the price per hour of each instance."""

    steps_per_s: Positive | None = None
    """Wanted steps/s; sampling follows the model in --fit, learning the throughput given below."""

    sampling_cpus: Annotated[int, Bounds(0)] = 64
    """Cores for environments, without --steps-per-s."""

    gpus: Annotated[int, Bounds(0)] = 8
    """GPUs for learners, without --steps-per-s."""

    fit: Path | None = None
    """A model.json of rayvec bench model, for --steps-per-s."""

    step_duration: Positive = 0.001
    """Seconds that an environment takes for a step, for --steps-per-s."""

    gpu_samples_per_s: Positive | None = None
    """Samples per second that a GPU learns from (rayvec bench learner --device cuda)."""

    network_latency_us: NonNegative | None = None
    """As in rayvec bench model: one way between machines, in addition to what was measured."""

    network_gbit: Positive | None = None
    """As in rayvec bench model: bandwidth of the driver's network, in addition to what was measured."""

    cpu_samples_per_s: Positive | None = None
    """Samples per second that a core learns from if it does nothing else (rayvec bench learner)."""

    compare_with: tuple[str, ...] = ("g4dn.metal",)
    """Types whose cheapest mix alone is shown for comparison."""

    out: Path = Path("runs/bench-cost")
    """Directory for cost.json and cost.csv; existing files are replaced."""


def jitter_sigma(text: str | None) -> float:
    """Returns the standard deviation of the logarithm of step durations.

    Raises:
        ConfigError: The text is not of the form ``lognormal:SIGMA``.

    >>> jitter_sigma("lognormal:0.5"), jitter_sigma(None)
    (0.5, 0.0)
    """
    if text is None:
        return 0.0
    kind, _, sigma = text.partition(":")
    try:
        if kind == "lognormal" and 0 < float(sigma) <= 3:
            return float(sigma)
    except ValueError:
        pass
    raise ConfigError(
        "--jitter says how step durations vary around their mean.",
        expected="lognormal:SIGMA with SIGMA above 0 up to 3",
        got=text,
        remedy="Pass for example --jitter lognormal:0.5, or leave it out for steps of equal length.",
    )


def check_any(settings: Any, *names: str) -> None:
    """Refuses empty lists. A setting that is None passes.

    Raises:
        ConfigError: One of the named settings is empty.
    """
    for name in names:
        if getattr(settings, name) == ():
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} lists what is measured.",
                expected="at least one value",
                got="none",
                remedy=f"Pass values after {option}, or leave it out.",
            )
