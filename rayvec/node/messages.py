"""Messages between a machine's fleet and its workers: what has no fixed size, through a pipe or a file of their own."""

from __future__ import annotations

import itertools
import mmap
import os
import pickle
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from rayvec.errors import message
from rayvec.node.open_files import within_file_limit
from rayvec.node.shared_memory import aligned, anonymous_file

__all__ = ["Message", "dumps", "pack", "packed", "packed_message", "receive", "send", "send_fd"]

_IN_PIPE_BYTES = 1 << 14
"""Larger messages go through a file of their own, so that no pipe is ever full while both ends write."""


def dumps(
    value: Any,
    buffer_callback: Callable[[pickle.PickleBuffer], bool] | None = None,
    start_again: Callable[[], None] = lambda: None,
) -> bytes:
    """Pickles an object for another process.

    Functions and classes of the script (``__main__``, or ``__mp_main__`` in a process that multiprocessing has
    spawned) are pickled by value, because the other process can't import them.

    Args:
        value: The object to pickle.
        buffer_callback: The argument of ``pickle.dumps``.
        start_again: Called before a second attempt, to discard the buffers of the first attempt.
    """
    try:
        data = pickle.dumps(value, 5, buffer_callback=buffer_callback)
        if b"_main__" not in data:
            return data
    except Exception:  # such as a local function, which cloudpickle can handle
        pass
    start_again()
    by_value: bytes = cloudpickle.dumps(value, 5, buffer_callback=buffer_callback)
    return by_value


def packed(value: Any) -> bytes:
    """Pickles what a worker gets.

    Raises:
        TypeError: A part of it can't be pickled.
    """
    try:
        return dumps(value)
    except Exception as error:
        raise TypeError(
            message(
                "Workers get actions, options and arguments by pickling.",
                expected="objects that can be pickled",
                got=f"{type(error).__name__}: {error}",
                remedy="Pass other values, or step in this process: num_nodes=0, workers_per_node=0.",
            )
        ) from error


class Message(NamedTuple):
    """A pickled value.

    Attributes:
        head: The pickle, without its large arrays.
        arrays: The bytes of these.
    """

    head: Any
    arrays: list[Any]

    def load(self) -> Any:
        """Returns the value. Its large arrays are views of the message, which may be written."""
        return pickle.loads(self.head, buffers=self.arrays)


def pack(value: Any) -> Message:
    """Pickles a value; functions and classes of the script by value."""
    large: list[Any] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes > _IN_PIPE_BYTES:
            large.append(raw)
        return raw.nbytes <= _IN_PIPE_BYTES

    return Message(dumps(value, is_small, large.clear), large)


def packed_message(value: Any) -> Message:
    """Pickles what a worker or a node gets.

    Raises:
        TypeError: A part of it can't be pickled.
    """
    try:
        return pack(value)
    except Exception:
        return Message(packed(value), [])  # which raises an error that explains it


def send(pipe: Connection, message: Message) -> None:
    """Sends a message."""
    head, arrays = message
    if not arrays and len(head) <= _IN_PIPE_BYTES:
        pipe.send_bytes(b"\0" + head)
        return
    parts = [head, *arrays]
    sizes = [memoryview(part).nbytes for part in parts]
    *starts, total = itertools.accumulate(map(aligned, sizes), initial=0)
    with within_file_limit():
        fd = anonymous_file("rayvec-message", total)
    try:
        content = np.frombuffer(mmap.mmap(fd, total), np.uint8)
        for start, size, part in zip(starts, sizes, parts, strict=True):
            content[start : start + size] = np.frombuffer(part, np.uint8)
        pipe.send_bytes(b"\1" + pickle.dumps((starts, sizes)))
        send_fd(pipe, fd)
    finally:
        os.close(fd)


def send_fd(pipe: Connection, fd: int) -> None:
    """Sends a file descriptor, after a message.

    Raises:
        WorkerLostError: This process may open no more files.
    """
    with within_file_limit():
        reduction.send_handle(pipe, fd, 0)


def receive(pipe: Connection) -> Message:
    """Receives a message.

    Raises:
        EOFError, OSError: The other end is closed.
    """
    data = pipe.recv_bytes()
    if data[0] == 0:
        return Message(data[1:], [])
    starts, sizes = pickle.loads(data[1:])
    fd = reduction.recv_handle(pipe)
    try:
        content = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))
    finally:
        os.close(fd)
    head, *arrays = (content[start : start + size] for start, size in zip(starts, sizes, strict=True))
    return Message(head, arrays)
