"""A single environment of a vector environment, in the form of a Tianshou worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from tianshou.env.worker import EnvWorker

if TYPE_CHECKING:
    from rayvec.tianshou.env.vector_env import RayVectorEnv

__all__ = ["RemoteEnv"]


class RemoteEnv(EnvWorker):
    """A single environment of a :class:`RayVectorEnv`, for code that uses a vector environment's workers.

    ``send`` steps at once, and ``recv`` returns the result.
    """

    # noinspection PyMissingConstructor
    def __init__(self, venv: RayVectorEnv, index: int) -> None:
        self._venv = venv
        self._index = index

    @property
    def is_closed(self) -> bool:  # type: ignore[override]
        """Whether the vector environment is closed."""
        return self._venv.is_closed

    @property
    def action_space(self) -> Any:
        """The space of its actions, always the same object, which continues its random numbers."""
        known = self._venv._action_spaces
        if self._index not in known:
            known[self._index] = self.get_env_attr("action_space")
        return known[self._index]

    def get_env_attr(self, key: str) -> Any:
        """Returns an attribute."""
        return self._venv.get_env_attr(key, self._index)[0]

    def set_env_attr(self, key: str, value: Any) -> None:
        """Sets an attribute."""
        self._venv.set_env_attr(key, value, self._index)

    def send(self, action: Any, **kwargs: Any) -> None:
        """Steps, or resets without an action; ``recv`` returns the result."""
        self.result = self.reset(**kwargs) if action is None else self._step(action)

    def _step(self, action: Any) -> Any:
        return tuple(value[0] for value in self._venv.step(np.asarray(action)[None], self._index))

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Resets."""
        obs, infos = self._venv.reset(self._index, **kwargs)
        return obs[0], infos[0]

    def render(self, **kwargs: Any) -> Any:
        """Renders."""
        return self._venv._call("render_env", id=self._index, **kwargs)[0]

    def close_env(self) -> None:
        """Does nothing: environments are closed together."""
