"""The environments of one node: a Ray actor around a process pool."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import shutil
import socket
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ray
from gymnasium import Space
from numpy.typing import NDArray

from rayvec.cluster.frames import FrameFormat, Kind, Request
from rayvec.cluster.session import CLUSTER_MARK
from rayvec.cluster.stream import STREAM_THREAD, FrameSocket, Listener
from rayvec.data import ChunkSummary, NodeSlice, RolloutTimes, StepBatch
from rayvec.data.chunk_ops import join_chunks, summarize
from rayvec.errors import RemoteFailure
from rayvec.node.process_pool import ProcessPool, Workers
from rayvec.node.wire import BlockShape
from rayvec.node.worker_link import LOOK_S, readable
from rayvec.pools.base import PoolSpaces, Supervision
from rayvec.pools.restarts import NodeState

__all__ = ["FDS_PER_MESSAGE", "LEND_S", "NodeActor"]

LEND_S = 10.0
FDS_PER_MESSAGE = 100
_LONGEST_PATH = 75


class NodeActor:
    """Holds the environments of one node.

    No method raises what an environment raised: it returns a :class:`~rayvec.errors.RemoteFailure`, which
    the driver raises. Calls come one at a time. While the driver steps through shared memory that it was lent,
    none comes that touches the environments; while it steps some through the stream, one may come for others.
    """

    def __init__(self, node_slice: NodeSlice, supervision: Supervision) -> None:
        self._slice = node_slice
        self._supervision = supervision
        self._workers: Workers | None = None
        self._pool: ProcessPool | None = None
        self._tempdir: str | None = None
        self._listener: Listener | None = None
        self._is_lent = False
        self._turn = threading.Lock()  # of the stream's thread and of calls
        self._kept_for_driver: deque[Any] = deque()
        self._kept_for_node: deque[Any] = deque()
        self._log = _Log()
        logging.getLogger("rayvec").addHandler(self._log)

    def start(self, factories: Sequence[bytes], preload: Sequence[str]) -> PoolSpaces | RemoteFailure:
        """Starts the workers, which make their environments; returns what these say of themselves."""

        def begin() -> PoolSpaces:
            self._tempdir = _use_tempdir_of_session()
            self._workers = Workers(factories, self._slice.worker_bounds, self._slice.name, preload, self._supervision)
            return self._workers.spaces

        return self._guard(begin)  # type: ignore[no-any-return]

    def allocate(
        self, observation: Space[Any], action: Space[Any], state: NodeState | None = None
    ) -> BlockShape | RemoteFailure:
        """Makes the shared memory for these spaces, and goes on from a lost node's state if there is one."""

        def make() -> BlockShape:
            assert self._workers is not None
            self._pool = ProcessPool(self._workers, observation, action, state)
            return self._pool.block_shape

        return self._guard(make)  # type: ignore[no-any-return]

    def listen(self, key: bytes) -> int:
        """Opens the stream on this node's own address; returns its port."""
        self._listener = Listener(self._slice.address, key, self._serve)
        return self._listener.port

    def lend(self, name: str) -> None:
        """Hands the pool's descriptors to the process listening on this abstract socket."""
        assert self._pool is not None
        _hand_over(name, self._pool.fds)
        self._is_lent = True

    def lend_pipe(self, index: int, name: str) -> None:
        """Hands the pipe of a worker that has been started anew to the process that is lent the others."""
        assert self._pool is not None
        _hand_over(name, [self._pool.fds[2 + index]])

    def respawn(self, index: int, name: str) -> RemoteFailure | None:
        """Starts a worker anew for the process that is lent the pool, and hands it the new pipe."""

        def restart() -> None:
            assert self._pool is not None
            _hand_over(name, [self._pool.respawn(index)])

        return self._guard(restart)  # type: ignore[no-any-return]

    def ask(self, name: str, *args: Any) -> Any:
        """Calls a method of the process pool."""
        return self._guard(lambda: getattr(self._pool, name)(*args))

    def publish(self, key: int, version: int, weights: NDArray[np.float32]) -> Any:
        """Puts weights, which Ray has fetched once for this node, where the workers read them."""
        return self.ask("publish", key, version, weights)

    def rollout(
        self, key: int, num_steps: int, first_step: int, noise_seed: int, with_summary: bool
    ) -> tuple[tuple[tuple[RolloutTimes, ...], ChunkSummary | None, list[str]] | RemoteFailure, Any]:
        """Lets the workers take steps with a policy.

        Returns:
            Two values, of which the driver need not fetch the second: the workers' times, if asked for the chunk's
            summary, and what the driver is to log; with a summary the chunk, else one of each worker: which Ray copies
            before the next call begins, or, for a driver that is lent the pool, packed where it lies.
        """

        def take() -> tuple[Any, Any]:
            assert self._pool is not None
            packed = self._pool.rollout(key, num_steps, first_step, noise_seed)
            times = tuple(part.times for part in packed)
            if not with_summary:
                return (times, None, self._log.take()), packed if self._is_lent else self._pool.unpack(packed)
            chunk = join_chunks(self._pool.unpack(packed))
            return (times, summarize(chunk), self._log.take()), chunk

        taken = self._guard(take)
        return (taken, None) if isinstance(taken, RemoteFailure) else taken

    def call(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], env_ids: NDArray[np.int64]
    ) -> list[Any] | RemoteFailure:
        """Calls a method of environments and waits for the results."""

        def whole() -> list[Any]:
            assert self._pool is not None
            return self._pool.call(name, args, kwargs, env_ids)(None)

        return self._guard(whole)  # type: ignore[no-any-return]

    def keep(self, value: Any) -> None:
        """Takes what the next frame of its kind can't carry: actions, or seeds and options."""
        self._kept_for_node.append(value)

    def kept(self) -> StepBatch | RemoteFailure:
        """Returns what the oldest such frame to the driver could not carry."""
        value: StepBatch | RemoteFailure = self._kept_for_driver.popleft()
        return value

    def worker_pids(self) -> list[int]:
        """Process ids of this actor and of its workers, for those who look after them."""
        return [os.getpid(), *(self._pool.worker_pids if self._pool is not None else [])]

    def close(self) -> None:
        """Closes the environments and ends the workers."""
        if self._listener is not None:
            self._listener.close()
        if self._pool is not None:
            self._pool.close()
        elif self._workers is not None:
            self._workers.close()
        if self._tempdir is not None:
            shutil.rmtree(self._tempdir, ignore_errors=True)

    def _guard(self, function: Callable[[], Any]) -> Any:
        try:
            with self._turn:
                return function()
        except Exception as error:
            return RemoteFailure.capture(error, f"node {self._slice.name}")

    def _serve(self, connection: FrameSocket) -> None:
        """Does what frames ask for, until the driver hangs up.

        A frame that has arrived is started before an answer is awaited: that is what lets one group step
        while another is answered.
        """
        pool = self._pool
        assert pool is not None
        frames = FrameFormat(pool.layout, pool.action_layout)
        together: deque[NDArray[np.int64]] = deque()
        num_waiting = 0
        with contextlib.suppress(EOFError, OSError):
            while True:
                while not num_waiting or connection.poll():
                    request = frames.unpack_request(connection.recv())
                    with self._turn:
                        self._begin(pool, request)
                    num_waiting += len(request.env_ids)
                    if not request.loose:
                        together.append(request.env_ids.copy())  # out of the next frame's way
                frame, count = self._answer(pool, frames, together.popleft if together else pool.ready_ids)
                num_waiting -= count
                if frame:
                    connection.send(frame)
                else:
                    readable([connection.fileno(), pool.event_fd], LOOK_S)

    def _begin(self, pool: ProcessPool, request: Request) -> None:
        if request.kind in (Kind.READY, Kind.LOOK):
            pool.ready(request.env_ids, begin=request.kind == Kind.READY)
        elif request.kind == Kind.RESET:
            seeds, options = request.seeds, request.options
            if seeds is None:
                seeds, options = self._kept_for_node.popleft()
            pool.reset(request.env_ids, seeds, options)
        else:
            actions = request.actions if request.actions is not None else self._kept_for_node.popleft()
            pool.send(request.env_ids, actions, request.autoreset)

    def _answer(
        self, pool: ProcessPool, frames: FrameFormat, which: Callable[[], NDArray[np.int64]]
    ) -> tuple[bytes | memoryview, int]:
        """Returns the frame that answers for some environments, nothing if there are none, and their number."""
        env_ids = np.zeros(0, np.int64)
        try:
            with self._turn:
                env_ids = which()
                if not len(env_ids):
                    return b"", 0
                batch = pool.recv(env_ids)
        except Exception as error:
            self._kept_for_driver.append(RemoteFailure.capture(error, f"node {self._slice.name}"))
            return frames.pack_kept(env_ids), len(env_ids)
        frame, keep = frames.pack_answer(batch)
        if keep:
            self._kept_for_driver.append(batch)
        return frame, len(env_ids)


class _Log(logging.Handler):
    """Keeps what was logged here for the driver, where its user looks.

    Not what the stream's thread said: of steps, the driver knows from the infos.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.threadName != STREAM_THREAD:
            self._lines.append(record.getMessage())

    def take(self) -> list[str]:
        """Returns what was said since it was last asked."""
        lines, self._lines = self._lines, []
        return lines


def _use_tempdir_of_session() -> str | None:
    """Lets multiprocessing keep its sockets where they go with the session, since an actor is ended by a kill."""
    node: Any = ray._private.worker._global_node
    parent = os.environ.get(CLUSTER_MARK) or node.get_session_dir_path()
    if len(parent) > _LONGEST_PATH:  # the name of a socket has room for 107 characters
        return None
    directory = tempfile.mkdtemp(prefix="mp-", dir=parent)
    multiprocessing.current_process()._config["tempdir"] = directory  # type: ignore[attr-defined]
    return directory


def _hand_over(name: str, fds: Sequence[int]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(LEND_S)
        sock.connect("\0" + name)
        for start in range(0, len(fds), FDS_PER_MESSAGE):
            socket.send_fds(sock, [b"\0"], fds[start : start + FDS_PER_MESSAGE])
