"""First episodes of different lengths, so that environments do not all begin episodes in the same step."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from rayvec.errors import ConfigError

Env = gymnasium.Env[Any, Any]


class StaggeredStart(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Truncates the first episode after a number of steps that is drawn from its seed.

    Environments that all truncate after the same number of steps then do so at different times. The number is uniform
    between 1 and the time limit of the environment. Only a reset with a seed below 2^30, as training gives, is
    followed by such an episode; evaluations have larger seeds.

    Args:
        env: An environment with a time limit.

    Raises:
        ConfigError: The environment has no time limit.
    """

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        limit = env.has_wrapper_attr("_max_episode_steps") and env.get_wrapper_attr("_max_episode_steps")
        self._time_limit: Any = limit or (env.spec and env.spec.max_episode_steps)
        if not self._time_limit:
            raise ConfigError(
                f"{env.spec.id if env.spec else env} has no time limit, over which StaggeredStart spreads the first "
                "episodes. Leave StaggeredStart out, wrap the environment in gymnasium.wrappers.TimeLimit, or pass "
                "env_kwargs={'max_episode_steps': 1000}."
            )
        self._num_left = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins an episode, which is short if a seed of training is given."""
        self._num_left = 0
        if seed is not None and seed < 2**30:
            self._num_left = int(np.random.default_rng([seed, 1]).integers(1, self._time_limit, endpoint=True))
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Takes a step; truncates the episode if it was the last of a short one."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._num_left -= 1
        return obs, reward, terminated, truncated or (self._num_left == 0 and not terminated), info
