"""The command line and the loop of the soak."""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from helpers.waiting import shm_names, wait_until

from rayvec.vector.ray_vec_env import RayVecEnv
from soak.auditor import Auditor
from soak.elastic import NUM_NODES, NodeChanges, train_audited
from soak.faults import Faults
from soak.recording import MARK, Recorder, growth_mib, left
from soak.short_lives import ShortLives
from soak.witness import Act, Asking, Witness

NUM_ENVS = 24
_BEGIN_S = 60.0
"""Memory is compared from here on, or after a sixth of a longer run."""


class Soak:
    """The loop: steps and chunks, one of them with a fault every few seconds.

    Args:
        env: The large vector environment.
        faults: What may happen to it.
        short_lives: What ends a vector environment of its own; none if these are switched off.
        rng: Chooses.
    """

    def __init__(
        self, env: RayVecEnv, faults: Faults | NodeChanges, short_lives: list[ShortLives], rng: random.Random
    ) -> None:
        self._env, self._faults, self._rng = env, faults, rng
        self._short_lives = short_lives
        self.made: Counter[str] = Counter()
        obs, _ = env.reset(seed=1)
        self.auditor = Auditor(obs)
        self._weights = env.publish(Asking())

    def counts(self) -> dict[str, Any]:
        """Returns what was checked and which faults were made."""
        return {**self.auditor.seen, "faults": {**self._faults.made, **self.made}}

    def run(self, until: float, fault_every_s: float) -> None:
        """Steps until this ``time.monotonic`` time; raises AssertionError at the first wrong transition."""
        next_fault, next_short, next_report = (time.monotonic() + delay for delay in (2.0, 20.0, 30.0))
        begin = time.monotonic()
        while time.monotonic() < until:
            actions = np.zeros(NUM_ENVS, np.int64)
            if time.monotonic() >= next_fault:
                next_fault = time.monotonic() + fault_every_s
                for n, act in self._faults.make(~self.auditor.done).items():
                    actions[n] = act
            for _ in range(50):
                self.auditor.step(*self._env.step(actions))
                actions[:] = Act.STEP
            self._two_chunks()
            if self._short_lives and time.monotonic() >= next_short:
                next_short = time.monotonic() + 3 * fault_every_s
                self._live_shortly()
            if time.monotonic() >= next_report:
                next_report += 30
                print(f"{time.monotonic() - begin:4.0f} s {self.counts()}", flush=True)

    def _two_chunks(self) -> None:
        """Two chunks are pending at once, each with weights of its own."""
        versions = []
        for _ in range(2):
            version = self._weights.version + 1
            versions.append(self._weights.publish(np.full(Asking.num_weights, version, np.float32)))
            self._env.rollout_async(self._weights, 30, 0, 0)
        for version in versions:
            self.auditor.chunk(self._env.rollout_wait().chunk, version)

    def _live_shortly(self) -> None:
        name, fault = self._rng.choice(list(self._rng.choice(self._short_lives).all().items()))
        self.made[name] += 1
        fault()


def soak(args: argparse.Namespace) -> None:
    """Runs for some minutes; raises AssertionError at the first thing that is not as it should be."""
    import ray
    from ray.cluster_utils import Cluster

    rng, elastic = random.Random(args.seed), args.elastic != "no"
    head = {"num_cpus": 6, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=not elastic)  # else by no thread
    try:
        cluster.add_node(num_cpus=4)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        if args.elastic == "decentralized":
            recorder = train_audited(cluster, args.minutes, args.fault_every, rng, args.record)
        else:
            recorder = step_audited(cluster, args, rng)
    finally:
        ray.shutdown()
        cluster.shutdown()
    skip_s = max(_BEGIN_S, 10 * args.minutes)
    late = [sample["own_mib"]["driver"] for sample in recorder.samples if sample["at_s"] >= skip_s]
    if late:
        print(f"memory of the driver: {late[0]:.1f} MiB after {skip_s / 60:.1f} minutes, {late[-1]:.1f} MiB at the end")
    for group in ("driver", "workers", "actors", "ray"):
        grown = growth_mib(recorder.samples, group, skip_s)
        print(f"memory of {group}: {grown:+.1f} MiB from {skip_s / 60:.1f} to {args.minutes:g} minutes")


def step_audited(cluster: Any, args: argparse.Namespace, rng: random.Random) -> Recorder:
    """Steps a large vector environment, and audits every transition."""
    elastic = args.elastic == "central"
    only = tuple(filter(None, args.only.split(",")))
    with tempfile.TemporaryDirectory(prefix="rvs-", dir="/tmp") as name:
        directory = Path(name)
        for each in ("large", "0", "1"):
            (directory / each).mkdir()
        with RayVecEnv(
            [partial(Witness, index, directory / "large") for index in range(NUM_ENVS)],
            workers_per_node=4,
            num_nodes=NUM_NODES if elastic else 2,
            on_env_error="restart",
            step_timeout_s=5.0,
            on_node_loss="rehost",
        ) as env:
            faults = NodeChanges(cluster, rng) if elastic else Faults(env, cluster, directory / "large", rng, only)
            short = [] if only or elastic else [ShortLives(directory / str(n), rng, n) for n in (0, 1)]
            loop = Soak(env, faults, short, rng)
            recorder = Recorder(args.record, 5.0 if elastic else 10.0, loop.counts)
            try:
                loop.run(time.monotonic() + 60 * args.minutes, args.fault_every)
            finally:
                recorder.close()
                if isinstance(faults, NodeChanges):
                    faults.close()
                print(loop.counts())
    return recorder


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(prog="soak", description=sys.modules["soak"].__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--fault-every", type=float, default=5.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--elastic",
        choices=["no", "central", "decentralized"],
        default="no",
        help="nodes join and leave, and nothing else happens; decentralized: under a training whose ranks audit",
    )
    parser.add_argument("--only", default="", help="faults to make, by name, separated by commas; 'none' for none")
    parser.add_argument("--record", type=Path, default=Path("runs/soak"), help="where samples are written")
    args = parser.parse_args(arguments)
    args.record.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=args.record / "log.txt", filemode="w", format="%(asctime)s %(message)s")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs us in the background has it ignored
    os.environ.setdefault("RAY_AUTH_TOKEN", os.urandom(32).hex())
    before = shm_names()
    with tempfile.TemporaryDirectory(prefix="rvs-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        os.environ["RAY_TMPDIR"] = directory
        os.mkdir(f"{directory}/ray")
        soak(args)
    wait_until(lambda: not left(), "every process has ended")
    assert shm_names() <= before, shm_names() - before
    print("not one transition was wrong, and nothing is left")


if __name__ == "__main__":
    if MARK not in os.environ:  # processes are known by the environment that they were started with
        os.environ[MARK] = uuid.uuid4().hex
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    main()
