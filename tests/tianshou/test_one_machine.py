"""RayVectorEnv on one machine without Ray: the same numbers and the same faults as anywhere."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from functools import partial
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
import tianshou.data
from gymnasium.error import ClosedEnvironmentError
from helpers.exact import DriftEnv
from helpers.kinds import within
from helpers.testing import CountingEnv, FaultyEnv
from helpers.tianshou_envs import Line
from helpers.tianshou_lockstep import assert_same, in_lockstep
from helpers.waiting import DEADLINE_S, alive, wait_until
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.data import VectorReplayBuffer
from tianshou.env import DummyVectorEnv, SubprocVectorEnv
from tianshou.utils.net.common import Net

from rayvec.errors import WorkerLostError
from rayvec.rollout.loop import CallablePolicy
from rayvec.tianshou import Collector, RayVectorEnv
from rayvec.vector.ray_vec_env import RayVecEnv

ENGINES = {"workers": 2, "this process": 0}
CARTPOLES = [partial(gymnasium.make, "CartPole-v1", max_episode_steps=12)] * 5

WITHOUT_RAY = """
import sys
sys.modules["ray"] = None  # Tianshou imports Ray where it is installed, and does without it where not
import numpy
from helpers.tianshou_kit import Drift, Exact
from rayvec.tianshou import Collector, RayVectorEnv
envs = RayVectorEnv([Drift] * 2, num_nodes=0, workers_per_node=1)
envs.reset()
print(envs.transports, len(envs.step(numpy.zeros(2, int))[0]))
envs.close()
envs = RayVectorEnv([Drift] * 2, num_nodes=0, workers_per_node=0)
collector = Collector(Exact(), envs)
collector.reset()
print(envs.transports, collector.collect(n_episode=2).n_collected_episodes)
"""


def make(env_fns: Any, workers: int = 2, *args: Any, **kwargs: Any) -> RayVectorEnv:
    return RayVectorEnv(env_fns, *args, num_nodes=0, workers_per_node=workers, **kwargs)


@pytest.mark.slow
def test_ray_is_not_imported() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_RAY], capture_output=True, text=True, check=True)
    assert done.stdout == "('shm',) 2\n('local',) 2\n"


class TestNumbers:
    @pytest.mark.parametrize("workers", ENGINES.values(), ids=ENGINES)
    @pytest.mark.parametrize("reference", [DummyVectorEnv, pytest.param(SubprocVectorEnv, marks=pytest.mark.slow)])
    def test_are_tianshous(self, workers: int, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        if reference is SubprocVectorEnv:  # tells nothing of its seeds
            monkeypatch.setattr(RayVectorEnv, "seed", _silently(RayVectorEnv.seed))
        with closing(make(CARTPOLES, workers)) as ours, closing(reference(CARTPOLES)) as theirs:
            assert in_lockstep(ours, theirs, 40) > 3

    @pytest.mark.parametrize("workers", ENGINES.values(), ids=ENGINES)
    def test_are_those_of_gymnasiums_adapter(self, workers: int) -> None:
        other = RayVecEnv(CARTPOLES, num_nodes=0, workers_per_node=workers, autoreset_mode="Disabled")
        with closing(make(CARTPOLES, workers)) as venv, other:
            assert_same(venv.reset(seed=4)[0], other.reset(seed=[4] * 5)[0])
            for t in range(30):
                action = (np.arange(5) + t) % 2
                ours, theirs = venv.step(action), other.step(action)
                for got, expected in zip(ours[:4], theirs[:4], strict=True):
                    assert_same(got, expected, f"step {t}")
                done = theirs[2] | theirs[3]
                if done.any():
                    obs, _ = other.reset(options={"reset_mask": done})
                    assert_same(venv.reset(np.flatnonzero(done))[0], obs[done])

    def test_where_it_runs_can_be_seen(self) -> None:
        with closing(make([Line] * 5, 2)) as venv:
            [node] = venv.topology.nodes
            assert (node.worker_bounds, venv.transports) == ((0, 3, 5), ("shm",))
            [(name, (_, *workers))] = venv.worker_pids().items()
            assert name == node.name
            assert venv.get_env_attr("pid") == [workers[0]] * 3 + [workers[1]] * 2
        with closing(make([Line] * 5, 0)) as venv:
            assert venv.worker_pids() == {venv.topology.nodes[0].name: [os.getpid()]}
        with closing(RayVectorEnv([Line] * 40, num_nodes=0)) as venv:
            assert venv.topology.nodes[0].num_workers == len(os.sched_getaffinity(0))


def test_in_this_process_a_collector_draws_from_the_generators_that_tianshous_draws_from() -> None:
    model = Net(state_shape=(2,), action_shape=2, hidden_sizes=(8,))
    policy = DiscreteQLearningPolicy(model=model, action_space=DriftEnv.action_space, eps_inference=0.5)
    drawn = []
    for make_collector, venv in (
        (Collector, make([DriftEnv] * 3, 0)),
        (tianshou.data.Collector, DummyVectorEnv([DriftEnv] * 3)),
    ):
        with closing(venv):
            collector: Any = make_collector(policy, venv, VectorReplayBuffer(60, 3), exploration_noise=True)
            venv.seed(1)
            collector.reset()
            np.random.seed(2)
            collector.collect(n_step=30)
            drawn.append((collector.buffer.act.tolist(), np.random.random()))
    assert drawn[0] == drawn[1]


class TestAsync:
    def test_every_environment_has_a_worker(self) -> None:
        with closing(make([Line] * 3, 1, wait_num=1)) as venv:
            assert len(set(venv.get_env_attr("pid"))) == 3
            venv.reset()
            answered: set[int] = set()
            infos = venv.step(np.zeros(3, int))[-1]
            while True:
                answered |= {info["env_id"] for info in infos}
                if not venv.waiting_id:
                    break
                infos = within(DEADLINE_S, partial(venv.step, None))[-1]
            assert answered == {0, 1, 2} == set(venv.ready_id)

    def test_in_this_process_all_answer_at_once(self) -> None:
        with closing(make(CARTPOLES, 0, wait_num=2)) as ours, closing(DummyVectorEnv(CARTPOLES)) as theirs:
            assert ours.is_async
            assert in_lockstep(ours, theirs, 20, [[0, 1, 2], [3, 4]]) > 0
            assert (ours.waiting_id, sorted(ours.ready_id)) == ([], [0, 1, 2, 3, 4])


class TestFaults:
    """Environment 3 of four fails in its third step; two workers hold two environments each."""

    @pytest.mark.parametrize(
        ("fault", "error"), [("raise", ValueError), ("kill", WorkerLostError), ("hang", WorkerLostError)]
    )
    def test_without_restarts_it_is_raised(self, fault: Any, error: type[Exception]) -> None:
        venv = _faulty(fault)
        pids = [pid for node in venv.worker_pids().values() for pid in node[1:]]
        with pytest.raises(error) as caught:
            for _ in range(3):
                within(DEADLINE_S, partial(venv.step, np.zeros(4, int)))
        assert venv.is_closed
        assert re.search("environments? (2 to )?3", f"{caught.value} {caught.value.__cause__}")
        wait_until(lambda: not any(map(alive, pids)), "the workers have ended")

    @pytest.mark.parametrize("fault", ["raise", "kill", "hang"])
    def test_with_restarts_the_others_notice_nothing(self, fault: Any, caplog: pytest.LogCaptureFixture) -> None:
        with closing(_faulty(fault, on_env_error="restart")) as ours:
            theirs = DummyVectorEnv([partial(CountingEnv, 1000)] * 4)
            theirs.seed(5)
            with caplog.at_level(logging.WARNING, "rayvec"):
                steps = [within(DEADLINE_S, partial(ours.step, np.zeros(4, int))) for _ in range(3)]
            expected = [theirs.step(np.zeros(4, int)) for _ in range(3)]
            got, last = steps[2], steps[1]
            restarted = [bool(info.get("env_restarted")) for info in got[-1]]
            assert restarted == [False, False, fault != "raise", True]
            for part, whole in zip(got[:4], expected[2][:4], strict=True):
                assert_same(part[:2], whole[:2])
            assert_same(got[0][3], last[0][3], "the last true observation")
            assert (got[1][3], got[2][3], got[3][3]) == (0.0, False, True)
            assert ours.topology.nodes[0].name in caplog.text
            assert ours.reset([3])[0][0, 2] == 0

    def test_an_environment_of_this_process_that_raises(self) -> None:
        venv = _faulty("raise", 0, on_env_error="restart")
        with closing(venv):
            infos = [venv.step(np.zeros(4, int))[-1] for _ in range(3)][-1]
            assert [bool(info.get("env_restarted")) for info in infos] == [False, False, False, True]
        venv = _faulty("raise", 0)
        with pytest.raises(ValueError, match="broken"):
            for _ in range(3):
                venv.step(np.zeros(4, int))
        assert venv.is_closed

    def test_a_worker_that_dies_between_steps_is_replaced(self) -> None:
        with closing(make([Line] * 4, on_env_error="restart")) as venv:
            venv.reset()
            [(_, *_, killed)] = venv.worker_pids().values()
            os.kill(killed, signal.SIGKILL)
            infos = within(DEADLINE_S, partial(venv.step, np.zeros(4, int)))[-1]
            assert [bool(info.get("env_restarted")) for info in infos] == [False, False, True, True]
            assert killed not in venv.worker_pids()[venv.topology.nodes[0].name]

    def test_a_constructor_that_hangs(self) -> None:
        make([Line]).close()  # starts the fork server, whose start would count too
        with pytest.raises(WorkerLostError, match=r"within 0\.5 s \(start_timeout_s\)"):
            within(DEADLINE_S, partial(make, [partial(FaultyEnv, "hang", "init")], start_timeout_s=0.5))

    def test_a_child_that_is_forked_leaves_the_environments_alone(self) -> None:
        with closing(make([Line] * 2)) as venv:
            venv.reset()
            child = os.fork()
            if not child:
                status = 1
                try:
                    venv.step(np.zeros(2, int))
                except ClosedEnvironmentError:
                    venv.close()
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitpid(child, 0)[1] == 0
            assert len(venv.step(np.zeros(2, int))[0]) == 2


def test_chunks_leave_environments_busy_until_they_are_waited_for() -> None:
    with closing(make([DriftEnv] * 2)) as venv:
        venv.reset()
        store = venv.publish(lambda obs: np.zeros(len(obs), int))
        venv.rollout_async(store, 5, 0, 0)
        with pytest.raises(AssertionError, match="chunk"):
            venv.worker_pids()
        again = venv.publish_pickled(cloudpickle.dumps(CallablePolicy(lambda obs: np.ones(len(obs), int))))
        venv.rollout_async(again, 5, 5, 0)
        first, second = venv.rollout_wait(), venv.rollout_wait()
        assert first.chunk is not None and second.chunk is not None
        assert (first.chunk.act == 0).all() and (second.chunk.act == 1).all()
        assert len(venv.reset()[0]) == 2


def _faulty(fault: Any, workers: int = 2, **kwargs: Any) -> RayVectorEnv:
    fns = [partial(CountingEnv, 1000)] * 3 + [partial(FaultyEnv, fault, "step", 2)]
    venv = make(fns, workers, step_timeout_s=0.5 if fault == "hang" else None, **kwargs)
    venv.seed(5)
    return venv


def _silently(seed: Any) -> Any:
    return lambda self, value: [None for _ in seed(self, value)]
