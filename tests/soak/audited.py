"""PPO whose learner audits every chunk before it learns, as a plugin: decentralized ranks import it by name."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np

import rayvec
from rayvec.config import dataclass
from rayvec.data import Batch
from rayvec.learners.ppo import PPOLearner
from rayvec.learners.ranks import global_range
from rayvec.training.callbacks import RunContext
from rayvec.training.runs import register
from soak.auditor import Auditor
from soak.faults import NUM_NODES, NodeChanges
from soak.witness import Act, Witness


class AuditedEnv(Witness):
    """A witness that never fails; all have index 0, and instances tell them apart."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        super().__init__(0, Path("/nonexistent"))

    def step(self, action: int) -> Any:
        return super().step(Act.STEP)


@dataclass(frozen=True, kw_only=True)
class AuditedConfig(rayvec.PPOConfig):
    """PPO with an audit."""

    algorithm: ClassVar[str] = "audited"


class AuditedPPO(PPOLearner):
    """Raises AssertionError at the first transition that is wrong, and reports how many were right."""

    auditor: Auditor | None = None
    version = 0

    def update(self, batch: Batch) -> dict[str, float]:
        for chunk in batch.chunks:
            if self.auditor is None:
                self.auditor = Auditor(chunk.obs[0], np.zeros(chunk.num_envs))
                self.version = chunk.weights_version
            self.auditor.chunk(chunk, self.version)
        self.version += 1  # each update is published before the next chunk begins
        assert self.auditor is not None
        audited = global_range(self.ranks, self.auditor.seen["transitions"])[1]
        self.auditor.seen["transitions"] = 0
        return {**super().update(batch), "audited": float(audited)}


register(AuditedConfig, AuditedPPO)


class Training:
    """Decentralized ranks whose learners audit every chunk, while nodes join and leave.

    Args:
        changes: What changes the nodes.
        record: A directory for the run.
    """

    def __init__(self, changes: NodeChanges, record: Path) -> None:
        self._changes, self._record = changes, record
        self._has_begun, self._ends = threading.Event(), threading.Event()
        self._seen: Counter[str] = Counter(transitions=0, iterations=0)

    def counts(self) -> dict[str, Any]:
        """Returns what was checked and how nodes changed."""
        return {**self._seen, "faults": dict(self._changes.made)}

    def run(self, until: float, fault_every_s: float) -> None:
        """Trains until this ``time.monotonic`` time."""
        self._until = until
        thread = threading.Thread(target=self._change, args=(fault_every_s,), daemon=True)
        thread.start()
        config = AuditedConfig(
            **{"plugin": ("soak.audited",), "env_id": "soak.audited:AuditedEnv", "learners": "decentralized"},
            **{"num_nodes": NUM_NODES, "num_learners": NUM_NODES[1], "workers_per_node": 0, "num_envs": 24},
            **{"num_steps": 64, "num_epochs": 1, "sync_fraction": 1.0, "total_steps": 10**9, "eval_episodes": 0},
            checkpoint_interval_s=1.0,
            run_dir=self._record / f"run-{time.time_ns()}",
        )
        try:
            rayvec.train(config, callbacks=[self])
        finally:
            self._ends.set()
            self._has_begun.set()
            thread.join()

    def _change(self, pause_s: float) -> None:
        self._has_begun.wait()
        while not self._ends.wait(pause_s):
            self._changes.make()

    def on_iteration(self, context: RunContext) -> None:
        """Counts, and ends the run in time."""
        self._has_begun.set()
        audited = [value for name, value in (context.metrics or {}).items() if name.endswith("audited")]
        self._seen.update(transitions=int(sum(audited)), iterations=1)
        if time.monotonic() >= self._until:
            context.stop("time is up")
