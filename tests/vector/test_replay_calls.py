"""What environments were told outlives them: a curriculum, for example."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
from helpers.obedient_envs import DIE, GO, RAISE, EndlessEnv

from rayvec.errors import ConfigError
from rayvec.vector.ray_vec_env import RayVecEnv

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


def test_so_are_those_of_a_lost_node(make_vec: Any) -> None:
    env = make_vec([Course] * 4, nodes=2, workers=2, replay_calls=REPLAYED)
    env.reset(seed=1)
    told(env)
    os.kill(env.worker_pids()[env.topology.nodes[1].name][0], signal.SIGKILL)  # the actor of the node
    for _ in range(200):
        if "env_restarted" in env.step(np.zeros(4, np.int64))[4]:
            break
    assert attributes(env) == [(21, 1.0, 5), (21, 2.0, 5), (21, 3.0, 0), (21, 4.0, 0)]


def test_names_are_texts() -> None:
    for names in ("set_difficulty", [3]):
        with pytest.raises(ConfigError, match="replay_calls"):
            RayVecEnv([Course], num_nodes=0, workers_per_node=0, replay_calls=names)  # type: ignore[arg-type]
