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
from rayvec.learners.compiling import Compiled, CUDAGraph, can_capture

__all__ = ["CompiledGradient"]


class CompiledGradient:
    """Differentiates a loss by all parameters of a module at once.

    Parameters and gradients are one flat vector each, so that torch dispatches nothing layer by layer. Graphs have
    fixed shapes: minibatches are padded with samples of weight 0 to one of a few sizes. On CUDA the graph of each size
    is captured and launched as a whole.

    Args:
        module: Called with the first of the fields.
        loss: From what `module` returns and the other fields to the loss of each sample, ``[B]``, and its metrics,
            ``[M, B]``.
        num_samples: Approximate size of a minibatch on all ranks.
        capture: Whether to capture graphs on CUDA.
    """

    def __init__(
        self, module: nn.Module, loss: Callable[..., tuple[Tensor, Tensor]], num_samples: int, *, capture: bool = True
    ) -> None:
        self._module, self._loss, self._capture = module, loss, capture
        self._quantum = max(32, num_samples // 4)
        self._places = [
            (name, each.shape, each.numel(), each.requires_grad) for name, each in module.named_parameters()
        ]
        self._graph: Compiled | None = None
        self._captured: dict[int, CUDAGraph] = {}

    def __call__(self, flat: Tensor, fields: tuple[Tree, ...], count: int, num_ranks: int = 1) -> tuple[Tensor, Tensor]:
        """Returns the gradient of the samples' loss over `count`, like `flat`, and their metrics over `count`, ``[M]``.

        Args:
            flat: The parameters, ``[P]``, in the order of ``module.parameters()``; the same tensor at every call.
            fields: Trees of ``[B, ...]``; B may be 0.
            count: Size of the minibatch on all ranks, by which sums over samples are divided.
            num_ranks: Number of ranks that share the minibatch.
        """
        num_samples = len(next(tree_leaves(fields)))
        missing = self._size(num_samples, count, num_ranks) - num_samples

        def padded(field: Tensor) -> Tensor:
            if not missing:
                return field
            last = field[-1:] if num_samples else field.new_zeros(1, *field.shape[1:])
            return torch.cat([field, last.expand(missing, *field.shape[1:])])

        weight = pad(flat.new_full((num_samples,), 1 / count), (0, missing))
        arguments = ((flat,), weight, tree_map(padded, fields))
        with torch.no_grad():
            if self._graph is None:
                self._gradient(*arguments)  # fills caches, such as tables of a distribution, outside the graph
                self._graph = Compiled(self._gradient)
            result = self._graph_for(len(weight), flat.device)(*arguments)
        return result[: len(flat)], result[len(flat) :]

    def _size(self, num_samples: int, count: int, num_ranks: int) -> int:
        """Returns the size to which a rank's `num_samples` of the `count` of a minibatch are padded.

        That is a mean share or a little more, where all ranks have about equally many samples; else the size that one
        rank alone would pad to.
        """
        share = _eights(self._multiple(count) / num_ranks)
        if num_ranks == 1 or num_samples > share + 8:
            return self._multiple(num_samples)
        return max(share, _eights(num_samples))

    def _multiple(self, num_samples: int) -> int:
        """Returns `num_samples`, at least 1, rounded up to a quarter of a minibatch or 32 samples."""
        return self._quantum * math.ceil(max(1, num_samples) / self._quantum)

    def _graph_for(self, num_samples: int, device: torch.device) -> Callable[..., Tensor]:
        assert self._graph is not None
        if not can_capture(device) or not self._capture:
            return self._graph
        if num_samples not in self._captured:
            self._captured[num_samples] = CUDAGraph(self._graph)
        return self._captured[num_samples]

    def _gradient(self, state: tuple[Tensor], weight: Tensor, fields: tuple[Tree, ...]) -> Tensor:
        """Returns gradient and metrics, ``[P + M]``."""
        (flat,) = state

        def total(flat: Tensor) -> tuple[Tensor, Tensor]:
            parts = torch.split(flat, [size for _, _, size, _ in self._places])
            parameters = {
                name: (part if is_trained else part.detach()).view(shape)
                for (name, shape, _, is_trained), part in zip(self._places, parts, strict=True)
            }
            obs, *others = fields
            outputs: Any = functional_call(self._module, parameters, (obs,))
            loss, metrics = self._loss(outputs, *others)
            return loss @ weight, metrics @ weight

        gradient, metrics = grad(total, has_aux=True)(flat)
        return torch.cat([gradient, metrics])


def _eights(count: float) -> int:
    return 8 * math.ceil(count / 8)
