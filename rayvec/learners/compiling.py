"""Compiled functions of tensors: a cache on disk, uncompiled where nothing can compile, captured on GPUs."""

from __future__ import annotations

import functools
import textwrap
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rayvec.data.trees import tree_leaves, tree_map

Function = Callable[..., Any]

_CPU_OPTIONS: dict[str, Any] = {
    "cpp_wrapper": True,
    "max_complex_pointwise_cat_inputs": 1,
    "max_pointwise_cat_inputs": 1,
}
"""The code that calls the kernels is C++ too: for networks of 128 units that saved 8 %. And a flat gradient is written
to memory before the optimizer reads it: fused, each number would be selected from all pieces, without vectors."""

_CHECKED = ("TENSOR_MATCH", "GLOBAL_STATE", "SHAPE_ENV")
"""What torch checks before it runs a graph: shapes of tensors, numbers of threads. By default it would also compare, at
each call, every constant that the function read when it was compiled."""


class Compiled:
    """A function of tensors as a compiled graph, from its first call on; on CUDA captured and launched as a whole.

    Arguments after the first are trees of tensors. Everything else that the function reads is read at the first call
    only, and must not change, but for the values of tensors. Compiling takes ten to thirty seconds; loading what an
    earlier run compiled takes a few. torch keeps compiled code in a temporary directory, or in
    ``TORCHINDUCTOR_CACHE_DIR``. The function must not break the graph. Where compiling fails, at the first call or at a
    later one with other shapes, the function runs uncompiled from then on, after one warning.

    Args:
        function: Of a tensor or a tree of them, which are the same tensors at every call, and of further arguments.
        varies: Whether one graph serves all lengths above 1 of further arguments; else each set of shapes, up to
            eight, has one.
        cpu_options: More of torch's options for where tensors are on a CPU.
    """

    def __init__(self, function: Function, *, varies: bool = False, **cpu_options: Any) -> None:
        self._function, self._varies = function, varies
        self._cpu_options = {**_CPU_OPTIONS, **cpu_options}
        self.reset()

    def reset(self) -> None:
        """Forgets the graph: what the function reads besides its arguments has changed."""
        self._graph: Function | None = None
        self._captured: dict[Any, CUDAGraph] = {}

    def __call__(self, state: Any, *args: Any) -> Any:
        """Calls the function without recording a graph for autograd."""
        device = next(tree_leaves(state)).device
        with torch.no_grad():
            if not can_capture(device):
                return self._call(state, *args)
            key = tuple(each.shape for each in tree_leaves(args))
            if key not in self._captured:
                self._captured[key] = CUDAGraph(functools.partial(self._call, state), self._pool)
            return self._captured[key](*args)

    @functools.cached_property
    def _pool(self) -> Any:
        """The memory that captured graphs share for what they compute on the way: what they return is copied."""
        return torch.cuda.graph_pool_handle()

    def _call(self, state: Any, *args: Any) -> Any:
        if self._varies:
            for each in tree_leaves(args):
                torch._dynamo.maybe_mark_dynamic(each, 0)
        try:
            return (self._graph or self._first)(state, *args)
        except Exception as error:
            if self._graph is self._function:
                raise
            self._graph = self._function
            reason = textwrap.shorten(" ".join(str(error).split()), 200, placeholder=" ...")
            warnings.warn(
                f"updates run uncompiled, at half the speed or less: {reason} Install a C++ compiler, set "
                "TORCHINDUCTOR_CACHE_DIR to a directory that can be written, or pass compile=False.",
                RuntimeWarning,
                stacklevel=3,
            )
            return self._function(state, *args)  # a graph that fails to compile has changed nothing

    def _first(self, state: Any, *args: Any) -> Any:
        on_cpu = next(tree_leaves(state)).device.type == "cpu"
        options = {"guard_filter_fn": _checked, **(self._cpu_options if on_cpu else {})}
        with warnings.catch_warnings():  # torch's own, about how it is made
            warnings.simplefilter("ignore", DeprecationWarning)
            graph: Any = torch.compile(_with_own_code(self._function), fullgraph=True, dynamic=False, options=options)
            result = graph(state, *args)
        self._graph = graph
        return result


def _with_own_code(function: Any) -> Any:
    """Returns the function with a copy of its code.

    torch keeps at most ``torch._dynamo.config.recompile_limit`` (8) graphs for each code object: learners of one
    process would share the limit.
    """
    if isinstance(function, types.MethodType):
        return types.MethodType(_with_own_code(function.__func__), function.__self__)
    parts = (function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    return types.FunctionType(function.__code__.replace(), *parts)


def _checked(guards: Sequence[Any]) -> list[bool]:
    return [guard.guard_type in _CHECKED for guard in guards]


def can_capture(device: torch.device) -> bool:
    """Says whether a `CUDAGraph` can be captured on a device."""
    return device.type == "cuda"


class CUDAGraph:
    """A function of trees of CUDA tensors, captured at its first call and replayed from then on with one launch.

    Args:
        function: Reads its arguments, whose values may differ from call to call, and other tensors, which must be the
            same ones at every call. It changes none.
        pool: Memory that it shares with other graphs.
    """

    def __init__(self, function: Function, pool: Any) -> None:
        self._function, self._pool = function, pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Any = ()
        self._result: Any = None

    def __call__(self, *args: Any) -> Any:
        """Calls the function; what it returns is a copy."""
        if self._graph is None:
            self._graph = self._capture(args)
        for static, given in zip(tree_leaves(self._inputs), tree_leaves(args), strict=True):
            static.copy_(given, non_blocking=True)
        self._graph.replay()
        return tree_map(torch.clone, self._result)

    def _capture(self, args: Any) -> torch.cuda.CUDAGraph:
        self._inputs = tree_map(torch.clone, args)
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # libraries choose their kernels and workspaces before a capture
                self._function(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._result = self._function(*self._inputs)
        return graph
