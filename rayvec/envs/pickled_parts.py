"""Pickles for worker processes, in an anonymous file that those of a machine share."""

from __future__ import annotations

import copyreg
import mmap
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, cached_property
from itertools import pairwise
from multiprocessing.process import current_process
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import cloudpickle

_INHERITED = "should only be shared between processes through inheritance"
"""In the errors of multiprocessing about its own Value, Lock and Queue."""

_ALIGNMENT = 64


class Places(NamedTuple):
    """Where a part lies.

    Attributes:
        spans: First byte in the file and after the last: of what changes ``sys``, the factory, then each array.
        start: Index of the part's first environment.
        stop: Index after its last.
    """

    spans: tuple[slice, ...]
    start: int
    stop: int


class PickledParts:
    """A pickled factory for the processes of one machine, which share the pages of its arrays until they write to them.

    Ray sends it to another node with its content.

    Args:
        pieces: What changes ``sys``, the pickle, and the arrays that it refers to.
        bounds: A process has the environments between each two of them.

    Attributes:
        fd: The file, which :meth:`close` closes.
        places: The place of each part.
    """

    def __init__(self, pieces: Sequence[bytes | memoryview], bounds: Sequence[int]) -> None:
        self.fd = os.memfd_create("rayvec-parts", os.MFD_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self.fd)
        spans = []
        with open(self.fd, "wb", closefd=False) as file:
            for piece in pieces:
                start = file.seek(-file.tell() % _ALIGNMENT, os.SEEK_CUR)
                spans.append(slice(start, start + file.write(piece)))
        self._bounds = bounds
        self.places = [Places(tuple(spans), *pair) for pair in pairwise(bounds)]

    def __reduce__(self) -> tuple[Any, ...]:
        return PickledParts, ([*map(bytes, _pieces(self.fd, self.places[0]))], self._bounds)


def load_part(fd: int, places: Places) -> Any:
    """Returns the factory of one part. Its arrays are copies only of the pages that this process writes to."""
    with_sys, pickled, *arrays = _pieces(fd, places)
    pickle.loads(with_sys)
    return pickle.loads(pickled, buffers=arrays).part(places.start, places.stop)


def _pieces(fd: int, places: Places) -> list[memoryview]:
    content = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))
    return [content[span] for span in places.spans]


def _reduced(attribute: cached_property[Any]) -> tuple[Any, ...]:
    """Tells how to pickle a ``cached_property``, which before Python 3.12 holds a lock."""
    return cached_property, (attribute.func,), {"attrname": attribute.attrname}


copyreg.pickle(cached_property, _reduced)


def modules_that_run() -> list[str]:
    """Returns the names of the modules whose body this thread executes, the innermost first."""
    frame: FrameType | None = sys._getframe()
    names = []
    while frame is not None:
        is_of_a_file = not frame.f_code.co_filename.startswith("<")  # else of eval() or exec()
        if frame.f_code.co_name == "<module>" and is_of_a_file:
            names.append(frame.f_globals.get("__name__", "__main__"))
        frame = frame.f_back
    return names


def pickle_by_value_what_cannot_be_imported() -> None:
    """Lets cloudpickle pickle functions and classes by value if no other process can import their module.

    Such are modules that were loaded from a path, the script of a process that multiprocessing has spawned, and a
    module that makes environments when it is imported: workers would make them too.
    """
    running = modules_that_run()
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and module.__name__ == name:  # else it stands in for a module
            if name in running or not _can_be_imported(module):
                cloudpickle.register_pickle_by_value(module)


@cache
def _can_be_imported(module: ModuleType) -> bool:
    """Returns whether a finder finds a module that is loaded. A folder of its name without code is another module."""
    if "." in module.__name__ or module.__name__ in sys.stdlib_module_names:
        return True
    with suppress(Exception):  # a finder may refuse the name
        specs = filter(None, (finder.find_spec(module.__name__, None) for finder in sys.meta_path))
        return any(spec.origin or getattr(module, "__file__", None) is None for spec in specs)
    return True


def names_what_cannot_be_imported(pickled: bytes) -> bool:
    """Returns whether a pickle refers by name to a module that is to be pickled by value."""
    return any(name.encode() in pickled for name in ("_main__", *cloudpickle.list_registry_pickle_by_value()))


def pickled_for_workers(
    value: Any, what: str, remedy: str, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None
) -> bytes:
    """Returns an object by cloudpickle.

    Args:
        value: The object.
        what: What it is to the caller, for the error.
        remedy: What else the caller can do.
        buffer_callback: As of ``pickle.dumps``.

    Raises:
        TypeError: It can't be pickled.
    """
    pickle_by_value_what_cannot_be_imported()
    try:
        data: bytes = cloudpickle.dumps(value, 5, buffer_callback)
    except Exception as error:
        if _INHERITED in str(error):
            remedy = "Use the Value, Lock or Queue of a multiprocessing.Manager(), which workers can share."
        raise TypeError(
            f"Workers get {what} by pickling, which failed: {type(error).__name__}: {error}. {remedy}"
        ) from error
    return data


def carrying_sys(pickled: bytes) -> bytes:
    """Returns a pickled object together with what multiprocessing's spawn gives to a process.

    Unpickling it first puts this process's ``sys.path`` in front of the other process's, so that it finds the object's
    modules, and replaces the other process's ``sys.argv`` and the key of multiprocessing, which proxies of a
    ``multiprocessing.Manager()`` need.
    """
    return pickle.dumps(_WithSys(pickled))


class _WithSys(NamedTuple):
    """A pickled object that is unpickled when ``sys`` and the key of multiprocessing have been changed."""

    pickled: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        path = [os.path.abspath(entry) if os.path.exists(entry or ".") else entry for entry in sys.path]
        return _load_with_sys, (path, sys.argv, bytes(current_process().authkey), self.pickled)


def _load_with_sys(path: list[str], argv: list[str], authkey: bytes, pickled: bytes) -> Any:
    sys.path[:] = dict.fromkeys([*path, *sys.path])
    sys.argv[:] = argv
    current_process().authkey = authkey
    return pickle.loads(pickled)
