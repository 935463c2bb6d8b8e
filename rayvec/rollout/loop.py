"""The rollout loop: a policy and a pool take T steps, wherever the policy sits.

The same function runs in every worker over its own slice, and in the driver over the whole cluster. With
more than one group the policy works on one while the environments of the others step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from operator import itemgetter
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rayvec.data import Chunk, RolloutTimes, StepBatch, Tree, as_slice, tree_leaves, tree_map
from rayvec.data.infos import ChunkInfo, ChunkInfos
from rayvec.errors import ConfigError
from rayvec.policies.noise import NO_NOISE, NoiseSpec, keyed_noise
from rayvec.pools.base import Autoreset, EnvPool
from rayvec.pools.memory import ArrayLayout, index_tree, tree_writer
from rayvec.pools.restarts import RESTARTED
from rayvec.pools.serial import SerialPool

__all__ = ["ActingPolicy", "CallablePolicy", "RecurrentPolicy", "as_policy", "rollout"]


Empty = Callable[[tuple[int, ...], DTypeLike], NDArray[Any]]
"""Allocates an array of a shape and data type, as ``np.empty`` does."""


class ActingPolicy(Protocol):
    """What a rollout asks of a policy. It imports what it needs where it acts, and pickles."""

    noise: NoiseSpec
    """How much noise it wants; it is a function of (seed, environment, step), so that actions don't
    depend on where they are chosen."""

    def act(self, obs: Tree, noise: NDArray[np.float64]) -> tuple[Tree, dict[str, NDArray[Any]]]:
        """Chooses actions.

        Args:
            obs: Tree of ``[k, *obs_shape]``.
            noise: ``float64 [k, lanes]``.

        Returns:
            Actions, tree of ``[k, *act_shape]``, and what to record beside them, ``[k, ...]`` by name.
        """
        ...

    def load_weights(self, weights: NDArray[np.float32]) -> None:
        """Takes newly published weights, one flat vector; it must copy what it keeps."""
        ...


class RecurrentPolicy(ActingPolicy, Protocol):
    """A policy that remembers: it keeps a row for each environment, acts on all of them, is told of new episodes."""

    def begin_episodes(self, rows: NDArray[np.int64]) -> None:
        """Forgets what it remembers of some environments, since their next observation begins an episode."""
        ...


class CallablePolicy:
    """Any callable from observations to actions, as a policy without noise and without weights."""

    noise = NO_NOISE

    def __init__(self, function: Callable[[Tree], Tree]) -> None:
        self._function = function

    def act(self, obs: Tree, noise: NDArray[np.float64]) -> tuple[Tree, dict[str, NDArray[Any]]]:
        """Calls the function."""
        actions = self._function(obs)
        return (actions if isinstance(actions, (dict, tuple)) else np.asarray(actions)), {}

    def load_weights(self, weights: NDArray[np.float32]) -> None:
        """There are none to take."""
        raise ConfigError(
            "Weights are published to a policy that has weights.",
            expected="a rayvec.Policy",
            got=f"the callable {self._function!r}",
            remedy="Wrap the module: rayvec.Policy(module).",
        )


def as_policy(policy: Any) -> ActingPolicy:
    """Returns `policy` if it is one, else the callable wrapped as one.

    Raises:
        ConfigError: It is neither.
    """
    if hasattr(policy, "act") and hasattr(policy, "noise"):
        return cast("ActingPolicy", policy)
    if callable(policy):
        return CallablePolicy(policy)
    raise ConfigError(
        "A policy chooses actions.",
        expected="a callable obs -> actions, or a rayvec.Policy",
        got=f"{type(policy).__name__}",
        remedy="Pass a function of a batch of observations.",
    )


class Stopwatch:
    """Adds up where the time of rollouts goes.

    Attributes:
        environment_s: Seconds of wall time until environments had answered.
        inference_s: Until the policy had chosen.
    """

    def __init__(self) -> None:
        self.environment_s = 0.0
        self.inference_s = 0.0
        self._began_s = time.perf_counter()

    def read(self) -> RolloutTimes:
        """Returns the times since it was made."""
        return RolloutTimes(time.perf_counter() - self._began_s, self.environment_s, self.inference_s)


def rollout(
    pool: EnvPool,
    policy: ActingPolicy,
    num_steps: int,
    *,
    noise_seed: int = 0,
    first_step: int = 0,
    first_id: int = 0,
    groups: Sequence[NDArray[np.int64]] | None = None,
    weights_version: int = 0,
    begun: NDArray[np.int64] | None = None,
    stopwatch: Stopwatch | None = None,
    empty: Empty = np.empty,
) -> Chunk:
    """Takes `num_steps` steps of every environment of `pool`.

    Environments that are between two episodes are reset first; those whose episode ends are reset within
    the step. The episodes under way at the end go on in the next chunk.

    Args:
        pool: What to step, ids 0 to N-1.
        policy: What acts.
        num_steps: T.
        noise_seed: Of the noise.
        first_step: How many steps the environments had taken in chunks before.
        first_id: Global index of the pool's first environment.
        groups: Partition of the ids; while one steps, the policy works on the next. One group by default.
        weights_version: Written into the chunk.
        begun: Ids of environments whose episode the policy has not seen the beginning of; a policy that remembers
            forgets what it remembers of them, and of those that are reset from now on.
        stopwatch: Told where the time goes.
        empty: Allocates the chunk's large arrays.

    Returns:
        The chunk; it shares no memory with the pool.
    """
    n, now = pool.num_envs, time.perf_counter
    stopwatch = stopwatch or Stopwatch()
    begin_episodes = getattr(policy, "begin_episodes", None)
    if groups is None or begin_episodes is not None:
        groups = [np.arange(n)]
    noise = keyed_noise(
        policy.noise, seed=noise_seed, env_ids=first_id + np.arange(n), first_step=first_step, num_steps=num_steps
    )
    recorder = _Recorder(num_steps, n, first_id, pool.action_layout, empty)
    for ids in groups:
        pool.ready(ids)
    batches = [pool.recv(ids) for ids in groups]
    for group, batch in enumerate(batches):
        recorder.add_infos(-1, batch)
        recorder.allocate(group, groups[group], batch.obs)
    if begin_episodes is not None:
        begin_episodes(_begun_before(pool, batches[0], begun))
    for t in range(num_steps):
        for group, ids in enumerate(groups):
            if t > 0:
                began_s = now()
                batches[group] = pool.recv(ids)
                stopwatch.environment_s += now() - began_s
                recorder.add_results(t - 1, group, batches[group])
                if begin_episodes is not None:
                    begin_episodes(_begun(pool, batches[group]))
            obs = batches[group].obs
            recorder.add_obs(t, group, obs)
            began_s = now()
            actions, extras = policy.act(obs, noise[t, recorder.columns[group]])
            stopwatch.inference_s += now() - began_s
            recorder.add_actions(t, group, actions, extras)
            pool.send(ids, actions, Autoreset.SAME_STEP)
    for group, ids in enumerate(groups):
        began_s = now()
        batch = pool.recv(ids)
        stopwatch.environment_s += now() - began_s
        recorder.add_results(num_steps - 1, group, batch)
        recorder.add_last_obs(group, batch.obs)
        if begin_episodes is not None:
            begin_episodes(_begun(pool, batch))
    return recorder.chunk(first_step, weights_version)


def _begun(pool: EnvPool, batch: StepBatch) -> NDArray[np.int64]:
    """Returns which environments have been reset; a pool of another process knows only of those that ended."""
    if isinstance(pool, SerialPool):
        return pool.take_begun()
    return np.flatnonzero(batch.terminated | batch.truncated)


def _begun_before(pool: EnvPool, batch: StepBatch, begun: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Returns which environments are in an episode that the policy does not know, before the first step."""
    ids = set() if begun is None else set(begun.tolist())
    if isinstance(pool, SerialPool):
        ids.update(pool.take_begun().tolist())
    ids.update(info.env_id for info in batch.info if RESTARTED in info.info)
    return np.array(sorted(ids), np.int64)


class _Recorder:
    """Writes what happens into the arrays of a chunk."""

    def __init__(
        self, num_steps: int, num_envs: int, first_id: int, action_layout: ArrayLayout | None, empty: Empty
    ) -> None:
        self._action_layout = action_layout
        self._empty = empty
        self._lead = (num_steps, num_envs)
        self._first_id = first_id
        self._rew = np.zeros(self._lead)
        self._terminated = np.zeros(self._lead, bool)
        self._truncated = np.zeros(self._lead, bool)
        self._valid = np.ones(self._lead, bool)
        self._restarts: list[tuple[int, int]] = []
        self._cuts: list[tuple[int, int]] = []
        self._obs: Tree = None
        self._last_obs: Tree = None
        self._act: Tree = None
        self._extras: dict[str, NDArray[Any]] = {}
        self._finals: list[tuple[int, int, Any]] = []
        self._infos: list[ChunkInfo] = []
        self._reset_infos: list[ChunkInfo] = []
        self._counts: list[int] = []
        self._checked: dict[int, list[tuple[int, ...]] | None] = {}
        self.columns: list[Any] = []

    def allocate(self, group: int, ids: NDArray[np.int64], obs: Tree) -> None:
        """Learns the columns of a group, and with the first the shapes of observations."""
        self._counts.append(len(ids))
        self.columns.append(as_slice(ids))
        if group == 0:
            self._obs = _empty_like(obs, self._lead, self._empty)
            self._last_obs = _empty_like(obs, self._lead[1:], self._empty)

    def add_obs(self, t: int, group: int, obs: Tree) -> None:
        _assign(self._obs, (t, self.columns[group]), obs)

    def add_last_obs(self, group: int, obs: Tree) -> None:
        _assign(self._last_obs, self.columns[group], obs)

    def add_actions(self, t: int, group: int, actions: Tree, extras: dict[str, NDArray[Any]]) -> None:
        shapes = [np.shape(actions), *map(np.shape, extras.values())] if type(actions) is np.ndarray else None
        if shapes is None or shapes != self._checked.get(group):
            _check_rows(actions, extras, self._counts[group], self._action_layout)
            self._checked[group] = shapes
        if self._act is None:
            self._act = _empty_like(actions, self._lead, self._empty)
            self._extras = {name: _empty_like(extra, self._lead, self._empty) for name, extra in extras.items()}
        _assign(self._act, (t, self.columns[group]), actions)
        for name, extra in extras.items():
            self._extras[name][t, self.columns[group]] = extra

    def add_results(self, t: int, group: int, batch: StepBatch) -> None:
        columns = self.columns[group]
        self._rew[t, columns] = batch.rew
        self._terminated[t, columns] = batch.terminated
        self._truncated[t, columns] = batch.truncated
        if batch.info:
            self.add_infos(t, batch)

    def add_infos(self, t: int, batch: StepBatch) -> None:
        resets = self._reset_infos if t < 0 else self._infos
        for env_id, info, final_obs, final_info in batch.info:
            column = env_id - self._first_id
            if final_info is None:
                if t < 0 and RESTARTED in info:
                    self._restarts.append((-1, column))
                resets.append(ChunkInfo(t, column, info))
                continue
            if RESTARTED in final_info:
                self._take_back(t, column)
                if info:
                    self._reset_infos.append(ChunkInfo(t, column, info))
                continue
            self._finals.append((t, column, final_obs))
            if final_info:
                self._infos.append(ChunkInfo(t, column, final_info))
            if info:
                self._reset_infos.append(ChunkInfo(t, column, info))

    def _take_back(self, t: int, column: int) -> None:
        """Marks a step that did not happen; the episode ended, at the observation that it began with.

        That is as it was recorded: the policy may have written in the arrays that it was given.
        """
        self._restarts.append((t, column))
        self._valid[t, column] = False
        self._truncated[t, column] = False
        before = t - 1
        if before >= 0 and self._valid[before, column]:
            if not (self._terminated[before, column] or self._truncated[before, column]):
                self._truncated[before, column] = True
                self._cuts.append((before, column))
                obs = index_tree(tree_map(lambda leaf: leaf[t], self._obs), column)
                self._finals.append((before, column, deepcopy(obs)))

    def chunk(self, first_step: int, weights_version: int) -> Chunk:
        self._finals.sort(key=itemgetter(0, 1))
        return Chunk(
            env_ids=self._first_id + np.arange(self._lead[1]),
            obs=self._obs,
            act=self._act,
            rew=self._rew,
            terminated=self._terminated,
            truncated=self._truncated,
            valid=self._valid,
            last_obs=self._last_obs,
            final_index=np.array([item[:2] for item in self._finals], np.int64).reshape(-1, 2),
            final_obs=self._stack_finals(),
            extras=self._extras,
            infos=ChunkInfos.of(self._infos),
            reset_infos=ChunkInfos.of(self._reset_infos),
            restarts=np.array(sorted(self._restarts), np.int64).reshape(-1, 2),
            cuts=np.array(sorted(self._cuts), np.int64).reshape(-1, 2),
            weights_version=weights_version,
            first_step=first_step,
        )

    def _stack_finals(self) -> Tree:
        stacked = _empty_like(self._last_obs, (len(self._finals),), self._empty)
        write = tree_writer(stacked)
        for row, (_, _, obs) in enumerate(self._finals):
            write(row, obs)
        return stacked


def _check_rows(actions: Tree, extras: dict[str, NDArray[Any]], count: int, action_layout: ArrayLayout | None) -> None:
    """Refuses what a policy returned if it has not one action, of the right shape, for each environment."""
    if action_layout is None:
        fits, got = len(actions) == count, f"{len(actions)} actions"
    else:
        try:
            shapes = [np.shape(leaf) for leaf in action_layout.flatten(actions)]
            fits, got = shapes == [(count, *shape) for _, shape in action_layout.leaves], f"shapes {shapes}"
        except ValueError as error:
            fits, got = False, str(error)
    for name, extra in extras.items():
        if np.shape(extra)[:1] != (count,):
            fits, got = False, f"{name} of shape {np.shape(extra)}"
    if not fits:
        raise ConfigError(
            "A policy returns one action, and one row of what it records, for each observation.",
            expected=f"{count} rows; actions of the action space, stacked",
            got=got,
            remedy="Let it return an array [k, *act_shape] for observations [k, *obs_shape].",
        )


def _empty_like(tree: Tree, leading: tuple[int, ...], empty: Empty) -> Tree:
    """Allocates arrays shaped like a batch, its one leading axis replaced by others."""
    return tree_map(lambda leaf: empty((*leading, *np.shape(leaf)[1:]), np.asarray(leaf).dtype), tree)


def _assign(target: Tree, index: Any, source: Tree) -> None:
    if isinstance(target, np.ndarray):
        target[index] = source
        return
    for array, value in zip(tree_leaves(target), tree_leaves(source), strict=True):
        array[index] = value
