"""Products of matrices on processors that torch's usual library serves badly.

torch multiplies float32 matrices by MKL, which on AMD's processors computes with vectors of 256 bits. From Zen 5 on
(family 26) servers compute 512 bits at a time. oneDNN, which is a part of torch too, does so, and there needs half the
time for matrices of 256 columns. torch has no setting for oneDNN, but an operator, which its own compiler uses. Zen 4
has AVX-512 too, but computes 256 bits at a time, and MKL is as fast. And on AMD's processors MKL can take several times
as long for a result with few columns as for its transpose.

How matrices are multiplied depends on the processor and the sizes alone, not on a measurement, so that a run can be
repeated. Results differ by rounding. The functions here have no derivatives. Compiled graphs: see
`rayvec.learners.compiled_products`.
"""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "batched_product",
    "bmm",
    "is_for_onednn",
    "is_for_transposing",
    "linear",
    "mkl_is_slow",
    "onednn_is_faster",
    "product",
]

_LEAST = 1 << 22
"""The smallest product, in multiply-adds, for which oneDNN is faster: 256 rows by 128 columns, by 128 columns."""

_FEW = 32
"""With fewer columns than this, and at least as many rows, a result is computed transposed."""


def linear(rows: Tensor, weight: Tensor, bias: Tensor, *, relu: bool) -> Tensor:
    """Returns the outputs ``[E, B, out]`` of E linear layers, with a ReLU or without.

    Args:
        rows: ``[E, B, in]``.
        weight: ``[E, out, in]``.
        bias: ``[E, out]``.
        relu: Whether negative outputs become 0.
    """
    sizes = (*rows.shape[1:], weight.shape[1])
    if is_for_onednn(rows, *sizes):
        activation = "relu" if relu else "none"
        return _stacked([_affine(*each, activation) for each in zip(rows, weight, bias, strict=True)])
    if is_for_transposing(rows, *sizes):
        outputs = torch.baddbmm(bias.unsqueeze(2), weight, rows.mT).mT
    else:
        outputs = torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
    return outputs.relu_() if relu else outputs


def bmm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns the products ``[E, M, N]`` of matrices ``[E, M, K]`` and ``[E, K, N]``, as `torch.bmm` does."""
    sizes = (*a.shape[1:], b.shape[2])
    if a.shape[2] == b.shape[1] == 1:
        return torch.mul(a, b, out=out)  # equal, and by MKL it takes three times as long
    if is_for_transposing(a, *sizes):
        transposed = torch.bmm(b.mT, a.mT).mT
        return transposed if out is None else out.copy_(transposed)
    if not is_for_onednn(a, *sizes):
        return torch.bmm(a, b, out=out)
    if out is None:
        return batched_product(a, b)
    for into, *each in zip(out, a, b, strict=True):
        into.copy_(product(*each))
    return out


def batched_product(a: Tensor, b: Tensor) -> Tensor:
    """Returns oneDNN's products ``[E, M, N]`` of matrices ``[E, M, K]`` and ``[E, K, N]``."""
    return _stacked([product(*each) for each in zip(a, b, strict=True)])


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns oneDNN's product ``[M, N]`` of matrices ``[M, K]`` and ``[K, N]``, plus a bias ``[N]`` or none."""
    return _affine(a, b.mT, bias, "none")


def _affine(rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    outputs: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, activation, [], "")
    return outputs


def _stacked(parts: list[Tensor]) -> Tensor:
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)


def is_for_onednn(like: Tensor, *sizes: int) -> bool:
    """Says whether oneDNN computes a product, given a tensor of its type and device, and the sizes M, K and N."""
    is_large = math.prod(sizes) >= _LEAST and min(sizes) > 1
    return is_large and onednn_is_faster() and _is_float32_on_cpu(like)


def is_for_transposing(like: Tensor, rows: int, inner: int, columns: int) -> bool:
    """Says whether MKL computes the transpose of a product, given a tensor of its type and device, and M, K and N."""
    is_narrow = 1 < columns < _FEW <= rows and inner > 1 and mkl_is_slow() and _is_float32_on_cpu(like)
    return is_narrow and not is_for_onednn(like, rows, inner, columns)


def _is_float32_on_cpu(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu"


@functools.cache
def mkl_is_slow() -> bool:
    """Says whether some products are faster in another way than by MKL's usual one."""
    libraries: Any = torch.backends
    return libraries.mkl.is_available() and "AuthenticAMD" in _described()


def onednn_is_faster() -> bool:
    """Says whether oneDNN multiplies large matrices."""
    backends: Any = torch.backends.mkldnn  # a user may have disabled it
    return _onednn_is_faster() and bool(backends.enabled)


@functools.cache
def _onednn_is_faster() -> bool:
    """Says whether oneDNN's operator is there, and faster than MKL on this processor."""
    libraries: Any = torch.backends
    if not (mkl_is_slow() and libraries.mkldnn.is_available()):
        return False
    is_there = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return is_there and mkl_uses_half(libraries.cpu.get_cpu_capability(), _described())


def _described() -> str:
    """Returns what the system says about the processor."""
    cpu = Path("/proc/cpuinfo")
    return cpu.read_text() if cpu.exists() else ""


def mkl_uses_half(capability: str, cpuinfo: str) -> bool:
    r"""Says whether MKL uses half of a processor's vectors.

    Args:
        capability: What ``torch.backends.cpu.get_cpu_capability()`` returns.
        cpuinfo: What ``/proc/cpuinfo`` says.

    >>> zen_4, zen_5 = (f"vendor_id : AuthenticAMD\ncpu family : {number}" for number in (25, 26))
    >>> mkl_uses_half("AVX512", zen_5), mkl_uses_half("AVX512", zen_4), mkl_uses_half("AVX2", zen_5)
    (True, False, False)
    >>> mkl_uses_half("AVX512", "vendor_id : GenuineIntel\ncpu family : 6")
    False
    """
    family = re.search(r"^cpu family\s*:\s*(\d+)", cpuinfo, re.MULTILINE)
    is_zen_5 = "AuthenticAMD" in cpuinfo and family is not None and int(family[1]) >= 26
    return capability.startswith("AVX512") and is_zen_5
