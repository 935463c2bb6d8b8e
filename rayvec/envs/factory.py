"""How environments are made: in the process that steps them, each with its own seed."""

from __future__ import annotations

import contextlib
import inspect
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from numbers import Integral
from pathlib import Path
from typing import Any, cast

import cloudpickle
import gymnasium
from gymnasium.envs.registration import EnvSpec, _find_spec, load_env_creator

from rayvec.envs.pickled_parts import PickledParts, carrying_sys, is_small, pickled_for_workers
from rayvec.errors import ConfigError, check_count, check_flag

__all__ = [
    "EnvFactory",
    "EnvIdError",
    "check_env",
    "check_env_fns",
    "env_seeds",
    "register_specs",
    "registered_specs",
    "spec_of",
]

_ATTRIBUTES = ("observation_space", "action_space", "metadata", "render_mode", "reset", "step")
"""What an environment must have, the spaces first."""
_INDEX = "{env_index}"
"""Stands for the index of an environment in strings of its arguments."""
_REGISTERED_AGAIN = ".*Overriding environment .* already in registry"
EnvFn = Callable[[], "gymnasium.Env[Any, Any]"]
Wrapper = Callable[["gymnasium.Env[Any, Any]"], "gymnasium.Env[Any, Any]"]


class EnvIdError(ConfigError, gymnasium.error.NameNotFound):
    """An environment id that no registered environment has."""


def env_seeds(seed: int | Sequence[int | None] | None, num_envs: int) -> list[int | None]:
    """Returns one seed for each environment: base + global index, as Gymnasium's vector environments do.

    Args:
        seed: A base, a list of `num_envs` seeds, or None for no seed at all.
        num_envs: How many.

    Raises:
        ValueError: A list of another length.
        gymnasium.error.Error: A seed in the list is no whole number.

    >>> env_seeds(10, 3), env_seeds(None, 2)
    ([10, 11, 12], [None, None])
    """
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, int | Integral):
        return [int(seed) + i for i in range(num_envs)]
    if len(seed) != num_envs:
        raise ValueError(
            f"seed lists {len(seed)} seeds for {num_envs} environments. Pass one for each of them, or one int to have "
            "consecutive seeds."
        )
    for each in cast("Sequence[Any]", seed):
        if each is not None and not isinstance(each, Integral):
            raise gymnasium.error.Error(
                f"seed has {each!r} for an environment. Pass one int, or a list with an int or None for each."
            )
    return [None if s is None else int(s) for s in seed]


def check_env(env: Any) -> gymnasium.Env[Any, Any]:
    """Returns the object that a callable of a user made; raises if it is not an environment.

    Raises:
        ConfigError: It is a class, a vector environment, one of PettingZoo, or lacks what an environment has.
    """
    if isinstance(env, gymnasium.Env) and all(hasattr(env, name) for name in _ATTRIBUTES[:2]):
        return env  # the code that uses its spaces checks them
    name = f"{type(env).__module__}.{type(env).__qualname__}".removeprefix("builtins.")
    if isinstance(env, gymnasium.vector.VectorEnv):
        got, remedy = f"{name}, a vector environment of {env.num_envs}", "Pass [make_vector_env] * n with native=True."
    elif isinstance(env, type):
        got, remedy = f"the class {env.__qualname__}", f"Return an instance: {env.__qualname__}()."
    elif hasattr(env, "possible_agents") and not isinstance(getattr(env, "action_space", None), gymnasium.Space):
        remedy = "Make its agents the rows of a vector environment, as examples/pettingzoo_agents.py does."
        got = f"{name}, a multi-agent environment"
    elif isinstance(env, gymnasium.Env):
        got, remedy = name, "Assign both spaces in the constructor of the environment."
    elif missing := [each for each in _ATTRIBUTES if not hasattr(env, each)]:
        remedy = "Return the environment from the callable; derive its class from gymnasium.Env."
        got = f"{name} without {missing[0]}"
    else:
        return cast("gymnasium.Env[Any, Any]", env)
    raise ConfigError(
        f"A callable has made {got}. It must make a gymnasium.Env with an observation_space and an action_space. "
        f"{remedy}"
    )


@dataclass(frozen=True, slots=True)
class _Wrapped:
    """Makes an environment and applies wrappers to it, in order."""

    env_fn: EnvFn
    wrappers: tuple[Wrapper, ...]

    def __call__(self) -> gymnasium.Env[Any, Any]:
        env = self.env_fn()
        for wrapper in self.wrappers:
            env = wrapper(env)
        return env


@dataclass(frozen=True, slots=True)
class _Registered:
    """Makes an environment of a spec. Other processes get the spec in a form that they understand."""

    spec: EnvSpec

    def __call__(self, **kwargs: Any) -> gymnasium.Env[Any, Any]:
        return gymnasium.make(self.spec, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Registered, (_portable(self.spec),)


@dataclass(frozen=True, slots=True)
class _Made:
    """Makes an environment by a user's class or function."""

    function: Callable[..., Any]

    def __call__(self, **kwargs: Any) -> gymnasium.Env[Any, Any]:
        return check_env(self.function(**kwargs))


@dataclass(frozen=True, slots=True)
class EnvFactory:
    """Makes environment i of N, in the process that will step it.

    The factory crosses processes by cloudpickle. It carries the environments that were registered in the process where
    it was built, so that workers know their ids, and that process's ``sys.path`` and ``sys.argv``, so that they find
    the modules that the driver finds.

    Attributes:
        env_fns: One callable for each environment, in the order of their global indices.
        spec: The spec that all environments were made from, or None.
        registered: Specs of the process where it was built.
        native: Whether each callable makes a vector environment, a native sub-batch.
        is_copy: Whether it has come from that process, so that `registered` is to be registered.
        seed: Seeds the global random generators of each worker before it makes its environments; None does not.
    """

    env_fns: tuple[EnvFn, ...]
    spec: EnvSpec | None = None
    registered: tuple[EnvSpec, ...] = ()
    native: bool = False
    is_copy: bool = False
    seed: int | None = None

    @classmethod
    def build(
        cls,
        env: str | EnvSpec | EnvFn | Sequence[EnvFn],
        num_envs: int | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        wrappers: Sequence[Wrapper] = (),
        *,
        native: bool = False,
        seed: int | None = None,
        first_id: int = 0,
    ) -> EnvFactory:
        """Builds a factory from what a user passes for `env`.

        A class or function with a parameter ``env_index`` gets the global index of each environment. In strings of
        `env_kwargs`, "{env_index}" stands for it.

        Args:
            env: An id (``"module:Id-v0"`` imports the module first), a spec, a class or function that makes an
                environment (or its name, ``"module:Class"``), or a list of one callable for each environment.
            num_envs: How many; with a list it may be left out, with one class or function it may not.
            env_kwargs: Passed to ``gymnasium.make``, or to the class or function; not allowed with a list.
            wrappers: Applied to each environment in order.
            native: Whether each callable makes a vector environment. Their number is known when they are made.
            seed: Of the workers' global random generators while they make environments.
            first_id: Global index of the first environment.

        Raises:
            EnvIdError: No environment of that id is registered.
            ConfigError: Counts that are not positive or do not agree, or an environment's module that raises.
        """
        if check_flag("native", native) and isinstance(env, str | EnvSpec):
            raise ConfigError(
                f"native=True was passed with {env!r}. It needs a list of callables that make vector environments: "
                'pass [make_vector_env] * 4, or use rayvec.make_vec(vectorization_mode="vector_entry_point").'
            )
        if env_kwargs is not None and not isinstance(env_kwargs, Mapping):
            raise ConfigError(
                f"env_kwargs is {env_kwargs!r}. It must be a dict of the arguments of each environment: "
                'env_kwargs={"name": value}.'
            )
        spec: EnvSpec | None
        env_fns: tuple[EnvFn, ...]
        if isinstance(env, str | EnvSpec) or (callable(env) and num_envs is not None and not native):
            count = check_count("num_envs", 1 if num_envs is None else num_envs)
            made_by = _named(env) if isinstance(env, str) else env
            spec = made_by if isinstance(made_by, EnvSpec) else None
            make: EnvFn = _Registered(spec) if spec else _Made(made_by)  # type: ignore[arg-type]
            env_fns = _indexed(make, spec.entry_point if spec else made_by, dict(env_kwargs or {}), first_id, count)
        else:
            spec, env_fns = None, _checked_env_fns(env, None if native else num_envs, env_kwargs)
        if wrappers:
            env_fns = tuple(_Wrapped(env_fn, _checked_wrappers(wrappers)) for env_fn in env_fns)
        return cls(env_fns, spec, registered_specs(), native, seed=seed)

    @property
    def num_envs(self) -> int:
        """How many environments there are in all; where they are native, how many sub-batches."""
        return len(self.env_fns)

    def in_parts(self, bounds: Sequence[int]) -> PickledParts:
        """Returns a pickled factory for the environments between each two consecutive bounds."""
        return PickledParts(self._pickled_parts(bounds))

    def _pickled_parts(self, bounds: Sequence[int]) -> Iterator[tuple[bytes, list[pickle.PickleBuffer]]]:
        """Yields the pickle of each part and its large arrays: the same object for equal parts in a row."""
        parts = [self.env_fns[start:stop] for start, stop in pairwise(bounds)]
        for _, equal in groupby(parts, lambda env_fns: [*map(id, env_fns)]):
            buffers: list[pickle.PickleBuffer] = []
            env_fns, *others = equal
            pickled = replace(self, env_fns=env_fns)._pickled(partial(is_small, buffers))
            yield from [(carrying_sys(pickled, buffers), buffers)] * (1 + len(others))

    def make(self, index: int) -> gymnasium.Env[Any, Any]:
        """Makes the environment with this index. A copy registers what it carries: one before may have changed that."""
        if self.is_copy:
            register_specs(self.registered)
        return self.env_fns[index]()

    def to_bytes(self) -> bytes:
        """Returns the factory by cloudpickle, functions of the main module by value, with :func:`carrying_sys`.

        Raises:
            TypeError: A function, a wrapper or an argument of an environment can't be pickled.
        """
        return carrying_sys(self._pickled())

    def _pickled(self, buffer_callback: Callable[[pickle.PickleBuffer], bool] | None = None) -> bytes:
        what = "what makes environments: their functions, wrappers and arguments"
        remedy = "Make the object inside the function, or step in this process: num_nodes=0, workers_per_node=0."
        return pickled_for_workers(replace(self, is_copy=True), what, remedy, buffer_callback)


def _indexed(make: EnvFn, made_by: Any, env_kwargs: dict[str, Any], first_id: int, count: int) -> tuple[EnvFn, ...]:
    """Returns one callable for each environment; they differ where the environment's index is asked for.

    Args:
        make: Makes an environment.
        made_by: The user's class or function, or its name, whose parameters are looked at.
        env_kwargs: Arguments for it.
        first_id: Index of the first environment.
        count: How many environments.
    """
    named = [name for name, value in env_kwargs.items() if isinstance(value, str) and _INDEX in value]
    takes_index = "env_index" not in env_kwargs and _takes_index(made_by)
    if not named and not takes_index:
        return (partial(make, **env_kwargs) if env_kwargs else make,) * count
    env_fns = []
    for index in range(first_id, first_id + count):
        own: dict[str, Any] = {name: env_kwargs[name].replace(_INDEX, str(index)) for name in named}
        env_fns.append(partial(make, **{**env_kwargs, **own, **({"env_index": index} if takes_index else {})}))
    return tuple(env_fns)


def _takes_index(made_by: Any) -> bool:
    """Whether a class or function, or the one that "module:name" names, has a parameter ``env_index``."""
    try:
        found = load_env_creator(made_by) if isinstance(made_by, str) else made_by
        return "env_index" in inspect.signature(found).parameters
    except (ValueError, TypeError, ImportError, AttributeError):  # making the environment says what is wrong
        return False


def check_env_fns(env_fns: Any) -> tuple[EnvFn, ...]:
    """Checks the `env_fns` of the adapters for other libraries. Returns one callable for each environment.

    Raises:
        ConfigError: It is no list, an empty one, or has something else in it, such as environments.
    """
    callables = tuple(env_fns) if isinstance(env_fns, Iterable) else ()
    if not callables or not all(map(callable, callables)):
        raise ConfigError(
            f"env_fns is {env_fns!r:.200}. It must be a list of callables, one for each environment, for example "
            '[lambda: gymnasium.make("CartPole-v1")] * 8.'
        )
    return callables


def _checked_env_fns(
    env: EnvFn | Sequence[EnvFn], num_envs: int | None, env_kwargs: Mapping[str, Any] | None
) -> tuple[EnvFn, ...]:
    try:
        env_fns = tuple(env)  # type: ignore[arg-type]
    except TypeError:
        env_fns = ()
    if not env_fns or not all(callable(env_fn) for env_fn in env_fns):
        raise ConfigError(
            f"env is {env!r:.200}. It must be an id, an EnvSpec, a callable (with num_envs), or a list of callables: "
            '"CartPole-v1", or [make_env] * 8.'
        )
    if num_envs is not None and num_envs != len(env_fns):
        raise ConfigError(
            f"num_envs={num_envs} was passed with a list of {len(env_fns)} callables, each of which makes one "
            "environment. Leave num_envs out, or pass [make_env] * num_envs."
        )
    if env_kwargs:
        raise ConfigError(
            f"env_kwargs={dict(env_kwargs)!r} was passed with callables. Only gymnasium.make takes it, for an id: "
            "bind them in the callable (lambda: MyEnv(**kwargs))."
        )
    return env_fns


def _checked_wrappers(wrappers: Any) -> tuple[Wrapper, ...]:
    if isinstance(wrappers, Sequence) and all(map(callable, wrappers)):
        return tuple(wrappers)
    raise ConfigError(
        f"wrappers is {wrappers!r:.200}. It must be a list of classes or functions: wrappers=[MyWrapper], or "
        "functools.partial(MyWrapper, x=1) for one with arguments."
    )


def _named(name: str) -> EnvSpec | EnvFn:
    """Returns the spec of an id, or the class or function that "module:name" names."""
    try:
        return spec_of(name)
    except EnvIdError:
        found, module = _imported(name), name.partition(":")[0]
        if callable(found):
            return cast("EnvFn", found)
        if module == name or module not in sys.modules or re.search(r"-v\d+$", name):
            raise
        raise EnvIdError(
            f"{name!r} names neither a registered id nor a class or function in {module!r}. Check the spelling, or let "
            "the module register the id when it is imported."
        ) from None


def _imported(name: str) -> Any:
    """Returns what "module:name" names in a module that has been imported; None if there is no such thing."""
    module, _, attribute = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in attribute.split("."):
        found = getattr(found, part, None)
    return found


def _portable(spec: EnvSpec) -> EnvSpec:
    """Returns a spec that other processes understand: with classes of the script, whose names only this one knows."""
    changed = copy(spec)
    for name in ("entry_point", "vector_entry_point"):
        made_by = getattr(spec, name)
        if isinstance(made_by, str) and made_by.startswith(("__main__:", "__mp_main__:")):
            setattr(changed, name, _imported(made_by) or made_by)
    return changed


def spec_of(env_id: str) -> EnvSpec:
    """Returns the spec of an id; imports the module that it names, and completes a version that it lacks.

    Raises:
        EnvIdError: No environment of that id is registered.
        ConfigError: The module raises.
    """
    try:
        return _find_spec(env_id)  # what gymnasium.make calls
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise EnvIdError(
            f"No environment {env_id!r} is registered with Gymnasium ({error}). Pass a registered id, 'module:Id-v0' "
            "with the module that registers it, or 'module:Class'. "
            + _remedy(env_id, "Check the spelling, or set PYTHONPATH to the directory of the module.")
        ) from error
    except (Exception, SystemExit) as error:
        module = env_id.partition(":")[0]
        raise ConfigError(
            f"The module {module!r}, which {env_id!r} imports, has raised {type(error).__name__}: {error}. "
            + _remedy(env_id, f"Fix the module; `python -c 'import {module}'` shows where it raises.")
        ) from error


def _remedy(env_id: str, otherwise: str) -> str:
    """Returns the remedy for an id that is not found: a hint on its form, or `otherwise`."""
    module, _, rest = env_id.partition(":")
    if not rest:
        return "Check the spelling, and name the module of a package of its own: 'ale_py:ALE/Pong-v5'."
    if module.endswith(".py") or "/" in module:
        return f"Name the module, not its file: {Path(module).stem}:{rest}, with its directory in PYTHONPATH."
    return otherwise


def registered_specs() -> tuple[EnvSpec, ...]:
    """Returns the specs of this process that can be pickled."""
    found = []
    for spec in gymnasium.registry.values():
        with contextlib.suppress(Exception):
            cloudpickle.dumps(portable := _portable(spec))
            found.append(portable)
    return tuple(found)


def register_specs(specs: Iterable[EnvSpec]) -> None:
    """Registers the specs of another process in this one; they replace this process's own with the same ids.

    Gymnasium does not warn then that a module which is imported later registers them again.
    """
    gymnasium.registry.update((spec.id, spec) for spec in specs)
    if not any(getattr(each[1], "pattern", None) == _REGISTERED_AGAIN for each in warnings.filters):
        warnings.filterwarnings("ignore", _REGISTERED_AGAIN, UserWarning)  # after it, warnings are shown once more
