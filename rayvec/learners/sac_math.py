"""The tensors of soft actor-critic: losses, their gradients and what optimizers do with them.

Haarnoja et al., "Soft actor-critic algorithms and applications" (2018, arXiv:1812.05905), and Christodoulou, "Soft
actor-critic for discrete action settings" (2019, arXiv:1910.07207). A loss is a function of one flat vector, so that
torch differentiates it in one graph, compiled or not.

E is the number of critics, B of rows, D of features, C of numbers that describe an action (components of a Box, or
the choices of a Discrete, one-hot), P of parameters. A net's parameters are one flat vector, layer after layer, the
weight ``[E, out, in]`` before the bias ``[E, out]``; with E = 1 that is the order of ``nn.Linear``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rayvec.learners.adam import ADAM_BETAS, fused_adam_
from rayvec.learners.products import bmm, linear
from rayvec.policies.distributions import NOT_ALLOWED, mean_and_log_std

__all__ = ["AdamState", "MLPLayout", "Minibatch", "NetLayout", "Nets", "SACMath"]

_HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)
_LOG_2 = math.log(2)
_EPS = 1e-8

Layers = list[tuple[Tensor, Tensor]]


class Minibatch(NamedTuple):
    """B transitions, float32.

    Attributes:
        obs: ``[B, D]``; with action masks ``[B, D + C]``, the mask last, 1 where a choice is allowed. So is `next_obs`.
        act: ``[B, C]``: of a Box scaled to [-1, 1], of a Discrete one-hot.
        rew: ``[B]``.
        next_obs: True observation after the step, ``[B, D]``.
        terminated: 1 where there is nothing to bootstrap from, ``[B]``.
        weight: Share of each row in a mean over all rows of all ranks, ``[B]``; 0 for padding.
    """

    obs: Tensor
    act: Tensor
    rew: Tensor
    next_obs: Tensor
    terminated: Tensor
    weight: Tensor


class AdamState(NamedTuple):
    """Parameters and Adam's two moments of their gradients, ``[P]`` each; written to in place."""

    param: Tensor
    mean: Tensor
    square: Tensor


class Nets(NamedTuple):
    """What an update changes in place.

    Attributes:
        critic: All critics.
        target: Parameters of the target critics, ``[P]``.
        actor: The actor, and last the logarithm of the temperature alpha.
        healthy: 1; 0 from the first gradient on that is not finite, after which nothing changes any more, ``[1]``.
    """

    critic: AdamState
    target: Tensor
    actor: AdamState
    healthy: Tensor


class NetLayout(Protocol):
    """E nets whose parameters lie in one flat vector."""

    @property
    def num_params(self) -> int:
        """P."""

    def outputs(self, flat: Tensor, *inputs: Tensor) -> Tensor:
        """Returns the outputs ``[E, B, out]`` for inputs ``[B, ...]`` with the parameters in `flat`, ``[P]``."""


@dataclass(frozen=True)
class MLPLayout:
    """Where the layers of E MLPs with ReLU lie in one flat vector.

    Attributes:
        num_nets: E.
        sizes: Widths from the inputs to the outputs.
    """

    num_nets: int
    sizes: tuple[int, ...]
    _shapes: list[tuple[int, ...]] = field(init=False, repr=False, compare=False)
    _lengths: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Lists the shapes of the weight and the bias of each layer in turn, and their lengths, once."""
        layers = [[(self.num_nets, outs, ins), (self.num_nets, outs)] for ins, outs in pairwise(self.sizes)]
        object.__setattr__(self, "_shapes", list(itertools.chain(*layers)))
        object.__setattr__(self, "_lengths", list(map(math.prod, self._shapes)))

    @property
    def num_params(self) -> int:
        """P."""
        return self.num_nets * sum(outs * (ins + 1) for ins, outs in pairwise(self.sizes))

    def layers(self, flat: Tensor) -> Layers:
        """Returns views of the weights ``[E, out, in]`` and biases ``[E, out]`` in `flat`."""
        parts = flat.split_with_sizes(self._lengths)
        views = [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        return list(zip(views[::2], views[1::2], strict=True))

    def outputs(self, flat: Tensor, *inputs: Tensor) -> Tensor:
        """See :class:`NetLayout`. The nets read their inputs side by side."""
        rows = inputs[0] if len(inputs) == 1 else torch.cat(inputs, 1)
        if torch.compiler.is_compiling() or any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            return forward(self.layers(flat), rows)
        outputs: Tensor = _EagerMLP.apply(flat, rows, self)  # type: ignore[no-untyped-call]
        return outputs


def forward(layers: Layers, rows: Tensor) -> Tensor:
    """Returns the outputs ``[E, B, out]`` for rows ``[B, in]``.

    Biases are added apart from the product: compiled, that is one pass with the ReLU, where ``baddbmm`` first copies
    them to all rows.
    """
    rows = rows.expand(len(layers[0][0]), -1, -1)
    for weight, bias in layers[:-1]:
        rows = (torch.bmm(rows, weight.mT) + bias.unsqueeze(1)).relu()
    weight, bias = layers[-1]
    return torch.bmm(rows, weight.mT) + bias.unsqueeze(1)


class _EagerMLP(torch.autograd.Function):
    """`forward`, with a backward pass that writes the gradients of all layers into one flat vector.

    Autograd allocates the gradient of each layer and then concatenates them, and it allocates memory for each sum with
    a bias and for the gradient of each ReLU. Results are equal up to rounding. There is no second derivative, and no
    transform of ``torch.func``.
    """

    @staticmethod
    def forward(ctx: Any, flat: Tensor, rows: Tensor, layout: MLPLayout) -> Tensor:
        """Returns the outputs ``[E, B, out]`` for rows ``[B, in]`` with the parameters in `flat`, ``[P]``."""
        rows = rows.expand(layout.num_nets, -1, -1)
        inputs = [rows]
        layers = layout.layers(flat)
        for weight, bias in layers[:-1]:
            rows = linear(rows, weight, bias, relu=True)
            inputs.append(rows)
        weight, bias = layers[-1]
        ctx.layout, ctx.layers = layout, layers
        ctx.save_for_backward(flat, *inputs)
        return linear(rows, weight, bias, relu=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Returns the gradients of `flat` and of the rows, those that are needed."""
        (grad,) = grads
        (_, *inputs), layers = ctx.saved_tensors, ctx.layers
        needs_flat, needs_rows, _ = ctx.needs_input_grad
        flat_grad = grad.new_empty(ctx.layout.num_params) if needs_flat else None
        layer_grads = layers if flat_grad is None else ctx.layout.layers(flat_grad)
        for k in reversed(range(len(layers))):
            if needs_flat:
                bmm(grad.mT, inputs[k], out=layer_grads[k][0])
                torch.sum(grad, 1, out=layer_grads[k][1])
            if k or needs_rows:
                grad = bmm(grad, layers[k][0])
            if k:
                torch.ops.aten.threshold_backward.grad_input(grad, inputs[k], 0, grad_input=grad)
        return flat_grad, grad.sum(0) if needs_rows else None, None


def adam_(
    state: AdamState, grad: Tensor, lr: float, correction: Tensor, healthy: Tensor, last_lr: float | None = None
) -> None:
    """Takes one step of Adam (Kingma and Ba, 2015, algorithm 1), or none where `healthy` is 0.

    Args:
        state: Changed in place.
        grad: ``[P]``.
        lr: Step size.
        correction: ``1 / (1 - beta_1^t)`` and ``1 / sqrt(1 - beta_2^t)`` of step t, and t, ``[3]``.
        healthy: ``[1]``.
        last_lr: Step size of the last parameter, if it has another.
    """
    if not torch.compiler.is_compiling():
        scalars = correction[2].to(torch.float32), 1 - healthy[0].to(torch.float32)
        for part, rate in [(slice(None), lr)] if last_lr is None else [(slice(-1), lr), (slice(-1, None), last_lr)]:
            fused_adam_(state.param[part], grad[part], state.mean[part], state.square[part], *scalars, rate, _EPS)
        return
    rates: float | Tensor = lr
    if last_lr is not None:
        is_last = torch.arange(len(grad), device=grad.device) == len(grad) - 1
        rates = torch.where(is_last, torch.full_like(grad, last_lr), lr)
    beta_1, beta_2 = ADAM_BETAS
    mean = torch.lerp(state.mean, grad, 1 - beta_1)
    square = beta_2 * state.square + (1 - beta_2) * grad * grad
    step = rates * correction[0] * mean / (square.sqrt() * correction[1] + _EPS)
    is_healthy = healthy > 0
    state.param.copy_(torch.where(is_healthy, state.param - step, state.param))
    state.mean.copy_(torch.where(is_healthy, mean, state.mean))
    state.square.copy_(torch.where(is_healthy, square, state.square))


def corrections(step: int) -> tuple[float, float, int]:
    """Returns Adam's bias corrections of step t, from 1: ``1 / (1 - beta_1^t)``, ``1 / sqrt(1 - beta_2^t)``, and t."""
    beta_1, beta_2 = ADAM_BETAS
    return 1 / (1 - beta_1**step), 1 / math.sqrt(1 - beta_2**step), step


@dataclass(frozen=True)
class SACMath:
    """One update of soft actor-critic in four parts, between which gradients can be summed over ranks.

    Every loss is a sum weighted by ``minibatch.weight``, so that the sum over ranks is the mean over all rows.

    Attributes:
        critic: The E critics: from ``D + C`` to 1 for a Box, from D to C for a Discrete.
        actor: The actor: from D to ``2 C`` for a Box (means, then squashed logarithms of standard
            deviations), to C logits for a Discrete.
        is_discrete: Which of the two.
        gamma: Discount.
        tau: Share of the critics that goes into their targets at every update.
        target_entropy: Which entropy the temperature is adjusted to, in nats.
        autotune: Whether it is adjusted.
        policy_lr: Step size of the actor.
        q_lr: Step size of the critics.
        alpha_lr: Step size of the temperature.
        num_masked: C, where observations have an action mask, else 0.
        entropy_scale: With masks, the entropy to which the temperature is adjusted, as a share of the largest one that
            the allowed choices can have; None: it is `target_entropy` all the same.
    """

    critic: NetLayout
    actor: NetLayout
    is_discrete: bool
    gamma: float
    tau: float
    target_entropy: float
    autotune: bool
    policy_lr: float
    q_lr: float
    alpha_lr: float
    num_masked: int = 0
    entropy_scale: float | None = None

    def critic_gradient(self, nets: Nets, minibatch: Minibatch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradient of the critics' loss, ``[P]``, and ``critic_loss`` and ``q_mean``, ``[2]``.

        The loss of each critic is half the squared temporal-difference error (arXiv:1812.05905, equation 5).

        Args:
            nets: Read only.
            minibatch: All of it, or this rank's part.
            noise: Standard normal, ``[B, C]``; a Discrete reads none.
        """
        target = self._target(nets, minibatch, noise)

        def loss(param: Tensor) -> tuple[Tensor, Tensor]:
            values = self._critic_outputs(param, minibatch.obs, minibatch.act)
            q = (values * minibatch.act).sum(-1) if self.is_discrete else values.squeeze(-1)
            total = 0.5 * ((q - target).square() * minibatch.weight).sum()
            return total, torch.stack([total, (q * minibatch.weight).sum() / len(q)])

        return _gradient(loss, nets.critic.param)

    def critic_step(self, nets: Nets, grad: Tensor, correction: Tensor) -> Tensor:
        """Takes a step of the critics' optimizer and updates the targets; returns ``critic_grad_norm``, ``[1]``."""
        norm = _check(nets, grad)
        adam_(nets.critic, grad, self.q_lr, correction, nets.healthy)
        nets.target.lerp_(nets.critic.param, self.tau * nets.healthy)
        return norm

    def actor_gradient(self, nets: Nets, minibatch: Minibatch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradient of actor and temperature, ``[P]``, and ``actor_loss`` and ``entropy``, ``[2]``.

        The actor minimises the expected ``alpha * log pi - min Q`` (arXiv:1812.05905, equation 9; arXiv:1910.07207,
        equation 12), the temperature ``alpha * (entropy - target_entropy)`` (equation 18; 11). The critics are
        constants here, and both losses share one log-probability.

        Args:
            nets: Read only.
            minibatch: As for the critics.
            noise: Standard normal, ``[B, C]``, other than the critics' had.
        """

        def loss(param: Tensor) -> tuple[Tensor, Tensor]:
            value, logp, alpha = self._value(nets.critic.param, param, minibatch.obs, noise)
            total, entropy = -(value * minibatch.weight).sum(), -(logp * minibatch.weight).sum()
            surplus = (entropy - self._target_entropy(minibatch)).detach()
            alpha_loss = (alpha * surplus).sum() if self.autotune else 0.0
            return total + alpha_loss, torch.stack([total, entropy])

        return _gradient(loss, nets.actor.param)

    def actor_step(self, nets: Nets, grad: Tensor, correction: Tensor) -> Tensor:
        """Takes a step of actor and temperature; returns ``actor_grad_norm`` and ``alpha``, ``[2]``."""
        norm = _check(nets, grad)
        adam_(nets.actor, grad, self.policy_lr, correction, nets.healthy, last_lr=self.alpha_lr)
        return torch.cat([norm, nets.actor.param[-1:].exp()])

    def _target_entropy(self, minibatch: Minibatch) -> Tensor:
        """Returns the weighted sum of the entropies to which the temperature is adjusted."""
        allowed = self._split(minibatch.obs)[1]
        if allowed is None or self.entropy_scale is None:
            return self.target_entropy * minibatch.weight.sum()
        largest = allowed.sum(-1).to(minibatch.weight).log()
        return (self.entropy_scale * largest * minibatch.weight).sum()

    def _split(self, obs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns what the nets read, ``[B, D]``, and which choices are allowed, ``bool [B, C]``, or None.

        A mask that allows nothing, as that after the last step of an episode may, counts as one that allows all.
        """
        if not self.num_masked:
            return obs, None
        allowed = obs[:, -self.num_masked :] > 0
        return obs[:, : -self.num_masked], allowed | ~allowed.any(-1, keepdim=True)

    def _target(self, nets: Nets, minibatch: Minibatch, noise: Tensor) -> Tensor:
        """Returns what the critics should say, ``[B]`` (arXiv:1812.05905, equation 3; arXiv:1910.07207, 10)."""
        value, _, _ = self._value(nets.target, nets.actor.param, minibatch.next_obs, noise)
        return minibatch.rew + self.gamma * (1 - minibatch.terminated) * value

    def _value(self, critics: Tensor, param: Tensor, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the expected ``min Q - alpha * log pi``, the expected ``log pi``, ``[B]`` each, and alpha, ``[1]``.

        Args:
            critics: Parameters of the critics.
            param: Parameters of the actor and the logarithm of alpha; alpha is a constant of the first result.
            obs: ``[B, D]``.
            noise: Standard normal, ``[B, C]``.
        """
        flat, log_alpha = torch.split(param, [self.actor.num_params, 1])
        numbers, allowed = self._split(obs)
        outputs, alpha = self.actor.outputs(flat, numbers).squeeze(0), log_alpha.exp()
        if self.is_discrete:
            if allowed is not None:
                outputs = torch.where(allowed, outputs, NOT_ALLOWED)
            logp = outputs.log_softmax(-1)
            q = self._critic_outputs(critics, obs, obs).amin(0)
            probability = logp.exp()
            value = (probability * (q - alpha.detach() * logp)).sum(-1)
            return value, (probability * logp).sum(-1), alpha
        act, logp = _sample(outputs, noise)
        q = self._critic_outputs(critics, obs, act).squeeze(-1).amin(0)
        return q - alpha.detach() * logp, logp, alpha

    def _critic_outputs(self, param: Tensor, obs: Tensor, act: Tensor) -> Tensor:
        """Returns values, ``[E, B, 1]``, or ``[E, B, C]`` of all choices, for which critics do not read the action."""
        numbers, _ = self._split(obs)
        return self.critic.outputs(param, numbers) if self.is_discrete else self.critic.outputs(param, numbers, act)


def _sample(outputs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Draws actions in (-1, 1); returns them and their log-probabilities.

    The formulas are those of :class:`rayvec.policies.distributions.TanhGaussian`.
    """
    mean, log_std = mean_and_log_std(outputs)
    x = mean + log_std.exp() * noise
    volume = 2 * (_LOG_2 - x - torch.nn.functional.softplus(-2 * x))
    logp = (-0.5 * noise * noise - log_std - _HALF_LOG_TAU - volume).sum(-1)
    return x.tanh(), logp


def _gradient(loss: Callable[[Tensor], tuple[Tensor, Tensor]], param: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradient of a loss, ``[P]``, and its second result.

    torch compiles ``torch.func.grad``, but no call of autograd. Uncompiled, autograd is faster by a third.
    """
    if torch.compiler.is_compiling():
        differentiated: tuple[Tensor, Tensor] = torch.func.grad(loss, has_aux=True)(param)
        return differentiated
    with torch.enable_grad():
        leaf = param.detach().requires_grad_()
        value, stats = loss(leaf)
        (gradient,) = torch.autograd.grad(value, leaf)
    return gradient, stats.detach()


def _check(nets: Nets, grad: Tensor) -> Tensor:
    """Clears `healthy` where a gradient is not finite; returns its norm, ``[1]``."""
    norm: Tensor = torch.linalg.vector_norm(grad).reshape(1)
    nets.healthy.mul_(torch.isfinite(norm).to(norm))
    return norm
