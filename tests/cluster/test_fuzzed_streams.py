"""Any bytes on a stream give a clean refusal or a lost node: no other exception, no hang, no memory without bound.

``corpus/`` holds streams that once did harm, and one valid stream of each kind to start from. Each is tried as it is,
and changed at random.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from helpers.examples import examples
from helpers.testing import CountingEnv
from helpers.waiting import alive, wait_until
from hypothesis import HealthCheck, given, strategies as st

from rayvec.cluster.node_actor import NodeActor
from rayvec.cluster.pickled import Pickled
from rayvec.cluster.remote_node import RemoteNode
from rayvec.cluster.tcp_stream import LENGTH_BYTES, MOST_BYTES, STREAM_THREAD, FrameSocket, Listener, connect
from rayvec.cluster.wire_format import FrameFormat
from rayvec.data import NodeSlice
from rayvec.envs.factory import EnvFactory
from rayvec.errors import NodeLostError, RemoteFailure
from rayvec.pools.base import NO_RESTARTS, Autoreset, deadline_in
from rayvec.vector.batching import InfoMerger

KEY = b"k" * 32
NUM_ENVS = 4
DEADLINE_S = 60.0
CORPUS = {path.stem: path.read_bytes() for path in sorted((Path(__file__).parent / "corpus").glob("*.bin"))}


@st.composite
def streams(draw: Callable[[Any], Any]) -> bytes:
    """Streams of the corpus, joined, with bytes that are changed, removed or inserted; or any bytes."""
    data = bytearray(b"".join(draw(st.lists(st.sampled_from([*CORPUS.values()]) | st.binary(max_size=60), max_size=4))))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        with_what = draw(st.binary(max_size=8) | st.sampled_from([b"\xff" * 8, bytes(8), b"\x7f", b"\x01"]))
        data[at : at + draw(st.sampled_from([0, len(with_what), len(with_what) + 8]))] = with_what
    return bytes(data)


@pytest.fixture
def unhandled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What threads raised and nobody handled."""
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    return raised


def exchange(sock: socket.socket, data: bytes) -> None:
    """Writes a stream, ends it, and reads until the other side hangs up, which it must."""

    def write() -> None:
        with suppress(OSError):  # the other side has hung up before it read everything
            sock.sendall(data)
        with suppress(OSError):
            sock.shutdown(socket.SHUT_WR)

    sock.settimeout(DEADLINE_S)
    writer = threading.Thread(target=write)
    writer.start()
    with suppress(ConnectionResetError):
        while sock.recv(1 << 16):
            pass
    writer.join()


def node_slice(node_id: str = "") -> NodeSlice:
    return NodeSlice(node_id, "127.0.0.1", (0, 2, NUM_ENVS), num_cpus=0)


def factory() -> EnvFactory:
    return EnvFactory.build([CountingEnv] * NUM_ENVS)


@examples(100)
@given(data=streams())
def test_who_is_not_authenticated_is_refused(data: bytes) -> None:
    served: list[FrameSocket] = []
    with closing(Listener("127.0.0.1", KEY, served.append)) as listener:
        with closing(socket.create_connection(("127.0.0.1", listener.port))) as stranger:
            exchange(stranger, data)
        connect("127.0.0.1", listener.port, KEY).close()
        wait_until(lambda: len(served) == 1, "the one with the key is served")


@examples(100)
@given(data=streams())
def test_who_listens_without_the_key_is_refused(data: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            sock, _ = server.accept()
            with sock:
                exchange(sock, data)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(OSError):  # the driver takes any for a lost node
            connect("127.0.0.1", server.getsockname()[1], KEY)
        thread.join()


@pytest.fixture(scope="module")
def node() -> Iterator[NodeActor]:
    node = NodeActor(node_slice(), (), NO_RESTARTS)
    started = node.start(factory().in_parts((0, 2, NUM_ENVS)))
    assert isinstance(started, Pickled)
    spaces = started.load()
    assert node.allocate(Pickled.of((spaces.observation, spaces.action, None, 0))) is None
    yield node
    node.close(0.0)


@examples(300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=streams())
def test_a_node_survives_any_bytes(node: NodeActor, data: bytes, unhandled: list[Any]) -> None:
    serve(node, data)
    assert not unhandled


@pytest.mark.parametrize("name", CORPUS)
def test_a_node_survives_the_corpus(node: NodeActor, name: str, unhandled: list[Any]) -> None:
    serve(node, CORPUS[name])
    serve(node, CORPUS[name] * 50)
    assert not unhandled


def serve(node: NodeActor, data: bytes) -> None:
    """Sends a stream to a node. Its workers must survive it, so that it can serve the next one."""
    with closing(Listener("127.0.0.1", KEY, node._serve)) as listener:
        with connect("127.0.0.1", listener.port, KEY) as driver:
            exchange(driver._sock, data)
    wait_until(lambda: all(each.name != STREAM_THREAD for each in threading.enumerate()), "the thread has ended")
    assert all(map(alive, node.worker_pids()))
    assert len(node._kept_for_driver) <= NUM_ENVS + 1
    with suppress(Exception):  # what environments raised
        node._running.recv(timeout_s=DEADLINE_S)
    node._kept_for_driver.clear()


@pytest.fixture(scope="module", params=[False, True], ids=["together", "loose"])
def remote_node(ray_cluster: Any, request: pytest.FixtureRequest) -> Iterator[RemoteNode]:
    node = RemoteNode(node_slice(ray.get_runtime_context().get_node_id()), (), NO_RESTARTS, request.param)
    spaces = node.start(factory())(None)
    node.allocate(spaces.observation, spaces.action)(None)
    yield node
    node.close()(None)


@examples(300)
@given(data=streams())
def test_a_driver_loses_the_node_that_answers_any_bytes(remote_node: RemoteNode, data: bytes) -> None:
    ask(remote_node, data)


@pytest.mark.parametrize("name", CORPUS)
def test_a_driver_loses_the_node_that_answers_the_corpus(remote_node: RemoteNode, name: str) -> None:
    ask(remote_node, CORPUS[name])
    ask(remote_node, CORPUS[name] * 50)


def ask(node: RemoteNode, data: bytes) -> None:
    """Steps environments of a node that answers with a stream of any bytes: an answer to this request, or none."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    for forgotten in (node._asked, node._asked_ids, node._answers):
        forgotten.clear()
    node._newest = None
    node._stream.close()
    node._connection = FrameSocket(ours)
    peer = threading.Thread(target=exchange, args=(theirs, data))
    peer.start()
    env_ids = np.arange(NUM_ENVS)
    try:
        with pytest.raises(NodeLostError):  # at the latest when the stream has ended
            while True:
                node.send(env_ids, np.zeros(NUM_ENVS, np.int64), Autoreset.NEXT_STEP)
                node.flush()
                node.wait(env_ids, deadline_in(DEADLINE_S))
                batch = node.take(env_ids)
                assert batch.env_ids.tolist() == env_ids.tolist() and batch.obs.shape == (NUM_ENVS, 4)
                InfoMerger(NUM_ENVS).merge(batch.info)
    finally:
        ours.shutdown(socket.SHUT_RDWR)
        peer.join()
        theirs.close()


def test_an_answer_that_can_not_be_packed_is_a_failure_for_the_driver(
    node: NodeActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(batch: Any) -> Any:
        raise ValueError("can't be packed")

    pool, env_ids = node._running, np.arange(NUM_ENVS)
    frames = FrameFormat(pool.layout, pool.action_layout)
    monkeypatch.setattr(frames, "pack_answer", fails)
    pool.observe(env_ids)
    frame, count = node._answer(pool, frames, env_ids, None)
    assert count == NUM_ENVS and frames.unpack_answer(frame).batch is None
    assert isinstance(node.kept(), RemoteFailure) and node.kept() is None


def test_memory_grows_with_what_arrives_and_not_with_what_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver = FrameSocket(server.accept()[0])
    with sender, receiver:
        sender.sendall(MOST_BYTES.to_bytes(LENGTH_BYTES, "little") + bytes(100_000))
        sender.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError):
            receiver.recv()
        assert len(receiver._memory) < 1 << 19
