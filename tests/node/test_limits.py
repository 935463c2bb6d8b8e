"""Limits of the machine: no more open files, no more processes."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError
from helpers.fork_fails import FILE_VARIABLE
from helpers.testing import CountingEnv
from helpers.vector_kit import assert_explained
from helpers.waiting import alive, wait_until

from rayvec.errors import WorkerLostError
from rayvec.vector.ray_vec_env import RayVecEnv

DEADLINE_S = 60.0

WITH_FEW_FILES = """
import gc, os, resource, sys
from rayvec import RayVecEnv
from rayvec.errors import ConfigError
from helpers.testing import CountingEnv

resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
try:
    with RayVecEnv([CountingEnv] * 16, num_nodes=0, workers_per_node=16) as env:
        env.reset(seed=0)
        print("made")
except ConfigError as error:
    print(error)
env = None
gc.collect()  # its arrays keep the memory open
files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
print("sockets", sum("socket" in file for file in files), "memory", sum("memfd" in file for file in files))
"""


@pytest.mark.parametrize(("hard", "said"), [(4096, "made"), (80, "a hard limit of 80")])
def test_open_files(hard: int, said: str) -> None:
    """Sixteen workers need 80 files: the soft limit is raised for them, but not above the hard one."""
    command = [sys.executable, "-c", WITH_FEW_FILES, "64", str(hard)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert said in done.stdout, done.stdout
    assert done.stdout.endswith("memory 0\n"), "nothing is left"


@contextmanager
def room_for_files(count: int) -> Iterator[None]:
    """Lets this process open so many more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1 + count, hard))
    fillers: list[int] = []
    try:
        with suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        for _ in range(count):
            os.close(fillers.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)


@pytest.mark.parametrize("call", ["step", "rollout", "a killed worker and step", "a killed worker and rollout"])
def test_without_room_for_open_files_a_call_says_what_to_do(call: str) -> None:
    said = []
    for room in range(8):
        with RayVecEnv([CountingEnv] * 2, num_nodes=0, workers_per_node=2, on_env_error="restart") as env:
            env.reset(seed=0)
            _, pid, _ = next(iter(env.worker_pids().values()))
            with room_for_files(room):
                if "killed" in call:
                    os.kill(pid, signal.SIGKILL)
                try:
                    env.step(np.zeros(2, np.int64)) if "step" in call else env.rollout(
                        lambda obs: np.zeros(len(obs), np.int64), 2
                    )
                except WorkerLostError as error:
                    assert_explained(error)
                    assert "Too many open files" in str(error) and "ulimit -n" in str(error)
                    said.append(room)
            if env.closed:
                with pytest.raises(ClosedEnvironmentError, match="WorkerLostError in an earlier call closed it"):
                    env.reset()
            else:
                env.step(np.zeros(2, np.int64))
            assert env.closed == (room in said)
    assert said == list(range(len(said))) and len(said) in ((0,) if call == "step" else range(1, 8))


def test_a_fork_that_fails_is_an_error_and_the_fork_server_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = tmp_path / "fails"
    monkeypatch.setenv(FILE_VARIABLE, str(fails))

    def make() -> RayVecEnv:
        settings = {"num_nodes": 0, "workers_per_node": 1, "on_env_error": "restart"}
        return RayVecEnv([CountingEnv], preload=["helpers.fork_fails"], **settings)

    with closing(make()) as env, closing(make()) as other:
        env.reset(seed=0)
        other.reset(seed=0)
        fails.touch()
        os.kill(next(iter(env.worker_pids().values()))[1], signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="Cannot allocate memory") as caught:
            env.step(np.zeros(1, np.int64))
        assert_explained(caught.value)
        with pytest.raises(WorkerLostError, match="Cannot allocate memory"):
            make()
        fails.unlink()
        other.step(np.zeros(1, np.int64))  # its workers have not ended
        make().close()


def _refuse_to_load() -> None:
    raise ValueError("not here")


class Unloadable:
    """A policy that can't be unpickled."""

    def __reduce__(self) -> Any:
        return _refuse_to_load, ()

    def __call__(self, obs: Any) -> Any:
        return np.zeros(len(obs), np.int64)


def test_a_policy_that_can_not_be_loaded_leaves_nothing_open_in_the_workers() -> None:
    with closing(RayVecEnv([CountingEnv], num_nodes=0, workers_per_node=1)) as env:
        env.reset(seed=0)
        worker = next(iter(env.worker_pids().values()))[1]

        def fail() -> int:
            with pytest.raises(ValueError, match="not here"):
                env.publish(Unloadable())
            return len(os.listdir(f"/proc/{worker}/fd"))

        assert fail() == fail() == fail()


NO_PROCESS = """
import errno, os

def fork():
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

os.fork = fork
"""


def test_a_fork_server_for_which_there_is_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_PROCESS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(WorkerLostError, match=r"could not be started.*ulimit -u") as caught:
        RayVecEnv([CountingEnv], num_nodes=0, workers_per_node=1, preload=["zipapp"])  # which needs another server
    assert_explained(caught.value)


IMPORTS_FOR_EVER = """
from rayvec import RayVecEnv
RayVecEnv("CartPole-v1", num_envs=1, num_nodes=0, workers_per_node=1, preload=["imports_for_ever"])
"""


def test_a_preload_that_does_not_return_ends_with_the_program(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    (tmp_path / "imports_for_ever.py").write_text(
        f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(1e6)"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    owner = subprocess.Popen([sys.executable, "-c", IMPORTS_FOR_EVER], env=environ)
    wait_until(lambda: pid.exists() and pid.read_text() != "", "the import has begun")
    owner.kill()
    owner.wait()
    wait_until(lambda: not alive(int(pid.read_text())), "it has ended")
