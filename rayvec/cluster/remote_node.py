"""A remote node: an actor owns its process pool, and the driver steps it through a stream."""

from __future__ import annotations

import logging
import math
import pickle
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np
import ray
from gymnasium import Space
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayvec.cluster.node_actor import NodeActor
from rayvec.cluster.node_interface import NodePart, Wait, Weights, done, node_lost
from rayvec.cluster.pickled import Pickled
from rayvec.cluster.reachability import can_call_ray, check_connected
from rayvec.cluster.software_versions import check_versions
from rayvec.cluster.tcp_stream import FrameSocket, connect
from rayvec.cluster.wire_format import FrameFormat, Kind
from rayvec.data import ChunkRequest, NodeSlice, RawInfo, StepBatch, SubBatchInfo, Tree, tree_map
from rayvec.data.layouts import ArrayLayout
from rayvec.envs.factory import EnvFactory
from rayvec.envs.pickled_parts import carrying_sys
from rayvec.errors import NodeLostError, RemoteFailure
from rayvec.node.messages import packed
from rayvec.node.object_store import room_for
from rayvec.pools.base import Autoreset, NotReady, RestartPolicy, deadline_in, seconds_until
from rayvec.pools.restart_state import NodeState, are_restarted, is_restarted

__all__ = ["RemoteNode"]

_LOST = (
    ray.exceptions.RayActorError,
    ray.exceptions.ActorUnschedulableError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.OutOfMemoryError,  # Ray has killed the actor
    ray.exceptions.WorkerCrashedError,
)
_CLOSE_S = 10.0
_LOST_CLOSE_S = 1.0
_LOOK_S = 1.0
_TRANSFER_S = 10.0
"""How long the transfer of a finished chunk may take beyond the end of a wait, in seconds."""

logger = logging.getLogger(__name__)


class RemoteNode:
    """A remote node: an actor owns its process pool, and the driver steps it through a stream.

    Args:
        node_slice: The environments, workers and cores of this node.
        preload: Modules that the workers' fork server imports once.
        restart_policy: Restart policy for environments that raise, hang, or whose worker exits.
        loose: Whether the node answers for each environment as soon as it has finished; else for all environments of
            a request together.
    """

    transport = "tcp"

    def __init__(
        self, node_slice: NodeSlice, preload: Sequence[str], restart_policy: RestartPolicy, loose: bool = False
    ) -> None:
        self.slice = node_slice
        self._loose = loose
        self._connection: FrameSocket | None = None
        self._watched: FrameSocket | None = None  # the connection until it is closed
        self._is_lost = False
        self._actor: Any = (
            ray.remote(NodeActor)
            .options(
                num_cpus=node_slice.num_cpus,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_slice.node_id, soft=False),
            )
            .remote(node_slice, preload, restart_policy)
        )

    # Requests through Ray.

    def _start(self, method: str, *args: Any) -> Wait:
        check_connected()
        ref = getattr(self._actor, method).remote(*args)
        return lambda timeout_s: self._get(ref, timeout_s)

    def _get(self, ref: Any, timeout_s: float | None = None) -> Any:
        """Waits for the result of an actor call.

        Raises:
            NotReady: The timeout expired.
            NodeLostError: The actor or its node is lost.
            ConfigError: The object store of the node is full.
            Exception: An environment raised this exception.
        """
        check_connected()
        deadline = deadline_in(timeout_s)
        if self._watched is not None:
            self._look_while_waiting(ref, deadline, self._watched)
        try:
            with room_for(f"an answer of node {self.slice.name}"):
                value = ray.get(ref, timeout=None if deadline == math.inf else seconds_until(deadline))
        except ray.exceptions.GetTimeoutError as error:
            raise NotReady(f"node {self.slice.name} has not answered in time") from error
        except _LOST as error:
            raise self._lost(error) from error
        if isinstance(value, RemoteFailure):
            raise value.rebuild()
        return self._loaded(value.data) if isinstance(value, Pickled) else value

    def _loaded(self, data: bytes | memoryview) -> Any:
        """Returns a pickled value; raises an exception that it holds, or that unpickling raises."""
        try:
            value = pickle.loads(data)
        except Exception as error:  # such as a class of a module that the driver can't import
            where = f"the process that unpickles an answer of node {self.slice.name}"
            value = RemoteFailure.capture(error, where)
        if isinstance(value, RemoteFailure):
            raise value.rebuild()
        return value

    def _look_while_waiting(self, ref: Any, deadline: float, connection: FrameSocket) -> None:
        """Waits for a result, and looks whether the node's machine answers: Ray notices after a minute that not.

        Raises:
            NodeLostError: It does not.
        """
        while not ray.wait([ref], timeout=min(_LOOK_S, seconds_until(deadline)))[0]:
            try:
                connection.check()
            except OSError as error:
                raise self._lost(error) from error
            if time.monotonic() >= deadline:
                return

    def _lost(self, error: BaseException) -> NodeLostError:
        self._is_lost = True
        return node_lost(self.slice, error)

    def wait_until_placed(self, timeout_s: float) -> None:
        """Waits until the actor runs.

        Raises:
            NodeLostError: The actor did not start in time, or died.
            ConfigError: The node has another version of Python, rayvec or NumPy.
        """
        try:
            versions = self._start("versions")(timeout_s)
        except NotReady as error:
            ray.kill(self._actor)
            raise self._lost(error) from error
        check_versions(versions, self.slice.name)

    def start(self, factory: EnvFactory) -> Wait:
        """Starts the workers, which create their environments; the result is their spaces."""
        return self._start("start", factory.in_parts(self.slice.worker_bounds))

    def allocate(self, observation: Space[Any], action: Space[Any], state: NodeState | None = None) -> Wait:
        """Allocates the shared memory for these spaces; with `state`, resumes from the state of a lost node.

        The returned wait connects the stream.
        """
        key = secrets.token_bytes(32)
        allocating = self._start("allocate", Pickled.of((observation, action, state, self.slice.env_range.start)))
        listening = self._start("listen", key)

        def connect_stream(timeout_s: float | None) -> None:
            allocating(timeout_s)
            port = listening(timeout_s)
            try:
                self._connection = self._watched = connect(self.slice.address, port, key)
            except OSError as error:
                raise NodeLostError(
                    "The driver steps another node through a TCP stream.",
                    expected=f"node {self.slice.name} to accept a connection at {self.slice.address}:{port}",
                    got=f"{type(error).__name__}: {error}",
                    remedy="Open the ports between the nodes: a firewall may block them.",
                ) from error

        self._frames = FrameFormat(ArrayLayout.of(observation), ArrayLayout.of(action), key)
        self._frame: bytes | memoryview = b""
        self._seeds: dict[int, int] = {}
        self._newest: StepBatch | None = None
        self._answers: dict[int, tuple[StepBatch, int]] = {}
        self._asked: deque[bytes] = deque()  # pending requests, answered in this order
        self._asked_ids: set[int] = set()  # environments with a pending request, answered in any order
        return connect_stream

    def load(self, key: int, policy: bytes, version: int, on_node: bool) -> Wait:
        """Loads a pickled policy; the arguments are those of :meth:`rayvec.pools.base.Acting.load`."""
        return self._start("load", key, carrying_sys(policy), version, on_node)

    def drop(self, key: int) -> Wait:
        """Removes a policy and its weights from every worker."""
        return self._start("drop", key)

    def begin_rollout(self, key: int, weights: Weights | None, request: ChunkRequest) -> Wait:
        """Starts a chunk: every worker steps its own slice with a policy. The result is a :class:`NodePart`.

        Args:
            key: The key of the policy.
            weights: The weights to act with, which Ray fetches once for the node; None for those that the policy was
                loaded with.
            request: How many steps, which noise, and whether the part stays in the object store.
        """
        check_connected()
        rollout = self._actor.rollout.options(num_returns=2)
        version, ref = (None, None) if weights is None else (weights.version, weights.ref)
        refs = rollout.remote(key, version, ref, request)

        def finish(timeout_s: float | None) -> NodePart:
            deadline = deadline_in(timeout_s)
            times, summary, notes, replaced = self._get(refs[0], timeout_s)
            left_s = max(seconds_until(deadline), _TRANSFER_S)  # the part is there, and a transfer cut short is lost
            chunk = refs[1] if summary is not None else self._get(refs[1], left_s)
            return NodePart(times, notes, summary, chunk, replaced)

        return finish

    def release_chunk(self) -> None:
        """Forgets the oldest pending chunk, whose part has been taken; the actor has done so."""

    def worker_pids(self) -> list[int]:
        """Returns the process ids of the workers' parent (the fork server or the actor) and of the workers."""
        return list(self._start("worker_pids")(None))

    def close(self, timeout_s: float | None = None) -> Wait:
        """Closes the environments and stops the workers; kills processes that do not exit in time."""
        if self._connection is not None:
            self._watched = None
            self._connection.close()
        if not ray.is_initialized():
            return done
        closing = self._start("close", timeout_s)

        def end(left_s: float | None) -> None:
            limit_s = _CLOSE_S if left_s is None else left_s
            try:
                closing(min(limit_s, _LOST_CLOSE_S) if self._is_lost else limit_s)
            except NodeLostError:
                pass  # the actor has died
            except NotReady:  # it is killed below
                if timeout_s != 0.0 and not self._is_lost:
                    logger.warning("killed workers on node %s, since it did not close in time", self.slice.name)
            except Exception:
                logger.exception("node %s did not close in order", self.slice.name)
            if can_call_ray():  # without its head, Ray would wait for a minute
                ray.kill(self._actor)

        return end

    # Requests through the stream.

    @property
    def _stream(self) -> FrameSocket:
        assert self._connection is not None
        return self._connection

    def send(self, env_ids: NDArray[np.int64], actions: Tree, autoreset: Autoreset) -> None:
        """Starts a step of some environments."""
        self._ask(env_ids, self._frames.pack_step(env_ids, actions, autoreset, self._loose))

    def reset(
        self, env_ids: NDArray[np.int64], seeds: Sequence[int | None], options: Mapping[str, Any] | None = None
    ) -> None:
        """Starts a reset of some environments."""
        self._seeds.update((i, seed) for i, seed in zip(env_ids.tolist(), seeds, strict=True) if seed is not None)
        self._ask(env_ids, self._frames.pack_ids(Kind.RESET, env_ids, self._loose, packed((list(seeds), options))))

    def begin_episodes(self, env_ids: NDArray[np.int64]) -> None:
        """Starts a reset of those environments that are between two episodes."""
        self._ask(env_ids, self._frames.pack_ids(Kind.BEGIN, env_ids, self._loose))

    def observe(self, env_ids: NDArray[np.int64]) -> None:
        """Requests current observations."""
        self._ask(env_ids, self._frames.pack_ids(Kind.OBSERVE, env_ids, self._loose))

    def _ask(self, env_ids: NDArray[np.int64], frame: bytes | memoryview) -> None:
        self.flush()
        if self._loose:
            self._asked_ids.update(env_ids.tolist())
        else:
            self._asked.append(env_ids.tobytes())
        self._frame = frame

    def flush(self) -> None:
        """See :class:`Node`.

        Frames are sent only after the frames of all nodes are packed. Sending a frame can wake its receiver, which
        may then take the driver's core.
        """
        frame, self._frame = self._frame, b""
        if frame:
            try:
                self._stream.send(frame)
            except OSError as error:
                raise self._lost(error) from error

    def wait(self, env_ids: NDArray[np.int64], deadline: float) -> None:
        """Waits until the answers of requests that have been sent have arrived; they stay for :meth:`take`."""
        while not self._is_newest(env_ids):
            self._store_newest()
            if self._answers and self._answers.keys() >= set(env_ids.tolist()):
                return
            if deadline < math.inf and not self._poll(seconds_until(deadline)):
                raise NotReady(f"node {self.slice.name} has not answered in time")
            self._newest = self._read_answer()

    def take(self, env_ids: NDArray[np.int64]) -> StepBatch:
        """Returns answers that have arrived; the next frame from this node may overwrite the arrays."""
        if self._is_newest(env_ids):
            batch, self._newest = self._newest, None
            assert batch is not None
            return batch
        self._store_newest()
        return self._gather(env_ids, [self._answers.pop(env_id) for env_id in env_ids.tolist()])

    def _gather(self, env_ids: NDArray[np.int64], rows: Sequence[tuple[StepBatch, int]]) -> StepBatch:
        """Joins the rows of several answers."""
        first = rows[0][0]
        if all(batch is first for batch, _ in rows) and np.array_equal(first.env_ids, env_ids):
            return first

        def joined(name: str) -> Tree:
            parts = [tree_map(itemgetter(slice(row, row + 1)), getattr(batch, name)) for batch, row in rows]
            return tree_map(lambda *leaves: np.concatenate(leaves), *parts)

        infos: list[RawInfo] = []
        for env_id, (batch, _) in zip((self.slice.env_range.start + env_ids).tolist(), rows, strict=True):
            infos += [info for info in batch.info if info.env_id == env_id]
        obs, rew, terminated, truncated = map(joined, ("obs", "rew", "terminated", "truncated"))
        return StepBatch(env_ids, obs, rew, terminated, truncated, tuple(infos))

    @property
    def event_fds(self) -> Sequence[int]:
        """File descriptors of which one is readable once an answer may have come; then call :meth:`completed_ids`."""
        return [self._stream.fileno()]

    def completed_ids(self) -> NDArray[np.int64]:
        """Returns the ids whose answers have arrived; may be called repeatedly."""
        self._store_newest()
        while self._poll():
            self._newest = self._read_answer()
            self._store_newest()
        return np.array(sorted(self._answers), np.int64)

    def _is_newest(self, env_ids: NDArray[np.int64]) -> bool:
        """Whether the newest answer is the one to a request for just these environments."""
        return self._newest is not None and np.array_equal(self._newest.env_ids, env_ids)

    def _store_newest(self) -> None:
        """Copies the newest answer, which the next frame overwrites."""
        if self._newest is not None:
            batch, self._newest = self._newest.copy(), None
            self._answers.update((env_id, (batch, row)) for row, env_id in enumerate(batch.env_ids.tolist()))

    def _poll(self, timeout_s: float = 0.0) -> bool:
        """Waits for an answer. Returns whether one has begun to arrive."""
        try:
            return self._stream.poll(timeout_s)
        except OSError as error:
            raise self._lost(error) from error

    def _read_answer(self) -> StepBatch:
        """Reads the next answer frame."""
        try:
            answer = self._frames.unpack_answer(self._stream.recv())
            self._check_asked(answer.env_ids)
        except Exception as error:  # the stream was closed, or the frame is no answer
            raise self._lost(error) from error
        rest: Any = self._loaded(answer.rest) if answer.rest else ()
        batch: StepBatch = rest if answer.batch is None else replace(answer.batch, info=rest)
        for info in batch.info:
            self._log_restart(info)
        return batch

    def _check_asked(self, env_ids: NDArray[np.int64]) -> None:
        """Raises ``ValueError`` for the answer to a request that is not pending, or not the oldest one."""
        if not self._loose:
            if not self._asked or self._asked.popleft() != env_ids.tobytes():
                raise ValueError("an answer to another request")
            return
        found = set(env_ids.tolist())
        if len(found) < len(env_ids) or not found <= self._asked_ids:
            raise ValueError("an answer of environments that were not requested")
        self._asked_ids -= found

    def _log_restart(self, info: RawInfo | SubBatchInfo) -> None:
        if isinstance(info, SubBatchInfo):
            marked = are_restarted(info.columns) or are_restarted(info.columns.get("final_info"))
        else:
            marked = is_restarted(info.info) or is_restarted(info.final_info)
        if marked:
            worker = int(np.searchsorted(self.slice.worker_bounds, info.env_id, side="right")) - 1
            row, where = info.env_id - self.slice.env_range.start, f"node {self.slice.name}, worker {worker}"
            logger.warning("%s restarted environment %d, reset with seed %s", where, info.env_id, self._seeds.get(row))

    def call(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], env_ids: NDArray[np.int64]
    ) -> Callable[[float | None], list[Any]]:
        """Starts a call of a method of some environments."""
        return self._start("call", Pickled(packed((name, args, dict(kwargs), env_ids))))

    def set_attr(self, name: str, values: Sequence[Any], env_ids: NDArray[np.int64]) -> None:
        """Sets an attribute of some environments, one value for each."""
        self._start("set_attr", name, Pickled(packed(list(values))), env_ids)(None)
