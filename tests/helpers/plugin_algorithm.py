"""A plugin: registers an algorithm that learns like PPO, under another name."""

from __future__ import annotations

from typing import ClassVar

from rayvec import PPOConfig
from rayvec.config import dataclass
from rayvec.learners.ppo import PPOLearner
from rayvec.training.runs import register


@dataclass(frozen=True, kw_only=True)
class PluggedConfig(PPOConfig):
    """PPO under another name."""

    algorithm: ClassVar[str] = "plugged"

    bonus: float = 0.5
    """A setting of its own."""


register(PluggedConfig, PPOLearner)
