"""Adam for one flat parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["Adam"]


class Adam:
    """Adam (Kingma and Ba, 2015, algorithm 1), by the fused kernel that ``torch.optim.Adam(fused=True)`` calls.

    ``torch.optim`` imports torch's compiler with the first optimizer. That takes seconds, as long as importing the rest
    of torch. This class does not import it, for runs that compile no gradient.

    Args:
        parameter: What to step, in place, by its ``.grad``.
        lr: Step size.
        eps: Added to the denominator.

    Attributes:
        param_groups: One mapping, whose ``"lr"`` is the step size from now on, as in ``torch.optim``.
    """

    _BETAS = (0.9, 0.999)

    def __init__(self, parameter: torch.nn.Parameter, lr: float, eps: float) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": lr}]
        self._parameter, self._eps = parameter, eps
        self._step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        self._mean, self._square = torch.zeros_like(parameter.data), torch.zeros_like(parameter.data)

    def step(self) -> None:
        """Takes a step along the gradient."""
        grad = self._parameter.grad
        assert grad is not None
        self._step += 1
        torch._fused_adam_(
            [self._parameter.data],
            [grad],
            [self._mean],
            [self._square],
            [],
            [self._step],
            lr=self.param_groups[0]["lr"],
            beta1=self._BETAS[0],
            beta2=self._BETAS[1],
            weight_decay=0.0,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns what the next step depends on besides parameter, gradient and settings; not a copy."""
        return {"step": self._step, "exp_avg": self._mean, "exp_avg_sq": self._square, "lr": self.param_groups[0]["lr"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where the optimizer was when `state` was taken."""
        self._step.copy_(state["step"])
        self._mean.copy_(state["exp_avg"])
        self._square.copy_(state["exp_avg_sq"])
        self.param_groups[0]["lr"] = state["lr"]
