"""The pipe between a worker and its owner, without processes."""

from __future__ import annotations

import os
import socket

import pytest

from rayvec.node.pipe import MessagePipe


def test_after_the_peer_has_gone_descriptors_stay_the_callers() -> None:
    ours, theirs = socket.socketpair()
    pipe = MessagePipe(ours)
    theirs.close()
    fd = os.memfd_create("test")
    with pytest.raises(OSError, match="Broken pipe"):
        pipe.send(b"data", [fd])
    os.close(fd)
    with pytest.raises(EOFError):
        pipe.receive()
    pipe.close()
