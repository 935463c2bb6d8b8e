"""Peers of other libraries, as far as their libraries are installed."""

from __future__ import annotations

import importlib
import multiprocessing
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.waiting import wait_until

from rayvec.bench.harness.recording import read_clocks
from rayvec.bench.harness.task import Task


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("peers")


def test_tianshou_s_environments_are_stepped(peers: Any, tmp_path: Path) -> None:
    adapter = peers.TianshouVector(Task(2, emulated={"step_s": 0.0}, clock_dir=str(tmp_path)), "DummyVectorEnv", "none")
    try:
        adapter.set_step(0.001, 1, None)
        assert adapter.advance() == 2 and adapter.advance() == 2
        (clock,) = read_clocks(str(tmp_path), within_steps=True).values()
        assert clock.shape == (4, 2) and (clock[:, 1] - clock[:, 0] >= 0.001).all()
    finally:
        adapter.close()


def burn() -> None:
    until = time.process_time() + 600.0
    while time.process_time() < until:
        pass


class SpinningEnv:
    """As much of PufferLib's multiprocessing backend as is needed: processes that spin."""

    def __init__(self) -> None:
        self.processes = [multiprocessing.get_context("spawn").Process(target=burn) for _ in range(2)]
        for process in self.processes:
            process.start()

    def step(self, actions: Any) -> None:
        pass

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()


def states(env: SpinningEnv) -> set[str]:
    return {psutil.Process(process.pid).status() for process in env.processes}


def test_workers_that_spin_are_stopped_between_their_turns(peers: Any) -> None:
    env = SpinningEnv()
    spinning = peers.Spinning(env, 2, "shm", [None])
    try:
        for turn in (spinning.rest, spinning.wake, spinning.rest):
            turn()
            stopped = turn == spinning.rest
            wait_until(
                lambda stopped=stopped: (states(env) == {psutil.STATUS_STOPPED}) is stopped,
                "the workers heed the signal",
            )
        assert spinning.advance() == 2
    finally:
        spinning.close()
    assert all(process.exitcode is not None for process in env.processes)
