"""How many workers there are by default: one for each core, or one for each environment whose steps wait."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from helpers.kinds import in_lockstep
from helpers.waiting import DEADLINE_S
from helpers.waiting_envs import Noted, make_noted, make_sleeping, make_subprocess_env

import rayvec
import rayvec.stable_baselines3
import rayvec.tianshou
from rayvec.data.cores import quota_cores, usable_cores
from rayvec.wrappers import ActionMask

MANY = usable_cores() + 2


def workers_of(env: Any) -> int:
    return sum(node.num_workers for node in env.topology.nodes)


def events(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_environments_that_wait_have_a_worker_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rayvec")
    with rayvec.RayVecEnv(make_sleeping, MANY, num_nodes=0) as env:
        assert workers_of(env) == MANY
        with closing(gymnasium.vector.SyncVectorEnv([make_sleeping] * MANY)) as sync:
            in_lockstep(env, sync, 8)
    (line,) = [each.getMessage() for each in caplog.records if "one worker per" in each.getMessage()]
    assert "one worker per environment" in line and " ms, of which it computes " in line and " s)" in line


@pytest.mark.parametrize("env", ["CartPole-v1", make_subprocess_env], ids=["computing", "a process that computes"])
def test_environments_that_compute_have_a_worker_for_each_core(env: Any) -> None:
    with rayvec.RayVecEnv(env, MANY, num_nodes=0) as envs:
        assert workers_of(envs) == usable_cores()


def test_only_the_first_of_different_callables_is_tried_and_closed_before_the_others_start(tmp_path: Path) -> None:
    path = tmp_path / "events"
    env_fns = [partial(make_noted, path, f"env{i}") for i in range(MANY)]
    with rayvec.RayVecEnv(env_fns, num_nodes=0, spare_envs=1) as env:
        assert workers_of(env) == MANY
        found = events(path)
    closed = found.index("env0 close")
    assert found[:2] == ["env0 make", "env0 reset"] and "env0 step" in found[:closed]
    assert {each.split()[0] for each in found[:closed]} == {"env0"}
    made = [f"env{i} make" for i in range(MANY)]
    assert sorted(found[closed + 1 :]) == sorted(made * 2)  # each worker makes one more


@pytest.mark.parametrize(
    ("num_envs", "settings"),
    [(MANY, {"workers_per_node": 1}), (MANY, {"workers_per_node": 0}), (MANY, {"probe": False}), (usable_cores(), {})],
    ids=["workers are given", "no workers", "switched off", "few environments"],
)
def test_no_environment_is_made_only_to_be_tried(num_envs: int, settings: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "events"
    with rayvec.RayVecEnv([partial(make_noted, path)] * num_envs, num_nodes=0, **settings) as env:
        assert events(path) == ["env make"] * num_envs
        assert env.num_envs == num_envs


@pytest.mark.parametrize("fails", ["raises", "dies"])
def test_an_environment_whose_first_step_fails_starts_as_if_it_computed(
    fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            if fails == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("not today")

    with rayvec.RayVecEnv(lambda: Failing(make_sleeping()), MANY, num_nodes=0) as env:
        assert workers_of(env) == usable_cores()
        env.reset(seed=0)
    assert "no step could be measured" in caplog.text


@pytest.mark.parametrize("place", ["info", "observation"])
def test_an_environment_with_a_mask_is_tried_with_actions_that_it_allows(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rayvec")
    mask = {"action_mask": np.array([0, 1], np.int8)}

    class Masked(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            assert action == 1
            obs, *others, _ = super().step(action)
            return obs, *others, mask

        def reset(self, **kwargs: Any) -> Any:
            return super().reset(**kwargs)[0], mask

    def make() -> gymnasium.Env[Any, Any]:
        return Masked(make_sleeping()) if place == "info" else ActionMask(Masked(make_sleeping()))

    with rayvec.RayVecEnv(make, MANY, num_nodes=0):
        assert "a step takes" in caplog.text


def test_the_other_adapters_decide_alike() -> None:
    with rayvec.tianshou.RayVectorEnv([make_sleeping] * MANY, num_nodes=0, preload=()) as env:
        assert workers_of(env) == MANY
    env = rayvec.stable_baselines3.RayVecEnv([make_sleeping] * MANY, num_nodes=0, preload=())
    assert workers_of(env) == MANY
    env.close()


class NotesProcess(Noted):
    """Writes which process steps it."""

    def _note(self, what: str) -> None:
        super()._note(f"{what} {os.getpid()}")


@pytest.mark.parametrize(
    ("settings", "probes"),
    [({}, 1), pytest.param({"learners": "decentralized", "num_learners": 2}, 2, marks=pytest.mark.slow)],
    ids=["one process", "decentralized ranks"],
)
def test_a_training_decides_alike(settings: dict[str, Any], probes: int, tmp_path: Path) -> None:
    path, count = tmp_path / "events", 2 * MANY
    sizes = {"num_envs": count, "num_steps": 8, "minibatch_size": 4 * count, "total_steps": 8 * count}
    config = rayvec.PPOConfig(**sizes, num_nodes=0, eval_episodes=0, run_dir=tmp_path / "run", **settings)
    rayvec.train(config, env=lambda: NotesProcess(make_sleeping(), path, "env"))
    steppers = {each.split()[2] for each in events(path) if "step" in each}
    assert len(steppers) == count + probes


@pytest.fixture
def few_free_cores(ray_cluster: object) -> Iterator[None]:
    """Claims the cores of the shared cluster until each node has two."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    nodes = {node["NodeID"]: node["Resources"]["CPU"] for node in ray.nodes() if node["Alive"]}
    groups = [
        placement_group([{"CPU": cores - 2}], bundle_label_selector=[{"ray.io/node-id": node_id}])
        for node_id, cores in nodes.items()
    ]
    assert all(group.wait(DEADLINE_S) for group in groups)
    yield
    for group in groups:
        remove_placement_group(group)


@pytest.mark.usefixtures("few_free_cores")
class TestOnRay:
    """Environments on two nodes with two free cores each."""

    def test_processes_and_claimed_cores_are_two_things(self) -> None:
        with rayvec.RayVecEnv(make_sleeping, 6) as env:
            nodes = env.topology.nodes
            assert len(nodes) == 2 and [node.num_workers for node in nodes] == [3, 3]
            assert all(0.15 <= node.num_cpus < 2 for node in nodes)
            env.reset(seed=0)

    def test_none_is_tried_where_each_has_a_worker_anyway(self, tmp_path: Path) -> None:
        path = tmp_path / "events"
        make = partial(make_noted, path)
        with rayvec.RayVecEnv("CartPole-v1", 4), rayvec.RayVecEnv(make, 6):  # no core is free for these six
            pass
        with rayvec.RayVecEnv(make, 4):  # Ray frees the cores of the former with a delay
            pass
        rayvec.stable_baselines3.RayVecEnv([make] * 6, preload=()).close()  # it claims no cores
        assert events(path).count("env make") == 16

    @pytest.mark.parametrize(
        "num_nodes", [None, pytest.param((2, 2), marks=pytest.mark.slow)], ids=["fixed", "elastic"]
    )
    def test_environments_for_training_and_for_evaluation(
        self, num_nodes: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        make = partial(rayvec.RayVecEnv, "CartPole-v1", num_nodes=num_nodes)
        with make(4) as training, make(6) as evaluation:
            assert [node.num_cpus for node in training.topology.nodes] == [2, 2]
            assert [node.num_cpus for node in evaluation.topology.nodes] == [0, 0]
            training.reset(seed=0)
            evaluation.reset(seed=0)
        assert caplog.text.count("no core is free") == 1


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"pod/docker/cpu.max": "max 100000", "pod/cpu.max": "50000 100000"}, 0.5),
        ({"pod/docker/cpu.max": "300000 100000", "pod/cpu.max": "max 100000"}, 3.0),
        ({"cpu/pod/docker/cpu.cfs_quota_us": "150000", "cpu/pod/docker/cpu.cfs_period_us": "100000"}, 1.5),
        ({"cpu/pod/cpu.cfs_quota_us": "-1", "cpu/pod/cpu.cfs_period_us": "100000", "cpu.max": "4 2"}, 2.0),
        ({}, None),
    ],
)
def test_the_quota_of_a_container_is_the_smallest_of_its_control_groups(
    files: dict[str, str], cores: float | None, tmp_path: Path
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("5:memory:/other\n4:cpu,cpuacct:/pod/docker\n0::/pod/docker\n")
    for name, text in files.items():
        (tmp_path / "sys/fs/cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/fs/cgroup" / name).write_text(text + "\n")
    assert quota_cores(tmp_path) == cores
