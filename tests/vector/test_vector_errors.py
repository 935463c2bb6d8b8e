"""RayVecEnv's errors, its end, and input that it refuses."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from conftest import MakeVec
from gymnasium.vector import SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TimeLimit
from helpers.kinds import in_lockstep, within
from helpers.obedient_envs import PressesCtrlC, SlowCall
from helpers.testing import CountingEnv, FaultyEnv
from helpers.vector_kit import pids_of
from helpers.waiting import DEADLINE_S, alive, shm_names, wait_until

import rayvec
from rayvec.errors import ConfigError, EnvError, WorkerLostError
from rayvec.vector.ray_vec_env import RayVecEnv

HERE = {"num_nodes": 0, "workers_per_node": 0}
counting_two = partial(SyncVectorEnv, [CountingEnv] * 2)
ERRORS: dict[str, Callable[[], Exception]] = {
    "plain": partial(ValueError, "this environment is broken"),
    "timeout": partial(TimeoutError, "a server of the environment's own does not answer"),
    "eof": partial(EOFError, "a file of the environment's own ends"),
    "pipe": partial(BrokenPipeError, "a pipe of the environment's own is broken"),
    "key": partial(KeyError, "missing"),
    "two arguments": partial(OSError, 5, "disk"),
}


class TestErrors:
    @pytest.mark.parametrize(
        ("when", "kind", "nodes"),
        [
            *(("step", "plain", 1), ("step", "eof", 2), ("reset", "plain", 1), ("reset", "plain", 2)),
            *(
                pytest.param("step", kind, 2, marks=pytest.mark.slow)
                for kind in ("plain", "two arguments", "timeout", "pipe", "key")
            ),
            pytest.param("step", "timeout", 1, marks=pytest.mark.slow),
        ],
    )
    def test_an_error_keeps_its_type_and_message(self, make_vec: MakeVec, when: Any, kind: str, nodes: int) -> None:
        fns = [CountingEnv, CountingEnv, partial(FaultyEnv, "raise", when, 1, ERRORS[kind])]
        env = make_vec(fns, nodes, 3 - nodes)
        env.reset(seed=100)
        env.step(np.zeros(3, int))
        expected = ERRORS[kind]()
        calls = {"step": partial(env.step, np.zeros(3, int)), "reset": partial(env.reset, seed=100)}
        with pytest.raises(type(expected)) as caught:
            within(DEADLINE_S, calls[when])
        assert type(caught.value) is type(expected) and str(caught.value) == str(expected)
        cause = caught.value.__cause__
        assert isinstance(cause, EnvError)
        for words in ("node ", "worker ", "environment 2", "seed 102", "Traceback", "_maybe"):
            assert words in str(cause)
        assert env.closed

    @pytest.mark.parametrize("nodes", [1, 2])
    def test_an_error_in_a_constructor_leaves_nothing(self, make_vec: MakeVec, nodes: int) -> None:
        import ray

        def all_free() -> bool:
            return bool(ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])

        wait_until(all_free, "all cores are free")
        with pytest.raises(ValueError, match="broken") as caught:
            make_vec([CountingEnv, partial(FaultyEnv, "raise", "init")], nodes)
        assert "environment 1" in str(caught.value.__cause__)
        wait_until(all_free, "all cores are free again")

    @pytest.mark.parametrize(
        ("nodes", "when"),
        [
            *((1, "init"), (1, "reset"), (1, "step"), (2, "step")),
            *(pytest.param(2, when, marks=pytest.mark.slow) for when in ("init", "reset")),
        ],
    )
    def test_a_worker_that_ends(self, make_vec: MakeVec, nodes: int, when: str) -> None:
        made, pids = [], []

        def play() -> None:
            made.append(env := make_vec([CountingEnv, partial(FaultyEnv, "kill", when)], nodes, 3 - nodes))
            pids.extend(pid for node in pids_of(env) for pid in node)
            env.reset(seed=0)
            env.step(np.zeros(2, int))

        with pytest.raises(WorkerLostError) as caught:
            within(DEADLINE_S, play)
        assert when == "init" or ("environments 1 to 1" in str(caught.value) and made[0].closed)
        wait_until(lambda: not any(map(alive, pids)), "its processes have ended")


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("how", ["step", *(pytest.param(how, marks=pytest.mark.slow) for how in ("group", "driver"))])
def test_a_thread_that_waits_for_a_step_loses_the_environments(make_vec: MakeVec, nodes: int, how: str) -> None:
    """What is under way is answered some time, so that later answers could be taken for those of other steps."""
    env = make_vec([partial(PressesCtrlC, os.getpid())] * 4, nodes, groups=2)
    pids = [pid for node in pids_of(env) for pid in node]
    env.reset(seed=0)
    actions = np.array([0, 0, 0, 1])
    with pytest.raises(KeyboardInterrupt):
        if how == "step":
            env.step(actions)
        elif how == "driver":
            env.rollout(lambda obs: (obs[:, 0] == 3).astype(int), 3, "driver")
        else:
            env.send(actions[env.groups[1]], group=1)
            env.recv(1)
    with pytest.raises(gymnasium.error.ClosedEnvironmentError, match="KeyboardInterrupt in an earlier call closed"):
        env.reset(seed=0)
    wait_until(lambda: not any(map(alive, pids)), "its processes have ended")


@pytest.mark.filterwarnings("ignore:.*Calling `close`")
class TestEnd:
    @pytest.mark.parametrize(
        ("nodes", "pending"),
        [
            *((1, "call"), (2, "step")),
            *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, "step"), (2, "reset"), (2, None))),
        ],
    )
    def test_close_leaves_nothing(self, make_vec: MakeVec, nodes: int, pending: str | None) -> None:
        make_vec([CountingEnv]).close()  # starts the fork server, which stays for some seconds
        fds, names = len(os.listdir("/proc/self/fd")), shm_names()
        env = make_vec([partial(SlowCall, seconds=0.2)] * 4, nodes, 2)
        pids = [pid for node in pids_of(env) for pid in node]
        assert len(pids) == 3 * nodes and all(map(alive, pids))
        env.reset(seed=0)
        if pending == "step":
            env.step_async(np.zeros(4, int))
        elif pending == "reset":
            env.reset_async()
        elif pending == "call":
            env.call_async("slow", 0.2)
        within(DEADLINE_S, env.close)
        wait_until(lambda: not any(map(alive, pids)), "its processes have ended")
        wait_until(lambda: shm_names() <= names, "its shared memory is gone")
        gc.collect()
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= fds + 2, "its descriptors are closed")

    def test_close_although_an_environment_hangs(self, make_vec: MakeVec, caplog: pytest.LogCaptureFixture) -> None:
        env = make_vec([CountingEnv, partial(FaultyEnv, "hang")], 2)
        pids = [pid for node in pids_of(env) for pid in node]
        env.reset(seed=0)
        env.step_async(np.zeros(2, int))
        with pytest.raises(multiprocessing.TimeoutError):
            env.step_wait(timeout=0.1)
        within(2 * DEADLINE_S, partial(env.close, timeout=1.0))
        wait_until(lambda: not any(map(alive, pids)), "its processes have ended")
        assert "killed after" in caplog.text


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_envs": 2, "env": "NoSuchEnvironment-v0"},
        {"num_envs": 2, "env": "no_such_module:Env-v0"},
        {"env": "CartPole-v1", "num_envs": 0},
        {"env": "CartPole-v1", "num_envs": -1},
        {"env": "CartPole-v1", "num_envs": 1.5},
        {"env": "CartPole-v1", "num_envs": True},
        {"env": "CartPole-v1", "num_envs": "four"},
        {"env": "CartPole-v1", "num_envs": float("nan")},
        {"env": []},
        {"env": 5},
        {"env": CountingEnv},
        {"env": [CountingEnv(), CountingEnv()]},
        {"env": [CountingEnv] * 2, "num_envs": 3},
        {"env": [CountingEnv], "env_kwargs": {"a": 1}},
        {"env": [CountingEnv], "num_nodes": False},
        {"env": [CountingEnv], "num_nodes": -1},
        *({"env": [CountingEnv] * 4, "num_nodes": range_} for range_ in ((2, 1), (0, 2), (1, 2, 3), (1.0, 2), (1, 5))),
        {"env": [CountingEnv] * 4, "num_nodes": (True, 2)},
        {"env": [CountingEnv] * 4, "num_nodes": (1, 2), "workers_per_node": 0},
        {"env": [CountingEnv], "num_nodes": 1, "workers_per_node": 0},
        {"env": [CountingEnv], "workers_per_node": 1.5},
        {"env": [CountingEnv], "workers_per_node": "x"},
        {"env": [CountingEnv], "groups": 3},
        {"env": [CountingEnv], "groups": 0},
        {"env": [CountingEnv], "autoreset_mode": "sometimes"},
        {"env": [CountingEnv], "step_timeout_s": 0},
        {"env": [CountingEnv], "step_timeout_s": float("nan")},
        {"env": [CountingEnv], "on_env_error": "ignore"},
        {"env": [CountingEnv], "on_node_loss": "restart"},
        {"env": [CountingEnv], **HERE, "step_timeout_s": 1.0},
        {"env": [CountingEnv], **HERE, "address": "auto"},
        {"env": [CountingEnv], "replay_calls": "set_difficulty"},
        {"env": [CountingEnv], "replay_calls": [3]},
        {"env": [CountingEnv], "restart_env_every": 0},
        {"env": [CountingEnv], "spare_envs": 2},
        {"env": [counting_two], "native": True, "restart_env_every": 1},
        {"env": [counting_two], "native": True, "spare_envs": 1},
    ],
    ids=lambda kwargs: re.sub(r" at 0x\w+", "", repr(kwargs)),  # an address is another one in each process
)
def test_each_mistake_is_one_explained_error(ray_cluster: object, kwargs: dict[str, Any]) -> None:
    """The last of them is what can't be."""
    with pytest.raises(ConfigError, match=f"{[*kwargs][-1]}|callable"):
        RayVecEnv(**{"num_nodes": 0, **kwargs})


class TestConstruction:
    @pytest.mark.parametrize(
        ("env", "remedy"),
        [
            (None, "NoneType without observation_space"),
            (gymnasium.Env(), "without observation_space"),
            (SimpleNamespace(possible_agents=["a"], observation_space=None), "pettingzoo_agents"),
            (VectorEnv(), "native=True"),
            (CountingEnv, "the class CountingEnv.*return an instance"),
            (SimpleNamespace(observation_space=None, action_space=None, metadata={}), "without render_mode"),
        ],
        ids=["None", "Env", "PettingZoo", "VectorEnv", "class", "duck"],
    )
    @pytest.mark.parametrize("form", ["list", "function"])
    def test_a_callable_that_returns_no_environment(self, env: Any, remedy: str, form: str) -> None:
        if isinstance(env, VectorEnv):
            env.num_envs = 2
        with pytest.raises(ConfigError, match=f"A callable has made .*{remedy}"):
            makes = {"env": [lambda: env]} if form == "list" else {"env": lambda: env, "num_envs": 1}
            RayVecEnv(**makes, num_nodes=0, workers_per_node=0)

    @pytest.mark.parametrize("workers", [0, 1])
    def test_one_environment_for_several_callables(self, workers: int) -> None:
        shared = CountingEnv()
        for fns in ([lambda: shared] * 2, [lambda: shared, lambda: TimeLimit(shared, 5)]):
            with pytest.raises(ConfigError, match="same environment more than once"):
                RayVecEnv(fns, num_nodes=0, workers_per_node=workers)

    def test_make_vec_mirrors_gymnasiums(self, ray_cluster: object) -> None:
        kwargs = {"max_episode_steps": 7}
        with rayvec.make_vec("CartPole-v1", 3, num_nodes=1, workers_per_node=2, env_kwargs=kwargs) as env:
            sync = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync", **kwargs)
            with closing(sync):
                in_lockstep(env, sync.unwrapped, 20)
                assert env.spec is not None and env.spec.id == "CartPole-v1"
        assert env.closed

    def test_specs_and_wrappers(self, make_vec: MakeVec) -> None:
        wrappers = (gymnasium.wrappers.FlattenObservation, partial(gymnasium.wrappers.TimeLimit, max_episode_steps=4))

        def make() -> Any:
            env = gymnasium.make("Blackjack-v1")
            for wrapper in wrappers:
                env = wrapper(env)
            return env

        env = make_vec(gymnasium.spec("Blackjack-v1"), num_envs=2, wrappers=wrappers)
        with closing(SyncVectorEnv([make] * 2)) as sync:
            in_lockstep(env, sync, 10)


ENGINES = [
    pytest.param(0, 0, id="this process"),
    pytest.param(0, 1, id="one worker"),
    pytest.param(2, 1, id="two nodes", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("when", ["init", "reset", "step"])
@pytest.mark.parametrize(("nodes", "workers"), ENGINES)
def test_an_error_names_the_environment(make_vec: MakeVec, nodes: int, workers: int, when: Any) -> None:
    with pytest.raises(EnvError, match=r"SystemExit\(3\)") as caught:
        env = make_vec([CountingEnv, partial(FaultyEnv, "raise", when, 0, partial(SystemExit, 3))], nodes, workers)
        env.reset(seed=4)
        env.step(np.zeros(2, int))
    assert "environment 1" in str(caught.value.__cause__)


@pytest.mark.parametrize("in_chunk", [False, True])
def test_ctrl_c_is_no_failure_of_an_environment(make_vec: MakeVec, in_chunk: bool) -> None:
    """In a chunk it closes all, since half of the chunk is lost."""
    env = make_vec([partial(FaultyEnv, "raise", "step", 2, KeyboardInterrupt)], 0, 0, on_env_error="restart")
    env.reset(seed=4)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(3):
            env.rollout(lambda obs: np.zeros(1, int), 5) if in_chunk else env.step(np.zeros(1, int))
    assert env.closed or not in_chunk


def exits(obs: Any) -> Any:
    sys.exit(3)


def waits_for_others(obs: Any) -> Any:
    with RayVecEnv([CountingEnv], num_nodes=0, workers_per_node=0) as others:
        others.step_wait()


@pytest.mark.parametrize(
    ("inference", "policy", "error"),
    [
        ("worker", exits, EnvError),
        ("node", exits, SystemExit),
        ("driver", waits_for_others, gymnasium.error.NoAsyncCallError),
    ],
)
def test_a_policy(make_vec: MakeVec, inference: Any, policy: Any, error: Any) -> None:
    """One in the driver's process ends the script, and leaves no chunk pending."""
    env = make_vec([CountingEnv] * 2, 0, 1)
    collector = rayvec.Collector(env, policy, inference, seed=4)
    with pytest.raises(error):
        collector.collect(n_step=8)
    with pytest.raises(gymnasium.error.ClosedEnvironmentError, match=f"{error.__name__} in an earlier call"):
        collector.collect(n_step=8)
