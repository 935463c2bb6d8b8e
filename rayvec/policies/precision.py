"""In which precision networks compute: weights, losses and optimizers stay in float32."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Precision", "autocast", "float32", "prepare"]

Precision = Literal["float32", "tf32", "bf16"]


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """Returns what a network computes within: products of matrices and convolutions in bfloat16, or as they are.

    Nothing is kept between two calls, so that a graph that is captured reads the current weights.
    """
    if precision != "bf16":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def float32(tensor: Tensor) -> Tensor:
    """Returns what was computed within `autocast`, in float32 if that made it bfloat16."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def prepare(precision: Precision, device: torch.device) -> None:
    """Lets a device compute in a precision.

    TF32 is a format of NVIDIA's GPUs; elsewhere it is float32. It is switched on or off for the whole process, by the
    learner that was made last. So "float32" is float32 in convolutions, too, for which torch's own default is TF32.
    """
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
