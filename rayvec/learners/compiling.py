"""Compiling a whole update: with a cache on disk, eager execution where nothing can compile, CUDA graphs on GPUs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["CUDAGraph", "Compiled"]

Update = Callable[..., Tensor]


class Compiled:
    """A function of tensors as one compiled graph, from its first call on.

    On a CPU what calls the kernels is compiled too, as C++: for nets of 128 units that saves a tenth of an update.
    Compiling takes ten to thirty seconds, loading what an earlier run has compiled a few; torch keeps that in a
    temporary directory, or where ``TORCHINDUCTOR_CACHE_DIR`` says. The function must not break the graph, and its
    tensors keep their shapes. Where compiling fails, as it does without a C++ compiler, the function runs as it is,
    after one warning.

    Args:
        function: May change tensors in place.
    """

    def __init__(self, function: Update) -> None:
        self._function = function
        self._call: Update | None = None

    def __call__(self, *args: Any) -> Tensor:
        """Calls the function."""
        if self._call is not None:
            return self._call(*args)
        on_cpu = next(iter(_tensors(args))).device.type == "cpu"
        options: dict[str, Any] = {"cpp_wrapper": True} if on_cpu else {}
        call: Update = torch.compile(self._function, fullgraph=True, dynamic=False, options=options)
        try:
            with warnings.catch_warnings():  # torch's own, about how it is made
                warnings.simplefilter("ignore", DeprecationWarning)
                result = call(*args)  # what fails to compile has changed nothing yet
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            warnings.warn(
                f"updates run uncompiled, at half the speed or less: {reason}. Install a C++ compiler such as g++, or "
                "pass compile=False",
                RuntimeWarning,
                stacklevel=2,
            )
            call = self._function
            result = call(*args)
        self._call = call
        return result


class CUDAGraph:
    """A function of CUDA tensors, captured at its first call and replayed from then on with one launch.

    Args:
        function: Of a tree of tensors that it changes in place, which must be the same tensors at every call, and of
            further tensors, whose values may differ from call to call; compiled or not.
    """

    def __init__(self, function: Update) -> None:
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._result = torch.empty(0)

    def __call__(self, state: Any, *args: Any) -> Tensor:
        """Calls the function; what it returns is a copy."""
        if self._graph is None:
            self._capture(state, args)
        assert self._graph is not None
        for static, given in zip(self._inputs, _tensors(args), strict=True):
            static.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._result.clone()

    def _capture(self, state: Any, args: Any) -> None:
        static = _cloned(args)
        self._inputs = list(_tensors(static))
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # libraries choose their kernels and workspaces before a capture, on copies
                self._function(_cloned(state), *static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._result = self._function(state, *static)
        self._graph = graph


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [tensor for part in tree for tensor in _tensors(part)]


def _cloned(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.clone()
    parts = [_cloned(part) for part in tree]
    return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
