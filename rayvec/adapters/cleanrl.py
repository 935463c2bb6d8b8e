"""The vector environment that CleanRL's scripts expect: the ends of episodes as Gymnasium 0.29 reported them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from rayvec.data import Tree
from rayvec.data.sub_batch_infos import is_mask, mask_of
from rayvec.errors import ConfigError
from rayvec.pools.shared_memory import index_tree
from rayvec.vector import ray_vec_env
from rayvec.vector.batching import parse_autoreset_mode

__all__ = ["RayVecEnv"]


class RayVecEnv(ray_vec_env.RayVecEnv):
    """A :class:`rayvec.RayVecEnv` in the place of ``gym.vector.SyncVectorEnv`` in a script of CleanRL.

    Environments are reset within the step that ends their episode. The infos of that step also have
    ``"final_observation"``, an object array ``[N]`` of last observations, and ``"final_info"`` is an object array
    ``[N]`` of info dicts. Both are None where no episode ended.

    Args:
        env_fns: One callable for each environment.
        **settings: Those of :class:`rayvec.RayVecEnv`, such as ``num_nodes``.

    Raises:
        ConfigError: Another autoreset mode.
    """

    def __init__(self, env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]], **settings: Any) -> None:
        if not settings.get("native"):
            _check_mode(parse_autoreset_mode(settings.setdefault("autoreset_mode", AutoresetMode.SAME_STEP)))
        super().__init__(env_fns, **settings)
        try:
            _check_mode(self.autoreset_mode)
        except ConfigError:
            self.close()
            raise

    def step_wait(
        self, timeout: float | None = None
    ) -> tuple[Tree, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Waits for :meth:`step_async`; see :meth:`rayvec.RayVecEnv.step_wait`."""
        obs, rewards, terminated, truncated, infos = super().step_wait(timeout)
        return obs, rewards, terminated, truncated, _as_before(infos, terminated | truncated)


def _check_mode(mode: AutoresetMode) -> None:
    if mode != AutoresetMode.SAME_STEP:
        raise ConfigError(
            "CleanRL's scripts expect a reset within the step that ends an episode.",
            expected="autoreset_mode='SameStep'",
            got=repr(mode.value),
            remedy="Leave autoreset_mode out, or use rayvec.RayVecEnv.",
        )


def _as_before(infos: dict[str, Any], ended: NDArray[np.bool_]) -> dict[str, Any]:
    """Returns infos with the last observations and infos of episodes as Gymnasium 0.29 had them."""
    if not ended.any():
        return {key: value for key, value in infos.items() if key.lstrip("_") not in ("final_obs", "final_info")}
    final_obs, final_info = infos.get("final_obs"), infos.get("final_info")
    last, of_last = np.full(len(ended), None, object), np.full(len(ended), None, object)
    for row in np.flatnonzero(ended).tolist():
        last[row] = index_tree(final_obs, row)
        if isinstance(final_info, Mapping):
            of_last[row] = _info_of(dict(final_info), row, len(ended))
        else:  # a native sub-batch may have one dict for each environment
            of_last[row] = {} if final_info is None else final_info[row]
    return {**infos, "final_observation": last, "_final_observation": ended, "final_info": of_last}


def _info_of(columns: dict[str, Any], row: int, count: int) -> dict[str, Any]:
    return {
        key: _info_of(value, row, count) if isinstance(value, dict) else value[row] if np.ndim(value) else value
        for key, value in columns.items()
        if not is_mask(key, columns) and mask_of(key, columns, count)[row]
    }
