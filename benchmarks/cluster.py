"""A cluster of simulated nodes, reached by the network: double buffering, start, cost of a frame and of a step.

    python benchmarks/cluster.py groups
    python benchmarks/cluster.py cpu
    python benchmarks/cluster.py startup --nodes 2 --workers-per-node 48
    python benchmarks/cluster.py frames --nodes 8

Efficiency over nodes and step durations is what ``rayvec bench scaling`` measures.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import multiprocessing
import os
import pstats
import resource
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from measure import heading, markdown, ratio, simulated_cluster, spread, tree

from rayvec.collect.collector import Collector
from rayvec.pools.base import Autoreset
from rayvec.testing import TimedEnv
from rayvec.vector.ray_vec_env import RayVecEnv


def timed(step_s: float, busy: bool = False) -> Callable[[], TimedEnv]:
    """Returns what makes an environment that takes so long for a step; it has no infos, and long episodes."""
    return lambda: TimedEnv(step_s, busy, max_episode_steps=1000, infos=False)


def still(obs: Any) -> Any:
    """A policy that costs nothing."""
    return np.zeros(len(obs), np.int64)


def groups(args: argparse.Namespace) -> None:
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
            for _ in range(args.repeats):
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


def startup(args: argparse.Namespace) -> None:
    """Time from a running cluster to the first observations, and unique memory of a worker."""
    count = args.nodes * args.workers_per_node
    times, memory = [], []
    for _ in range(args.repeats):
        with simulated_cluster(0, *[args.workers_per_node] * args.nodes):
            before = set(tree(os.getpid()))
            begin = time.perf_counter()
            with RayVecEnv("CartPole-v1", count) as env:
                env.reset(seed=0)
                times.append(time.perf_counter() - begin)
                actors = [pids[0] for pids in env.worker_pids().values()]
                workers = [pid for pids in env.worker_pids().values() for pid in pids[1:]]
                assert before.isdisjoint(actors)
                memory += [unique_mib(pid) for pid in workers]
    cell = f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})"
    uss = f"{statistics.median(memory):.1f} ({min(memory):.1f} to {max(memory):.1f})"
    print(
        markdown(
            ["environments", "nodes x workers", "ready after, s", "unique memory of a worker, MiB"],
            [[count, f"{args.nodes} x {args.workers_per_node}", cell, uss]],
        )
    )


def unique_mib(pid: int) -> float:
    """Returns the memory that only this process has, in MiB."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        fields = [line.split() for line in file]
    return sum(int(field[1]) for field in fields if field[0] in ("Private_Clean:", "Private_Dirty:")) / 1024


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


def frames(args: argparse.Namespace) -> None:
    """CPU time of the driver for each node and step, at 48 environments of 4 floats for each node, and where it goes.

    First on cores that all share, then with the driver alone on core 0, as it is on a machine of its own.
    """
    count = 48 * args.nodes
    rows = []
    echoes = BareEcho(args.nodes, 24 + 8 + 48 * 16, 24 + 48 * 34, 48 * 6e-6)
    with simulated_cluster(0, *[1] * args.nodes), RayVecEnv("CartPole-v1", count, workers_per_node=1) as env:
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
            for _ in range(args.repeats):
                for name, advance in ways.items():
                    found[name].append(spent_on(advance, args.steps, args.nodes))
            for name, figures in found.items():
                rows.append([name, where, *map(spread, zip(*figures, strict=True))])
        profile = cProfile.Profile()
        profile.runcall(lambda: [step() for _ in range(args.steps)])
    echoes.close()
    header = ["", "driver's core", "driver CPU for each node's frame, us", "of it in the kernel, us"]
    header += ["preempted in a step, times", "wall time of a step, us"]
    print(f"{args.nodes} nodes of 48 environments\n\n{markdown(header, rows)}\n")
    print(f"Functions by their own time, under a profiler, which makes calls dearer\n\n{costs(profile, args)}")


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


def costs(profile: cProfile.Profile, args: argparse.Namespace) -> str:
    """Returns the 15 functions that took most of their own time, for each frame, without the waits in ``recv_into``."""
    frames = args.steps * args.nodes
    found = [
        [f"{Path(place[0]).name} {place[2]}".removeprefix("~ "), f"{calls / frames:.2f}", f"{own / frames * 1e6:.1f}"]
        for place, (_, calls, own, _, _) in sorted(
            pstats.Stats(profile).stats.items(),  # type: ignore[attr-defined]
            key=lambda item: -item[1][2],
        )
        if "recv_into" not in place[2]
    ]
    return markdown(["function", "calls a frame", "us a frame"], found[:15])


def run_s(pids: Sequence[int]) -> float:
    """Returns for how long all threads of some processes have run so far, in seconds, as the scheduler counts it."""
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def independent(step_s: float, steps: int, answer: Connection) -> None:
    """Steps one environment alone; sends for how long it ran, in seconds."""
    env = timed(step_s)()
    env.reset(seed=0)
    for step in range(-100, steps):
        if step == 0:
            begun = run_s([os.getpid()])
        _, _, terminated, truncated, _ = env.step(0)
        if terminated or truncated:
            env.reset()
    answer.send(run_s([os.getpid()]) - begun)


def counted(
    pids: dict[str, list[int]], advance: Callable[[], object], steps: int, repeats: int
) -> tuple[dict[str, list[float]], list[float]]:
    """Returns each one's CPU time for a step by name, and the wall time of a step, both in us and of every repeat."""
    spent: dict[str, list[float]] = {name: [] for name in pids}
    walls = []
    advance()
    for _ in range(repeats):
        before = {name: run_s(them) for name, them in pids.items()}
        begin = time.perf_counter()
        advance()
        walls.append((time.perf_counter() - begin) / steps * 1e6)
        for name, them in pids.items():
            spent[name].append((run_s(them) - before[name]) / steps / len(them) * 1e6)
    return spent, walls


def cpu(args: argparse.Namespace) -> None:
    """CPU time of everybody in a step, one sleeping environment a worker: what binds short steps."""
    count, step_s, steps = args.nodes * args.workers_per_node, 1e-3, args.steps
    found = {}
    with simulated_cluster(0, *[args.workers_per_node] * args.nodes):
        with RayVecEnv([timed(step_s)] * count, workers_per_node=args.workers_per_node) as env:
            env.reset(seed=0)
            actions = np.zeros(count, np.int64)
            collector = Collector(env, still, prefetch=True)
            of_nodes = list(env.worker_pids().values())
            pids = {
                "driver": [os.getpid()],
                "a node's actor": [of_node[0] for of_node in of_nodes],
                "a worker": [pid for of_node in of_nodes for pid in of_node[1:]],
            }
            for way, advance in (
                ("from the driver", lambda: [env.step(actions) for _ in range(steps)]),
                (f"in chunks of {steps}", lambda: collector.collect(n_step=steps * count)),
            ):
                found[way] = counted(pids, advance, steps, args.repeats)
    context = multiprocessing.get_context("forkserver")
    alone: list[float] = []
    for _ in range(args.repeats):
        pipes = [context.Pipe(duplex=False) for _ in range(count)]
        for _, theirs in pipes:
            context.Process(target=independent, args=(step_s, steps, theirs), daemon=True).start()
        alone.append(sum(ours.recv() for ours, _ in pipes) / count / steps * 1e6)
    rows = [[name, *(spread(spent[name]) for spent, _ in found.values())] for name in pids]
    rows.append(["an independent process", *[spread(alone)] * len(found)])
    together = [
        [sum(len(pids[name]) * spent[name][k] for name in pids) for k in range(args.repeats)]
        for spent, _ in found.values()
    ]
    rows.append(["driver, actors and workers", *map(spread, together)])
    rows.append(["wall time", *(spread(walls) for _, walls in found.values())])
    print(f"CPU time, us, for a step of {count} environments that sleep 1 ms\n")
    print(markdown(["", *found], rows))


def main() -> None:
    """Parses the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for function, repeats in ((groups, 5), (startup, 3), (frames, 7), (cpu, 9)):
        command = commands.add_parser(function.__name__, help=function.__doc__)
        command.set_defaults(function=function)
        command.add_argument("--repeats", type=int, default=repeats)
        command.add_argument("--nodes", type=int, default=8 if function is frames else 2)
        command.add_argument("--workers-per-node", type=int, default=48 if function is startup else 8)
        command.add_argument("--steps", type=int, default=128 if function is cpu else 300)
    args = parser.parse_args()
    print(heading())
    args.function(args)


if __name__ == "__main__":
    main()
