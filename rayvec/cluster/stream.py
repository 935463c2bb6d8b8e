"""The stream between the driver and a node: frames of raw arrays and of a pickled rest, over TCP.

Both ends first prove that they hold the key of the node, which Ray hands over. A frame is a head, raw arrays whose
shapes both ends know, and maybe a pickled value with its large arrays beside it. Nothing is unpickled whose HMAC does
not hold; its key belongs to this connection alone.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import numpy as np

from rayvec.node.messages import Message

__all__ = ["Head", "Stream", "accept", "connect"]

logger = logging.getLogger(__name__)

_PROOF_BYTES = 32
_PROOF_S = 5.0
_MAX_STRANGERS = 16
_HEAD = struct.Struct("<BBHiIQ")
_SIZE = struct.Struct("<Q")
_BUFFER_BYTES = 1 << 16
_MAX_PARTS = 512
"""How many buffers one system call sends; the system allows 1,024."""
_KEEPALIVE = {socket.TCP_KEEPIDLE: 3, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}
"""A machine that is gone is found after about ten seconds without traffic."""
_UNANSWERED_MS = 10_000
"""A machine that acknowledges nothing for so long is gone. For the driver's end only: nodes always read."""


class Head(NamedTuple):
    """What a frame begins with.

    Attributes:
        kind: What it is about; for a command, its operation.
        mode: A detail of it.
        place: The place of a command among those that are pending; or how many arrays follow.
        rows: The number of rows; -1 for all of them.
        num_large: How many large arrays stand beside the pickled value.
        size: Bytes of the pickled value, 0 if there is none.
    """

    kind: int
    mode: int = 0
    place: int = 0
    rows: int = -1
    num_large: int = 0
    size: int = 0


class Stream:
    """One end of an authenticated connection.

    Args:
        sock: The connected socket.
        key: The key of this connection.
    """

    def __init__(self, sock: socket.socket, key: bytes) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._sock, self._key = sock, key
        self._room = memoryview(bytearray(_BUFFER_BYTES))
        self._ready = self._room[:0]
        self._early = bytearray()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, head: Head, arrays: Sequence[Any] = (), message: Message | None = None) -> None:
        """Sends a frame.

        Args:
            head: Its kind, mode, place and rows.
            arrays: Raw bytes that the other end knows how to read.
            message: A pickled value.

        Raises:
            OSError: The connection is lost.
        """
        parts: list[Any] = [b"", *arrays]
        if message is not None:
            large = [memoryview(each).cast("B") for each in message.arrays]
            head = head._replace(num_large=len(large), size=len(message.head))
            sizes = b"".join(_SIZE.pack(len(each)) for each in large)
            parts += [sizes, *large, hmac.digest(self._key, message.head, "sha256"), message.head]
        parts[0] = _HEAD.pack(*head)
        parts = [part for part in parts if len(part)]
        while parts:
            try:
                sent = self._sock.sendmsg(parts[:_MAX_PARTS], (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._read_early()
                continue
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = memoryview(parts[0])[sent:]

    def _read_early(self) -> None:
        """Waits until the socket takes more, and reads what arrives: the other end may be sending itself."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN | select.POLLOUT)
        if poll.poll()[0][1] & select.POLLIN:
            self._early += _some(self._sock.recv(_BUFFER_BYTES))

    def poll(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` for the beginning of a frame. Returns whether something has arrived."""
        return bool(self._ready or self._early or self._poll.poll(1000.0 * timeout_s))

    def read_head(self) -> Head:
        """Reads the beginning of the next frame.

        Raises:
            EOFError, OSError: The connection is lost.
        """
        return Head(*_HEAD.unpack(self.read(_HEAD.size)))

    def read(self, size: int) -> memoryview:
        """Reads so many bytes."""
        data = memoryview(bytearray(size))
        self.read_into(data)
        return data

    def read_into(self, view: memoryview) -> None:
        """Reads as many bytes as the memory has."""
        while len(view):
            if not self._ready and self._early:
                self._ready, self._early = memoryview(self._early), bytearray()
            elif not self._ready and len(view) >= _BUFFER_BYTES:
                view = view[_some(self._sock.recv_into(view)) :]
                continue
            elif not self._ready:
                self._ready = self._room[: _some(self._sock.recv_into(self._room))]
            count = min(len(view), len(self._ready))
            view[:count] = self._ready[:count]
            view, self._ready = view[count:], self._ready[count:]

    def read_value(self, head: Head) -> Any:
        """Reads and returns the pickled value of a frame; None, if it has none.

        Raises:
            EOFError, OSError: The connection is lost, or the value is not from the other end.
            Exception: It can't be unpickled here.
        """
        return None if head.size == 0 else self.read_message(head).load()

    def read_message(self, head: Head) -> Message:
        """Reads a pickled value, and checks that it is from the other end."""
        sizes = [size for (size,) in _SIZE.iter_unpack(self.read(_SIZE.size * head.num_large))]
        large = [np.empty(size, np.uint8) for size in sizes]
        for each in large:
            self.read_into(each.data)
        proof, data = self.read(_PROOF_BYTES), self.read(head.size)
        if not hmac.compare_digest(proof, hmac.digest(self._key, data, "sha256")):
            raise ConnectionError("a frame that the other end has not written")
        return Message(data, large)

    def wait_for_end(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` until the other end closes the connection. What it sends before is lost."""
        deadline = time.monotonic() + timeout_s
        with suppress(OSError):
            while self._poll.poll(1000.0 * max(0.0, deadline - time.monotonic())):
                if not self._sock.recv_into(self._room):
                    return True
        return False

    def fileno(self) -> int:
        """Returns the file descriptor of the socket."""
        return self._sock.fileno()

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


def connect(address: str, port: int, key: bytes) -> Stream:
    """Connects the driver to a node.

    Raises:
        PermissionError: The other end does not hold the key.
        OSError: Nothing accepts connections there, or it does not answer in time.
    """
    sock = socket.create_connection((address, port), _PROOF_S)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
        nonces = sock.recv(_PROOF_BYTES, socket.MSG_WAITALL) + (own := secrets.token_bytes(_PROOF_BYTES))
        sock.sendall(own + hmac.digest(key, b"driver" + nonces, "sha256"))
        proof = sock.recv(_PROOF_BYTES, socket.MSG_WAITALL)
        if not hmac.compare_digest(proof, hmac.digest(key, b"node" + nonces, "sha256")):
            raise PermissionError("the other end does not hold the key of this run")
    except BaseException:
        sock.close()
        raise
    return Stream(sock, hmac.digest(key, b"stream" + nonces, "sha256"))


def accept(listener: socket.socket, key: bytes) -> Stream:
    """Waits for the driver, and closes the listener once it has proved that it holds the key.

    Strangers do not delay it: of those that have proved nothing, only the last sixteen are kept.
    """
    strangers: dict[socket.socket, tuple[bytes, bytearray]] = {}
    with listener:
        while True:
            for ready in wait([listener, *strangers]):
                if ready is listener:
                    _admit(listener, strangers)
                elif ready in strangers:
                    stream = _heard(ready, strangers, key)
                    if stream is not None:
                        for stranger in strangers:
                            stranger.close()
                        return stream


def _admit(listener: socket.socket, strangers: dict[socket.socket, tuple[bytes, bytearray]]) -> None:
    """Accepts a connection, and sends it a nonce."""
    with suppress(OSError):
        sock, _ = listener.accept()
        nonce = secrets.token_bytes(_PROOF_BYTES)
        strangers[sock] = nonce, bytearray()
        sock.setblocking(False)
        sock.send(nonce)
    if len(strangers) > _MAX_STRANGERS:
        oldest = next(iter(strangers))
        del strangers[oldest]
        oldest.close()


def _heard(sock: socket.socket, strangers: dict[socket.socket, tuple[bytes, bytearray]], key: bytes) -> Stream | None:
    """Reads what a stranger has sent. Returns the stream if that is the proof; drops the stranger if it can't be."""
    nonce, received = strangers[sock]
    try:
        received += _some(sock.recv(2 * _PROOF_BYTES - len(received)))
        if len(received) < 2 * _PROOF_BYTES:
            return None
        nonces, proof = nonce + received[:_PROOF_BYTES], received[_PROOF_BYTES:]
        if not hmac.compare_digest(proof, hmac.digest(key, b"driver" + nonces, "sha256")):
            raise PermissionError("it does not hold the key of this run")
        sock.send(hmac.digest(key, b"node" + nonces, "sha256"))
    except (OSError, EOFError) as error:
        logger.warning("refused a connection: %s", error)
        del strangers[sock]
        sock.close()
        return None
    del strangers[sock]
    return Stream(sock, hmac.digest(key, b"stream" + nonces, "sha256"))
