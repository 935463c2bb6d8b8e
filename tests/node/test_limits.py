"""Limits of the machine: no more open files, no more processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.testing import CountingEnv
from helpers.vector_kit import assert_explained
from helpers.waiting import alive, wait_until

from rayvec.errors import WorkerLostError
from rayvec.vector.ray_vec_env import RayVecEnv

WITH_FEW_FILES = """
import resource
from rayvec import RayVecEnv
from helpers.testing import CountingEnv

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))
with RayVecEnv([CountingEnv] * 16, num_nodes=0, workers_per_node=16) as env:
    env.reset(seed=0)
"""


def test_open_files() -> None:
    """Sixteen workers need 80 files: the soft limit is raised for them."""
    done = subprocess.run([sys.executable, "-c", WITH_FEW_FILES], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr, done.stderr


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
