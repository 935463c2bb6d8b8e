"""What an environment needs of the machine that steps it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from rayvec.errors import ConfigError

_ROUNDING = 1e-6
_OF_RAY = {"CPU", "GPU", "memory", "object_store_memory"}


@dataclass(frozen=True, slots=True)
class EnvResources:
    """What one environment needs. The environments of a worker need it as often as there are environments.

    Attributes:
        cores: Cores, for example 8 or 0.5.
        gpus: A share of a GPU, at most 1, or a whole number of GPUs.
        custom: Amounts of resources to which the nodes of a Ray cluster give names.
    """

    cores: float = 0.0
    gpus: float = 0.0
    custom: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, cores_per_env: Any, gpus_per_env: Any, resources_per_env: Any) -> EnvResources | None:
        """Returns what these arguments of a vector environment name; None if they name nothing.

        Raises:
            ConfigError: An amount is not possible.
        """
        custom = {} if resources_per_env is None else resources_per_env
        is_named = isinstance(custom, Mapping) and all(isinstance(name, str) for name in custom)
        if not is_named or not all(map(_is_amount, custom.values())) or {*custom} & _OF_RAY:
            raise ConfigError(
                f"resources_per_env is {custom!r:.200}. It must be a dict of positive amounts by the names that nodes "
                "have for them: resources_per_env={'license': 1}. Cores and GPUs are cores_per_env and gpus_per_env."
            )
        for name, amount in {"cores_per_env": cores_per_env, "gpus_per_env": gpus_per_env}.items():
            if amount is not None and (not _is_amount(amount) or (amount > 1 and amount != int(amount))):
                raise ConfigError(f"{name} is {amount!r}. It must be a share of at most 1, or a whole number.")
        resources = cls(cores_per_env or 0.0, gpus_per_env or 0.0, custom)
        return None if resources == cls() else resources

    def claim(self, num_envs: int) -> dict[str, float]:
        """Returns what so many environments of one node need, by Ray's names.

        An environment that needs a share of a GPU never gets shares of two: several GPUs are claimed whole.

        >>> EnvResources(cores=2, gpus=0.25, custom={"license": 1}).claim(3)
        {'CPU': 6, 'GPU': 0.75, 'license': 3}
        >>> EnvResources(gpus=0.4).claim(3)
        {'GPU': 2}
        """
        gpus = self.gpus * num_envs
        if self.gpus < 1 < gpus + _ROUNDING:
            gpus = math.ceil(num_envs / self._envs_per_gpu())
        amounts = {"CPU": self.cores * num_envs, "GPU": gpus}
        amounts |= {name: amount * num_envs for name, amount in self.custom.items()}
        return {name: round(amount, 4) for name, amount in amounts.items() if amount}

    def fitting(self, free: Mapping[str, float], num_envs: int) -> int:
        """Returns how many of `num_envs` environments find on a node what they need.

        Args:
            free: What the node has, by Ray's names.
            num_envs: How many environments there are.

        >>> EnvResources(gpus=0.4).fitting({"CPU": 8, "GPU": 2}, num_envs=16)
        4
        """
        return next((count for count in range(num_envs) if not self._fits(free, count + 1)), num_envs)

    def _fits(self, free: Mapping[str, float], num_envs: int) -> bool:
        return all(amount <= free.get(name, 0.0) + _ROUNDING for name, amount in self.claim(num_envs).items())

    def gpus_of(self, env: int, ids: Sequence[str]) -> list[str]:
        """Returns the GPUs that an environment sees.

        Args:
            env: Its place among the environments of the node.
            ids: The GPUs that are claimed for all of these.

        >>> [EnvResources(gpus=0.5).gpus_of(env, ["4", "7"]) for env in range(4)]
        [['4'], ['4'], ['7'], ['7']]
        >>> EnvResources(gpus=2).gpus_of(1, ["0", "1", "2", "3"])
        ['2', '3']
        """
        if self.gpus < 1:
            place = env // self._envs_per_gpu() if self.gpus else len(ids)
            return list(ids[place : place + 1])
        return list(ids[env * int(self.gpus) : (env + 1) * int(self.gpus)])

    def _envs_per_gpu(self) -> int:
        return int(1 / self.gpus + _ROUNDING)


def _is_amount(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and 0 < float(value) < math.inf
