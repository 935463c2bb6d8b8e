"""States of environments: what an episode needs to continue in another process, or in a run that is resumed.

The outermost layer of an environment that has both ``get_state()`` and ``set_state(state)`` answers for all that it
wraps. Of the wrappers around it, and of all layers within :class:`SaveState`, the attributes are saved.
"""

from __future__ import annotations

import inspect
import operator
from collections import deque
from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers.utils import RunningMeanStd

from rayvec.env_server import encoded

_ARGUMENTS = {"_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs"}
_LIBRARIES = {"mujoco", "pygame"}
"""Their other objects, such as a renderer or a model, are made by the constructor and do not change."""


class SaveState(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Gives an environment the methods ``get_state`` and ``set_state``, so that episodes continue where it moves.

    It saves the attributes of the environment and of the wrappers within: numbers, strings, arrays, lists, tuples and
    dicts of these, deques, NumPy's generators, and the data of MuJoCo. It takes spaces, functions, renderers and models
    for constants.

    Args:
        env: The environment.
    """

    def get_state(self) -> list[dict[str, Any]]:
        """Returns the attributes of each layer.

        Raises:
            TypeError: One of them is something else, or shares data with another. The environment must have both
                methods of its own then.
        """
        return _attributes_of(_layers(self.env))

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
    return deepcopy((_attributes_of(wrappers), saver.get_state()))


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


def _attributes_of(layers: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns the attributes of layers that may change, without what they wrap."""
    found: list[dict[str, Any]] = []
    held: list[tuple[str, Any]] = []
    for layer in layers:
        found.append({})
        for name, value in vars(layer).items():
            if not _is_constant(layer, name, value):
                found[-1][name], parts = _saved(value)
                fault = _fault(value, found[-1][name], parts, held)
                if fault:
                    raise TypeError(
                        f"The state of {type(layer).__name__} can't be saved: its attribute {name!r} {fault}. "
                        "Let the environment have get_state() and set_state(state)."
                    )
                held += [(name, part) for part in parts]
    return found


def _is_constant(layer: Any, name: str, value: Any) -> bool:
    """Whether an attribute is taken for what the constructor has made for good."""
    if name in _ARGUMENTS or (name == "env" and isinstance(layer, gymnasium.Wrapper)):
        return True
    is_code = isinstance(value, type) or inspect.isroutine(value)
    is_made = isinstance(value, gymnasium.Space | EnvSpec) or type(value).__name__ == "MujocoRenderer"
    is_of_library = type(value).__module__.partition(".")[0] in _LIBRARIES and not _is_mujoco_data(value)
    return is_code or is_made or is_of_library


def _is_mujoco_data(value: Any) -> bool:
    return type(value).__name__ == "MjData"


def _fault(value: Any, saved: tuple[str, Any], parts: list[Any], held: list[tuple[str, Any]]) -> str:
    """Returns why an attribute would not be restored as it was, beside those that others hold; "" if it would."""
    try:
        encoded(saved, [], operator.is_)
    except TypeError:
        return f"holds a {type(value).__name__}"
    shared = [name for name, part in held if any(_is_shared(part, each) for each in parts)]
    return f"shares data with {shared[0]!r}" if shared else ""


def _is_shared(one: Any, other: Any) -> bool:
    are_arrays = isinstance(one, np.ndarray) and isinstance(other, np.ndarray)
    return np.shares_memory(one, other) if are_arrays else one is other


def _saved(value: Any) -> tuple[tuple[str, Any], list[Any]]:
    """Returns what an attribute is saved as, by its kind, and the objects that another could hold too, and change."""
    if type(value) is np.random.Generator:
        return ("generator", value.bit_generator.state), [value.bit_generator]
    if type(value) is RunningMeanStd:
        return ("statistics", vars(value)), [value]
    if type(value) is deque:
        return ("deque", (list(value), value.maxlen)), [value]
    if _is_mujoco_data(value):
        parts = {name: getattr(value, name) for name in dir(value) if not name.startswith("_")}
        plain = {name: part for name, part in parts.items() if isinstance(part, np.ndarray | float | bool)}
        return ("mujoco", plain), list(plain.values())
    return ("value", value), [value] if isinstance(value, list | dict | deque | np.ndarray) else []


def _set_attributes(layer: Any, attributes: dict[str, tuple[str, Any]]) -> None:
    for name, (kind, plain) in attributes.items():
        if kind == "mujoco":
            _set_mujoco_data(getattr(layer, name), plain)
        elif kind == "statistics":
            vars(getattr(layer, name)).update(plain)
        elif kind == "generator":
            generator = np.random.Generator(getattr(np.random, plain["bit_generator"])())
            generator.bit_generator.state = plain
            setattr(layer, name, generator)
        else:
            setattr(layer, name, deque(*plain) if kind == "deque" else plain)


def _set_mujoco_data(data: Any, parts: dict[str, Any]) -> None:
    """Restores the data of MuJoCo, but what the next step computes: lists of contacts, whose lengths change."""
    for name, part in parts.items():
        if not isinstance(part, np.ndarray):
            setattr(data, name, part)
        elif (array := getattr(data, name)).shape == part.shape:
            array[...] = part
