"""The stream to a node that is reached over the network: one frame to step, one frame back.

A frame is raw array bytes in a layout that both sides know from the spaces, behind a small fixed header.
Nothing that arrives is unpickled. Both ends prove, before anything else is read, that they hold the
run's key, which travelled by Ray: each sends a nonce, and answers the other's with an HMAC over it.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.pools.base import Autoreset
from rayvec.pools.memory import ArrayLayout
from rayvec.types import RawInfo, StepBatch, Tree, tree_leaves

__all__ = ["FrameCodec", "Listener", "connect"]

_NONCE_BYTES = 32
_HANDSHAKE_S = 5.0
_REQUEST = struct.Struct("<BBHI")
_REPLY = struct.Struct("<IBI")
_PLAIN, _INFOS, _BY_RAY, _FAILED = 0, 1, 2, 3

logger = logging.getLogger(__name__)


def connect(address: str, port: int, key: bytes, timeout_s: float = _HANDSHAKE_S) -> Connection:
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
    return _as_connection(sock)


class Listener:
    """Accepts one authenticated peer at a time on a port of this node's own address.

    Each peer is checked in a thread of its own with a deadline, so that one that stays silent holds
    nobody up.

    Args:
        address: The node's own IP address, which the port is bound to.
        key: Of the run.
        serve: Called, in the peer's thread, with each connection that has proved itself.
    """

    def __init__(self, address: str, key: bytes, serve: Callable[[Connection], None]) -> None:
        self._key = key
        self._serve = serve
        self._socket = socket.create_server((address, 0))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="rayvec-accept", daemon=True).start()

    def close(self) -> None:
        """Stops listening; a connection that is being served goes on."""
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._admit, args=(sock, peer), name="rayvec-stream", daemon=True).start()

    def _admit(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        try:
            _authenticate(sock, self._key, time.monotonic() + _HANDSHAKE_S, b"server", b"client")
        except (OSError, PermissionError) as error:
            logger.warning("refused a connection from %s:%d: %s", peer[0], peer[1], error)
            sock.close()
            return
        with _as_connection(sock) as connection:
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


def _as_connection(sock: socket.socket) -> Connection:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Connection(sock.detach())


class FrameCodec:
    """Packs steps and their answers into frames, for one pair of layouts.

    Args:
        layout: Of observations.
        action_layout: Of actions.
        encode: Plain values to bytes; raises TypeError or OverflowError where there is no plain form.
        decode: The inverse.
    """

    failure = _REPLY.pack(0, _FAILED, 0)
    """The frame that says that an environment raised; what it raised is fetched by Ray."""

    def __init__(
        self,
        layout: ArrayLayout,
        action_layout: ArrayLayout,
        encode: Callable[[Any], bytes],
        decode: Callable[[memoryview], Any],
    ) -> None:
        self._layout = layout
        self._action_layout = action_layout
        self._encode = encode
        self._decode = decode

    def pack_request(self, env_ids: NDArray[np.int64], leaves: Sequence[NDArray[Any]], autoreset: Autoreset) -> bytes:
        """Returns the frame that asks for a step; `leaves` are the actions' arrays, of any numeric type."""
        codes = bytes(ord(leaf.dtype.char) for leaf in leaves)
        head = _REQUEST.pack(autoreset, len(leaves), 0, len(env_ids))
        return b"".join([head, codes, env_ids.tobytes(), *(leaf.tobytes() for leaf in leaves)])

    def unpack_request(self, frame: bytes) -> tuple[NDArray[np.int64], Tree, Autoreset]:
        """Returns ids, actions and mode."""
        autoreset, num_leaves, _, count = _REQUEST.unpack_from(frame)
        at = _REQUEST.size
        dtypes = [np.dtype(chr(code)) for code in frame[at : at + num_leaves]]
        at += num_leaves
        env_ids = np.frombuffer(frame, np.int64, count, at)
        at += env_ids.nbytes
        leaves = []
        for dtype, (_, shape) in zip(dtypes, self._action_layout.leaves, strict=True):
            leaf = np.frombuffer(frame, dtype, count * int(np.prod(shape)), at)
            at += leaf.nbytes
            leaves.append(leaf.reshape(count, *shape))
        return env_ids, self._action_layout.tree(leaves), Autoreset(autoreset)

    def pack_reply(self, batch: StepBatch) -> tuple[bytes, bool]:
        """Returns the frame that answers a step, and whether its infos have no plain form.

        Those are for the caller to keep until they are fetched by Ray.
        """
        kind, extra = _PLAIN, b""
        if batch.info:
            try:
                kind, extra = _INFOS, self._encode([list(info) for info in batch.info])
            except (TypeError, OverflowError):
                kind = _BY_RAY
        head = _REPLY.pack(len(batch.env_ids), kind, len(extra))
        arrays = [*tree_leaves(batch.obs), batch.rew, batch.terminated, batch.truncated]
        return b"".join([head, *(array.tobytes() for array in arrays), extra]), kind == _BY_RAY

    def unpack_reply(self, frame: bytes, env_ids: NDArray[np.int64]) -> tuple[StepBatch, bool]:
        """Returns the answer, in arrays of its own, and whether its infos must be fetched by Ray."""
        count, kind, extra_bytes = _REPLY.unpack_from(frame)
        buffer = bytearray(frame)
        at = _REPLY.size

        def take(dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
            nonlocal at
            array = np.frombuffer(buffer, dtype, count * int(np.prod(shape)), at).reshape(count, *shape)
            at += array.nbytes
            return array

        obs = self._layout.tree([take(dtype, shape) for dtype, shape in self._layout.leaves])
        rew, terminated, truncated = take(np.float64, ()), take(np.bool_, ()), take(np.bool_, ())
        infos: Any = ()
        if kind == _INFOS:
            infos = tuple(RawInfo(*fields) for fields in self._decode(memoryview(buffer)[at : at + extra_bytes]))
        return StepBatch(env_ids, obs, rew, terminated, truncated, infos), kind == _BY_RAY
