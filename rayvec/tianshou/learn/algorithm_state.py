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

from rayvec.distributed.rank import pack, unpack

__all__ = ["AlgorithmState"]

_PLAIN = (bool, int, float, type(None), np.generic)
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}


class AlgorithmState:
    """The state of an algorithm whose structure does not change.

    Args:
        algorithm: The algorithm; `write` changes it in place.

    Attributes:
        optimizers: All torch optimizers, also those that a part of the algorithm steps directly.
    """

    def __init__(self, algorithm: Algorithm[Any, Any]) -> None:
        self._tensors = [*algorithm.parameters(), *algorithm.buffers()]
        holders = [vars(module) for module in algorithm.modules()]
        values = [value for holder in holders for value in holder.values()]
        wrapped = [each._optim for holder in holders for each in holder.get("_optimizers", ())]
        direct = [value for value in values if isinstance(value, torch.optim.Optimizer)]
        self.optimizers: list[torch.optim.Optimizer] = list(dict.fromkeys(wrapped + direct))
        self._holders = holders + [vars(value) for value in values if isinstance(value, RunningMeanStd | FixedAlpha)]

    def read(self) -> dict[str, Any]:
        """Returns the parameters of all modules, lagged networks included, buffers, optimizers, and plain numbers."""
        own = [optimizer.state_dict() for optimizer in self.optimizers]
        return {
            "packed": pack([[tensor.detach() for tensor in self._tensors], [each["state"] for each in own]]),
            "groups": [each["param_groups"] for each in own],
            "needs_grad": [tensor.requires_grad for tensor in self._tensors],
            "numbers": [
                {name: value for name, value in holder.items() if isinstance(value, _PLAIN) and name not in _OF_TORCH}
                for holder in self._holders
            ],
        }

    @torch.no_grad()
    def write(self, state: dict[str, Any]) -> None:
        """Sets what `read` returned for another copy; parameters and buffers stay the same objects."""
        tensors, states = unpack(state["packed"])
        for mine, theirs, needs_grad in zip(self._tensors, tensors, state["needs_grad"], strict=True):
            mine.copy_(theirs)
            mine.requires_grad_(needs_grad)
        for optimizer, own, groups in zip(self.optimizers, states, state["groups"], strict=True):
            optimizer.load_state_dict({"state": own, "param_groups": groups})
        for holder, numbers in zip(self._holders, state["numbers"], strict=True):
            holder.update(numbers)
