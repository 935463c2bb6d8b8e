"""A node as the driver sees it: its actor, and the pool through which its environments are stepped."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
import ray
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayvec.cluster.frames import Answer, FrameFormat
from rayvec.cluster.node_actor import FDS_PER_MESSAGE, LEND_S, NodeActor
from rayvec.cluster.stream import connect
from rayvec.data import Chunk, NodeSlice, RawInfo, StepBatch, Tree, tree_map
from rayvec.errors import ConfigError, NodeLostError, RemoteFailure, WorkerLostError
from rayvec.node.chunk_memory import MOST_CHUNKS, ChunkMemory, PackedChunk
from rayvec.node.client import PoolClient
from rayvec.node.process_pool import worker_name
from rayvec.node.wire import BlockShape, NodeBlock
from rayvec.node.worker_link import ProcessWatch, WorkerLink
from rayvec.pools.base import Autoreset, NotReady, Supervision
from rayvec.pools.memory import ArrayLayout
from rayvec.pools.restarts import RESTARTED

__all__ = ["LentPool", "NodeHandle", "NodePool", "StreamPool"]

_LOST = (
    ray.exceptions.RayActorError,
    ray.exceptions.ActorUnschedulableError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.NodeDiedError,
)

logger = logging.getLogger(__name__)


class NodeHandle:
    """The actor of a node, called with failures raised and losses named.

    Args:
        node_slice: Which environments it holds, on which node.
        supervision: What becomes of environments that raise, hang, or whose process ends.

    Attributes:
        memories: Where its workers' chunks lie, if it is lent to this process.
    """

    def __init__(self, node_slice: NodeSlice, supervision: Supervision) -> None:
        self.slice = node_slice
        self.supervision = supervision
        self.memories: list[ChunkMemory] = []
        self.actor: Any = (
            ray.remote(NodeActor)
            .options(
                num_cpus=node_slice.num_cpus,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_slice.node_id, soft=False),
            )
            .remote(node_slice, supervision)
        )

    def get(self, ref: Any, timeout_s: float | None = None) -> Any:
        """Waits for the result of an actor call.

        Raises:
            NotReady: It takes longer.
            NodeLostError: The actor is gone.
            Exception: What an environment raised.
        """
        try:
            value = ray.get(ref, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise NotReady(f"node {self.slice.name} has not answered in time") from error
        except _LOST as error:
            raise self.lost(error) from error
        if isinstance(value, RemoteFailure):
            raise value.rebuild()
        return value

    def call(self, name: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Calls a method of the actor and waits."""
        return self.get(getattr(self.actor, name).remote(*args), timeout_s)

    def unpack(self, chunks: Sequence[Chunk | PackedChunk]) -> tuple[Chunk, ...]:
        """Returns the chunks of its workers; those that came packed are views of what the next but one is written to.

        Raises:
            NodeLostError: What they lie in has been given back, since another node has taken this one's place.
        """
        if len(self.memories) != len(chunks) and isinstance(chunks[0], PackedChunk):
            raise self.lost(EOFError("its memory has been given back"))
        return tuple(
            part.unpack(self.memories[k]) if isinstance(part, PackedChunk) else part for k, part in enumerate(chunks)
        )

    def wait_until_placed(self, timeout_s: float) -> None:
        """Waits until the actor runs.

        Raises:
            NodeLostError: It does not, in time or at all.
        """
        try:
            self.call("worker_pids", timeout_s=timeout_s)
        except NotReady as error:
            ray.kill(self.actor)
            raise self.lost(error) from error

    def lost(self, error: BaseException) -> NodeLostError:
        """Describes that the node is gone."""
        reason = str(error).splitlines()[0] if str(error) else "no reason given"
        return NodeLostError(
            "A node holds its environments until the pool is closed.",
            expected=f"node {self.slice.name} to answer",
            got=f"{type(error).__name__}: {reason}",
            remedy="Look into the node's log for what ended it; on_node_loss='rehost' goes on without it.",
        )


class NodePool(Protocol):
    """The pool of one node: as :class:`~rayvec.pools.base.EnvPool`, with the node's ids."""

    transport: str

    @property
    def event_fd(self) -> int:
        """Readable when some answer may be ready; for who calls :meth:`ready_ids`."""
        ...

    def ready_ids(self) -> NDArray[np.int64]:
        """Returns the ids whose answers :meth:`recv` would return without waiting; to be asked again and again."""
        ...

    def send(self, env_ids: NDArray[np.int64], actions: Tree, autoreset: Autoreset) -> None:
        """Starts a step."""
        ...

    def reset(
        self, env_ids: NDArray[np.int64], seeds: Sequence[int | None], options: Mapping[str, Any] | None = None
    ) -> None:
        """Starts a reset."""
        ...

    def ready(self, env_ids: NDArray[np.int64], *, begin: bool = True) -> None:
        """Asks for current observations."""
        ...

    def flush(self) -> None:
        """Tells the node what was started, if it has not been told yet."""
        ...

    def recv(self, env_ids: NDArray[np.int64], *, timeout_s: float | None = None) -> StepBatch:
        """Waits for what was started, and has been told."""
        ...

    def stepped_by_another(self, last_obs: Tree) -> None:
        """Takes note that the node itself has let the environments take steps, which ended with these observations."""
        ...

    def follow(self) -> None:
        """Reaches the workers that the node itself has started anew."""
        ...

    def call(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], env_ids: NDArray[np.int64]
    ) -> Callable[[float | None], list[Any]]:
        """Starts a call of the environments' methods."""
        ...

    def set_attr(self, name: str, values: Sequence[Any], env_ids: NDArray[np.int64]) -> None:
        """Sets an attribute of environments."""
        ...

    def close(self) -> None:
        """Lets go of the node, whose actor closes the environments."""
        ...


class LentPool(PoolClient):
    """The pool of the driver's own node, through its shared memory.

    Args:
        node: Its actor, which started the workers and starts them anew.
        shape: Of its block.
    """

    transport = "shm"

    def __init__(self, node: NodeHandle, shape: BlockShape) -> None:
        self._node = node
        pieces_at = 2 + shape.num_workers
        fds = self._borrow("lend", pieces_at + MOST_CHUNKS * shape.num_workers)
        block, pipes = NodeBlock(shape, (fds[0], fds[1])), fds[2:pieces_at]
        node.memories = [ChunkMemory(fds[k : k + MOST_CHUNKS]) for k in range(pieces_at, len(fds), MOST_CHUNKS)]
        first_id = node.slice.env_range.start
        links = [
            WorkerLink(
                block, k, Connection(fd), worker_name(node.slice.name, k, first_id, shape.worker_bounds), first_id
            )
            for k, fd in enumerate(pipes)
        ]
        super().__init__(block, links, first_id, node.supervision, self._start_anew)
        self._actor = ProcessWatch(node.call("worker_pids")[0])

    def flush(self) -> None:
        """See :class:`NodePool`; the workers know."""

    def _restart_worker(self, link: WorkerLink, error: WorkerLostError, hung_s: float = 0.0) -> None:
        if self._actor.ended():  # the worker ended because its actor did
            raise self._node.lost(error) from error
        super()._restart_worker(link, error, hung_s)

    def follow(self) -> None:
        """See :class:`NodePool`; workers that the node has started anew are lent too."""
        for link in self._links:
            if link.replaced:
                link.reconnect(Connection(self._borrow("lend_pipe", 1, link.index)[0]), repeat=False)

    def close(self) -> None:
        """Lets go of what was lent."""
        super().close()
        self._actor.close()
        for memory in self._node.memories:
            memory.close()
        self._node.memories = []

    def _start_anew(self, index: int) -> Connection:
        return Connection(self._borrow("respawn", 1, index)[0])

    def _borrow(self, method: str, count: int, *args: Any) -> list[int]:
        """Receives file descriptors from the actor, by a socket on this machine that only it is told of."""
        name = f"rayvec-{secrets.token_hex(16)}"
        fds: list[int] = []
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind("\0" + name)
            listener.listen(8)
            lending = getattr(self._node.actor, method).remote(*args, name)
            with _accept_own(listener, lambda: self._check(lending)) as sock:
                while len(fds) < count:
                    data, received, flags, _ = socket.recv_fds(sock, 1, FDS_PER_MESSAGE)
                    fds += received
                    if not data or flags & socket.MSG_CTRUNC:
                        raise _too_few_fds(fds, count)
        self._node.get(lending)
        return fds

    def _check(self, lending: Any) -> None:
        """Raises what the actor has to say, if it has ended its call without connecting."""
        if ray.wait([lending], timeout=0)[0]:
            self._node.get(lending)


def _too_few_fds(fds: list[int], count: int) -> ConfigError:
    for fd in fds:
        os.close(fd)
    return ConfigError(
        "The driver holds some file descriptors for each worker of its own node, and two more.",
        expected=f"{count} descriptors",
        got=f"{len(fds)}: the actor ended, or the limit of open files is reached",
        remedy="Raise the limit: ulimit -n 65536.",
    )


def _accept_own(listener: socket.socket, check: Callable[[], None]) -> socket.socket:
    """Accepts a connection from a process of this user; others see no more than that it is closed."""
    while True:
        listener.settimeout(1.0)
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            check()  # until its call has ended, the actor may be making environments
            continue
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] == os.getuid():
            sock.settimeout(LEND_S)
            return sock
        logger.warning("refused a connection from another user to a socket of this run")
        sock.close()


class StreamPool:
    """The pool of another node, through its stream.

    Args:
        node: Its actor.
        shape: Of its block.
        loose: Whether environments are answered each as soon as it is done; else as they were asked.
    """

    transport = "tcp"

    def __init__(self, node: NodeHandle, shape: BlockShape, loose: bool) -> None:
        key = secrets.token_bytes(32)
        port = node.call("listen", key)
        self._node = node
        self._loose = loose
        self._frames = FrameFormat(ArrayLayout.of(shape.observation), ArrayLayout.of(shape.action))
        self._connection = connect(node.slice.address, port, key)
        self._frame: bytes | memoryview = b""
        self._seeds: dict[int, int] = {}
        self._answers: dict[int, tuple[StepBatch, int]] = {}
        self._whole: dict[bytes, StepBatch] = {}

    def send(self, env_ids: NDArray[np.int64], actions: Tree, autoreset: Autoreset) -> None:
        """See :class:`NodePool`."""
        frame, keep = self._frames.pack_step(env_ids, actions, autoreset, self._loose)
        self._ask(frame, list(actions) if keep and not isinstance(actions, (dict, tuple)) else actions, keep)

    def reset(
        self, env_ids: NDArray[np.int64], seeds: Sequence[int | None], options: Mapping[str, Any] | None = None
    ) -> None:
        """See :class:`NodePool`."""
        self._seeds.update((i, seed) for i, seed in zip(env_ids.tolist(), seeds, strict=True) if seed is not None)
        frame, keep = self._frames.pack_reset(env_ids, seeds, options, self._loose)
        self._ask(frame, (list(seeds), options), keep)

    def ready(self, env_ids: NDArray[np.int64], *, begin: bool = True) -> None:
        """See :class:`NodePool`."""
        self._ask(self._frames.pack_ready(env_ids, begin, self._loose), None, False)

    def _ask(self, frame: bytes | memoryview, kept: Any, keep: bool) -> None:
        self.flush()
        if keep:
            self._node.call("keep", kept)
        self._frame = frame

    def flush(self) -> None:
        """See :class:`NodePool`.

        A frame is packed first and sent when those for other nodes are packed too: to send one may
        mean to lose the core to whoever receives it.
        """
        frame, self._frame = self._frame, b""
        if frame:
            try:
                self._connection.send(frame)
            except OSError as error:
                raise self._node.lost(error) from error

    def recv(self, env_ids: NDArray[np.int64], *, timeout_s: float | None = None) -> StepBatch:
        """See :class:`NodePool`; the arrays are views of memory that the next frame of this node overwrites."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        key = env_ids.tobytes()
        while (batch := self._whole.pop(key, None)) is None:
            if self._loose and all(env_id in self._answers for env_id in env_ids.tolist()):
                return self._gather(env_ids)
            self._read_answer(deadline)
        return batch

    @property
    def event_fd(self) -> int:
        """See :class:`NodePool`."""
        return self._connection.fileno()

    def ready_ids(self) -> NDArray[np.int64]:
        """See :class:`NodePool`."""
        while self._connection.poll():
            self._read_answer(None)
        return np.array(sorted(self._answers), np.int64)

    def stepped_by_another(self, last_obs: Tree) -> None:
        """See :class:`NodePool`; the node knows."""

    def follow(self) -> None:
        """See :class:`NodePool`; the stream goes on."""

    def _read_answer(self, deadline: float | None) -> None:
        """Reads the next frame."""
        for key, batch in self._whole.items():  # asked for later than it came: out of the frame's way
            self._whole[key] = batch.copy()
        try:
            if deadline is not None and not self._connection.poll(max(0.0, deadline - time.monotonic())):
                raise NotReady(f"node {self._node.slice.name} has not answered in time")
            answer = self._frames.unpack_answer(self._connection.recv())
        except NotReady:
            raise
        except (EOFError, OSError) as error:
            raise self._node.lost(error) from error
        batch = self._fetch(answer)
        for info in batch.info:
            self._log_restart(info)
        if self._loose:
            batch = batch.copy()
            self._answers.update({env_id: (batch, row) for row, env_id in enumerate(answer.env_ids.tolist())})
        else:
            self._whole[answer.env_ids.tobytes()] = batch

    def _fetch(self, answer: Answer) -> StepBatch:
        if answer.batch is not None:
            return answer.batch
        batch: StepBatch = deepcopy(self._node.call("kept"))  # what comes by Ray can't be written
        return batch

    def _gather(self, env_ids: NDArray[np.int64]) -> StepBatch:
        """Puts answers together that came one by one."""
        found = [self._answers.pop(env_id) for env_id in env_ids.tolist()]
        infos = []
        for env_id, (batch, _) in zip(env_ids.tolist(), found, strict=True):
            infos += [info for info in batch.info if info.env_id == env_id]

        def rows(get: Callable[[StepBatch], Tree]) -> Tree:
            return tree_map(
                lambda *leaves: np.concatenate(
                    [leaf[row : row + 1] for leaf, (_, row) in zip(leaves, found, strict=True)]
                ),
                *(get(batch) for batch, _ in found),
            )

        return StepBatch(
            env_ids,
            rows(lambda batch: batch.obs),
            rows(lambda batch: batch.rew),
            rows(lambda batch: batch.terminated),
            rows(lambda batch: batch.truncated),
            tuple(infos),
        )

    def _log_restart(self, info: RawInfo) -> None:
        if RESTARTED in info.info or RESTARTED in (info.final_info or ()):
            env_id = self._node.slice.env_range.start + info.env_id
            worker = int(np.searchsorted(self._node.slice.worker_bounds, env_id, side="right")) - 1
            name, seed = self._node.slice.name, self._seeds.get(info.env_id)
            logger.warning("node %s, worker %d restarted environment %d, seed %s", name, worker, env_id, seed)

    def call(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], env_ids: NDArray[np.int64]
    ) -> Callable[[float | None], list[Any]]:
        """See :class:`NodePool`."""
        ref = self._node.actor.call.remote(name, args, dict(kwargs), env_ids)
        return lambda timeout_s: deepcopy(self._node.get(ref, timeout_s))  # what comes by Ray can't be written

    def set_attr(self, name: str, values: Sequence[Any], env_ids: NDArray[np.int64]) -> None:
        """See :class:`NodePool`."""
        self._node.call("ask", "set_attr", name, list(values), env_ids)

    def close(self) -> None:
        """Hangs up."""
        self._connection.close()
