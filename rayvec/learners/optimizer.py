"""Adam on one flat vector (Kingma and Ba, 2015, algorithm 1), by torch's fused kernel or as a part of a compiled graph.

``torch.optim.Adam`` imports torch's compiler when it is made, for seconds. The function behind it does not.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

_BETAS = (0.9, 0.999)


class Adam:
    """Steps a flat vector in place, unless a gradient was not finite.

    Args:
        flat: What to step, ``[P]``.
        eps: Added to the denominator.
        failed: Attribute of another optimizer, which then stops with this one.

    Attributes:
        tensors: What a step changes, always the same tensors: the vector, the moments of its gradients and the number
            of steps.
        failed: 1 from the first gradient on whose norm is not finite, else 0; ``[1]``, on the vector's device. As long
            as it is 1, no step changes anything.
    """

    def __init__(self, flat: Tensor, eps: float, failed: Tensor | None = None) -> None:
        self._eps = eps
        num_steps = torch.zeros(1, dtype=torch.float32, device=flat.device)
        self.tensors = flat, torch.zeros_like(flat), torch.zeros_like(flat), num_steps
        self.failed = torch.zeros_like(num_steps) if failed is None else failed
        self._num_steps, self._failed = num_steps[0], self.failed[0]  # as the fused kernel takes them

    def step(self, grad: Tensor, norm: Tensor, lr: float) -> None:
        """Takes a step along the gradient ``[P]``, by the fused kernel; its norm before it was clipped is a scalar."""
        flat, mean, square, _ = self.tensors
        beta_1, beta_2 = _BETAS
        self.failed.masked_fill_(norm * 0 != 0, 1.0)
        adam(
            [flat],
            [grad],
            [mean],
            [square],
            [],
            [self._num_steps],
            fused=True,
            found_inf=self._failed,
            amsgrad=False,
            beta1=beta_1,
            beta2=beta_2,
            lr=lr,
            weight_decay=0.0,
            eps=self._eps,
            maximize=False,
        )

    def stepped(
        self, tensors: tuple[Tensor, ...], failed: Tensor, grad: Tensor, norm: Tensor, lr: Tensor
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Returns what `tensors` and `failed` are after the same step, in operations that a compiler fuses.

        Args:
            tensors: Those of the attribute, or what this function returned.
            failed: Likewise.
            grad: ``[P]``.
            norm: Its norm before it was clipped, ``[1]``.
            lr: Step size, ``[1]``.
        """
        flat, mean, square, num_steps = tensors
        beta_1, beta_2 = _BETAS
        num_steps = num_steps + 1
        mean = torch.lerp(mean, grad, 1 - beta_1)
        square = beta_2 * square + (1 - beta_2) * grad * grad
        first, second = (-torch.expm1(num_steps.to(grad) * math.log(beta)) for beta in _BETAS)  # 1 - beta^t
        flat = flat - lr / first * mean / (square.sqrt() * second.rsqrt() + self._eps)
        is_healthy = (failed == 0) & norm.isfinite()
        pairs = zip((flat, mean, square, num_steps), tensors, strict=True)
        return tuple(torch.where(is_healthy, new, old) for new, old in pairs), 1 - is_healthy.to(failed)

    def state_dict(self) -> dict[str, Any]:
        """Returns what the next step depends on besides vector, gradient and settings: the tensors themselves."""
        return dict(zip(("exp_avg", "exp_avg_sq", "step"), self.tensors[1:], strict=True))
