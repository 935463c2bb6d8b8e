"""Everything that an update of a Tianshou algorithm reads and changes, except for the batch.

Tianshou's ``state_dict`` leaves out optimizers that it does not wrap (the one of a learned entropy
coefficient) and counters (gradient steps, target updates, running moments). Ranks need these to stay identical.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from tianshou.algorithm.algorithm_base import Algorithm
from tianshou.algorithm.modelfree.sac import FixedAlpha
from tianshou.utils import RunningMeanStd
from torch import Tensor, nn

__all__ = ["AlgorithmState", "Numbers", "equal", "load_algorithm", "stepped"]

Numbers = dict[tuple[str, str], Any]
"""Plain numbers, and tuples of them, by place: a part of the algorithm, and a name."""

_PLAIN = frozenset({bool, int, float, type(None), np.float64, np.float32, np.int64})
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_REQUIRES_GRAD = ("parameters", "requires_grad")
"""Key of the `requires_grad` flags of all parameters in `numbers()`."""


class AlgorithmState:
    """The state of an algorithm whose structure does not change.

    Args:
        algorithm: The algorithm; `restore` and `set_numbers` change it in place.

    Attributes:
        optimizers: All torch optimizers: those that Tianshou wraps, then those that the algorithm or its parts step
            directly.
    """

    def __init__(self, algorithm: Algorithm[Any, Any]) -> None:
        self._parameters = list(algorithm.parameters())
        self._modules = dict(algorithm.named_modules())
        found = [wrapped._optim for wrapped in algorithm._optimizers]
        for module in self._modules.values():
            found += [value for value in vars(module).values() if isinstance(value, torch.optim.Optimizer)]
        self.optimizers = list({id(optimizer): optimizer for optimizer in found}.values())

    @property
    def tensors(self) -> list[Tensor]:
        """Parameters of all modules, lagged networks included, then their buffers."""
        buffers = (buffer for module in self._modules.values() for buffer in module._buffers.values())
        return [*self._parameters, *(buffer for buffer in buffers if buffer is not None)]

    def capture(self) -> dict[str, Any]:
        """Returns the state, with the tensors themselves.

        ``"tensors"`` holds :attr:`tensors`; ``"optimizers"``, for every one of :attr:`optimizers`, its state of each
        parameter, by name.
        """
        kept = [
            [dict(optimizer.state.get(parameter, {})) for parameter in stepped(optimizer)]
            for optimizer in self.optimizers
        ]
        return {"tensors": [tensor.detach() for tensor in self.tensors], "optimizers": kept}

    def is_at(self, state: Mapping[str, Any]) -> bool:
        """Says whether tensors and optimizers still hold what was captured."""
        now = self.capture()
        mine, theirs = (chain.from_iterable(each["optimizers"]) for each in (now, state))
        return all(map(equal, now["tensors"], state["tensors"])) and all(
            one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
            for one, other in zip(mine, theirs, strict=True)
        )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Loads what was captured of another copy, in place: every tensor stays the same object."""
        with torch.no_grad():
            for tensor, value in zip(self.tensors, state["tensors"], strict=True):
                tensor.copy_(value)
            for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
                if not _copy_into(optimizer, kept):
                    entries = {place: copy.deepcopy(entry) for place, entry in enumerate(kept) if entry}
                    optimizer.load_state_dict({**optimizer.state_dict(), "state": entries})

    def numbers(self) -> Numbers:
        """Returns every plain number by its place.

        These are the numbers of every module (counters, coefficients, whether it is training), of running moments, of
        a fixed entropy coefficient, and the settings of optimizer groups (learning rates, pairs of momenta). One entry
        says which parameters require a gradient.
        """
        numbers = {
            (place, name): value
            for place, holder in self._holders()
            for name, value in holder.items()
            if _is_plain(value) and name not in _OF_TORCH
        }
        return {**numbers, _REQUIRES_GRAD: tuple(parameter.requires_grad for parameter in self._parameters)}

    def set_numbers(self, values: Mapping[tuple[str, str], Any]) -> None:
        """Sets numbers of another copy."""
        holders = dict(self._holders())
        for (place, name), value in values.items():
            if (place, name) == _REQUIRES_GRAD:
                for parameter, flag in zip(self._parameters, value, strict=True):
                    parameter.requires_grad_(flag)
            else:
                holders[place][name] = value

    def _holders(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for path, module in self._modules.items():
            yield f"module {path}", module.__dict__
        moments = self._modules[""].__dict__.get("ret_rms")
        if isinstance(moments, RunningMeanStd):
            yield "moments", vars(moments)
        alpha = self._modules[""].__dict__.get("alpha")
        if isinstance(alpha, FixedAlpha):  # it is no module, unlike a learned coefficient
            yield "alpha", vars(alpha)
        for place, optimizer in enumerate(self.optimizers):
            for group, settings in enumerate(optimizer.param_groups):
                yield f"optimizer {place}.{group}", settings


def equal(one: Any, other: Any) -> bool:
    """Whether two tensors or plain values are of one type and equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other.to(one.device))
    return type(one) is type(other) and bool(one == other)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(type(each) in _PLAIN for each in value))


def _copy_into(optimizer: torch.optim.Optimizer, kept: list[dict[str, Any]]) -> bool:
    """Copies into the tensors of the optimizer; returns whether it has them all."""
    own = [optimizer.state.get(parameter, {}) for parameter in stepped(optimizer)]
    if any(mine.keys() != theirs.keys() for mine, theirs in zip(own, kept, strict=True)):
        return False
    for mine, theirs in zip(own, kept, strict=True):
        for name, value in theirs.items():
            if isinstance(mine[name], Tensor):
                mine[name].copy_(value)
            else:
                mine[name] = value
    return True


def stepped(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the parameters that an optimizer steps."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def load_algorithm(pickled: bytes, device: torch.device) -> Any:
    """Returns what cloudpickle pickled, its tensors on a device, wherever they were.

    Without that, a tensor of a GPU could be read only by a process that has one.
    """
    return _Unpickler(pickled, device).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, device: torch.device) -> None:
        super().__init__(io.BytesIO(pickled))
        self._device = device

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):  # reads the numbers of a tensor
            return lambda data: torch.load(io.BytesIO(data), map_location=self._device, weights_only=False)
        return super().find_class(module, name)
