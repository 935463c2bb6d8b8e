"""Several tanh MLPs that read the same rows, evaluated and differentiated with few operations, uncompiled on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["are_for_fewer_operations", "evaluate"]

Layers = Sequence[tuple[Tensor, Tensor]]


def are_for_fewer_operations(nets: Sequence[nn.Sequential], rows: Tensor) -> bool:
    """Says whether `evaluate` computes what these nets do: float32, by their own parameters, outside of any graph.

    Args:
        nets: Linear layers with a tanh after each but the last, and nothing else.
        rows: ``[..., D]``.
    """
    is_recorded = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    is_plain = rows.device.type == "cpu" and rows.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    has_graph = torch.is_grad_enabled() and rows.dim() != 2
    return is_plain and not is_recorded and not has_graph and all(type(net[0].weight) is nn.Parameter for net in nets)


def evaluate(nets: Sequence[nn.Sequential], rows: Tensor) -> tuple[Tensor, ...]:
    """Returns the outputs ``[..., out]`` of each net for rows ``[..., D]``; with a graph, rows are ``[B, D]``.

    tanh is computed as ``2 sigmoid(2 x) - 1``, right to 2e-7, which takes torch a third of the time. There is no second
    derivative, and hooks of the layers are not called.
    """
    layers = [[(layer.weight, layer.bias) for layer in net if isinstance(layer, nn.Linear)] for net in nets]
    if not torch.is_grad_enabled():
        return tuple(_forward(rows, each)[0] for each in layers)
    params = [param for each in layers for layer in each for param in layer]
    outputs: tuple[Tensor, ...] = _TanhMLPs.apply(rows, len(nets), *params)  # type: ignore[no-untyped-call]
    return outputs


def _forward(rows: Tensor, layers: Layers) -> tuple[Tensor, list[Tensor]]:
    """Returns the outputs of a net, and what each of its layers reads."""
    inputs = [rows]
    for weight, bias in layers[:-1]:
        rows = nn.functional.linear(rows, weight, bias).mul_(2).sigmoid_().mul_(2).sub_(1)
        inputs.append(rows)
    return nn.functional.linear(rows, *layers[-1]), inputs


class _TanhMLPs(torch.autograd.Function):
    """All nets as one node of the graph: autograd calls Python once, and no operation layer by layer."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, num_nets: int, *params: Tensor) -> tuple[Tensor, ...]:
        """Returns the outputs of each net.

        Args:
            ctx: Keeps what `backward` reads.
            rows: ``[B, D]``.
            num_nets: Number of nets, which have equally many layers.
            params: Weight and bias of each layer of each net.
        """
        size = len(params) // num_nets
        nets = [params[start : start + size] for start in range(0, len(params), size)]
        outputs, inputs = zip(
            *(_forward(rows, list(zip(net[::2], net[1::2], strict=True))) for net in nets), strict=True
        )
        ctx.num_nets = num_nets
        ctx.save_for_backward(*(tensor for net in inputs for tensor in net), *params[::2])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the rows, where they are needed, and of the parameters."""
        if torch.is_grad_enabled():  # torch's `once_differentiable` says so too, but takes 1 % of a minibatch
            raise RuntimeError("tanh MLPs have no second derivative")
        saved = ctx.saved_tensors  # each access unpacks them
        num_layers = len(saved) // 2
        inputs, weights = saved[:num_layers], saved[num_layers:]
        depth, needs_rows = num_layers // ctx.num_nets, ctx.needs_input_grad[0]
        of_rows: list[Tensor] = []
        of_params: list[Tensor] = []
        for net, grad in enumerate(grads):
            found: list[Tensor] = []
            for k in reversed(range(net * depth, (net + 1) * depth)):
                found += [grad.sum(0), grad.t() @ inputs[k]]
                is_first = k == net * depth
                if not is_first or needs_rows:
                    grad = grad @ weights[k]
                if not is_first:
                    grad = torch.ops.aten.tanh_backward(grad, inputs[k])
            of_params += reversed(found)
            of_rows.append(grad)
        return sum(of_rows[1:], of_rows[0]) if needs_rows else None, None, *of_params
