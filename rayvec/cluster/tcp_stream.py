"""The authenticated TCP stream between the driver and a remote node.

Both ends first prove that they hold the run's key, which Ray has transferred. Each end sends a nonce and answers the
other's nonce with an HMAC over it. After that they exchange the frames of :mod:`rayvec.cluster.wire_format`.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

from rayvec.node.process_watch import readable

__all__ = ["LENGTH_BYTES", "MOST_BYTES", "STREAM_THREAD", "FrameSocket", "Listener", "connect"]

STREAM_THREAD = "rayvec-stream"
"""Name of the threads that serve peers."""
_NONCE_BYTES = 32
_HANDSHAKE_S = 5.0
_MOST_STRANGERS = 16
_LENGTH = struct.Struct("<Q")
LENGTH_BYTES = _LENGTH.size
_BUFFER_BYTES = 1 << 16
_EARLY_BYTES = 1 << 20
MOST_BYTES = 1 << 31
"""Maximum size of a frame in bytes."""
_ACCEPT_AGAIN_S = 0.2
_DEAD_PEER = {
    socket.TCP_KEEPIDLE: 3,
    socket.TCP_KEEPINTVL: 2,
    socket.TCP_KEEPCNT: 3,
}
"""Keepalive settings that detect a peer whose machine is down. On an idle connection the kernel reports the peer dead
after about ten seconds. With unacknowledged data the kernel would retransmit for about 15 minutes, so
``FrameSocket._check_peer`` checks that case. ``TCP_USER_TIMEOUT`` is unsuitable, because it also closes connections to
live peers that read nothing."""
_SILENCE_S = 10.0
_LOOK_S = 1.0
_STALE_S = 5.0
"""After so long without a look, earlier looks say nothing of the time between. Nor do they after data has arrived."""
_TIME = struct.Struct("@ll")
_TCP_INFO = struct.Struct("=2x2B52xI")
"""Fields of Linux's ``struct tcp_info``: unanswered retransmissions and probes, ms since the last acknowledgement,
which may be that of a keepalive probe."""

logger = logging.getLogger(__name__)


def connect(address: str, port: int, key: bytes) -> FrameSocket:
    """Connects to a :class:`Listener` and proves that this side holds the key.

    Raises:
        PermissionError: The listener does not hold the key, or rejected the key of this side.
        OSError: The connection failed, for example because no listener accepts connections there.
    """
    sock = socket.create_connection((address, port), _HANDSHAKE_S)
    try:
        _authenticate(sock, key, time.monotonic() + _HANDSHAKE_S, b"client", b"server")
    except BaseException:
        sock.close()
        raise
    return FrameSocket(sock)


class Listener:
    """Accepts authenticated peers on a port of this node's own address.

    Each peer is authenticated in its own thread with a deadline, so a silent peer does not block the others. The number
    of unauthenticated peers is limited. At the limit, a new peer replaces the one that has waited longest.

    Args:
        address: The node's own IP address, to which the port is bound.
        key: Key of the run.
        serve: Called with each authenticated connection, in the peer's thread.
    """

    def __init__(self, address: str, key: bytes, serve: Callable[[FrameSocket], None]) -> None:
        self._key = key
        self._serve = serve
        self._strangers: deque[socket.socket] = deque()
        self._closed = threading.Event()
        self._socket = socket.create_server((address, 0))
        self.port: int = self._socket.getsockname()[1]
        try:
            threading.Thread(target=self._accept, name="rayvec-accept", daemon=True).start()
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Stops listening; authenticated connections stay open."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._socket.accept()
            except OSError:  # closed, or temporarily out of file descriptors
                if self._closed.wait(_ACCEPT_AGAIN_S):
                    return
                continue
            self._strangers.append(sock)
            if len(self._strangers) > _MOST_STRANGERS:
                with contextlib.suppress(OSError, IndexError):  # it may have authenticated or disconnected
                    self._strangers.popleft().shutdown(socket.SHUT_RDWR)
            try:
                threading.Thread(target=self._admit, args=(sock, peer), name=STREAM_THREAD, daemon=True).start()
            except RuntimeError as error:  # temporarily out of threads
                logger.warning("refused a connection from %s:%d: %s", peer[0], peer[1], error)
                self._strangers.remove(sock)
                sock.close()

    def _admit(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        try:
            try:
                _authenticate(sock, self._key, time.monotonic() + _HANDSHAKE_S, b"server", b"client")
            finally:
                with contextlib.suppress(ValueError):  # a newer peer has replaced it
                    self._strangers.remove(sock)
            connection = FrameSocket(sock)
        except (OSError, PermissionError) as error:
            logger.warning("refused a connection from %s:%d: %s", peer[0], peer[1], error)
            sock.close()
            return
        with connection:
            self._serve(connection)


def _authenticate(sock: socket.socket, key: bytes, deadline: float, ours: bytes, theirs: bytes) -> None:
    """Exchanges nonces and HMACs over them. The HMAC includes the role, which prevents reflection attacks."""
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


class FrameSocket(contextlib.AbstractContextManager["FrameSocket"]):
    """Sends and receives frames over a connected socket. A frame starts with its length in bytes, as a uint64.

    Usually one system call sends a frame and one receives it.

    Args:
        sock: Socket of an authenticated peer.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _DEAD_PEER.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIME.pack(int(_LOOK_S), 0))
        self._sock = sock
        self._memory = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._filled = 0
        self._early = bytearray()
        self._look_at_s = 0.0
        self._looked_s = self._unanswered_s = 0.0

    def send(self, frame: bytes | bytearray | memoryview) -> None:
        """Sends a frame. What arrives meanwhile is kept: a peer that is sending itself may wait until it is read.

        Raises:
            OSError: The peer has closed the connection, or its machine no longer answers.
        """
        left = memoryview(frame)
        while left:
            try:
                left = left[self._sock.send(left, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                self._wait_to_send()

    def _wait_to_send(self) -> None:
        """Waits until the socket takes more, or something has arrived."""
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT | (select.POLLIN if len(self._early) < MOST_BYTES else 0))
        events = poll.poll(1000 * _LOOK_S)
        if not events:
            self._check_peer()
            return
        self._looked_s = 0.0
        if events[0][1] & select.POLLIN:
            received = self._sock.recv(_EARLY_BYTES)
            if not received:
                raise ConnectionResetError("the peer has hung up")
            self._early += received

    def recv(self) -> memoryview:
        """Receives a frame into memory that the next frame overwrites.

        All frames start at the beginning of the same buffer, so callers may cache views of it. A frame that does not
        fit replaces the buffer with a larger one.

        Raises:
            EOFError: The peer has closed the connection.
            OSError: The peer's machine no longer answers, or the frame's length is invalid.
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
        """Receives until the buffer holds `size` bytes. The buffer grows with what arrives, not with what is said."""
        while (filled := self._filled) < size:
            if filled == len(self._memory):
                larger = memoryview(bytearray(min(2 * filled, size + size // 4)))
                larger[:filled] = self._memory
                self._memory = larger
            room = self._memory[filled:] if filled else self._memory
            if self._early:
                received = min(len(room), len(self._early))
                room[:received] = self._early[:received]
                del self._early[:received]
                self._filled = filled + received
                continue
            try:
                received = self._sock.recv_into(room)
            except BlockingIOError:
                self._check_peer()
                continue
            if not received:
                raise EOFError("the peer has hung up")
            self._filled = filled + received
            self._looked_s = 0.0

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Waits up to `timeout_s` seconds for the beginning of a frame; returns whether any bytes have arrived.

        Raises:
            OSError: The peer's machine no longer answers.
        """
        if self._filled > self._start or self._early or readable([self._sock.fileno()], timeout_s):
            return True
        if time.monotonic() >= self._look_at_s:
            self._look_at_s = time.monotonic() + _LOOK_S
            self._check_peer()
        return False

    def check(self) -> None:
        """Looks whether the connection lasts; call it every few seconds of a wait for something else.

        Raises:
            OSError: The peer's machine no longer answers.
        """
        if number := self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):  # keepalive has found out
            raise OSError(number, os.strerror(number))
        self._check_peer()

    def _check_peer(self) -> None:
        """Raises ``TimeoutError`` if the peer's machine no longer answers. The machine of a slow peer still does.

        A machine that gets nothing may still send what it has no acknowledgement for, again and again, and with it
        acknowledge what it got before. So the time counts, too, in which look after look finds that data was sent
        again, and nothing new has arrived.
        """
        repeated, probed, silent_ms = _TCP_INFO.unpack(
            self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        )
        is_unanswered, now_s = max(repeated, probed) > 1, time.monotonic()
        if not is_unanswered or now_s - self._looked_s > _STALE_S:
            self._unanswered_s = now_s
        self._looked_s = now_s
        silent_s = max(silent_ms / 1000.0, now_s - self._unanswered_s)
        if is_unanswered and silent_s > _SILENCE_S:
            raise TimeoutError(f"the peer's machine has acknowledged nothing for {silent_s:.0f} s")

    def fileno(self) -> int:
        """Returns the socket's file descriptor."""
        return self._sock.fileno()

    def close(self) -> None:
        """Closes the connection."""
        self._sock.close()

    def __exit__(self, *exc_info: object) -> None:
        """Closes the connection."""
        self.close()
