"""Large products of matrices in compiled graphs, by oneDNN on the processors that `rayvec.learners.products` describes.

torch's compiler has oneDNN multiply only by matrices that never change, as in inference. So a pass over the finished
graph, which has the derivatives and all sizes, puts operators of our own in the place of large products. The compiler
treats them as opaque calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from rayvec.learners import products

__all__ = ["LargeProducts"]


def _addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return products.product(a, b, bias.expand(b.shape[1]).contiguous())  # oneDNN ignores the strides of a bias


_LIBRARY: Any = torch.library.Library("rayvec", "DEF")  # type: ignore[no-untyped-call]


def _operator(name: str, arguments: str, function: Callable[..., Tensor], shaped_like: Any) -> Any:
    """Registers an operator, whose result has the shape and type of another operator's."""
    _LIBRARY.define(f"{name}({arguments}) -> Tensor")
    _LIBRARY.impl(name, function, "CPU")
    _LIBRARY.impl(name, shaped_like, "Meta")
    return getattr(torch.ops.rayvec, name).default


_aten = torch.ops.aten
_REPLACEMENTS = {
    _aten.mm.default: _operator("mm", "Tensor a, Tensor b", products.product, _aten.mm.default),
    _aten.bmm.default: _operator("bmm", "Tensor a, Tensor b", products.batched_product, _aten.bmm.default),
    _aten.addmm.default: _operator("addmm", "Tensor bias, Tensor a, Tensor b", _addmm, _aten.addmm.default),
}


_ROWS = 256
"""The value that counts for a dynamic dimension. torch's cache holds one graph for all its values, so the choice must
not depend on the first."""


class LargeProducts(CustomGraphPass):
    """Replaces the products of a graph for which oneDNN is faster."""

    def __call__(self, graph: fx.Graph) -> None:
        """Changes the graph."""
        for node in graph.nodes:
            if node.target in _REPLACEMENTS and not node.kwargs:
                *bias, a, b = (each.meta["val"] for each in node.args)
                is_row = all(each.dim() == 1 for each in bias)
                sizes = [size if isinstance(size, int) else _ROWS for size in (*a.shape[-2:], b.shape[-1])]
                if is_row and products.is_for_onednn(a, *sizes):
                    node.target = _REPLACEMENTS[node.target]

    def uuid(self) -> Any:
        """Returns what torch's cache of compiled graphs adds to its keys."""
        return get_hash_for_files((__file__, products.__file__))
