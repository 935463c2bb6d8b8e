"""States of environments: what an episode needs to continue in another process, or in a run that is resumed.

The outermost layer of an environment that has both ``get_state()`` and ``set_state(state)`` answers for all that it
wraps. Of the wrappers around it, and of all layers within :class:`SaveState`, the attributes are saved.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers.utils import RunningMeanStd

from rayvec.env_server import form_of

__all__ = ["SaveState", "set_state", "state_of"]

_ARGUMENTS = {"_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs"}
_LIBRARIES = {"gymnasium", "mujoco", "pygame"}
"""Their other objects, such as a renderer or a model, are made by the constructor and do not change."""


class SaveState(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Gives an environment the methods ``get_state`` and ``set_state``, so that episodes continue where it moves.

    It saves the attributes of the environment and of the wrappers within: numbers, strings, arrays, lists, tuples and
    dicts of these, NumPy's generators, and the data of MuJoCo. It takes attributes of classes of Gymnasium, spaces and
    functions for constants.

    Args:
        env: The environment.
    """

    def get_state(self) -> list[dict[str, Any]]:
        """Returns the attributes of each layer.

        Raises:
            TypeError: One of them is something else. The environment must have both methods of its own then.
        """
        return [_attributes_of(layer) for layer in _layers(self.env)]

    def set_state(self, state: list[dict[str, Any]]) -> None:
        """Restores the attributes of each layer."""
        for layer, attributes in zip(_layers(self.env), state, strict=True):
            _set_attributes(layer, attributes)


def state_of(env: Any) -> Any:
    """Returns the state of an environment with its wrappers; None if no layer has both methods.

    Raises:
        TypeError: A wrapper has attributes that can't be saved.
    """
    wrappers, saver = _divided(env)
    if saver is None:
        return None
    return deepcopy(([_attributes_of(layer) for layer in wrappers], saver.get_state()))


def set_state(env: Any, state: Any) -> None:
    """Puts an environment with its wrappers into a state that :func:`state_of` has returned."""
    wrappers, saver = _divided(env)
    attributes, of_saver = deepcopy(state)
    saver.set_state(of_saver)
    for layer, own in zip(wrappers, attributes, strict=True):
        _set_attributes(layer, own)


def _layers(env: Any) -> Iterator[Any]:
    """Yields an environment and all that it wraps, the outermost layer first."""
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
    yield env


def _divided(env: Any) -> tuple[list[Any], Any]:
    """Returns the wrappers around the layer that has both methods, and this layer; None if there is none."""
    wrappers: list[Any] = []
    for layer in _layers(env):
        owner = type(layer) if isinstance(layer, gymnasium.Wrapper) else layer  # a wrapper may forward attributes
        if hasattr(owner, "get_state") and hasattr(owner, "set_state"):
            return wrappers, layer
        wrappers.append(layer)
    return wrappers, None


def _attributes_of(layer: Any) -> dict[str, Any]:
    """Returns the attributes of a layer that may change, without what it wraps."""
    found = {}
    for name, value in vars(layer).items():
        if name in _ARGUMENTS or _is_constant(value):
            continue
        found[name] = plain = _plain(value)
        try:
            form_of(plain, [])
        except TypeError:
            raise TypeError(
                f"The state of {type(layer).__name__} can't be saved: its attribute {name!r} holds a "
                f"{type(value).__name__}. Let the environment have get_state() and set_state(state)."
            ) from None
    return found


def _is_constant(value: Any) -> bool:
    """Whether an attribute is taken for what the constructor has made for good."""
    if isinstance(value, RunningMeanStd) or _is_mujoco_data(value):
        return False
    is_code = isinstance(value, type) or inspect.isroutine(value)
    is_made = isinstance(value, gymnasium.Env | gymnasium.Space | EnvSpec)
    return is_code or is_made or type(value).__module__.partition(".")[0] in _LIBRARIES


def _is_mujoco_data(value: Any) -> bool:
    return type(value).__name__ == "MjData"


def _plain(value: Any) -> Any:
    """Returns what an attribute is saved as."""
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, RunningMeanStd):
        return vars(value)
    if isinstance(value, deque):
        return list(value)
    if _is_mujoco_data(value):
        parts = {name: getattr(value, name) for name in dir(value) if not name.startswith("_")}
        return {name: part for name, part in parts.items() if isinstance(part, np.ndarray | float | bool)}
    return value


def _set_attributes(layer: Any, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        present = vars(layer).get(name)
        if isinstance(value, dict) and "bit_generator" in value:
            generator = np.random.Generator(getattr(np.random, value["bit_generator"])())
            generator.bit_generator.state = value
            setattr(layer, name, generator)
        elif isinstance(present, RunningMeanStd):
            vars(present).update(value)
        elif isinstance(present, deque):
            setattr(layer, name, deque(value, present.maxlen))
        elif _is_mujoco_data(present):
            _set_mujoco_data(present, value)
        else:
            setattr(layer, name, value)


def _set_mujoco_data(data: Any, parts: dict[str, Any]) -> None:
    """Restores the data of MuJoCo, but what the next step computes: lists of contacts, whose lengths change."""
    for name, part in parts.items():
        if not isinstance(part, np.ndarray):
            setattr(data, name, part)
        elif (array := getattr(data, name)).shape == part.shape:
            array[...] = part
