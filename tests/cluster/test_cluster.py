"""Private clusters leave nothing behind, however their process ends; clusters of others are left as they are."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.processes import Command
from helpers.testing import CountingEnv
from helpers.waiting import DEADLINE_S, shm_names, wait_until

from rayvec.errors import ConfigError
from rayvec.vector.ray_vec_env import RayVecEnv

STEPPING = """
    import rayvec
    env = rayvec.RayVecEnv("CartPole-v1", 4, workers_per_node=1)
    env.reset(seed=0)
    print("stepping", flush=True)
    while True:
        env.step(env.action_space.sample())
"""


class Driver(Command):
    """A user's script in a process of its own, with a home and a directory for temporary files of its own."""

    def __init__(self, script: str, directory: str, **environment: str) -> None:
        self.home, self.tmp = Path(directory, "home"), Path(directory, "tmp")
        self.home.mkdir()
        self.tmp.mkdir()
        path = Path(directory, "script.py")
        path.write_text(textwrap.dedent(script))
        own = {"HOME": str(self.home), "TMPDIR": str(self.tmp)}
        super().__init__([str(path)], Path(directory), [sys.executable], **{**own, **environment})

    def wait_for_output(self, text: str) -> None:
        self.wait_until(lambda: text in self.stdout.read_text())

    def finish(self) -> str:
        """Waits for the end, which must be a good one; returns what was printed."""
        code = self.process.wait(DEADLINE_S)
        assert code == 0, self.stderr.read_text()
        return self.stdout.read_text()

    def assert_nothing_left(self) -> None:
        wait_until(lambda: not self.left(), lambda: [*self.left(), self.stderr.read_text()])
        wait_until(lambda: not [*self.tmp.iterdir()], lambda: [*self.tmp.iterdir()])
        assert not [*self.home.iterdir()], "something was written to the home"

    def end(self) -> None:
        """Kills it, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE_S)


MakeDriver = Callable[..., Driver]


@pytest.fixture
def run() -> Iterator[MakeDriver]:
    """Starts scripts in short directories, since paths of sockets may not be long."""
    drivers, directories = [], []

    def start(script: str, **environment: str) -> Driver:
        directories.append(tempfile.mkdtemp(prefix="rvd-", dir="/tmp"))
        drivers.append(Driver(script, directories[-1], **environment))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.end()
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_nothing_is_left_after_a_signal(run: MakeDriver, number: signal.Signals) -> None:
    names = shm_names()
    driver = run(STEPPING)
    driver.wait_for_output("stepping")
    assert len(driver.left()) > 5 and [*driver.tmp.iterdir()]
    if number == signal.SIGINT:
        os.killpg(driver.process.pid, number)  # as Ctrl-C does, to all of the foreground
    else:
        driver.process.send_signal(number)
    driver.process.wait(DEADLINE_S)
    driver.assert_nothing_left()
    wait_until(lambda: shm_names() <= names, "no name in /dev/shm is left")
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in driver.stderr.read_text()


CTRL_C_WHILE_RAY_ENDS = """
import signal
import ray
import rayvec

shutdown = ray.shutdown
ray.shutdown = lambda: (signal.raise_signal(signal.SIGINT), shutdown())
env = rayvec.RayVecEnv("CartPole-v1", 2, num_nodes=1, workers_per_node=1)
env.close()
"""


def test_ctrl_c_while_the_private_cluster_ends_leaves_nothing(run: MakeDriver) -> None:
    driver = run(CTRL_C_WHILE_RAY_ENDS)
    assert driver.process.wait(DEADLINE_S) == -signal.SIGINT
    driver.assert_nothing_left()


CLOSING_RAISES = """
import signal
import time
import ray
import rayvec
from helpers.testing import CountingEnv

class ClosesSlowly(CountingEnv):
    def close(self):
        time.sleep(3)

def interrupt(*_):
    raise TimeoutError("it takes too long")

signal.signal(signal.SIGALRM, interrupt)
env = rayvec.RayVecEnv([ClosesSlowly], num_nodes=1, workers_per_node=1)
signal.alarm(1)
try:
    env.close()
except TimeoutError:
    print("shut down:", not ray.is_initialized())
"""


def test_the_private_cluster_ends_where_closing_raises(run: MakeDriver) -> None:
    assert run(CLOSING_RAISES).finish().strip().endswith("shut down: True")


def test_after_a_sigkill_the_cluster_ends_and_the_next_start_removes_its_directory(run: MakeDriver) -> None:
    """Ray's two agents live for up to two minutes; nothing else does."""
    names = shm_names()
    driver = run(STEPPING)
    driver.wait_for_output("stepping")
    (directory,) = driver.tmp.glob("rayvec-*")
    driver.process.kill()
    driver.process.wait(DEADLINE_S)
    wait_until(lambda: all("Agent" in left for left in driver.left()), "only agents are left")
    wait_until(lambda: shm_names() <= names, "no name in /dev/shm is left")
    for pid in driver.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert directory.exists()
    of_the_user = driver.tmp / "rayvec-runs" / "session_1"
    of_the_user.mkdir(parents=True)
    other = run(STEPPING.split("    while")[0] + "    env.close()\n", TMPDIR=str(driver.tmp))
    other.finish()
    of_the_user.rmdir()
    of_the_user.parent.rmdir()
    driver.assert_nothing_left()


def test_a_head_that_is_killed_ends_its_driver(run: MakeDriver) -> None:
    """After a minute; here Ray has another setting."""
    driver = run(STEPPING, RAY_gcs_rpc_server_reconnect_timeout_s="5")
    driver.wait_for_output("stepping")
    (head,) = (pid for pid in driver.pids() if Path(f"/proc/{pid}/comm").read_text() == "gcs_server\n")
    os.kill(head, signal.SIGKILL)
    assert driver.process.wait(DEADLINE_S) == 1
    assert "Failed to connect to GCS" in driver.stderr.read_text()


DOES_NOT_START = """
    import ray
    import rayvec
    from rayvec.errors import ConfigError

    def time_out(**settings):
        raise Exception("The current node timed out during startup.")

    ray.init = time_out
    try:
        rayvec.RayVecEnv("CartPole-v1", 1, num_nodes=1)
    except ConfigError as error:
        print(error)
"""


def test_a_private_cluster_that_does_not_start_is_an_error_and_leaves_nothing(run: MakeDriver, tmp_path: Path) -> None:
    """The name of TMPDIR is too long for Ray's sockets."""
    driver = run(DOES_NOT_START, TMPDIR=str(tmp_path))
    said = driver.finish()
    assert "Exception: The current node timed out" in said and "Set TMPDIR" in said and "ulimit -u" in said
    assert "files in /tmp could" in said and not [*tmp_path.iterdir()]
    driver.assert_nothing_left()


OWN_RAY = """
    import os
    import ray
    import rayvec

    def start():
        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    def step_on_a_private_ray():
        with rayvec.RayVecEnv("CartPole-v1", 1, workers_per_node=1) as env:
            env.reset(seed=0)

    start()
    env = rayvec.RayVecEnv("CartPole-v1", 1, workers_per_node=1)
    ray.shutdown()
    step_on_a_private_ray()
    env.close()
    assert not ray.is_initialized()
    os.environ["RAY_AUTH_MODE"] = "disabled"  # Ray keeps the token of the private cluster until `env` is closed
    env = rayvec.RayVecEnv("CartPole-v1", 1, workers_per_node=1)
    ray.shutdown()
    start()
    env.close()
    assert ray.get(ray.put(3)) == 3, "a Ray of the program was shut down"
    print("all is well")
"""


@pytest.mark.slow
def test_private_clusters_and_those_of_the_program_follow_each_other(run: MakeDriver) -> None:
    """In one process, where Ray reads its token once; and none shuts down the other."""
    driver = run(OWN_RAY, RAY_AUTH_TOKEN="0123456789abcdef" * 4)
    assert driver.finish().strip().endswith("all is well")


def authentication() -> dict[str, str]:
    """Returns what a process must have in its environment to be let in."""
    return {name: os.environ[name] for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE") if name in os.environ}


class TestSharedCluster:
    def test_another_cluster_beside_it_is_refused(self, ray_cluster: object) -> None:
        with pytest.raises(ConfigError, match="this process is connected to the Ray cluster at"):
            RayVecEnv([CountingEnv], address="127.0.0.1:1")
        RayVecEnv([CountingEnv], address="auto", num_nodes=1, workers_per_node=1).close()

    def test_a_cluster_that_runs_is_joined_by_its_address(self, run: MakeDriver, ray_cluster: object) -> None:
        import ray

        address = ray.get_runtime_context().gcs_address
        driver = run(
            f"""
            import ray, rayvec
            from helpers.testing import CountingEnv
            env = rayvec.RayVecEnv([CountingEnv] * 2, workers_per_node=1)
            assert ray.get_runtime_context().gcs_address == {address!r}
            assert len(env.topology.nodes) == 2
            assert env.reset(seed=4)[0][:, 0].tolist() == [4, 5]
            env.close()
            assert not ray.is_initialized()
            print("all is well")
            """,
            RAY_ADDRESS=address,
            **authentication(),
        )
        assert driver.finish().strip() == "all is well"
        wait_until(lambda: not driver.left(), "no process is left")
        assert sum(node["Alive"] for node in ray.nodes()) == 2

    def test_an_address_of_ray_client_is_refused(self, run: MakeDriver) -> None:
        driver = run(
            """
            import rayvec
            from rayvec.errors import ConfigError
            from helpers.testing import CountingEnv

            for address in ("ray://elsewhere:10001", None):
                try:
                    rayvec.RayVecEnv([CountingEnv] * 2, address=address)
                except ConfigError as error:
                    print(error)
            """,
            RAY_ADDRESS="ray://head:10001",
        )
        first, second = driver.finish().splitlines()
        assert "not through Ray Client" in first and "(ray://elsewhere:10001)" in first
        assert "(ray://head:10001)" in second

    def test_a_driver_that_is_killed_leaves_nothing_on_a_cluster_of_others(
        self, run: MakeDriver, ray_cluster: object
    ) -> None:
        """Its workers are children of the cluster: what shows is the cores that they hold."""
        import ray

        address = ray.get_runtime_context().gcs_address
        free = ray.available_resources()["CPU"]
        driver = run(
            f"""
            import rayvec
            from helpers.testing import CountingEnv
            env = rayvec.RayVecEnv([CountingEnv] * 2, workers_per_node=1, address={address!r})
            env.reset(seed=0)
            print([pid for pids in env.worker_pids().values() for pid in pids], flush=True)
            while True:
                env.step([0, 0])
            """,
            **authentication(),
        )
        driver.wait_for_output("]")
        pids = [int(pid) for pid in driver.stdout.read_text().strip("[]\n").split(",")]
        assert len(pids) == 4 and all(Path(f"/proc/{pid}").exists() for pid in pids)
        driver.process.kill()
        driver.process.wait(DEADLINE_S)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "its workers have ended")
        wait_until(lambda: ray.available_resources().get("CPU", 0) >= free, "its cores are free")
