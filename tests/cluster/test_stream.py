"""The stream of a node: frames, the proof of the key, and who is kept out."""

from __future__ import annotations

import pickle
import secrets
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
from helpers.waiting import DEADLINE_S

from rayvec.cluster.stream import Head, Stream, accept, connect
from rayvec.env_server import GREETING, Refused
from rayvec.node.messages import Message

KEY = secrets.token_bytes(32)


class Listening:
    """A listener whose thread waits for a peer that proves itself."""

    def __init__(self, key: bytes = KEY) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._found: list[Stream] = []
        self._thread = threading.Thread(target=lambda: self._found.append(accept(self._listener, key)), daemon=True)
        self._thread.start()

    def connect(self, key: bytes = KEY) -> Stream:
        return connect("127.0.0.1", self.port, key)

    def stream(self) -> Stream:
        self._thread.join(DEADLINE_S)
        return self._found[0]


def test_nothing_is_unpickled_whose_proof_does_not_hold() -> None:
    class Planted:
        def __reduce__(self) -> Any:
            return pytest.fail, ("it was unpickled",)

    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = Stream(socket.create_connection(server.getsockname()), secrets.token_bytes(32))
        theirs = Stream(server.accept()[0], KEY)
    ours.send(Head(1), (), Message(pickle.dumps(Planted()), []))
    with pytest.raises(ConnectionError):
        theirs.read_message(theirs.read_head())
    ours.close()
    theirs.close()


def test_another_key_is_refused_on_both_ends(caplog: pytest.LogCaptureFixture) -> None:
    listening = Listening()
    with pytest.raises((Refused, OSError)):
        listening.connect(secrets.token_bytes(32))
    listening.connect().close()
    listening.stream().close()
    assert "refused a connection" in caplog.text
    impostor = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        with impostor.accept()[0] as sock:
            sock.sendall(GREETING + bytes(32))
            sock.sendall(sock.recv(len(GREETING) + 64, socket.MSG_WAITALL)[-32:])  # our own proof

    threading.Thread(target=pretend, daemon=True).start()
    with impostor, pytest.raises(Refused, match="another key"):
        connect("127.0.0.1", impostor.getsockname()[1], KEY)


DRIPPING = [bytes([each]) for each in GREETING + bytes(64)]
"""What takes 18 s to send, when its dialler waits for 10 s."""


@pytest.mark.parametrize("sent", [[], [bytes(5000)], DRIPPING], ids=["silent", "garbage", "dripping"])
def test_a_stranger_is_refused(sent: list[bytes]) -> None:
    def send() -> None:
        with suppress(OSError):
            for each in sent:
                stranger.sendall(each)
                time.sleep(0.2)

    listening = Listening()
    with socket.create_connection(("127.0.0.1", listening.port), 20.0) as stranger:
        threading.Thread(target=send, daemon=True).start()
        listening.connect().close()
        listening.stream().close()
        with suppress(ConnectionResetError):
            while stranger.recv(4096):  # a nonce, and at most one proof
                pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", listening.port), 20.0)
