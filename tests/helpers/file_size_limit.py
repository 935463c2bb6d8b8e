"""A limit of the size of files, for this process, that ends before pytest writes its report to one."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def file_size_limit(size: int | None = None) -> Iterator[None]:
    """Allows files of `size` bytes at most, where it is given, and puts back the limit that was before."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
