"""The gradient of PPO's loss as one compiled graph, from a minibatch to a flat vector."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn.functional import pad

from rayvec.data import Tree, tree_leaves, tree_map
from rayvec.learners.compiling import Compiled, CUDAGraph

__all__ = ["CompiledGradient"]


class CompiledGradient:
    """Differentiates a loss by all parameters of a module at once.

    Parameters go in as one flat vector and gradients come out as one, so that nothing is dispatched layer by layer.
    Graphs have fixed shapes: minibatches are filled up with rows of weight 0, to one of a few sizes. On CUDA the graph
    of each size is captured and launched as a whole.

    Args:
        module: Called with the first of the columns.
        loss: From what `module` returns and the other columns to what each row loses, ``[B]``, and to its
            metrics, ``[M, B]``.
        num_rows: About how many rows a minibatch has on all ranks.
        capture: Whether to capture graphs on CUDA.
    """

    def __init__(
        self, module: nn.Module, loss: Callable[..., tuple[Tensor, Tensor]], num_rows: int, *, capture: bool = True
    ) -> None:
        self._module, self._loss, self._capture = module, loss, capture
        self._quantum = max(32, num_rows // 4)
        self._places = [(name, each.shape, each.numel()) for name, each in module.named_parameters()]
        self._graph: Compiled | None = None
        self._captured: dict[int, CUDAGraph] = {}

    def __call__(
        self, flat: Tensor, columns: tuple[Tree, ...], count: int, num_ranks: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradient of the rows' loss over `count`, like `flat`, and their metrics over `count`, ``[M]``.

        Args:
            flat: The parameters, ``[P]``, in the order of ``module.parameters()``; the same tensor at every call.
            columns: Trees of ``[B, ...]``; B may be 0.
            count: Rows of the minibatch on all ranks, which sums over rows are divided by.
            num_ranks: Among how many `count` rows were divided.
        """
        num_rows = len(next(tree_leaves(columns)))
        missing = self._size(num_rows, count, num_ranks) - num_rows

        def filled(column: Tensor) -> Tensor:
            if not missing:
                return column
            last = column[-1:] if num_rows else column.new_zeros(1, *column.shape[1:])
            return torch.cat([column, last.expand(missing, *column.shape[1:])])

        weight = pad(flat.new_full((num_rows,), 1 / count), (0, missing))
        arguments = ((flat,), weight, tree_map(filled, columns))
        with torch.no_grad():
            if self._graph is None:
                self._gradient(*arguments)  # what is computed once and kept, like tables of a distribution, is so now
                self._graph = Compiled(self._gradient)
            result = self._graph_for(len(weight), flat.device.type)(*arguments)
        return result[: len(flat)], result[len(flat) :]

    def _size(self, num_rows: int, count: int, num_ranks: int) -> int:
        """Returns how many rows a rank's `num_rows` of the `count` of a minibatch are filled up to.

        That is a mean share or a little more, as shares of ranks with equally many rows are; else as much as one rank
        would fill up to.
        """
        share = _eights(self._multiple(count) / num_ranks)
        if num_ranks == 1 or num_rows > share + 8:
            return self._multiple(num_rows)
        return max(share, _eights(num_rows))

    def _multiple(self, num_rows: int) -> int:
        """Returns `num_rows`, at least 1, rounded up to a quarter of a minibatch or 32 rows."""
        return self._quantum * math.ceil(max(1, num_rows) / self._quantum)

    def _graph_for(self, num_rows: int, device: str) -> Callable[..., Tensor]:
        assert self._graph is not None
        if device != "cuda" or not self._capture:
            return self._graph
        if num_rows not in self._captured:
            self._captured[num_rows] = CUDAGraph(self._graph)
        return self._captured[num_rows]

    def _gradient(self, state: tuple[Tensor], weight: Tensor, columns: tuple[Tree, ...]) -> Tensor:
        """Returns gradient and metrics, ``[P + M]``."""
        (flat,) = state

        def total(flat: Tensor) -> tuple[Tensor, Tensor]:
            parts = torch.split(flat, [size for _, _, size in self._places])
            parameters = {name: part.view(shape) for (name, shape, _), part in zip(self._places, parts, strict=True)}
            obs, *others = columns
            outputs: Any = functional_call(self._module, parameters, (obs,))
            loss, metrics = self._loss(outputs, *others)
            return loss @ weight, metrics @ weight

        gradient, metrics = grad(total, has_aux=True)(flat)
        return torch.cat([gradient, metrics])


def _eights(count: float) -> int:
    return 8 * math.ceil(count / 8)
