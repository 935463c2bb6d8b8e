"""Many steps of many environments, and where they lie."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data.infos import ChunkInfos
from rayvec.data.trees import Tree, tree_map

__all__ = ["Chunk", "ChunkRef"]


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
        extras: What the policy recorded beside its actions, by name, ``[T, N, ...]``:
            ``logp`` (float32, log-probability of the action), and what else it returns.
        infos: Non-empty infos of steps, sorted by (t, n): a sequence of :class:`~rayvec.data.ChunkInfo` that makes
            the dicts only when somebody reads them.
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
    infos: ChunkInfos = field(default_factory=ChunkInfos)
    reset_infos: ChunkInfos = field(default_factory=ChunkInfos)
    restarts: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    cuts: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    weights_version: int = 0
    first_step: int = 0

    def __post_init__(self) -> None:
        """Puts infos into columns."""
        object.__setattr__(self, "infos", ChunkInfos.of(self.infos))
        object.__setattr__(self, "reset_infos", ChunkInfos.of(self.reset_infos))

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
            infos=self.infos.between(start, stop),
            reset_infos=self.reset_infos.between(start, stop),
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
