"""A remote node: an actor owns its process pool, and the driver steps it through a stream."""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import ray
from gymnasium import Space
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayvec.cluster.frames import Answer, FrameFormat
from rayvec.cluster.node_actor import NodeActor
from rayvec.cluster.nodes import NodePart, Wait, Weights, done, node_lost
from rayvec.cluster.stream import FrameSocket, connect
from rayvec.data import NodeSlice, RawInfo, StepBatch, Tree, tree_map
from rayvec.envs.factory import EnvFactory
from rayvec.errors import NodeLostError, RemoteFailure
from rayvec.pools.base import Autoreset, NotReady, Supervision
from rayvec.pools.memory import ArrayLayout
from rayvec.pools.restarts import RESTARTED, NodeState

__all__ = ["RemoteNode"]

_LOST = (
    ray.exceptions.RayActorError,
    ray.exceptions.ActorUnschedulableError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.NodeDiedError,
)
_CLOSE_S = 10.0

logger = logging.getLogger(__name__)


class RemoteNode:
    """A remote node: an actor owns its process pool, and the driver steps it through a stream.

    Args:
        node_slice: The environments, workers and cores of this node.
        preload: Modules that the workers' fork server imports once.
        supervision: Restart policy for environments that raise, hang, or whose worker exits.
        loose: Whether the node answers for each environment as soon as it has finished; else for all environments of
            a request together.
    """

    transport = "tcp"

    def __init__(
        self, node_slice: NodeSlice, preload: Sequence[str], supervision: Supervision, loose: bool = False
    ) -> None:
        self.slice = node_slice
        self._loose = loose
        self._connection: FrameSocket | None = None
        self._actor: Any = (
            ray.remote(NodeActor)
            .options(
                num_cpus=node_slice.num_cpus,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_slice.node_id, soft=False),
            )
            .remote(node_slice, preload, supervision)
        )

    # Requests through Ray.

    def _start(self, method: str, *args: Any) -> Wait:
        ref = getattr(self._actor, method).remote(*args)
        return lambda timeout_s: self._get(ref, timeout_s)

    def _get(self, ref: Any, timeout_s: float | None = None) -> Any:
        """Waits for the result of an actor call.

        Raises:
            NotReady: The timeout expired.
            NodeLostError: The actor or its node is lost.
            Exception: An environment raised this exception.
        """
        try:
            value = ray.get(ref, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise NotReady(f"node {self.slice.name} has not answered in time") from error
        except _LOST as error:
            raise self._lost(error) from error
        if isinstance(value, RemoteFailure):
            raise value.rebuild()
        return value

    def _lost(self, error: BaseException) -> NodeLostError:
        return node_lost(self.slice, error)

    def wait_until_placed(self, timeout_s: float) -> None:
        """Waits until the actor runs.

        Raises:
            NodeLostError: The actor did not start in time, or died.
        """
        try:
            self._start("worker_pids")(timeout_s)
        except NotReady as error:
            ray.kill(self._actor)
            raise self._lost(error) from error

    def start(self, factory: EnvFactory) -> Wait:
        """See :class:`Node`."""
        return self._start("start", factory.in_parts(self.slice.worker_bounds))

    def allocate(self, observation: Space[Any], action: Space[Any], state: NodeState | None = None) -> Wait:
        """See :class:`Node`; the returned wait connects the stream."""
        key = secrets.token_bytes(32)
        allocating = self._start("allocate", observation, action, state)
        listening = self._start("listen", key)

        def connect_stream(timeout_s: float | None) -> None:
            allocating(timeout_s)
            port = listening(timeout_s)
            try:
                self._connection = connect(self.slice.address, port, key)
            except OSError as error:
                raise NodeLostError(
                    "The driver steps another node through a TCP stream.",
                    expected=f"node {self.slice.name} to accept a connection at {self.slice.address}:{port}",
                    got=f"{type(error).__name__}: {error}",
                    remedy="Open the ports between the nodes: a firewall may block them.",
                ) from error

        self._frames = FrameFormat(ArrayLayout.of(observation), ArrayLayout.of(action))
        self._frame: bytes | memoryview = b""
        self._seeds: dict[int, int] = {}
        self._answers: dict[int, tuple[StepBatch, int]] = {}
        self._whole: dict[bytes, StepBatch] = {}
        self._asked: deque[bytes] = deque()  # pending requests, answered in this order
        self._asked_ids: set[int] = set()  # environments with a pending request, answered in any order
        return connect_stream

    def load(self, key: int, policy: bytes, version: int) -> Wait:
        """See :class:`Node`."""
        return self._start("load", key, policy, version)

    def drop(self, key: int) -> Wait:
        """See :class:`Node`."""
        return self._start("drop", key)

    def publish(self, key: int, weights: Weights) -> Wait:
        """See :class:`Node`; Ray fetches the weights once for the node."""
        return self._start("publish", key, weights.version, weights.ref)

    def begin_rollout(self, key: int, num_steps: int, first_step: int, noise_seed: int, by_reference: bool) -> Wait:
        """See :class:`Node`."""
        rollout = self._actor.rollout.options(num_returns=2)
        refs = rollout.remote(key, num_steps, first_step, noise_seed, by_reference)

        def finish(timeout_s: float | None) -> NodePart:
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            times, summary, notes = self._get(refs[0], timeout_s)
            if summary is not None:
                return NodePart(times, notes, summary, refs[1])
            return NodePart(times, notes, None, self._get(refs[1], _left(deadline)))

        return finish

    def release_chunk(self) -> None:
        """See :class:`Node`; the actor has done so."""

    def worker_pids(self) -> list[int]:
        """See :class:`Node`."""
        found: list[int] = self._start("worker_pids")(None)
        return found

    def close(self, timeout_s: float | None = None) -> Wait:
        """See :class:`Node`."""
        if self._connection is not None:
            self._connection.close()
        if not ray.is_initialized():
            return done
        closing = self._start("close", timeout_s)

        def end(timeout_s: float | None) -> None:
            try:
                closing(_CLOSE_S if timeout_s is None else timeout_s)
            except (NodeLostError, NotReady):
                pass  # the actor has died, or is killed below
            except Exception:
                logger.exception("node %s did not close in order", self.slice.name)
            ray.kill(self._actor)

        return end

    # Requests through the stream.

    @property
    def _stream(self) -> FrameSocket:
        assert self._connection is not None
        return self._connection

    def send(self, env_ids: NDArray[np.int64], actions: Tree, autoreset: Autoreset) -> None:
        """See :class:`Node`."""
        frame, keep = self._frames.pack_step(env_ids, actions, autoreset, self._loose)
        self._ask(env_ids, frame, list(actions) if keep and not isinstance(actions, (dict, tuple)) else actions, keep)

    def reset(
        self, env_ids: NDArray[np.int64], seeds: Sequence[int | None], options: Mapping[str, Any] | None = None
    ) -> None:
        """See :class:`Node`."""
        self._seeds.update((i, seed) for i, seed in zip(env_ids.tolist(), seeds, strict=True) if seed is not None)
        frame, keep = self._frames.pack_reset(env_ids, seeds, options, self._loose)
        self._ask(env_ids, frame, (list(seeds), options), keep)

    def ready(self, env_ids: NDArray[np.int64], *, begin: bool = True) -> None:
        """See :class:`Node`."""
        self._ask(env_ids, self._frames.pack_ready(env_ids, begin, self._loose), None, False)

    def _ask(self, env_ids: NDArray[np.int64], frame: bytes | memoryview, kept: Any, keep: bool) -> None:
        self.flush()
        if self._loose:
            self._asked_ids.update(env_ids.tolist())
        else:
            self._asked.append(env_ids.tobytes())
        if keep:
            self._start("keep", kept)(None)
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

    def recv(self, env_ids: NDArray[np.int64], *, timeout_s: float | None = None) -> StepBatch:
        """See :class:`Node`; the next frame from this node overwrites the returned arrays."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        key = env_ids.tobytes()
        while (batch := self._whole.pop(key, None)) is None:
            if self._loose and all(env_id in self._answers for env_id in env_ids.tolist()):
                return self._gather(env_ids)
            self._read_answer(deadline)
        return batch

    @property
    def event_fd(self) -> int:
        """See :class:`Node`."""
        return self._stream.fileno()

    def ready_ids(self) -> NDArray[np.int64]:
        """See :class:`Node`."""
        while self._stream.poll():
            self._read_answer(None)
        return np.array(sorted(self._answers), np.int64)

    def _read_answer(self, deadline: float | None) -> None:
        """Reads and stores the next answer frame."""
        for key, batch in self._whole.items():  # not received yet; the next frame overwrites it
            self._whole[key] = batch.copy()
        try:
            if deadline is not None and not self._stream.poll(max(0.0, deadline - time.monotonic())):
                raise NotReady(f"node {self.slice.name} has not answered in time")
            answer = self._frames.unpack_answer(self._stream.recv())
            self._check_asked(answer.env_ids)
        except NotReady:
            raise
        except Exception as error:  # the stream was closed, or the frame is no answer
            raise self._lost(error) from error
        batch = self._fetch(answer)
        for info in batch.info:
            self._log_restart(info)
        if self._loose:
            batch = batch.copy()
            self._answers.update({env_id: (batch, row) for row, env_id in enumerate(answer.env_ids.tolist())})
        else:
            self._whole[answer.env_ids.tobytes()] = batch

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

    def _fetch(self, answer: Answer) -> StepBatch:
        if answer.batch is not None:
            return answer.batch
        batch: StepBatch | None = deepcopy(self._start("kept")(None))  # arrays from Ray are read-only
        if batch is None:
            raise self._lost(ValueError("an answer that the node has not kept"))
        return batch

    def _gather(self, env_ids: NDArray[np.int64]) -> StepBatch:
        """Joins answers that arrived one environment at a time."""
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
            env_id = self.slice.env_range.start + info.env_id
            worker = int(np.searchsorted(self.slice.worker_bounds, env_id, side="right")) - 1
            name, seed = self.slice.name, self._seeds.get(info.env_id)
            logger.warning("node %s, worker %d restarted environment %d, seed %s", name, worker, env_id, seed)

    def call(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], env_ids: NDArray[np.int64]
    ) -> Callable[[float | None], list[Any]]:
        """See :class:`Node`."""
        calling = self._start("call", name, args, dict(kwargs), env_ids)
        return lambda timeout_s: deepcopy(calling(timeout_s))  # arrays from Ray are read-only

    def set_attr(self, name: str, values: Sequence[Any], env_ids: NDArray[np.int64]) -> None:
        """See :class:`Node`."""
        self._start("set_attr", name, list(values), env_ids)(None)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
