"""A device that this machine does not have: tensors on ``meta`` whose values lie beside them.

A CPU forgives what a GPU does not, and hides what costs time there. On the pretended device

*   an operation on tensors of both devices raises, as on CUDA (numbers without dimensions may come from the CPU);
*   an operation whose result has as many rows as some values say raises, since a GPU would have to wait for it;
*   values that the host reads, and arrays that it uploads, are counted, with the line that did it;
*   everything else is computed, so that results can be compared with those of a CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

import rayvec

aten = torch.ops.aten
_TRANSFERS = {aten._to_copy.default, aten.copy_.default}
_WAITS = {aten.nonzero.default, aten.masked_select.default, aten.equal.default, aten._unique2.default}


class PretendDevice(TorchDispatchMode):
    """While it is entered, ``device="meta"`` is a device like a GPU.

    Attributes:
        reads: A line for each time that the host read values of the device: file, line and function.
        uploads: The same for each time that an array went to the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.uploads: list[str] = []
        self._twins: dict[int, Tensor] = {}  # by storage of the pretended tensor
        self._bases: dict[int, Tensor] = {}  # by storage of the twin; they also keep both storages

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        here = [tensor for tensor in given if tensor.device.type == "meta"]
        target = kwargs.get("device")
        goes_here = torch.device(target).type == "meta" if target is not None else bool(here)
        if not here and not goes_here:
            return function(*args, **kwargs)
        if function is aten._local_scalar_dense.default:
            self._read()
        elif function in _TRANSFERS:
            self._transfer(function, args, goes_here)
        else:
            self._check(function, given, here)
        if goes_here and target is not None:
            kwargs["device"] = torch.device("cpu")
        twin_args, twin_kwargs = tree_map(self._twin, (args, kwargs))
        result = function(*twin_args, **twin_kwargs)
        if not goes_here:
            return result
        twins, own = (tree_flatten(each)[0] for each in ((twin_args, twin_kwargs), (args, kwargs)))
        same = {id(twin): tensor for twin, tensor in zip(twins, own, strict=True)}  # what was changed in place

        def pretend(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return same[id(leaf)] if id(leaf) in same else self._pretend(leaf)

        return tree_map(pretend, result)

    def _transfer(self, function: Any, args: Any, goes_here: bool) -> None:
        source = args[1] if function is aten.copy_.default else args[0]
        place = args[0].device.type == "meta" if function is aten.copy_.default else goes_here
        if source.device.type == "meta" and not place:
            self._read()
        elif source.device.type != "meta" and place and source.ndim:
            self.uploads.append(_line())

    def _read(self) -> None:
        self.reads.append(_line())

    def _check(self, function: Any, given: list[Tensor], here: list[Tensor]) -> None:
        elsewhere = [tensor for tensor in given if tensor.device.type != "meta" and tensor.ndim]
        if here and elsewhere:
            raise RuntimeError(f"{function} on tensors of two devices, in {_line()}")
        is_index = function in (aten.index.Tensor, aten.index_put_.default)
        masks = [tensor for tensor in given[1:] if tensor.dtype in (torch.bool, torch.uint8)] if is_index else []
        if function in _WAITS or (masks and not (function is aten.index_put_.default and masks[0] is given[-1])):
            raise RuntimeError(f"{function} waits for values, in {_line()}")

    def _twin(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.device.type != "meta":
            return leaf
        twin = self._twins[leaf.untyped_storage()._cdata]
        if twin.dtype != leaf.dtype:
            twin = torch.empty(0, dtype=leaf.dtype).set_(twin.untyped_storage())
        return torch.as_strided(twin, leaf.shape, leaf.stride(), leaf.storage_offset())

    def _pretend(self, twin: Tensor) -> Tensor:
        """Returns the tensor of the pretended device with the values of `twin`; views of one memory stay such."""
        place = twin.untyped_storage()._cdata
        if place not in self._bases:
            size = twin.untyped_storage().nbytes() // twin.element_size()
            base = torch.empty(size, dtype=twin.dtype, device="meta")
            self._bases[place] = base
            self._twins[base.untyped_storage()._cdata] = torch.as_strided(twin, (size,), (1,), 0)
        base = self._bases[place]
        if base.dtype != twin.dtype:
            base = torch.empty(0, dtype=twin.dtype, device="meta").set_(base.untyped_storage())
        return torch.as_strided(base, twin.shape, twin.stride(), twin.storage_offset())


class _FromPython(TorchFunctionMode):
    """Writes the numbers of ``torch.tensor`` and ``Tensor.new_tensor`` to the device; on meta torch drops them."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == "meta":
            return torch.tensor(*args, **{**kwargs, "device": "cpu"}).to("meta")
        if function is Tensor.new_tensor and args[0].device.type == "meta":
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs}).to("meta")
        return function(*args, **kwargs)


_PACKAGE = f"{Path(rayvec.__file__).parent}/"


def _line() -> str:
    """Returns file, line and function of the package, or else of the test, that runs."""
    frame = sys._getframe(1)
    found = None
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE):
            return f"{name.rpartition('/')[2]}:{frame.f_lineno} {frame.f_code.co_name}"
        if found is None and "/tests/" in name and "pretend_device" not in name:
            found = f"{name.rpartition('/')[2]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return found or "torch"


@contextmanager
def pretended() -> Iterator[PretendDevice]:
    """Enters a pretended device."""
    with PretendDevice() as device, _FromPython():
        yield device
