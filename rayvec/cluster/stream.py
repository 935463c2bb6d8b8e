"""The stream to a node that is reached over the network: who may speak on it.

Both ends prove, before anything else is read, that they hold the run's key, which travelled by Ray: each
sends a nonce, and answers the other's with an HMAC over it. What is spoken then are the frames of
:mod:`rayvec.cluster.frames`.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

from rayvec.node.pipe import readable

__all__ = ["LENGTH_BYTES", "MOST_BYTES", "STREAM_THREAD", "FrameSocket", "Listener", "connect"]

STREAM_THREAD = "rayvec-stream"
"""Name of the threads in which peers are served."""
_NONCE_BYTES = 32
_HANDSHAKE_S = 5.0
_MOST_STRANGERS = 16
_LENGTH = struct.Struct("<Q")
LENGTH_BYTES = _LENGTH.size
_BUFFER_BYTES = 1 << 16
MOST_BYTES = 1 << 31
"""Of a frame."""
_ACCEPT_AGAIN_S = 0.2
_DEAD_PEER = {
    socket.TCP_KEEPIDLE: 3,
    socket.TCP_KEEPINTVL: 2,
    socket.TCP_KEEPCNT: 3,
}
"""A peer whose machine is gone says nothing: the kernel takes it for dead after about ten seconds in which nothing was
to be sent; where something was, we do, since the kernel would repeat it for a quarter of an hour. ``TCP_USER_TIMEOUT``
is no help: to the kernel, a peer that lives but reads nothing is then dead too."""
_SILENCE_S = 10.0
_LOOK_S = 1.0
_TIME = struct.Struct("@ll")
_TCP_INFO = struct.Struct("=2x2B48xI")
"""Of Linux's ``struct tcp_info``: repetitions and probes that were not answered, ms since the last acknowledgement."""

logger = logging.getLogger(__name__)


def connect(address: str, port: int, key: bytes, timeout_s: float = _HANDSHAKE_S) -> FrameSocket:
    """Connects to a :class:`Listener` and proves that this side holds the key.

    Raises:
        PermissionError: The listener does not hold the key, or found that this side does not.
        OSError: Nobody listens there.
    """
    sock = socket.create_connection((address, port), timeout_s)
    try:
        _authenticate(sock, key, time.monotonic() + timeout_s, b"client", b"server")
    except BaseException:
        sock.close()
        raise
    return FrameSocket(sock)


class Listener:
    """Accepts peers that can prove themselves, on a port of this node's own address.

    Each peer is checked in a thread of its own with a deadline, so that one that stays silent holds nobody up; of those
    that have not proved themselves there are only so many, and whoever has waited longest makes room for the next.

    Args:
        address: The node's own IP address, which the port is bound to.
        key: Of the run.
        serve: Called, in the peer's thread, with each connection that has proved itself.
    """

    def __init__(self, address: str, key: bytes, serve: Callable[[FrameSocket], None]) -> None:
        self._key = key
        self._serve = serve
        self._strangers: deque[socket.socket] = deque()
        self._closed = threading.Event()
        self._socket = socket.create_server((address, 0))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="rayvec-accept", daemon=True).start()

    def close(self) -> None:
        """Stops listening; a connection that is being served stays open."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes whoever accepts
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._socket.accept()
            except OSError:  # closed, or out of descriptors for a while
                if self._closed.wait(_ACCEPT_AGAIN_S):
                    return
                continue
            self._strangers.append(sock)
            if len(self._strangers) > _MOST_STRANGERS:
                with contextlib.suppress(OSError, IndexError):  # it may just have proved itself, or gone
                    self._strangers.popleft().shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._admit, args=(sock, peer), name=STREAM_THREAD, daemon=True).start()

    def _admit(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        try:
            try:
                _authenticate(sock, self._key, time.monotonic() + _HANDSHAKE_S, b"server", b"client")
            finally:
                with contextlib.suppress(ValueError):  # it had to make room
                    self._strangers.remove(sock)
        except (OSError, PermissionError) as error:
            logger.warning("refused a connection from %s:%d: %s", peer[0], peer[1], error)
            sock.close()
            return
        with FrameSocket(sock) as connection:
            self._serve(connection)


def _authenticate(sock: socket.socket, key: bytes, deadline: float, ours: bytes, theirs: bytes) -> None:
    """Both sides send a nonce and answer the other's; the role in the HMAC forbids sending it back."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    sock.settimeout(_HANDSHAKE_S)
    sock.sendall(nonce)
    challenge = _read(sock, _NONCE_BYTES, deadline)
    sock.sendall(hmac.digest(key, ours + challenge, "sha256"))
    answer = _read(sock, 32, deadline)
    if not hmac.compare_digest(answer, hmac.digest(key, theirs + nonce, "sha256")):
        raise PermissionError("the peer does not hold the key of this run")


def _read(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the peer did not prove itself in time")
        sock.settimeout(left)
        received = sock.recv(size - len(data))
        if not received:
            raise PermissionError("the peer hung up before it had proved itself")
        data += received
    return data


class FrameSocket:
    """Frames over a connected socket; each begins with its own length in bytes, as eight of them.

    Mostly one system call sends a frame and one receives it, which is what a step over the network costs.

    Args:
        sock: Of a peer that has proved itself.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _DEAD_PEER.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(int(_LOOK_S), 0))
        self._sock = sock
        self._memory = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._filled = 0
        self._look_at_s = 0.0

    def send(self, frame: bytes | bytearray | memoryview) -> None:
        """Sends a frame.

        Raises:
            OSError: The peer has hung up, or is silent.
        """
        left = memoryview(frame)
        while left:
            try:
                left = left[self._sock.send(left) :]
            except BlockingIOError:
                self._check_peer()

    def recv(self) -> memoryview:
        """Receives a frame, into memory that the next one overwrites.

        Frames begin at the same place of the same memory, so that views of it can be kept, until a frame comes that
        has no room there: the memory is then another.

        Raises:
            EOFError: The peer has hung up.
            OSError: It is silent.
        """
        if self._start:
            left = self._filled - self._start
            self._memory[:left] = self._memory[self._start : self._filled]
            self._start, self._filled = 0, left
        if self._filled < LENGTH_BYTES:
            self._fill(LENGTH_BYTES)
        end: int = _LENGTH.unpack_from(self._memory)[0]
        if not LENGTH_BYTES <= end <= MOST_BYTES:
            raise OSError(f"a frame says that it has {end} bytes")
        if self._filled < end:
            self._fill(end)
        if self._filled == end:
            self._filled = 0
        else:
            self._start = end
        return self._memory[:end]

    def _fill(self, size: int) -> None:
        """Receives until there are this many bytes."""
        if size > len(self._memory):
            larger = memoryview(bytearray(size + size // 4))
            larger[: self._filled] = self._memory[: self._filled]
            self._memory = larger
        while (filled := self._filled) < size:
            try:
                received = self._sock.recv_into(self._memory[filled:] if filled else self._memory)
            except BlockingIOError:
                self._check_peer()
                continue
            if not received:
                raise EOFError("the peer has hung up")
            self._filled = filled + received

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Waits for a frame, or the beginning of one, for up to `timeout_s`; returns whether there is one.

        Raises:
            OSError: The peer is silent.
        """
        if self._filled > self._start or readable([self._sock.fileno()], timeout_s):
            return True
        if time.monotonic() >= self._look_at_s:
            self._look_at_s = time.monotonic() + _LOOK_S
            self._check_peer()
        return False

    def _check_peer(self) -> None:
        """Raises an error if the peer's machine answers nothing any more; that of a peer that is only slow does."""
        repeated, probed, silent_ms = _TCP_INFO.unpack(
            self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        )
        if max(repeated, probed) > 1 and silent_ms > 1000.0 * _SILENCE_S:
            raise TimeoutError(f"the peer's machine has answered nothing for {silent_ms / 1000.0:.0f} s")

    def fileno(self) -> int:
        """Returns the socket's file descriptor."""
        return self._sock.fileno()

    def close(self) -> None:
        """Hangs up."""
        self._sock.close()

    def __enter__(self) -> FrameSocket:
        """Returns itself; leaving the block hangs up."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Hangs up."""
        self.close()
