"""Settings of a run: frozen dataclasses, from which the command line, the YAML file and the docs derive.

The docstring of a field is the literal below it, and its bounds are in its type (see `rayvec.config.schema`). Both
are written once: ``rayvec train`` reads them through tyro, `TrainConfig.to_yaml` writes them as comments, and the
table in the documentation is generated from them.
"""

from __future__ import annotations

from rayvec.config.base import ADJUSTABLE, CONFIGS, TrainConfig
from rayvec.config.impala import IMPALAConfig
from rayvec.config.ppo import PPOConfig
from rayvec.config.sac import SACConfig

__all__ = ["ADJUSTABLE", "CONFIGS", "IMPALAConfig", "PPOConfig", "SACConfig", "TrainConfig"]

CONFIGS.update((cls.algorithm, cls) for cls in (PPOConfig, SACConfig, IMPALAConfig))
