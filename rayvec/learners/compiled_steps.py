"""The steps of an optimizer for many minibatches as one compiled graph: a loop from their rows to the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rayvec.data import Tree, tree_leaves, tree_map
from rayvec.learners.compiling import Compiled
from rayvec.learners.gradient import Gradient
from rayvec.learners.optimizer import Adam

_MAX_PADDING = 20  # one row in so many is padding at most

_CACHED_SCAN: dict[str, Any] = {"unsafe_marked_cacheable_functions": {"torch.ops.higher_order.scan": "1"}}
"""Lets torch keep graphs with `scan` in its cache on disk. The key of the cache has the code of the loop's body."""


class CompiledSteps:
    """Differentiates the losses of minibatches, clips each gradient, and steps: one rank, on a CPU, in one call.

    Calling a graph for each step takes 1.9 times as long. Where a gradient is not finite, ``optimizer.failed`` becomes
    1 and nothing changes any more.

    Args:
        gradient: Of one minibatch.
        select: From the fields of an update, the weight of each row and the numbers of rows, to further arguments of
            the loss.
        optimizer: Of ``gradient.flat``.
        max_grad_norm: Largest norm of a gradient.
    """

    def __init__(self, gradient: Gradient, select: Callable[..., Tree], optimizer: Adam, max_grad_norm: float) -> None:
        self._gradient, self._select, self._optimizer = gradient, select, optimizer
        self._max_grad_norm = max_grad_norm
        self._compiled = Compiled(self._compute, **_CACHED_SCAN)

    def accepts(self, minibatches: Sequence[tuple[Tensor, ...]]) -> bool:
        """Whether these are several minibatches of about the same length."""
        lengths = [len(rows[0]) for rows in minibatches]
        return len(lengths) > 1 and max(lengths) * len(lengths) * _MAX_PADDING <= sum(lengths) * (_MAX_PADDING + 1)

    def __call__(self, fields: Tree, minibatches: Sequence[tuple[Tensor, ...]], lr: float) -> list[Tensor]:
        """Takes a step for each minibatch.

        Args:
            fields: What minibatches index, tree of tensors.
            minibatches: Of each, the weights of its rows, and then numbers of rows, each of one dimension.
            lr: Step size.

        Returns:
            The statistics of each, and then the norm of its gradient before clipping.
        """
        columns = list(zip(*minibatches, strict=True))
        padded = [[pad(part, max(2, *map(len, parts)), k == 0) for part in parts] for k, parts in enumerate(columns)]
        rows = [torch.stack(parts) for parts in padded]
        fields = tree_map(_two_rows, fields)
        for each in tree_leaves(fields):
            torch._dynamo.maybe_mark_dynamic(each, 0)
        for each in rows:
            torch._dynamo.maybe_mark_dynamic(each, (0, 1))
        state = *self._optimizer.tensors, self._optimizer.failed, self._gradient.flat.new_full((1,), lr)
        stats: Tensor = self._compiled(state, fields, *rows)
        return list(stats)

    def _compute(self, state: tuple[Tensor, ...], fields: Tree, *rows: Tensor) -> Tensor:
        """Returns for each minibatch its statistics and then the norm; changes the tensors of the optimizer."""
        *tensors, failed, lr = state

        def step(changed: Any, rows: Any) -> tuple[Any, Tensor]:
            *tensors, failed = changed
            gradient, stats = self._gradient.compute(tensors[0], rows[0], *self._select(fields, *rows[1:]))
            norm = (gradient * gradient).sum().sqrt().reshape(1)
            clipped = gradient * (self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            tensors, failed = self._optimizer.stepped(tuple(tensors), failed, clipped, norm, lr)
            return (*tensors, failed), torch.cat([stats, norm.to(stats)])

        after = (*tensors, failed)
        if torch.compiler.is_compiling():
            from torch._higher_order_ops.scan import scan  # older versions of torch lack it

            after, result = scan(step, after, rows)
        else:
            results = []
            for minibatch in zip(*rows, strict=True):
                after, each = step(after, minibatch)
                results.append(each)
            result = torch.stack(results)
        for old, new in zip((*tensors, failed), after, strict=True):
            old.copy_(new)
        return result  # type: ignore[no-any-return]


def rounded_length(length: int) -> int:
    """Returns one of a few lengths, at least this one and 2."""
    quantum = max(1, length // _MAX_PADDING)
    return max(2, quantum * -(-length // quantum))


def pad(part: Tensor, length: int, with_zeros: bool) -> Tensor:
    """Returns a vector of at least this length, filled up with zeros, or with its last number."""
    missing = length - len(part)
    if missing <= 0:
        return part
    filling = part[-1:] if len(part) and not with_zeros else part.new_zeros(1)
    return torch.cat([part, filling.expand(missing)])


def _two_rows(field: Tensor) -> Tensor:
    """Returns a field with two rows at least: for fewer, torch would compile another graph."""
    return field if len(field) > 1 else torch.cat([field, field.new_zeros(2 - len(field), *field.shape[1:])])
