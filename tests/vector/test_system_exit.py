"""An environment that calls ``sys.exit()`` fails like one that raises an exception, on every engine."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from conftest import MakeVec
from helpers.testing import CountingEnv, FaultyEnv

from rayvec.errors import EnvError

ENGINES = [
    pytest.param(0, 0, id="this process"),
    pytest.param(0, 1, id="one worker"),
    pytest.param(2, 1, id="two nodes", marks=pytest.mark.slow),
]


def exits(when: Any, at: int = 0) -> partial[FaultyEnv]:
    return partial(FaultyEnv, "raise", when, at, partial(SystemExit, 3))


def exits_when_called(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    env.unwrapped.leave = partial(sys.exit, 3)  # type: ignore[attr-defined]
    return env


@pytest.mark.parametrize(("nodes", "workers"), ENGINES)
class TestEngines:
    def test_an_error_names_the_environment(self, make_vec: MakeVec, nodes: int, workers: int) -> None:
        env = make_vec([CountingEnv, exits("step"), CountingEnv], nodes, workers)
        env.reset(seed=4)
        with pytest.raises(EnvError, match=r"SystemExit\(3\)") as caught:
            env.step(np.zeros(3, int))
        assert "environment 1, seed 5" in str(caught.value.__cause__)

    def test_only_that_environment_is_restarted(self, make_vec: MakeVec, nodes: int, workers: int) -> None:
        env = make_vec([CountingEnv, exits("step", 1), CountingEnv], nodes, workers, on_env_error="restart")
        env.reset(seed=4)
        env.step(np.zeros(3, int))
        _, rew, _, truncated, info = env.step(np.zeros(3, int))
        assert (rew.tolist(), truncated.tolist()) == ([2.0, 0.0, 2.0], [False, True, False])
        assert info["env_restarted"].tolist() == [False, True, False]

    def test_a_constructor(self, make_vec: MakeVec, nodes: int, workers: int) -> None:
        with pytest.raises(EnvError, match=r"SystemExit\(3\)") as caught:
            make_vec([CountingEnv, exits("init")], nodes, workers)
        assert "environment 1" in str(caught.value.__cause__)

    def test_a_reset_and_a_method(self, make_vec: MakeVec, nodes: int, workers: int) -> None:
        env = make_vec([CountingEnv, exits("reset")], nodes, workers)
        with pytest.raises(EnvError, match=r"SystemExit\(3\)"):
            env.reset(seed=4)
        env = make_vec([CountingEnv] * 2, nodes, workers, wrappers=[exits_when_called])
        with pytest.raises(EnvError, match=r"SystemExit\(3\)") as caught:
            env.call("leave")
        assert "environment 0" in str(caught.value.__cause__)


def test_ctrl_c_is_no_failure_of_an_environment(make_vec: MakeVec) -> None:
    ctrl_c = partial(FaultyEnv, "raise", "step", 0, KeyboardInterrupt)
    env = make_vec([CountingEnv, ctrl_c], 0, 0, on_env_error="restart")
    env.reset(seed=4)
    with pytest.raises(KeyboardInterrupt):
        env.step(np.zeros(2, int))


def test_a_policy_in_a_worker(make_vec: MakeVec) -> None:
    env = make_vec([CountingEnv] * 2, 0, 1)
    with pytest.raises(EnvError, match=r"SystemExit\(3\)"):
        env.rollout(lambda obs: sys.exit(3), 4, seed=4)


def test_a_policy_of_the_driver_s_process_that_exits_closes_the_environments(make_vec: MakeVec) -> None:
    """A later call would find its chunk pending."""
    env = make_vec([CountingEnv] * 2, 0, 1)
    with pytest.raises(SystemExit):
        env.rollout(lambda obs: sys.exit(2), 4, "node", seed=0)
    assert env.closed
