"""Settings of a run: frozen dataclasses, from which the command line, the YAML file and the docs derive.

Bounds are in the types, which pydantic checks, and the docstring of a field stands below it. Both are written once:
``rayvec train`` makes its options of them, `TrainConfig.to_yaml` writes them as comments, and the
table in the documentation is generated from them.
"""

from __future__ import annotations

from rayvec.config.algorithms import IMPALAConfig, PPOConfig, SACConfig
from rayvec.config.base import ADJUSTABLE, CONFIGS, TrainConfig
from rayvec.config.schema import dataclass

__all__ = ["ADJUSTABLE", "CONFIGS", "IMPALAConfig", "PPOConfig", "SACConfig", "TrainConfig", "dataclass"]

CONFIGS.update((cls.algorithm, cls) for cls in (PPOConfig, SACConfig, IMPALAConfig))
