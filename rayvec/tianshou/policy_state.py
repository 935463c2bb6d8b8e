"""What a policy of Tianshou consists of: tensors, which weights hold; all else, pickled; and its random generators."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import cloudpickle
import numpy as np
import torch
from gymnasium import Space
from tianshou.algorithm.algorithm_base import Policy
from tianshou.exploration import BaseNoise
from torch.nn.parameter import is_lazy

from rayvec.errors import ConfigError

__all__ = ["pickled_without_tensors", "seed_own_generators", "tensors_of"]

_GENERATORS = (Space, np.random.Generator, np.random.RandomState, random.Random, torch.Generator)


def tensors_of(policy: Policy) -> Iterator[torch.Tensor]:
    """Yields the parameters and buffers of a policy.

    Raises:
        ConfigError: A lazy layer has not run yet.
    """
    for tensor in chain(policy.parameters(), policy.buffers()):
        if is_lazy(tensor):
            raise ConfigError(
                "A lazy layer of the policy has no shapes yet: it gets them when it first runs. Call the policy once "
                "before: policy(Batch(obs=obs, info=Batch())), with obs of env.reset()."
            )
        yield tensor.detach()


def pickled_without_tensors(policy: Policy) -> bytes:
    """Returns what weights don't hold of a policy, pickled, to see whether it has changed."""
    file = io.BytesIO()
    _Pickler(file, policy).dump(policy)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves out parameters and buffers, and the states of generators, which change whenever they are used."""

    def __init__(self, file: Any, policy: Policy) -> None:
        super().__init__(file)
        self._numbers = {id(each): number for number, each in enumerate(chain(policy.parameters(), policy.buffers()))}

    def persistent_id(self, value: Any) -> Any:
        """Returns what stands for an object; None for one that is pickled as usual."""
        if isinstance(value, _GENERATORS):
            return "generator"
        return self._numbers.get(id(value))


def seed_own_generators(policy: Policy, seed: int) -> None:
    """Seeds the generators of torch, NumPy and Python, and the spaces, that are attributes of modules or noises."""
    holders = [vars(module) for module in policy.modules()]
    holders += [vars(value) for held in holders for value in held.values() if isinstance(value, BaseNoise)]
    generators = [value for held in holders for value in held.values() if isinstance(value, _GENERATORS)]
    for number, generator in enumerate(generators, 1):
        _seed(generator, seed + number)


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:
        generator.seed(seed % 2**31)
