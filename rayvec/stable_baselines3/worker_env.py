"""The worker's half of the adapter: the methods that Stable-Baselines3 calls on single environments."""

from __future__ import annotations

from typing import Any

import gymnasium

from rayvec.data.columns import whole
from rayvec.errors import require


class WorkerEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment with the methods that the adapter calls beside Gymnasium's.

    Args:
        env: The environment.

    Raises:
        ConfigError: It is no ``gymnasium.Env``.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        require(
            isinstance(env, gymnasium.Env),
            f"A callable returned {type(env).__module__}.{type(env).__qualname__}. It must return a "
            "gymnasium.Env; convert older environments with shimmy.",
        )
        super().__init__(env)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets, with options only where there are some, as Stable-Baselines3 does."""
        result = self.env.reset(seed=seed, options=options) if options else self.env.reset(seed=seed)
        return (result[0], whole(result[1])) if type(result) is tuple and len(result) == 2 else result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Steps."""
        result = self.env.step(action)
        return (*result[:4], whole(result[4])) if type(result) is tuple and len(result) == 5 else result

    def get_env_attr(self, name: str) -> Any:
        """Returns an attribute of the outermost wrapper that has it."""
        return self.env.get_wrapper_attr(name)

    def has_env_attr(self, name: str) -> bool:
        """Returns whether the environment or a wrapper has an attribute."""
        return self.env.has_wrapper_attr(name)

    def set_env_attr(self, name: str, value: Any) -> None:
        """Sets an attribute of the outermost wrapper."""
        setattr(self.env, name, value)

    def call_env(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a method of the outermost wrapper that has it."""
        return self.env.get_wrapper_attr(name)(*args, **kwargs)

    def is_env_wrapped(self, wrapper_class: type[gymnasium.Wrapper[Any, Any, Any, Any]]) -> bool:
        """Returns whether one of the wrappers is of a class."""
        env: Any = self.env
        while isinstance(env, gymnasium.Wrapper) and not isinstance(env, wrapper_class):
            env = env.env
        return isinstance(env, wrapper_class)
