"""Statistics of a batch by node, and by what its time was spent on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from rayvec.collect.asynchronous import PartChunk
from rayvec.data import NodeSlice, Rollout, Topology
from rayvec.data.batch import NodeStats, merge_nodes

__all__ = ["node_stats", "time_split_s"]


def node_stats(
    topology: Topology,
    chunks: Sequence[PartChunk],
    pending: Mapping[range, int],
    *,
    is_measured: bool,
) -> tuple[NodeStats, ...]:
    """Returns what each node did in a batch.

    Args:
        topology: Which node holds which environments now.
        chunks: The chunks of the batch, each of all environments, of those of a node, or of those of a worker.
        pending: How many chunks are requested and not finished, by the same indices.
        is_measured: Whether the times of a chunk are those of each worker.
    """
    found = [NodeStats(node.name, len(node.env_range), node.num_workers) for node in topology.nodes]
    found += [
        part for rollout, envs in chunks for part in _parts(rollout.topology or topology, envs, rollout, is_measured)
    ]
    for envs, count in pending.items():
        names = {node.name: None for node in _nodes_of(topology, envs)}  # one may hold several slices
        found += [NodeStats(name, 0, 0, n_pending=count) for name in names]
    return merge_nodes(found)


def _nodes_of(topology: Topology, envs: range) -> list[NodeSlice]:
    return [node for node in topology.nodes if node.env_range.start < envs.stop and envs.start < node.env_range.stop]


def _parts(topology: Topology, envs: range, rollout: Rollout, is_measured: bool) -> list[NodeStats]:
    nodes, times = _nodes_of(topology, envs), [each.environment_s for each in rollout.times]
    if len(nodes) > 1 and len(times) != sum(node.num_workers for node in nodes):
        is_measured = False
    columns, restarts = rollout.summary.valid, rollout.summary.restarts[:, 1]
    first_time, found = 0, []
    for node in nodes:
        start = max(0, node.env_range.start - envs.start)
        stop = min(len(envs), node.env_range.stop - envs.start)
        last_time = len(times) if len(nodes) == 1 else first_time + node.num_workers
        found.append(
            NodeStats(
                node.name,
                0,
                0,
                n_steps=int(np.count_nonzero(columns[:, start:stop])),
                environment_s=sum(times[first_time:last_time]) if is_measured else math.nan,
                n_restarts=int(np.count_nonzero((restarts >= start) & (restarts < stop))),
            )
        )
        first_time = last_time
    return found


def time_split_s(rollouts: Sequence[Rollout], elapsed_s: float) -> dict[str, float]:
    """Returns what the wall time of a call was spent on; see :class:`CollectStats`."""
    split = dict.fromkeys(("environment", "inference", "waiting"), 0.0)
    for rollout in rollouts:
        whole_s, environment_s, inference_s = np.array(rollout.times).T
        share = min(1.0, rollout.waited_s / whole_s.max())  # the rest was done before the call waited for it
        split["environment"] += share * float(environment_s.mean())
        split["inference"] += share * float(inference_s.mean())
        split["waiting"] += share * float(whole_s.max() - whole_s.mean())
    return {**split, "transport": elapsed_s - sum(split.values())}
