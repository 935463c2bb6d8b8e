"""Settings of a run: frozen dataclasses that the command line, the YAML file and the docs derive from.

A field's docstring is the literal below it, its bounds stand in its type (see `rayvec.config.schema`), and
nothing repeats either: ``rayvec train`` reads them by tyro, `TrainConfig.to_yaml` writes them as
comments, and the table in the documentation is made of them.
"""

from __future__ import annotations

from rayvec.config.base import ADJUSTABLE, CONFIGS, TrainConfig
from rayvec.config.impala import IMPALAConfig
from rayvec.config.ppo import PPOConfig
from rayvec.config.sac import SACConfig

__all__ = ["ADJUSTABLE", "CONFIGS", "IMPALAConfig", "PPOConfig", "SACConfig", "TrainConfig"]

CONFIGS.update((cls.algorithm, cls) for cls in (PPOConfig, SACConfig, IMPALAConfig))
