"""The pipe between a worker and its owner, without processes."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from rayvec.node.pipe import MessagePipe
from rayvec.node.process_watch import ProcessWatch, readable
from rayvec.pools.base import NotReady


def descriptors_of(fd: int) -> list[str]:
    """The descriptors of this process for the same file; garbage and threads of other tests may change the rest."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.path.sameopenfile(int(each), fd):
                found.append(each)
    return found


def test_after_the_peer_has_gone_descriptors_stay_the_callers() -> None:
    ours, theirs = socket.socketpair()
    pipe = MessagePipe(ours)
    theirs.close()
    fd = os.memfd_create("test")
    with pytest.raises(OSError, match="Broken pipe"):
        pipe.send(b"data", [fd])
    assert descriptors_of(fd) == [str(fd)]
    os.close(fd)
    with pytest.raises(EOFError):
        pipe.receive()
    pipe.close()


def test_descriptors_that_can_not_all_be_duplicated_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    pipe = MessagePipe(ours, ProcessWatch(os.getpid()))
    dup = os.dup

    def dup_once(fd: int) -> int:
        monkeypatch.setattr(os, "dup", fails)
        return dup(fd)

    def fails(fd: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "dup", dup_once)
    with pytest.raises(OSError, match="Too many open files"):
        pipe.send(b"data", [theirs.fileno(), theirs.fileno()])
    assert descriptors_of(theirs.fileno()) == [str(theirs.fileno())]
    theirs.close()
    pipe.close()


@contextmanager
def no_more_files() -> Iterator[None]:
    """Opens as many files as the process may have."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_message_whose_descriptors_have_no_room_is_an_error_and_the_next_one_arrives() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = MessagePipe(ours), MessagePipe(theirs)
    sender.send(b"with files", [ours.fileno(), ours.fileno()])
    sender.send(b"without")
    with no_more_files(), pytest.raises(OSError, match="Too many open files"):
        receiver.receive()
    assert receiver.receive() == (b"without", [])
    sender.close()
    receiver.close()


def test_a_message_with_descriptors_waits_in_the_queue_if_the_socket_is_full() -> None:
    ours, theirs = socket.socketpair()
    watch = ProcessWatch(os.getpid())
    sender, receiver = MessagePipe(ours, watch), MessagePipe(theirs)
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(bytes(8), socket.MSG_DONTWAIT)  # messages whose whole content is a header of zeros
    sender.send(b"with a file", [ours.fileno()])  # returns at once
    assert not sender.flush()
    with pytest.raises(NotReady):
        sender.receive(time.monotonic() + 0.01)
    data, fds = b"", list[int]()
    while not data:
        sender.flush()
        data, fds = receiver.receive()
    assert data == b"with a file" and len(fds) == 1
    os.close(fds[0])
    sender.close()
    receiver.close()
    watch.close()


def test_a_large_message_is_sent_as_fast_as_the_peer_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver wakes up as soon as the socket takes more of the request."""
    ours, theirs = socket.socketpair()
    waits: list[float | None] = []
    peer = ProcessWatch(os.getpid())
    pipe = MessagePipe(ours, peer)

    def noting_waits(fds: list[int], timeout_s: float | None) -> bool:
        if pipe.fileno() in fds and pipe._out and timeout_s != 0.0:
            waits.append(timeout_s)
        return readable(fds, timeout_s)

    monkeypatch.setattr("rayvec.node.pipe.readable", noting_waits)
    message = bytes(1 << 24)

    def answer() -> None:
        with closing(MessagePipe(theirs)) as other:
            assert other.receive() == (message, [])
            other.send(b"answer")

    thread = threading.Thread(target=answer)
    thread.start()
    pipe.send(message)
    assert pipe.receive() == (b"answer", [])
    thread.join()
    pipe.close()
    peer.close()
    assert waits == [], "it waited for an answer to what it had not sent"
