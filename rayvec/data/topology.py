"""Which node holds which environments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from rayvec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NodeSlice:
    """The environments that one node holds.

    Attributes:
        node_id: Ray's id of the node, in hexadecimal; ``"driver"`` where the driver's process itself has them.
        address: The node's own IP address.
        worker_bounds: ``workers + 1`` ascending global indices; worker k holds
            ``range(worker_bounds[k], worker_bounds[k + 1])``.
        num_cpus: Cores that are claimed from Ray for them, 0 for none.
    """

    node_id: str
    address: str
    worker_bounds: tuple[int, ...]
    num_cpus: float

    @property
    def name(self) -> str:
        """The node for a person: its address and the beginning of its id, since addresses may be shared."""
        return f"{self.address}/{self.node_id[:8]}"

    @property
    def num_workers(self) -> int:
        """How many worker processes the node runs."""
        return len(self.worker_bounds) - 1

    @property
    def env_range(self) -> range:
        """The global indices of the node's environments."""
        return range(self.worker_bounds[0], self.worker_bounds[-1])


@dataclass(frozen=True, slots=True)
class Topology:
    """Which node holds which slice of the environments, and how many workers step it."""

    nodes: tuple[NodeSlice, ...]

    this_node: ClassVar[tuple[str, str]] = ("driver", "localhost")
    """Id and address of the node on which this process steps environments without Ray. Ranks on Ray set their own."""

    this_process: ClassVar[str] = "the driver's process"
    """What errors call this process. Ranks set their own name."""

    @classmethod
    def of_this_node(cls, worker_bounds: Sequence[int] = (0,)) -> Topology:
        """Returns the topology of a driver or rank that steps its environments on its own node, without Ray."""
        return cls((NodeSlice(*cls.this_node, tuple(worker_bounds), 0),))


def split_groups(
    topology: Topology, groups: int, unit_bounds: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], ...]:
    """Divides the ids into one or two groups. With two, each contains half of every worker's slice.

    The odd environment of a worker goes to the first group, or if it is the worker's only one, to the smaller group. A
    single environment is one group.

    Native sub-batches stay whole: with two groups, each contains every other one.

    Raises:
        ConfigError: There is one native sub-batch, and two groups.
    """
    if unit_bounds is not None:
        if len(unit_bounds) <= groups:
            raise ConfigError(
                f"groups={groups} was passed with {len(unit_bounds) - 1} native sub-batches. Each group needs at "
                "least one: make more sub-batches, or leave groups out."
            )
        units = [np.arange(start, stop) for start, stop in pairwise(unit_bounds.tolist())]
        return tuple(np.concatenate(units[group::groups]) for group in range(groups))
    parts: list[list[int]] = [[] for _ in range(groups)]
    for node in topology.nodes:
        for start, stop in pairwise(node.worker_bounds):
            first_too = stop - start > 1 or len(parts[0]) <= len(parts[-1])  # the odd one of this worker
            middle = start + (stop - start + first_too) // 2 if groups == 2 else stop
            parts[0] += range(start, middle)
            parts[-1] += range(middle, stop)
    return tuple(np.array(ids, np.int64) for ids in parts if ids)


def even_bounds(num_envs: int, num_parts: int, first: int = 0) -> tuple[int, ...]:
    """Returns the bounds of slices whose sizes differ by one at most.

    >>> even_bounds(7, 3)
    (0, 3, 5, 7)
    """
    small, larger = divmod(num_envs, num_parts)
    sizes = [small + (part < larger) for part in range(num_parts)]
    return tuple(accumulate(sizes, initial=first))
