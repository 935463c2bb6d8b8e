"""What runs beside the peers: CPU times of processes wherever they are, and workers that spin only in their turn."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

from conftest import MakeVec
from helpers.waiting import wait_until

from rayvec.bench.harness.cpu import NodeProcesses, machine_cpu_s, on_cpu_s, ticks_cpu_s
from rayvec.bench.harness.puffer import Spinning


def burn(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_cpu_time_of_a_process_and_of_the_machine() -> None:
    before, machine_before = on_cpu_s([os.getpid()])[0], machine_cpu_s()
    burn(0.3)
    used = on_cpu_s([os.getpid()])[0] - before
    assert 0.29 < used and machine_cpu_s() - machine_before > 0.25
    assert ticks_cpu_s({os.getpid()}) > 0.25
    assert on_cpu_s([2**22 + 1]) == [0.0]


def test_an_actor_reads_cpu_times_on_its_own_node(make_vec: MakeVec) -> None:
    env = make_vec("CartPole-v1", 2, 1, num_envs=4)
    names = {node.name: node.node_id for node in env.topology.nodes}
    pids = {names[name]: found for name, found in env.worker_pids().items()}
    read = NodeProcesses(pids, away=list(pids))
    here = NodeProcesses(pids)
    earlier, times, later = here.cpu_s(), read.cpu_s(), here.cpu_s()
    for before, between, after in zip(earlier, times, later, strict=True):
        assert 0.0 < before <= between <= after
    read.close()


class SpinningEnv:
    """As much of PufferLib's multiprocessing backend as is needed: processes that spin."""

    def __init__(self) -> None:
        self.processes = [multiprocessing.get_context("spawn").Process(target=burn, args=(600.0,)) for _ in range(2)]
        for process in self.processes:
            process.start()

    def step(self, actions: Any) -> None:
        pass

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()


def states(env: SpinningEnv) -> set[str]:
    stats = [Path(f"/proc/{process.pid}/stat").read_text() for process in env.processes]
    return {stat.rpartition(")")[2].split()[0] for stat in stats}


def test_workers_that_spin_are_stopped_between_their_turns() -> None:
    env = SpinningEnv()
    spinning = Spinning(env, 2, [None])
    try:
        for turn in (spinning.rest, spinning.wake, spinning.rest):
            turn()
            stopped = turn == spinning.rest
            wait_until(lambda stopped=stopped: (states(env) == {"T"}) is stopped, "the workers heed the signal")
        assert spinning.advance() == 2
    finally:
        spinning.close()
    assert all(process.exitcode is not None for process in env.processes)
