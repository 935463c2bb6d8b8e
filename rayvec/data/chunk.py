"""One step or many of many environments as arrays, and the request for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayvec.data.infos import ChunkInfos
from rayvec.data.trees import Tree, tree_map

__all__ = ["AXES", "Chunk", "ChunkRequest", "Rollout", "RolloutTimes", "StepBatch", "StopEarly"]

StopEarly = Callable[[int], bool]
"""Whether to end a chunk early, given the number of steps that its environments have taken together so far."""

_STEPS = {"axes": "T, N"}  # tree of arrays [T, N, ...]
_STATES = {"axes": "K, N"}  # array [K, N, ...]
_ENVS = {"axes": "N"}  # tree of arrays [N, ...]
_PLACES = {"axes": "(t, n)"}  # steps of environments, in this order, [k, 2]
_ENDS = {"axes": "F"}  # tree of arrays [F, ...], a row for each place in final_index
_INFOS = {"axes": "infos"}
_COMMON = {"axes": ""}  # one number for the whole chunk


@dataclass(frozen=True, slots=True)
class Chunk:
    """T steps of N environments; an environment whose episode ends is reset within the step.

    Attributes:
        env_ids: Global index of the environment in each column, ``int64 [N]``.
        obs: What the policy saw, tree of ``[T, N, *obs_shape]``.
        act: What it did, tree of ``[T, N, *act_shape]``.
        rew: ``float64 [T, N]``; in a chunk of Tianshou's several agents ``[T, N, *rew_shape]``.
        terminated: The episode ended by the environment's own rules, ``bool [T, N]``.
        truncated: The episode was cut, by a time limit or by a fault, ``bool [T, N]``.
        valid: False where no step happened (the environment was being restarted), and for steps that were
            taken but don't belong to the batch (beyond a quota of episodes), ``bool [T, N]``.
        last_obs: What the policy would see next, tree of ``[N, *obs_shape]``: the first observation
            of a new episode where the chunk's last step ended one.
        final_index: ``(t, n)`` of each step that ended an episode, in that order, ``int64 [F, 2]``.
        final_obs: The true last observation of each of these episodes, tree of ``[F, *obs_shape]``.
        extras: What the policy recorded with its actions, by name, ``[T, N, ...]``:
            ``logp`` (float32, log-probability of the action), and whatever else it returns.
        states: Hidden states of a recurrent policy before the steps at which its sequences begin,
            ``float32 [K, N, D]``; see :meth:`rayvec.policies.recurrent.RecurrentActor.state_to_record`. K is 0
            without one.
        infos: Non-empty infos of steps, sorted by (t, n): a sequence of :class:`~rayvec.data.ChunkInfo` that makes
            the dicts when one of them is first read.
        reset_infos: Non-empty infos of the resets that followed within step t, sorted likewise.
        restarts: ``(t, n)`` of each step that failed, after which the environment was restarted, in that order;
            t is -1 where a fault ended the episode before the chunk's first step, ``int64 [R, 2]``. The
            step before a failed one is truncated, at the last true observation.
        cuts: ``(t, n)`` of each step that is truncated for this reason, in that order, ``int64 [C, 2]``.
        weights_version: Version of the policy's weights; 0 for a policy without weights.
        first_step: Number of steps that the environments took in earlier chunks.
    """

    env_ids: NDArray[np.int64] = field(metadata=_ENVS)
    obs: Tree = field(metadata=_STEPS)
    act: Tree = field(metadata=_STEPS)
    rew: NDArray[np.float64] = field(metadata=_STEPS)
    terminated: NDArray[np.bool_] = field(metadata=_STEPS)
    truncated: NDArray[np.bool_] = field(metadata=_STEPS)
    valid: NDArray[np.bool_] = field(metadata=_STEPS)
    last_obs: Tree = field(metadata=_ENVS)
    final_index: NDArray[np.int64] = field(metadata=_PLACES)
    final_obs: Tree = field(metadata=_ENDS)
    extras: dict[str, NDArray[Any]] = field(default_factory=dict, metadata=_STEPS)
    states: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0, 0), np.float32), metadata=_STATES)
    infos: ChunkInfos = field(default_factory=ChunkInfos, metadata=_INFOS)
    reset_infos: ChunkInfos = field(default_factory=ChunkInfos, metadata=_INFOS)
    restarts: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), np.int64), metadata=_PLACES)
    cuts: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), np.int64), metadata=_PLACES)
    weights_version: int = field(default=0, metadata=_COMMON)
    first_step: int = field(default=0, metadata=_COMMON)

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
        """Where an episode ended for either reason, ``bool [T, N]``; for boundaries only, never to bootstrap."""
        return self.terminated | self.truncated

    @property
    def restarted_before(self) -> NDArray[np.int64]:
        """Columns whose episode a fault ended before the chunk's first step, ``int64 [R]``."""
        return self.restarts[self.restarts[:, 0] == -1, 1]  # type: ignore[no-any-return]

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

        def inside(places: NDArray[np.int64]) -> NDArray[np.bool_]:
            return (places[:, 1] >= start) & (places[:, 1] < stop)

        ended, origin = inside(self.final_index), np.array([0, start])
        cut: dict[str, Callable[[Any], Any]] = {
            "T, N": partial(tree_map, lambda leaf: leaf[:, start:stop]),
            "K, N": lambda states: states[:, start:stop],
            "N": partial(tree_map, lambda leaf: leaf[start:stop]),
            "(t, n)": lambda places: places[inside(places)] - origin,
            "F": partial(tree_map, lambda leaf: leaf[ended]),
            "infos": lambda infos: infos.between(start, stop),
            "": lambda value: value,
        }
        return Chunk(**{name: cut[axes](getattr(self, name)) for name, axes in AXES.items()})


AXES: dict[str, str] = {field.name: field.metadata["axes"] for field in fields(Chunk)}
"""How each field of a chunk lies: what joins or cuts chunks follows from it."""


class ChunkRequest(NamedTuple):
    """A request for a chunk.

    Attributes:
        num_steps: The number of steps T.
        first_step: The number of steps that the environments took in earlier chunks.
        noise_seed: The seed of the policy's noise.
    """

    num_steps: int
    first_step: int = 0
    noise_seed: int = 0


class RolloutTimes(NamedTuple):
    """Wall time of one rollout, in seconds.

    Attributes:
        whole_s: From beginning to end.
        environment_s: The part of it spent waiting for environments.
        inference_s: The part of it spent in the policy.
    """

    whole_s: float
    environment_s: float
    inference_s: float


@dataclass(frozen=True, slots=True)
class Rollout:
    """The result of one rollout.

    Attributes:
        chunk: The chunk.
        times: Times of each worker, or of the driver if it acted.
        waited_s: How long the caller waited, in seconds.
        num_padded: Number of places for steps that were not taken, because the chunk was cut; they are not `valid`.
    """

    chunk: Chunk
    times: tuple[RolloutTimes, ...]
    waited_s: float
    num_padded: int = 0


@dataclass(slots=True)
class StepBatch:
    """The answers of k environments to one step or one reset.

    Attributes:
        env_ids: Whose answers, ``int64 [k]``; row i of everything else belongs to ``env_ids[i]``.
        obs: Observations, tree of ``[k, *obs_shape]``.
        rew: Rewards, ``float64 [k]``; 0 after a reset.
        terminated: ``bool [k]``.
        truncated: ``bool [k]``.
        info: Columns, as Gymnasium merges infos.
    """

    env_ids: NDArray[np.int64]
    obs: Tree
    rew: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    info: Any = ()
