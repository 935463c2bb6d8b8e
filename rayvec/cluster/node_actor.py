"""The environments of one node: a Ray actor around a process pool."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rayvec.cluster.node_variables import restore_variables
from rayvec.cluster.pickled import Pickled, with_objects_pickled
from rayvec.cluster.software_versions import own_versions
from rayvec.cluster.tcp_stream import STREAM_THREAD, FrameSocket, Listener
from rayvec.cluster.wire_format import FrameFormat, Kind, Request
from rayvec.data import ChunkRequest, ChunkSummary, NodeSlice, RolloutTimes
from rayvec.envs.pickled_parts import PickledParts
from rayvec.errors import RemoteFailure
from rayvec.node.log_lines import LogLines
from rayvec.node.pipe import LOOK_S
from rayvec.node.process_pool import ProcessPool
from rayvec.node.process_watch import readable
from rayvec.pools.base import RestartPolicy
from rayvec.pools.in_process_base import FAILURES, captured

__all__ = ["NodeActor"]

_T = TypeVar("_T")

logger = logging.getLogger(__name__)


class NodeActor:
    """Holds the environments of one node.

    If an environment raises, the method returns a :class:`~rayvec.errors.RemoteFailure`, and the driver raises the
    exception. Ray runs one call at a time. The driver may call methods for some environments while it steps others
    through the stream.
    """

    def __init__(self, node_slice: NodeSlice, preload: Sequence[str], restart_policy: RestartPolicy) -> None:
        restore_variables("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")  # environments get those of the node
        self._slice = node_slice
        self._preload = preload
        self._restart_policy = restart_policy
        self._pool: ProcessPool | None = None
        self._listener: Listener | None = None
        self._turn = threading.Lock()  # serializes the stream's thread and Ray's calls
        self._key = b""
        self._log = LogLines(but_of_thread=STREAM_THREAD)  # infos report what happened during steps

    @property
    def _running(self) -> ProcessPool:
        assert self._pool is not None
        return self._pool

    def start(self, factories: PickledParts) -> Pickled | RemoteFailure:
        """Starts the workers, which create their environments; returns their :class:`PoolSpaces`."""

        def begin() -> Pickled:
            bounds, name = self._slice.worker_bounds, self._slice.name
            self._pool = ProcessPool(factories, bounds, name, self._preload, self._restart_policy)
            return Pickled.of(self._pool.spaces)

        return self._guard(begin)

    def allocate(self, arguments: Pickled) -> RemoteFailure | None:
        """Allocates the shared memory; the arguments are those of ``ProcessPool.allocate``."""
        return self._guard(lambda: self._running.allocate(*arguments.load()))

    def listen(self, key: bytes) -> int:
        """Opens the stream's listener on this node's own address; returns its port."""
        self._key = key
        self._listener = Listener(self._slice.address, key, self._serve)
        return self._listener.port

    def load(self, key: int, policy: bytes, version: int, on_node: bool) -> RemoteFailure | None:
        """Loads a pickled policy in every worker, or with `on_node` in this process."""
        return self._guard(lambda: self._running.acting.load(key, policy, version, on_node=on_node))

    def drop(self, key: int) -> RemoteFailure | None:
        """Removes a policy from every worker."""
        return self._guard(lambda: self._running.acting.drop(key))

    def rollout(
        self,
        key: int,
        version: int | None,
        weights: NDArray[np.float32] | None,
        request: ChunkRequest,
    ) -> tuple[tuple[tuple[RolloutTimes, ...], ChunkSummary | None, list[str], dict[str, int]] | RemoteFailure, Any]:
        """Collects a chunk: the workers step their environments with a policy.

        Returns:
            Two values. The first holds the workers' times, the chunk's summary if it was requested by reference, lines
            for the driver to log, and how many workers were replaced. The second is the chunk if it was requested by
            reference, else one chunk for each worker; the driver may leave it in the object store.
        """

        def take() -> tuple[Any, Any]:
            pool = self._running
            if version is not None and weights is not None:
                pool.acting.publish(key, version, weights)
            pool.begin_rollout(key, request._replace(by_reference=False))
            times, summary, chunk = pool.finish_on_node(request.by_reference)
            pool.acting.release()
            if summary is not None:  # as it was requested by reference
                summary, chunk = with_objects_pickled(summary), with_objects_pickled(chunk)
            else:
                chunk = [*map(with_objects_pickled, chunk)]
            # Ray copies the chunk before the next call starts
            return (times, summary, self._log.take(), pool.take_replaced()), chunk

        taken = self._guard(take)
        return (taken, None) if isinstance(taken, RemoteFailure) else taken

    def call(self, arguments: Pickled) -> Pickled | RemoteFailure:
        """Calls a method of some environments and waits for the list of results; arguments as of ``EnvPool.call``."""
        return self._guard(lambda: Pickled.of(self._running.call(*arguments.load())(None)))

    def set_attr(self, name: str, values: Pickled, env_ids: NDArray[np.int64]) -> RemoteFailure | None:
        """Sets an attribute of some environments, one value for each."""
        return self._guard(lambda: self._running.set_attr(name, values.load(), env_ids))

    def versions(self) -> dict[str, str]:
        """Returns the versions of this process."""
        return own_versions()

    def worker_pids(self) -> list[int]:
        """Returns the process ids of this actor and of its workers."""
        workers = [] if self._pool is None else next(iter(self._pool.worker_pids().values()))[1:]
        return [os.getpid(), *workers]

    def close(self, timeout_s: float | None) -> None:
        """Closes the environments and stops the workers."""
        if self._listener is not None:
            self._listener.close()
        if self._pool is not None:
            self._pool.close(timeout_s)

    def _guard(self, function: Callable[[], _T]) -> _T | RemoteFailure:
        try:
            with self._turn:
                return function()
        except FAILURES as error:
            return captured(error, f"node {self._slice.name}")

    def _serve(self, connection: FrameSocket) -> None:
        """Serves requests until the driver closes the connection.

        Every received request is started before the next answer is awaited. One group can therefore step while the
        driver receives the answer of another.
        """
        pool = self._running
        frames = FrameFormat(pool.layout, pool.action_layout, self._key)
        together: deque[tuple[NDArray[np.int64], Exception | None]] = deque()
        num_waiting = 0
        with contextlib.suppress(EOFError, OSError):
            while True:
                while not num_waiting or connection.poll():
                    request = self._unpack(frames, connection)
                    if num_waiting + len(request.env_ids) > pool.num_envs:
                        logger.warning("closed a stream with more requests than environments")
                        return
                    failure = self._begin(pool, request)
                    env_ids = request.env_ids.copy()  # the next frame overwrites the original
                    if failure is not None and (request.loose or not together):
                        connection.send(frames.pack_object(env_ids, self._failure(failure)))
                        continue
                    num_waiting += len(env_ids)
                    if not request.loose:
                        together.append((env_ids, failure))
                frame, count = self._answer(pool, frames, *(together.popleft() if together else (None, None)))
                num_waiting -= count
                if frame:
                    connection.send(frame)
                else:
                    readable([connection.fileno(), *pool.event_fds], LOOK_S)

    @staticmethod
    def _unpack(frames: FrameFormat, connection: FrameSocket) -> Request:
        """Reads a request.

        Raises:
            OSError: The frame is no valid request, or the peer has closed the connection.
        """
        frame = connection.recv()
        try:
            return frames.unpack_request(frame)
        except Exception as error:
            logger.warning("closed a stream on which a frame came that is no request: %r", error)
            raise OSError("no request") from error

    def _failure(self, error: Exception) -> RemoteFailure:
        return RemoteFailure.capture(error, f"node {self._slice.name}")

    def _begin(self, pool: ProcessPool, request: Request) -> Exception | None:
        """Begins what was requested; returns what that raises."""
        try:
            with self._turn:
                self._command(pool, request)
        except Exception as error:
            return error
        return None

    def _command(self, pool: ProcessPool, request: Request) -> None:
        if request.kind == Kind.BEGIN:
            pool.begin_episodes(request.env_ids)
        elif request.kind == Kind.OBSERVE:
            pool.observe(request.env_ids)
        elif request.kind == Kind.RESET:
            pool.reset(request.env_ids, *pickle.loads(request.rest))
        else:
            actions = pickle.loads(request.rest) if request.kind == Kind.STEP_OBJECTS else request.actions
            pool.send(request.env_ids, actions, request.autoreset)

    def _answer(
        self,
        pool: ProcessPool,
        frames: FrameFormat,
        together: NDArray[np.int64] | None,
        failure: Exception | None,
    ) -> tuple[bytes | memoryview, int]:
        """Returns an answer frame and its number of environments; an empty frame and 0 if none is ready.

        Args:
            pool: The pool.
            frames: Packs the frame.
            together: The environments of the oldest request; None for whichever have completed.
            failure: What that request has raised.
        """
        env_ids = np.zeros(0, np.int64) if together is None else together
        try:
            if failure is not None:
                raise failure
            with self._turn:
                if together is None:
                    env_ids = pool.completed_ids()
                if not len(env_ids):
                    return b"", 0
                batch = pool.recv(env_ids)
            return frames.pack_answer(batch), len(env_ids)
        except Exception as error:
            return frames.pack_object(env_ids, self._failure(error)), len(env_ids)
