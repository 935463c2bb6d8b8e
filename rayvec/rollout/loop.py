"""The rollout loop: a policy and environments take T steps, wherever the policy acts.

The same loop runs in every worker over its own environments, in the process that owns the workers of a node, and in the
driver over all of them. With more than one group the policy acts on one group while the environments of the others
step.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Chunk, StepBatch, Tree, as_slice
from rayvec.data.chunk import StopEarly, join_chunks
from rayvec.data.trees import index_tree
from rayvec.envs.failures import FAILURES, captured
from rayvec.errors import ConfigError
from rayvec.fleet.commands import Answer, Autoreset, Command, Note, Op
from rayvec.policies.noise import NO_NOISE, NoiseSpec, keyed_noise
from rayvec.rollout.column_recorder import ColumnRecorder, Empty, restarted_in


class ChunkRequest(NamedTuple):
    """A request for a chunk.

    Attributes:
        key: The key of the policy.
        num_steps: The number of steps T.
        first_step: The number of steps that the environments took in earlier chunks.
        noise_seed: The seed of the policy's noise.
        version: The version of the weights, which is written into the chunk.
        weights: The weights to act with, ``float32 [P]``; None for those that the policy has.
        place: Where workers of a machine write the chunk, and read the weights; the machine's fleet says so.
    """

    key: int
    num_steps: int
    first_step: int
    noise_seed: int
    version: int = 0
    weights: NDArray[np.float32] | None = None
    place: Any = None


class RolloutTimes(NamedTuple):
    """Wall time of one rollout in seconds, and its steps.

    Attributes:
        whole_s: From beginning to end.
        environment_s: The part of it spent waiting for environments.
        inference_s: The part of it spent in the policy.
        num_steps: How many steps the environments have taken together.
    """

    whole_s: float
    environment_s: float
    inference_s: float
    num_steps: int


class Rollout(NamedTuple):
    """The result of one rollout, or of several that were joined.

    Attributes:
        chunk: The chunk.
        times: Times of each process that has taken a part of it.
        waited_s: How long the caller waited, in seconds.
    """

    chunk: Chunk
    times: tuple[RolloutTimes, ...]
    waited_s: float = 0.0

    @property
    def num_taken(self) -> int:
        """How many steps were taken: fewer than the chunk has places, if it was cut."""
        return sum(each.num_steps for each in self.times)


def join_rollouts(rollouts: Sequence[Rollout], *, copy: bool = True) -> Rollout:
    """Joins what several processes have taken of a chunk; `copy` is that of :func:`join_chunks`."""
    chunk = join_chunks([each.chunk for each in rollouts], copy=copy)
    return Rollout(chunk, tuple(times for each in rollouts for times in each.times))


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
        return self._function(obs), {}

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


class PolicyHost:
    """The policies that act over some environments, in a worker, in a node's process or in the driver.

    A recurrent policy resets its hidden state where an episode began outside of chunks, or everywhere if it has not
    seen the last steps.

    Args:
        target: Executes commands: a fleet or a slice.
        groups: Partition of the rows: the policy acts on one group while the next one steps. One group by default.

    Attributes:
        notes: What was restarted, for the log, until the caller takes the list.
    """

    def __init__(self, target: Any, groups: Sequence[NDArray[np.int64]] | None = None) -> None:
        self._target, self._groups = target, groups or [np.arange(target.num_envs)]
        next_step = target.spaces.native_mode == Autoreset.NEXT_STEP
        self._autoreset = Autoreset.NEXT_STEP if next_step else Autoreset.SAME_STEP
        self.notes: list[Note] = []
        self._policies: dict[int, tuple[ActingPolicy, int]] = {}  # by key, each with the version of its weights
        self._last_to_act: tuple[ActingPolicy | None, int] = None, 0  # and how often environments had been stepped then

    def load(self, key: int, policy: ActingPolicy | bytes) -> None:
        """Takes a policy of this process, or loads a pickled one."""
        acting = as_policy(pickle.loads(policy)) if isinstance(policy, bytes) else policy
        self._policies[key] = acting, 0

    def load_weights(self, key: int, weights: NDArray[np.float32], version: int) -> None:
        """Gives a policy the weights of a version, unless it has them."""
        policy, held = self._policies[key]
        if version != held:
            policy.load_weights(weights)
            self._policies[key] = policy, version

    def drop(self, key: int) -> None:
        """Removes a policy."""
        self._policies.pop(key, None)

    def execute(self, op: int, rest: Any, where: str, take: Callable[[ChunkRequest], Rollout] | None = None) -> Answer:
        """Executes a command for policies. Returns its result or failure, and what was restarted.

        Args:
            op: ``LOAD``, ``DROP`` or ``ROLLOUT``.
            rest: What else the operation needs.
            where: What errors call this process.
            take: Takes a chunk in place of :meth:`take`.
        """
        value: Any = None
        try:
            if op == Op.ROLLOUT:
                value = (take or self.take)(rest)
            elif op == Op.LOAD:
                self.load(*rest)
            else:
                self.drop(*rest)
        except FAILURES as error:
            return Answer(failure=captured(error, where))
        return Answer(value=value, notes=self.take_notes())

    def take_notes(self) -> tuple[Note, ...]:
        """Returns what was restarted since the last call, for the log."""
        notes, self.notes = tuple(self.notes), []
        return notes

    def take(self, request: ChunkRequest, cut: StopEarly | None = None, empty: Empty = np.empty) -> Rollout:
        """Takes the requested steps of every environment with a loaded policy.

        Environments that are between two episodes are reset first; those whose episode ends are reset within
        the step. Episodes that have not ended continue in the next chunk. Native sub-batches that reset in their next
        step do so here too: that step is not `valid`.

        Args:
            request: The policy, how many steps, and which noise.
            cut: Called after each step. The rollout ends once it returns True.
            empty: Allocates the chunk's large arrays.

        Returns:
            The chunk, which shares no memory with the environments' arrays, and its times.
        """
        (policy, _), target = self._policies[request.key], self._target
        if request.weights is not None:
            self.load_weights(request.key, request.weights, request.version)
        last_policy, num_stepped = self._last_to_act
        has_seen_all = policy is last_policy and num_stepped == target.num_stepped
        rollout = self._rollout(policy, request, target.was_reset if has_seen_all else None, cut, empty)
        restarts = rollout.chunk.restarts
        at_end = restarts[:, 0] == rollout.chunk.num_steps - 1  # the policy has not seen the episode that begins next
        target.was_reset[:] = False
        target.was_reset[restarts[at_end, 1]] = True
        self._last_to_act = policy, target.num_stepped
        return rollout

    def _rollout(
        self,
        policy: ActingPolicy,
        request: ChunkRequest,
        begun: NDArray[np.bool_] | None,
        cut: StopEarly | None,
        empty: Empty,
    ) -> Rollout:
        """Takes the steps. `begun` says whose current episode began without the policy, ``bool [N]``; None: all."""
        now, began_s, environment_s, inference_s = time.perf_counter, time.perf_counter(), 0.0, 0.0
        target, num_envs, num_steps = self._target, self._target.num_envs, request.num_steps
        begin_episodes = getattr(policy, "begin_episodes", None)
        state_to_record = getattr(policy, "state_to_record", None)
        groups = self._groups if begin_episodes is None else [np.arange(num_envs)]
        env_ids, columns = target.first_id + np.arange(num_envs), [as_slice(ids) for ids in groups]
        noise = keyed_noise(
            policy.noise,
            seed=request.noise_seed,
            env_ids=env_ids,
            first_step=request.first_step,
            num_steps=num_steps,
        )
        tickets = [target.post(Command(Op.BEGIN, ids)) for ids in groups]
        batches = [self._results(*each) for each in zip(tickets, groups, columns, strict=True)]
        layout, next_step = target.action_layout, self._autoreset == Autoreset.NEXT_STEP
        recorder = ColumnRecorder(num_steps, env_ids, columns, batches, layout, empty, next_step=next_step)
        if begin_episodes is not None:
            has_begun = restarted_in(batches[0].info, num_envs)
            begin_episodes(groups[0] if begun is None else np.flatnonzero(has_begun | begun))
        for t in range(num_steps + 1):
            for group, ids in enumerate(groups):
                if t > 0:
                    waits_s = now()
                    batches[group] = self._results(tickets[group], ids, columns[group])
                    environment_s += now() - waits_s
                    recorder.add_results(t - 1, group, batches[group])
                    if begin_episodes is not None:
                        begin_episodes(recorder.begun_in(t - 1, batches[group]))
                    if group == 0 and cut is not None and cut(t * num_envs):
                        recorder.num_steps = t
                obs = batches[group].obs
                recorder.add_obs(t, group, obs)
                if t < recorder.num_steps:
                    acts_s = now()
                    if state_to_record is not None and (state := state_to_record(t, num_envs)) is not None:
                        recorder.add_state(state)
                    given = recorder.to_act_on(t, group, obs)
                    actions, extras = _pair(policy.act(given, noise[t, columns[group]]))
                    inference_s += now() - acts_s
                    actions = recorder.add_actions(t, group, actions, extras)
                    steps_s = now()  # a slice of this process steps now
                    tickets[group] = target.post(Command(Op.STEP, ids, actions, self._autoreset))
                    environment_s += now() - steps_s
            if t == recorder.num_steps:
                break
        chunk = recorder.chunk(request.first_step, request.version)
        return Rollout(chunk, (RolloutTimes(now() - began_s, environment_s, inference_s, chunk.valid.size),))

    def _results(self, ticket: Any, env_ids: NDArray[np.int64], rows: Any) -> StepBatch:
        """Waits for a command, and returns its results as views of the arrays.

        Args:
            ticket: Of the command.
            env_ids: Its environments.
            rows: The same, a slice if they are consecutive.

        Raises:
            Exception: What an environment raised that was not restarted. Its ``__cause__`` is an ``EnvError``.
        """
        self._target.wait(ticket)
        answer, arrays = self._target.take(ticket), self._target.arrays
        self.notes += answer.notes
        if answer.failure is not None:
            raise answer.failure.rebuild()
        rew, terminated, truncated = (arrays[name][rows] for name in ("rew", "terminated", "truncated"))
        return StepBatch(env_ids, index_tree(arrays["obs"], rows), rew, terminated, truncated, answer.infos)


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
