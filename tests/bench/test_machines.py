"""CPU times of processes on this node and on others."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from conftest import MakeVec

from rayvec.bench.harness.machines import Machines, machine_cpu_s, on_cpu_s, started_cpu_s
from rayvec.bench.harness.recording import Recorder


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


@pytest.mark.slow
def test_an_actor_reads_on_its_own_node(make_vec: MakeVec, tmp_path: Path) -> None:
    env = make_vec("CartPole-v1", 2, 1, num_envs=4)
    names = {node.name: node.node_id for node in env.topology.nodes}
    pids = {names[name]: found for name, found in env.worker_pids().items()}
    here, away = Machines(), Machines(list(pids))
    earlier, times, later = here.kinds_cpu_s(pids), away.kinds_cpu_s(pids), here.kinds_cpu_s(pids)
    for before, between, after in zip(earlier, times, later, strict=True):
        assert 0.0 < before <= between <= after
    begin = time.monotonic()
    Recorder(str(tmp_path)).write(begin)
    found = away.clocks(str(tmp_path), False)
    assert set(found) == {("", os.getpid()), *((node_id, os.getpid()) for node_id in pids)}
    assert all(abs(rows[0, 0] - begin) < 1.0 for rows in found.values())  # a clock's offset is a part of a call's time
    node_id = next(iter(pids))
    assert (away.key(node_id, 1), here.key(node_id, 1)) == ((node_id, 1), ("", 1))
