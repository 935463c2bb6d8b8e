"""A pass over compiled graphs, after which oneDNN multiplies large matrices where MKL is slow.

torch multiplies float32 matrices by MKL, which computes 256 bits at a time on AMD's processors. Zen 5 (family 26) can
compute 512, and oneDNN, which torch contains too, does so. torch's own compiler has oneDNN multiply only by matrices
that never change. The choice depends on the processor and on the sizes alone, so that a run can be repeated.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

_LEAST = 1 << 22
"""The smallest product, in multiply-adds, for which oneDNN is faster: 256 rows by 128 columns, by 128 columns."""
_ROWS = 256
"""What counts for a dimension whose length varies."""
_LIBRARY: Any = torch.library.Library("rayvec", "DEF")  # type: ignore[no-untyped-call]


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Returns the product ``[M, N]`` of matrices ``[M, K]`` and ``[K, N]``."""
    return addmm(None, a, b)


def addmm(bias: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Returns the product of two matrices, plus a bias ``[N]`` or nothing."""
    row = None if bias is None else bias.expand(b.shape[1]).contiguous()  # the operator ignores strides
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.mT, row, "none", [], "")
    return product


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Returns the products ``[E, M, N]`` of matrices ``[E, M, K]`` and ``[E, K, N]``."""
    return torch.stack([mm(*pair) for pair in zip(a, b, strict=True)])


def _registered(function: Any, replaced: Any, arguments: str) -> Any:
    """Registers an operator whose result has the shape and the dtype of the one that it replaces."""
    name = function.__name__
    _LIBRARY.define(f"{name}({arguments}) -> Tensor")
    _LIBRARY.impl(name, function, "CPU")
    _LIBRARY.impl(name, replaced, "Meta")
    return getattr(torch.ops.rayvec, name).default


_aten = torch.ops.aten
_REPLACEMENTS = {
    _aten.mm.default: _registered(mm, _aten.mm.default, "Tensor a, Tensor b"),
    _aten.addmm.default: _registered(addmm, _aten.addmm.default, "Tensor bias, Tensor a, Tensor b"),
    _aten.bmm.default: _registered(bmm, _aten.bmm.default, "Tensor a, Tensor b"),
}


class ByOneDNN(CustomGraphPass):
    """Replaces large products of float32 matrices in a graph."""

    def __call__(self, graph: fx.Graph) -> None:
        """Changes the graph."""
        for node in graph.nodes:
            if (
                node.target in _REPLACEMENTS
                and not node.kwargs
                and _is_large(*(each.meta["val"] for each in node.args))
            ):
                node.target = _REPLACEMENTS[node.target]

    def uuid(self) -> Any:
        """Returns what torch's cache of compiled graphs adds to its keys."""
        return get_hash_for_files((__file__,))


def _is_large(*args: Tensor) -> bool:
    *bias, a, b = args
    sizes = [size if isinstance(size, int) else _ROWS for size in (*a.shape[-2:], b.shape[-1])]
    is_row = all(each.dim() == 1 for each in bias)
    return is_row and a.dtype == torch.float32 and min(sizes) > 1 and math.prod(sizes) >= _LEAST


def onednn_is_faster() -> bool:
    """Says whether oneDNN multiplies large matrices faster than MKL: with AVX-512, on AMD's Zen 5 or newer."""
    cpu = Path("/proc/cpuinfo")
    family = re.search(r"AuthenticAMD\s+cpu family\s*:\s*(\d+)", cpu.read_text() if cpu.exists() else "")
    is_zen_5 = family is not None and int(family[1]) >= 26
    backends: Any = torch.backends
    has_operator = backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return is_zen_5 and has_operator and backends.cpu.get_cpu_capability().startswith("AVX512")
