"""Worker processes of a machine: what they get from the script, and how they end with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from gymnasium import spaces
from helpers.kinds import env_fns
from helpers.testing import CountingEnv
from helpers.waiting import alive, wait_until

from rayvec import RayVecEnv

two_workers = partial(RayVecEnv, num_nodes=0, workers_per_node=2)


class Odd(CountingEnv):
    """Does what a call asks for."""

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def has(self, module: str) -> bool:
        return module in sys.modules

    def folder(self) -> str:
        return os.getcwd()

    def twice(self, value: bytes) -> bytes:
        return value * 2

    def start(self) -> int:
        self.process = subprocess.Popen(["sleep", "1000"])
        return self.process.pid


def steps_here(pipe: Any) -> None:
    """Sends the process id of a fork server of this process."""
    with two_workers([Odd] * 2) as env:
        ((_, pid, _),) = env.worker_pids().values()
        pipe.send(psutil.Process(pid).ppid())


def test_messages_of_any_size() -> None:
    with two_workers([Odd] * 2) as env:
        for size in (1, 1 << 13, 1 << 14, 1 << 20):
            assert [len(value) for value in env.call("twice", b"x" * size)] == [2 * size] * 2


def test_workers_get_the_variables_the_folder_and_the_modules_of_this_moment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The script has a fork server of its own, with other modules. Workers have neither torch nor Ray."""
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        assert pool.apply(abs, (-1,)) == 1
    monkeypatch.setenv("RAYVEC_TEST", "a")
    with two_workers([Odd] * 2) as env:
        assert env.call("variable", "RAYVEC_TEST") == ("a",) * 2
        assert not any(env.call("has", "wave") + env.call("has", "torch") + env.call("has", "ray"))
    monkeypatch.setenv("RAYVEC_TEST", "b")
    monkeypatch.chdir(tmp_path)
    with two_workers([Odd] * 2, preload=["wave"]) as env:
        assert env.call("variable", "RAYVEC_TEST") == ("b",) * 2
        assert env.call("has", "wave") == (True,) * 2 and env.call("folder") == (str(tmp_path),) * 2
    assert "RAYVEC_PRELOAD" not in os.environ


def test_a_preloaded_module_that_is_missing(capfd: pytest.CaptureFixture[str]) -> None:
    with two_workers([Odd] * 2, preload=["not_there"]) as env:
        env.reset(seed=0)
    assert "preload can't import 'not_there'" in capfd.readouterr().err


def test_objects_of_a_killed_worker_stay() -> None:
    space = spaces.Dict(mission=spaces.Text(5), x=spaces.Box(0, 1))
    with two_workers(env_fns(2, space), on_env_error="restart", autoreset_mode="SameStep") as env:
        last, _ = env.reset(seed=5)
        ((_, _, pid),) = env.worker_pids().values()
        os.kill(pid, signal.SIGKILL)
        info = env.step(np.zeros(2, int))[4]
        assert info["final_obs"][1]["mission"] == last["mission"][1]


def test_a_process_of_multiprocessing_leaves_the_folder_of_its_parent() -> None:
    with two_workers([Odd] * 2):
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=steps_here, args=(theirs,))
        process.start()
        server: int = ours.recv()
        process.join()
        wait_until(lambda: not alive(server), "the fork server of the process has ended")
        with two_workers([Odd] * 2) as another:
            another.reset(seed=0)


SCRIPT = """
import time
from multiprocessing import util
from test_machine import Odd, two_workers

made = two_workers([Odd] * 2)
((_, *pids),) = made.worker_pids().values()
started = [*pids, *made.call("start"), util.get_temp_dir()]
{then}
print(*started, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("then", ["", "made.close()"], ids=["open", "closed"])
def test_workers_end_with_their_owner(then: str) -> None:
    """SIGKILL leaves neither workers, nor what environments have started, nor folders."""
    command = [sys.executable, "-c", SCRIPT.format(then=then)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        *pids, folder = owner.stdout.readline().split()
        assert len(pids) == 4 and Path(folder).exists()
        owner.kill()
    wait_until(lambda: not any(alive(int(pid)) for pid in pids), "no process is left")
    wait_until(lambda: not Path(folder).exists(), "no folder is left")
