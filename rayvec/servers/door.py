"""Where environment servers dial in, and workers get their connections."""

from __future__ import annotations

import atexit
import contextlib
import logging
import select
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from threading import Condition, Thread
from typing import NamedTuple

from rayvec.env_server import Messages, Refused, admit

__all__ = ["Door", "admitted"]

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_PROGRESS_S = 10.0
_END_S = 2.0
"""How long servers get to end."""


class Door:
    """The servers that have dialled in and are idle.

    Its methods run in threads: one for each server that dials in, and one for each worker that wants one. It stays open
    until it is closed or this process ends.

    Args:
        host: The address at which it listens.
        port: The TCP port; 0 takes a free one.
        key: The key of the servers.

    Attributes:
        port: The TCP port.
        path: Of the Unix socket at which workers get connections.
    """

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self._key = key
        self._idle: list[_Idle] = []
        self._num_serving = 0
        self._is_ending = False
        self._changed = Condition()
        listener = socket.create_server((host, port))
        self.port: int = listener.getsockname()[1]
        self._folder = tempfile.TemporaryDirectory(prefix="rayvec-servers-")
        self.path = str(Path(self._folder.name, "handover"))
        handover = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        handover.bind(self.path)
        handover.listen(256)
        _serve(listener, self._admit)
        _serve(handover, self._hand_over)
        self._listeners = handover, listener
        atexit.register(self.close)

    def _admit(self, connection: socket.socket) -> None:
        """Lets a server in that has the key. If the servers are to end, this one ends too."""
        name = admitted(connection, self._key)
        if name is None:
            return
        with self._changed:
            self._idle.append(_Idle(connection, name))
            self._num_serving = max(0, self._num_serving - 1)
            if self._is_ending:
                self._dismiss_idle()
            self._changed.notify_all()

    def _hand_over(self, worker: socket.socket) -> None:
        """Gives a worker the connection of the next idle server."""
        with worker, contextlib.suppress(OSError):
            server = self._next_idle(worker)
            if server is not None:
                with server.connection:
                    socket.send_fds(worker, [server.name.encode()], [server.connection.fileno()])

    def _next_idle(self, worker: socket.socket) -> _Idle | None:
        """Waits for an idle server. Returns None if the worker has gone, or the servers are to end."""
        with self._changed:
            while not self._is_ending and not _has_ended(worker):
                self._forget_lost()
                if self._idle:
                    self._num_serving += 1
                    return self._idle.pop(0)
                self._changed.wait(_POLL_S)
        return None

    def wait_for(self, count: int, timeout_s: float) -> None:
        """Waits until so many servers are idle.

        Raises:
            TimeoutError: They have not dialled in within `timeout_s`.
        """
        began_s = logged_s = time.monotonic()
        with self._changed:
            while True:
                self._forget_lost()
                if len(self._idle) >= count:
                    return
                here = f"{len(self._idle)} of {count} environment servers have dialled in at port {self.port}"
                now_s = time.monotonic()
                if now_s > began_s + timeout_s:
                    raise TimeoutError(f"{here} within {timeout_s:g} s. Start more, or pass a larger start_timeout_s.")
                if now_s > logged_s + _PROGRESS_S:
                    logger.info("%s", here)
                    logged_s = now_s
                self._changed.wait(_POLL_S)

    def close(self) -> None:
        """Tells all servers to end, those too that dial in again within a moment."""
        atexit.unregister(self.close)
        with self._changed:
            self._is_ending = True
            self._dismiss_idle()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._num_serving, _END_S)
        for listener in self._listeners:
            with contextlib.suppress(OSError):  # it was closed before
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self._folder.cleanup()

    def _forget_lost(self) -> None:
        """Forgets idle servers whose connection has ended. An idle server sends nothing."""
        for server in [each for each in self._idle if _has_ended(each.connection)]:
            self._idle.remove(server)
            server.connection.close()

    def _dismiss_idle(self) -> None:
        for server in self._idle:
            with contextlib.suppress(OSError), server.connection:
                server.connection.sendall(Messages(server.connection).pack({"op": "end"}))
        self._idle.clear()


class _Idle(NamedTuple):
    """A server that waits for work."""

    connection: socket.socket
    name: str


def admitted(connection: socket.socket, key: bytes) -> str | None:
    """Returns the name of a server that has the key. A connection of anything else is closed, and logged."""
    name = "environment server"
    try:
        name = "environment server {}:{}".format(*connection.getpeername()[:2])
        admit(connection, key)
    except (Refused, OSError) as error:
        logger.warning("%s was refused: %s", name, error)
        connection.close()
        return None
    return name


def _has_ended(connection: socket.socket) -> bool:
    """Whether the other side, which sends nothing, has closed a connection."""
    return bool(select.select([connection], [], [], 0)[0])


def _serve(listener: socket.socket, handle: Callable[[socket.socket], None]) -> None:
    """Handles each connection in a thread of its own until the listener is shut down."""

    def accept_all() -> None:
        with contextlib.suppress(OSError):
            while True:
                Thread(target=handle, args=(listener.accept()[0],), daemon=True).start()

    Thread(target=accept_all, daemon=True).start()
