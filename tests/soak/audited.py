"""PPO whose learner audits every chunk before it learns, as a plugin: decentralized ranks import it by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np

from rayvec import PPOConfig
from rayvec.config import dataclass
from rayvec.data import Batch
from rayvec.learners.ppo import PPOLearner
from rayvec.learners.ranks import global_range
from rayvec.training.runs import register
from soak.auditor import Auditor
from soak.witness import Act, Witness


class AuditedEnv(Witness):
    """A witness that never fails; all have index 0, and instances tell them apart."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        super().__init__(0, Path("/nonexistent"))

    def step(self, action: int) -> Any:
        return super().step(Act.STEP)


@dataclass(frozen=True, kw_only=True)
class AuditedConfig(PPOConfig):
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
