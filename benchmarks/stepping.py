"""Vector environments stepped from the driver: ours, by shared memory and by network, beside its peers.

    python benchmarks/stepping.py --env-id CartPole-v1 --num-envs 64 --workers 2 --repeats 7

Every peer takes random actions in the same loop, in windows that take turns. Steps per CPU-second count the
driver and every process that steps for it. The floor is the bare `ProcessPool` under the same loop.

PufferLib wants older packages than ours, so it runs in an interpreter of its own, if there is one:

    benchmarks/make_peer_venvs.sh DIRECTORY pufferlib
    python benchmarks/stepping.py --pufferlib DIRECTORY/pufferlib/bin/python
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from measure import cpu_s, heading, markdown, ratio, simulated_cluster, spread, tree

from rayvec.envs.factory import EnvFactory
from rayvec.node.process_pool import ProcessPool
from rayvec.pools.base import Autoreset
from rayvec.vector.ray_vec_env import RayVecEnv


@dataclass
class Peer:
    """Something that steps environments, and what was measured of it.

    Attributes:
        name: Of the row.
        transport: How actions and observations travel.
        step: Takes a batch of actions, returns when all are stepped.
        pids: Processes that work for it, beside the driver.
        close: Ends it.
        steps_per_s: One figure for each repeat.
        steps_per_cpu_s: Likewise.
        measure_itself: Steps for so many seconds; returns steps, elapsed and CPU seconds. Of one that runs elsewhere.
    """

    name: str
    transport: str
    step: Callable[[Any], Any]
    pids: list[int]
    close: Callable[[], None]
    steps_per_s: list[float] = field(default_factory=list)
    steps_per_cpu_s: list[float] = field(default_factory=list)
    measure_itself: Callable[[float], tuple[float, float, float]] | None = None


def process_pool(env_id: str, num_envs: int, workers: int) -> Peer:
    """The floor: our own pool of one node, without Ray and without a face."""
    pool = ProcessPool.start(EnvFactory.build(env_id, num_envs), workers)
    ids = np.arange(num_envs)
    pool.reset(ids, list(range(num_envs)))
    pool.recv(ids)

    def step(actions: Any) -> None:
        pool.send(ids, actions, Autoreset.NEXT_STEP)
        pool.recv(ids)

    return Peer("ProcessPool (floor)", "shm", step, pool.worker_pids, pool.close)


def ray_vec_env(env_id: str, num_envs: int, workers: int) -> Peer:
    """Ours; the first lands on the driver's node, the second on the other."""
    before = set(tree(os.getpid()))
    env = RayVecEnv(env_id, num_envs, num_nodes=1, workers_per_node=workers)
    env.reset(seed=0)
    pids = sorted(set(tree(os.getpid())) - before)
    return Peer("RayVecEnv", "+".join(env.transports), env.step, pids, env.close)


def of_gymnasium(env_id: str, num_envs: int, workers: int, mode: str) -> Peer:
    """Gymnasium's own; its asynchronous one has a process for each environment."""
    before = set(tree(os.getpid()))
    env_fns = [lambda: gymnasium.make(env_id)] * num_envs
    env: Any = gymnasium.vector.SyncVectorEnv(env_fns)
    if mode == "async":
        env.close()
        env = gymnasium.vector.AsyncVectorEnv(env_fns, context="forkserver")
    env.reset(seed=0)
    pids = sorted(set(tree(os.getpid())) - before)
    return Peer(type(env).__name__, "pipe, shm" if mode == "async" else "none", env.step, pids, env.close)


def of_tianshou(env_id: str, num_envs: int, workers: int, kind: str) -> Peer:
    """Tianshou's; it does not reset by itself, so its environments are made never to end."""
    import tianshou.env

    before = set(tree(os.getpid()))

    def endless() -> Any:
        return gymnasium.wrappers.Autoreset(gymnasium.make(env_id))

    env = getattr(tianshou.env, kind)([endless] * num_envs)
    env.seed(0)
    env.reset()
    pids = sorted(set(tree(os.getpid())) - before)
    name = f"Tianshou {kind}" + (f", {num_envs} environments" if kind == "RayVectorEnv" else "")
    return Peer(name, {"RayVectorEnv": "ray"}.get(kind, "pipe"), env.step, pids, env.close)


def of_pufferlib(python: str, env_id: str, num_envs: int, workers: int) -> Peer:
    """PufferLib's Ray backend, in a process of another interpreter."""
    script = Path(__file__).with_name("pufferlib_peer.py")
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_TMPDIR")}
    process = subprocess.Popen(
        [python, str(script), env_id, str(num_envs), str(workers)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=env,
    )
    assert process.stdin is not None and process.stdout is not None
    ours, answers = process.stdin, process.stdout
    if answers.readline() != "ready\n":
        raise SystemExit(f"{script.name} does not run with {python}; try it by hand")

    def measure_itself(seconds: float) -> tuple[float, float, float]:
        ours.write(f"{seconds}\n")
        ours.flush()
        steps, elapsed, cpu = map(float, answers.readline().split())
        return steps, elapsed, cpu

    def close() -> None:
        ours.close()
        process.wait()

    return Peer("PufferLib, Ray backend", "ray", lambda actions: None, [], close, measure_itself=measure_itself)


def measure(peer: Peer, actions: Any, seconds: float) -> None:
    """Steps for some seconds and notes what came of it."""
    if peer.measure_itself is not None:
        steps, elapsed, cpu = peer.measure_itself(seconds)
        peer.steps_per_s.append(steps / elapsed)
        peer.steps_per_cpu_s.append(steps / max(cpu, 1e-9))
        return
    pids = [os.getpid(), *peer.pids]
    peer.step(actions[0])
    cpu, begin, count = cpu_s(pids), time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        peer.step(actions[count % len(actions)])
        count += 1
    elapsed = time.perf_counter() - begin
    steps = count * len(actions[0])
    peer.steps_per_s.append(steps / elapsed)
    peer.steps_per_cpu_s.append(steps / max(cpu_s(pids) - cpu, 1e-9))


def main() -> None:
    """Measures all peers and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--tianshou-ray-envs", type=int, default=16, help="each takes seconds to start")
    parser.add_argument("--without", nargs="*", default=[], help="rows to leave out: async sync subproc shmem ray")
    parser.add_argument("--pufferlib", metavar="PYTHON", help="an interpreter that has PufferLib; see above")
    args = parser.parse_args()
    setting = (args.env_id, args.num_envs, args.workers)
    space = gymnasium.vector.utils.batch_space(gymnasium.make(args.env_id).action_space, args.num_envs)
    space.seed(0)
    actions = [space.sample() for _ in range(512)]
    makers: dict[str, Callable[[], Peer]] = {
        "sync": lambda: of_gymnasium(*setting, "sync"),
        "async": lambda: of_gymnasium(*setting, "async"),
        "subproc": lambda: of_tianshou(*setting, "SubprocVectorEnv"),
        "shmem": lambda: of_tianshou(*setting, "ShmemVectorEnv"),
    }
    peers = [make() for name, make in makers.items() if name not in args.without]  # these fork: before Ray's threads
    peers.insert(0, process_pool(*setting))
    if args.pufferlib:
        peers.append(of_pufferlib(args.pufferlib, *setting))
    with simulated_cluster(args.workers, args.workers + args.num_envs):
        peers += [ray_vec_env(*setting), ray_vec_env(*setting)]
        if "ray" not in args.without:
            peers.append(of_tianshou(args.env_id, args.tianshou_ray_envs, args.workers, "RayVectorEnv"))
        for _ in range(args.repeats):
            for peer in peers:
                fewer = [batch[: args.tianshou_ray_envs] for batch in actions] if "RayVector" in peer.name else actions
                measure(peer, fewer, args.seconds)
        for peer in peers:
            peer.close()
    floor = peers[0]
    rows = [
        [
            peer.name,
            peer.transport,
            spread(peer.steps_per_s),
            ratio(peer.steps_per_s, floor.steps_per_s),
            spread(peer.steps_per_cpu_s),
        ]
        for peer in peers
    ]
    if not args.pufferlib:
        rows.append(["PufferLib, Ray backend", "ray", "not installed", "", ""])
    print(heading(("gymnasium", "ray", "tianshou", "numpy")))
    print(markdown(["", "transport", "steps/s", "of the floor", "steps per CPU-second"], rows))


if __name__ == "__main__":
    main()
