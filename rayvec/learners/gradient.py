"""The gradient of a loss by all parameters of a module, as one flat vector: by autograd, or by one compiled graph.

It ends with the gradient, so that ranks can add up theirs: one learner and many run the same code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn.utils import vector_to_parameters

from rayvec.errors import ConfigError
from rayvec.learners.compiling import Compiled

Loss = Callable[..., tuple[Tensor, Tensor]]
"""From a function that calls the module, the weight of each row ``[B]``, and further trees of tensors, to the loss, a
scalar, and statistics without a graph. A row of weight 0 does not count."""


class Gradient:
    """Keeps the parameters of a module in one flat vector, and computes the gradient of a loss by it.

    The parameters stay leaves of their own, which are views, in the order of ``module.parameters()``: autograd through
    one flat leaf takes 9 % longer. One fused optimizer step, one norm, one sum over ranks and one array to publish
    serve them all. ``module.to(...)`` and ``module.zero_grad()`` would replace the views.

    Args:
        module: What the loss calls; its parameters become views of `flat`.
        loss: See `Loss`. It reads no other tensor that requires a gradient.
        compiled: Whether one graph computes the gradient.
        options: Further arguments of :class:`~rayvec.learners.compiling.Compiled`.

    Attributes:
        flat: The parameters, ``[P]``; changed in place.
        grad: The latest gradient, ``[P]``.

    Raises:
        ConfigError: The module has no parameters, or of several dtypes or devices.
    """

    def __init__(self, module: nn.Module, loss: Loss, compiled: bool = False, **options: Any) -> None:
        self._module, self._loss = module, loss
        self._leaves = dict(module.named_parameters())
        leaves = list(self._leaves.values())
        if len({(leaf.dtype, leaf.device) for leaf in leaves}) != 1:
            raise ConfigError(
                f"The parameters are {sorted({f'{leaf.dtype} on {leaf.device}' for leaf in leaves})}. They must have "
                "one dtype and device: convert the module with module.to(device, dtype)."
            )
        self._sizes = [leaf.numel() for leaf in leaves]
        self.flat = flat_parameters(leaves)
        self.grad = self._flat_grad = torch.zeros_like(self.flat)
        vector_to_parameters(self.flat, leaves)
        for leaf, part in zip(leaves, torch.split(self.grad, self._sizes), strict=True):
            leaf.grad = part.view_as(leaf)
        self._compiled = Compiled(self.compute, **options) if compiled else None

    def reset(self) -> None:
        """Compiles the graph again at its next use: a constant that the loss reads has changed."""
        if self._compiled is not None:
            self._compiled.reset()

    def __call__(self, weight: Tensor, *args: Any) -> Tensor:
        """Computes `grad` for some rows, and returns their statistics; arguments are those of the loss."""
        if self._compiled is not None and len(weight):  # an empty minibatch has no graph
            # the graph returns a new tensor; autograd fills `_flat_grad` through the views
            self.grad, statistics = self._compiled(self.flat, weight, *args)
            return statistics  # type: ignore[no-any-return]
        self.grad = self._flat_grad.zero_()
        loss, statistics = self._loss(self._module, weight, *args)
        torch.autograd.backward(loss)
        return statistics

    def compute(self, flat: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        """Returns the gradient at the parameters `flat`, and the statistics, in a form that torch compiles."""

        def loss(flat: Tensor) -> tuple[Tensor, Tensor]:
            return self._loss(functools.partial(self._call, flat), *args)

        return grad(loss, has_aux=True)(flat)  # type: ignore[no-any-return]

    def _call(self, flat: Tensor, *inputs: Any) -> Any:
        parts = zip(self._leaves.items(), torch.split(flat, self._sizes), strict=True)
        parameters = {
            name: (part if leaf.requires_grad else part.detach()).view(leaf.shape) for (name, leaf), part in parts
        }
        return functional_call(self._module, parameters, inputs)


def flat_parameters(parameters: Iterable[Tensor]) -> Tensor:
    """Returns a copy of parameters, flat. Those of one module may have any memory format."""
    return torch.cat([each.detach().reshape(-1) for each in parameters])
