"""Which machines answer: a busy one and one that refuses do, one that says nothing does not."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rayvec.cluster import reachability
from rayvec.cluster.reachability import unreachable


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """A port that drops what arrives, as a machine does that is gone: its queue of connections is full."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(server.getsockname())
        yield server.getsockname()


def test_only_silence_is_no_answer(silent: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "_ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        busy = server.getsockname()  # accepts nothing, but its machine does
        with socket.create_server(("127.0.0.1", 0)) as closed:
            refuses = closed.getsockname()
        assert unreachable({"busy": busy, "refuses": refuses, "silent": silent}) == {"silent"}
    assert unreachable({}) == set()
