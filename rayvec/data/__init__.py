"""The data that travels: answers of environments, chunks of rollouts, batches of collectors, the topology.

The data classes state the shapes. ``T`` is the number of steps, ``N`` of environments, ``F`` of
episodes that ended. *Tree* means an array, or a dict or tuple of trees, in the form that
Gymnasium gives a batch of the space: an array for Box, Discrete, MultiDiscrete and MultiBinary, a
dict for Dict, a tuple for Tuple.
"""

from __future__ import annotations

from rayvec.data.batch import Batch, CollectStats, EpisodeStats
from rayvec.data.chunk import Chunk, ChunkInfo, ChunkInfos, StepBatch
from rayvec.data.topology import NodeSlice, Topology
from rayvec.data.trees import Tree, as_slice, objects, tree_leaves, tree_map

__all__ = [
    "Batch",
    "Chunk",
    "ChunkInfo",
    "ChunkInfos",
    "CollectStats",
    "EpisodeStats",
    "NodeSlice",
    "StepBatch",
    "Topology",
    "Tree",
    "as_slice",
    "objects",
    "tree_leaves",
    "tree_map",
]
