"""One native sub-batch: a vector environment that a callable made, with its results checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from numpy.typing import DTypeLike, NDArray

from rayvec.data.columns import is_mask
from rayvec.errors import ConfigError, EnvError

__all__ = ["SubBatch"]

_PER_ENV = (SyncVectorEnv, AsyncVectorEnv)
"""Vector environments of single ones, which take a seed and an attribute for each."""
_SPACES = ("observation_space", "action_space", "single_observation_space", "single_action_space")
_NEEDED = ("num_envs", "action_space", "single_observation_space", "single_action_space")
"""What an object has that is used as a vector environment without being one."""


class SubBatch:
    """A vector environment that steps as a whole, with its results checked.

    Args:
        env: What a callable returned.

    Attributes:
        env: The vector environment.
        unwrapped: It without its wrappers.
        num_envs: How many environments it has.
        mode: Its autoreset mode.
        ignores_seeds: Whether a reset does nothing with a seed.

    Raises:
        ConfigError: It is no vector environment, or has no environments or no autoreset mode.
    """

    def __init__(self, env: Any) -> None:
        *self._wrappers, base = _layers(env)
        is_envpool = any(kind.__module__.startswith("envpool.") for kind in type(base).__mro__)
        if not (isinstance(base, VectorEnv) or is_envpool or all(hasattr(base, name) for name in _NEEDED)):
            raise ConfigError(
                "With native=True, each callable makes a vector environment.",
                expected="a gymnasium.vector.VectorEnv",
                got=f"{type(env).__module__}.{type(env).__qualname__}",
                remedy="Leave native out, so that each callable makes one environment.",
            )
        self.unwrapped: Any = base
        self._base: Any = _EnvPool(base) if is_envpool else base
        if self._wrappers:
            self._wrappers[-1].env = self._base
        self.env: Any = env if self._wrappers else self._base
        self.num_envs = int(self.env.num_envs)
        if self.num_envs < 1:
            raise ConfigError(
                "A native sub-batch has environments.",
                expected="num_envs of at least 1",
                got=f"num_envs={self.num_envs} of a {type(env).__name__}",
                remedy="Make fewer sub-batches, or more environments.",
            )
        self.mode = _mode_of(self.env)
        self.ignores_seeds = is_envpool
        self.observation_space = self.env.single_observation_space
        self.action_space = self.env.single_action_space
        self.metadata = {**self.env.metadata, "autoreset_mode": self.mode}
        self.render_mode = getattr(self.env, "render_mode", None)
        self._per_env = isinstance(getattr(self._base, "unwrapped", self._base), _PER_ENV)

    def step(self, actions: Any) -> tuple[Any, NDArray[Any], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Steps all environments.

        Raises:
            EnvError: It returned something else than five arrays of the right shapes.
        """
        result = self.env.step(actions)
        if not isinstance(result, tuple) or len(result) != 5 or not isinstance(result[4], dict):
            raise _wrong("five values, the last a dict", _types(result))
        obs, rew, terminated, truncated, info = result
        self._check_masks(info)
        rew = self._vector("rewards", rew, "biuf")
        return obs, rew, self._vector("terminated", terminated, "b"), self._vector("truncated", truncated, "b"), info

    def _vector(self, name: str, value: Any, kinds: str) -> NDArray[Any]:
        array = np.asarray(value)
        if array.shape != (self.num_envs,) or array.dtype.kind not in kinds:
            expected = f"{name} of shape ({self.num_envs},) and dtype {'bool' if kinds == 'b' else 'float'}"
            raise _wrong(expected, f"shape {array.shape}, dtype {array.dtype}")
        return array

    def leaf(self, value: Any, dtype: DTypeLike, shape: tuple[int, ...], name: str = "observations") -> NDArray[Any]:
        """Returns one array of the observations.

        Raises:
            EnvError: It has another shape, or a data type that the space's can't hold.
        """
        array = np.asarray(value)
        if array.shape != (self.num_envs, *shape) or not np.can_cast(array.dtype, dtype, "same_kind"):
            expected = f"{name} of shape {(self.num_envs, *shape)} and dtype {np.dtype(dtype)}"
            raise _wrong(expected, f"shape {array.shape}, dtype {array.dtype}")
        return array

    def reset(
        self,
        seeds: Mapping[int, int | None] | None,
        options: Mapping[str, Any] | None,
        mask: NDArray[np.bool_] | None,
    ) -> tuple[Any, dict[str, Any]]:
        """Resets all environments, or those that a mask names.

        Args:
            seeds: The seed, or None, of each environment that counts, by row. A sub-batch that takes one seed gets that
                of its first environment. `seeds=None`: no seeds.
            options: Passed on.
            mask: Added to the options as ``reset_mask``.

        Raises:
            ConfigError: Seeds that are not consecutive, of a sub-batch that takes one.
        """
        kwargs: dict[str, Any] = {}
        if seeds is not None:
            kwargs["seed"] = self._seed(seeds)
        if options is not None or mask is not None:
            kwargs["options"] = {**(options or {}), **({} if mask is None else {"reset_mask": mask})}
        result = self.env.reset(**kwargs)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            raise _wrong("observations and an info dict from a reset", _types(result))
        self._check_masks(result[1])
        return result

    def _check_masks(self, info: dict[str, Any]) -> None:
        """Raises ``EnvError`` if a mask of infos has another number of rows."""
        for key, value in info.items():
            if type(value) is dict:
                self._check_masks(value)
            elif is_mask(key, info) and np.shape(value) not in ((), (self.num_envs,)):
                raise _wrong(f"a mask infos[{key!r}] of shape ({self.num_envs},)", f"shape {np.shape(value)}")

    def _seed(self, seeds: Mapping[int, int | None]) -> Any:
        """Returns what the vector environment's `reset` gets as its seed."""
        bases = {None if seed is None else seed - row for row, seed in seeds.items()}
        base = bases.pop()
        if not bases and (base is None or base >= 0):
            return base
        if not self._per_env:
            raise ConfigError(
                "A native sub-batch takes one seed, that of its first environment.",
                expected="one int, or consecutive seeds without None",
                got=f"seeds {[seeds.get(row) for row in range(self.num_envs)][:8]}",
                remedy="Pass one int to reset.",
            )
        return [seeds.get(row) for row in range(self.num_envs)]

    def call(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """Calls a method, or reads an attribute; returns a value for each environment.

        It is that of the outermost wrapper that has it, or else of the vector environment. A list, tuple or array with
        a row for each environment is one value for each. Any other value stands for all.
        """
        owner = self._owner(name)
        if owner is self._base and self._per_env and name != "render":
            return tuple(owner.call(name, *args, **kwargs))
        value = getattr(owner, name)
        if callable(value):
            value = value(*args, **kwargs)
        has_rows = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim > 0)
        return list(value) if has_rows and len(value) == self.num_envs else [value] * self.num_envs

    def set_attr(self, name: str, values: Mapping[int, Any]) -> None:
        """Sets an attribute of some environments, given by row, where `call` reads it.

        Raises:
            ConfigError: The sub-batch has one attribute for all its environments, and the values differ.
        """
        owner = self._owner(name)
        if owner is self._base and self._per_env:
            old = [None] * self.num_envs if len(values) == self.num_envs else list(owner.get_attr(name))
            owner.set_attr(name, [values.get(row, old[row]) for row in range(self.num_envs)])
            return
        first = next(iter(values.values()))
        if len(values) < self.num_envs or not all(_is_equal(value, first) for value in values.values()):
            raise ConfigError(
                "The environments of a native sub-batch share its attributes.",
                expected=f"one value of {name!r} for all {self.num_envs}",
                got="values that differ, or a value for some of them",
                remedy="Pass the same value for every environment of a sub-batch.",
            )
        setattr(owner, name, first)

    def _owner(self, name: str) -> Any:
        """Returns the outermost wrapper that has an attribute of its own, or else the vector environment.

        Spaces are those of the whole, unless each environment has its own.
        """
        if name in _SPACES and (not self._per_env or name.startswith("single_")):
            return self.env

        def has(wrapper: Any) -> bool:
            own = [kind for kind in type(wrapper).__mro__ if kind not in VectorWrapper.__mro__]
            return name in vars(wrapper) or any(name in vars(kind) for kind in own)

        return next(filter(has, self._wrappers), self._base)

    def final_obs(self, info: Mapping[str, Any], done: NDArray[np.bool_], obs: Any) -> None:
        """Checks that a step which reset environments says what they showed last.

        Raises:
            EnvError: It does not, or the observations are views of those that the reset wrote, or the last infos are no
                infos.
        """
        last: Any = info.get("final_info")
        has_rows = np.shape(last)[:1] == (self.num_envs,) and all(
            isinstance(last[row], Mapping | None) for row in np.flatnonzero(done)
        )
        if not (last is None or isinstance(last, Mapping) or has_rows):
            raise _wrong("a dict, or a dict for each environment, in info['final_info']", f"{last!r:.80}")
        final, mask = info.get("final_obs"), np.asarray(info.get("_final_obs", True), bool)
        items = list(final[done]) if isinstance(final, np.ndarray) and final.dtype.hasobject else [final]
        if any(item is None for item in items):
            raise _wrong("the last observations of episodes that ended in info['final_obs']", "none")
        if (done & ~mask).any():
            raise _wrong("info['_final_obs'] to name every episode that ended", f"{int((done & ~mask).sum())} missing")
        if any(np.may_share_memory(a, b) for item in items for a in _arrays(item) for b in _arrays(obs)):
            raise _wrong(
                "last observations in memory of their own", "views of the observations that the reset overwrites"
            )

    def close(self) -> None:
        """Closes it."""
        self.env.close()


def _layers(env: Any) -> Iterator[Any]:
    """Yields Gymnasium's vector wrappers from the outermost to the innermost, then what is wrapped."""
    while isinstance(env, VectorWrapper):
        yield env
        env = env.env
    yield env


def _is_equal(value: Any, other: Any) -> bool:
    if isinstance(value, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(value, other)
    return bool(value is other or value == other)


def _arrays(tree: Any) -> list[NDArray[Any]]:
    if isinstance(tree, Mapping):
        return [array for value in tree.values() for array in _arrays(value)]
    if isinstance(tree, tuple | list):
        return [array for value in tree for array in _arrays(value)]
    return [tree] if isinstance(tree, np.ndarray) else []


def _types(result: Any) -> str:
    name = type(result).__name__
    return f"{name} of {', '.join(type(value).__name__ for value in result)}" if isinstance(result, tuple) else name


def _wrong(expected: str, got: str) -> EnvError:
    return EnvError(
        "A native sub-batch returns a row for each of its environments.",
        expected=expected,
        got=got,
        remedy="Correct the vector environment, or its spaces.",
    )


def _mode_of(env: Any) -> AutoresetMode:
    try:
        return AutoresetMode((env.metadata or {})["autoreset_mode"])
    except (KeyError, ValueError) as error:
        raise ConfigError(
            "A native sub-batch says when it resets environments whose episode has ended.",
            expected="metadata['autoreset_mode'], a gymnasium.vector.AutoresetMode",
            got=repr((env.metadata or {}).get("autoreset_mode")),
            remedy="Set it in the metadata of the vector environment.",
        ) from error


class _EnvPool:
    """EnvPool's Gymnasium interface, where it differs from a Gymnasium vector environment.

    Seeds count only when a pool is made, a reset with a mask returns the environments that were reset, and infos have
    the indices of environments within the pool, which mean nothing outside.
    """

    _OWN_INFOS = ("env_id", "players")

    def __init__(self, env: Any) -> None:
        if env.config["batch_size"] not in (0, env.config["num_envs"]):
            raise ConfigError(
                "A native sub-batch steps as a whole.",
                expected="an EnvPool without batch_size",
                got=f"batch_size={env.config['batch_size']} of {env.config['num_envs']} environments",
                remedy="Leave batch_size out.",
            )
        self._env = env
        self.num_envs = int(env.config["num_envs"])
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, **(getattr(env, "metadata", None) or {})}
        self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        self.render_mode = getattr(env, "render_mode", None)
        self._obs: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        obs, *rest, info = self._env.step(actions)
        self._obs = obs
        return (obs, *rest, self._without_own(info))

    def reset(self, *, seed: Any = None, options: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        mask = None if options is None else options.get("reset_mask")
        if mask is None:
            self._obs, info = self._env.reset()
            return self._obs, self._without_own(info)
        rows = np.flatnonzero(mask).astype(np.int32)
        obs, info = self._env.reset(rows)
        self._obs = deepcopy(self._obs)
        for all_rows, some in zip(_arrays(self._obs), _arrays(obs), strict=True):
            all_rows[info["env_id"]] = some
        infos: dict[str, Any] = {}
        for key, value in self._without_own(info).items():
            column = np.zeros((self.num_envs, *np.shape(value)[1:]), np.asarray(value).dtype)
            column[info["env_id"]] = value
            infos |= {key: column, f"_{key}": np.array(mask)}
        return self._obs, infos

    def _without_own(self, info: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in info.items() if key not in self._OWN_INFOS}

    def close(self) -> None:
        self._env.close()
