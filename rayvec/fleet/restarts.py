"""Restarts: when they are allowed, the seeds that follow them, and the state of episodes that outlives a process."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data.trees import ArrayLayout
from rayvec.errors import ConfigError, check_choice, check_count, check_names

RESTARTED = "env_restarted"
"""Info key that marks a step as not executed because the environment was restarted."""


ENV_ARRAYS = {
    "rew": np.float64,
    "terminated": np.bool_,
    "truncated": np.bool_,
    "seed": np.uint64,
    "has_seed": np.bool_,
    "restarts": np.int64,
    "to_seed": np.bool_,
    "episode": np.int8,
}
"""The arrays with one value for each environment. The results come first. The others outlive the stepping process."""

_KEPT_ARRAYS = [name for name in ENV_ARRAYS if name not in ("rew", "terminated", "truncated")]


RESTARTS_OF_A_NODE = 1 << 20
"""How often environments of a lost node count as restarted: more often than they were restarted on the node."""


_MOST_RESTARTS = 5


_WINDOW_S = 60.0


class EpisodeState(IntEnum):
    """Where an environment is in its episode."""

    NEW = 0
    """The environment has never been reset."""
    RUNNING = 1
    """An episode has begun and has not ended."""
    ENDED = 2
    """The episode has ended. A reset begins the next one."""
    CUT = 3
    """A fault interrupted the episode. The next step reports that it is truncated."""


def restart_seed(seed: int | None, env_id: int, restart: int) -> int | None:
    """Returns the seed of a restarted environment, or None if the environment never had a seed.

    >>> restart_seed(7, env_id=3, restart=1) == restart_seed(7, env_id=3, restart=1)
    True
    """
    if seed is None:
        return None
    return int(np.random.SeedSequence([seed, env_id, restart]).generate_state(1)[0])


class RestartBudget:
    """Allows five restarts within a minute for each key. More restarts count as a crash loop.

    Time spent waiting for a hung or starting worker does not count toward the minute. Otherwise a failure that takes
    longer than 12 s to detect could repeat without limit.
    """

    def __init__(self) -> None:
        self._times = defaultdict[int, list[float]](list)
        self._hung_s = defaultdict[int, float](float)

    def spend(self, key: int, hung_s: float = 0.0) -> bool:
        """Records a restart and returns whether it is allowed.

        Args:
            key: Identifies the environment or worker.
            hung_s: Seconds that the pool waited before it declared a hang, or that the worker had spent starting.
        """
        self._hung_s[key] += hung_s
        now = time.monotonic() - self._hung_s[key]
        self._times[key] = [*(then for then in self._times[key] if now - then <= _WINDOW_S), now]
        return len(self._times[key]) <= _MOST_RESTARTS

    @staticmethod
    def rule() -> str:
        """Returns the rule as text for errors."""
        return f"at most {_MOST_RESTARTS} restarts within {_WINDOW_S:.0f} s"


def own_arrays(layout: ArrayLayout, num_envs: int) -> dict[str, Any]:
    """Allocates ``obs`` and the arrays of `ENV_ARRAYS` in this process."""
    arrays: dict[str, Any] = {name: np.zeros(num_envs, dtype) for name, dtype in ENV_ARRAYS.items()}
    return {**arrays, "obs": layout.empty((num_envs,))}


def store_seeds(arrays: Mapping[str, NDArray[Any]], rows: NDArray[np.int64], seeds: Sequence[int | None]) -> None:
    """Stores the seeds of a requested reset in arrays that outlive the process that steps the environments."""
    for row, seed in zip(rows.tolist(), seeds, strict=True):
        if seed is not None:
            arrays["seed"][row], arrays["has_seed"][row] = seed % (1 << 64), True
            arrays["restarts"][row], arrays["to_seed"][row] = 0, False


def count_restarts(arrays: Mapping[str, NDArray[Any]], rows: Any, count: int = 1) -> None:
    """Counts that environments were restarted: their next reset has a seed of its own, see :func:`seed_of`."""
    arrays["restarts"][rows] += count
    arrays["to_seed"][rows] = True


def seed_of(arrays: Mapping[str, NDArray[Any]], row: int, env_id: int) -> int | None:
    """Returns the last seed of an environment: that of its last restart after :func:`store_seeds`, or the stored one.

    It is None for an environment that was never given a seed.
    """
    seed, restarts = int(arrays["seed"][row]) if arrays["has_seed"][row] else None, int(arrays["restarts"][row])
    return restart_seed(seed, env_id, restarts) if restarts else seed


def episode_of(arrays: Mapping[str, NDArray[Any]], row: int) -> dict[str, Any]:
    """Returns the seeds and the state of the episode of an environment, for :func:`restore_episode`."""
    return {name: arrays[name][row].item() for name in _KEPT_ARRAYS}


def restore_episode(arrays: Mapping[str, NDArray[Any]], row: int, episode: Mapping[str, Any]) -> None:
    """Writes what :func:`episode_of` has returned."""
    for name, value in episode.items():
        arrays[name][row] = value


@dataclass(frozen=True, slots=True)
class EnvRules:
    """How workers treat environments: restarts of those that fail, limits of time, and what is kept and repeated.

    Attributes:
        restart: Whether a failed environment is restarted. The new seed is a function of the original seed, the
            environment id and the restart number, and the episode ends as truncated. If False, the pool raises
            the error.
        step_timeout_s: A worker that takes longer for one step counts as hung and is killed. None sets no limit.
        start_timeout_s: A worker that takes longer to make its environments, or to load a policy, counts as hung and is
            killed.
        max_episodes: After how many finished episodes an environment is closed and made again. None keeps it.
        replay_calls: Names of methods and attributes. The last call, and the last value, of each is repeated where an
            environment is made again.
        spare_envs: How many environments a worker has besides, which are reset ahead: 0 or 1.
    """

    restart: bool = False
    step_timeout_s: float | None = None
    start_timeout_s: float = 300.0
    max_episodes: int | None = None
    replay_calls: tuple[str, ...] = ()
    spare_envs: int = 0

    @classmethod
    def of(
        cls,
        on_env_error: str,
        step_timeout_s: float | None,
        start_timeout_s: float = 300.0,
        restart_env_every: int | None = None,
        replay_calls: Sequence[str] = (),
        spare_envs: int = 0,
    ) -> EnvRules:
        """Returns the rules for the arguments of a vector environment.

        Raises:
            ConfigError: `on_env_error` is unknown, or a timeout or `restart_env_every` is not positive.
        """
        check_choice("on_env_error", on_env_error, ("raise", "restart"))
        limits: tuple[tuple[str, Any, str], ...] = (
            ("step_timeout_s", step_timeout_s, "step takes; None sets no limit"),
            ("start_timeout_s", start_timeout_s, "constructor or import takes; the default is 300"),
        )
        for name, value, what in limits:
            is_time = not isinstance(value, bool) and isinstance(value, Real) and float(value) > 0
            if not is_time and not (value is None and name == "step_timeout_s"):
                raise ConfigError(
                    f"{name} is {value!r}. It must be more than 0 seconds: pass several times what the slowest {what}."
                )
        max_episodes = None if restart_env_every is None else check_count("restart_env_every", restart_env_every)
        names = check_names("replay_calls", replay_calls)
        check_choice("spare_envs", spare_envs, (0, 1))
        return cls(on_env_error == "restart", step_timeout_s, start_timeout_s, max_episodes, names, spare_envs)


DEFAULT_RULES = EnvRules()
"""Failed environments are not restarted, and a step may take any time."""
