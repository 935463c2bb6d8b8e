"""RayVecEnv's calls in their order, from two threads, and again after a restart; attributes; wrappers of Gymnasium."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from copy import copy, deepcopy
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import gymnasium
import numpy as np
import pytest
from conftest import MakeVec
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import vector as vector_wrappers
from helpers.kinds import ALL_SPACES, ARRAY_SPACES, env_fns
from helpers.obedient_envs import DIE, GO, RAISE, EndlessEnv, GatedEnv
from helpers.testing import CountingEnv, assert_identical
from helpers.vector_kit import TOPOLOGIES, pids_of
from helpers.waiting import DEADLINE_S, alive, wait_until

from rayvec.errors import ConfigError
from rayvec.vector.ray_vec_env import RayVecEnv


class CallsBack(CountingEnv):
    """Its method sends a signal to the driver, and returns once a file is there."""

    def call_back(self, pid: int, file: Path) -> int:
        os.kill(pid, signal.SIGUSR1)
        wait_until(file.exists, "the driver has got the signal")
        return 7


@pytest.mark.parametrize("later", ["step", pytest.param("get_attr", marks=pytest.mark.slow)])
def test_a_call_that_an_exception_of_a_signal_handler_has_ended_is_not_waited_for(later: str, tmp_path: Path) -> None:
    """Its result may have been half received: a later call never waits for it without end."""

    def handle(number: int, frame: Any) -> None:
        (tmp_path / "go").touch()  # else closing would wait for the call
        raise TimeoutError("the alarm")

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with RayVecEnv([CallsBack], num_nodes=0, workers_per_node=1, on_env_error="restart") as env:
            env.reset(seed=0)
            with pytest.raises(TimeoutError, match="the alarm"):
                env.call("call_back", os.getpid(), tmp_path / "go")
            with pytest.raises(ClosedEnvironmentError, match="TimeoutError in an earlier call closed it"):
                env.step(np.zeros(1, int)) if later == "step" else env.get_attr("spec")
            assert env.closed
    finally:
        signal.signal(signal.SIGUSR1, before)


class TestStates:
    def test_order_of_calls(self, make_vec: MakeVec) -> None:
        env = make_vec([CountingEnv] * 2)
        for early in (env.step_wait, env.reset_wait, env.call_wait):
            with pytest.raises(NoAsyncCallError):
                early()
        env.reset_async(seed=0)
        for late in (
            env.reset_async,
            partial(env.step_async, np.zeros(2, int)),
            partial(env.call_async, "spec"),
            partial(env.set_attr, "x", 1),
            partial(env.send, np.zeros(2, int)),
            partial(env.rollout, lambda obs: np.zeros(len(obs), int), 2),
        ):
            with pytest.raises(AlreadyPendingCallError, match=r"reset|send"):
                late()
        for other in (env.step_wait, env.call_wait, env.recv):
            with pytest.raises(NoAsyncCallError):
                other()
        assert env.reset_wait()[0].tolist() == [[0, 0, 0, 0], [1, 0, 0, 0]]
        env.step_async(np.zeros(2, int))
        with pytest.raises(AlreadyPendingCallError, match="step"):
            env.step_async(np.zeros(2, int))
        assert env.step_wait()[1].tolist() == [1.0, 1.0]

    def test_after_close_everything_says_so(self, make_vec: MakeVec) -> None:
        env = make_vec([CountingEnv] * 2)
        env.reset(seed=0)
        env.step_async(np.zeros(2, int))
        with pytest.warns(UserWarning, match="`close` while waiting for a pending call to `step`"):
            env.close()
        env.close()
        assert env.closed
        for late in (
            env.reset,
            env.step_wait,
            env.reset_wait,
            env.call_wait,
            env.recv,
            env.render,
            partial(env.step, np.zeros(2, int)),
            partial(env.send, np.zeros(2, int)),
            partial(env.call, "spec"),
            partial(env.get_attr, "spec"),
            partial(env.set_attr, "x", 1),
            partial(env.rollout, lambda obs: obs, 2),
        ):
            with pytest.raises(ClosedEnvironmentError):
                late()

    @pytest.mark.parametrize("topology", ["1x2", "2x1"])
    def test_what_timed_out_is_waited_for_again_and_nothing_is_lost(
        self, make_vec: MakeVec, topology: str, tmp_path: Path
    ) -> None:
        """The first environment answers at once, with infos; the last one when it may."""
        gated = partial(GatedEnv, tmp_path / "gate", 0, max_episode_steps=1)
        env = make_vec([partial(CountingEnv, 1), gated], *TOPOLOGIES[topology])
        env.reset(seed=[0, 0])
        env.step_async(np.zeros(2, int))
        for timeout in (0, 0.0, 0.05):
            with pytest.raises(multiprocessing.TimeoutError):
                env.step_wait(timeout=timeout)
        with pytest.raises(AlreadyPendingCallError):
            env.step_async(np.zeros(2, int))
        (tmp_path / "gate").touch()
        obs, rew, terminated, _, info = env.step_wait()
        assert obs.tolist() == [[0, 0, 1, 1]] * 2
        assert (rew.tolist(), terminated.tolist(), info) == ([1.0, 1.0], [True, True], {})
        obs, _, _, _, info = env.step(np.zeros(2, int))
        assert obs.tolist() == [[0, 1, 0, 1]] * 2 and info["began"].tolist() == [1, 1]

    def test_the_environment_decides_what_step_before_reset_does(self, make_vec: MakeVec) -> None:
        env = make_vec("CartPole-v1", num_envs=2)
        with pytest.raises(gymnasium.error.ResetNeeded):
            env.step(np.zeros(2, int))

    def test_disabled_wants_a_reset_after_an_episode(self, make_vec: MakeVec) -> None:
        env = make_vec([partial(CountingEnv, 1)] * 2, autoreset_mode="Disabled")
        env.reset(seed=[0, 0])
        env.step(np.zeros(2, int))
        with pytest.raises(AssertionError, match=r"environments \[0, 1\] must be reset first"):
            env.step(np.zeros(2, int))
        env.reset(options={"reset_mask": np.array([True, True])})
        env.step(np.zeros(2, int))
        env.rollout(lambda obs: np.zeros(len(obs), int), 3)
        env.step(np.zeros(2, int))

    def test_an_unreferenced_environment_is_closed(self, ray_cluster: object) -> None:
        env = RayVecEnv([CountingEnv], num_nodes=1, workers_per_node=1)
        pids = pids_of(env)[0]
        del env
        gc.collect()
        wait_until(lambda: not any(map(alive, pids)), "its processes have ended")


@pytest.mark.parametrize("kind", ["box32", "text"])
def test_the_first_reset_is_of_all(kind: str) -> None:
    """A first reset that leaves environments out is refused."""
    with RayVecEnv(env_fns(2, ALL_SPACES[kind]), num_nodes=0, workers_per_node=0) as env:
        for mask in ([True, False], [True, True], [True, False]):
            options = {"reset_mask": np.array(mask)}
            if env.num_uses or all(mask):
                assert env.observation_space.contains(env.reset(options=options)[0])
                continue
            with pytest.raises(ConfigError, match="in the first reset"):
                env.reset(options=options)


class TestAttributes:
    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls, make_class_vec: MakeVec) -> Any:
        fns = env_fns(4, ARRAY_SPACES["box32"], render_mode="rgb_array")
        with closing(SyncVectorEnv(fns)) as sync:
            pair = make_class_vec(fns, 2, 1), sync
            for each in pair:
                each.reset(seed=0)
            yield pair

    def test_calls(self, pair: tuple[RayVecEnv, SyncVectorEnv]) -> None:
        env, sync = pair
        assert_identical(env.call("scaled", 2.0, by=3.0), sync.call("scaled", 2.0, by=3.0))
        assert_identical(env.get_attr("render_mode"), sync.get_attr("render_mode"))
        assert_identical(env.render(), sync.render())
        assert env.render_mode == sync.render_mode == "rgb_array"

    @pytest.mark.parametrize("values", [2.5, [1.0, 2.0, 3.0, 4.0], (4.0, 3.0, 2.0, 1.0)])
    def test_setting(self, pair: tuple[RayVecEnv, SyncVectorEnv], values: Any) -> None:
        env, sync = pair
        for e in pair:
            e.set_attr("factor", values)
        assert_identical(env.get_attr("factor"), sync.get_attr("factor"))
        assert_identical(env.call("scaled", 3.0), sync.call("scaled", 3.0))


class TestWrappers:
    @pytest.mark.parametrize(
        "wrap",
        [
            vector_wrappers.RecordEpisodeStatistics,
            vector_wrappers.NormalizeObservation,
            vector_wrappers.NormalizeReward,
            vector_wrappers.FlattenObservation,
            partial(vector_wrappers.ClipReward, min_reward=-0.5, max_reward=0.5),
            lambda env: vector_wrappers.DictInfoToList(vector_wrappers.RecordEpisodeStatistics(env)),
            lambda env: vector_wrappers.NormalizeObservation(vector_wrappers.RecordEpisodeStatistics(env)),
        ],
        ids=lambda wrap: getattr(wrap, "__name__", "partial"),
    )
    def test_gymnasiums_wrappers_see_no_difference(self, pair: tuple[RayVecEnv, SyncVectorEnv], wrap: Any) -> None:
        ours, theirs = (wrap(env) for env in pair)
        results = [play(env) for env in (ours, theirs)]
        assert_identical(*[without_times(result) for result in results])

    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls, make_class_vec: MakeVec) -> Any:
        fns = [partial(gymnasium.make, "MountainCarContinuous-v0", max_episode_steps=5)] * 3
        with closing(SyncVectorEnv(fns)) as sync:
            yield make_class_vec(fns, 1, 2), sync


def play(env: Any) -> list[Any]:
    results: list[Any] = [env.reset(seed=4)]
    env.action_space.seed(0)
    results += [env.step(env.action_space.sample()) for _ in range(14)]
    return results


def without_times(value: Any) -> Any:
    """Leaves out how long an episode took."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in ("t", "_t")}
    if isinstance(value, (list, tuple)):
        return type(value)(without_times(item) for item in value)
    return value


@pytest.mark.parametrize(("nodes", "workers"), [(0, 0), (0, 2), (2, 1)])
def test_a_call_that_raises_leaves_the_environments_open(make_vec: MakeVec, nodes: int, workers: int) -> None:
    env = make_vec([CountingEnv] * 2, nodes, workers)
    env.reset(seed=0)
    for _ in range(2):
        with pytest.raises(AttributeError, match="typo"):
            env.get_attr("typo")
        if workers:
            with pytest.raises(TypeError, match="pickle"):
                env.set_attr("value", [1, Lock()])
            with pytest.raises(TypeError, match="pickle"):
                env.reset(options={"lock": Lock()})
    assert env.step(np.zeros(2, int))[1].tolist() == [1.0, 1.0]


def test_it_can_not_be_copied(make_vec: MakeVec) -> None:
    env = make_vec([CountingEnv], 0, 0)
    env.reset(seed=0)
    for copied in (copy, deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="can't be copied"):
            copied(env)
    assert env.step(np.zeros(1, int))[1].tolist() == [1.0]


@pytest.mark.parametrize(
    ("topology", "places"),
    [
        ("no Ray", ("node", "worker")),
        ("no Ray", ("worker", "node")),
        ("no Ray", ("worker", "driver")),
        ("2x1", ("node", "worker")),
        pytest.param("2x1", ("worker", "node"), marks=pytest.mark.slow),
    ],
)
def test_chunks_of_policies_that_act_in_different_processes_do_not_mix(
    make_vec: MakeVec, topology: str, places: tuple[Any, Any]
) -> None:
    """The second one's steps could come before the first one's."""
    with make_vec([CountingEnv] * 2, *TOPOLOGIES[topology]) as env:
        env.reset(seed=0)
        first, second = (env.publish(lambda obs: np.zeros(len(obs), np.int64), inference=place) for place in places)
        env.rollout_async(first, 5, 0, 0)
        with pytest.raises(AlreadyPendingCallError, match="rollout"):
            env.rollout_async(second, 7, 5, 0)
        assert env.rollout_wait().chunk.num_steps == 5
        env.rollout_async(second, 7, 5, 0)
        assert env.rollout_wait().chunk.num_steps == 7


ZEROS = np.zeros(2, int)


class Gate(CountingEnv):
    """Waits where it is told, in a method, or in a step with action 1."""

    entered, opened = threading.Event(), threading.Event()

    def wait_here(self) -> int:
        Gate.entered.set()
        assert Gate.opened.wait(DEADLINE_S)
        return 7

    def step(self, action: Any) -> Any:
        if action:
            self.wait_here()
        return super().step(action)


@contextmanager
def another_thread_in(call: Callable[[], Any]) -> Iterator[Future[Any]]:
    """Lets another thread wait in a call until the end of the block."""
    Gate.entered.clear()
    Gate.opened.clear()
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(call)
        try:
            assert Gate.entered.wait(DEADLINE_S)
            yield future
        finally:
            Gate.opened.set()


@pytest.fixture
def gated() -> Iterator[RayVecEnv]:
    with RayVecEnv([partial(Gate, 100)] * 2, num_nodes=0, workers_per_node=0) as env:
        env.reset(seed=5)
        yield env


CALLS: list[Callable[[RayVecEnv], Any]] = [
    lambda env: env.step(ZEROS),
    lambda env: env.reset(),
    lambda env: env.send(ZEROS),
    lambda env: env.call("wait_here"),
    lambda env: env.set_attr("number", 1),
    lambda env: env.rollout(lambda obs: np.zeros(len(obs), int), 2),
    lambda env: env.worker_pids(),
]


def test_a_call_from_a_second_thread_is_refused(gated: RayVecEnv) -> None:
    with another_thread_in(partial(gated.call, "wait_here")) as first:
        for call in CALLS:
            with pytest.raises(AlreadyPendingCallError, match="Another thread"):
                call(gated)
    assert first.result() == (7, 7)
    assert gated.step(ZEROS)[1].tolist() == [1.0, 1.0]
    with another_thread_in(partial(gated.step, np.ones(2, int))) as first:
        for waits in (gated.step_wait, partial(gated.step, ZEROS)):
            with pytest.raises(AlreadyPendingCallError, match="Another thread"):
                waits()
    assert first.result()[1].tolist() == [2.0, 2.0]
    assert gated.step(ZEROS)[0][:, 3].tolist() == [3.0, 3.0]


REPLAYED = ("set_difficulty", "gravity")


class Course(EndlessEnv):
    """Has a difficulty, which it is told by a method, and other attributes."""

    difficulty, gravity, wind = 0, 9.8, 0

    def set_difficulty(self, difficulty: int, factor: int = 1) -> None:
        self.difficulty = difficulty * factor


def told(env: RayVecEnv) -> None:
    env.call("set_difficulty", 2)
    env.call("set_difficulty", 3, factor=7)
    with pytest.raises(TypeError):
        env.call("set_difficulty", None)
    env.set_attr("gravity", [1.0, 2.0, 3.0, 4.0])
    env.set_attr("wind", 5)


def attributes(env: RayVecEnv) -> list[tuple[Any, ...]]:
    return list(zip(*(env.get_attr(name) for name in ("difficulty", "gravity", "wind")), strict=True))


@pytest.mark.parametrize(("workers", "fault"), [(0, RAISE), (2, RAISE), (2, DIE)])
def test_an_environment_that_is_made_again_is_told_again(workers: int, fault: int) -> None:
    where: dict[str, Any] = {"num_nodes": 0, "workers_per_node": workers, "on_env_error": "restart"}
    with RayVecEnv([Course] * 4, replay_calls=REPLAYED, **where) as env:
        env.reset(seed=1)
        told(env)
        for count in range(2):  # also the one that was told again
            info = env.step([GO, fault, GO, GO])[4]
            restarted = info["env_restarted"].tolist()
            assert restarted == ([True, True, False, False] if fault == DIE else [False, True, False, False])
            winds = [0 if again else 5 for again in restarted]
            assert attributes(env) == [(21, 1.0 + k, wind) for k, wind in enumerate(winds)], f"restart {count}"
            env.step(np.zeros(4, np.int64))


class Counted(Course):
    """Counts what it is told. The third that is made ends its process."""

    num_told = 0

    def __init__(self, file: Path) -> None:
        super().__init__()
        with file.open("a") as made:
            made.write("x")
        if file.stat().st_size == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    def set_difficulty(self, difficulty: int, factor: int = 1) -> None:
        self.num_told += 1


def test_a_replacement_that_dies_too_is_not_told_twice(tmp_path: Path) -> None:
    made = [partial(Counted, tmp_path / "made")] * 2
    with RayVecEnv(made, num_nodes=0, workers_per_node=2, on_env_error="restart", replay_calls=REPLAYED) as env:
        env.reset(seed=1)
        env.call("set_difficulty", 2)
        assert env.step([DIE, GO])[4]["env_restarted"].tolist() == [True, False]
        assert env.get_attr("num_told") == (1, 1)


def test_so_are_those_of_a_lost_node(make_vec: Any) -> None:
    env = make_vec([Course] * 4, nodes=2, workers=2, replay_calls=REPLAYED)
    env.reset(seed=1)
    told(env)
    os.kill(env.worker_pids()[env.topology.nodes[1].name][0], signal.SIGKILL)  # the actor of the node
    for _ in range(200):
        if "env_restarted" in env.step(np.zeros(4, np.int64))[4]:
            break
    assert attributes(env) == [(21, 1.0, 5), (21, 2.0, 5), (21, 3.0, 0), (21, 4.0, 0)]
