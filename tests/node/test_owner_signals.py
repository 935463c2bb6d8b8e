"""SIGINT and SIGTERM, which may be sent to every process of a job: workers leave them to their owner."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from typing import Any

import numpy as np
import psutil
import pytest
from helpers.testing import CountingEnv

from rayvec import RayVecEnv


def _sleep(runs: Any) -> None:
    runs.set()
    time.sleep(60)


class EndsProcesses(CountingEnv):
    def exit_codes(self, number: int) -> list[int | None]:
        """How a signal ends a process that the environment forks, and a program that it starts."""
        context = multiprocessing.get_context("fork")
        runs = context.Event()
        forked = context.Process(target=_sleep, args=(runs,))
        forked.start()
        runs.wait(20)
        program = subprocess.Popen(["sleep", "60"])
        for process in (forked, program):
            assert process.pid
            os.kill(process.pid, number)
        forked.join(20)
        return [forked.exitcode, program.wait(20)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_and_their_fork_server_stay(number: int) -> None:
    with RayVecEnv([CountingEnv] * 2, num_nodes=0, workers_per_node=2, on_env_error="restart") as env:
        env.reset(seed=0)
        ((_, *pids),) = env.worker_pids().values()
        server = psutil.Process(pids[0]).ppid()
        for pid in (server, *pids):
            os.kill(pid, number)
        env.step(np.zeros(2, np.int64))
        assert all(psutil.Process(pid).is_running() for pid in (server, *pids))
        os.kill(pids[0], signal.SIGKILL)
        env.step(np.zeros(2, np.int64))
        ((_, *workers),) = env.worker_pids().values()
        assert len({*workers, *pids}) == 3 and {psutil.Process(pid).ppid() for pid in workers} == {server}


def test_processes_of_environments_end_by_them() -> None:
    with RayVecEnv([EndsProcesses], num_nodes=0, workers_per_node=1) as env:
        assert env.call("exit_codes", signal.SIGTERM) == ([-signal.SIGTERM, -signal.SIGTERM],)
        assert env.call("exit_codes", signal.SIGINT) == ([1, -signal.SIGINT],)  # Python ends by KeyboardInterrupt
