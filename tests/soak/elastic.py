"""Nodes that join and leave, with notice and without, while environments move between them."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from helpers.elastic import announce

import rayvec
from rayvec.training.callbacks import RunContext
from soak.audited import AuditedConfig
from soak.recording import Recorder
from soak.witness import Act

NUM_NODES = (1, 4)
_NOTICE_S = 8.0


class NodeChanges:
    """Changes the nodes of a cluster in a thread, so that changes fall into steps, chunks and moves.

    Args:
        cluster: Ray's ``Cluster``.
        rng: Chooses.

    Attributes:
        made: How often nodes joined, left with notice, and were killed.
    """

    def __init__(self, cluster: Any, rng: random.Random) -> None:
        self._cluster, self._rng = cluster, rng
        self.made: Counter[str] = Counter(join=0, leave=0, kill=0)
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def make(self, may_act: Any = None) -> dict[int, Act]:
        """Lets a node join or leave. With none besides the head, one joins, and with five, one leaves."""
        self.close()
        self._thread = threading.Thread(target=self._change, daemon=True)
        self._thread.start()
        return {}

    def _change(self) -> None:
        try:
            nodes = list(self._cluster.worker_nodes)
            most = NUM_NODES[1]  # with the head that is one more than environments use
            if len(nodes) < most and (not nodes or self._rng.random() < 0.5):
                self._cluster.add_node(num_cpus=4)
                self.made["join"] += 1
                return
            node = self._rng.choice(nodes)
            what = self._rng.choice(["leave", "kill"])
            if what == "leave":
                announce(self._cluster, node.node_id)
                time.sleep(_NOTICE_S)
            self._cluster.remove_node(node, allow_graceful=False)
            self.made[what] += 1
        except BaseException as error:
            self.error = error

    def every(self, pause_s: float, stop: threading.Event) -> None:
        """Makes a change every so many seconds, until `stop` is set; for a thread."""
        while not stop.wait(pause_s):
            self.make()

    def close(self) -> None:
        """Waits for the last change; raises what it raised."""
        if self._thread is not None:
            self._thread.join()
        if self.error is not None:
            raise self.error


class Watching:
    """A callback that ends a run after some time, and counts what its learner has audited.

    Args:
        until: The ``time.monotonic`` time.
        changes: What changes the nodes.
    """

    def __init__(self, until: float, changes: NodeChanges) -> None:
        self._until, self._changes = until, changes
        self.has_begun = threading.Event()
        self._next_report = time.monotonic() + 30
        self.seen: Counter[str] = Counter(transitions=0, iterations=0)

    def counts(self) -> dict[str, Any]:
        """Returns what was checked and how nodes changed."""
        return {**self.seen, "faults": dict(self._changes.made)}

    def on_iteration(self, context: RunContext) -> None:
        """Counts, and ends the run in time."""
        self.has_begun.set()
        audited = [value for name, value in (context.metrics or {}).items() if name.endswith("audited")]
        self.seen.update(transitions=int(sum(audited)), iterations=1)
        if time.monotonic() >= self._next_report:
            self._next_report += 30
            print(self.counts(), flush=True)
        if time.monotonic() >= self._until:
            context.stop("time is up")


def train_audited(cluster: Any, minutes: float, pause_s: float, rng: random.Random, record: Path) -> Recorder:
    """Trains decentralized ranks whose learners audit every chunk, while nodes join and leave."""
    changes, stop = NodeChanges(cluster, rng), threading.Event()
    watching = Watching(time.monotonic() + 60 * minutes, changes)
    recorder = Recorder(record, 5.0, watching.counts)

    def change() -> None:
        watching.has_begun.wait()
        changes.every(pause_s, stop)

    thread = threading.Thread(target=change, daemon=True)
    thread.start()
    config = AuditedConfig(
        plugin=("soak.audited",),
        env_id="soak.audited:AuditedEnv",
        num_nodes=NUM_NODES,
        num_learners=NUM_NODES[1],
        learners="decentralized",
        sync_fraction=1.0,
        workers_per_node=0,
        num_envs=24,
        num_steps=64,
        num_epochs=1,
        checkpoint_interval_s=1.0,
        total_steps=10**9,
        eval_episodes=0,
        run_dir=record / f"run-{time.time_ns()}",
    )
    try:
        rayvec.train(config, callbacks=[watching])
    finally:
        stop.set()
        watching.has_begun.set()
        thread.join()
        changes.close()
        recorder.close()
        print(watching.counts())
    return recorder
