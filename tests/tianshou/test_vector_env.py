"""RayVectorEnv against Tianshou's own vector environments, step for step, and under Tianshou's own tools."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.kinds import ARRAY_SPACES, OBJECT_SPACES, env_fns, within
from helpers.obedient_envs import PressesCtrlC
from helpers.testing import CountingEnv, FaultyEnv
from helpers.tianshou_buffers import assert_same_buffer
from helpers.tianshou_envs import Agents, Held, Line, Ragged, Told, WithoutSpaces
from helpers.tianshou_kit import Exact, Remembers
from helpers.tianshou_lockstep import assert_same, both, in_lockstep
from helpers.waiting import DEADLINE_S
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import BaseVectorEnv, DummyVectorEnv, SubprocVectorEnv

from rayvec.errors import ConfigError, EnvError
from rayvec.tianshou import RayVectorEnv

EnvFns = Sequence[Callable[[], Any]]
MakeVenv = Callable[..., RayVectorEnv]


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[MakeVenv]:
    """Makes vector environments, by default with one worker and without Ray, and closes them in the end."""
    made: list[RayVectorEnv] = []

    def make_one(
        fns: EnvFns, *args: Any, nodes: int | None = 0, workers: int | None = 1, **kwargs: Any
    ) -> RayVectorEnv:
        if nodes != 0:
            request.getfixturevalue("ray_cluster")
        made.append(RayVectorEnv(fns, *args, num_nodes=nodes, workers_per_node=workers, preload=(), **kwargs))
        return made[-1]

    yield make_one
    for venv in made:
        with suppress(AssertionError):  # closed already
            venv.close()


@pytest.fixture(scope="module", params=[1, 0], ids=["worker", "this process"])
def lines(request: pytest.FixtureRequest) -> Iterator[RayVectorEnv]:
    """Environments of :data:`LINES`, without Ray; every test seeds or resets them."""
    with closing(RayVectorEnv(LINES, num_nodes=0, workers_per_node=request.param, preload=())) as venv:
        yield venv


CARTPOLES = [partial(gymnasium.make, "CartPole-v1", max_episode_steps=12)] * 5
LINES = [Line] * 3


class TestEquality:
    @pytest.mark.parametrize(("nodes", "workers"), [(2, 1), (0, 2), (0, 0)], ids=["nodes", "workers", "this process"])
    def test_cartpole(self, make: MakeVenv, nodes: int, workers: int) -> None:
        ours, theirs = make(CARTPOLES, nodes=nodes, workers=workers), DummyVectorEnv(CARTPOLES)
        assert ours.transports == {2: ("shm", "tcp"), 0: ("shm",) if workers else ("local",)}[nodes]
        assert in_lockstep(ours, theirs, 60) > 5

    def test_in_this_process_all_answer_at_once(self, make: MakeVenv) -> None:
        ours, theirs = make(CARTPOLES, workers=0, wait_num=2), DummyVectorEnv(CARTPOLES)
        assert ours.is_async
        assert in_lockstep(ours, theirs, 20, [[0, 1, 2], [3, 4]]) > 0
        assert (ours.waiting_id, sorted(ours.ready_id)) == ([], [0, 1, 2, 3, 4])

    @pytest.mark.parametrize("kind", ["arrays", "objects"])
    def test_a_dict_of_every_space(self, make: MakeVenv, kind: str) -> None:
        space = spaces.Dict(ARRAY_SPACES if kind == "arrays" else OBJECT_SPACES)
        fns = env_fns(4, space, ARRAY_SPACES["box32"])
        assert in_lockstep(make(fns, nodes=1 + (kind == "arrays")), DummyVectorEnv(fns), 25) > 10

    def test_rewards_of_several_agents(self, make: MakeVenv) -> None:
        fns = [partial(Agents, kind) for kind in (list, np.array) for _ in range(2)]
        ours, theirs = make(fns, nodes=2), DummyVectorEnv(fns)
        both(ours, theirs, lambda v: v.reset(seed=1))
        for ids in ([2, 3], [3, 2], [0, 2], [1, 3, 0]):
            rew = theirs.step(np.zeros(len(ids), int), ids)[1]
            assert_same(ours.step(np.zeros(len(ids), int), ids)[1], rew.astype(np.float64))

    def test_observations_of_different_lengths(self, make: MakeVenv) -> None:
        fns = [partial(Ragged, size) for size in (2, 3, 3, 5)]
        assert in_lockstep(make(fns, nodes=2), DummyVectorEnv(fns), 30) > 5

    def test_actions_arrive_as_they_were_sent(self, lines: RayVectorEnv) -> None:
        ours, theirs = lines, DummyVectorEnv(LINES)
        actions = [[1, 2, 0], np.array([1, 2, 0]), np.array([1, 0, 2], np.int8), [np.int64(1), 2.5, {"any": "thing"}]]
        for action in [*actions, np.array([0, "a", ()], dtype=object), (1, 0, 2)]:
            both(ours, theirs, lambda v: v.reset(seed=1))
            both(ours, theirs, lambda v, action=action: v.step(action), str(action))
        ours.reset()
        received = ours.step(torch.tensor([2, 1, 0]))[-1][0]["action"]
        assert received == repr(np.int64(2))  # a worker need not know torch


class TestInterface:
    def test_it_is_one_of_tianshou_s(self, make: MakeVenv) -> None:
        driver = os.getpid()

        def make_env(size: int) -> Told:
            assert os.getpid() != driver, "an environment is made on a worker, never here"
            return Told(Line(size))

        venv = make([partial(make_env, size) for size in (3, 4, 5)], nodes=2)
        assert isinstance(venv, BaseVectorEnv)
        assert (len(venv), venv.env_num, venv.is_async, venv.is_closed, venv.wait_num) == (3, 3, False, False, 3)
        assert venv.action_space == [spaces.Discrete(7)] * 3
        assert venv.observation_space == [Line.observation_space] * 3
        assert venv.metadata == [Line.metadata] * 3
        assert venv.spec == [None] * 3
        assert (venv.waiting_id, venv.ready_id, venv.timeout) == ([], [0, 1, 2], None)
        assert venv.reward_range == [None] * 3  # as `SubprocVectorEnv` has it
        assert venv.get_env_attr("size") == [3, 4, 5]
        assert venv.get_env_attr("size", 1) == venv.get_env_attr("size", np.int64(1)) == [4]
        assert venv.get_env_attr("size", [2, 0]) == venv.get_env_attr("size", np.array([-1, 0])) == [5, 3]
        assert venv.get_env_attr("outer") == ["outer"] * 3
        venv.set_env_attr("size", 8, [0, 2])
        venv.set_env_attr("outer", 1, 1)
        assert venv.get_env_attr("size") == [8, 4, 8]
        assert venv.get_env_attr("outer", 1) == ["outer"]  # as in Tianshou: set within, read without
        with pytest.raises(AttributeError, match="nothing"):
            venv.get_env_attr("nothing")
        assert venv.get_env_attr("size", []) == []
        with pytest.raises(TypeError, match="return_info"):
            venv.reset(return_info=True)
        assert venv.is_closed

    def test_renders(self, lines: RayVectorEnv) -> None:
        lines.reset()
        lines.step(np.zeros(1, int), [2])
        assert_same(lines.render(), [np.full((2, 2), 0), np.full((2, 2), 0), np.full((2, 2), 1)])

    def test_seeds(self, lines: RayVectorEnv) -> None:
        ours, theirs = lines, DummyVectorEnv(LINES)
        both(ours, theirs, lambda v: v.reset(seed=0))
        assert ours.seed(4) == [[4], [5], [6]] == theirs.seed(4)
        for seed in (None, [7, 7, 9], [1, 2], [1, 2, 3, 4]):
            both(ours, theirs, lambda v, seed=seed: [len(s) for s in v.seed(seed)])
        both(ours, theirs, lambda v: [v.seed([1, 2, 3]), [s.sample() for s in v.action_space], v.step(np.ones(3, int))])
        both(ours, theirs, lambda v: v.reset(seed=2))  # the same for all
        both(ours, theirs, lambda v: v.reset([2, 0], seed=None, options={"level": {"x": (1, 2)}}))

    def test_mistakes_that_leave_it_as_it_is(self, lines: RayVectorEnv) -> None:
        ours, theirs = lines, DummyVectorEnv(LINES)
        both(ours, theirs, lambda v: v.reset(seed=0))
        for mistake in (
            lambda v: v.step(None),
            lambda v: v.step([0, 1]),
            lambda v: v.step([0], [1, 2]),
            lambda v: v.step([0], [3]),
            lambda v: v.step([], []),
            lambda v: v.reset([]),
            lambda v: v.reset(7),
            lambda v: v.get_env_attr("nothing"),
            lambda v: v.get_env_attr("size", 3),
        ):
            assert both(ours, theirs, mistake) is None
        with pytest.raises(ConfigError, match="Pass each id once"):
            ours.step([1, 1], [0, 0])
        if lines.transports != ("local",):
            with pytest.raises(TypeError, match="cannot pickle"):
                ours.reset(options={"lock": Lock()})
        both(ours, theirs, lambda v: v.step(np.zeros(2, int), [-1, 0]))

    @pytest.mark.parametrize(
        ("error", "arguments"),
        [
            (AssertionError, {"wait_num": 3}),
            (AssertionError, {"timeout": 0}),
            (ConfigError, {"on_env_error": "ignore"}),
            (ConfigError, {"on_node_loss": 1}),
            (ConfigError, {"num_nodes": 1, "workers_per_node": 0}),
            (ConfigError, {"workers_per_node": 0, "step_timeout_s": 1.0}),
            (ConfigError, {"workers_per_node": -1}),
            (ConfigError, {"address": "auto"}),
            (ConfigError, {"env_fns": []}),
            (ConfigError, {"env_fns": "x"}),
        ],
    )
    def test_arguments_that_are_refused(self, ray_cluster: object, error: Any, arguments: dict[str, Any]) -> None:
        with pytest.raises(error):
            RayVectorEnv(**({"env_fns": [Line] * 2, "num_nodes": 0} | arguments))

    def test_nothing_can_be_called_after_close(self, make: MakeVenv) -> None:
        venv = make([Line])
        venv.close()
        calls = [venv.reset, venv.seed, venv.render, venv.close, partial(venv.step, [1]), partial(venv.step, None)]
        calls += [partial(venv.get_env_attr, "size"), partial(venv.set_env_attr, "size", 1)]
        for call in [*calls, lambda: venv.action_space]:
            with pytest.raises(AssertionError, match="cannot be called after close"):
                call()
        assert len(venv) == 1


class TestAsync:
    def test_a_step_does_not_wait_for_slow_environments(self, make: MakeVenv, tmp_path: Path) -> None:
        """Environments 0 and 3, one on each node, are held until a file is there; the others step."""
        fns = [partial(Held, str(tmp_path / str(i))) for i in range(4)]
        venv = make(fns, nodes=2, wait_num=1)
        assert venv.is_async
        assert venv.transports == ("shm", "tcp")
        venv.reset()
        action = np.array([1, 0, 0, 1])
        counts, ids = [0] * 4, list(range(4))
        for _ in range(40):
            obs, _, _, _, infos = within(DEADLINE_S, partial(venv.step, action[ids], ids))
            ids = [info["env_id"] for info in infos]
            for row, env_id in enumerate(ids):
                counts[env_id] += 1
                assert obs[row, 0] == counts[env_id]
            assert not {0, 3} & set(ids)
        held = venv.waiting_id.copy()
        assert {0, 3} <= set(held)
        assert sorted(held + venv.ready_id) == [0, 1, 2, 3]
        for env_id in held:
            for call in (venv.reset, partial(venv.step, [0]), partial(venv.get_env_attr, "size")):
                with pytest.raises(AssertionError, match=f"{env_id} which is stepping"):
                    call([env_id])
        with pytest.raises(AssertionError, match="stepping"):
            venv.seed(1)
        with pytest.raises(RuntimeError, match="still stepping"):
            venv.render()
        while set(venv.waiting_id) != {0, 3}:
            within(DEADLINE_S, partial(venv.step, None))
        for env_id in (1, 2):  # while the others step
            assert within(DEADLINE_S, partial(venv.get_env_attr, "size", env_id)) == [1000]
            within(DEADLINE_S, partial(venv.set_env_attr, "size", 99, env_id))
            assert within(DEADLINE_S, partial(venv.reset, env_id))[0][0, 0] == 0
        assert venv.get_env_attr("size", [2, 1]) == [99, 99]
        (tmp_path / "3").touch()
        assert [info["env_id"] for info in within(DEADLINE_S, partial(venv.step, None))[-1]] == [3]
        (tmp_path / "0").touch()
        obs, _, _, _, infos = within(DEADLINE_S, partial(venv.step, None))
        assert infos[0]["env_id"] == 0
        assert obs[0, 0] == 1
        assert venv.waiting_id == []
        with pytest.raises(RuntimeError, match="No environment is stepping"):
            venv.step(None)

    def test_what_waits_is_what_waits_in_tianshou(self, make: MakeVenv, tmp_path: Path) -> None:
        """The same script for both: who is let go, and who must therefore have answered."""

        def story(venv: BaseVectorEnv, held: Path) -> list[Any]:
            log = []

            def note(result: Any) -> None:
                rows = sorted((info["env_id"], obs.tolist()) for obs, info in zip(result[0], result[-1], strict=True))
                log.append((rows, venv.waiting_id.copy(), sorted(venv.ready_id)))

            with closing(venv):
                venv.seed(0)
                note(venv.step([1, 1, 0, 0]))
                note(venv.step([0, 0], [3, 2]))
                (held / "1").touch()
                note(venv.step(np.array([0]), np.array([3])))
                venv.reset(2)
                (held / "0").touch()
                note(venv.step(None))
                return log

        stories = []
        for name in ("ours", "theirs"):
            held = tmp_path / name
            held.mkdir()
            fns = [partial(Held, str(held / str(i))) for i in range(4)]
            venv = make(fns, 2, None) if name == "ours" else SubprocVectorEnv(fns, 2, None)
            stories.append(within(DEADLINE_S, partial(story, venv, held)))
        assert [waiting for _, waiting, _ in stories[0]] == [[0, 1], [0, 1], [0], []]
        assert stories[0] == stories[1]

    def test_a_timeout_returns_what_is_there(self, make: MakeVenv, tmp_path: Path) -> None:
        fns = [partial(Held, str(tmp_path / str(i))) for i in range(4)]
        venv = make(fns, nodes=2, timeout=0.2)
        assert (venv.is_async, venv.wait_num) == (True, 4)
        for part in venv.reset(seed=1):
            assert len(part) == 4
        infos = list(within(DEADLINE_S, partial(venv.step, np.array([1, 0, 0, 1])))[-1])
        while len(venv.waiting_id) > 2:  # the timeout may pass between the two answers
            infos += list(within(DEADLINE_S, partial(venv.step, None))[-1])
        assert sorted(info["env_id"] for info in infos) == [1, 2]
        assert venv.waiting_id == [0, 3]
        (tmp_path / "3").touch()
        assert [info["env_id"] for info in within(DEADLINE_S, partial(venv.step, None))[-1]] == [3]
        (tmp_path / "0").touch()
        assert [info["env_id"] for info in within(DEADLINE_S, partial(venv.step, [], []))[-1]] == [0]

    def test_only_what_is_lost_is_restarted_while_others_step(self, make: MakeVenv, tmp_path: Path) -> None:
        others_went_on = tmp_path / "others_went_on"  # environments that are restarted wait for it
        venv = make([partial(Held, str(others_went_on))] * 4, nodes=2, wait_num=1, on_env_error="restart")
        venv.seed(3)
        counts, ids, lost = [0] * 4, list(range(4)), {0, 3}
        action = np.array([2, 0, 0, 2])
        while lost:
            obs, rew, terminated, truncated, infos = within(DEADLINE_S, partial(venv.step, action[ids], ids))
            ids = [info["env_id"] for info in infos]
            for row, env_id in enumerate(ids):
                if env_id in lost:
                    assert infos[row] == {"env_restarted": True, "env_id": env_id}
                    assert (obs[row, 0], rew[row], terminated[row], truncated[row]) == (0.0, 0.0, False, True)
                    lost.discard(env_id)
                    action[env_id] = 0
                    venv.reset([env_id])
                else:
                    counts[env_id] += 1
                    assert obs[row, 0] == counts[env_id] or env_id in (0, 3)
            if min(counts[1], counts[2]) > 3:
                others_went_on.touch()


class TestFaults:
    def test_an_environment_that_raises_closes_all(self, make: MakeVenv) -> None:
        venv = make([CountingEnv, partial(FaultyEnv, "raise", "step", 2, partial(KeyError, "broken"))], nodes=2)
        venv.seed(3)
        with pytest.raises(KeyError, match="broken") as caught:
            for _ in range(5):
                venv.step(np.zeros(2, int))
        assert isinstance(caught.value.__cause__, EnvError)
        assert "environment 1, seed 4" in str(caught.value.__cause__)
        assert venv.is_closed
        with pytest.raises(AssertionError, match="after close"):
            venv.reset()
        venv.close()  # closing in a `finally` does not raise

    @pytest.mark.parametrize("fault", ["raise", "kill", "hang"])
    def test_with_restarts_the_others_notice_nothing(
        self, make: MakeVenv, fault: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Environment 3 of four fails in its third step; two workers hold two environments each."""
        fns = [partial(CountingEnv, 1000)] * 3 + [partial(FaultyEnv, fault, "step", 2)]
        ours = make(fns, workers=2, on_env_error="restart", step_timeout_s=0.5 if fault == "hang" else None)
        theirs = DummyVectorEnv([partial(CountingEnv, 1000)] * 4)
        ours.seed(5), theirs.seed(5)
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
        assert got[4][3] == {"env_restarted": True, "env_id": 3}
        assert ours.topology.nodes[0].name in caplog.text
        assert ours.reset([3])[0][0, 2] == 0


class TestUnderTianshou:
    def test_the_collector_collects_the_same(self, make: MakeVenv) -> None:
        buffers, returns = [], []
        for venv in (make(CARTPOLES, nodes=2), DummyVectorEnv(CARTPOLES)):
            venv.seed(7)
            buffer = VectorReplayBuffer(500, 5)
            collector = Collector(Exact(), venv, buffer)
            collector.reset()
            stats = [collector.collect(n_step=30, random=True), collector.collect(n_step=60)]
            stats.append(collector.collect(n_episode=7))
            returns.append([s.returns.tolist() for s in stats])
            buffers.append(buffer)
        assert returns[0] == returns[1]
        assert_same_buffer(*buffers)

    def test_the_asynchronous_collector(self, make: MakeVenv) -> None:
        from tianshou.data import AsyncCollector

        venv = make([CountingEnv] * 4, nodes=2, wait_num=2)
        venv.seed(1)
        with pytest.warns(UserWarning, match="extra transitions"):
            collector = AsyncCollector(Remembers(), venv, VectorReplayBuffer(200, 4))
        collector.reset()
        stats = within(DEADLINE_S, partial(collector.collect, n_step=60))
        assert stats.n_collected_steps >= 60
        assert stats.n_collected_episodes > 5
        held = collector.buffer[:]
        assert (held.obs_next[:, :2] == held.obs[:, :2]).all()  # no transition joins two episodes
        assert (held.obs_next[:, 2:] == held.obs[:, 2:] + 1).all()
        collector.reset()  # while steps are pending
        assert venv.waiting_id == []


@pytest.mark.parametrize("wait_num", [None, pytest.param(1, marks=pytest.mark.slow)], ids=["together", "async"])
def test_ctrl_c_while_a_step_is_waited_for_closes_everything(make: MakeVenv, wait_num: int | None) -> None:
    """Else the next reset could return the answer to the step that was interrupted."""
    venv = make([partial(PressesCtrlC, os.getpid())] * 2, wait_num, nodes=2)
    venv.reset()
    with pytest.raises(KeyboardInterrupt):
        venv.step(np.ones(1, int), id=[1])
    assert venv.is_closed
    with pytest.raises(AssertionError):
        venv.reset()


@pytest.mark.parametrize("workers", [0, 2])
def test_environments_without_spaces(workers: int) -> None:
    with closing(RayVectorEnv([WithoutSpaces] * 2, num_nodes=0, workers_per_node=workers)) as venv:
        assert venv.reset()[0].tolist() == [{"first"}, {"first"}]
        assert venv.step(np.array([3, 4]))[0].tolist() == [{3}, {4}]
        assert venv.get_env_attr("observation_space") == [None, None]
