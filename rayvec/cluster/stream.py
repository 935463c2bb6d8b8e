"""The stream between the driver and a node: frames of raw arrays and of a pickled rest, over TCP.

Both ends first prove that they hold the key of the node, which Ray hands over, as environment servers do. A frame is a
head, raw arrays whose shapes both ends know, and maybe a pickled value with its large arrays beside it. Nothing is
unpickled whose HMAC does not hold.
"""

from __future__ import annotations

import hmac
import math
import select
import socket
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayvec.data.trees import as_slice
from rayvec.env_server import dial, watch_silence
from rayvec.fleet.commands import ByRows
from rayvec.node.messages import Message
from rayvec.servers.env_servers import dialled

_PROOF_BYTES = 32
_HEAD = struct.Struct("<HHIQ")
_SIZE = struct.Struct("<Q")
_AHEAD_BYTES = 1 << 16
"""How much is received at once: all of a small frame, and maybe the beginning of the next one."""
_MAX_PARTS = 512
"""How many buffers one system call takes; the system allows 1,024."""
_MAX_ROWS = 4
"""For how many sets of rows their memory is remembered. It is a copy where the rows are not consecutive."""
_SILENT_S = 10
"""How long the other machine may be silent, or for the driver acknowledge nothing: nodes always read."""


class Head(NamedTuple):
    """What a frame begins with.

    Attributes:
        place: The place of the answered command among those that are pending.
        has_rows: Whether rows of the arrays follow.
        num_large: How many large arrays stand beside the pickled value.
        size: Bytes of the pickled value, 0 if there is none.
    """

    place: int = 0
    has_rows: bool = False
    num_large: int = 0
    size: int = 0


class Stream:
    """One end of an authenticated connection.

    Args:
        sock: The connected socket.
        key: The key that both ends have proved to hold.
        unanswered_s: After how long without an acknowledgement the connection ends; 0 for the system's time.
    """

    def __init__(self, sock: socket.socket, key: bytes, unanswered_s: int = 0) -> None:
        watch_silence(sock, _SILENT_S, unanswered_s)
        self._sock, self._key = sock, hmac.digest(key, b"stream", "sha256")
        self._buffered = bytearray()

    def send(self, head: Head, arrays: Sequence[Any] = (), message: Message | None = None) -> None:
        """Sends a frame.

        Args:
            head: Its place, and whether rows follow.
            arrays: Raw bytes that the other end knows how to read.
            message: A pickled value.

        Raises:
            OSError: The connection is lost.
        """
        rest: list[Any] = []
        if message is not None:
            large = [memoryview(each).cast("B") for each in message.arrays]
            head = head._replace(num_large=len(large), size=len(message.head))
            sizes = b"".join(_SIZE.pack(len(each)) for each in large)
            rest = [sizes, *large, hmac.digest(self._key, message.head, "sha256"), message.head]
        parts = [_HEAD.pack(*head), *arrays, *rest]
        while parts:
            try:
                parts = _unfinished(parts, self._sock.sendmsg(parts[:_MAX_PARTS], (), socket.MSG_DONTWAIT))
            except BlockingIOError:  # what the other end sends is read meanwhile: it may read nothing before
                if self._ready(select.POLLIN | select.POLLOUT, None) & select.POLLIN:
                    self._receive()

    def poll(self, timeout_s: float, others: Sequence[Any] = ()) -> bool:
        """Waits up to `timeout_s` for the beginning of a frame, or until one of `others` is readable.

        Returns:
            Whether a part of a frame has arrived, maybe together with an earlier one.
        """
        return bool(self._buffered or self._ready(select.POLLIN, timeout_s, others))

    def _receive(self) -> None:
        """Waits for what the other end sends, and keeps it for the next reads."""
        self._buffered += _some(self._sock.recv(_AHEAD_BYTES))

    def _ready(self, events: int, timeout_s: float | None, others: Sequence[Any] = ()) -> int:
        """Returns what the socket is ready for, once it or one of `others` is."""
        poll = select.poll()
        poll.register(self._sock, events)
        for other in others:
            poll.register(other, select.POLLIN)
        return dict(poll.poll(timeout_s and 1000.0 * timeout_s)).get(self._sock.fileno(), 0)

    def read_head(self) -> Head:
        """Reads the beginning of the next frame.

        Raises:
            EOFError, OSError: The connection is lost.
        """
        return Head(*_HEAD.unpack(self.read(_HEAD.size)))

    def read(self, size: int) -> bytearray:
        """Reads a few bytes."""
        while len(self._buffered) < size:
            self._receive()
        data = self._buffered[:size]
        del self._buffered[:size]
        return data

    def read_into(self, views: Sequence[memoryview]) -> None:
        """Fills memory with what arrives."""
        left = [view for view in views if len(view)]
        while left and self._buffered:
            count = min(len(left[0]), len(self._buffered))
            left[0][:count] = self._buffered[:count]
            del self._buffered[:count]
            left = _unfinished(left, count)
        while left:
            left = _unfinished(left, _some(self._sock.recvmsg_into(left[:_MAX_PARTS])[0]))

    def read_message(self, head: Head) -> Message:
        """Reads the pickled value of a frame, and checks that it is from the other end.

        Raises:
            EOFError, OSError: The connection is lost, or the value is not from the other end.
        """
        large = [np.empty(size, np.uint8) for (size,) in _SIZE.iter_unpack(self.read(_SIZE.size * head.num_large))]
        proof, data = memoryview(bytearray(_PROOF_BYTES)), memoryview(bytearray(head.size))
        self.read_into([*(each.data for each in large), proof, data])
        if not hmac.compare_digest(proof, hmac.digest(self._key, data, "sha256")):
            raise ConnectionError("a frame that the other end has not written")
        return Message(data, large)

    def end(self) -> None:
        """Sends nothing more, which the other end gets as the end of the connection."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def wait_for_end(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` until the other end closes the connection. What it sends before is lost."""
        with suppress(OSError):
            self._sock.settimeout(timeout_s)
            while self._sock.recv(_AHEAD_BYTES):
                pass
            return True
        return False

    def close(self) -> None:
        """Closes the connection."""
        self._sock.close()


def _some(received: Any) -> Any:
    """Returns what was received.

    Raises:
        EOFError: Nothing was: the other end has closed the connection.
    """
    if not received:
        raise EOFError("the other end has closed the connection")
    return received


def _unfinished(parts: Sequence[Any], count: int) -> list[Any]:
    """Returns what is left of some memory after its first `count` bytes."""
    left = list(parts)
    while left and count >= len(left[0]):
        count -= len(left.pop(0))
    if count:
        left[0] = memoryview(left[0])[count:]
    return left


class RowMemory:
    """Some rows of arrays, as a stream carries them.

    Args:
        leaves: The arrays.
        rows: The bytes of the numbers of the rows, ``int64 [k]``.

    Attributes:
        bytes: The memory of the rows of each array: a view, or a copy where the rows are not consecutive.
    """

    def __init__(self, leaves: Sequence[NDArray[Any]], rows: bytes) -> None:
        self._index = as_slice(np.frombuffer(rows, np.int64))
        parts = [leaf[self._index] for leaf in leaves]
        self.bytes = [bytes_of(part) for part in parts]
        self._copies = [] if isinstance(self._index, slice) else list(zip(leaves, parts, strict=True))

    def gather(self) -> Sequence[memoryview]:
        """Returns the memory, which holds what the arrays hold now."""
        for leaf, part in self._copies:
            part[:] = leaf[self._index]
        return self.bytes

    def scatter(self) -> None:
        """Lets the arrays hold what the memory holds."""
        for leaf, part in self._copies:
            leaf[self._index] = part


def memory_of_rows(leaves: Iterable[NDArray[Any]]) -> ByRows[RowMemory]:
    """Returns a function that remembers the memory of rows of `leaves`, but for those that hold objects."""
    return ByRows(partial(RowMemory, [leaf for leaf in leaves if not leaf.dtype.hasobject]), _MAX_ROWS)


def bytes_of(array: NDArray[Any]) -> memoryview:
    """Returns the memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def connect(address: str, port: int, key: bytes) -> Stream:
    """Connects the driver to a node.

    Raises:
        Refused: The other end does not hold the key.
        OSError: Nothing accepts connections there, or it does not answer in time.
    """
    return Stream(dial((address, port), key), key, _SILENT_S)


def accept(listener: socket.socket, key: bytes) -> Stream:
    """Waits for the driver, and closes the listener once it has proved that it holds the key."""
    with listener:
        found = dialled(listener, key, math.inf)
    assert found is not None  # it waits without limit
    return Stream(found[0], key)
