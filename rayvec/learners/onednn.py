"""Lets oneDNN, which torch contains, multiply matrices where MKL is slow."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_mkldnn: Any = torch.backends.mkldnn
_LEAST = 1 << 22
"""Rows times parameters: from here on oneDNN is faster. 400 rows reach it with an actor and a critic of 64x64."""
_lock = threading.Lock()
_found: list[str] = []
"""torch's switch as each running block has found it. The last block to end restores the first of these."""


@contextlib.contextmanager
def fast_products(num_rows: int, num_parameters: int, own_network: bool) -> Iterator[None]:
    """Lets oneDNN multiply float32 matrices within the block, where it is faster than MKL.

    MKL computes 256 bits at a time on AMD's processors. Zen 5 can compute 512, and oneDNN does so. torch's switch that
    gives oneDNN these products permits it to round to bfloat16 too, which it does only with instructions (AMX) that
    Zen 5 lacks. The switch belongs to the process: learners in other threads multiply by oneDNN meanwhile.

    Args:
        num_rows: How many rows a product has.
        num_parameters: Of the network.
        own_network: Whether the network is the user's. It stays as it is: it may read the switch, which torch refuses.
    """
    if own_network or num_rows * num_parameters < _LEAST or not onednn_is_faster(_cpu()):
        yield
        return
    with _switched():
        yield


@contextlib.contextmanager
def _switched() -> Iterator[None]:
    matmul = _mkldnn.matmul
    with _lock:
        is_inherited = matmul.fp32_precision == _mkldnn.fp32_precision
        _found.append("none" if is_inherited else matmul.fp32_precision)
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        with _lock:
            if len(_found) == 1:
                matmul.fp32_precision = _found[0]
            del _found[-1]


@functools.cache
def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


@functools.cache
def onednn_is_faster(cpu: str) -> bool:
    """Says whether oneDNN multiplies large float32 matrices faster than MKL, and as exactly.

    Args:
        cpu: What Linux says of the processor. AMD's Zen 5 or newer is meant, without AMX.
    """
    family = re.search(r"AuthenticAMD\s+cpu family\s*:\s*(\d+)", cpu)
    is_zen_5 = family is not None and int(family[1]) >= 26 and "avx512f" in cpu and "amx" not in cpu
    if not (is_zen_5 and _mkldnn.is_available() and hasattr(_mkldnn, "matmul")):
        return False
    above_1 = torch.full((256, 256), 1 + 2**-12)  # 1 in bfloat16
    with _switched():
        return bool((above_1 @ above_1).min() > 256.1)
