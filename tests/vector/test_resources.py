"""What an environment needs of its machine: cores, GPUs (pretended by ``CUDA_VISIBLE_DEVICES``), named resources."""

from __future__ import annotations

import os
from typing import Any

import pytest
from helpers.testing import PlainEnv

import rayvec
import rayvec.stable_baselines3
import rayvec.tianshou
from rayvec.errors import ConfigError

NAMES = ("CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Shows(PlainEnv):
    """Shows what its constructor has found."""

    def __init__(self) -> None:
        self.variables = [os.environ.get(name) for name in NAMES]
        self.cores, self.pid = sorted(os.sched_getaffinity(0)), os.getpid()


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")


@pytest.mark.parametrize(
    ("num_envs", "settings", "gpus", "num_workers"),
    [
        (2, {"workers_per_node": 1}, ["3,5", "3,5"], 1),
        (3, {"gpus_per_env": 0.5}, ["3", "3", "5"], 3),
        (4, {"gpus_per_env": 0.5, "workers_per_node": 2}, ["3", "3", "5", "5"], 2),
        (2, {"gpus_per_env": 1}, ["3", "5"], 2),
        (1, {"gpus_per_env": 2}, ["3,5"], 1),
    ],
)
def test_an_environment_sees_its_gpus(num_envs: int, settings: Any, gpus: list[str], num_workers: int) -> None:
    with rayvec.RayVecEnv(Shows, num_envs, num_nodes=0, **settings) as env:
        shown = env.get_attr("variables")
        assert [each[0] for each in shown] == gpus
        assert [each[1] for each in shown] == [None if "gpus_per_env" not in settings else gpu[0] for gpu in gpus]
        assert len(set(env.get_attr("pid"))) == num_workers


def test_an_environment_has_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("this machine has one core")
    with rayvec.make_vec(Shows, 2, num_nodes=0, cores_per_env=1) as env:
        first, second = env.get_attr("cores")
        assert len(first) == len(second) == 1
        assert first != second
    monkeypatch.setenv("MKL_NUM_THREADS", "7")  # which the user has set
    with rayvec.tianshou.RayVectorEnv([Shows], num_nodes=0, cores_per_env=2, preload=()) as env:
        assert env.get_env_attr("variables")[0][2:] == ["2", "7"]
        assert len(env.get_env_attr("cores")[0]) == 2
    with rayvec.stable_baselines3.RayVecEnv([Shows] * 4, num_nodes=0, cores_per_env=0.5, preload=()) as env:
        assert env.get_attr("cores") == [sorted(os.sched_getaffinity(0))] * 4
        assert len(set(env.get_attr("pid"))) == 4


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"gpus_per_env": 2}, "2 environments need 4 GPU, but this machine has 2"),
        ({"cores_per_env": 999}, "need 1998 CPU"),
        ({"resources_per_env": {"license": 1}}, "need 2 license.* nodes of Ray"),
        ({"resources_per_env": {"license": 0}}, "must be a dict of positive amounts"),
        ({"resources_per_env": {"GPU": 1}}, "are cores_per_env and gpus_per_env"),
        ({"gpus_per_env": 1.5}, "gpus_per_env is 1.5. It must be a share of at most 1, or a whole number"),
        ({"cores_per_env": -1}, "cores_per_env is -1"),
        ({"cores_per_env": 1, "workers_per_node": 0}, "steps in this process"),
        ({"gpus_per_env": 1, "workers_per_node": 1}, "needs several GPUs"),
    ],
    ids=str,
)
def test_what_can_not_be_had_is_refused(settings: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        rayvec.RayVecEnv(Shows, 2, num_nodes=0, **settings)


def test_on_ray_environments_are_where_their_resources_are(ray_cluster: Any) -> None:
    """The driver's node has no license, and its GPUs are others."""
    variables = {"CUDA_VISIBLE_DEVICES": "6,7"}
    licensed = ray_cluster.add_node(num_cpus=4, num_gpus=2, resources={"license": 4}, env_vars=variables)
    try:
        needs: Any = {"cores_per_env": 1, "gpus_per_env": 0.5, "resources_per_env": {"license": 1}}
        with rayvec.RayVecEnv(Shows, 4, **needs) as env:
            (node,) = env.topology.nodes
            assert (node.num_workers, node.num_cpus) == (4, 4)
            shown = env.get_attr("variables")
            assert sorted(each[0] for each in shown) == ["6", "6", "7", "7"]
            with pytest.raises(ConfigError, match="license"):
                rayvec.RayVecEnv(Shows, 1, resources_per_env={"license": 1}, start_timeout_s=1.0)
        with pytest.raises(ConfigError, match="need 5 license together"):
            rayvec.RayVecEnv(Shows, 5, resources_per_env={"license": 1}, start_timeout_s=1.0)
    finally:
        ray_cluster.remove_node(licensed)
