"""Products of matrices on processors that torch's usual library uses only half.

torch multiplies float32 matrices by MKL. On AMD's processors with AVX-512, MKL computes with vectors of half the width.
oneDNN, which is a part of torch too, uses the full width, and there needs half the time for matrices of 256 columns.
torch has no setting for that, but an operator, which its own compiler uses.

Which library multiplies depends on the processor and the sizes alone, not on a measurement, so that a run can be
repeated. Results of the two differ by rounding. The functions here have no derivatives.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["bmm", "linear"]

_MOST_BY_MKL = 1 << 22
"""Up to so many multiply-adds MKL is as fast: 256 rows by 128 columns, by 128 columns."""


def linear(rows: Tensor, weight: Tensor, bias: Tensor, *, relu: bool) -> Tensor:
    """Returns the outputs ``[E, B, out]`` of E linear layers, with a ReLU or without.

    Args:
        rows: ``[E, B, in]``.
        weight: ``[E, out, in]``.
        bias: ``[E, out]``.
        relu: Whether negative outputs become 0.
    """
    if not _is_for_onednn(rows, weight.shape[1]):
        outputs = torch.bmm(rows, weight.mT).add_(bias.unsqueeze(1))
        return outputs.relu_() if relu else outputs
    activation = "relu" if relu else "none"
    return _stacked([_onednn(*each, activation) for each in zip(rows, weight, bias, strict=True)])


def bmm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns the products ``[E, M, N]`` of matrices ``[E, M, K]`` and ``[E, K, N]``, as `torch.bmm` does."""
    if not _is_for_onednn(a, b.shape[2]):
        return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)
    products = [_onednn(left, right.mT, None, "none") for left, right in zip(a, b, strict=True)]
    if out is None:
        return _stacked(products)
    for into, product in zip(out, products, strict=True):
        into.copy_(product)
    return out


def _onednn(rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, activation, [], "")
    return product


def _stacked(parts: list[Tensor]) -> Tensor:
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)


def _is_for_onednn(rows: Tensor, columns: int) -> bool:
    backends: Any = torch.backends.mkldnn  # a user may have disabled it
    is_large = rows.shape[1] * rows.shape[2] * columns > _MOST_BY_MKL
    is_float = rows.dtype == torch.float32 and rows.device.type == "cpu"
    return is_large and is_float and _is_faster() and bool(backends.enabled)


@functools.cache
def _is_faster() -> bool:
    """Says whether oneDNN's operator is there, and faster than MKL on this processor."""
    libraries: Any = torch.backends
    if not (libraries.mkl.is_available() and libraries.mkldnn.is_available()):
        return False
    cpu = Path("/proc/cpuinfo")
    described = cpu.read_text() if cpu.exists() else ""
    is_there = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return is_there and mkl_uses_half(libraries.cpu.get_cpu_capability(), described)


def mkl_uses_half(capability: str, cpuinfo: str) -> bool:
    """Says whether MKL uses half of a processor's vectors.

    Args:
        capability: What ``torch.backends.cpu.get_cpu_capability()`` returns.
        cpuinfo: What ``/proc/cpuinfo`` says.

    >>> mkl_uses_half("AVX512", "vendor_id : AuthenticAMD"), mkl_uses_half("AVX2", "vendor_id : AuthenticAMD")
    (True, False)
    >>> mkl_uses_half("AVX512", "vendor_id : GenuineIntel")
    False
    """
    return capability.startswith("AVX512") and "AuthenticAMD" in cpuinfo
