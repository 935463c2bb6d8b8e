"""Environments that raise, hang and die; workers, actors and nodes that are killed: what becomes of the others."""

from __future__ import annotations

import importlib
import logging
import os
import resource
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import ray
from helpers.kinds import within
from helpers.obedient_envs import (
    DIE,
    GO,
    HANG,
    RAISE,
    SEED,
    STEP,
    TOTAL,
    EndlessEnv,
    FailsAfterAnEnd,
    ObedientEnv,
    SameAgain,
    TwoSteps,
    long_env,
)
from helpers.testing import CountingEnv, FaultyEnv, assert_identical
from helpers.waiting import DEADLINE_S, wait_until
from ray.util.placement_group import placement_group, remove_placement_group

from rayvec.collect.collector import Collector
from rayvec.data.chunk import counted_ends
from rayvec.errors import EnvError, NodeLostError, WorkerLostError
from rayvec.fleet.restarts import RESTARTS_OF_A_NODE, RestartBudget, restart_seed
from rayvec.vector.ray_vec_env import RayVecEnv


def told(num_envs: int, **orders: int) -> Any:
    actions = np.zeros(num_envs, np.int64)
    for name, action in orders.items():
        actions[int(name[1:])] = action
    return actions


@pytest.mark.parametrize(
    ("fault", "affected"), [pytest.param(RAISE, [5], marks=pytest.mark.slow, id="raise"), (HANG, [4, 5]), (DIE, [4, 5])]
)
def test_only_what_is_affected_is_restarted(make_vec: Any, fault: int, affected: list[int]) -> None:
    """The others' streams are those of a run in which nothing happened, bit for bit."""
    reference = gymnasium.vector.SyncVectorEnv([ObedientEnv] * 8)
    limit_s = 1.0 if fault == HANG else None
    env = make_vec([ObedientEnv] * 8, nodes=2, workers=2, on_env_error="restart", step_timeout_s=limit_s)
    others = [n for n in range(8) if n not in affected]
    obs, _ = env.reset(seed=3)
    reference.reset(seed=3)
    faults = 0
    for step in range(20):
        last = obs
        obs, rew, terminated, truncated, info = env.step(told(8, n5=fault if step == 6 else GO))
        for got, want in zip((obs, rew, terminated, truncated), reference.step(told(8)), strict=False):
            assert_identical(got[others], want[others])
        restarted = info.get("env_restarted", np.zeros(8, bool))
        assert not restarted[others].any()
        faults += int(restarted.any())
        for n in np.flatnonzero(restarted).tolist():
            assert_identical(obs[n], last[n])
            assert (rew[n], terminated[n], truncated[n]) == (0.0, False, True)
    assert faults == 1
    for n in affected:
        assert obs[n][SEED] == restart_seed(3 + n, n, 1)


@pytest.mark.parametrize("mode", ["SameStep", "Disabled"])
def test_the_other_autoreset_modes(make_vec: Any, mode: str) -> None:
    env = make_vec([long_env] * 3, workers=3, on_env_error="restart", autoreset_mode=mode)
    env.reset(seed=1)
    last = env.step(told(3))[0]
    obs, rew, terminated, truncated, info = env.step(told(3, n1=RAISE))
    assert info["env_restarted"].tolist() == [False, True, False]
    assert (rew[1], terminated[1], truncated[1]) == (0.0, False, True)
    if mode == "SameStep":
        assert_identical(info["final_obs"][1], last[1])
        assert obs[1].tolist() == [restart_seed(2, 1, 1), 0, 0, 0]
    else:
        assert_identical(obs[1], last[1])
        obs, _ = env.reset(options={"reset_mask": truncated})
        assert obs[1].tolist() == [restart_seed(2, 1, 1), 0, 0, 0]
    assert env.step(told(3))[0][:, TOTAL].tolist() == [3, 1, 3]


@pytest.mark.parametrize("fault", [pytest.param(RAISE, marks=pytest.mark.slow), DIE])
def test_the_log_names_them_for_what_happens_in_a_chunk_too(
    make_vec: Any, caplog: pytest.LogCaptureFixture, fault: int
) -> None:
    """A node logs it where nobody looks, and tells the driver."""
    env = make_vec([long_env] * 4, nodes=2, workers=1, on_env_error="restart")
    with caplog.at_level(logging.WARNING, "rayvec"):
        env.rollout(lambda obs: np.where((obs[:, TOTAL] == 1) & (obs[:, SEED] == 13), fault, GO), 3, seed=10)
    what = "environment 3, seed 13" if fault == RAISE else "environments 2 to 3), seeds [12, 13]"
    said = [text for text in caplog.messages if env.topology.nodes[1].name in text and "worker 0" in text]
    assert len(said) == 1 and what in said[0], caplog.messages


def test_a_reset_that_raises_is_made_good(make_vec: Any) -> None:
    env = make_vec([partial(FaultyEnv, "raise", "reset", 1)] * 2, workers=1, on_env_error="restart")
    obs, _ = env.reset(seed=4)
    assert obs[:, SEED].tolist() == [4, 5]
    obs, _ = env.reset(seed=6)
    assert obs[:, SEED].tolist() == [restart_seed(6, 0, 1), restart_seed(7, 1, 1)]


def test_a_crash_loop_ends(make_vec: Any) -> None:
    env = make_vec([partial(FaultyEnv, "raise"), CountingEnv], workers=1, on_env_error="restart")
    env.reset(seed=1)
    with pytest.raises(EnvError, match=RestartBudget.rule()) as caught:
        for _ in range(100):
            env.step(np.zeros(2, np.int64))
    assert "this environment is broken" in str(caught.value) and env.closed


def test_chunks_leave_out_what_did_not_happen(make_vec: Any) -> None:
    """A failed step is not valid, the one before it is truncated at the last true observation."""
    env = make_vec([long_env] * 4, workers=2, on_env_error="restart")
    chunk = env.rollout(lambda obs: np.where((obs[:, TOTAL] == 5) & (obs[:, SEED] == 3), RAISE, GO), 10, seed=2)
    assert chunk.restarts.tolist() == [[5, 1]]
    assert np.argwhere(~chunk.valid).tolist() == [[5, 1]]
    assert np.argwhere(chunk.done).tolist() == [[4, 1]] and chunk.truncated[4, 1]
    assert_identical(chunk.next_obs()[4, 1], chunk.obs[5, 1])
    assert chunk.cuts.tolist() == [[4, 1]]
    assert chunk.obs[6, 1].tolist() == [restart_seed(3, 1, 1), 0, 0, 0]
    assert (np.delete(chunk.obs, 1, 1)[-1][:, TOTAL] == 9).all()


@pytest.mark.parametrize(("env_class", "cuts", "ends"), [(SameAgain, [[2, 0]], [1, 5]), (FailsAfterAnEnd, [], [1, 4])])
def test_an_end_is_told_from_a_cut_where_observations_are_equal(
    make_vec: Any, env_class: Any, cuts: Any, ends: Any
) -> None:
    chunk = make_vec([env_class], on_env_error="restart").rollout(lambda obs: np.zeros(len(obs), int), 6, seed=0)
    assert chunk.cuts.tolist() == cuts
    assert np.flatnonzero(counted_ends(chunk)[:, 0]).tolist() == ends


def test_a_worker_that_hangs_in_a_long_chunk_is_restarted_after_one_steps_time(make_vec: Any) -> None:
    """The others take several times as long for the whole, and are left alone. It had died in a step before."""
    env = make_vec([partial(EndlessEnv, step_s=0.02)] * 3, workers=3, on_env_error="restart", step_timeout_s=1.0)
    env.reset(seed=1)
    env.step(told(3, e1=DIE))
    policy = lambda obs: np.where((obs[:, TOTAL] == 3) & (obs[:, SEED] == 2), HANG, GO)  # noqa: E731
    chunk = within(DEADLINE_S, partial(env.rollout, policy, 100, seed=1))
    assert chunk.restarts.tolist() == [[-1, 1]] and chunk.valid.all()
    assert chunk.last_obs[:, TOTAL].tolist() == [100, 100, 100]


def test_the_time_of_a_policy_is_no_steps() -> None:
    def slow_policy(obs: Any) -> Any:
        if not obs[:, TOTAL].any():
            time.sleep(1.2)
        return np.full(len(obs), GO)

    with RayVecEnv([ObedientEnv] * 2, num_nodes=0, workers_per_node=2, step_timeout_s=1.0) as env:
        assert within(DEADLINE_S, partial(env.rollout, slow_policy, 20, seed=1)).valid.all()


def test_a_policy_that_hangs_is_named_as_such() -> None:
    def hanging_policy(obs: Any) -> Any:
        if obs[:, TOTAL].any():
            time.sleep(DEADLINE_S)
        return np.full(len(obs), GO)

    with RayVecEnv([ObedientEnv] * 2, num_nodes=0, workers_per_node=1, step_timeout_s=0.5) as env:
        with pytest.raises(WorkerLostError, match=r"(?s)within 2 s \(step_timeout_s\).*in hanging_policy"):
            within(DEADLINE_S, partial(env.rollout, hanging_policy, 4, seed=1))


@pytest.mark.parametrize(("fault", "stepwise"), [(RAISE, True), (DIE, False)], ids=["raise-step", "die-chunk"])
def test_an_episode_that_a_chunk_has_just_begun_is_cut_too(make_vec: Any, fault: int, stepwise: bool) -> None:
    """The last step of a chunk ends an episode and begins the next, which is lost before its own first step."""
    env = make_vec([TwoSteps] * 4, nodes=2, workers=1, on_env_error="restart")
    chunk = env.rollout(lambda obs: np.zeros(len(obs), np.int64), 2, seed=1)
    assert chunk.terminated[-1].all() and (chunk.last_obs[:, STEP] == 0).all()
    if stepwise:
        obs, _, _, truncated, info = env.step(told(4, n3=fault))
        assert np.flatnonzero(info["env_restarted"]).tolist() == np.flatnonzero(truncated).tolist() == [3]
        assert_identical(obs[3], chunk.last_obs[3])
    else:
        seed = int(chunk.last_obs[3, SEED])
        chunk = env.rollout(lambda obs: np.where((obs[:, SEED] == seed) & (obs[:, TOTAL] == 2), fault, GO), 2)
        assert chunk.restarts.tolist() == [[-1, 2], [-1, 3]]  # a worker that ends takes the chunk with it


@pytest.mark.parametrize(("fault", "inference"), [(RAISE, "worker"), (DIE, "driver")])
def test_an_episode_that_was_cut_fills_no_quota(make_vec: Any, fault: int, inference: Any) -> None:
    def policy(obs: Any) -> Any:
        return np.where((obs[:, TOTAL] == 10) & (obs[:, SEED] == 2), fault, GO)

    env = make_vec([ObedientEnv] * 2, workers=2, on_env_error="restart")
    batch = Collector(env, policy, inference, seed=1).collect(n_episode=6)
    assert batch.stats.n_restarts == 1 and batch.stats.n_collected_episodes == 6
    lens = []
    for chunk in batch.chunks:
        for t, n in np.argwhere(counted_ends(chunk) & chunk.valid).tolist():
            lens.append((n, int(chunk.next_obs()[t, n, STEP])))
    assert [len([1 for n, _ in lens if n == column]) for column in (0, 1)] == [3, 3]
    assert sorted(length for _, length in lens) == sorted(batch.stats.lens.tolist())


def actor(env: RayVecEnv, node: int = 1) -> int:
    """Returns the process id of a node's actor, by default of the second: the first is this process's own."""
    pid = env.worker_pids()[env.topology.nodes[node].name][0]
    assert pid != os.getpid()
    return pid


def kill(env: RayVecEnv, node: int = 1) -> None:
    os.kill(actor(env, node), signal.SIGKILL)


def test_an_actor_that_is_killed_is_replaced(make_vec: Any) -> None:
    env = make_vec([long_env] * 4, nodes=2, workers=1)
    env.reset(seed=1)
    before = env.step(told(4))[0]
    kill(env)
    others, lost = [0, 1], [2, 3]
    totals = []
    for _ in range(200):
        obs, rew, _, truncated, info = env.step(told(4))
        totals.append(obs[others, TOTAL].tolist())
        if "env_restarted" in info:
            break
        before = obs
    assert info["env_restarted"][lost].all() and not info["env_restarted"][others].any()
    assert_identical(obs[lost], before[lost])
    assert truncated[lost].all() and not rew[lost].any()
    assert totals == [[2 + step] * 2 for step in range(len(totals))], "the others went on undisturbed"
    obs = env.step(told(4))[0]
    assert obs[lost[0]].tolist() == [restart_seed(1 + lost[0], lost[0], RESTARTS_OF_A_NODE), 0, 0, 0]
    env.rollout(lambda obs: np.zeros(len(obs), np.int64), 5)


def test_on_node_loss_raise(make_vec: Any) -> None:
    env = make_vec([long_env] * 2, nodes=2, workers=1, on_node_loss="raise")
    env.reset(seed=1)
    kill(env)
    with pytest.raises(NodeLostError, match=env.topology.nodes[1].name):
        for _ in range(1000):
            env.step(told(2))
    assert env.closed


def number_of(node: Any, env: RayVecEnv) -> int:
    return [each.node_id for each in env.topology.nodes].index(node.node_id)


@pytest.fixture
def extra(ray_cluster: Any) -> Iterator[Any]:
    """A node for a test to kill; after it, the cluster knows that the node is dead, and is as it was."""
    node = ray_cluster.add_node(num_cpus=1)
    yield node
    if node in ray_cluster.list_all_nodes():
        ray_cluster.remove_node(node, allow_graceful=False)
    wait_until(lambda: node.node_id not in {each["NodeID"] for each in ray.nodes() if each["Alive"]}, "it is dead")


@pytest.mark.timeout(600)
def test_a_raylet_that_is_killed(make_vec: Any, ray_cluster: Any, extra: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The whole node goes; its environments go on elsewhere, the others never notice, and the log says so."""
    env = make_vec([long_env] * 6, nodes=3, workers=1)
    env.reset(seed=1)
    node = env.topology.nodes[number_of(extra, env)]
    lost = list(node.env_range)
    ray_cluster.remove_node(extra, allow_graceful=False)
    answers: list[Any] = []

    def is_told() -> bool:
        answers.append(env.step(told(6)))
        return "env_restarted" in answers[-1][4]

    wait_until(is_told, "the environments have restarted")
    obs, *_, info = answers[-1]
    assert np.flatnonzero(info["env_restarted"]).tolist() == lost
    assert extra.node_id not in [node.node_id for node in env.topology.nodes]
    assert len({int(obs[n][TOTAL]) for n in range(6) if n not in lost}) == 1
    seeds = [1 + n for n in lost]
    said = f"restarted node {node.name} (environments {lost[0]} to {lost[-1]}), seeds {seeds}: "
    (text,) = [text for text in caplog.messages if said in text]
    assert "is lost" in text and "They resume on node" in text


@pytest.mark.slow
def test_where_no_core_is_left_a_lost_node_is_an_error(make_vec: Any, ray_cluster: Any, extra: Any) -> None:
    env = make_vec([long_env] * 3, nodes=3, workers=1)
    env.reset(seed=1)
    make_vec([long_env] * 64, nodes=None, workers=None)  # takes every core that is left
    number = number_of(extra, env)
    ray_cluster.remove_node(extra, allow_graceful=False)
    kill(env, number)
    with pytest.raises(NodeLostError, match="No other node has a free core"):
        for _ in range(1000):
            env.step(told(3))


def test_another_node_finds_the_module_of_a_policy(
    make_vec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the ``sys.path`` of the driver, as it finds those of environments; a replacement worker does, too."""
    (tmp_path / "policy_of_driver.py").write_text("def act(obs): return obs[:, 0].astype('int64') * 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    act = importlib.import_module("policy_of_driver").act
    env = make_vec([long_env] * 2, nodes=2, workers=1, on_env_error="restart")
    assert env.rollout(act, 3, seed=1).valid.all()
    os.kill(env.worker_pids()[env.topology.nodes[1].name][1], signal.SIGKILL)
    chunk = env.rollout(act, 3)
    assert chunk.restarts[:, 1].tolist() == [1]


class Limits(gymnasium.Env[Any, Any]):
    """Lets the actor that owns its worker make no file of more than 1 MB, as where memory is short, if it may begin."""

    observation_space = gymnasium.spaces.Box(0, 1, (1 << 19,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, driver: int, begins: Path) -> None:
        fork_server = Path(f"/proc/{os.getppid()}/stat").read_text()
        owner = int(fork_server.rpartition(")")[2].split()[1])
        if owner != driver and begins.exists():
            resource.prlimit(owner, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(1 << 19, np.float32), {}


@pytest.mark.usefixtures("extra")
def test_a_replacement_that_can_not_allocate_its_arrays_says_why(make_vec: Any, tmp_path: Path) -> None:
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    group = placement_group([{"CPU": 23}], bundle_label_selector=[here])  # the driver's own node has no core for it
    assert group.wait(DEADLINE_S)
    try:
        makes = [partial(Limits, os.getpid(), tmp_path / "begins")] * 2
        env = make_vec(makes, nodes=2, workers=1, replay_calls=["reset"])
        env.call("reset")  # a replacement gets it again
        (tmp_path / "begins").touch()
        kill(env)
        with pytest.raises(OSError, match="File too large"):
            for _ in range(1000):
                env.call("reset")
    finally:
        remove_placement_group(group)
    assert env.closed
