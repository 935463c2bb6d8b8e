"""Calls from a second thread while another one is in a call: an error, and nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError
from helpers.testing import CountingEnv
from helpers.vector_kit import DEADLINE_S

from rayvec.vector.ray_vec_env import RayVecEnv

ZEROS = np.zeros(2, int)


class Gate(CountingEnv):
    """Waits where it is told, in a method, or in a step with action 1."""

    entered, opened = threading.Event(), threading.Event()

    def wait_here(self) -> int:
        Gate.entered.set()
        assert Gate.opened.wait(DEADLINE_S)
        return 7

    def step(self, action: Any) -> Any:
        if action:
            self.wait_here()
        return super().step(action)


@contextmanager
def another_thread_in(call: Callable[[], Any]) -> Iterator[Future[Any]]:
    """Lets another thread wait in a call until the end of the block."""
    Gate.entered.clear()
    Gate.opened.clear()
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(call)
        try:
            assert Gate.entered.wait(DEADLINE_S)
            yield future
        finally:
            Gate.opened.set()


@pytest.fixture
def env() -> Iterator[RayVecEnv]:
    with RayVecEnv([partial(Gate, 100)] * 2, num_nodes=0, workers_per_node=0) as env:
        env.reset(seed=5)
        yield env


CALLS: dict[str, Callable[[RayVecEnv], Any]] = {
    "step": lambda env: env.step(ZEROS),
    "reset": lambda env: env.reset(),
    "send": lambda env: env.send(ZEROS),
    "call": lambda env: env.call("wait_here"),
    "set_attr": lambda env: env.set_attr("number", 1),
    "rollout": lambda env: env.rollout(lambda obs: np.zeros(len(obs), int), 2),
    "worker_pids": lambda env: env.worker_pids(),
}


@pytest.mark.parametrize("second", CALLS)
def test_a_call_from_a_second_thread_is_refused(env: RayVecEnv, second: str) -> None:
    with another_thread_in(partial(env.call, "wait_here")) as first:
        with pytest.raises(AlreadyPendingCallError, match="Another thread"):
            CALLS[second](env)
    assert first.result() == (7, 7)
    assert env.step(ZEROS)[1].tolist() == [1.0, 1.0]


def test_two_threads_do_not_wait_for_one_step(env: RayVecEnv) -> None:
    with another_thread_in(partial(env.step, np.ones(2, int))) as first:
        for call in (env.step_wait, partial(env.step, ZEROS)):
            with pytest.raises(AlreadyPendingCallError, match="Another thread"):
                call()
    assert first.result()[1].tolist() == [1.0, 1.0]
    assert env.step(ZEROS)[0][:, 3].tolist() == [2.0, 2.0]
