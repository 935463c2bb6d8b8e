"""Steps of the optimizer as one compiled graph, from the rows of minibatches to the changed parameters."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
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

_CACHED_SCAN: dict[str, Any] = {"unsafe_marked_cacheable_functions": {"torch.ops.higher_order.scan": "1"}}
"""Lets torch keep graphs with `scan` in its cache on disk. The key of the cache has the code of the loop's body."""

_MOST_PADDING = 20  # one row in so many is padding at most


class CompiledStep:
    """Differentiates a loss by all parameters of a module, clips the gradient, and lets an optimizer step.

    On one rank that is one graph, which on a CPU takes the steps of a whole epoch. On several ranks the graph ends with
    the gradient of a minibatch, which the ranks then add up. Nothing is read back: where a gradient is not finite,
    ``optimizer.failed`` becomes 1. Parameters and gradients are one flat vector each, so that torch dispatches nothing
    layer by layer. One graph serves minibatches of all lengths, and on a CPU another one serves single minibatches. On
    CUDA a graph is one step; it is captured for each length, and launched as a whole, and minibatches are padded to few
    lengths.

    Args:
        module: What the loss calls.
        loss: See `Loss`. It is a sum over rows, in which a row that the weights multiply by 0 does not count.
        optimizer: Of the flat parameters, in the order of ``module.parameters()``.
        max_grad_norm: Largest norm of a gradient.
        num_statistics: S.
        is_joining: Whether minibatches differ little in their lengths, so that one call takes the steps of several.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        optimizer: FlatOptimizer,
        max_grad_norm: float,
        num_statistics: int,
        *,
        is_joining: bool = False,
    ) -> None:
        self._module, self._loss, self._optimizer = FlatModule(module), loss, optimizer
        self._max_grad_norm, self._num_statistics = max_grad_norm, num_statistics
        self._changed = optimizer.tensors
        self._rate = self._changed[0].new_zeros(1)
        self._fields: Tree = ()
        self._steps = Compiled(self._compute_steps, **_CHEAP_TANH, **_CACHED_SCAN)
        self._gradient = Compiled(self._compute_gradient, **_CHEAP_TANH)
        self._captured: dict[tuple[Any, ...], CUDAGraph] = {}
        self._pool = GraphPool()
        self._is_warm = False
        self._is_joining = is_joining and not self._is_captured

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

    def steps(self, minibatches: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
        """Takes a step for each of M minibatches.

        Args:
            minibatches: Of each, the weight of each row in the loss, ``[B]``, and then what else the loss reads, each
                of one dimension. Weights may be given zeros at their end, and for others the last number is repeated.

        Returns:
            The statistics of each, and then the norm of its gradient before clipping, ``float64 [S + 1]``.
        """
        state = self._changed, self._rate, self._fields
        groups = [minibatches] if self._fit_together(minibatches) else [[each] for each in minibatches]
        with torch.no_grad():
            parts = [self._call(self._steps, state, group) for group in groups]
        return list(itertools.chain(*parts))

    def gradient(self, weight: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradient ``[P]`` of some rows' loss, and their statistics, ``float64 [S]``.

        Args:
            weight: As in `steps`; B may be 0.
            rows: As in `steps`.
        """
        if not len(weight):
            none = self._rate.new_zeros(self._num_statistics, dtype=torch.float64)
            return torch.zeros_like(self._changed[0]), none
        with torch.no_grad():
            gradient, statistics = self._call(self._gradient, (self._changed[0], self._fields), [(weight, *rows)])
        return gradient, statistics

    @property
    def _is_captured(self) -> bool:
        return can_capture(self._rate.device)

    def _call(self, graph: Compiled, state: Any, minibatches: Sequence[tuple[Tensor, ...]]) -> Any:
        rows = self._joined(minibatches)
        if not self._is_warm:  # fills caches, such as tables of a distribution, outside of the graph
            self._compute_gradient((self._changed[0], self._fields), *rows)
            self._is_warm = True
        if not self._is_captured:
            return _call_for_any_length(graph, state, *rows)
        key = (graph, *(each.shape for each in rows))
        if key not in self._captured:
            self._captured[key] = CUDAGraph(functools.partial(_call_for_any_length, graph), self._pool)
        return self._captured[key](state, *rows)

    def _fit_together(self, minibatches: Sequence[tuple[Tensor, ...]]) -> bool:
        """Says whether minibatches may become one call, with little padding."""
        if not self._is_joining or not minibatches:
            return False
        columns = [list(map(len, parts)) for parts in zip(*minibatches, strict=True)]
        total, filled = sum(map(sum, columns)), sum(max(each) * len(each) for each in columns)
        return filled * _MOST_PADDING <= total * (_MOST_PADDING + 1)

    def _joined(self, minibatches: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Returns what the loss reads as matrices, a minibatch in each row."""
        weight, *others = zip(*minibatches, strict=True)
        weights = self._matrix(weight, lambda part: 0.0)
        return weights, *(self._matrix(parts, lambda part: part[-1] if len(part) else 0) for parts in others)

    def _matrix(self, parts: Sequence[Tensor], filling: Callable[[Tensor], Tensor | float]) -> Tensor:
        """Returns vectors as rows of one length, of two at least, and on CUDA of one of a few lengths."""
        length = max(2, *map(len, parts))
        if self._is_captured:
            quantum = max(1, length // _MOST_PADDING)
            length = quantum * -(-length // quantum)
        if all(len(part) == length for part in parts):
            return torch.stack(tuple(parts))
        matrix = parts[0].new_empty(len(parts), length)
        for row, part in zip(matrix, parts, strict=True):
            row[: len(part)], row[len(part) :] = part, filling(part)
        return matrix

    def _compute_steps(self, state: Any, *rows: Tensor) -> Tensor:
        """Returns for each minibatch its statistics and then the norm; changes the tensors of the optimizer."""
        changed, rate, fields = state
        result: Tensor

        def step(changed: Any, rows: Any) -> tuple[Any, Tensor]:
            gradient, statistics = self._differentiated(changed[0], fields, *rows)
            norm = (gradient * gradient).sum().sqrt().reshape(1)
            clipped = gradient * (self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            after = self._optimizer.stepped(changed, clipped, norm, rate)
            return after, torch.cat([statistics, norm.to(statistics)])

        if torch.compiler.is_compiling() and len(rows[0]) > 1:  # one graph for any number of steps
            from torch._higher_order_ops.scan import scan  # older versions of torch lack it

            after, result = scan(step, changed, rows)
        else:
            after, results = changed, []
            for minibatch in zip(*rows, strict=True):
                after, each = step(after, minibatch)
                results.append(each)
            result = torch.stack(results)
        for old, new in zip(changed, after, strict=True):
            old.copy_(new)
        return result

    def _compute_gradient(self, state: Any, *rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradient of the first minibatch, and its statistics."""
        flat, fields = state
        return self._differentiated(flat, fields, *(each[0] for each in rows))

    def _differentiated(self, flat: Tensor, fields: Tree, *rows: Tensor) -> tuple[Tensor, Tensor]:
        def loss(flat: Tensor) -> tuple[Tensor, Tensor]:
            return self._loss(functools.partial(self._module, flat), fields, *rows)

        gradient, statistics = grad(loss, has_aux=True)(flat)
        return gradient, statistics


def _call_for_any_length(graph: Compiled, state: Any, *rows: Tensor) -> Any:
    """Calls a graph with tensors that are marked, so that it serves other lengths too; copies have lost their marks."""
    for field in tree_leaves(state[-1]):
        torch._dynamo.maybe_mark_dynamic(field, 0)
    for each in rows:
        torch._dynamo.maybe_mark_dynamic(each, (0, 1))
    return graph(state, *rows)


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
