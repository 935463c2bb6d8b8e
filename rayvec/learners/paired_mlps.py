"""Actor and critic side by side: how learners evaluate and differentiate two tanh MLPs on a CPU.

Of a minibatch of a few hundred rows, torch spends a large part on calling operations and recording them for autograd.
The hidden layers of actor and critic have the same sizes, so one batched product serves both, and gradients are written
down by hand. torch's tanh takes three times as long as ``2 sigmoid(2 x) - 1``, which differs from it by less than 2e-7
(absolute).

Uncompiled updates of PPO and IMPALA use it, and PPO for values before an update, compiled or not.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from rayvec.learners.products import bmm, linear
from rayvec.policies.networks import ActorCritic

if TYPE_CHECKING:
    from rayvec.learners.base import FlatParameters
    from rayvec.policies.networks import ActorCriticModule

__all__ = ["PairedMLPs", "paired_mlps"]


class PairedMLPs:
    """Evaluates an actor-critic, and computes the gradient of its parameters.

    Args:
        module: The actor-critic, one that `paired_mlps` accepts.
        actor: The linear layers of the actor.
        critic: Those of the critic.
        flat: The parameters of all.
    """

    def __init__(
        self, module: ActorCritic, actor: Sequence[nn.Linear], critic: Sequence[nn.Linear], flat: FlatParameters
    ) -> None:
        self._module, self._flat_grad = module, flat.grad
        self._grad = torch.zeros_like(flat.grad)
        self._params, self._grads = (_views(vector, actor, critic) for vector in (flat.data, self._grad))
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the distribution's parameters ``[B, P]`` and values ``[B]`` for rows ``[B, D]``.

        They have a graph that begins with the outputs of the MLPs.
        """
        inputs = rows.expand(2, -1, -1)
        self._inputs = [inputs]
        for weight, bias in self._params.hidden:
            inputs = _tanh_(linear(inputs, weight, bias, relu=False))
            self._inputs.append(inputs)
        layers = enumerate(self._params.last)
        self._outputs = [linear(inputs[k : k + 1], *layer, relu=False)[0].requires_grad_() for k, layer in layers]
        actor, critic = self._outputs
        return self._module.with_log_std(actor), critic.squeeze(-1)

    def value(self, rows: Tensor) -> Tensor:
        """Returns values ``[...]`` for rows ``[..., D]``, without a graph."""
        inputs = rows.reshape(1, -1, rows.shape[-1])
        for weight, bias in self._params.hidden:
            inputs = _tanh_(linear(inputs, weight[1:], bias[1:], relu=False))
        return linear(inputs, *self._params.last[1], relu=False).reshape(rows.shape[:-1])

    def backward(self) -> None:
        """Adds the gradient of the MLPs, after autograd found that of their outputs in the latest call."""
        inputs = self._inputs.pop()
        grad = torch.empty_like(inputs)
        for k, (output, (weight, _)) in enumerate(zip(self._outputs, self._params.last, strict=True)):
            output_grad = (torch.zeros_like(output) if output.grad is None else output.grad).unsqueeze(0)
            _write(self._grads.last[k], output_grad, inputs[k : k + 1])
            bmm(output_grad, weight, out=grad[k : k + 1])
        for (weight, _), layer_grad in zip(reversed(self._params.hidden), reversed(self._grads.hidden), strict=True):
            torch.ops.aten.tanh_backward.grad_input(grad, inputs, grad_input=grad)
            inputs = self._inputs.pop()
            _write(layer_grad, grad, inputs)
            if self._inputs:  # the gradient of the rows is not needed
                grad = bmm(grad, weight)
        self._outputs = []
        self._flat_grad.add_(self._grad)


def paired_mlps(module: ActorCriticModule, flat: FlatParameters) -> PairedMLPs | None:
    """Returns an evaluator whose results are a module's own up to rounding, or None where there is none.

    There is one for the default network of numbers: two plain tanh MLPs in float32 on a CPU, as they were made, without
    hooks.

    Args:
        module: The actor-critic.
        flat: Its parameters.
    """
    if type(module) is not ActorCritic or type(module.trunk) is not nn.Sequential or len(module.trunk):
        return None
    if _is_customised(module) or _is_customised(module.trunk) or module.cnns:
        return None
    in_float32 = module.precision != "bf16" and flat.data.dtype == torch.float32  # on a CPU TF32 is float32
    if not in_float32 or flat.data.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return None
    actor, critic = _linear_layers(module.actor), _linear_layers(module.critic)
    if not (actor and critic) or _hidden_shapes(actor) != _hidden_shapes(critic):
        return None
    used = [parameter for layer in (*actor, *critic) for parameter in (layer.weight, layer.bias)]
    if module.log_std is not None:
        used.insert(0, module.log_std)
    leaves = list(module.parameters())
    are_used = len(used) == len(leaves) and all(map(operator.is_, used, leaves))
    if not (are_used and _consists_of(flat.data, leaves) and _consists_of(flat.grad, [leaf.grad for leaf in leaves])):
        return None
    return PairedMLPs(module, actor, critic, flat) if all(leaf.requires_grad for leaf in leaves) else None


def _linear_layers(net: nn.Module) -> list[nn.Linear]:
    """Returns the linear layers of an MLP with a tanh after each but the last; none if a net is something else."""
    layers = list(net) if type(net) is nn.Sequential else []  # `children` would leave out a layer's second use
    kinds = [nn.Tanh if k % 2 else nn.Linear for k in range(len(layers))]
    is_mlp = [type(layer) for layer in layers] == kinds and len(layers) % 2 == 1
    if not is_mlp or any(map(_is_customised, (net, *layers))):
        return []  # before a weight is read: with a spectral norm, that changes it
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    have_biases = all(layer.bias is not None and layer.bias.shape == layer.weight.shape[:1] for layer in linear)
    return linear if have_biases else []


def _hidden_shapes(layers: Sequence[nn.Linear]) -> list[torch.Size]:
    return [layer.weight.shape for layer in layers[:-1]]


def _is_customised(module: nn.Module) -> bool:
    """Says whether a module, without its parts, computes something else than its class does, or has hooks."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    leaves = [leaf for leaf in module._parameters.values() if leaf is not None]
    are_plain = all(type(leaf) is nn.Parameter for leaf in leaves)
    of_leaves = [leaf._backward_hooks or leaf._post_accumulate_grad_hooks for leaf in leaves]
    of_all = torch.nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
    has_own_methods = not vars(module).keys().isdisjoint(vars(type(module)))
    is_compiled = module._compiled_call_impl is not None
    return bool(of_all) or any(hooks) or any(of_leaves) or has_own_methods or is_compiled or not are_plain


def _consists_of(flat: Tensor, parts: Sequence[Tensor | None]) -> bool:
    """Says whether a vector is these parts, one after the other."""
    place = flat.data_ptr()
    for part in parts:
        if part is None or part.data_ptr() != place or not part.is_contiguous():
            return False
        place += part.nbytes
    return place == flat.data_ptr() + flat.nbytes


class _LayerViews(NamedTuple):
    """Parameters of two MLPs, or their gradients: views of a flat vector.

    Attributes:
        hidden: Weights ``[2, out, in]`` and biases ``[2, out]`` of each hidden layer of both.
        last: Weight ``[1, out, in]`` and bias ``[1, out]`` of the last layer of each.
    """

    hidden: list[tuple[Tensor, Tensor]]
    last: list[tuple[Tensor, Tensor]]


def _views(flat: Tensor, actor: Sequence[nn.Linear], critic: Sequence[nn.Linear]) -> _LayerViews:
    """Returns views of a vector at the places that the parameters of two nets have among the flat parameters."""

    def of_both(first: Tensor, second: Tensor) -> Tensor:
        start = first.storage_offset()
        return flat.as_strided((2, *first.shape), (second.storage_offset() - start, *first.stride()), start)

    def of_one(parameter: Tensor) -> Tensor:
        start = parameter.storage_offset()
        return flat[start : start + parameter.numel()].view(1, *parameter.shape)

    pairs = zip(actor[:-1], critic[:-1], strict=True)
    hidden = [(of_both(a.weight, c.weight), of_both(a.bias, c.bias)) for a, c in pairs]
    return _LayerViews(hidden, [(of_one(net[-1].weight), of_one(net[-1].bias)) for net in (actor, critic)])


def _tanh_(numbers: Tensor) -> Tensor:
    return numbers.mul_(2).sigmoid_().mul_(2).sub_(1)


def _write(layer_grad: tuple[Tensor, Tensor], grad: Tensor, inputs: Tensor) -> None:
    """Writes the gradients of a layer's weight and bias, by that of its outputs ``[E, B, out]``."""
    weight_grad, bias_grad = layer_grad
    bmm(grad.mT, inputs, out=weight_grad)
    torch.sum(grad, 1, out=bias_grad)
