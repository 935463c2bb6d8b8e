"""A step of the optimizer as one compiled graph, from the rows of a minibatch to the changed parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad

from rayvec.data import Tree, tree_leaves, tree_map
from rayvec.learners.adam import FlatOptimizer
from rayvec.learners.base import FlatModule
from rayvec.learners.compiling import Compiled, CUDAGraph, GraphPool, can_capture

__all__ = ["CompiledStep", "Loss"]

Loss = Callable[..., tuple[Tensor, Tensor]]
"""From a function that calls the module, the fields of an update, and the rows of a minibatch, to a minibatch's loss, a
scalar, and its statistics without a graph, ``float64 [S]``."""

_CHEAP_TANH: dict[str, Any] = {"cpp.use_decompose_tanh": True}
"""On a CPU tanh as ``2 / (1 + exp(-2 x)) - 1``, right to 1e-7: a tenth to a sixth less time with two layers of 64."""

_MOST_PADDING = 20  # on CUDA one row in so many is padding at most


class CompiledStep:
    """Differentiates a loss by all parameters of a module, clips the gradient, and lets an optimizer step.

    On one rank that is one graph. On several ranks the graph ends with the gradient, which the ranks then add up.
    Nothing is read back: where a gradient is not finite, ``optimizer.failed`` becomes 1. Parameters and gradients are
    one flat vector each, so that torch dispatches nothing layer by layer. One graph serves minibatches of all lengths.
    On CUDA the graph is captured for each length, and launched as a whole; there minibatches are padded to few lengths.

    Args:
        module: What the loss calls.
        loss: See `Loss`. It is a sum over rows, in which a row that the weights multiply by 0 does not count.
        optimizer: Of the flat parameters, in the order of ``module.parameters()``.
        max_grad_norm: Largest norm of a gradient.
        num_statistics: S.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        optimizer: FlatOptimizer,
        max_grad_norm: float,
        num_statistics: int,
    ) -> None:
        self._module, self._loss, self._optimizer = FlatModule(module), loss, optimizer
        self._max_grad_norm, self._num_statistics = max_grad_norm, num_statistics
        self._changed = optimizer.tensors
        self._rate = self._changed[0].new_zeros(1)
        self._fields: Tree = ()
        self._step = Compiled(self._compute_step, any_shapes=True, **_CHEAP_TANH)
        self._gradient = Compiled(self._compute_gradient, any_shapes=True, **_CHEAP_TANH)
        self._captured: dict[tuple[Any, ...], CUDAGraph] = {}
        self._pool = GraphPool()
        self._is_warm = False

    def begin(self, fields: Tree) -> None:
        """Begins an update at the optimizer's present step size.

        Args:
            fields: What minibatches index: tree of tensors.
        """
        self._rate.fill_(self._optimizer.param_groups[0]["lr"])
        if not self._is_captured:
            self._fields = tree_map(_two_rows, fields)
        elif not _copied(fields, self._fields):  # a captured graph reads the same memory at every launch
            self._fields = tree_map(torch.clone, fields)
            self._captured.clear()
            self._pool = GraphPool()

    def step(self, weight: Tensor, *rows: Tensor) -> Tensor:
        """Takes a step.

        Args:
            weight: Of each row in the loss, ``[B]``. It may be given zeros at its end.
            rows: What else the loss reads of the minibatch, each of one dimension. Their last elements may be repeated.

        Returns:
            The statistics, and then the norm of the gradient before clipping, ``float64 [S + 1]``.
        """
        with torch.no_grad():
            statistics: Tensor = self._call(self._step, (self._changed, self._rate, self._fields), weight, *rows)
        return statistics

    def gradient(self, weight: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradient ``[P]`` of some rows' loss, and their statistics, ``float64 [S]``.

        Args:
            weight: As in `step`; B may be 0.
            rows: As in `step`.
        """
        if not len(weight):
            none = self._rate.new_zeros(self._num_statistics, dtype=torch.float64)
            return torch.zeros_like(self._changed[0]), none
        with torch.no_grad():
            gradient, statistics = self._call(self._gradient, (self._changed[0], self._fields), weight, *rows)
        return gradient, statistics

    @property
    def _is_captured(self) -> bool:
        return can_capture(self._rate.device)

    def _call(self, graph: Compiled, state: Any, *rows: Tensor) -> Any:
        weight, *others = rows
        rows = (self._padded(weight, 0.0), *(self._padded(each, each[-1] if len(each) else 0) for each in others))
        self._warm_up(*rows)
        if not self._is_captured:
            return graph(state, *rows)
        key = (graph, *map(len, rows))
        if key not in self._captured:
            self._captured[key] = CUDAGraph(graph, self._pool)
        return self._captured[key](state, *rows)

    def _warm_up(self, *rows: Tensor) -> None:
        """Once, fills caches, such as tables of a distribution, outside of the graph, and says which lengths vary."""
        if self._is_warm:
            return
        self._compute_gradient((self._changed[0], self._fields), *rows)
        for each in (*tree_leaves(self._fields), *rows):
            torch._dynamo.maybe_mark_dynamic(each, 0)
        self._is_warm = True

    def _padded(self, rows: Tensor, value: Tensor | float) -> Tensor:
        """Returns rows and, after them, `value`: two rows at least, and on CUDA one of a few lengths."""
        length = max(2, len(rows))
        if self._is_captured:
            quantum = max(1, length // _MOST_PADDING)
            length = quantum * -(-length // quantum)
        if len(rows) == length:
            return rows
        padded = rows.new_empty(length)
        padded[: len(rows)], padded[len(rows) :] = rows, value
        return padded

    def _compute_step(self, state: Any, *rows: Tensor) -> Tensor:
        """Returns the statistics and then the norm."""
        changed, rate, fields = state
        gradient, statistics = self._compute_gradient((changed[0], fields), *rows)
        norm = (gradient * gradient).sum().sqrt().reshape(1)
        clipped = gradient * (self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        self._optimizer.step_in_graph(changed, clipped, norm, rate)
        return torch.cat([statistics, norm.to(statistics)])

    def _compute_gradient(self, state: Any, weight: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradient, and the statistics."""
        flat, fields = state

        def loss(flat: Tensor) -> tuple[Tensor, Tensor]:
            return self._loss(functools.partial(self._module, flat), fields, weight, *rows)

        gradient, statistics = grad(loss, has_aux=True)(flat)
        return gradient, statistics


def _two_rows(field: Tensor) -> Tensor:
    """Returns a field with two rows at least: for fewer, torch would compile another graph."""
    if len(field) > 1:
        return field
    return torch.cat([field, field.new_zeros(2 - len(field), *field.shape[1:])])


def _copied(fields: Tree, into: Tree) -> bool:
    """Copies fields to the front of others; False if these are none, or too short."""
    pairs = list(zip(tree_leaves(fields), tree_leaves(into), strict=False))
    if not list(tree_leaves(into)) or any(len(new) > len(old) for new, old in pairs):
        return False
    for new, old in pairs:
        old[: len(new)].copy_(new)
    return True
