"""Lets oneDNN, which torch contains, multiply matrices where MKL is slow."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_mkldnn: Any = torch.backends.mkldnn
_LEAST = 1 << 22
"""The number of multiply-adds in a pass through a network from which on oneDNN is faster: 400 rows, two nets of 64."""


@contextlib.contextmanager
def fast_products(num_rows: int, num_parameters: int) -> Iterator[None]:
    """Lets oneDNN multiply float32 matrices within the block, where it is faster than MKL and computes the same.

    MKL computes 256 bits at a time on AMD's processors. Zen 5 can compute 512, and oneDNN does so. torch's switch that
    gives oneDNN these products says that it may round to bfloat16 too, which it does only with instructions (AMX) that
    Zen 5 lacks. The choice depends on the processor and on the sizes alone, so that a run can be repeated.

    Args:
        num_rows: How many rows a product has.
        num_parameters: Of the network.
    """
    if num_rows * num_parameters < _LEAST or not onednn_is_faster():
        yield
        return
    matmul = _mkldnn.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@functools.cache
def onednn_is_faster() -> bool:
    """Says whether oneDNN multiplies large float32 matrices faster than MKL: on AMD's Zen 5 or newer, without AMX."""
    cpu = Path("/proc/cpuinfo")
    text = cpu.read_text() if cpu.exists() else ""
    family = re.search(r"AuthenticAMD\s+cpu family\s*:\s*(\d+)", text)
    has_switch = _mkldnn.is_available() and hasattr(_mkldnn, "matmul")
    return has_switch and family is not None and int(family[1]) >= 26 and "avx512f" in text and "amx" not in text
