"""A cluster of simulated nodes, reached by the network: double buffering, start, cost of a frame and of a step.

    python benchmarks/cluster.py groups
    python benchmarks/cluster.py cpu
    python benchmarks/cluster.py startup --nodes 2 --workers-per-node 48
    python benchmarks/cluster.py frames --nodes 8

Efficiency over nodes and step durations is what ``rayvec bench scaling`` measures.
"""

from __future__ import annotations

import contextlib
import cProfile
import multiprocessing
import os
import pstats
import resource
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import tyro
from measure import heading, markdown, ratio, simulated_cluster, spread, tree

from rayvec.bench import simulate
from rayvec.bench.peers import peer_process
from rayvec.pools.base import Autoreset
from rayvec.testing import TimedEnv
from rayvec.vector.ray_vec_env import RayVecEnv


def timed(step_s: float, busy: bool = False) -> Callable[[], TimedEnv]:
    """Returns what makes an environment that takes so long for a step; it has no infos, and long episodes."""
    return lambda: TimedEnv(step_s, busy, max_episode_steps=1000, infos=False)


def still(obs: Any) -> Any:
    """A policy that costs nothing."""
    return np.zeros(len(obs), np.int64)


def groups(repeats: int = 5) -> None:
    """Double buffering: two groups against one.

    With a policy that takes p for a call, whatever its rows, and environments that take s for a step of all, two groups
    gain (s + p) / max(s, 2 p), at most 1.5. Where p falls with the rows, they gain (s + p) / max(s, p), at most 2.
    """
    rows = []
    cases = [
        (True, 1, 32, "0.1 ms", timed(1e-4, busy=True), 1.6e-3, True, False),
        (False, 2, 4, "10 ms", timed(1e-2), 1e-2, False, False),
        (False, 1, 8, "1.25 ms", timed(1.25e-3), 1e-2, False, True),
    ]
    for here, workers, num_envs, step, make, policy_s, busy, by_rows in cases:
        cpus = (workers,) if here else (0, workers)
        with simulated_cluster(*cpus):

            def policy(
                obs: Any, policy_s: float = policy_s, busy: bool = busy, whole: int = num_envs if by_rows else 0
            ) -> Any:
                call_s = policy_s * len(obs) / whole if whole else policy_s
                until = time.perf_counter() + call_s
                if not busy:
                    time.sleep(call_s)
                while time.perf_counter() < until:
                    pass
                return np.zeros(len(obs), np.int64)

            rates: dict[str, list[float]] = {"worker alone": [], "groups=1": [], "groups=2": []}
            for _ in range(repeats):
                for name, kwargs in (("groups=1", {"groups": 1}), ("groups=2", {"groups": 2})):
                    with RayVecEnv([make] * num_envs, workers_per_node=workers, **kwargs) as env:
                        transport = "+".join(env.transports)
                        env.rollout(policy, 8, inference="driver", seed=0)
                        steps = max(8, round(2.0 / (policy_s * 2)))
                        begin = time.perf_counter()
                        env.rollout(policy, steps, inference="driver")
                        rates[name].append(steps * num_envs / (time.perf_counter() - begin))
                        if name == "groups=1":
                            begin = time.perf_counter()
                            env.rollout(still, steps)
                            rates["worker alone"].append(steps * num_envs / (time.perf_counter() - begin))
        work, unit = "busy" if busy else "asleep", "all rows" if by_rows else "a call"
        policy_costs = f"policy {policy_s * 1e3:g} ms for {unit}"
        rows.append(
            [
                f"{workers} workers, {num_envs} environments of {step}, {policy_costs}, {work}",
                transport,
                spread(rates["groups=1"]),
                spread(rates["groups=2"]),
                ratio(rates["groups=2"], rates["groups=1"]),
                ratio(rates["groups=2"], rates["worker alone"]),
            ]
        )
    print(markdown(["", "transport", "one group", "two groups", "two / one", "two / worker alone"], rows))


def startup(nodes: int = 2, workers_per_node: int = 48, repeats: int = 3) -> None:
    """Time from a running cluster to the first observations, and unique memory of a worker."""
    count = nodes * workers_per_node
    times, memory = [], []
    for _ in range(repeats):
        with simulated_cluster(0, *[workers_per_node] * nodes):
            before = set(tree(os.getpid()))
            begin = time.perf_counter()
            with RayVecEnv("CartPole-v1", count) as env:
                env.reset(seed=0)
                times.append(time.perf_counter() - begin)
                actors = [pids[0] for pids in env.worker_pids().values()]
                workers = [pid for pids in env.worker_pids().values() for pid in pids[1:]]
                assert before.isdisjoint(actors)
                memory += [psutil.Process(pid).memory_full_info().uss / 2**20 for pid in workers]
    cell = f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})"
    uss = f"{statistics.median(memory):.1f} ({min(memory):.1f} to {max(memory):.1f})"
    print(
        markdown(
            ["environments", "nodes x workers", "ready after, s", "unique memory of a worker, MiB"],
            [[count, f"{nodes} x {workers_per_node}", cell, uss]],
        )
    )


class BareEcho:
    """What no protocol can beat: processes that answer so many bytes with so many, after working as long as a node."""

    def __init__(self, count: int, sent_bytes: int, answer_bytes: int, busy_s: float) -> None:
        context = multiprocessing.get_context("forkserver")
        self._message, self._answer = bytes(sent_bytes), bytearray(answer_bytes)
        self._sockets, self._processes = [], []
        with socket.create_server(("127.0.0.1", 0)) as server:
            for _ in range(count):
                args = (server.getsockname()[1], sent_bytes, answer_bytes, busy_s)
                self._processes.append(context.Process(target=echo, args=args, daemon=True))
                self._processes[-1].start()
                sock, _ = server.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets.append(sock)

    def step(self) -> None:
        """Asks all, then hears all."""
        for sock in self._sockets:
            sock.sendall(self._message)
        for sock in self._sockets:
            left = len(self._answer)
            while left:
                left -= sock.recv_into(self._answer, left)

    def close(self) -> None:
        """Hangs up, upon which they end."""
        for sock in self._sockets:
            sock.close()
        for process in self._processes:
            process.join()


def echo(port: int, sent_bytes: int, answer_bytes: int, busy_s: float) -> None:
    """Answers messages after some work, until the other side hangs up."""
    answer, env = bytes(answer_bytes), timed(busy_s, busy=True)()
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        env.reset(seed=0)
        while received := len(sock.recv(sent_bytes)):
            while received < sent_bytes:
                received += len(sock.recv(sent_bytes - received))
            env.step(0)
            sock.sendall(answer)


def frames(nodes: int = 8, steps: int = 300, repeats: int = 7) -> None:
    """CPU time of the driver for each node and step, at 48 environments of 4 floats for each node, and where it goes.

    First on cores that all share, then with the driver alone on core 0, as it is on a machine of its own.
    """
    count = 48 * nodes
    rows = []
    echoes = BareEcho(nodes, 24 + 8 + 48 * 16, 24 + 48 * 34, 48 * 6e-6)
    with simulated_cluster(0, *[1] * nodes), RayVecEnv("CartPole-v1", count, workers_per_node=1) as env:
        env.reset(seed=0)
        pool, ids, actions = env._pool, np.arange(count), np.zeros(count, np.int64)

        def step() -> None:
            pool.send(ids, actions, Autoreset.NEXT_STEP)
            pool.recv(ids)

        ways = {"RayPool": step, "bare echo of as many bytes": echoes.step}
        cores = os.sched_getaffinity(0)
        for where in ("shared", "its own")[: len(cores)]:
            if where == "its own":
                alone_on_core(min(cores), cores)
            found: dict[str, list[Spent]] = {name: [] for name in ways}
            for _ in range(repeats):
                for name, advance in ways.items():
                    found[name].append(spent_on(advance, steps, nodes))
            for name, figures in found.items():
                rows.append([name, where, *map(spread, zip(*figures, strict=True))])
        profile = cProfile.Profile()
        profile.runcall(lambda: [step() for _ in range(steps)])
    echoes.close()
    header = ["", "driver's core", "driver CPU for each node's frame, us", "of it in the kernel, us"]
    header += ["preempted in a step, times", "wall time of a step, us"]
    print(f"{nodes} nodes of 48 environments\n\n{markdown(header, rows)}\n")
    print(f"Functions by their own time, under a profiler, which makes calls dearer\n\n{costs(profile, steps * nodes)}")


class Spent(NamedTuple):
    """What the driver spends: microseconds of CPU time for a frame, of them in the kernel, preemptions, wall time."""

    cpu_us: float
    kernel_us: float
    preemptions: float
    wall_us: float


def spent_on(advance: Callable[[], None], steps: int, frames_per_step: int) -> Spent:
    """Measures steps after one that warms up."""
    advance()
    usage, cpu, begin = resource.getrusage(resource.RUSAGE_SELF), time.process_time(), time.perf_counter()
    for _ in range(steps):
        advance()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_SELF)
    each_us = 1e6 / steps / frames_per_step
    return Spent(
        cpu * each_us,
        (after.ru_stime - usage.ru_stime) * each_us,
        (after.ru_nivcsw - usage.ru_nivcsw) / steps,
        wall / steps * 1e6,
    )


def alone_on_core(core: int, cores: set[int]) -> None:
    """Leaves one core to this process, and the others to all that it has started."""
    for pid in tree(os.getpid()):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(int(task.name), {core} if pid == os.getpid() else cores - {core})


def costs(profile: cProfile.Profile, frames: int) -> str:
    """Returns the 15 functions that took most of their own time, for each frame, without the waits in ``recv_into``."""
    found = [
        [f"{Path(place[0]).name} {place[2]}".removeprefix("~ "), f"{calls / frames:.2f}", f"{own / frames * 1e6:.1f}"]
        for place, (_, calls, own, _, _) in sorted(
            pstats.Stats(profile).stats.items(),  # type: ignore[attr-defined]
            key=lambda item: -item[1][2],
        )
        if "recv_into" not in place[2]
    ]
    return markdown(["function", "calls a frame", "us a frame"], found[:15])


def cpu(nodes: int = 2, workers_per_node: int = 8, steps: int = 128, repeats: int = 9) -> None:
    """CPU time of all processes in a step, one environment that sleeps 1 ms for each worker: what limits short steps.

    Args:
        nodes: Simulated.
        workers_per_node: Processes of each.
        steps: Of a chunk.
        repeats: Windows.
    """
    count = nodes * workers_per_node
    task = {"num_envs": count, "workers": count, "nodes": nodes, "workers_per_node": workers_per_node}
    rows: dict[str, dict[str, list[float]]] = {}
    with simulate.nodes() as simulated:
        simulated.grow(nodes, workers_per_node)
        ways = {
            "from the driver": ("rayvec", 1, {"inference": "driver"}),
            f"in chunks of {steps}": ("rayvec", steps, {"inference": "worker", "prefetch": True}),
            "independent processes": ("floor", 1, {}),
        }
        for way, (peer, chunk_steps, more) in ways.items():
            of_peer = {**task, **more, "emulated": {}, "address": simulated.address}
            with peer_process(peer, simulated.environment, of_peer) as (process, _):
                process.do("set_step", step_s=1e-3, chunk_steps=chunk_steps)
                for _ in range(repeats):
                    window = process.do("measure", seconds=max(1.0, 4e-3 * chunk_steps), with_split=False)
                    step_us = 1e6 * count / window["steps"]
                    spent = {"a process or worker": window.get("worker_cpu_s", window["cpu_s"]) / count}
                    if peer == "rayvec":
                        own_s = window["driver_cpu_s"] + window["node_cpu_s"] + window["worker_cpu_s"]
                        spent["the driver"] = window["driver_cpu_s"]
                        spent["a node's actor"] = window["node_cpu_s"] / nodes
                        spent["driver, actors and workers"] = own_s
                    for name, seconds in {**spent, "wall time": window["elapsed_s"]}.items():
                        rows.setdefault(name, {}).setdefault(way, []).append(seconds * step_us)
    print(f"CPU time, us, for a step of {count} environments that sleep 1 ms\n")
    cells = [[name, *(spread(found[way]) if way in found else "" for way in ways)] for name, found in rows.items()]
    print(markdown(["", *ways], cells))


if __name__ == "__main__":
    print(heading())
    commands: dict[str, Callable[..., None]] = {"groups": groups, "startup": startup, "frames": frames, "cpu": cpu}
    tyro.extras.subcommand_cli_from_dict(commands, description=__doc__)
