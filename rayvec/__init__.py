"""Gymnasium environments on every core of a Ray cluster, and learners that train on what they produce.

The names below are imported when they are first used: a worker process that only steps environments
loads neither torch nor Ray, and a learner loads no Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayvec import errors as errors
    from rayvec.collector import Collector as Collector
    from rayvec.config import IMPALAConfig as IMPALAConfig
    from rayvec.config import PPOConfig as PPOConfig
    from rayvec.config import SACConfig as SACConfig
    from rayvec.config import TrainConfig as TrainConfig
    from rayvec.parallel.learner_group import LearnerGroup as LearnerGroup
    from rayvec.policies import Policy as Policy
    from rayvec.train import TrainResult as TrainResult
    from rayvec.train import resume as resume
    from rayvec.train import train as train
    from rayvec.types import Batch as Batch
    from rayvec.types import Chunk as Chunk
    from rayvec.types import StepBatch as StepBatch
    from rayvec.vector import RayVecEnv as RayVecEnv
    from rayvec.vector import make_vec as make_vec

__version__ = "0.1.0"

_HOMES = {
    "Batch": "rayvec.types",
    "Chunk": "rayvec.types",
    "Collector": "rayvec.collector",
    "LearnerGroup": "rayvec.parallel.learner_group",
    "IMPALAConfig": "rayvec.config",
    "PPOConfig": "rayvec.config",
    "SACConfig": "rayvec.config",
    "Policy": "rayvec.policies",
    "RayVecEnv": "rayvec.vector",
    "StepBatch": "rayvec.types",
    "TrainConfig": "rayvec.config",
    "TrainResult": "rayvec.train",
    "make_vec": "rayvec.vector",
    "resume": "rayvec.train",
    "train": "rayvec.train",
}
"""Where each public name is defined; `errors` is a module."""

__all__ = ["__version__", "errors", *_HOMES]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("rayvec.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'rayvec' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
