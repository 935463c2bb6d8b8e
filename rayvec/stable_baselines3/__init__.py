"""The adapter for Stable-Baselines3: environments of a cluster or of this machine as one of its vector environments.

The names below are imported when they are first used, because Stable-Baselines3 imports torch: a worker that steps
environments for it imports neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rayvec.errors import ConfigError

if TYPE_CHECKING:
    from rayvec.stable_baselines3.vec_env import RayVecEnv as RayVecEnv

__all__ = ["RayVecEnv"]


class MissingPackage(ConfigError, ImportError):
    """Stable-Baselines3 is not installed."""


def __getattr__(name: str) -> Any:
    if name != "RayVecEnv":
        raise AttributeError(f"module 'rayvec.stable_baselines3' has no attribute {name!r}")
    try:
        import stable_baselines3  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "stable_baselines3":
            raise
        raise MissingPackage(
            "The package stable-baselines3 is not installed. Install it: pip install stable-baselines3."
        ) from error
    from rayvec.stable_baselines3.vec_env import RayVecEnv

    globals()[name] = RayVecEnv
    return RayVecEnv


def __dir__() -> list[str]:
    return sorted(__all__)
