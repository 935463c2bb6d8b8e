"""In which precision networks compute: weights, losses and optimizers stay in float32."""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Precision", "autocast", "float32", "prepare", "products_per_s"]

Precision = Literal["float32", "tf32", "bf16"]

_SIZE = 384
_REPEATS = 5


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """Returns what a network computes within: products of matrices and convolutions in bfloat16, or as they are.

    Nothing is kept between two calls, so that a graph that is captured reads the weights anew.
    """
    if precision != "bf16":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def float32(tensor: Tensor) -> Tensor:
    """Returns what was computed within `autocast`, in float32 if that made it bfloat16."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def prepare(precision: Precision, device: torch.device) -> None:
    """Lets a device compute in a precision, and warns where bfloat16 is no faster there than float32.

    TF32 is a format of NVIDIA's GPUs; elsewhere it is float32. It is switched on or off for the whole process, by the
    learner that was made last. So "float32" is float32 in convolutions, too, for which torch's own default is TF32.
    """
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    if precision == "bf16" and device.type != "meta":
        single, half = products_per_s(device)
        if half <= single:
            warnings.warn(
                f"precision='bf16' is slower than 'float32' on this device ({device}): {half:,.0f} against "
                f"{single:,.0f} products of {_SIZE}x{_SIZE} matrices a second. Pass precision='float32'",
                RuntimeWarning,
                stacklevel=2,
            )


@functools.cache
def products_per_s(device: torch.device) -> tuple[float, float]:
    """Returns how many products of two small matrices a device computes in a second, in float32 and in bfloat16."""
    factors = torch.ones(2, _SIZE, _SIZE, device=device)
    single, half = (1 / min(_seconds(each)) for each in (factors, factors.bfloat16()))
    return single, half


def _seconds(factors: Tensor) -> Iterable[float]:
    one, other = factors.unbind()
    for repeat in range(1 + _REPEATS):
        begin = time.perf_counter()
        float((one @ other)[0, 0])  # waits for a GPU
        if repeat:  # the first one chooses a kernel
            yield time.perf_counter() - begin
