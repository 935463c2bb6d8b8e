"""Gymnasium environments on every core of a Ray cluster, and learners that train on what they produce.

The names below are imported when they are first used: a worker process that only steps environments
loads neither torch nor Ray, and a learner loads no Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayvec import errors as errors, wrappers as wrappers
    from rayvec.collect.collector import Collector as Collector
    from rayvec.collect.recording import record as record
    from rayvec.config import (
        IMPALAConfig as IMPALAConfig,
        PPOConfig as PPOConfig,
        SACConfig as SACConfig,
        TrainConfig as TrainConfig,
    )
    from rayvec.data import Batch as Batch, Chunk as Chunk, StepBatch as StepBatch
    from rayvec.distributed.learner_group import LearnerGroup as LearnerGroup
    from rayvec.policies.policy import Policy as Policy
    from rayvec.servers.env_servers import EnvServers as EnvServers
    from rayvec.training.agent import Agent as Agent, load as load
    from rayvec.training.callbacks import (
        BestModel as BestModel,
        CheckpointHistory as CheckpointHistory,
        RunContext as RunContext,
        StopAtReturn as StopAtReturn,
        TrainResult as TrainResult,
    )
    from rayvec.training.loop import resume as resume, train as train
    from rayvec.vector.make_vec import make_vec as make_vec
    from rayvec.vector.ray_vec_env import RayVecEnv as RayVecEnv

__version__ = "0.1.0"

_HOMES = {
    "Agent": "rayvec.training.agent",
    "Batch": "rayvec.data",
    "BestModel": "rayvec.training.callbacks",
    "CheckpointHistory": "rayvec.training.callbacks",
    "RunContext": "rayvec.training.callbacks",
    "StopAtReturn": "rayvec.training.callbacks",
    "Chunk": "rayvec.data",
    "Collector": "rayvec.collect.collector",
    "EnvServers": "rayvec.servers.env_servers",
    "LearnerGroup": "rayvec.distributed.learner_group",
    "IMPALAConfig": "rayvec.config",
    "PPOConfig": "rayvec.config",
    "SACConfig": "rayvec.config",
    "Policy": "rayvec.policies.policy",
    "RayVecEnv": "rayvec.vector.ray_vec_env",
    "StepBatch": "rayvec.data",
    "TrainConfig": "rayvec.config",
    "TrainResult": "rayvec.training.callbacks",
    "load": "rayvec.training.agent",
    "record": "rayvec.collect.recording",
    "make_vec": "rayvec.vector.make_vec",
    "resume": "rayvec.training.loop",
    "train": "rayvec.training.loop",
}
"""Where each public name is defined."""
_MODULES = ("errors", "stable_baselines3", "tianshou", "wrappers")
"""Modules of which each is imported when its name is first used."""

__all__ = ["__version__", "errors", "wrappers", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"rayvec.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'rayvec' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
