"""The rollout loop: a policy and a pool take T steps, wherever the policy acts.

The same function runs in every worker over its own environments, and in the driver over all of them. With
more than one group the policy acts on one group while the environments of the others step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Chunk, RolloutTimes, StepBatch, Tree
from rayvec.data.chunk import Cut
from rayvec.data.layouts import ArrayLayout
from rayvec.errors import ConfigError
from rayvec.fleet.commands import Autoreset
from rayvec.policies.noise import NO_NOISE, NoiseSpec, keyed_noise
from rayvec.rollout.column_recorder import ColumnRecorder, Empty, restarted_in
from rayvec.rollout.stepper import Stepper

__all__ = ["ActingPolicy", "CallablePolicy", "RecurrentPolicy", "as_policy", "rollout"]


class ActingPolicy(Protocol):
    """What a rollout requires of a policy. The policy can be pickled, and imports what it needs where it acts."""

    noise: NoiseSpec
    """How much noise the policy needs. Noise is a function of (seed, environment, step), so actions do not depend on
    the process that chooses them."""

    def act(self, obs: Tree, noise: NDArray[np.float64]) -> tuple[Tree, dict[str, NDArray[Any]]]:
        """Chooses actions.

        Args:
            obs: Tree of ``[k, *obs_shape]``.
            noise: ``float64 [k, lanes]``.

        Returns:
            Actions, tree of ``[k, *act_shape]``, and what to record beside them, ``[k, ...]`` by name. Names
            and shapes are the same at every step.
        """
        ...

    def load_weights(self, weights: NDArray[np.float32]) -> None:
        """Loads newly published weights, one flat vector; it must copy what it keeps."""
        ...


class RecurrentPolicy(ActingPolicy, Protocol):
    """A policy with a hidden state for each environment: it acts on all of them at once, and learns of new episodes.

    If it has a method ``state_to_record``, the chunk keeps what that returns: see
    :meth:`rayvec.policies.recurrent.RecurrentActor.state_to_record`.
    """

    def begin_episodes(self, rows: NDArray[np.int64]) -> None:
        """Resets the hidden state of some environments, whose next observation begins an episode."""
        ...


class CallablePolicy:
    """Any callable from observations to actions, as a policy without noise and without weights."""

    noise = NO_NOISE

    def __init__(self, function: Callable[[Tree], Tree]) -> None:
        self._function = function

    def act(self, obs: Tree, noise: NDArray[np.float64]) -> tuple[Tree, dict[str, NDArray[Any]]]:
        """Calls the function."""
        actions = self._function(obs)
        return (actions if isinstance(actions, (dict, tuple, list)) else np.asarray(actions)), {}

    def load_weights(self, weights: NDArray[np.float32]) -> None:
        """Raises ``ConfigError``: a callable has no weights."""
        raise ConfigError(
            f"Weights were published to the callable {self._function!r}, which has none. Wrap the module: "
            "rayvec.Policy(module)."
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
        f"The policy is {type(policy).__name__}. It must be a rayvec.Policy, or a function of a batch of "
        "observations that returns actions."
    )


class Stopwatch:
    """Measures where the time of a rollout goes.

    Attributes:
        environment_s: Seconds spent waiting for environments.
        inference_s: Seconds spent in the policy.
    """

    def __init__(self) -> None:
        self.environment_s = 0.0
        self.inference_s = 0.0
        self._began_s = time.perf_counter()

    def read(self) -> RolloutTimes:
        """Returns the times since the stopwatch was made."""
        return RolloutTimes(time.perf_counter() - self._began_s, self.environment_s, self.inference_s)


def rollout(
    pool: Stepper,
    policy: ActingPolicy,
    num_steps: int,
    *,
    noise_seed: int = 0,
    first_step: int = 0,
    groups: Sequence[NDArray[np.int64]] | None = None,
    weights_version: int = 0,
    begun: NDArray[np.int64] | None = None,
    stopwatch: Stopwatch | None = None,
    empty: Empty = np.empty,
    cut: Cut | None = None,
) -> Chunk:
    """Takes `num_steps` steps of every environment of `pool`, or fewer if `cut` says so.

    Environments that are between two episodes are reset first; those whose episode ends are reset within
    the step. Episodes that have not ended continue in the next chunk. Native sub-batches that reset in their next step
    do so here too: that step is not `valid`.

    Args:
        pool: The environments, ids 0 to N-1.
        policy: Chooses the actions.
        num_steps: T.
        noise_seed: Seed of the noise.
        first_step: Number of steps that the environments took in earlier chunks.
        groups: Partition of the ids; while one group steps, the policy acts on the next. One group by default.
        weights_version: Written into the chunk.
        begun: Ids of environments whose current episode began without the policy, by default all. A recurrent policy
            resets its hidden state for them, and for each environment that is reset from now on.
        stopwatch: Receives the times.
        empty: Allocates the chunk's large arrays.
        cut: Called after each step. The rollout ends once it returns True.

    Returns:
        The chunk; it shares no memory with the pool.
    """
    now, stopwatch = time.perf_counter, stopwatch or Stopwatch()
    begin_episodes = getattr(policy, "begin_episodes", None)
    state_to_record = getattr(policy, "state_to_record", None)
    if groups is None or begin_episodes is not None:
        groups = [np.arange(pool.num_envs)]
        groups[0].setflags(write=False)  # pools recognise a read-only array that is passed again
    env_ids = pool.first_id + np.arange(pool.num_envs)
    noise = keyed_noise(policy.noise, seed=noise_seed, env_ids=env_ids, first_step=first_step, num_steps=num_steps)
    for ids in groups:
        pool.begin_episodes(ids)
    batches = [pool.recv(ids) for ids in groups]
    next_step = pool.native_mode == Autoreset.NEXT_STEP
    autoreset = Autoreset.NEXT_STEP if next_step else Autoreset.SAME_STEP
    recorder = ColumnRecorder(num_steps, env_ids, groups, batches, pool.action_layout, empty, next_step=next_step)
    if begin_episodes is not None:
        begun = groups[0] if begun is None else begun
        begin_episodes(_begun_before(pool.first_id, batches[0], begun))
    for t in range(num_steps + 1):
        for group, ids in enumerate(groups):
            if t > 0:
                began_s = now()
                batches[group] = pool.recv(ids)
                stopwatch.environment_s += now() - began_s
                recorder.add_results(t - 1, group, batches[group])
                if begin_episodes is not None:
                    begin_episodes(recorder.begun_in(t - 1, batches[group]))
                if group == 0 and cut is not None and cut(t * pool.num_envs):
                    recorder.num_steps = t
            obs = batches[group].obs
            recorder.add_obs(t, group, obs)
            if t < recorder.num_steps:
                began_s = now()
                if state_to_record is not None and (state := state_to_record(t, pool.num_envs)) is not None:
                    recorder.add_state(state)
                given = recorder.to_act_on(t, group, obs)
                actions, extras = _two_results(policy.act(given, noise[t, recorder.columns[group]]))
                stopwatch.inference_s += now() - began_s
                if type(actions) is not np.ndarray:
                    actions = _stacked(actions, pool.action_layout)
                recorder.add_actions(t, group, actions, extras)
                began_s = now()
                pool.send(ids, actions, autoreset)  # a slice of this process steps now
                stopwatch.environment_s += now() - began_s
        if t == recorder.num_steps:
            break
    return recorder.chunk(first_step, weights_version)


def _two_results(results: Any) -> tuple[Tree, dict[str, NDArray[Any]]]:
    if type(results) is tuple and len(results) == 2 and isinstance(results[1], dict):
        return results
    kinds = [type(each).__name__ for each in results] if type(results) is tuple else type(results).__name__
    raise ConfigError(
        f"`act` of a policy has returned {kinds}. It must return a tuple (actions, extras), where extras is a dict of "
        "what is recorded beside the actions: return actions, {} if there is nothing to record."
    )


def _stacked(actions: Any, layout: ArrayLayout | None) -> Tree:
    """Returns a policy's actions as arrays. If they are objects, it returns an array of them, ``object [k]``."""
    if layout is None:
        return np.fromiter(actions, object, len(actions)) if isinstance(actions, (list, tuple)) else actions
    with suppress(ValueError):  # of another structure, which the recorder says
        return layout.tree([np.asarray(leaf) for leaf in layout.flatten(actions)])
    return actions


def _begun_before(first_id: int, batch: StepBatch, begun: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns which environments are, before the first step, in an episode whose beginning the policy has not seen."""
    ids = set(begun.tolist())
    if isinstance(batch.info, dict):
        ids.update(np.flatnonzero(restarted_in(batch.info, len(batch.env_ids))).tolist())
    return np.array(sorted(ids), np.int64)
