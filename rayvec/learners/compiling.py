"""Compiling a whole update: with a cache on disk, eager execution where nothing can compile, CUDA graphs on GPUs."""

from __future__ import annotations

import functools
import textwrap
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rayvec.data.trees import tree_leaves
from rayvec.learners import products

__all__ = ["CUDAGraph", "Compiled", "GraphPool", "can_capture"]

Update = Callable[..., Any]


_CONCATENATE_FIRST = {"max_complex_pointwise_cat_inputs": 1, "max_pointwise_cat_inputs": 1}
"""Writes a flat gradient to memory before the optimizer reads it. Fused, the optimizer would select each number from
all pieces, without vector instructions."""


_CHECKED = ("TENSOR_MATCH", "GLOBAL_STATE", "SHAPE_ENV")
"""What torch checks before it runs a graph: shapes of tensors, numbers of threads. By default it would also compare, at
each call, every constant that the function read when it was compiled: a hundred in an update of SAC."""


class Compiled:
    """A function of tensors as a compiled graph, from its first call on; one for each set of shapes, up to eight.

    One graph serves all sizes above 1 of a dimension that was marked by ``torch._dynamo.maybe_mark_dynamic``. Arguments
    are trees of tensors. Everything else that the function reads is read at the first call only, and must not change.

    On a CPU the code that calls the kernels is compiled too, as C++: for networks of 128 units that saved 8 %.
    Compiling takes ten to thirty seconds; loading what an earlier run compiled takes a few. torch keeps compiled code
    in a temporary directory, or in ``TORCHINDUCTOR_CACHE_DIR``. The function must not break the graph. Where compiling
    fails, at the first call or at a later one with other shapes, the function runs uncompiled from then on, after one
    warning.

    Args:
        function: May change tensors in place.
        cpu_options: More of torch's options for where tensors are on a CPU.
    """

    def __init__(self, function: Update, **cpu_options: Any) -> None:
        self._function = function
        self._cpu_options = {"cpp_wrapper": True, **_CONCATENATE_FIRST, **cpu_options}
        self._call: Update = self._first
        self._is_compiled = False

    def __call__(self, *args: Any) -> Any:
        """Calls the function."""
        try:
            return self._call(*args)
        except Exception as error:
            if not (self._is_compiled and _is_of_compiler(error)):
                raise
            return self._fall_back(error, *args)  # nothing was computed yet

    def _first(self, *args: Any) -> Any:
        """Compiles the function and calls it."""
        on_cpu = next(tree_leaves(args)).device.type == "cpu"
        options = {"guard_filter_fn": _checked, **(self._cpu_options if on_cpu else {})}
        try:  # a torch that lacks one of the options says so at once
            if on_cpu and products.mkl_is_slow():
                from rayvec.learners.compiled_products import FasterProducts  # imports torch's compiler: seconds

                options["post_grad_custom_post_pass"] = FasterProducts()
            function = _with_own_code(self._function)
            call: Update = torch.compile(function, fullgraph=True, dynamic=False, options=options)
            with warnings.catch_warnings():  # torch's own, about how it is made
                warnings.simplefilter("ignore", DeprecationWarning)
                result = call(*args)  # what fails to compile has changed nothing yet
        except Exception as error:
            return self._fall_back(error, *args)
        self._call, self._is_compiled = call, True
        return result

    def _fall_back(self, error: Exception, *args: Any) -> Any:
        """Calls the function uncompiled, now and from now on."""
        self._call, self._is_compiled = self._function, False
        warnings.warn(
            f"updates run uncompiled, at half the speed or less: {_short_reason(error)}. "
            f"{_remedy(error)} compile=False",
            RuntimeWarning,
            stacklevel=3,
        )
        return self._function(*args)


def _is_of_compiler(error: Exception) -> bool:
    """Says whether compiling failed, not the function. It imports torch's compiler, which takes seconds, only here."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return isinstance(error, TorchDynamoException | FailOnRecompileLimitHit)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())


def _short_reason(error: Exception) -> str:
    """Returns the reason in at most 200 characters, without torch's advice to its own developers."""
    reason = _reason(error).partition(" Set TORCHDYNAMO_VERBOSE")[0]
    return textwrap.shorten(reason, 200, placeholder=" ...").removesuffix(".")


def _remedy(error: Exception) -> str:
    if "C++ compiler" in _reason(error):
        return "Install a C++ compiler such as g++, or pass"
    if isinstance(error, OSError) or any(each in _reason(error) for each in ("PermissionError", "OSError")):
        return "Set TORCHINDUCTOR_CACHE_DIR to a directory that can be written, or pass"
    return "To do without, pass"


def _checked(guards: Sequence[Any]) -> list[bool]:
    return [guard.guard_type in _CHECKED for guard in guards]


def _with_own_code(function: Any) -> Update:
    """Returns the function with a copy of its code.

    torch keeps at most ``torch._dynamo.config.recompile_limit`` (8) graphs for each code object: learners of one
    process would share the limit, and torch would refuse the ninth graph.
    """
    if isinstance(function, types.MethodType):
        return types.MethodType(_with_own_code(function.__func__), function.__self__)
    parts = (function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy = types.FunctionType(function.__code__.replace(), *parts)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def can_capture(device: torch.device) -> bool:
    """Says whether a `CUDAGraph` can be captured on a device."""
    return device.type == "cuda"


class GraphPool:
    """The memory that the graphs of a learner share for what they compute on the way.

    Graphs of different sizes would each hold as much. Sharing is safe: what a graph returns is copied before another is
    replayed. Graphs that are captured after all others of a pool are gone need a new pool: torch refuses the old one.
    """

    @functools.cached_property
    def handle(self) -> Any:
        """What torch calls it."""
        return torch.cuda.graph_pool_handle()


class CUDAGraph:
    """A function of CUDA tensors, captured at its first call and replayed from then on with one launch.

    Args:
        function: Of a tree of tensors that it changes in place, which must be the same tensors at every call, and of
            further tensors, whose values may differ from call to call; compiled or not.
        pool: Memory that it shares with other graphs; by default its own.
    """

    def __init__(self, function: Update, pool: GraphPool | None = None) -> None:
        self._function, self._pool = function, pool or GraphPool()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._result: Any = None

    def __call__(self, state: Any, *args: Any) -> Any:
        """Calls the function; what it returns is a copy."""
        if self._graph is None:
            self._capture(state, args)
        assert self._graph is not None
        for static, given in zip(self._inputs, tree_leaves(args), strict=True):
            static.copy_(given, non_blocking=True)
        self._graph.replay()
        return _cloned(self._result)

    def _capture(self, state: Any, args: Any) -> None:
        static = _cloned(args)
        self._inputs = list(tree_leaves(static))
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # libraries choose their kernels and workspaces before a capture, on copies
                self._function(_cloned(state), *static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool.handle):
            self._result = self._function(state, *static)
        self._graph = graph


def _cloned(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {name: _cloned(part) for name, part in tree.items()}
    parts = [_cloned(part) for part in tree]
    return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
