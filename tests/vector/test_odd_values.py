"""Environments that return unusual values, against Gymnasium's SyncVectorEnv."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers.kinds import MODES, in_lockstep
from helpers.obedient_envs import OwnError, UnloadableInfo
from helpers.odd_values import LOCK, ODD_VALUES, OddValues, ReservedKeys, SometimesNone
from helpers.testing import CountingEnv, FaultyEnv, PlainEnv, assert_identical

from rayvec.errors import EnvError
from rayvec.vector.ray_vec_env import RayVecEnv

WORKERS = [0, 2]


def here(fns: Any, workers: int, **kwargs: Any) -> RayVecEnv:
    """Makes environments without Ray."""
    return RayVecEnv(fns, num_nodes=0, workers_per_node=workers, **kwargs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("fns", [ODD_VALUES, [SometimesNone] * 3], ids=["odd", "custom space"])
def test_steps(fns: Any, workers: int, mode: AutoresetMode) -> None:
    sync = SyncVectorEnv(fns, autoreset_mode=mode)
    with here(fns, workers, autoreset_mode=mode) as env, closing(sync):
        assert in_lockstep(env, sync, 12) > 9


class OtherByteOrder(PlainEnv):
    """Counts, in numbers whose bytes are in the other order."""

    observation_space, length = gymnasium.spaces.Box(0, 100, (3,), np.dtype(">f4")), 5

    def observe(self) -> Any:
        return np.full(3, self.steps, ">f4")


@pytest.mark.parametrize("workers", WORKERS)
def test_another_byte_order(workers: int) -> None:
    fns = [OtherByteOrder] * 3
    with here(fns, workers) as env, closing(SyncVectorEnv(fns)) as sync:
        assert in_lockstep(env, sync, 12) > 1


@pytest.mark.parametrize("workers", WORKERS)
def test_a_duration_in_an_info(workers: int) -> None:
    """SyncVectorEnv refuses it."""
    with here([partial(OddValues, info=lambda env: {"time": np.timedelta64(env.t, "s")})] * 2, workers) as env:
        assert env.reset(seed=3)[1]["time"].tolist() == [np.timedelta64(0, "s")] * 2


@pytest.mark.parametrize("inference", ["worker", "node", "driver"])
@pytest.mark.parametrize("workers", WORKERS)
def test_chunks(workers: int, inference: Any) -> None:
    fns = [fn for fn in ODD_VALUES if fn is not ReservedKeys]  # its infos replace SyncVectorEnv's final_obs
    sync = SyncVectorEnv(fns, autoreset_mode="SameStep")
    with here(fns, workers) as env, closing(sync):
        chunk = env.rollout(lambda obs: np.ones(len(obs), int), 12, inference, seed=3)
        obs, _ = sync.reset(seed=3)
        ends = []
        for t in range(12):
            assert_identical(chunk.obs[t], obs, f"obs {t}")
            obs, *results, info = sync.step(np.ones(len(fns), int))
            assert_identical([chunk.rew[t], chunk.terminated[t], chunk.truncated[t]], results, f"results {t}")
            ends += [info["final_obs"][n] for n in np.flatnonzero(results[1] | results[2])]
        assert_identical(chunk.last_obs, obs)
        assert_identical(chunk.final_obs, np.stack(ends, dtype=np.float32))
    assert chunk.valid.all()


@pytest.mark.parametrize("inference", [None, "worker", "node", "driver"])
def test_an_info_that_the_driver_can_not_unpickle(inference: Any) -> None:
    with here([UnloadableInfo] * 2, 2) as env:
        env.reset(seed=3)
        with pytest.raises(ValueError, match="no number") as caught:
            if inference is None:
                env.step(np.zeros(2, int))
            else:
                env.rollout(lambda obs: np.zeros(len(obs), int), 3, inference)
        assert env.closed
        if inference != "worker":
            assert "unpickles an answer of" in str(caught.value.__cause__)


OF_THE_SCRIPT = """
import gymnasium, rayvec
from helpers.testing import CountingEnv

class Mine(CountingEnv):
    def __init__(self, start=0):
        super().__init__()
        self.start = start

gymnasium.register("Mine-v0", "__main__:Mine", kwargs={"start": 3})
for env in ("Mine-v0", [lambda: gymnasium.make("Mine-v0")] * 2):
    with rayvec.RayVecEnv(env, 2, num_nodes=0, workers_per_node=1) as envs:
        print(envs.get_attr("start"))
"""


def test_a_class_that_the_script_has_registered_by_its_name() -> None:
    assert subprocess.check_output([sys.executable, "-c", OF_THE_SCRIPT], text=True).splitlines() == ["(3, 3)"] * 2


class TestErrors:
    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"env": [lambda: LOCK and CountingEnv()]}, "what makes environments"),
            ({"wrappers": [lambda env: LOCK and env]}, "what makes environments"),
            ({"env_kwargs": {"lock": LOCK}}, "what makes environments"),
            ({}, "Workers get a policy by pickling"),
        ],
    )
    def test_what_can_not_be_sent_to_workers_is_named(self, settings: dict[str, Any], words: str) -> None:
        with pytest.raises(TypeError, match=f"{words}.*cannot pickle"):
            with RayVecEnv(**{"env": CountingEnv, "num_envs": 1, **settings}, num_nodes=0, workers_per_node=1) as env:
                env.rollout(lambda obs: LOCK and [0], 1)

    @pytest.mark.parametrize("workers", WORKERS)
    def test_an_info_that_holds_itself(self, workers: int) -> None:
        info: dict[str, Any] = {}
        info["self"] = info
        with here([partial(OddValues, info=lambda env: info)] * 2, workers) as env, pytest.raises(RecursionError):
            env.reset()

    def test_this_process_raises_the_exception_itself(self) -> None:
        """A debugger then finds the frame of the environment."""
        error = OwnError(3, "odd")
        with here([CountingEnv, partial(FaultyEnv, "raise", error=lambda: error)], 0) as env:
            env.reset(seed=0)
            with pytest.raises(OwnError) as caught:
                env.step(np.zeros(2, int))
        assert caught.value is error and caught.traceback[-1].name == "_maybe"
        assert isinstance(error.__cause__, EnvError) and "environment 1, seed 1" in str(error.__cause__)
