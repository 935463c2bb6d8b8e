"""The data that travels: what an environment answers, what a rollout returns, who holds what.

Shapes are stated here and nowhere else. ``T`` is a number of steps, ``N`` of environments, ``F`` of
episodes that ended. *Tree* means an array, or a dict or tuple of trees, in the form that
Gymnasium gives a batch of the space: an array for Box, Discrete, MultiDiscrete and MultiBinary, a
dict for Dict, a tuple for Tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayvec.chunk_infos import ChunkInfo, ChunkInfos

__all__ = [
    "BadObs",
    "Batch",
    "Chunk",
    "ChunkEdges",
    "ChunkInfo",
    "ChunkRef",
    "CollectStats",
    "EpisodeStats",
    "NodeSlice",
    "RawInfo",
    "Rollout",
    "RolloutTimes",
    "StepBatch",
    "Topology",
    "Tree",
    "as_slice",
    "tree_leaves",
    "tree_map",
]

Tree = Any
"""An array, or a dict or tuple of trees."""


def tree_map(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Applies `function` to every array of `tree` and the arrays at the same places of `others`.

    >>> tree_map(lambda a, b: a + b, {"x": 1, "y": (2, 3)}, {"x": 10, "y": (20, 30)})
    {'x': 11, 'y': (22, 33)}
    """
    if isinstance(tree, dict):
        return {key: tree_map(function, value, *(other[key] for other in others)) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(tree_map(function, *values) for values in zip(tree, *others, strict=True))
    return function(tree, *others)


def tree_leaves(tree: Tree) -> Iterator[Any]:
    """Yields the arrays of `tree` in the order of its keys and places."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from tree_leaves(value)
    elif isinstance(tree, tuple):
        for value in tree:
            yield from tree_leaves(value)
    else:
        yield tree


def as_slice(env_ids: NDArray[np.int64]) -> Any:
    """Returns ids as a slice where they are consecutive, so that indexing gives views; else as they are.

    >>> as_slice(np.array([3, 4, 5])), as_slice(np.array([3, 5]))
    (slice(3, 6, None), array([3, 5]))
    """
    if len(env_ids) == 0:
        return env_ids
    first = int(env_ids[0])
    consecutive = np.array_equal(env_ids, np.arange(first, first + len(env_ids)))
    return slice(first, first + len(env_ids)) if consecutive else env_ids


class RawInfo(NamedTuple):
    """What one environment had to say in one step or reset, unmerged.

    Attributes:
        env_id: Global index of the environment.
        info: The info dict as the environment returned it. After an automatic reset within the
            step, that of the reset.
        final_obs: The last observation of the episode that ended, where the reset followed within
            the step; else None.
        final_info: The info of the step that ended the episode, likewise; else None.
    """

    env_id: int
    info: dict[str, Any]
    final_obs: Any = None
    final_info: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The answers of k environments to one step or one reset.

    Attributes:
        env_ids: Whose answers, ``int64 [k]``; row i of everything else belongs to ``env_ids[i]``.
        obs: Observations, tree of ``[k, *obs_shape]``.
        rew: Rewards, ``float64 [k]``; 0 after a reset.
        terminated: ``bool [k]``.
        truncated: ``bool [k]``.
        info: Of a pool, a tuple of :class:`RawInfo`, only for the environments that had
            something to say, in the order of rows. Of a vector environment, Gymnasium's merged dict.
    """

    env_ids: NDArray[np.int64]
    obs: Tree
    rew: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    info: Any = ()

    def copy(self) -> StepBatch:
        """Returns the same in memory of its own; objects are shared."""
        return StepBatch(
            self.env_ids.copy(),
            tree_map(np.copy, self.obs),
            self.rew.copy(),
            self.terminated.copy(),
            self.truncated.copy(),
            self.info,
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """T steps of N environments; an environment whose episode ends is reset within the step.

    Attributes:
        env_ids: Global index of the environment in each column, ``int64 [N]``.
        obs: What the policy saw, tree of ``[T, N, *obs_shape]``.
        act: What it did, tree of ``[T, N, *act_shape]``.
        rew: ``float64 [T, N]``.
        terminated: The episode ended by the environment's own rules, ``bool [T, N]``.
        truncated: The episode was cut, by a time limit or by a fault, ``bool [T, N]``.
        valid: False where no step happened (the environment was being restarted), and for steps that were
            taken but don't belong to the batch (beyond a quota of episodes), ``bool [T, N]``.
        last_obs: What the policy would see next, tree of ``[N, *obs_shape]``: the first observation
            of a new episode where the chunk's last step ended one.
        final_index: ``(t, n)`` of each step that ended an episode, in that order, ``int64 [F, 2]``.
        final_obs: The true last observation of each of these episodes, tree of ``[F, *obs_shape]``.
        extras: What the policy recorded beside its actions, by name, ``[T, N, ...]``:
            ``logp`` (float32, log-probability of the action), and what else it returns.
        infos: Non-empty infos of steps, sorted by (t, n). From a rollout these are
            :class:`~rayvec.chunk_infos.ChunkInfos`, which make a dict only when somebody reads it.
        reset_infos: Non-empty infos of the resets that followed within step t, sorted likewise.
        restarts: ``(t, n)`` of each step that failed, after which the environment was made anew, in that order;
            t is -1 where the episode that was under way before the chunk was lost, ``int64 [R, 2]``. The
            step before such a one is truncated, at the last true observation.
        cuts: ``(t, n)`` of each of these truncated steps, in that order: their episodes did not end by themselves,
            ``int64 [C, 2]``.
        weights_version: Version of the policy's weights; 0 for a policy without weights.
        first_step: How many steps the environments had taken in chunks before this one.
    """

    env_ids: NDArray[np.int64]
    obs: Tree
    act: Tree
    rew: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    valid: NDArray[np.bool_]
    last_obs: Tree
    final_index: NDArray[np.int64]
    final_obs: Tree
    extras: dict[str, NDArray[Any]] = field(default_factory=dict)
    infos: Sequence[ChunkInfo] = ()
    reset_infos: Sequence[ChunkInfo] = ()
    restarts: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    cuts: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    weights_version: int = 0
    first_step: int = 0

    @property
    def num_steps(self) -> int:
        """T."""
        return int(self.rew.shape[0])

    @property
    def num_envs(self) -> int:
        """N."""
        return int(self.rew.shape[1])

    @property
    def done(self) -> NDArray[np.bool_]:
        """Where an episode ended for either reason, ``bool [T, N]``; for edges only, never to bootstrap."""
        return self.terminated | self.truncated

    def next_obs(self) -> Tree:
        """Returns the observation after each step, tree of ``[T, N, *obs_shape]``, newly allocated.

        At the end of an episode it is the true last observation, never the first of the next.
        """
        t, n = self.final_index[:, 0], self.final_index[:, 1]

        def shift(obs: NDArray[Any], last: NDArray[Any], final: NDArray[Any]) -> NDArray[Any]:
            following = np.concatenate([obs[1:], last[None]])
            following[t, n] = final
            return following

        return tree_map(shift, self.obs, self.last_obs, self.final_obs)

    def columns(self, start: int, stop: int) -> Chunk:
        """Returns the chunk of the columns `start` to ``stop - 1``, maybe of none; its arrays are views."""

        def of_step(leaf: NDArray[Any]) -> NDArray[Any]:
            return leaf[:, start:stop]

        def of_env(leaf: NDArray[Any]) -> NDArray[Any]:
            return leaf[start:stop]

        def inside(places: NDArray[np.int64]) -> NDArray[np.bool_]:
            return (places[:, 1] >= start) & (places[:, 1] < stop)

        ended, origin = inside(self.final_index), np.array([0, start])
        return replace(
            self,
            env_ids=self.env_ids[start:stop],
            obs=tree_map(of_step, self.obs),
            act=tree_map(of_step, self.act),
            rew=of_step(self.rew),
            terminated=of_step(self.terminated),
            truncated=of_step(self.truncated),
            valid=of_step(self.valid),
            last_obs=tree_map(of_env, self.last_obs),
            final_index=self.final_index[ended] - origin,
            final_obs=tree_map(lambda leaf: leaf[ended], self.final_obs),
            extras={name: of_step(extra) for name, extra in self.extras.items()},
            infos=ChunkInfos.of(self.infos).between(start, stop),
            reset_infos=ChunkInfos.of(self.reset_infos).between(start, stop),
            restarts=self.restarts[inside(self.restarts)] - origin,
            cuts=self.cuts[inside(self.cuts)] - origin,
        )


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """A chunk that was left in Ray's object store, for whoever needs its arrays.

    Attributes:
        env_ids: Global index of the environment in each column, ``int64 [N]``.
        num_steps: T.
        ref: Ray's reference to the :class:`Chunk`.
    """

    env_ids: NDArray[np.int64]
    num_steps: int
    ref: Any


class BadObs(NamedTuple):
    """Where observations of a chunk are NaN or infinite.

    Attributes:
        where: ``bool [T + 1, N]``: row t is `obs` at t, row T is `last_obs`.
        finals: Of `final_obs`, ``bool [F]``.
        first: The first of them, for a person: what it is, its key, step and environment.
    """

    where: NDArray[np.bool_]
    finals: NDArray[np.bool_]
    first: str


@dataclass(frozen=True, slots=True)
class ChunkEdges:
    """What must be known of a chunk to tell its episodes apart, without what the policy saw and did.

    Attributes:
        env_ids: As of the chunk, like everything that has the same name there.
        rew: ``float64 [T, N]``.
        terminated: ``bool [T, N]``.
        truncated: ``bool [T, N]``.
        valid: ``bool [T, N]``.
        ended: Where an episode ended by itself, not cut by a fault, ``bool [T, N]``.
        final_index: ``int64 [F, 2]``.
        restarts: ``int64 [R, 2]``.
        last_obs: Tree of ``[N, *obs_shape]``, for whoever must go on where a node is lost.
        weights_version: Version of the policy's weights.
        first_step: How many steps the environments had taken in chunks before this one.
        bad_obs: Where observations are not finite; None if all are.
    """

    env_ids: NDArray[np.int64]
    rew: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    valid: NDArray[np.bool_]
    ended: NDArray[np.bool_]
    final_index: NDArray[np.int64]
    restarts: NDArray[np.int64]
    last_obs: Tree
    weights_version: int
    first_step: int
    bad_obs: BadObs | None = None

    @property
    def num_steps(self) -> int:
        """T."""
        return int(self.rew.shape[0])


class RolloutTimes(NamedTuple):
    """Wall time of one rollout, in seconds.

    Attributes:
        whole_s: From its beginning to its end.
        environment_s: Of it, until environments had answered.
        inference_s: Of it, until the policy had chosen.
    """

    whole_s: float
    environment_s: float
    inference_s: float


@dataclass(frozen=True, slots=True)
class Rollout:
    """A chunk as those who acted hand it over.

    Attributes:
        edges: Of the chunk.
        chunk: The chunk, or None where it was left in Ray's object store.
        refs: Where it lies there, a part for each node; else none.
        times: Of each worker, or of the driver if it acted.
        waited_s: How long the caller waited for them, in seconds.
    """

    edges: ChunkEdges
    chunk: Chunk | None
    refs: tuple[ChunkRef, ...]
    times: tuple[RolloutTimes, ...]
    waited_s: float


@dataclass(frozen=True, slots=True)
class EpisodeStats:
    """The episodes that ended in what was collected, in the order of their ends (t, then column).

    Attributes:
        env_ids: ``int64 [F]``.
        returns: Undiscounted sums of rewards, ``float64 [F]``.
        lens: Numbers of steps, ``int64 [F]``.
    """

    env_ids: NDArray[np.int64]
    returns: NDArray[np.float64]
    lens: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CollectStats:
    """What one call of ``collect`` did.

    Attributes:
        returns: Returns of the episodes that count, ``float64 [F]``.
        lens: Their lengths in steps, ``int64 [F]``.
        n_collected_steps: Steps that the batch holds.
        n_collected_episodes: F.
        n_surplus_steps: Steps that were taken but don't belong to the batch: beyond an ``n_episode`` quota, of dropped
            episodes, or in flight when the collector was reset.
        collect_time_s: Wall time of the call in seconds.
        steps_per_s: Steps taken per second of wall time.
        time_split_s: The same seconds by what they went to: ``environment`` and ``inference``, of the mean worker;
            ``waiting``, what the mean worker is ahead of the slowest; ``transport``, all else: asking, recording,
            fetching and joining. What was done in flight before the call is left out. Where the driver acts, what
            lies between it and the environments counts as ``environment``.
        weights_versions: Oldest and newest version of the weights that acted.
        staleness: How many versions had been published after the oldest that acted when the batch was returned.
        n_restarts: How often an environment was made anew because it, its worker or its node had failed.
        n_dropped_episodes: Episodes left out because an observation was not finite.
    """

    returns: NDArray[np.float64]
    lens: NDArray[np.int64]
    n_collected_steps: int
    n_collected_episodes: int
    n_surplus_steps: int
    collect_time_s: float
    steps_per_s: float
    time_split_s: dict[str, float]
    weights_versions: tuple[int, int]
    staleness: int = 0
    n_restarts: int = 0
    n_dropped_episodes: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """What a collector returns: chunks in the order they were taken, and what is known of them.

    Attributes:
        chunks: One or more chunks over the same environments; none where they were left in the object store.
        stats: See :class:`CollectStats`.
        chunk_refs: Where the chunks lie that were left there: of every chunk a part for each node, in order.
    """

    chunks: tuple[Chunk, ...]
    stats: CollectStats
    chunk_refs: tuple[tuple[ChunkRef, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class NodeSlice:
    """The environments that one node holds.

    Attributes:
        node_id: Ray's id of the node, in hexadecimal.
        address: The node's own IP address.
        worker_bounds: ``workers + 1`` ascending global indices; worker k holds
            ``range(worker_bounds[k], worker_bounds[k + 1])``.
        num_cpus: Cores that are claimed for them.
    """

    node_id: str
    address: str
    worker_bounds: tuple[int, ...]
    num_cpus: int

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

    @property
    def num_envs(self) -> int:
        """How many environments there are in all."""
        return sum(len(node.env_range) for node in self.nodes)

    def without_claims(self) -> Topology:
        """Returns the same without a claim to any core."""
        return Topology(tuple(replace(node, num_cpus=0) for node in self.nodes))
