"""Products of matrices in compiled graphs, on the processors that `rayvec.learners.products` describes.

torch's compiler has oneDNN multiply only by matrices that never change, as in inference. So a pass over the finished
graph, which has the derivatives and all sizes, puts operators of our own in the place of large products, which the
compiler treats as opaque calls. The same pass transposes products with few columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from rayvec.learners import products

__all__ = ["FasterProducts"]


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


class FasterProducts(CustomGraphPass):
    """Has the products of a graph computed in the way that is fastest on this processor."""

    def __call__(self, graph: fx.Graph) -> None:
        """Changes the graph."""
        found = [node for node in graph.nodes if node.target in _REPLACEMENTS and not node.kwargs]
        values = [[each.meta["val"] for each in node.args] for node in found]  # nodes that are added have none
        for node, (*bias, a, b) in zip(found, values, strict=True):
            is_row = all(each.dim() == 1 for each in bias)
            sizes = [size if isinstance(size, int) else _ROWS for size in (*a.shape[-2:], b.shape[-1])]
            if is_row and products.is_for_onednn(a, *sizes):
                node.target = _REPLACEMENTS[node.target]
            elif not bias and products.is_for_transposing(a, *sizes):
                _transpose(graph, node, a.dim())

    def uuid(self) -> Any:
        """Returns what torch's cache of compiled graphs adds to its keys."""
        return get_hash_for_files((__file__, products.__file__)), products.mkl_is_slow(), products.onednn_is_faster()


def _transpose(graph: fx.Graph, node: fx.Node, num_dims: int) -> None:
    """Replaces the product of two matrices by the transpose of the product of their transposes."""
    swapped = [*range(num_dims - 2), num_dims - 1, num_dims - 2]
    with graph.inserting_before(node):
        b, a = (graph.call_function(_aten.permute.default, (each, swapped)) for each in reversed(node.args))
        product = graph.call_function(node.target, (b, a))  # type: ignore[arg-type]
        node.replace_all_uses_with(graph.call_function(_aten.permute.default, (product, swapped)))
    graph.erase_node(node)
