"""Policies over slices and fleets take the chunks that they take over the environments of one process."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers.chunks import assert_same_chunk
from helpers.exact import DriftEnv, SpaceEnv, TablePolicy
from helpers.fleet_kit import RESTART, Steps, slice_of
from helpers.testing import assert_identical

from rayvec.data import Chunk, ChunkRequest
from rayvec.data.join_chunks import join_chunks
from rayvec.data.layouts import ArrayLayout
from rayvec.envs.factory import EnvFactory
from rayvec.envs.slices import own_arrays
from rayvec.fleet.commands import Command, Op
from rayvec.fleet.restarts import NO_RESTARTS, RestartPolicy
from rayvec.node.in_process import InProcess
from rayvec.node.machine import Machine
from rayvec.policies.noise import NO_NOISE
from rayvec.rollout.policy_host import ChunkOrder, PolicyHost

SEED, STEPS = 5, 9
DRIFT = [DriftEnv] * 5
SPACE = [partial(SpaceEnv, gymnasium.spaces.Box(-1, 1, (2,), np.float32))] * 3


def run(target: Any, command: Command) -> Any:
    ticket = target.post(command)
    target.wait(ticket)
    answer = target.take(ticket)
    assert answer.failure is None, answer.failure
    return answer.value


def reset(target: Any) -> None:
    rows = np.arange(target.num_envs)
    run(target, Command(Op.RESET, rows, rest=([SEED + row for row in rows.tolist()], None)))


def slice_host(fns: Sequence[Callable[[], Any]], policy: RestartPolicy = NO_RESTARTS, native: bool = False) -> Any:
    slice_ = slice_of(fns, policy, native=native)
    layout = ArrayLayout.with_objects(slice_.spaces.observation)
    slice_.open(own_arrays(layout, slice_.num_envs))
    here = InProcess(slice_)
    reset(here)
    return PolicyHost(here, ArrayLayout.of(slice_.spaces.action), 0, slice_.native_mode)


def order(k: int, version: int = 0, weights: Any = None) -> ChunkOrder:
    return ChunkOrder(1, ChunkRequest(STEPS, STEPS * k, SEED), version, weights)


def chunks_of(host: PolicyHost, policy: Any) -> list[Chunk]:
    host.load(1, cloudpickle.dumps(policy))
    return [host.take(order(k)).chunk for k in range(3)]


class Waits(Steps):
    """Its steps wait until a file exists, except for the first ones."""

    def __init__(self, path: Path, num_steps: int = 0) -> None:
        super().__init__()
        self.path, self.num_steps = path, num_steps

    def step(self, action: Any) -> Any:
        while self.calls >= self.num_steps and not self.path.exists():
            time.sleep(0.01)
        return super().step(action)


class Records:
    """Records more than it has seen."""

    noise = NO_NOISE

    def act(self, obs: Any, noise: Any) -> Any:
        return np.zeros(len(obs), np.int64), {"seen": np.repeat(obs.mean(-1, keepdims=True), 300, axis=1)}

    def load_weights(self, weights: Any) -> None:
        raise AssertionError


def first_action(obs: Any) -> Any:
    count = len(obs["image"]) if isinstance(obs, dict) else len(obs)
    return np.zeros(count, np.int64)


@contextmanager
def loaded(fns: Sequence[Callable[[], Any]], policy: Any, native: bool = False) -> Iterator[Machine]:
    """Yields a machine with two workers that have reset their environments and loaded a policy."""
    with closing(Machine(EnvFactory.build(list(fns), native=native), 2, restart_policy=RESTART)) as machine:
        machine.allocate(machine.spaces.observation, machine.spaces.action)
        reset(machine)
        run(machine, Command(Op.LOAD, np.arange(machine.num_envs), rest=(1, cloudpickle.dumps(policy))))
        yield machine


def ask(machine: Machine, each: ChunkOrder) -> Any:
    return machine.post(Command(Op.ROLLOUT, np.arange(machine.num_envs), rest=each))


def taken(machine: Machine, ticket: Any) -> Chunk:
    assert machine.wait(ticket, 30.0)
    answer = machine.take(ticket)
    assert answer.failure is None, answer.failure
    return join_chunks([part.chunk for part in answer.value])


FAILING = [partial(Steps, 4, {3, 11}), partial(Steps, 4, {4, 5}), Steps]


class TestSlices:
    @pytest.mark.parametrize("mode", [None, AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
    def test_chunks_of_restarted_environments_tell_no_lies(self, mode: AutoresetMode | None) -> None:
        """Also in native sub-batches, which are restarted as a whole."""
        fns: Any = copy.deepcopy(FAILING)
        if mode is not None:
            fns = [partial(SyncVectorEnv, copy.deepcopy(FAILING), autoreset_mode=mode) for _ in range(2)]
        chunks = chunks_of(slice_host(fns, RESTART, native=mode is not None), TablePolicy(2))
        assert len(chunks[0].restarts) > 2 and chunks[0].cuts.size and not chunks[0].valid.all()
        for chunk in chunks:
            episode, step = np.moveaxis(chunk.next_obs() - chunk.obs, -1, 0)[:2]
            assert not episode[chunk.valid].any() and (step[chunk.valid] == 1).all()
            assert_identical(chunk.final_index, np.argwhere(chunk.done))
            assert chunk.truncated[tuple(chunk.cuts.T)].all() and chunk.valid[tuple(chunk.cuts.T)].all()
        for chunk, following in pairwise(chunks):
            assert_identical(following.obs[0], chunk.last_obs)


class TestFleets:
    def test_workers_take_the_same_with_the_weights_of_the_request(self) -> None:
        """Two chunks are pending at a time, and none of them overwrites the other."""
        policies = [TablePolicy(2, seed=seed) for seed in range(5)]
        orders = [order(k, k, policies[k].weights()) for k in range(5)]
        host = slice_host(DRIFT)
        host.load(1, cloudpickle.dumps(policies[0]))
        with loaded(DRIFT, policies[0]) as machine:
            tickets = [ask(machine, each) for each in orders[:2]]
            for k, each in enumerate(orders):
                ours = taken(machine, tickets[k])
                assert_same_chunk(ours, host.take(each).chunk)
                tickets += [ask(machine, later) for later in orders[k + 2 : k + 3]]

    @pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
    def test_workers_with_native_sub_batches(self, mode: AutoresetMode) -> None:
        native = [partial(SyncVectorEnv, SPACE, autoreset_mode=mode)] * 3
        with loaded(native, TablePolicy(2), native=True) as machine:
            ours = [taken(machine, ask(machine, order(k))) for k in range(3)]
        for each in zip(ours, chunks_of(slice_host(native, native=True), TablePolicy(2)), strict=True):
            assert_same_chunk(*each)

    def test_large_extras_and_longer_chunks(self) -> None:
        with loaded(DRIFT, Records()) as machine:
            for num_steps in (4, 4, 4, 4, 50, 50, 50, 50):
                chunk = taken(machine, ask(machine, ChunkOrder(1, ChunkRequest(num_steps, 0, SEED))))
                assert chunk.extras["seen"].shape == (num_steps, 5, 300)
                assert (chunk.extras["seen"] == chunk.obs.mean(-1, keepdims=True)).all()

    def test_a_killed_worker_loses_no_pending_chunk(self) -> None:
        everyone = np.arange(4)
        with loaded([Steps] * 4, TablePolicy(2)) as machine:
            first = run(machine, Command(Op.ROLLOUT, everyone, rest=order(0)))
            os.kill(machine.worker_pids()[1], signal.SIGKILL)
            second, third = (run(machine, Command(Op.ROLLOUT, everyone, rest=order(k))) for k in (1, 2))
            assert second[1].chunk.restarts.tolist() == [[-1, 0], [-1, 1]] and machine.take_replaced() == {"worker": 1}
            assert_identical(second[0].chunk.obs[0], first[0].chunk.last_obs)
            assert third[1].chunk.restarts.size == 0

    def test_a_replacement_leaves_a_chunk_alone_that_was_not_read(self, tmp_path: Path) -> None:
        """The second worker dies in its second chunk, and takes that again."""
        path = tmp_path / "go"
        with loaded([partial(Waits, path, STEPS)] * 4, first_action) as machine:
            first, second = (ask(machine, order(k)) for k in range(2))
            assert machine.wait(first, 30.0)
            os.kill(machine.worker_pids()[1], signal.SIGKILL)
            deadline = time.monotonic() + 30.0
            while 1 not in second.answers:
                assert time.monotonic() < deadline and not machine.wait(second, 0.2)
            path.touch()
            ours = taken(machine, first)
            assert taken(machine, second).restarts.tolist() == [[-1, 2], [-1, 3]]
        assert_same_chunk(ours, chunks_of(slice_host([Steps] * 4), first_action)[0])

    def test_ctrl_c_in_a_wait_loses_no_chunk(self, tmp_path: Path) -> None:
        with loaded([partial(Waits, tmp_path / "go")] * 4, TablePolicy(2)) as machine:
            tickets = [ask(machine, order(k)) for k in range(2)]
            for _ in range(3):
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
                with pytest.raises(KeyboardInterrupt):
                    machine.wait(tickets[1])
            (tmp_path / "go").touch()
            for k, ticket in enumerate(tickets):
                assert machine.wait(ticket, 30.0)
                assert [part.chunk.first_step for part in machine.take(ticket).value] == [STEPS * k] * 2
