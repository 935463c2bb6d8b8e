"""CPU times of processes on this node and on others."""

from __future__ import annotations

import os
import time

from conftest import MakeVec

from rayvec.bench.harness.cpu import NodeProcesses, machine_cpu_s, on_cpu_s, started_cpu_s


def burn(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_cpu_time_of_a_process_and_of_the_machine() -> None:
    before, machine_before = on_cpu_s([os.getpid()])[0], machine_cpu_s()
    burn(0.3)
    used = on_cpu_s([os.getpid()])[0] - before
    assert 0.29 < used and machine_cpu_s() - machine_before > 0.25
    assert started_cpu_s({os.getpid()}) > 0.25
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
