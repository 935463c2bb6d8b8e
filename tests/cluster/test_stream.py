"""The stream of a node: frames, the proof of the key, and who is kept out."""

from __future__ import annotations

import pickle
import secrets
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rayvec.cluster.stream import Head, Stream, accept, connect
from rayvec.node.messages import Message, pack

KEY = secrets.token_bytes(32)


_opened: list[Any] = []


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


def opened(sock: Any) -> Any:
    """Returns what the end of the test closes."""
    _opened.append(sock)
    return sock


class Listening:
    """A listener whose thread waits for a peer that proves itself."""

    def __init__(self, key: bytes = KEY) -> None:
        self._listener = opened(socket.create_server(("127.0.0.1", 0)))
        self.port = self._listener.getsockname()[1]
        self._found: list[Stream] = []
        self._thread = threading.Thread(target=lambda: self._found.append(accept(self._listener, key)), daemon=True)
        self._thread.start()

    def stream(self) -> Stream:
        self._thread.join(20.0)
        return opened(self._found[0])  # type: ignore[no-any-return]

    def stranger(self) -> socket.socket:
        sock: socket.socket = opened(socket.create_connection(("127.0.0.1", self.port), 20.0))
        sock.recv(32, socket.MSG_WAITALL)
        return sock

    def hears_nothing_from(self, sock: socket.socket) -> bool:
        """Whether it hangs up."""
        sock.settimeout(20.0)
        try:
            return sock.recv(1) == b""
        except ConnectionResetError:
            return True


@pytest.fixture
def pair() -> Iterator[tuple[Stream, Stream]]:
    yield from _pair()


@pytest.fixture(scope="module")
def module_pair() -> Iterator[tuple[Stream, Stream]]:
    yield from _pair()


def _pair() -> Iterator[tuple[Stream, Stream]]:
    listening = Listening()
    ours = connect("127.0.0.1", listening.port, KEY)
    theirs = listening.stream()
    _opened.clear()
    yield ours, theirs
    ours.close()
    theirs.close()


class TestFrames:
    @given(st.lists(st.integers(0, 300_000), max_size=4), st.lists(st.integers(0, 90_000), max_size=3))
    def test_what_is_sent_arrives(
        self, module_pair: tuple[Stream, Stream], sizes: list[int], larges: list[int]
    ) -> None:
        arrays = [np.arange(size, dtype=np.int64).astype(np.uint8) for size in sizes]
        value = [np.full(size, 3.5) for size in larges]
        ours, theirs = module_pair
        sender = threading.Thread(
            target=ours.send, args=(Head(7, 1, 2, 3), [each.data for each in arrays], pack(value))
        )
        sender.start()
        head = theirs.read_head()
        assert head[:4] == (7, 1, 2, 3)
        for each in arrays:
            assert bytes(theirs.read(len(each))) == each.tobytes()
        read = theirs.read_value(head)
        sender.join()
        assert all(np.array_equal(a, b) and a.flags.writeable for a, b in zip(read, value, strict=True))
        assert not theirs.poll(0.0)

    def test_both_ends_may_send_at_the_same_time(self, pair: tuple[Stream, Stream]) -> None:
        large = np.zeros(30_000_000, np.uint8)
        read = []

        def exchange(stream: Stream) -> None:
            stream.send(Head(1), [large.data])
            read.append((stream.read_head().kind, len(stream.read(len(large)))))

        threads = [threading.Thread(target=exchange, args=(each,), daemon=True) for each in pair]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
        assert read == [(1, len(large))] * 2

    def test_the_end_of_the_connection(self, pair: tuple[Stream, Stream]) -> None:
        ours, theirs = pair
        assert not ours.wait_for_end(0.0)
        theirs.send(Head(1))
        theirs.close()
        assert ours.poll(5.0) and ours.read_head().kind == 1
        with pytest.raises(EOFError):
            ours.read_head()
        assert ours.wait_for_end(5.0)

    def test_nothing_is_unpickled_whose_proof_does_not_hold(self, pair: tuple[Stream, Stream]) -> None:
        class Planted:
            def __reduce__(self) -> Any:
                return pytest.fail, ("it was unpickled",)

        ours, theirs = pair
        ours._key = secrets.token_bytes(32)
        ours.send(Head(1), (), Message(pickle.dumps(Planted()), []))
        with pytest.raises(ConnectionError):
            theirs.read_value(theirs.read_head())


class TestStrangers:
    def test_another_key_is_refused_on_both_ends(self, caplog: pytest.LogCaptureFixture) -> None:
        listening = Listening()
        with pytest.raises(OSError):
            connect("127.0.0.1", listening.port, secrets.token_bytes(32))
        connect("127.0.0.1", listening.port, KEY).close()
        assert listening.stream() is not None and "refused a connection" in caplog.text
        impostor = opened(socket.create_server(("127.0.0.1", 0)))

        def pretend() -> None:
            sock = opened(impostor.accept()[0])
            sock.sendall(bytes(32))
            sock.sendall(sock.recv(64, socket.MSG_WAITALL)[32:])  # our own proof

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(PermissionError):
            connect("127.0.0.1", impostor.getsockname()[1], KEY)

    @pytest.mark.parametrize(
        "sent", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64), bytes(5000)], ids=["nothing", "http", "zeros", "much"]
    )
    def test_garbage_and_silence_do_not_delay_the_driver(self, sent: bytes) -> None:
        listening = Listening()
        strangers = [listening.stranger() for _ in range(40)]
        for stranger in strangers[-10:]:
            stranger.sendall(sent)
        assert all(listening.hears_nothing_from(stranger) for stranger in strangers[:20])
        connect("127.0.0.1", listening.port, KEY).close()
        listening.stream().close()
        assert all(listening.hears_nothing_from(stranger) for stranger in strangers)
        with pytest.raises(ConnectionRefusedError):
            listening.stranger()

    def test_a_recorded_proof_does_not_hold_again(self) -> None:
        first = Listening()
        recorded = bytearray()
        relay = opened(socket.create_server(("127.0.0.1", 0)))

        def forward() -> None:
            driver = opened(relay.accept()[0])
            node = opened(socket.create_connection(("127.0.0.1", first.port)))
            driver.sendall(node.recv(32, socket.MSG_WAITALL))
            recorded.extend(driver.recv(64, socket.MSG_WAITALL))
            node.sendall(recorded)
            driver.sendall(node.recv(32, socket.MSG_WAITALL))

        threading.Thread(target=forward, daemon=True).start()
        opened(connect("127.0.0.1", relay.getsockname()[1], KEY))
        first.stream()
        second = Listening()
        stranger = second.stranger()
        stranger.sendall(recorded)
        assert second.hears_nothing_from(stranger)
        connect("127.0.0.1", second.port, KEY).close()
        second.stream()
