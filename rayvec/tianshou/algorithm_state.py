"""Everything that an update of a Tianshou algorithm reads and changes, apart from the batch.

Tianshou's ``state_dict`` leaves out what it steps outside of its own optimizers (the optimizer of a learned entropy
coefficient) and counters (gradient steps, target updates, running moments). Ranks that stay identical need these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from tianshou.algorithm.algorithm_base import Algorithm
from tianshou.utils import RunningMeanStd
from torch import Tensor

__all__ = ["all_optimizers", "capture", "numbers", "restore", "set_numbers", "tensors"]

Numbers = dict[tuple[str, str], Any]
_PLAIN = (bool, int, float, type(None), np.generic)


def tensors(algorithm: Algorithm[Any, Any]) -> list[Tensor]:
    """Returns parameters and buffers, each once."""
    return [tensor.detach() for tensor in (*algorithm.parameters(), *algorithm.buffers())]


def all_optimizers(algorithm: Algorithm[Any, Any]) -> list[torch.optim.Optimizer]:
    """Returns the torch optimizers of an algorithm: those it wraps, then those that it or its parts step themselves."""
    found = [wrapped._optim for wrapped in algorithm._optimizers]
    for module in algorithm.modules():
        found += [value for value in vars(module).values() if isinstance(value, torch.optim.Optimizer)]
    return list({id(optimizer): optimizer for optimizer in found}.values())


def capture(algorithm: Algorithm[Any, Any]) -> dict[str, Any]:
    """Returns what the tensors of an algorithm hold, as the tensors themselves.

    Under ``"tensors"`` stand parameters and buffers of all modules, lagged networks included, in the order of
    :func:`tensors`; under ``"optimizers"``, for every one of :func:`all_optimizers`, what it keeps of each of its
    parameters, by name.
    """
    kept = [
        [dict(optimizer.state.get(parameter, {})) for parameter in _parameters(optimizer)]
        for optimizer in all_optimizers(algorithm)
    ]
    return {"tensors": tensors(algorithm), "optimizers": kept}


def restore(algorithm: Algorithm[Any, Any], state: Mapping[str, Any]) -> None:
    """Takes over a captured state, in place: every tensor stays the object it is."""
    with torch.no_grad():
        for tensor, value in zip(tensors(algorithm), state["tensors"], strict=True):
            tensor.copy_(value)
        for optimizer, kept in zip(all_optimizers(algorithm), state["optimizers"], strict=True):
            if not _copy_into(optimizer, kept):
                entries = {place: entry for place, entry in enumerate(kept) if entry}
                optimizer.load_state_dict({**optimizer.state_dict(), "state": entries})


def _copy_into(optimizer: torch.optim.Optimizer, kept: list[dict[str, Any]]) -> bool:
    """Copies into the tensors that the optimizer has; returns whether it has them all."""
    own = [optimizer.state.get(parameter, {}) for parameter in _parameters(optimizer)]
    if any(mine.keys() != theirs.keys() for mine, theirs in zip(own, kept, strict=True)):
        return False
    for mine, theirs in zip(own, kept, strict=True):
        for name, value in theirs.items():
            if isinstance(mine[name], Tensor):
                mine[name].copy_(value)
            else:
                mine[name] = value
    return True


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def numbers(algorithm: Algorithm[Any, Any]) -> Numbers:
    """Returns every plain number of an algorithm by where it stands.

    These are the numbers of every module (counters, coefficients, whether it is training), of running moments, and
    what the groups of optimizers say (learning rates).
    """
    return {
        (place, name): value
        for place, holder in _holders(algorithm)
        for name, value in holder.items()
        if isinstance(value, _PLAIN)
    }


def set_numbers(algorithm: Algorithm[Any, Any], values: Mapping[tuple[str, str], Any]) -> None:
    """Takes over numbers that :func:`numbers` found in another copy of the algorithm."""
    holders = dict(_holders(algorithm))
    for (place, name), value in values.items():
        holders[place][name] = value


def _holders(algorithm: Algorithm[Any, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, module in algorithm.named_modules():
        yield f"module {path}", vars(module)
        for name, value in vars(module).items():
            if isinstance(value, RunningMeanStd):
                yield f"moments {path}.{name}", vars(value)
    for place, optimizer in enumerate(all_optimizers(algorithm)):
        for group, settings in enumerate(optimizer.param_groups):
            yield f"optimizer {place}.{group}", settings
