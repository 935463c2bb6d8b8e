"""An environment that calls ``sys.exit()`` fails like one that raises an exception, on every engine."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

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


@pytest.mark.parametrize("when", ["init", "reset", "step"])
@pytest.mark.parametrize(("nodes", "workers"), ENGINES)
def test_an_error_names_the_environment(make_vec: MakeVec, nodes: int, workers: int, when: Any) -> None:
    with pytest.raises(EnvError, match=r"SystemExit\(3\)") as caught:
        env = make_vec([CountingEnv, partial(FaultyEnv, "raise", when, 0, partial(SystemExit, 3))], nodes, workers)
        env.reset(seed=4)
        env.step(np.zeros(2, int))
    assert "environment 1" in str(caught.value.__cause__)


def test_ctrl_c_is_no_failure_of_an_environment(make_vec: MakeVec) -> None:
    env = make_vec([partial(FaultyEnv, "raise", "step", 0, KeyboardInterrupt)], 0, 0, on_env_error="restart")
    env.reset(seed=4)
    with pytest.raises(KeyboardInterrupt):
        env.step(np.zeros(1, int))


@pytest.mark.parametrize(("inference", "error"), [("worker", EnvError), ("node", SystemExit)])
def test_a_policy(make_vec: MakeVec, inference: Any, error: Any) -> None:
    """One in the driver's process ends the script, and leaves no chunk pending."""
    env = make_vec([CountingEnv] * 2, 0, 1)
    with pytest.raises(error):
        env.rollout(lambda obs: sys.exit(3), 4, inference, seed=4)
    assert env.closed
