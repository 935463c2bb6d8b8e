"""What an update of a Tianshou algorithm reads and changes, except for the batch.

Tianshou's ``state_dict`` leaves out optimizers that it does not wrap (the one of a learned entropy
coefficient) and counters (gradient steps, target updates, running moments). Ranks need these to stay identical.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tianshou.algorithm.algorithm_base import Algorithm
from tianshou.algorithm.modelfree.sac import FixedAlpha
from tianshou.utils import RunningMeanStd
from torch import nn

__all__ = ["AlgorithmState", "equal"]

_PLAIN = (bool, int, float, type(None), np.generic)
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}


class AlgorithmState:
    """The state of an algorithm whose structure does not change.

    Args:
        algorithm: The algorithm; `restore` and `set_numbers` change it in place.

    Attributes:
        optimizers: All torch optimizers, also those that a part of the algorithm steps directly.
    """

    def __init__(self, algorithm: Algorithm[Any, Any]) -> None:
        self._tensors = [*algorithm.parameters(), *algorithm.buffers()]
        holders = [vars(module) for module in algorithm.modules()]
        wrapped = [each._optim for holder in holders for each in holder.get("_optimizers", ())]
        direct = [value for holder in holders for value in holder.values() if isinstance(value, torch.optim.Optimizer)]
        self.optimizers: list[torch.optim.Optimizer] = list(dict.fromkeys(wrapped + direct))
        kinds = RunningMeanStd, FixedAlpha
        self._holders = holders + [
            vars(value) for holder in holders for value in holder.values() if isinstance(value, kinds)
        ]

    def tensors(self) -> dict[str, Any]:
        """Returns parameters of all modules, lagged networks included, buffers, and the states of optimizers."""
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        return {"tensors": [tensor.detach() for tensor in self._tensors], "optimizers": states}

    def restore(self, tensors: dict[str, Any]) -> None:
        """Loads what `tensors` returned for another copy; parameters and buffers stay the same objects."""
        with torch.no_grad():
            for mine, theirs in zip(self._tensors, tensors["tensors"], strict=True):
                mine.copy_(theirs)
        for optimizer, state in zip(self.optimizers, tensors["optimizers"], strict=True):
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})

    def numbers(self) -> list[dict[str, Any]]:
        """Returns the plain numbers: counters, coefficients, moments, settings of optimizers, what is frozen."""
        plain = [
            {name: value for name, value in holder.items() if isinstance(value, _PLAIN) and name not in _OF_TORCH}
            for holder in self._holders
        ]
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        return [*plain, *settings, {str(k): tensor.requires_grad for k, tensor in enumerate(self._tensors)}]

    def set_numbers(self, numbers: list[dict[str, Any]]) -> None:
        """Sets what `numbers` returned for another copy."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        *numbers, needs_grad = numbers
        for holder, values in zip([*self._holders, *groups], numbers, strict=True):
            holder.update(values)
        for tensor, flag in zip(self._tensors, needs_grad.values(), strict=True):
            tensor.requires_grad_(flag)


def equal(one: Any, other: Any) -> bool:
    """Whether two trees of dicts, lists, tensors and plain values are equal."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other.to(one.device))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)
