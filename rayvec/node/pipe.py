"""Messages between a worker and its owner: bytes and file descriptors over an unnamed socket.

Only this module reads from and writes to that socket. While a receiver waits, it also watches the peer's process. The
socket alone does not report the peer's exit, because a child that an environment forked may hold the other end open.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import socket
import struct
import time
from array import array
from collections import deque
from collections.abc import Sequence

from rayvec.node.process_watch import ProcessWatch, readable
from rayvec.pools.base import NotReady

__all__ = ["LOOK_S", "MessagePipe"]

LOOK_S = 0.1
"""The interval at which a wait checks whether the worker is alive, in seconds."""
_HEADER = struct.Struct("<Q")
_RIGHTS_BYTES = socket.CMSG_SPACE(4 * 128)
"""Room for the file descriptors of a message."""
_READ_BYTES = 1 << 20
_SMALL_BYTES = 1 << 15
"""The largest message that is copied behind its header, so that one system call sends both."""


def _duplicates(fds: Sequence[int]) -> list[int]:
    found: list[int] = []
    try:
        for fd in fds:
            found.append(os.dup(fd))
    except OSError:
        for fd in found:
            os.close(fd)
        raise
    return found


class MessagePipe:
    """One end of a pipe of messages.

    With a `peer`, :meth:`send` never blocks: it queues what does not fit into the socket, and :meth:`flush` sends the
    queue. Without a `peer`, :meth:`send` blocks until the socket has accepted the whole message.

    Args:
        sock: One socket of a socket pair.
        peer: A watch on the process at the other end, if the pipe must detect its exit.
    """

    def __init__(self, sock: socket.socket, peer: ProcessWatch | None = None) -> None:
        self._socket = sock
        self._peer = peer
        self._out: deque[tuple[memoryview, list[int]]] = deque()
        self._is_full = True

    def fileno(self) -> int:
        """Returns the socket's file descriptor."""
        return self._socket.fileno()

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Sends a message. The receiver gets duplicates of the file descriptors.

        Raises:
            OSError: The other end is closed. Raised only without a `peer`.
        """
        header = _HEADER.pack(len(data))
        whole = len(data) <= _SMALL_BYTES
        self._out.append((memoryview(header + data if whole else header), _duplicates(fds)))
        if not whole:
            self._out.append((memoryview(data), []))
        if self._peer is not None:
            self.flush()
            return
        try:
            self._write(0)
        except OSError:
            self._drop_output()
            raise

    def flush(self) -> bool:
        """Sends as much of the queue as fits into the socket, without blocking. Returns whether the queue is empty."""
        if not self._out:
            return True
        with contextlib.suppress(BlockingIOError):
            try:
                self._write(socket.MSG_DONTWAIT)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS):  # no room for now
                    self._is_full = error.errno == errno.EAGAIN
                    return False
                if error.errno is None:  # a signal handler has raised it, such as a TimeoutError
                    raise
                self._drop_output()  # the peer has exited: receive() reports that
        return not self._out

    def wait_to_send(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` until the socket accepts more data or has data to read.

        A socket that is not full accepts none as long as the system lacks memory or descriptors for it.
        """
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN | (select.POLLOUT if self._is_full else 0))
        poll.poll(1000.0 * timeout_s)

    def _write(self, flags: int) -> None:
        while self._out:
            data, fds = self._out[0]
            while data:
                if fds:
                    rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds)
                    sent = self._socket.sendmsg([data], [rights], flags)  # socket.send_fds() of Python 3.11 drops flags
                    for fd in fds:
                        os.close(fd)
                    fds = []
                else:
                    sent = self._socket.send(data, flags)
                data = data[sent:]
                self._out[0] = data, fds
            self._out.popleft()

    def _drop_output(self) -> None:
        for _, fds in self._out:
            for fd in fds:
                os.close(fd)
        self._out.clear()

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Waits up to `timeout_s` for the start of a message or an end of file. Returns whether one has arrived."""
        return readable([self._socket.fileno()], timeout_s)

    def receive(self, deadline: float | None = None) -> tuple[bytes, list[int]]:
        """Waits for a message.

        Args:
            deadline: ``time.monotonic`` time at which the whole message must have arrived. None sets no limit.

        Returns:
            The message and its file descriptors.

        Raises:
            EOFError: The peer exited, or closed its end, before the message was complete.
            NotReady: The deadline was reached. The pipe can't be used afterwards, because part of the message may
                have been read.
            OSError: This process has too many open files for those of the message, which is dropped.
        """
        fds: list[int] = []
        limit = math.inf if deadline is None else deadline
        try:
            header = bytearray(_HEADER.size)
            all_came = self._fill(header, fds, limit)
            data = bytearray(_HEADER.unpack(header)[0])
            self._fill(data, fds, limit)
            if not all_came:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return bytes(data), fds

    def _fill(self, data: bytearray, fds: list[int], deadline: float) -> bool:
        """Receives until `data` is full. Appends file descriptors to `fds`, and returns whether all have come."""
        left, all_came = memoryview(data), True
        while left:
            try:
                received, rights, flags, _ = self._socket.recvmsg_into(
                    [left[:_READ_BYTES]], _RIGHTS_BYTES, socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                self._wait(deadline)
                continue
            except OSError as error:
                raise EOFError(str(error)) from error
            for level, kind, numbers in rights:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds += array("i", numbers[: len(numbers) - len(numbers) % 4])
            all_came = all_came and not flags & socket.MSG_CTRUNC
            if not received:
                raise EOFError("the peer has closed its end")
            left = left[received:]
        return all_came

    def _wait(self, deadline: float) -> None:
        """Waits until there is data to read, up to a deadline. Sends queued output while it waits."""
        while True:
            left = deadline - time.monotonic()
            if self._out and not self.flush():
                self.wait_to_send(LOOK_S)
            else:
                fds = [self._socket.fileno()]
                if self._peer is not None:
                    fds.append(self._peer.fileno())
                readable(fds, LOOK_S if left < math.inf else None)
            ended = self._peer is not None and self._peer.ended()  # before the last look at what it sent
            if self.poll():
                return
            if ended:
                raise EOFError("the peer's process has ended")
            if left <= 0.0:
                raise NotReady("no message came in time")

    def close(self) -> None:
        """Closes the connection, also in processes that hold copies of this end, such as forked children."""
        self._drop_output()
        with contextlib.suppress(OSError):  # the peer has already closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
