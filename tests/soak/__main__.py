"""The command line, the loop of the soak, and memory over time."""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from helpers.waiting import shm_names, wait_until

from rayvec.vector.ray_vec_env import RayVecEnv
from soak.auditor import Auditor
from soak.faults import Faults, interrupt_a_small_one
from soak.witness import Act, Asking, Witness

NUM_ENVS = 24
MARK = "RAYVEC_SOAK"
"""Name of an environment variable by whose value a soak knows the processes that it started."""
_SAMPLE_S = 10.0


class Soak:
    """The loop: steps and chunks, one of them with a fault every few seconds.

    Args:
        env: The large vector environment.
        faults: What may happen to it.
        interrupt: Makes a small vector environment and interrupts it.
    """

    def __init__(self, env: RayVecEnv, faults: Faults, interrupt: Callable[[], None]) -> None:
        self._env, self._faults, self._interrupt = env, faults, interrupt
        self._auditor = Auditor(env.reset(seed=1)[0])
        self._weights = env.publish(Asking())

    def counts(self) -> dict[str, Any]:
        """Returns what was checked and which faults were made."""
        return {**self._auditor.seen, "faults": dict(self._faults.made)}

    def run(self, until: float, fault_every_s: float) -> None:
        """Steps until this ``time.monotonic`` time; raises AssertionError at the first wrong transition."""
        next_fault, next_interrupt = time.monotonic() + 2.0, time.monotonic() + 20.0
        while time.monotonic() < until:
            actions = np.zeros(NUM_ENVS, np.int64)
            if time.monotonic() >= next_fault:
                next_fault = time.monotonic() + fault_every_s
                for n, act in self._faults.make(~self._auditor.done).items():
                    actions[n] = act
            for _ in range(50):
                self._auditor.step(*self._env.step(actions))
                actions[:] = Act.STEP
            self._two_chunks()
            if time.monotonic() >= next_interrupt:
                next_interrupt = time.monotonic() + 3 * fault_every_s
                self._faults.made["interrupt"] += 1
                self._interrupt()

    def _two_chunks(self) -> None:
        """Two chunks are pending at once, each with weights of its own."""
        versions = []
        for _ in range(2):
            version = self._weights.version + 1
            versions.append(self._weights.publish(np.full(Asking.num_weights, version, np.float32)))
            self._env.rollout_async(self._weights, 30, 0, 0)
        for version in versions:
            self._auditor.chunk(self._env.rollout_wait().chunk, version)


class Memory:
    """Writes to a file every few seconds which processes there are, their own memory, and counts; prints some.

    Args:
        directory: Where ``samples.jsonl`` is written.
        counts: Returns what else to write: transitions and faults.
    """

    def __init__(self, directory: Path, counts: Callable[[], dict[str, Any]]) -> None:
        self._path, self._counts = directory / "samples.jsonl", counts
        self.samples: list[dict[str, Any]] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        begin_s = time.monotonic()
        with self._path.open("w", buffering=1) as file:
            while not self._ends.wait(_SAMPLE_S):
                mib: Counter[str] = Counter(driver=0, others=0)
                found = marked()
                for process in found:
                    with suppress(psutil.Error):  # it has ended meanwhile
                        group = "driver" if process.pid == os.getpid() else "others"
                        mib[group] += process.memory_full_info().uss >> 20
                sample = {"at_s": round(time.monotonic() - begin_s), "mib": mib, "processes": len(found)}
                self.samples.append({**sample, **self._counts()})
                file.write(json.dumps(self.samples[-1]) + "\n")
                if len(self.samples) % 3 == 0:
                    print(self.samples[-1], flush=True)

    def close(self) -> None:
        """Stops, and prints by how much a straight line through memory has risen after the first sixth of the run."""
        self._ends.set()
        self._thread.join()
        late = self.samples[max(6, len(self.samples) // 6) :]
        for group in ("driver", "others") if len(late) > 1 else ():
            slope = np.polyfit([each["at_s"] for each in late], [each["mib"][group] for each in late], 1)[0]
            print(
                f"memory of {group}: {slope * (late[-1]['at_s'] - late[0]['at_s']):+.1f} MiB since {late[0]['at_s']} s"
            )
        print(self._counts())


def marked() -> list[psutil.Process]:
    """Returns every process that this soak started, and itself."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == os.environ[MARK] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def left() -> list[str]:
    """Returns what is left besides this process, its fork server, and what environments put into their own sessions."""
    own, found = {os.getpid(), *(child.pid for child in psutil.Process().children())}, []
    for process in marked():
        with suppress(psutil.Error):
            if process.pid not in own and process.name() != "sleep":
                found.append(" ".join(process.cmdline()))
    return found


def soak(args: argparse.Namespace, directory: Path) -> None:
    """Runs for some minutes; raises AssertionError at the first thing that is not as it should be."""
    import ray
    from ray.cluster_utils import Cluster

    rng = random.Random(args.seed)
    head = {"num_cpus": 6, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=True)
    for name in ("large", "small"):
        (directory / name).mkdir()
    try:
        cluster.add_node(num_cpus=4)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        with RayVecEnv(
            [partial(Witness, index, directory / "large") for index in range(NUM_ENVS)],
            workers_per_node=4,
            num_nodes=2,
            on_env_error="restart",
            step_timeout_s=5.0,
        ) as env:
            faults = Faults(env, cluster, directory / "large", rng)
            loop = Soak(env, faults, partial(interrupt_a_small_one, directory / "small", rng))
            memory = Memory(args.record, loop.counts)
            try:
                loop.run(time.monotonic() + 60 * args.minutes, args.fault_every)
            finally:
                memory.close()
    finally:
        ray.shutdown()
        cluster.shutdown()


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(prog="soak", description=sys.modules["soak"].__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--fault-every", type=float, default=5.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
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
        soak(args, Path(directory))
    with suppress(AssertionError):
        wait_until(lambda: not left())
    assert not left(), left()
    assert shm_names() <= before, shm_names() - before
    print("not one transition was wrong, and nothing is left")


if __name__ == "__main__":
    if MARK not in os.environ:  # processes are known by the environment that they were started with
        os.environ[MARK] = uuid.uuid4().hex
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    main()
