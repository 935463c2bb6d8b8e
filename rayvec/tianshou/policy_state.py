"""What a policy of Tianshou consists of: what weights hold, what its structure says, and its random generators."""

from __future__ import annotations

import hashlib
import pickle
import random
import struct
from collections.abc import Iterator, Mapping
from itertools import chain
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space
from tianshou.algorithm.algorithm_base import Policy
from tianshou.exploration import BaseNoise
from torch.nn.parameter import is_lazy

from rayvec.errors import ConfigError

__all__ = [
    "NUMBER_BYTES",
    "Number",
    "all_numbers_of",
    "digest_of",
    "fits_in_weights",
    "numbers_of",
    "pack",
    "seed_own_generators",
    "tensors_of",
    "unpack",
]

NUMBER_BYTES = 16
_KINDS: tuple[type, ...] = (bool, int, float, type(None))
_OF_TORCH = frozenset(vars(torch.nn.Module()))
"""The attributes that every module has."""
_DIGESTED_OF_TORCH = ("_modules", "_forward_hooks", "_forward_pre_hooks")
"""Those of them that decide how the module acts and are neither weights nor numbers."""
_GENERATORS = (Space, np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_BY_IDENTITY = (BaseNoise, type, FunctionType, BuiltinFunctionType, ModuleType, *_GENERATORS)
"""What counts in a digest by which object it is: its contents don't change, or change whenever it is used."""


def tensors_of(policy: Policy) -> Iterator[torch.Tensor]:
    """Yields the parameters and buffers of a policy.

    Raises:
        ConfigError: A lazy layer has not run yet.
    """
    for tensor in chain(policy.parameters(), policy.buffers()):
        if is_lazy(tensor):
            raise ConfigError(
                "A policy is sent to the workers with all its parameters.",
                expected="parameters that have their shapes",
                got="a lazy layer, which gets them when it first runs",
                remedy="Call the policy once before: policy(Batch(obs=obs, info=Batch())), with obs of env.reset().",
            )
        yield tensor.detach()


class Number(NamedTuple):
    """A plain number of a policy.

    Attributes:
        path: Path of the module, or of the noise in a module.
        holder: The ``__dict__`` of that module or noise.
        name: Name of the attribute.
        value: Its value.
    """

    path: str
    holder: dict[str, Any]
    name: str
    value: Any


def numbers_of(policy: Policy) -> Iterator[Number]:
    """Yields the plain numbers that weights hold: whole numbers of at most 64 bits, and all others."""
    return filter(fits_in_weights, all_numbers_of(policy))


def fits_in_weights(number: Number) -> bool:
    """Whether weights hold a number; they don't hold whole numbers of more than 64 bits."""
    return type(number.value) is not int or -(2**63) <= number.value < 2**63


def all_numbers_of(policy: Policy) -> Iterator[Number]:
    """Yields the plain numbers of every module and of its exploration noise.

    NumPy's numbers are among them: a schedule made with ``np.interp`` sets an epsilon to one.
    """
    for path, module in policy.named_modules():
        held = vars(module)
        noises = ((f"{path}.{name}", vars(value)) for name, value in held.items() if isinstance(value, BaseNoise))
        for place, holder in ((path, held), *noises):
            for name, value in holder.items():
                number = _plain(value)
                if type(number) in _KINDS and name != "training":
                    yield Number(place, holder, name, number)


def _plain(value: Any) -> Any:
    """Returns a number of NumPy as one of Python, and any other value as it is."""
    return value.item() if isinstance(value, np.generic) else value


def pack(number: Number) -> bytes:
    """Returns kind and value of a number, exactly, in `NUMBER_BYTES` bytes."""
    kind, value = type(number.value), 0 if number.value is None else number.value
    return struct.pack("=qd" if kind is float else "=qq", _KINDS.index(kind), value)


def unpack(packed: bytes) -> Any:
    """Returns the number of which :func:`pack` returned kind and value."""
    kind = _KINDS[struct.unpack_from("=q", packed)[0]]
    [value] = struct.unpack_from("=d" if kind is float else "=q", packed, 8)
    return None if kind is type(None) else kind(value)


def digest_of(policy: Policy) -> tuple[str, list[Any]]:
    """Digests what weights don't hold: other attributes of a policy's modules, which modules these hold, their hooks.

    The digest changes with the contents of arrays, tensors, texts, containers and objects, nested ones included.
    Functions, generators, spaces, noises and what can't be pickled count by which object they are.

    Returns:
        The digest, and the objects that count by which they are. While they are kept, no other object is taken for one.
    """
    digest, known = hashlib.blake2b(digest_size=16), list[Any]()
    sent = chain(policy.modules(), policy.parameters(), policy.buffers())
    numbers = {id(each): number for number, each in enumerate(sent)}
    sink = SimpleNamespace(write=digest.update)
    for path, module in policy.named_modules():
        for name, value in vars(module).items():
            if _is_digested(name, value):
                digest.update(f"{path}.{name}".encode())
                try:
                    _Contents(sink, numbers, known).dump(value)
                except Exception:
                    known.append(value)
                    digest.update(str(id(value)).encode())
    return digest.hexdigest(), known


def _is_digested(name: str, value: Any) -> bool:
    """Whether an attribute of a module belongs to its digest."""
    if name in _OF_TORCH:
        return name in _DIGESTED_OF_TORCH and bool(value)
    return type(_plain(value)) not in _KINDS


class _Contents(pickle.Pickler):
    """Pickles what a digest is made of.

    Args:
        sink: Where the bytes go.
        numbers: Number by identity of each module, parameter and buffer of the policy, which weights hold.
        known: Gets the objects that count by which they are.
    """

    def __init__(self, sink: Any, numbers: Mapping[int, int], known: list[Any]) -> None:
        super().__init__(sink, pickle.HIGHEST_PROTOCOL)
        self._numbers, self._known = numbers, known

    def persistent_id(self, value: Any) -> Any:
        """Returns what stands for an object; None for one that is pickled as usual."""
        if id(value) in self._numbers:
            return "of the policy", self._numbers[id(value)]
        if isinstance(value, torch.Tensor):
            flat = value.detach().cpu().reshape(-1)
            return value.dtype, value.shape, flat.view(torch.uint8).numpy().tobytes()
        if isinstance(value, _BY_IDENTITY):
            self._known.append(value)
            return id(value)
        return None


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
