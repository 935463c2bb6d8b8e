"""SIGTERM, which schedulers send to every process of a job: workers leave it to their owner."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from typing import Any

import numpy as np

from rayvec import RayVecEnv
from rayvec.testing import CountingEnv


def _sleep(runs: Any) -> None:
    runs.set()
    time.sleep(60)


class EndsProcesses(CountingEnv):
    def exit_codes(self) -> list[int | None]:
        """How SIGTERM ends a process that the environment forks, and a program that it starts."""
        context = multiprocessing.get_context("fork")
        runs = context.Event()
        forked = context.Process(target=_sleep, args=(runs,))
        forked.start()
        runs.wait(20)
        program = subprocess.Popen(["sleep", "60"])
        for process in (forked, program):
            process.terminate()
        forked.join(20)
        return [forked.exitcode, program.wait(20)]


def test_workers_and_their_fork_server_stay() -> None:
    with RayVecEnv([CountingEnv] * 2, num_nodes=0, workers_per_node=2) as env:
        env.reset(seed=0)
        (pids,) = env.worker_pids().values()
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        env.step(np.zeros(2, np.int64))
        assert env.worker_pids() == dict.fromkeys(env.worker_pids(), pids)


def test_processes_of_environments_end_by_it() -> None:
    with RayVecEnv([EndsProcesses], num_nodes=0, workers_per_node=1) as env:
        assert env.call("exit_codes") == ([-signal.SIGTERM, -signal.SIGTERM],)
