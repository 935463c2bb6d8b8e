"""Messages between a machine's fleet and its workers: pickles, through a socket that keeps them apart.

A large message goes through a file of its own. So no socket is ever full while both ends write, since a worker has at
most `MAX_POSTED` commands that it has not answered.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import cloudpickle

from rayvec.envs.failures import FAILURES, captured
from rayvec.envs.pickled_parts import names_what_cannot_be_imported
from rayvec.errors import RemoteFailure
from rayvec.fleet.commands import Answer

MAX_POSTED = 8
NO_NEWS_MESSAGE = b"no news"
"""The answer ``NO_NEWS`` of a worker, which most steps have: nothing of it needs to be pickled."""
_T = TypeVar("_T")
_PACKET_BYTES = 1 << 13
_FILE_BYTES = socket.CMSG_LEN(4)
"""The size of a file descriptor beside a packet."""


def dumps(
    value: Any,
    buffer_callback: Callable[[pickle.PickleBuffer], bool] | None = None,
    start_again: Callable[[], None] = lambda: None,
) -> bytes:
    """Pickles an object for another process.

    Functions and classes of the script, and of other modules that the other process can't import, are pickled by value.
    A worker finds out by importing them that they can't be.

    Args:
        value: The object to pickle.
        buffer_callback: The argument of ``pickle.dumps``.
        start_again: Called before a second attempt, to discard the buffers of the first attempt.
    """
    try:
        data = pickle.dumps(value, 5, buffer_callback=buffer_callback)
        if not names_what_cannot_be_imported(data):
            return data
    except Exception:  # such as a local function, which cloudpickle can handle
        pass
    start_again()
    by_value: bytes = cloudpickle.dumps(value, 5, buffer_callback=buffer_callback)
    return by_value


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
        if raw.nbytes > _PACKET_BYTES:
            large.append(raw)
        return raw.nbytes <= _PACKET_BYTES

    return Message(dumps(value, is_small, large.clear), large)


def packed_answer(answer: Answer, where: str, pickled: Callable[[Any], _T]) -> _T:
    """Pickles an answer, or the failure to pickle it."""
    try:
        return pickled(tuple(answer))
    except FAILURES as error:
        where = f"{where}, in what an environment returned (infos, observations or results)"
        return pickled(tuple(Answer(failure=captured(error, where), place=answer.place)))


def read_answer(load: Callable[[], Any], name: str) -> Answer:
    """Unpickles an answer. If it can't be unpickled here, it returns that failure."""
    try:
        return Answer(*load())
    except Exception as error:  # a class that this process can't import
        return Answer(failure=RemoteFailure.capture(error, f"the process that unpickles an answer of {name}"))


def send(channel: socket.socket, data: bytes) -> None:
    """Sends a message."""
    if len(data) <= _PACKET_BYTES:
        channel.send(data)
        return
    with open(os.memfd_create("rayvec-message", os.MFD_CLOEXEC), "wb") as file:
        file.write(data)
        file.flush()
        send_files(channel, file.fileno())


def receive(channel: socket.socket) -> bytes:
    """Receives a message.

    Raises:
        EOFError, OSError: The other end is closed.
    """
    data, ancillary, *_ = channel.recvmsg(_PACKET_BYTES, _FILE_BYTES)
    if not data:
        raise EOFError
    if not ancillary:
        return data
    with open(int.from_bytes(ancillary[0][2], sys.byteorder), "rb") as file:
        file.seek(0)
        return file.read()


def send_files(channel: socket.socket, *files: int) -> None:
    """Sends file descriptors."""
    socket.send_fds(channel, [b"files"], files)


def receive_files(channel: socket.socket, count: int) -> list[int]:
    """Receives file descriptors, which programs that this process starts do not inherit."""
    data, files, *_ = socket.recv_fds(channel, _PACKET_BYTES, count)
    if not data:
        raise EOFError
    for fd in files:
        os.set_inheritable(fd, False)
    return files
