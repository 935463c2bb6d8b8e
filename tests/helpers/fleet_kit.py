"""Fleets whose children step in this process and can die, and environments that show episode, step and seed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import gymnasium
import numpy as np

from rayvec.data.layouts import ArrayLayout
from rayvec.envs.factory import EnvFactory
from rayvec.envs.native_slices import NativeSlice
from rayvec.envs.slices import Slice, own_arrays
from rayvec.errors import WorkerLostError
from rayvec.fleet.commands import Answer, Autoreset, ChildLost, Command, Op
from rayvec.fleet.fleet import Fleet
from rayvec.fleet.restarts import NO_RESTARTS, RestartPolicy
from rayvec.node.in_process import InProcess
from rayvec.rollout.policy_host import PolicyHost

RESTART = RestartPolicy(restart=True)


class Dies(Exception):
    """Raised by an environment: its child dies then, in the midst of a command."""


class Here:
    """A child that executes commands in this process, when it is waited for."""

    def __init__(self, slice_: Slice, name: str = "child") -> None:
        self.slice, self.name = slice_, name
        self.num_envs = slice_.num_envs
        self.pending: deque[Command] = deque()
        self.is_dead = False

    def open(self, arrays: dict[str, Any]) -> None:
        self.slice.open(arrays)

    def post(self, command: Command) -> None:
        self.pending.append(command)

    def wait(self, timeout_s: float) -> Answer | None:
        if not self.is_dead and not self.pending:
            return None
        answer = None if self.is_dead else self.slice.execute(self.pending.popleft())
        if answer is None or (answer.failure is not None and "Dies" in answer.failure.type_name):
            raise ChildLost(WorkerLostError(f"{self.name} died."))
        return answer

    def kill(self) -> None:
        self.pending.clear()

    def close(self) -> None:
        self.slice.close()

    def join(self, timeout_s: float) -> bool:
        return True


def slice_of(
    env_fns: Sequence[Callable[[], Any]], policy: RestartPolicy = NO_RESTARTS, first_id: int = 0, native: bool = False
) -> Slice:
    kind = NativeSlice if native else Slice
    return kind(EnvFactory.build(list(env_fns), native=native), first_id, "this test", policy)


def fleet_of(
    env_fns: Sequence[Callable[[], Any]],
    num_children: int,
    policy: RestartPolicy = NO_RESTARTS,
    native: bool = False,
) -> Fleet:
    """Returns a fleet of children in this process; lost children are replaced if the policy restarts environments."""
    ends = np.linspace(0, len(env_fns), num_children + 1).astype(int)
    bounds = [0]

    def start(k: int, lost: Any = None) -> Here:
        fns = env_fns[ends[k] : ends[k + 1]]
        return Here(slice_of(fns, NO_RESTARTS, bounds[k], native), f"child {k}")

    children = []
    for k in range(num_children):
        children.append(start(k))
        bounds.append(bounds[-1] + children[-1].num_envs)
    fleet = Fleet(children, bounds, start if policy.restart else None)
    spaces = children[0].slice.spaces
    fleet.open(own_arrays(ArrayLayout.with_objects(spaces.observation), bounds[-1]))
    return fleet


def host_of(env_fns: Sequence[Callable[[], Any]], first_id: int = 0) -> PolicyHost:
    """Returns environments of this process, over which policies act."""
    pool = InProcess(slice_of(env_fns, first_id=first_id))
    pool.allocate(pool.spaces.observation, pool.spaces.action)
    return PolicyHost(pool, ArrayLayout.of(pool.spaces.action), first_id)


def reset_with(pool: PolicyHost, seeds: Sequence[int]) -> None:
    """Resets environments, each with its seed."""
    pool.target.post(Command(Op.RESET, np.arange(len(seeds)), rest=(list(seeds), None)))


class Steps(gymnasium.Env[Any, Any]):
    """Shows ``(episode, step, seed)``, and fails at some steps.

    Args:
        length: Steps of an episode.
        fails_at: Numbers of calls of ``step``, counted from 1, at which it raises `error`; those in a set once.
        error: What it raises.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length: int = 4, fails_at: Collection[int] = (), error: type[Exception] = RuntimeError) -> None:
        self.length, self.fails_at, self.error = length, fails_at, error
        self.calls = self.episode = self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.steps = self.episode + 1, 0
        return self.obs(), {"began": self.episode}

    def step(self, action: Any) -> Any:
        self.calls += 1
        self.steps += 1
        if self.calls in self.fails_at:
            if isinstance(self.fails_at, set):
                self.fails_at.discard(self.calls)
            raise self.error("boom")
        return self.obs(), 1.0, False, self.steps >= self.length, {}

    def obs(self) -> Any:
        return np.array([self.episode, self.steps, float(self.np_random_seed or 0)])


def reset(fleet: Any) -> None:
    seeds = list(range(5, 5 + fleet.num_envs))
    fleet.run(Command(Op.RESET, np.arange(fleet.num_envs), rest=(seeds, None)))


def step(fleet: Any, mode: Autoreset = Autoreset.NEXT_STEP) -> Answer:
    answer: Answer = fleet.run(Command(Op.STEP, np.arange(fleet.num_envs), np.zeros(fleet.num_envs, np.int64), mode))
    return answer
