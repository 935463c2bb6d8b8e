"""Wrappers of Gymnasium that normalise by running statistics of their own, such as ``NormalizeObservation``."""

from __future__ import annotations

import warnings

import numpy as np

from rayvec.config import TrainConfig
from rayvec.vector.ray_vec_env import RayVecEnv

__all__ = ["forget_wrapper_statistics", "warn_of_wrapper_statistics"]

_SETTINGS = {"obs_rms": "normalize_obs", "return_rms": "normalize_reward"}
"""Attributes of such wrappers, and the settings that do the same."""


def _found(env: RayVecEnv, config: TrainConfig) -> list[str]:
    """Returns which of these attributes the environments have; none for native sub-batches."""
    if config.native is not None:
        return []
    return [name for name in _SETTINGS if all(env.call("has_wrapper_attr", name))]


def warn_of_wrapper_statistics(env: RayVecEnv, config: TrainConfig) -> None:
    """Warns where a wrapper of the environments keeps running statistics."""
    for name in _found(env, config):
        wrapper = "NormalizeObservation" if name == "obs_rms" else "NormalizeReward"
        warnings.warn(
            f"A wrapper of the environment, such as {wrapper}, keeps running statistics: each environment has its own, "
            "no checkpoint contains them, and every evaluation begins with new ones. Pass "
            f"{_SETTINGS[name]}=True and leave the wrapper out.",
            UserWarning,
            stacklevel=2,
        )


def forget_wrapper_statistics(env: RayVecEnv, config: TrainConfig) -> None:
    """Lets wrappers begin with new statistics, as those of new environments do."""
    for name in _found(env, config):
        known = env.get_attr(name)
        env.set_attr(name, [type(each)(shape=each.mean.shape, dtype=each.mean.dtype) for each in known])
        if name == "return_rms":
            env.set_attr("discounted_reward", [np.zeros_like(each) for each in env.get_attr("discounted_reward")])
