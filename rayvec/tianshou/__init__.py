"""Adapters for Tianshou: vector environment, collector, algorithms on several ranks, IMPALA.

The names below are imported when they are first used, because Tianshou imports torch: a worker that steps
environments for Tianshou imports neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayvec.tianshou.agents import load_policy as load_policy, save_policy as save_policy
    from rayvec.tianshou.collect.collector import (
        Collector as Collector,
        PrefetchCollectStats as PrefetchCollectStats,
    )
    from rayvec.tianshou.collect.highlevel import RayCollectorFactory as RayCollectorFactory
    from rayvec.tianshou.env.vector_env import RayVectorEnv as RayVectorEnv, RayVectorEnvType as RayVectorEnvType
    from rayvec.tianshou.learn.data_parallel import data_parallel as data_parallel
    from rayvec.tianshou.learn.impala import IMPALA as IMPALA, IMPALATrainingStats as IMPALATrainingStats
    from rayvec.tianshou.policies import TianshouPolicy as TianshouPolicy

_HOMES = {
    "Collector": "rayvec.tianshou.collect.collector",
    "IMPALA": "rayvec.tianshou.learn.impala",
    "IMPALATrainingStats": "rayvec.tianshou.learn.impala",
    "PrefetchCollectStats": "rayvec.tianshou.collect.collector",
    "RayCollectorFactory": "rayvec.tianshou.collect.highlevel",
    "RayVectorEnv": "rayvec.tianshou.env.vector_env",
    "RayVectorEnvType": "rayvec.tianshou.env.vector_env",
    "TianshouPolicy": "rayvec.tianshou.policies",
    "data_parallel": "rayvec.tianshou.learn.data_parallel",
    "load_policy": "rayvec.tianshou.agents",
    "save_policy": "rayvec.tianshou.agents",
}
"""Where each public name is defined."""

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rayvec.tianshou' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
