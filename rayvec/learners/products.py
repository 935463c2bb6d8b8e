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

import torch
from torch import Tensor

__all__ = ["bmm", "linear"]

_FEWEST = 1 << 20
"""Products of fewer numbers than this are as fast by MKL: 256 rows by 64 columns, by 64 columns."""


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
    then = "relu" if relu else "none"
    return _stacked([_onednn(*each, then) for each in zip(rows, weight, bias, strict=True)])


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


def _onednn(rows: Tensor, weight: Tensor, bias: Tensor | None, then: str) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, then, [], "")
    return product


def _stacked(parts: list[Tensor]) -> Tensor:
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)


def _is_for_onednn(rows: Tensor, columns: int) -> bool:
    is_large = rows.shape[1] * rows.shape[2] * columns > _FEWEST
    return is_large and rows.dtype == torch.float32 and rows.device.type == "cpu" and _is_half_used()


@functools.cache
def _is_half_used() -> bool:
    """Says whether MKL uses half of this processor's vectors, and oneDNN's operator is there."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):  # type: ignore[no-untyped-call]
        return False
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    cpu = Path("/proc/cpuinfo")
    return cpu.exists() and "AuthenticAMD" in cpu.read_text() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
