"""The rollout loop: a policy and environments take T steps, wherever the policy acts.

The same function runs in every worker over its own environments, and in the driver over all of them. With
more than one group the policy acts on one group while the environments of the others step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Chunk, ChunkRequest, RolloutTimes, StepBatch, Tree, as_slice
from rayvec.data.chunk import StopEarly
from rayvec.data.layouts import ArrayLayout
from rayvec.errors import ConfigError
from rayvec.fleet.commands import Autoreset, Command, Op
from rayvec.policies.noise import NO_NOISE, NoiseSpec, keyed_noise
from rayvec.rollout.column_recorder import ColumnRecorder, Empty, restarted_in

if TYPE_CHECKING:
    from rayvec.rollout.policy_host import PolicyHost

__all__ = ["ActingPolicy", "CallablePolicy", "TakenChunk", "as_policy", "rollout"]


class ActingPolicy(Protocol):
    """What a rollout requires of a policy. The policy can be pickled, and imports what it needs where it acts.

    A policy with a hidden state for each environment acts on all of them at once. It has a method
    ``begin_episodes(rows)`` besides, which resets the state of environments whose next observation begins an episode,
    and may have ``state_to_record``: see :meth:`rayvec.policies.recurrent.RecurrentActor.state_to_record`.
    """

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

    def load_weights(self, weights: NDArray[np.float32]) -> None:
        """Loads newly published weights, one flat vector; it must copy what it keeps."""


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


class TakenChunk(NamedTuple):
    """A chunk, and the times of each process that has taken a part of it."""

    chunk: Chunk
    times: tuple[RolloutTimes, ...]

    @property
    def last_obs(self) -> Tree:
        """The last observation of each environment; its episode continues from there."""
        return self.chunk.last_obs


def rollout(
    host: PolicyHost,
    policy: ActingPolicy,
    request: ChunkRequest,
    weights_version: int,
    begun: NDArray[np.int64] | None,
    cut: StopEarly | None,
    empty: Empty,
) -> TakenChunk:
    """Takes the requested steps of every environment, or fewer if `cut` says so.

    Environments that are between two episodes are reset first; those whose episode ends are reset within
    the step. Episodes that have not ended continue in the next chunk. Native sub-batches that reset in their next step
    do so here too: that step is not `valid`.

    Args:
        host: Has the environments, ids 0 to N-1, and their groups: while one steps, the policy acts on the next.
        policy: Chooses the actions.
        request: How many steps, and which noise.
        weights_version: Written into the chunk.
        begun: Ids of environments whose current episode began without the policy; None for all. A recurrent policy
            resets its hidden state for them, and for each environment that is reset from now on.
        cut: Called after each step. The rollout ends once it returns True.
        empty: Allocates the chunk's large arrays.

    Returns:
        The chunk, which shares no memory with the environments' arrays, and its times.
    """
    now, began_s, environment_s, inference_s = time.perf_counter, time.perf_counter(), 0.0, 0.0
    num_steps, first_step, noise_seed = request
    begin_episodes = getattr(policy, "begin_episodes", None)
    state_to_record = getattr(policy, "state_to_record", None)
    groups = host.groups if begin_episodes is None else [np.arange(host.num_envs)]
    env_ids, columns = host.first_id + np.arange(host.num_envs), [as_slice(ids) for ids in groups]
    noise = keyed_noise(policy.noise, seed=noise_seed, env_ids=env_ids, first_step=first_step, num_steps=num_steps)
    tickets = [host.target.post(Command(Op.BEGIN, ids)) for ids in groups]
    batches = [host.results(*each) for each in zip(tickets, groups, columns, strict=True)]
    next_step = host.native_mode == Autoreset.NEXT_STEP
    autoreset = Autoreset.NEXT_STEP if next_step else Autoreset.SAME_STEP
    recorder = ColumnRecorder(num_steps, env_ids, columns, batches, host.action_layout, empty, next_step=next_step)
    if begin_episodes is not None:
        begin_episodes(_begun_before(batches[0], groups[0] if begun is None else begun))
    for t in range(num_steps + 1):
        for group, ids in enumerate(groups):
            if t > 0:
                waits_s = now()
                batches[group] = host.results(tickets[group], ids, columns[group])
                environment_s += now() - waits_s
                recorder.add_results(t - 1, group, batches[group])
                if begin_episodes is not None:
                    begin_episodes(recorder.begun_in(t - 1, batches[group]))
                if group == 0 and cut is not None and cut(t * host.num_envs):
                    recorder.num_steps = t
            obs = batches[group].obs
            recorder.add_obs(t, group, obs)
            if t < recorder.num_steps:
                acts_s = now()
                if state_to_record is not None and (state := state_to_record(t, host.num_envs)) is not None:
                    recorder.add_state(state)
                given = recorder.to_act_on(t, group, obs)
                actions, extras = _pair(policy.act(given, noise[t, columns[group]]))
                inference_s += now() - acts_s
                if type(actions) is not np.ndarray:
                    actions = _stacked(actions, host.action_layout)
                recorder.add_actions(t, group, actions, extras)
                steps_s = now()  # a slice of this process steps now
                tickets[group] = host.target.post(Command(Op.STEP, ids, actions, autoreset))
                environment_s += now() - steps_s
        if t == recorder.num_steps:
            break
    chunk = recorder.chunk(first_step, weights_version)
    return TakenChunk(chunk, (RolloutTimes(now() - began_s, environment_s, inference_s),))


def _pair(acted: Any) -> tuple[Tree, dict[str, NDArray[Any]]]:
    """Returns what a policy's `act` has returned.

    Raises:
        ConfigError: It is not actions and what is recorded beside them.
    """
    if type(acted) is tuple and len(acted) == 2 and isinstance(acted[1], dict):
        return acted
    raise ConfigError(
        f"`act` of a policy has returned {type(acted).__name__}. It must return (actions, extras), where extras is a "
        "dict: return actions, {} if there is nothing to record."
    )


def _stacked(actions: Any, layout: ArrayLayout | None) -> Tree:
    """Returns a policy's actions as arrays. If they are objects, it returns an array of them, ``object [k]``."""
    if layout is None:
        return np.fromiter(actions, object, len(actions)) if isinstance(actions, (list, tuple)) else actions
    with suppress(ValueError):  # of another structure, which the recorder says
        return layout.tree([np.asarray(leaf) for leaf in layout.flatten(actions)])
    return actions


def _begun_before(batch: StepBatch, begun: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns which environments are, before the first step, in an episode whose beginning the policy has not seen."""
    has_begun = restarted_in(batch.info, len(batch.env_ids))
    has_begun[begun] = True
    return np.flatnonzero(has_begun)
