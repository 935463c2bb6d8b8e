"""Workers that die or hang where it hurts, limits of the machine, and signals that workers leave to their owner."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from functools import partial
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from gymnasium.error import ClosedEnvironmentError
from helpers.interrupts import interrupted_at
from helpers.kinds import within
from helpers.processes import assert_nothing_left, running
from helpers.testing import CountingEnv
from helpers.vector_kit import assert_explained
from helpers.waiting import DEADLINE_S, alive, wait_until

from rayvec import RayVecEnv
from rayvec.errors import WorkerLostError

REPLY_BYTES = 4 << 20
"""More than a socket takes without a reader."""


class DiesInAReply:
    """Kills the process that pickles it, if a file is there, which it removes."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __deepcopy__(self, memo: Any) -> DiesInAReply:
        return self

    def __reduce__(self) -> Any:
        if self._file.exists():
            self._file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return str, ("alive",)


class LargeReply(CountingEnv):
    """Its steps return infos of megabytes, in whose midst the worker dies once there is a file."""

    def __init__(self, file: Path, *, with_child: bool) -> None:
        super().__init__()
        self._file = file
        if with_child and os.fork() == 0:  # the child holds the worker's end of the pipe open
            with suppress(BaseException):
                time.sleep(300)
            os._exit(0)

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        large = {"large": b"x" * REPLY_BYTES, "dies": DiesInAReply(self._file), "more": b"x" * REPLY_BYTES}
        return obs, reward, terminated, truncated, {**info, **large}


def make(env: Any, num_envs: int = 1, **kwargs: Any) -> RayVecEnv:
    return RayVecEnv([env] * num_envs, num_nodes=0, workers_per_node=num_envs, **kwargs)


def worker_pids(env: RayVecEnv) -> list[int]:
    return next(iter(env.worker_pids().values()))[1:]


def server_of(env: RayVecEnv) -> int:
    """Returns the process that has forked the workers."""
    return psutil.Process(worker_pids(env)[0]).ppid()


@pytest.mark.parametrize("with_child", [False, True], ids=["alone", "with a child"])
def test_a_worker_that_is_killed_in_the_midst_of_a_reply(tmp_path: Path, with_child: bool) -> None:
    fn = partial(LargeReply, tmp_path / "dies", with_child=with_child)
    with make(fn, on_env_error="restart") as env:
        env.reset(seed=3)
        (tmp_path / "dies").touch()
        _, reward, terminated, truncated, info = within(DEADLINE_S, partial(env.step, np.zeros(1, int)))
        assert info["env_restarted"].tolist() == [True]
        assert truncated.all() and not terminated.any() and not reward.any()
        obs, *_ = within(DEADLINE_S, partial(env.step, np.zeros(1, int)))
        assert obs[0, 3] == 0, "a new episode has begun"


def test_one_that_never_returns_shows_where() -> None:
    def waits_for_a_licence() -> CountingEnv:
        threading.Event().wait()
        return CountingEnv()

    with closing(make(CountingEnv)):  # so that the fork server's imports take none of the time
        with pytest.raises(WorkerLostError, match=r"start_timeout_s") as caught:
            within(DEADLINE_S, partial(make, waits_for_a_licence, start_timeout_s=2.0))
    assert_explained(caught.value)
    assert "waits_for_a_licence" in str(caught.value)


@pytest.mark.parametrize(("action", "shown"), [(0, "wait_for_the_server"), (1, "the process is stopped")])
def test_a_step_that_hangs_shows_where(action: int, shown: str) -> None:
    class Hangs(CountingEnv):
        def step(self, action: Any) -> Any:
            if action:
                os.kill(os.getpid(), signal.SIGSTOP)
            return self.wait_for_the_server()

        def wait_for_the_server(self) -> Any:
            threading.Event().wait()

    with closing(make(Hangs, step_timeout_s=0.5)) as env:
        env.reset(seed=0)
        with pytest.raises(WorkerLostError, match=f"(?s)within 0.5 s .step_timeout_s.*{shown}"):
            within(DEADLINE_S, partial(env.step, np.array([action])))


class MadeSlowly(CountingEnv):
    """Raises in its first step, and takes longer to be made again than a step may take."""

    def __init__(self, marker: Path) -> None:
        super().__init__()
        self._is_first = not marker.exists()
        time.sleep(0.0 if self._is_first else 2.0)
        marker.touch()

    def step(self, action: Any) -> Any:
        if self._is_first:
            raise RuntimeError("a simulator that crashes")
        return super().step(action)


def test_an_environment_that_is_made_again_has_the_time_of_a_start(tmp_path: Path) -> None:
    made = partial(MadeSlowly, tmp_path / "marker")
    with closing(make(made, step_timeout_s=0.5, on_env_error="restart")) as env:
        pids = worker_pids(env)
        env.reset(seed=0)
        assert env.step(np.array([0]))[4]["env_restarted"].all() and worker_pids(env) == pids


class Starts(CountingEnv):
    """Starts subprocesses, one in a session of its own, and a thread that never ends."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        for number, own_session in enumerate((False, True)):
            process = subprocess.Popen(["sleep", "300"], start_new_session=own_session)
            (Path(directory) / f"{number}").write_text(str(process.pid))
        threading.Thread(target=threading.Event().wait).start()


@pytest.mark.parametrize("terminate", [False, True])
def test_what_environments_started_ends_with_an_ordinary_close(tmp_path: Path, terminate: bool) -> None:
    env = make(partial(Starts, str(tmp_path)))
    env.reset(seed=0)
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(pids) == 2 and all(map(alive, pids))
    env.close(terminate=terminate)
    wait_until(lambda: not any(map(alive, pids)), "what environments started has ended")


@pytest.mark.filterwarnings("ignore:.*Calling `close`")
@pytest.mark.parametrize("num_nodes", [0, 1])
def test_close_by_another_thread_ends_a_wait(num_nodes: int, ray_cluster: object) -> None:
    class Waits(CountingEnv):
        def step(self, action: Any) -> Any:
            threading.Event().wait()

    env = RayVecEnv([Waits] * 2, num_nodes=num_nodes, workers_per_node=2)
    env.reset(seed=0)
    pids = worker_pids(env)
    env.step_async(np.zeros(2, int))
    closer = threading.Timer(0.2, partial(env.close, terminate=True))
    closer.start()
    with pytest.raises(ClosedEnvironmentError):
        within(DEADLINE_S, env.step_wait)
    closer.join()
    assert not any(map(alive, pids))


@pytest.mark.filterwarnings("ignore:.*Calling `close`")
def test_close_by_another_thread_while_a_pending_chunk_is_looked_up() -> None:
    class Closes(list[Any]):
        def __iter__(self) -> Any:
            closer = threading.Thread(target=env.close)
            closer.start()
            closer.join()
            return super().__iter__()

    env = RayVecEnv([CountingEnv] * 2, num_nodes=0, workers_per_node=2)
    env.rollout_async(env.publish(lambda obs: np.zeros(len(obs), int)), 3, 0, 0)
    with pytest.raises(ClosedEnvironmentError, match="by another thread"):
        env.receive(Closes([None]))


FORKED = """
import os, sys
import numpy as np
import rayvec
from gymnasium.error import ClosedEnvironmentError

env = rayvec.RayVecEnv("CartPole-v1", 2, num_nodes=0, workers_per_node=1)
env.reset(seed=0)
if os.fork() == 0:
    try:
        env.step(np.zeros(2, int))
    except ClosedEnvironmentError as error:
        print("refused", flush=True)
    {end}
    sys.exit(0)
_, status = os.wait()
print("child ended with", status, flush=True)
env.step(np.zeros(2, int))
env.close()
print("the parent's environments live", flush=True)
"""


@pytest.mark.parametrize("end", ["env.close()", "del env", "pass"])
def test_a_child_of_the_driver_leaves_its_environments_alone(end: str) -> None:
    command = [sys.executable, "-c", FORKED.format(end=end)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout.split("\n")[:3] == ["refused", "child ended with 0", "the parent's environments live"]


def test_the_fork_server_that_is_killed_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it listens no more and has not quite ended, so that the first connection is refused."""
    connect, refusals = ForkServer.connect_to_new_process, [ConnectionRefusedError(), None, None]

    def refused_once(self: ForkServer, files: Any) -> Any:
        if (error := refusals.pop(0)) is not None:
            raise error
        return connect(self, files)

    with closing(make(CountingEnv, 2, on_env_error="restart")) as env:
        env.reset(seed=0)
        pids = worker_pids(env)
        os.kill(server_of(env), signal.SIGKILL)
        wait_until(lambda: not any(map(alive, pids)), "workers end with their fork server")
        monkeypatch.setattr(ForkServer, "connect_to_new_process", refused_once)
        *_, info = within(DEADLINE_S, partial(env.step, np.zeros(2, int)))
        assert info["env_restarted"].tolist() == [True, True]
        assert not {*pids} & {*worker_pids(env)}


def process_with(pid: int) -> subprocess.Popen[bytes]:
    """Starts a process, leader of a session, that gets a number which is free."""
    while True:
        try:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        except OSError as error:
            pytest.skip(f"this user can't choose the number of a process: {error}")
        process = subprocess.Popen(["sleep", "300"], start_new_session=True)
        if process.pid == pid:
            return process
        process.kill()


def test_the_process_that_has_got_the_number_of_a_dead_worker_lives() -> None:
    env = make(CountingEnv)
    [pid] = worker_pids(env)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(pid), "the worker has ended")
    with process_with(pid) as other:
        env.close()
        assert alive(pid)
        other.kill()


FILES = "/node/local_worker.py", "/node/machine.py", "/node/memory.py", "/node/processes.py"


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_while_workers_start_leaves_no_process_file_or_variable() -> None:
    make(CountingEnv, 2).close()  # starts the fork server
    gc.collect()  # what earlier tests have left
    me = psutil.Process()
    before, others, variables = me.num_fds(), {*me.children(recursive=True)}, {**os.environ}
    for number in itertools.count(step=5):
        if env := interrupted_at(number, partial(make, CountingEnv, 2), *FILES):
            break
        gc.collect()
        wait_until(lambda: {*me.children(recursive=True)} <= others, "no worker is left")
        assert me.num_fds() <= before
        assert variables == {**os.environ}
    env.close()
    assert number > 100


FAILS_TO_CLOSE = """
from rayvec import RayVecEnv
from helpers.testing import CountingEnv

class FailsToClose(CountingEnv):
    def close(self):
        print("closes", flush=True)
        raise {error}("a file of its own")

if __name__ == "__main__":
    RayVecEnv([FailsToClose] * 3, num_nodes=0, workers_per_node=1).close()
"""


@pytest.mark.parametrize("error", ["RuntimeError", "KeyboardInterrupt"])
def test_an_environment_that_fails_to_close_is_logged_and_the_others_are_closed(error: str) -> None:
    command = [sys.executable, "-c", FAILS_TO_CLOSE.format(error=error)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0
    assert "worker 0: an environment raised in close()" in done.stderr
    assert f"{error}: a file of its own" in done.stderr and done.stderr.count("Traceback") == 1
    assert done.stdout == "closes\n" * 3


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
    done = subprocess.run([sys.executable, "-c", WITH_FEW_FILES], capture_output=True, text=True, timeout=DEADLINE_S)
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


STARTING = """
from helpers.testing import CountingEnv
from rayvec import RayVecEnv

RayVecEnv([CountingEnv], num_nodes=0, workers_per_node=1, preload=["slow_import"])
"""


def test_ctrl_c_while_a_fork_server_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the driver raises: the fork server ends with it, without a traceback of its own."""
    (tmp_path / "slow_import.py").write_text(f"import time; open({str(tmp_path / 'begun')!r}, 'w'); time.sleep(60)")
    (tmp_path / "script.py").write_text(STARTING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with running(["script.py"], tmp_path, [sys.executable]) as command:
        command.wait_until((tmp_path / "begun").exists)
        assert command.interrupt() == -signal.SIGINT
        assert_nothing_left(command)
        assert command.stderr.read_text().count("Traceback") == 1


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
