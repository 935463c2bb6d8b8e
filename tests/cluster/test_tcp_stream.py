"""The stream between real sockets: who holds the key is served, everyone else is refused without harm."""

from __future__ import annotations

import ctypes
import fcntl
import hmac
import logging
import pickle
import socket
import struct
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.examples import examples
from helpers.waiting import wait_until
from hypothesis import given, strategies as st

from rayvec.cluster import tcp_stream
from rayvec.cluster.tcp_stream import LENGTH_BYTES, FrameSocket, Listener, connect

KEY = b"k" * 32
DEADLINE_S = 20.0


def frame(payload: bytes) -> bytes:
    return (LENGTH_BYTES + len(payload)).to_bytes(LENGTH_BYTES, "little") + payload


def echo(connection: FrameSocket) -> None:
    with suppress(EOFError, OSError):
        while True:
            connection.send(connection.recv())


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener("127.0.0.1", KEY, echo)
    yield listener
    listener.close()


def assert_served(listener: Listener) -> None:
    with connect("127.0.0.1", listener.port, KEY) as connection:
        for payload in (b"", b"hello", bytes(range(256)) * 5000):
            connection.send(frame(payload))
            assert connection.poll(DEADLINE_S)
            assert connection.recv() == frame(payload)


@examples(30)
@given(
    sizes=st.lists(st.integers(0, 100) | st.integers(60_000, 70_000), min_size=1, max_size=8),
    pieces=st.lists(st.integers(1, 100_000), min_size=1),
)
def test_frames_arrive_whole_however_the_network_cuts_them(sizes: list[int], pieces: list[int]) -> None:
    payloads = [bytes([n % 251]) * size for n, size in enumerate(sizes)]
    ours, theirs = socket.create_server(("127.0.0.1", 0)), None
    with ours:
        sender = socket.create_connection(ours.getsockname())
        theirs, _ = ours.accept()
    data = b"".join(map(frame, payloads))

    def drip() -> None:
        at = 0
        for n in range(len(data)):
            if at >= len(data):
                return
            sender.sendall(data[at : at + pieces[n % len(pieces)]])
            at += pieces[n % len(pieces)]

    thread = threading.Thread(target=drip)
    thread.start()
    with sender, FrameSocket(theirs) as connection:
        assert [bytes(connection.recv()) for _ in payloads] == list(map(frame, payloads))
        thread.join()


def test_a_frame_shorter_than_its_length_is_an_error(listener: Listener) -> None:
    with connect("127.0.0.1", listener.port, KEY) as connection:
        connection.send(bytes(LENGTH_BYTES))
        with pytest.raises(EOFError):  # the other end has hung up over it
            connection.recv()


def stranger(listener: Listener) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", listener.port), DEADLINE_S)
    sock.settimeout(DEADLINE_S)
    return sock


def read_to_end(sock: socket.socket) -> bytes:
    """Returns all that the other side says until it hangs up, which it must."""
    data = b""
    with suppress(ConnectionResetError):
        while received := sock.recv(1 << 16):
            data += received
    return data


def test_who_holds_the_key_is_served(listener: Listener) -> None:
    assert_served(listener)
    assert_served(listener)


def test_it_listens_on_the_given_address_alone(listener: Listener) -> None:
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", listener.port), 1.0)


def test_the_wrong_key_is_refused_on_both_sides(listener: Listener, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises((PermissionError, ConnectionResetError, BrokenPipeError)):
        connect("127.0.0.1", listener.port, b"x" * 32)
    wait_until(lambda: "refused a connection" in caplog.text)
    assert_served(listener)


@pytest.mark.parametrize("size", [0, 1, 31, 64, 100_000])
def test_garbage_is_refused_and_logged(listener: Listener, caplog: pytest.LogCaptureFixture, size: int) -> None:
    with stranger(listener) as sock:
        with suppress(OSError):
            sock.sendall(b"\x80" * size)
            sock.shutdown(socket.SHUT_WR)
        read_to_end(sock)
    wait_until(lambda: "refused a connection from 127.0.0.1" in caplog.text)
    assert caplog.records[0].levelno == logging.WARNING
    assert_served(listener)


def test_a_pickle_is_not_unpickled(listener: Listener, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return open, (str(tmp_path / "owned"), "w")

    data = pickle.dumps(Evil())
    for evil in (data, len(data).to_bytes(4, "big") + data):
        with stranger(listener) as sock:
            sock.sendall(evil.ljust(64, b"."))
            read_to_end(sock)
    assert_served(listener)
    assert not (tmp_path / "owned").exists()


@pytest.fixture
def short_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_stream, "_HANDSHAKE_S", 0.5)


def test_a_peer_without_a_thread_is_refused_and_the_next_is_served(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = threading.Thread.start

    def start_or_not(thread: threading.Thread) -> None:
        if thread.name == tcp_stream.STREAM_THREAD:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_or_not)
        with stranger(listener) as sock:
            assert not read_to_end(sock)
    assert "can't start new thread" in caplog.text
    assert_served(listener)


@pytest.mark.usefixtures("short_handshake")
def test_silent_connections_block_nothing_and_are_dropped(listener: Listener) -> None:
    silent = [stranger(listener) for _ in range(5)]
    assert_served(listener)
    for sock in silent:
        with closing(sock):
            assert len(read_to_end(sock)) <= 64


def test_many_strangers_make_room_for_each_other_and_for_who_holds_the_key(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is dropped by its deadline here: whoever has waited longest is hung up on."""
    monkeypatch.setattr(tcp_stream, "_HANDSHAKE_S", 1e4)
    before = threading.active_count()
    silent = [stranger(listener) for _ in range(3 * tcp_stream._MOST_STRANGERS)]
    for sock in silent[: 2 * tcp_stream._MOST_STRANGERS]:
        assert len(read_to_end(sock)) <= 32
    assert_served(listener)
    wait_until(lambda: threading.active_count() <= before + tcp_stream._MOST_STRANGERS)
    for sock in silent:
        sock.close()
    wait_until(lambda: threading.active_count() <= before)


@pytest.mark.usefixtures("short_handshake")
def test_those_who_drip_are_dropped_too(listener: Listener) -> None:
    """A byte now and then must not put the deadline off: it passes before enough have come for an answer."""
    with stranger(listener) as sock:
        stop = threading.Event()

        def drip() -> None:
            with suppress(OSError):
                while not stop.wait(0.3):
                    sock.sendall(b".")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert len(read_to_end(sock)) == 32  # the nonce, and no answer to ours
        finally:
            stop.set()
            thread.join()


def test_an_answer_can_not_be_had_from_the_listener_itself(listener: Listener) -> None:
    """Sending back the nonce that it sent makes it compute an HMAC; which must not open its own door."""
    with stranger(listener) as first, stranger(listener) as second:
        nonce = first.recv(32, socket.MSG_WAITALL)
        second.recv(32, socket.MSG_WAITALL)
        second.sendall(nonce)
        answer = second.recv(32, socket.MSG_WAITALL)
        first.sendall(bytes(32) + answer)
        first.recv(32, socket.MSG_WAITALL)
        assert read_to_end(first) == b""


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.slow
@pytest.mark.usefixtures("short_handshake")
def test_a_thousand_silent_connections_cost_a_bounded_number_of_threads_and_no_memory(listener: Listener) -> None:
    before, threads = resident_bytes(), threading.active_count()
    most = threads
    silent = []
    for _ in range(1000):
        silent.append(stranger(listener))
        most = max(most, threading.active_count())
    assert_served(listener)
    for sock in silent:
        sock.close()
    wait_until(lambda: threading.active_count() <= threads + 1)
    assert most <= threads + 2 * tcp_stream._MOST_STRANGERS + 20  # threads that are about to end count too
    assert resident_bytes() - before < 64 << 20


def test_who_sends_without_end_is_cut_off(listener: Listener) -> None:
    """Nothing beyond the handshake is read: what the kernel buffers for a connection is all that gets through."""
    before, block, sent = resident_bytes(), memoryview(bytes(1 << 20)), 0
    with stranger(listener) as sock, suppress(OSError):
        while sent < 10 << 30:
            sent += sock.send(block)
    assert sent < 256 << 20
    assert resident_bytes() - before < 64 << 20
    assert_served(listener)


def test_a_recorded_handshake_can_not_be_replayed(listener: Listener, caplog: pytest.LogCaptureFixture) -> None:
    """The listener draws another nonce for each connection, so that the recorded proof fits none of them."""
    recorded: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as between:

        def record() -> None:
            theirs, _ = between.accept()
            with theirs, stranger(listener) as ours:
                forward = threading.Thread(target=pump, args=(ours, theirs, []), daemon=True)
                forward.start()
                pump(theirs, ours, recorded)
                forward.join()

        thread = threading.Thread(target=record)
        thread.start()
        with connect("127.0.0.1", between.getsockname()[1], KEY) as connection:
            connection.send(frame(b"a step"))
            assert connection.poll(DEADLINE_S) and connection.recv() == frame(b"a step")
        thread.join()
    said = b"".join(recorded)
    assert len(said) == 64 + len(frame(b"a step"))
    for _ in range(3):
        with stranger(listener) as sock:
            with suppress(OSError):
                sock.sendall(said)
            assert len(read_to_end(sock)) <= 64  # a nonce, and the answer to the recorded one: never a frame
    wait_until(lambda: caplog.text.count("refused a connection") == 3)
    assert_served(listener)


def pump(source: socket.socket, target: socket.socket, kept: list[bytes]) -> None:
    """Passes on what arrives until the end, and keeps it."""
    with suppress(OSError):
        while data := source.recv(1 << 16):
            kept.append(data)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def test_an_impostor_does_not_get_the_clients_frames() -> None:
    """Who listens without the key is found out before anything is said."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        heard: list[bytes] = []

        def pretend() -> None:
            sock, _ = server.accept()
            with sock:
                challenge = sock.recv(32, socket.MSG_WAITALL)
                sock.sendall(bytes(32) + hmac.digest(b"guess", b"server" + challenge, "sha256"))
                heard.append(read_to_end(sock))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(PermissionError):
            connect("127.0.0.1", server.getsockname()[1], KEY)
        thread.join()
        assert len(heard[0]) == 32


def test_after_close_no_connection_is_accepted_and_no_thread_waits() -> None:
    before = threading.active_count()
    listener = Listener("127.0.0.1", KEY, echo)
    assert_served(listener)
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        connect("127.0.0.1", listener.port, KEY)
    wait_until(lambda: threading.active_count() <= before)


def test_a_connection_that_is_served_outlives_the_listener(listener: Listener) -> None:
    with connect("127.0.0.1", listener.port, KEY) as connection:
        listener.close()
        connection.send(frame(b"still there"))
        assert connection.recv() == frame(b"still there")


def cut_off(sock: socket.socket) -> None:
    """Lets the kernel drop whatever arrives for a socket, as it does nothing where the cable is out."""
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    so_attach_filter = 26
    sock.setsockopt(socket.SOL_SOCKET, so_attach_filter, struct.pack("HL", 1, ctypes.addressof(drop_all)))


@pytest.mark.slow
def test_who_reads_late_gets_what_was_sent() -> None:
    """For longer than the dead are silent, the other machine says that there is no room yet."""
    large = frame(bytes(range(256)) * (1 << 12))
    errors: list[OSError] = []

    def serve(connection: FrameSocket) -> None:
        try:
            connection.send(large)
            connection.recv()
        except OSError as error:
            errors.append(error)
        except EOFError:
            pass

    with closing(Listener("127.0.0.1", KEY, serve)) as listener:
        with connect("127.0.0.1", listener.port, KEY) as connection:
            time.sleep(12.0)
            assert connection.recv() == large
    assert not errors


def await_acknowledged(connection: FrameSocket) -> None:
    """Waits until the peer's machine has acknowledged all that was sent."""
    unsent = bytearray(4)
    wait_until(lambda: not (fcntl.ioctl(connection, termios.TIOCOUTQ, unsent, True) or any(unsent)))


def silence_ms(connection: FrameSocket) -> int:
    """Returns the time since the last acknowledgement."""
    info = connection._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, tcp_stream._TCP_INFO.size)
    *_, silent_ms = tcp_stream._TCP_INFO.unpack(info)
    return int(silent_ms)


def test_a_peer_that_acknowledges_and_sends_nothing_is_not_silent() -> None:
    """The time is that since the last acknowledgement, and not since the last data."""

    def read(connection: FrameSocket) -> None:
        with suppress(EOFError, OSError):
            while True:
                connection.recv()

    with closing(Listener("127.0.0.1", KEY, read)) as listener:
        with connect("127.0.0.1", listener.port, KEY) as connection:
            began_s = sent_s = time.monotonic()
            while sent_s - began_s < 0.5:
                sent_s = time.monotonic()
                connection.send(frame(b""))
            await_acknowledged(connection)
            assert silence_ms(connection) < 1000 * (time.monotonic() - sent_s) + 50


@pytest.mark.slow
def test_a_peer_that_gets_nothing_but_still_sends_is_found_out() -> None:
    """It sends again what it has no acknowledgement for, and so acknowledges what it got before."""
    done = threading.Event()

    def hold(connection: FrameSocket) -> None:
        cut_off(connection._sock)
        connection.send(frame(b"an answer"))
        done.wait()

    with closing(Listener("127.0.0.1", KEY, hold)) as listener:
        with connect("127.0.0.1", listener.port, KEY) as connection:
            assert connection.recv() == frame(b"an answer")
            connection.send(frame(b"a request"))
            with pytest.raises(TimeoutError, match="acknowledged nothing"):
                connection.recv()
            assert silence_ms(connection) < 1000 * tcp_stream._SILENCE_S
        done.set()


@pytest.mark.slow
def test_a_peer_whose_machine_is_gone_is_found_out() -> None:
    """Whatever is waited for; by the kernel where nothing was sent, else by us."""
    found: dict[str, Exception] = {}
    done = threading.Event()

    def play(wait: str) -> None:
        with connect("127.0.0.1", listener.port, KEY) as connection:
            cut_off(connection._sock)
            try:
                if wait != "idle":
                    connection.send(frame(b"a request"))
                while wait == "send":
                    connection.send(frame(bytes(1 << 20)))
                while wait == "poll" and not connection.poll(0.1):
                    pass
                connection.recv()
            except OSError as error:
                found[wait] = error

    def hold(connection: FrameSocket) -> None:
        done.wait()

    with closing(Listener("127.0.0.1", KEY, hold)) as listener:
        waits = [threading.Thread(target=play, args=(wait,)) for wait in ("recv", "poll", "send", "idle")]
        for thread in waits:
            thread.start()
        for thread in waits:
            thread.join(3 * DEADLINE_S)
        done.set()
    assert sorted(found) == ["idle", "poll", "recv", "send"]


def test_peers_that_send_at_the_same_time_do_not_wait_for_each_other() -> None:
    """Frames of more than the kernel holds: each side has sent all of its own only once the other has read."""
    ours, theirs = frame(b"o" * (1 << 26)), frame(b"t" * (1 << 26))
    received = []

    def send_first(connection: FrameSocket) -> None:
        connection.send(theirs)
        received.append(bytes(connection.recv()))

    listener = Listener("127.0.0.1", KEY, send_first)
    with closing(listener), connect("127.0.0.1", listener.port, KEY) as connection:
        thread = threading.Thread(target=connection.send, args=(ours,), daemon=True)
        thread.start()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert connection.poll() and connection.recv() == theirs
        wait_until(lambda: bool(received), "it has arrived")
    assert received == [ours]
