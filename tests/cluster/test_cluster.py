"""Private clusters leave nothing behind, however their process ends; clusters of others are left as they are."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.testing import CountingEnv
from helpers.waiting import shm_names

from rayvec.errors import ConfigError
from rayvec.vector.ray_vec_env import RayVecEnv

DEADLINE_S = 150.0  # a script that starts Ray six times needs a minute on a busy machine
STEPPING = """
    import rayvec
    env = rayvec.RayVecEnv("CartPole-v1", 4, workers_per_node=1)
    env.reset(seed=0)
    print("stepping", flush=True)
    while True:
        env.step(env.action_space.sample())
"""


class Driver:
    """A user's script in a process of its own, with a home and a directory for temporary files of its own."""

    def __init__(self, script: str, directory: str, **environment: str) -> None:
        self._mark = f"RAYVEC_TEST_MARK={uuid.uuid4()}".encode()
        name, _, value = self._mark.decode().partition("=")
        self.home, self.tmp = Path(directory, "home"), Path(directory, "tmp")
        self.home.mkdir()
        self.tmp.mkdir()
        path = Path(directory, "script.py")
        path.write_text(textwrap.dedent(script))
        inherited = {key: text for key, text in os.environ.items() if not key.startswith("RAY_")}
        own = {"HOME": str(self.home), "TMPDIR": str(self.tmp), name: value}
        self.output = Path(directory, "output.txt")
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(path)],
                env={**inherited, **own, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def left(self) -> list[str]:
        """Returns the command lines of what it started, directly or not, and that lives."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and self._mark in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_text().replace("\0", " ")
                    found.append(f"{entry.name} {command.strip()[:200]}")
        return found

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"never came true: {what}\n{self.left()}\n{self.output.read_text()}"
            time.sleep(0.05)

    def wait_for_output(self, text: str) -> None:
        def said() -> bool:
            assert self.process.poll() is None, self.output.read_text()
            return text in self.output.read_text()

        self.wait_until(said, f"output {text!r}")

    def finish(self) -> str:
        """Waits for the end, which must be a good one; returns what was printed."""
        code = self.process.wait(DEADLINE_S)
        assert code == 0, self.output.read_text()
        return self.output.read_text()

    def assert_nothing_left(self) -> None:
        self.wait_until(lambda: not self.left(), "no process is left")
        self.wait_until(lambda: not [*self.tmp.iterdir()], f"no file is left of {[*self.tmp.iterdir()]}")
        assert not [*self.home.iterdir()], "something was written to the home"

    def kill(self) -> None:
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
        driver.kill()
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
    driver.wait_until(lambda: shm_names() <= names, "no name in /dev/shm is left")
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in driver.output.read_text()


def test_after_a_sigkill_the_cluster_ends_and_the_next_start_removes_its_directory(run: MakeDriver) -> None:
    """Ray's two agents live for up to two minutes; nothing else does."""
    names = shm_names()
    driver = run(STEPPING)
    driver.wait_for_output("stepping")
    (directory,) = driver.tmp.glob("rayvec-*")
    driver.process.kill()
    driver.process.wait(DEADLINE_S)
    driver.wait_until(lambda: all("Agent" in left for left in driver.left()), "only agents are left")
    driver.wait_until(lambda: shm_names() <= names, "no name in /dev/shm is left")
    for left in driver.left():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(left.split()[0]), signal.SIGKILL)
    assert directory.exists()
    other = run(STEPPING.split("    while")[0] + "    env.close()\n", TMPDIR=str(driver.tmp))
    other.finish()
    driver.assert_nothing_left()


SCRIPT = """
    import gymnasium, numpy as np, ray, rayvec
    from gymnasium import spaces
    from rayvec.errors import ConfigError

    class MySpace(spaces.Space):
        def sample(self, mask=None, probability=None):
            return ("mine", int(self.np_random.integers(100)))
        def contains(self, x):
            return True
        def __eq__(self, other):
            return type(other) is type(self)

    class MyError(Exception):
        pass

    class MyEnv(gymnasium.Env):
        observation_space = MySpace()
        action_space = spaces.Discrete(3)
        transform = None
        def reset(self, *, seed=None, options=None):
            return ("mine", seed), {}
        def step(self, action):
            if action == 2:
                raise MyError("from my script")
            return ("mine", int(action)), float(action), False, False, {}
        def transformed(self, x):
            return self.transform(x)

    def double(x):
        return 2 * x

    gymnasium.register("mine/Env-v0", entry_point=MyEnv)
    try:
        rayvec.RayVecEnv("CartPole-v1", 2, address="127.0.0.1:1")
    except ConfigError as error:
        assert "ray start --head" in str(error), error
    else:
        raise AssertionError("connected to nobody")

    env = rayvec.RayVecEnv("mine/Env-v0", 3, workers_per_node=1)
    assert env.reset(seed=1)[0] == (("mine", 1), ("mine", 2), ("mine", 3))
    env.set_attr("transform", double)
    assert env.call("transformed", 4) == (8, 8, 8)
    chunk = env.rollout(lambda obs: np.array([double(0)] * len(obs)), 4)
    assert chunk.obs[1, 2] == ("mine", 0)
    try:
        env.step(np.array([0, 2, 0]))
    except MyError as error:
        assert str(error) == "from my script" and "environment 1" in str(error.__cause__)
    else:
        raise AssertionError("no error")
    assert env.closed and not ray.is_initialized()
    again = rayvec.RayVecEnv("CartPole-v1", 2)  # a second private cluster in one process
    again.reset(seed=0)
    print("all is well")
    # and the script ends without closing it
"""


@pytest.mark.slow
def test_a_users_script(run: MakeDriver) -> None:
    """What stands in the main module reaches the workers; nothing is printed or left that should not be."""
    driver = run(SCRIPT)
    assert driver.finish().strip() == "all is well"
    driver.assert_nothing_left()


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


def test_a_private_cluster_that_does_not_start_is_an_error_and_leaves_nothing(run: MakeDriver) -> None:
    driver = run(DOES_NOT_START)
    said = driver.finish()
    assert "Exception: The current node timed out" in said and "Set TMPDIR" in said and "ulimit -u" in said
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
    ray.shutdown()
    step_on_a_private_ray()
    start()
    env = rayvec.RayVecEnv("CartPole-v1", 1, workers_per_node=1)
    ray.shutdown()
    step_on_a_private_ray()
    env.close()
    assert not ray.is_initialized()
    start()
    assert ray.get(ray.put(3)) == 3
    ray.shutdown()
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

    def test_its_own_address_is_no_other_cluster(self, ray_cluster: object) -> None:
        import ray

        address = ray.get_runtime_context().gcs_address
        for given in (address, "auto", None):
            RayVecEnv([CountingEnv], address=given, num_nodes=1, workers_per_node=1).close()

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
        driver.wait_until(lambda: not driver.left(), "no process is left")
        assert sum(node["Alive"] for node in ray.nodes()) == 2

    @pytest.mark.slow
    def test_a_program_that_shuts_ray_down_joins_no_other_cluster(self, run: MakeDriver, ray_cluster: object) -> None:
        """Where environments or ranks are open; calls of Ray would begin with a ``ray.init()``."""
        import ray

        driver = run(
            f"""
            import time
            import numpy as np, ray, rayvec
            from rayvec.distributed.rank_group import RankGroup, open_host
            from rayvec.errors import NodeLostError
            from helpers.testing import CountingEnv

            class Held:
                def __init__(self, ranks):
                    pass

                def told(self):
                    return 1

            ray.init({ray.get_runtime_context().gcs_address!r}, log_to_driver=False)
            settings = dict(num_nodes=2, workers_per_node=1, on_node_loss="rehost")
            stepped, other = (rayvec.RayVecEnv([CountingEnv] * 2, **settings) for _ in range(2))
            stepped.reset(seed=0)
            collector = rayvec.Collector(other, lambda obs: np.zeros(len(obs), int), seed=0, prefetch=True)
            collector.collect(n_step=4)
            group = RankGroup(Held, 1, open_host(num_cpus=0))
            assert group.ask("told") == [1]
            ray.shutdown()
            deadline = time.monotonic() + 60
            for use in (lambda: stepped.step([0, 0]), lambda: collector.collect(n_step=4), lambda: group.ask("told")):
                try:
                    while time.monotonic() < deadline:  # the other node ends a moment later
                        use()
                except NodeLostError as error:
                    assert "ray.shutdown() was called" in str(error)
                else:
                    raise AssertionError("no error")
            group.close()
            assert not ray.is_initialized()
            print("all is well")
            """,
            **authentication(),
        )
        assert driver.finish().splitlines()[-1] == "all is well"
        driver.wait_until(lambda: not driver.left(), "no process is left")

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
        pids = [int(pid) for pid in driver.output.read_text().strip("[]\n").split(",")]
        assert len(pids) == 4 and all(Path(f"/proc/{pid}").exists() for pid in pids)
        driver.process.kill()
        driver.process.wait(DEADLINE_S)
        driver.wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "its workers have ended")
        driver.wait_until(lambda: ray.available_resources().get("CPU", 0) >= free, "its cores are free")
