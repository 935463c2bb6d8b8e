"""Optimizers of one flat parameter: Adam and RMSProp, by fused kernels or as a part of a compiled step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["ADAM_BETAS", "Adam", "FlatOptimizer", "RMSProp", "fused_adam_"]

ADAM_BETAS = (0.9, 0.999)


class FlatOptimizer:
    """What steps a flat parameter in place, unless a gradient was not finite.

    ``torch.optim`` imports torch's compiler with the first optimizer. That takes seconds, as long as importing the rest
    of torch. Optimizers here do not import it, for runs that compile nothing.

    Args:
        parameter: What to step, in place, by its ``.grad``.
        lr: Step size.
        eps: Added to the denominator.

    Attributes:
        param_groups: One mapping, whose ``"lr"`` is the step size from now on, as in ``torch.optim``.
        failed: 1 from the first gradient on whose norm is not finite, else 0; a scalar on the parameter's device.
            As long as it is 1, no step changes anything.
    """

    def __init__(self, parameter: torch.nn.Parameter, lr: float, eps: float) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": lr}]
        self.failed = torch.zeros((), dtype=torch.float32, device=parameter.device)
        self._parameter, self._eps = parameter, eps

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What a step changes, always the same tensors: the parameter ``[P]``, `failed` ``[1]``, and what follows."""
        return (self._parameter.data, self.failed.view(1), *self._own_tensors())

    def step(self, norm: Tensor | None = None) -> None:
        """Takes a step along the gradient.

        Args:
            norm: Of the gradient, a scalar; where it is not finite, this step and all later ones change nothing.
        """
        if norm is not None:
            self.failed.masked_fill_(norm * 0 != 0, 1.0)
        grad = self._parameter.grad
        assert grad is not None
        self._step(self._parameter.data, grad, self.param_groups[0]["lr"])

    def stepped(self, tensors: tuple[Tensor, ...], grad: Tensor, norm: Tensor, lr: Tensor) -> tuple[Tensor, ...]:
        """Returns what `tensors` are after the same step, in operations that a compiler fuses.

        Args:
            tensors: Those of the attribute, or what this function returned.
            grad: ``[P]``.
            norm: Its norm before it was clipped, ``[1]``.
            lr: Step size, ``[1]``.
        """
        param, failed, *own = tensors
        is_healthy = (failed == 0) & norm.isfinite()
        pairs = zip((param, *own), self._stepped(param, own, grad, lr), strict=True)
        param, *own = (torch.where(is_healthy, new, old) for old, new in pairs)
        return param, 1 - is_healthy.to(failed), *own

    def _own_tensors(self) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def _step(self, param: Tensor, grad: Tensor, lr: float) -> None:
        raise NotImplementedError

    def _stepped(self, param: Tensor, own: list[Tensor], grad: Tensor, lr: Tensor) -> tuple[Tensor, ...]:
        """Returns the parameter and the own tensors after a step."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Returns what the next step depends on besides parameter, gradient and settings; not a copy."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where the optimizer was when `state` was taken."""
        for name, tensor in self.state_dict().items():
            if name != "lr":
                tensor.copy_(state[name])
        self.param_groups[0]["lr"] = state["lr"]
        self.failed.zero_()


def fused_adam_(
    param: Tensor, grad: Tensor, mean: Tensor, square: Tensor, num_steps: Tensor, failed: Tensor, lr: float, eps: float
) -> None:
    """Takes a step of Adam (Kingma and Ba, 2015, algorithm 1) in one pass, or none where `failed` is 1.

    Args:
        param: ``[P]``; changed in place.
        grad: ``[P]``.
        mean: First moment of the gradient, ``[P]``; changed in place.
        square: Second moment, ``[P]``; changed in place.
        num_steps: Number of this step, from 1, ``float32``, a scalar.
        failed: 0 or 1, ``float32``, a scalar.
        lr: Step size.
        eps: Added to the denominator.
    """
    beta_1, beta_2 = ADAM_BETAS
    torch._fused_adam_(
        [param],
        [grad],
        [mean],
        [square],
        [],
        [num_steps],
        lr=lr,
        beta1=beta_1,
        beta2=beta_2,
        weight_decay=0.0,
        eps=eps,
        amsgrad=False,
        maximize=False,
        found_inf=failed,
    )


class Adam(FlatOptimizer):
    """Adam (Kingma and Ba, 2015, algorithm 1), by the fused kernel that ``torch.optim.Adam(fused=True)`` calls.

    See :class:`FlatOptimizer`.
    """

    def __init__(self, parameter: torch.nn.Parameter, lr: float, eps: float) -> None:
        super().__init__(parameter, lr, eps)
        self._num_steps = torch.zeros((), dtype=torch.float32, device=parameter.device)
        self._mean, self._square = torch.zeros_like(parameter.data), torch.zeros_like(parameter.data)

    def _own_tensors(self) -> tuple[Tensor, ...]:
        return self._mean, self._square, self._num_steps.view(1)

    def _step(self, param: Tensor, grad: Tensor, lr: float) -> None:
        self._num_steps.add_(1).sub_(self.failed)
        fused_adam_(param, grad, self._mean, self._square, self._num_steps, self.failed, lr, self._eps)

    def _stepped(self, param: Tensor, own: list[Tensor], grad: Tensor, lr: Tensor) -> tuple[Tensor, ...]:
        (mean, square, num_steps), (beta_1, beta_2) = own, ADAM_BETAS
        num_steps = num_steps + 1
        mean = torch.lerp(mean, grad, 1 - beta_1)
        square = beta_2 * square + (1 - beta_2) * grad * grad
        logs = (num_steps.to(grad) * math.log(beta) for beta in ADAM_BETAS)
        corrections = (-torch.expm1(log) for log in logs)  # 1 - beta^t, to all digits
        rate, scale = lr / next(corrections), next(corrections).rsqrt()
        return param - rate * mean / (square.sqrt() * scale + self._eps), mean, square, num_steps

    def state_dict(self) -> dict[str, Any]:
        """See :class:`FlatOptimizer`."""
        moments = {"exp_avg": self._mean, "exp_avg_sq": self._square}
        return {"step": self._num_steps, **moments, "lr": self.param_groups[0]["lr"]}


class RMSProp(FlatOptimizer):
    """RMSProp (Hinton, 2012), as ``torch.optim.RMSprop``; the constant is that of IMPALA's appendix.

    See :class:`FlatOptimizer`.
    """

    _ALPHA = 0.99

    def __init__(self, parameter: torch.nn.Parameter, lr: float, eps: float) -> None:
        super().__init__(parameter, lr, eps)
        self._square = torch.zeros_like(parameter.data)

    def _own_tensors(self) -> tuple[Tensor, ...]:
        return (self._square,)

    def _step(self, param: Tensor, grad: Tensor, lr: float) -> None:
        is_healthy = self.failed == 0
        for old, new in zip((param, self._square), self._stepped(param, [self._square], grad, lr), strict=True):
            torch.where(is_healthy, new, old, out=old)

    def _stepped(self, param: Tensor, own: list[Tensor], grad: Tensor, lr: Any) -> tuple[Tensor, ...]:
        square = self._ALPHA * own[0] + (1 - self._ALPHA) * grad * grad
        return param - lr * grad / (square.sqrt() + self._eps), square

    def state_dict(self) -> dict[str, Any]:
        """See :class:`FlatOptimizer`."""
        return {"square_avg": self._square, "lr": self.param_groups[0]["lr"]}
