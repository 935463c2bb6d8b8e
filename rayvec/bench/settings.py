"""The settings of ``rayvec bench``: the options of its subcommands, with no code that measures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

from rayvec.config.schema import Count, NonNegative, Positive, dataclass


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Measure steps/s over nodes, beside the ideal: cores / step duration.

    Without --address the nodes are simulated on this machine: environments that sleep emulate cores.
    """

    nodes: tuple[Count, ...] = (1, 2, 4)
    """Numbers of nodes."""

    cores_per_node: Count = 8
    """Environments on each node, one for each core."""

    env_id: str | None = None
    """A Gymnasium id or module:Class to step; unset: environments that take --step-duration for a step."""

    step_duration: tuple[Positive, ...] = (1.0, 0.1, 0.01, 0.001)
    """Seconds that an emulated environment takes for a step."""

    work: Literal["sleep", "busy"] = "sleep"
    """Whether an emulated step sleeps, like a core of its own, or uses that much CPU time."""

    way: tuple[Literal["driver", "worker", "decentralized"], ...] = ("driver", "worker")
    """driver: env.step; worker: chunks in which the policy acts in the workers, prefetched by a Collector;
    decentralized: a learner rank on each node collects chunks with its own environments and sums gradients."""

    chunk_steps: Count | None = None
    """Steps of a chunk; unset: about two seconds' worth, at most 128."""

    repeats: Count = 3
    """Windows of each row. What is compared alternates."""

    window: Positive = 1.5
    """Shortest window in seconds; a window has at least 20 steps, or 6 where a step takes half a second or more."""

    quick: bool = False
    """At most 2 nodes of 4 cores, steps of at most 0.1 s and short windows: less than a minute."""

    address: str | None = None
    """Measure on the Ray cluster at this address; unset: simulate nodes on this machine."""

    out: Path = Path("runs/bench-scaling")
    """Directory for scaling.json, scaling.csv and efficiency.png; existing files are replaced."""

    def narrowed(self) -> Scaling:
        """Returns the settings that apply, with the limits of --quick."""
        if not self.quick:
            return self
        return replace(
            self,
            nodes=tuple(count for count in self.nodes if count <= 2) or (min(self.nodes),),
            cores_per_node=min(self.cores_per_node, 4),
            step_duration=tuple(each for each in self.step_duration if each <= 0.1) or (min(self.step_duration),),
            repeats=1,
            window=min(self.window, 0.8),
        )


@dataclass(frozen=True, kw_only=True)
class Model:
    """Predict steps/s on more nodes from a scaling.json with one and two nodes."""

    positional: ClassVar[str] = "scaling"

    scaling: Path = Path("runs/bench-scaling/scaling.json")
    """What `rayvec bench scaling` has written."""

    nodes: tuple[Count, ...] = (4, 8, 16, 32)
    """Numbers of nodes to predict, with as many cores each as were measured."""

    fit_nodes: Count = 2
    """Rows of at most so many nodes are fitted. Rows of more nodes are shown beside their predictions."""

    network_latency_us: NonNegative = 0.0
    """Microseconds one way between nodes, in addition to what was measured."""

    out: Path = Path("runs/bench-model")
    """Directory for model.json and model.csv; existing files are replaced."""
