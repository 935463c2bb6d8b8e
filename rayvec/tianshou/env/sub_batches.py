"""What the Tianshou adapter needs for native sub-batches."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from rayvec.envs.spaces import PoolSpaces
from rayvec.errors import ConfigError
from rayvec.fleet.commands import Autoreset

__all__ = ["check_not_async", "check_steps_singly", "native_attr", "pop_seed"]


def native_attr(spaces: PoolSpaces, name: str, count: int) -> list[Any]:
    """Returns, for each environment, what the spaces of native sub-batches say under a name; else nothing."""
    known = {"action_space": spaces.action, "observation_space": spaces.observation, "metadata": spaces.metadata}
    return [known[name]] * count if name in known else []


def check_not_async(wait_num: int | None, timeout: float | None) -> None:
    """Raises ``ConfigError`` if native sub-batches shall answer one by one."""
    if wait_num is not None or timeout is not None:
        raise ConfigError(
            "A native sub-batch steps as a whole.",
            expected="no wait_num and no timeout beside native=True",
            got=f"wait_num={wait_num}, timeout={timeout}",
            remedy="Leave them out, or use ordinary environments.",
        )


def pop_seed(kwargs: dict[str, Any]) -> int | None:
    """Takes the seed out of the arguments of a reset of native sub-batches, and checks the others."""
    seed: Any = kwargs.pop("seed", None)
    others = kwargs.keys() - {"options"}
    if others or isinstance(seed, bool) or not (seed is None or isinstance(seed, Integral)):
        raise ConfigError(
            "A reset of native sub-batches takes a seed, from which each environment gets its own, and options.",
            expected="seed=, a whole number or None, and options=",
            got=", ".join([*sorted(others), *([] if seed is None else [f"seed={seed!r}"])]),
            remedy="Give each environment a seed of your choice with env.seed([...]) before the reset.",
        )
    return None if seed is None else int(seed)


def check_steps_singly(spaces: PoolSpaces) -> None:
    """Raises ``ConfigError`` if native sub-batches reset within a step, where Tianshou wants to reset by itself."""
    if spaces.native_mode == Autoreset.SAME_STEP:
        raise ConfigError(
            "Tianshou resets environments by itself, after the step that ended their episode.",
            expected="native sub-batches with autoreset_mode NEXT_STEP or DISABLED, which support reset_mask",
            got="autoreset_mode SAME_STEP",
            remedy="Collect whole chunks with rayvec.tianshou.Collector, or make the sub-batches with another mode.",
        )
