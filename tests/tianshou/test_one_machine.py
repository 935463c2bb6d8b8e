"""RayVectorEnv on one machine without Ray: the same numbers and the same faults as anywhere."""

from __future__ import annotations

import logging
import subprocess
import sys
from contextlib import closing
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import tianshou.data
from helpers.exact import DriftEnv
from helpers.kinds import within
from helpers.testing import CountingEnv, FaultyEnv
from helpers.tianshou_lockstep import assert_same, in_lockstep
from helpers.waiting import DEADLINE_S
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.data import VectorReplayBuffer
from tianshou.env import DummyVectorEnv, SubprocVectorEnv
from tianshou.utils.net.common import Net

from rayvec.tianshou import Collector, RayVectorEnv

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
    def test_in_this_process_all_answer_at_once(self) -> None:
        with closing(make(CARTPOLES, 0, wait_num=2)) as ours, closing(DummyVectorEnv(CARTPOLES)) as theirs:
            assert ours.is_async
            assert in_lockstep(ours, theirs, 20, [[0, 1, 2], [3, 4]]) > 0
            assert (ours.waiting_id, sorted(ours.ready_id)) == ([], [0, 1, 2, 3, 4])


class TestFaults:
    """Environment 3 of four fails in its third step; two workers hold two environments each."""

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


def test_chunks_leave_environments_busy_until_they_are_waited_for() -> None:
    with closing(make([DriftEnv] * 2)) as venv:
        venv.reset()
        store = venv.publish(lambda obs: np.zeros(len(obs), int))
        venv.rollout_async(store, 5, 0, 0)
        with pytest.raises(AssertionError, match="chunk"):
            venv.worker_pids()
        again = venv.publish(lambda obs: np.ones(len(obs), int))
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
