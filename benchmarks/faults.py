"""Seconds from a fault until stepping resumes, until the driver raises, or until all processes are gone.

    python benchmarks/faults.py
    python benchmarks/faults.py --only one_machine

Every fault is real. Environments sleep a millisecond for a step; stepping has resumed when a step returns that has
``info["env_restarted"]``. Nodes are simulated, and share this machine's cores with the clusters that are made. Faults
of one machine are made without Ray.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import psutil
import tyro
from cluster import timed
from gymnasium import spaces
from gymnasium.error import ClosedEnvironmentError
from measure import check_repeats, heading, simulated_cluster, tree

from rayvec.bench.terminal import show_table, spread
from rayvec.cluster.tcp_stream import Listener, connect
from rayvec.errors import NodeLostError, WorkerLostError
from rayvec.testing import TimedEnv
from rayvec.vector.ray_vec_env import RayVecEnv

STEP_TIMEOUT_S = 0.5
DRIVER = """
import sys
import numpy as np
import ray
from rayvec.testing import TimedEnv
from rayvec.vector.ray_vec_env import RayVecEnv

ray.init(address=sys.argv[1], log_to_driver=False, logging_level=40)
env = RayVecEnv([lambda: TimedEnv(1e-3)] * 8, num_nodes=2, workers_per_node=2)
env.reset(seed=0)
print(*[pid for pids in env.worker_pids().values() for pid in pids], flush=True)
while True:
    env.step(np.zeros(8, np.int64))
"""


HANG, RAISE, LARGE = 1, 2, 3


class Failing(TimedEnv):
    """Hangs, raises or returns an info of megabytes, as its action asks."""

    action_space = spaces.Discrete(4)

    def __init__(self) -> None:
        super().__init__(1e-3, max_episode_steps=1000, infos=False)

    def step(self, action: Any) -> Any:
        """Steps, or fails."""
        if action == HANG:
            time.sleep(3600.0)
        if action == RAISE:
            raise ValueError("asked to raise")
        *result, info = super().step(action)
        return *result, {"large": bytes(4 << 20)} if action == LARGE else info


class WithChild(Failing):
    """Forks a child that holds open whatever the worker holds open."""

    def __init__(self) -> None:
        super().__init__()
        if os.fork() == 0:
            time.sleep(3600.0)


class WithProcess(Failing):
    """Starts a process; :meth:`child` returns its id."""

    def __init__(self) -> None:
        super().__init__()
        self._process = subprocess.Popen(["sleep", "3600"])

    def child(self) -> int:
        """Returns the id of its process."""
        return self._process.pid


def stepped_on(env: RayVecEnv, cause: Callable[[], object] = lambda: None, actions: Any = 0) -> float:
    """Causes a fault; returns seconds from then until a step with these actions reports restarted environments."""
    begin, info = time.perf_counter(), {}
    cause()
    while "env_restarted" not in info:
        *_, info = env.step(np.full(env.num_envs, actions))
    return time.perf_counter() - begin


def pids(env: RayVecEnv, node: int) -> list[int]:
    """Returns the processes of a node: its actor, then its workers."""
    return env.worker_pids()[env.topology.nodes[node].name]


def until(error: type[BaseException], function: Callable[[], object]) -> float:
    """Returns how many seconds a call takes to raise an error."""
    begin = time.perf_counter()
    try:
        function()
    except error:
        return time.perf_counter() - begin
    raise AssertionError(f"no {error.__name__}")


def stepping(make: Callable[[], Any] = Failing, num_nodes: int = 0, **kwargs: Any) -> RayVecEnv:
    """Returns eight environments that have stepped, on this machine or on nodes, with two workers on each."""
    env = RayVecEnv([make] * 8, num_nodes=num_nodes, workers_per_node=2, **kwargs)
    env.reset(seed=0)
    for _ in range(20):
        env.step(np.zeros(8, np.int64))
    return env


def acts(first: int) -> Any:
    """Returns actions of eight environments, of which the first one's is special."""
    return np.array([first, *[0] * 7])


def raises() -> float:
    """An environment raises: its exception is raised, everything is closed."""
    env = stepping()
    return until(ValueError, lambda: env.step(acts(RAISE)))


def raises_and_restarts() -> float:
    """An environment raises, `on_env_error="restart"`: the step returns."""
    with stepping(on_env_error="restart") as env:
        return stepped_on(env, actions=acts(RAISE))


def killed(make: Callable[[], Any], action: int, delay_s: float) -> float:
    """Returns seconds from the end of a worker in a step until the error."""
    env = stepping(make)
    worker = pids(env, 0)[1]
    env.step_async(acts(action))
    time.sleep(delay_s)
    os.kill(worker, signal.SIGKILL)
    return until(WorkerLostError, env.step_wait)


def killed_without_restarts() -> float:
    """A worker is killed (SIGKILL): the error."""
    return killed(Failing, HANG, delay_s=0.0)


def killed_in_a_reply() -> float:
    """A worker is killed while it sends 4 MB, and a child of its environment holds the pipe: the error."""
    return killed(WithChild, LARGE, delay_s=0.5)


def constructor_exits() -> float:
    """A constructor forks a child and exits: the error, measured from the call."""

    def exits() -> Any:
        if os.fork() == 0:
            time.sleep(3600.0)
        os._exit(3)

    return until(WorkerLostError, lambda: stepping(exits))


def constructor_hangs() -> float:
    """A constructor hangs: the error, measured from the end of `start_timeout_s`."""
    with stepping():  # the fork server has started
        return until(WorkerLostError, lambda: stepping(lambda: time.sleep(3600.0), start_timeout_s=2.0)) - 2.0


def crash_loop() -> float:
    """A worker is killed again and again: the error, from the sixth time."""
    with stepping(on_env_error="restart") as env:
        for _ in range(5):
            worker = pids(env, 0)[1]
            stepped_on(env, lambda worker=worker: os.kill(worker, signal.SIGKILL))
            env.step(acts(0))  # new episodes begin
        os.kill(pids(env, 0)[1], signal.SIGKILL)
        return until(WorkerLostError, lambda: [env.step(acts(0)) for _ in range(10_000)])


def processes_end() -> float:
    """`close()` while environments have processes: it returns, and they are gone."""
    env = stepping(WithProcess)
    children = env.call("child")
    begin = time.perf_counter()
    env.close()
    while any(map(alive, children)):
        time.sleep(0.001)
    return time.perf_counter() - begin


def closed_by_a_thread() -> float:
    """Another thread closes the environments in a step that hangs: the error, after the timeout of `close(0.5)`."""
    env = stepping()
    threading.Timer(0.5, env.close, kwargs={"timeout": 0.5}).start()
    return until(ClosedEnvironmentError, lambda: env.step(acts(HANG))) - 1.0


def interrupted() -> float:
    """Ctrl-C in a step that takes its time: KeyboardInterrupt, everything closed."""
    env = stepping(lambda: TimedEnv(0.2))
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    return until(KeyboardInterrupt, lambda: [env.step(acts(0)) for _ in range(100)]) - 0.5


def fork_server_killed() -> float:
    """The fork server is killed, `on_env_error="restart"`: its workers' environments are restarted."""
    with stepping(on_env_error="restart") as env:
        return stepped_on(env, lambda: os.kill(pids(env, 0)[0], signal.SIGKILL))


def machine_gone() -> float:
    """A machine disappears from the network (its packets are dropped): the stream reports it."""
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    with (
        contextlib.closing(Listener("127.0.0.1", b"key", lambda connection: time.sleep(60.0))) as listener,
        connect("127.0.0.1", listener.port, b"key") as connection,
    ):
        attach_filter = 26
        program = struct.pack("HL", 1, ctypes.addressof(drop_all))
        connection._sock.setsockopt(socket.SOL_SOCKET, attach_filter, program)
        connection.send((8).to_bytes(8, "little"))
        return until(OSError, connection.recv)


def worker_killed(cluster: Any) -> float:
    """A worker process is killed (SIGKILL): its environments are restarted."""
    with stepping(timed(1e-3), 2, on_env_error="restart") as env:
        worker = pids(env, 1)[1]
        return stepped_on(env, lambda: os.kill(worker, signal.SIGKILL))


def environment_hangs(cluster: Any) -> float:
    """An environment hangs: its worker is replaced, measured from the end of `step_timeout_s`."""
    with stepping(Failing, 2, on_env_error="restart", step_timeout_s=STEP_TIMEOUT_S) as env:
        return stepped_on(env, actions=acts(HANG)[::-1]) - STEP_TIMEOUT_S


def actor_killed(cluster: Any) -> float:
    """The actor on a node is killed: its environments resume on another node."""
    cluster.add_node(num_cpus=2)
    with stepping(timed(1e-3), 2) as env:
        return stepped_on(env, lambda: os.kill(pids(env, 1)[0], signal.SIGKILL))


def kill_raylet(cluster: Any, num_envs: int, error: type[BaseException] | None = None, **kwargs: Any) -> float:
    """Returns seconds from the loss of a node until its environments resume, or until an error is raised."""
    extra = cluster.add_node(num_cpus=2)
    with RayVecEnv([timed(1e-3)] * num_envs, **kwargs) as env:
        env.reset(seed=0)
        resume = partial(stepped_on, env, lambda: cluster.remove_node(extra, allow_graceful=False))
        return resume() if error is None else until(error, resume)


def node_lost_without_rehost(cluster: Any) -> float:
    """A raylet is killed, `on_node_loss="raise"`: the error."""
    return kill_raylet(cluster, 12, NodeLostError, num_nodes=3, workers_per_node=2, on_node_loss="raise")


def node_lost(cluster: Any) -> float:
    """A raylet is killed, others have free cores: its environments resume on another node."""
    return kill_raylet(cluster, 12, num_nodes=3, workers_per_node=2, on_node_loss="rehost")


def no_core_left(cluster: Any) -> float:
    """A raylet is killed, no other node has a free core: an error."""
    return kill_raylet(cluster, 10, NodeLostError, on_node_loss="rehost")


def driver_killed(cluster: Any) -> float:
    """The driver is killed (SIGKILL): workers, actors and their shared memory are gone."""
    memory = set(os.listdir("/dev/shm"))
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, cluster.address], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    started = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(started) == 6
    time.sleep(0.5)
    family = {pid for root in started for pid in tree(root)}
    driver.kill()
    begin = time.perf_counter()
    while any(map(alive, family)) or set(os.listdir("/dev/shm")) - memory:
        time.sleep(0.01)
    driver.wait()
    return time.perf_counter() - begin


def alive(pid: int) -> bool:
    """Whether a process runs."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


ONE_MACHINE: list[Callable[[], float]] = [
    raises,
    raises_and_restarts,
    killed_without_restarts,
    killed_in_a_reply,
    constructor_exits,
    constructor_hangs,
    crash_loop,
    processes_end,
    closed_by_a_thread,
    interrupted,
    fork_server_killed,
    machine_gone,
]
CLUSTER: list[Callable[[Any], float]] = [
    worker_killed,
    environment_hangs,
    actor_killed,
    node_lost,
    node_lost_without_rehost,
    no_core_left,
    driver_killed,
]


def main(repeats: int = 5, only: Literal["all", "one_machine", "cluster"] = "all") -> None:
    """Causes every fault a few times, and prints how long each took.

    Args:
        repeats: How often.
        only: Faults of one machine, made without Ray, or those of a cluster.
    """
    check_repeats(repeats)
    logging.getLogger("rayvec").setLevel(logging.ERROR)  # every restart is logged
    found: dict[str, list[float]] = {}
    for here in ONE_MACHINE if only != "cluster" else []:
        found[here.__doc__ or ""] = [here() for _ in range(repeats)]
    for case in CLUSTER if only != "one_machine" else []:
        with simulated_cluster(0, 4, 4) as cluster:
            found[case.__doc__ or ""] = [case(cluster) for _ in range(repeats)]
    print(heading())
    rows = [(fault.rstrip("."), spread(times, ".2f")) for fault, times in found.items()]
    show_table("Seconds until it is over", ["fault", "seconds"], rows)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
