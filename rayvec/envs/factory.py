"""How environments are made: in the process that steps them, each with its own seed."""

from __future__ import annotations

import contextlib
import inspect
import pickle
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any, cast

import cloudpickle
import gymnasium
from gymnasium.envs.registration import EnvSpec, _find_spec, load_env_creator

from rayvec.envs.pickled_parts import PickledParts, carrying_sys, pickled_for_workers
from rayvec.envs.vector_envs import as_vector_env
from rayvec.errors import ConfigError, check_count, check_flag

_ATTRIBUTES = ("observation_space", "action_space", "metadata", "render_mode", "reset", "step")
"""What an environment must have."""
_INDEX = "{env_index}"
"""Stands for the index of an environment in strings of its arguments."""
_PICKLED = (
    "what makes environments: their functions, wrappers and arguments",
    "Make the object inside the function, or step in this process: num_nodes=0, workers_per_node=0.",
)
"""What is pickled, and what to do if that fails."""
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
    if seed is None or isinstance(seed, int | Integral):
        return [None if seed is None else int(seed) + i for i in range(num_envs)]
    if len(seed) != num_envs or not all(each is None or isinstance(each, Integral) for each in seed):
        kind = ValueError if len(seed) != num_envs else gymnasium.error.Error
        raise kind(
            f"seed is {seed!r:.200}. It must be one int, from which the seeds count on, or a list with an int or None "
            f"for each of the {num_envs} environments."
        )
    return [None if each is None else int(each) for each in seed]


def check_env(env: Any) -> gymnasium.Env[Any, Any]:
    """Returns the object that a callable of a user made; raises if it is not an environment.

    Raises:
        ConfigError: It is a class, a vector environment, or lacks what an environment has.
    """
    missing = [name for name in _ATTRIBUTES if not hasattr(env, name)]
    if missing or isinstance(env, type | gymnasium.vector.VectorEnv):
        got = f"the class {env.__qualname__}" if isinstance(env, type) else type(env).__qualname__
        raise ConfigError(
            f"A callable has made {got}{f' without {missing[0]}' if missing else ''}. It must return an instance of "
            "gymnasium.Env with both spaces; with native=True, a vector environment. For agents of PettingZoo see "
            "examples/pettingzoo_agents.py."
        )
    return cast("gymnasium.Env[Any, Any]", env)  # the code that uses its spaces checks them


def _made(made_by: Any, kwargs: Mapping[str, Any], wrappers: Sequence[Wrapper], native: bool) -> Any:
    """Makes an environment, or a vector environment."""
    env: Any = gymnasium.make(made_by, **kwargs) if isinstance(made_by, EnvSpec) else made_by(**kwargs)
    env = as_vector_env(env) if native else env
    for wrapper in wrappers:
        env = wrapper(env)
    return env if native else check_env(env)


@dataclass(frozen=True)
class EnvFactory:
    """Makes environment i of N, in the process that will step it.

    The factory crosses processes by cloudpickle. It carries the environments that were registered in the process where
    it was built, so that workers know their ids, and that process's ``sys.path`` and ``sys.argv``, so that they find
    the modules that the driver finds.

    Attributes:
        env_fns: One callable for each environment, in the order of their global indices.
        spec: The spec that all environments were made from, or None.
        registered: Specs of the process where it was built, which are registered where it is unpickled.
        native: Whether each callable makes a vector environment, a native sub-batch.
        seed: Seeds the global random generators of each worker before it makes its environments; None does not.
    """

    env_fns: tuple[EnvFn, ...]
    spec: EnvSpec | None = None
    registered: tuple[EnvSpec, ...] = ()
    native: bool = False
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
        spec: EnvSpec | None = None
        if isinstance(env, str | EnvSpec) or (callable(env) and num_envs is not None and not native):
            made_by = _named(env) if isinstance(env, str) else env
            spec = made_by if isinstance(made_by, EnvSpec) else None
            count = check_count("num_envs", 1 if num_envs is None else num_envs)
            arguments = _arguments(spec.entry_point if spec else made_by, env_kwargs or {}, first_id, count)
            made = [(_portable(spec) if spec else made_by, each) for each in arguments]
        else:
            made = [(env_fn, {}) for env_fn in check_env_fns(env, "env")]
            if (not native and num_envs not in (None, len(made))) or env_kwargs:
                raise ConfigError(
                    f"num_envs={num_envs} and env_kwargs={env_kwargs!r} were passed with a list of {len(made)} "
                    "callables, each of which makes one environment. Leave both out: pass [make_env] * num_envs, and "
                    "bind arguments in the callable (lambda: MyEnv(**kwargs))."
                )
        makers = tuple(partial(_made, made_by, kwargs, tuple(wrappers), native) for made_by, kwargs in made)
        return cls(makers, spec, registered_specs(), native, seed)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        register_specs(self.registered)

    @property
    def num_envs(self) -> int:
        """How many environments there are in all; where they are native, how many sub-batches."""
        return len(self.env_fns)

    @property
    def waits(self) -> bool:
        """Whether the environments say of themselves that their steps wait, as those of environment servers do."""
        makers: Any = self.env_fns  # each is partial(_made, made_by, ...)
        return any(getattr(made_by, "waits", False) for maker in makers for made_by in maker.args[:1])

    def in_parts(self, bounds: Sequence[int]) -> PickledParts:
        """Returns pickled factories for the environments between each two consecutive bounds."""
        arrays = list[pickle.PickleBuffer]()
        pickled = pickled_for_workers(self.part(bounds[0], bounds[-1]), *_PICKLED, arrays.append)
        pieces: list[bytes | memoryview] = [carrying_sys(pickle.dumps(None)), pickled, *(each.raw() for each in arrays)]
        return PickledParts(pieces, [bound - bounds[0] for bound in bounds])

    def part(self, start: int, stop: int) -> EnvFactory:
        """Returns a factory of some of the environments."""
        return replace(self, env_fns=self.env_fns[start:stop])

    def make(self, index: int) -> gymnasium.Env[Any, Any]:
        """Makes the environment with this index."""
        return self.env_fns[index]()

    def to_bytes(self) -> bytes:
        """Returns the factory by cloudpickle, functions of the main module by value, with :func:`carrying_sys`.

        Raises:
            TypeError: A function, a wrapper or an argument of an environment can't be pickled.
        """
        return carrying_sys(pickled_for_workers(self, *_PICKLED))


def _arguments(made_by: Any, env_kwargs: Mapping[str, Any], first_id: int, count: int) -> list[dict[str, Any]]:
    """Returns the arguments of each environment; they differ where the environment's index is asked for.

    Args:
        made_by: The user's class or function, or its name, whose parameters are looked at.
        env_kwargs: Arguments for it.
        first_id: Index of the first environment.
        count: How many environments.
    """
    takes_index = False
    with contextlib.suppress(ValueError, TypeError, ImportError, AttributeError):  # making it says what is wrong
        found = load_env_creator(made_by) if isinstance(made_by, str) else made_by
        takes_index = "env_index" in inspect.signature(found).parameters
    if not takes_index and not any(isinstance(value, str) and _INDEX in value for value in env_kwargs.values()):
        return [dict(env_kwargs)] * count  # which fails at once where no memory holds so many

    def of(index: int) -> dict[str, Any]:
        own = {
            name: value.replace(_INDEX, str(index)) if isinstance(value, str) else value
            for name, value in env_kwargs.items()
        }
        return {"env_index": index, **own} if takes_index else own

    return [of(first_id + index) for index in range(count)]


def check_env_fns(env_fns: Any, name: str = "env_fns") -> tuple[EnvFn, ...]:
    """Checks a list of callables. Returns one for each environment.

    Raises:
        ConfigError: It is no list, an empty one, or has something else in it, such as environments.
    """
    callables = tuple(env_fns) if isinstance(env_fns, Iterable) else ()
    if not callables or not all(map(callable, callables)):
        instead = "an id, an EnvSpec, a callable (with num_envs), or " if name == "env" else ""
        raise ConfigError(
            f"{name} is {env_fns!r:.200}. It must be {instead}a list of callables, one for each environment, for "
            'example [lambda: gymnasium.make("CartPole-v1")] * 8.'
        )
    return callables


def _named(name: str) -> EnvSpec | EnvFn:
    """Returns the spec of an id, or the class or function that "module:name" names."""
    try:
        return spec_of(name)
    except EnvIdError:
        found = _imported(name)
        if callable(found):
            return cast("EnvFn", found)
        raise


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
    module = env_id.partition(":")[0]
    try:
        return _find_spec(env_id)  # what gymnasium.make calls
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise EnvIdError(
            f"No environment {env_id!r} is registered with Gymnasium ({error}). Pass a registered id, 'module:Id-v0' "
            "with the module that registers it ('ale_py:ALE/Pong-v5'), or 'module:Class'. Check the spelling, or set "
            "PYTHONPATH to the directory of the module."
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"The module {module!r}, which {env_id!r} imports, has raised {type(error).__name__}: {error}. Fix the "
            f"module; `python -c 'import {module}'` shows where it raises."
        ) from error


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
    warnings.filterwarnings("ignore", ".*Overriding environment .* already in registry", UserWarning)
