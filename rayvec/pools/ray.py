"""The pool of a cluster: one actor for each node, each with a process pool, joined into one.

The driver reaches the node it runs on through shared memory, which that node's actor lends it, and other nodes
through a stream each. What is rare (starting, resets, calls) and what is large (chunks, weights) goes
through Ray.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import ray
from gymnasium import Space
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayvec.envs import EnvFactory
from rayvec.errors import NodeLostError, RemoteFailure, message
from rayvec.pools import codec
from rayvec.pools.base import Autoreset, PoolSpaces
from rayvec.pools.client import PoolClient, WorkerLink
from rayvec.pools.memory import ArrayLayout, split_actions
from rayvec.pools.process import ProcessPool, Workers
from rayvec.pools.stream import FrameCodec, Listener, connect
from rayvec.pools.wire import BlockShape, NodeBlock, travels
from rayvec.rollout import join_chunks
from rayvec.types import Chunk, NodeSlice, RawInfo, StepBatch, Topology, Tree, tree_leaves, tree_map

__all__ = ["NodeActor", "RayPool"]

_LEND_S = 10.0
_FDS_PER_MESSAGE = 100
_CLOSE_S = 10.0
_MOST_PLANS = 4096


class NodeActor:
    """Holds the environments of one node: a Ray actor around a process pool.

    No method raises what an environment raised: it returns a :class:`~rayvec.errors.RemoteFailure`, which
    the driver raises.
    """

    def __init__(self, node_slice: NodeSlice) -> None:
        self._slice = node_slice
        self._pool: ProcessPool | None = None
        self._listener: Listener | None = None
        self._kept: deque[tuple[RawInfo, ...] | RemoteFailure] = deque()

    def start(self, factory: bytes, preload: Sequence[str]) -> PoolSpaces | RemoteFailure:
        """Starts the workers, which make their environments; returns what these say of themselves."""

        def begin() -> PoolSpaces:
            bounds = self._slice.worker_bounds
            self._workers = Workers(pickle.loads(factory), bounds, self._slice.name, preload)
            return self._workers.spaces

        return self._guard(begin)  # type: ignore[no-any-return]

    def allocate(self, observation: Space[Any], action: Space[Any]) -> BlockShape:
        """Makes the shared memory for these spaces."""
        self._pool = ProcessPool(self._workers, observation, action)
        return self._pool.block_shape

    def listen(self, key: bytes) -> int:
        """Opens the stream on this node's own address; returns its port."""
        self._listener = Listener(self._slice.address, key, self._serve)
        return self._listener.port

    def lend(self, name: str) -> None:
        """Hands the block and the workers' pipes to the process that listens on this abstract socket."""
        assert self._pool is not None
        fds = self._pool.fds
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(_LEND_S)
            sock.connect("\0" + name)
            for start in range(0, len(fds), _FDS_PER_MESSAGE):
                socket.send_fds(sock, [b"\0"], fds[start : start + _FDS_PER_MESSAGE])

    def ask(self, name: str, *args: Any) -> Any:
        """Calls a method of the process pool."""
        return self._guard(lambda: getattr(self._pool, name)(*args))

    def publish(self, key: int, version: int, weights: NDArray[np.float32]) -> Any:
        """Puts weights, which Ray has fetched once for this node, where the workers read them."""
        return self.ask("publish", key, version, weights)

    def rollout(
        self, key: int, num_steps: int, first_step: int, noise_seed: int
    ) -> tuple[Chunk, float] | RemoteFailure:
        """Lets the workers take steps with a policy; returns their chunk and the seconds that took."""

        def timed() -> tuple[Chunk, float]:
            assert self._pool is not None
            begin = time.monotonic()
            return self._pool.rollout(key, num_steps, first_step, noise_seed), time.monotonic() - begin

        return self._guard(timed)  # type: ignore[no-any-return]

    def start_and_recv(self, name: str, env_ids: NDArray[np.int64], *args: Any) -> StepBatch | RemoteFailure:
        """Starts a step or a reset that has no place in a frame, and waits for its answer."""

        def whole() -> StepBatch:
            assert self._pool is not None
            getattr(self._pool, name)(env_ids, *args)
            return self._pool.recv(env_ids)

        return self._guard(whole)  # type: ignore[no-any-return]

    def call(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], env_ids: NDArray[np.int64]
    ) -> list[Any] | RemoteFailure:
        """Calls a method of environments and waits for the results."""

        def whole() -> list[Any]:
            assert self._pool is not None
            return self._pool.call(name, args, kwargs, env_ids)(None)

        return self._guard(whole)  # type: ignore[no-any-return]

    def kept(self) -> tuple[RawInfo, ...] | RemoteFailure:
        """Returns what the oldest frame could not carry: infos, or what an environment raised."""
        return self._kept.popleft()

    def worker_pids(self) -> list[int]:
        """Process ids of this actor and of its workers, for those who look after them."""
        return [os.getpid(), *(self._pool.worker_pids if self._pool is not None else [])]

    def close(self) -> None:
        """Closes the environments and ends the workers."""
        if self._listener is not None:
            self._listener.close()
        if self._pool is not None:
            self._pool.close()

    def _guard(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:
            return RemoteFailure.capture(error, f"node {self._slice.name}")

    def _serve(self, connection: Connection) -> None:
        """Steps what frames ask for, until the driver hangs up.

        A frame that has arrived is started before an answer is awaited: that is what lets one group step
        while another is answered.
        """
        pool = self._pool
        assert pool is not None
        frames = FrameCodec(pool.layout, pool.action_layout, codec.encode, codec.decode)  # type: ignore[arg-type]
        under_way: deque[NDArray[np.int64]] = deque()
        with contextlib.suppress(EOFError, OSError):
            while True:
                while not under_way or connection.poll():
                    env_ids, actions, autoreset = frames.unpack_request(connection.recv_bytes())
                    pool.send(env_ids, actions, autoreset)
                    under_way.append(env_ids)
                connection.send_bytes(self._answer(pool, frames, under_way.popleft()))

    def _answer(self, pool: ProcessPool, frames: FrameCodec, env_ids: NDArray[np.int64]) -> bytes:
        try:
            batch = pool.recv(env_ids)
        except Exception as error:
            self._kept.append(RemoteFailure.capture(error, f"node {self._slice.name}"))
            return FrameCodec.failure
        frame, by_ray = frames.pack_reply(batch)
        if by_ray:
            self._kept.append(batch.info)
        return frame


class _Node:
    """A node as the driver sees it: its actor, called with failures raised and losses named."""

    def __init__(self, node_slice: NodeSlice) -> None:
        self.slice = node_slice
        self.actor: Any = (
            ray.remote(NodeActor)
            .options(
                num_cpus=node_slice.num_workers,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_slice.node_id, soft=False),
            )
            .remote(node_slice)
        )

    def get(self, ref: Any, timeout_s: float | None = None) -> Any:
        """Waits for the result of an actor call."""
        try:
            value = ray.get(ref, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(f"node {self.slice.name} has not answered in time") from error
        except ray.exceptions.RayActorError as error:
            raise self.lost(error) from error
        if isinstance(value, RemoteFailure):
            raise value.rebuild()
        return value

    def call(self, name: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Calls a method of the actor and waits."""
        return self.get(getattr(self.actor, name).remote(*args), timeout_s)

    def lost(self, error: BaseException) -> NodeLostError:
        """Describes that the node is gone."""
        return NodeLostError(
            message(
                "A node holds its environments until the pool is closed.",
                expected=f"node {self.slice.name} to answer",
                got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}",
                remedy="Look into the node's log for what ended it; make the pool anew.",
            )
        )


class _LentPool(PoolClient):
    """The pool of the driver's own node, through its shared memory."""

    transport = "shm"

    def __init__(self, node: _Node, shape: BlockShape) -> None:
        fds = _borrow(node, shape.num_workers + 1)
        block = NodeBlock(shape, fds[0])
        links = [
            WorkerLink(block, k, Connection(fd), f"worker {k} on node {node.slice.name}")
            for k, fd in enumerate(fds[1:])
        ]
        super().__init__(block, links, node.slice.env_range.start)


def _borrow(node: _Node, count: int) -> list[int]:
    """Receives file descriptors from an actor on this machine, by a socket that only it is told of."""
    name = f"rayvec-{secrets.token_hex(16)}"
    fds: list[int] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name)
        listener.listen(1)
        listener.settimeout(_LEND_S)
        lending = node.actor.lend.remote(name)
        sock, _ = listener.accept()
        with sock:
            sock.settimeout(_LEND_S)
            while len(fds) < count:
                fds += socket.recv_fds(sock, 1, _FDS_PER_MESSAGE)[1]
    node.get(lending)
    return fds


class _StreamPool:
    """The pool of another node, through its stream; what has no place in a frame goes through Ray."""

    transport = "tcp"

    def __init__(self, node: _Node, shape: BlockShape) -> None:
        key = secrets.token_bytes(32)
        port = node.call("listen", key)
        self._node = node
        self._connection = connect(node.slice.address, port, key)
        layout, action_layout = ArrayLayout.of(shape.observation), ArrayLayout.of(shape.action)
        self._action_layout = action_layout
        self._frames: FrameCodec | None = None
        if layout is not None and action_layout is not None:
            self._frames = FrameCodec(layout, action_layout, codec.encode, codec.decode)
        self._asked_by_ray: dict[bytes, Any] = {}
        self._asked_by_frame: deque[NDArray[np.int64]] = deque()
        self._answers: dict[bytes, StepBatch] = {}

    def send(self, env_ids: NDArray[np.int64], actions: Tree, autoreset: Autoreset) -> None:
        leaves = [np.asarray(leaf) for leaf in tree_leaves(actions)]
        if self._frames is not None and self._fits(leaves):
            self._connection.send_bytes(self._frames.pack_request(env_ids, leaves, autoreset))
            self._asked_by_frame.append(env_ids)
        else:
            self._ask_by_ray(env_ids, "send", split_actions(actions, len(env_ids)), autoreset)

    def reset(
        self, env_ids: NDArray[np.int64], seeds: Sequence[int | None], options: Mapping[str, Any] | None = None
    ) -> None:
        self._ask_by_ray(env_ids, "reset", list(seeds), options)

    def ready(self, env_ids: NDArray[np.int64]) -> None:
        self._ask_by_ray(env_ids, "ready")

    def _ask_by_ray(self, env_ids: NDArray[np.int64], name: str, *args: Any) -> None:
        self._asked_by_ray[env_ids.tobytes()] = self._node.actor.start_and_recv.remote(name, env_ids, *args)

    def recv(self, env_ids: NDArray[np.int64], timeout_s: float | None = None) -> StepBatch:
        key = env_ids.tobytes()
        ref = self._asked_by_ray.get(key)
        if ref is not None:
            batch: StepBatch = self._node.get(ref, timeout_s)
            del self._asked_by_ray[key]
            return batch
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while key not in self._answers:
            self._read_answer(deadline)
        return self._answers.pop(key)

    def _read_answer(self, deadline: float | None) -> None:
        """Reads the next frame, which answers the oldest question."""
        assert self._frames is not None
        if deadline is not None and not self._connection.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"node {self._node.slice.name} has not answered in time")
        try:
            frame = self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise self._node.lost(error) from error
        env_ids = self._asked_by_frame.popleft()
        if frame == FrameCodec.failure:
            self._node.call("kept")
        batch, by_ray = self._frames.unpack_reply(frame, env_ids)
        self._answers[env_ids.tobytes()] = replace(batch, info=self._node.call("kept")) if by_ray else batch

    def _fits(self, leaves: Sequence[NDArray[Any]]) -> bool:
        assert self._action_layout is not None
        shapes = [shape for _, shape in self._action_layout.leaves]
        return len(leaves) == len(shapes) and all(map(travels, leaves, shapes))

    def call(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], env_ids: NDArray[np.int64]
    ) -> Callable[[float | None], list[Any]]:
        ref = self._node.actor.call.remote(name, args, dict(kwargs), env_ids)
        return lambda timeout_s: self._node.get(ref, timeout_s)

    def set_attr(self, name: str, values: Sequence[Any], env_ids: NDArray[np.int64]) -> None:
        self._node.call("ask", "set_attr", name, list(values), env_ids)

    def close(self) -> None:
        self._connection.close()


class RayPool:
    """Steps environments on the nodes of a Ray cluster.

    Started in two steps, because the shapes of the arrays are known only when the environments have been
    made: construct, look at :attr:`spaces`, then :meth:`allocate`.

    Args:
        factory: Makes all environments.
        topology: Which node holds which of them.
        preload: Modules that the workers' forkserver imports once on each node.

    Raises:
        Exception: What the constructor of an environment raised, its ``__cause__`` an ``EnvError``.
        NodeLostError: A node ended meanwhile.
    """

    def __init__(self, factory: EnvFactory, topology: Topology, preload: Sequence[str] = ()) -> None:
        self.topology = topology
        self.num_envs = topology.num_envs
        self.layout: ArrayLayout | None = None
        self._pools: list[_LentPool | _StreamPool] = []
        self._nodes = [_Node(node_slice) for node_slice in topology.nodes]
        self._starts = np.array([node.slice.env_range.start for node in self._nodes])
        self._plans: dict[bytes, list[_NodePart]] = {}
        self._under_way: dict[bytes, NDArray[np.int64]] = {}
        try:
            starting = [
                node.actor.start.remote(factory.part(node.slice.env_range).to_bytes(), tuple(preload))
                for node in self._nodes
            ]
            spaces = [node.get(ref) for node, ref in zip(self._nodes, starting, strict=True)]
        except BaseException:
            self.close()
            raise
        self.spaces = PoolSpaces.join(
            [(len(node.slice.env_range), part) for node, part in zip(self._nodes, spaces, strict=True)]
        )

    def allocate(self, observation: Space[Any], action: Space[Any]) -> None:
        """Makes the shared memory of every node for these spaces, and connects to each."""
        self.layout = ArrayLayout.of(observation)
        here = ray.get_runtime_context().get_node_id()
        allocating = [node.actor.allocate.remote(observation, action) for node in self._nodes]
        for node, ref in zip(self._nodes, allocating, strict=True):
            kind = _LentPool if node.slice.node_id == here else _StreamPool
            self._pools.append(kind(node, node.get(ref)))

    @property
    def transports(self) -> tuple[str, ...]:
        """How each node is reached: ``"shm"`` or ``"tcp"``."""
        return tuple(pool.transport for pool in self._pools)

    def send(self, env_ids: NDArray[np.int64], actions: Tree, autoreset: Autoreset) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        parts = self._plan(env_ids)
        for part in parts:
            share = actions if len(parts) == 1 else _take(actions, part.places)
            part.pool.send(part.ids, share, autoreset)
        self._under_way[env_ids.tobytes()] = env_ids

    def reset(
        self, env_ids: NDArray[np.int64], seeds: Sequence[int | None], options: Mapping[str, Any] | None = None
    ) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        for part in self._plan(env_ids):
            part.pool.reset(part.ids, [seeds[i] for i in part.places.tolist()], options)
        self._under_way[env_ids.tobytes()] = env_ids

    def ready(self, env_ids: NDArray[np.int64]) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        for part in self._plan(env_ids):
            part.pool.ready(part.ids)
        self._under_way[env_ids.tobytes()] = env_ids

    def recv(
        self,
        env_ids: NDArray[np.int64] | None = None,
        min_ready: int | None = None,
        timeout_s: float | None = None,
    ) -> StepBatch:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if env_ids is None:
            return self._recv_started(min_ready or self.num_envs, deadline)
        parts = self._plan(env_ids)
        batches = [part.pool.recv(part.ids, timeout_s=_left(deadline)) for part in parts]
        self._under_way.pop(env_ids.tobytes(), None)
        if len(parts) == 1 and parts[0].start == 0:
            return replace(batches[0], env_ids=env_ids)
        return _join_batches(env_ids, [(part.start, part.places) for part in parts], batches)

    def _recv_started(self, min_ready: int, deadline: float | None) -> StepBatch:
        """Receives what was started first, and on, until there are enough environments."""
        batches: list[StepBatch] = []
        while self._under_way and sum(len(batch.env_ids) for batch in batches) < min_ready:
            batches.append(self.recv(next(iter(self._under_way.values())), timeout_s=_left(deadline)))
        env_ids = np.sort(np.concatenate([batch.env_ids for batch in batches]))
        return _join_batches(env_ids, [(0, np.searchsorted(env_ids, batch.env_ids)) for batch in batches], batches)

    def call(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], env_ids: NDArray[np.int64]
    ) -> Callable[[float | None], list[Any]]:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        parts = self._plan(env_ids)
        pending = [part.pool.call(name, args, kwargs, part.ids) for part in parts]

        def results(timeout_s: float | None) -> list[Any]:
            in_order: list[Any] = [None] * len(env_ids)
            for part, collect in zip(parts, pending, strict=True):
                for place, value in zip(part.places.tolist(), collect(timeout_s), strict=True):
                    in_order[place] = value
            return in_order

        return results

    def set_attr(self, name: str, values: Sequence[Any], env_ids: NDArray[np.int64]) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        for part in self._plan(env_ids):
            part.pool.set_attr(name, [values[i] for i in part.places.tolist()], part.ids)

    def load_policy(self, key: int, policy: bytes) -> None:
        """Gives every worker of every node a pickled policy, to be named by `key`."""
        self._ask_all("load_policy", key, policy)

    def publish(self, key: int, version: int, weights: Any) -> None:
        """Gives every node new weights: an object reference, which each node fetches once."""
        refs = [node.actor.publish.remote(key, version, weights) for node in self._nodes]
        for node, ref in zip(self._nodes, refs, strict=True):
            node.get(ref)

    def rollout(self, key: int, num_steps: int, first_step: int, noise_seed: int) -> tuple[Chunk, float]:
        """Lets every worker take steps with a policy over its own slice.

        Returns:
            Their joint chunk, and the seconds that the slowest node took for its part.
        """
        refs = [node.actor.rollout.remote(key, num_steps, first_step, noise_seed) for node in self._nodes]
        parts = [node.get(ref) for node, ref in zip(self._nodes, refs, strict=True)]
        return join_chunks([chunk for chunk, _ in parts]), max(seconds for _, seconds in parts)

    def worker_pids(self) -> dict[str, list[int]]:
        """Process ids of each node's actor and workers, by the node's name."""
        return {node.slice.name: node.call("worker_pids") for node in self._nodes}

    def close(self) -> None:
        """Closes the environments and ends every worker and actor; may be called again."""
        for pool in self._pools:
            pool.close()
        closing = [node.actor.close.remote() for node in self._nodes] if ray.is_initialized() else []
        for node, ref in zip(self._nodes, closing, strict=False):
            with contextlib.suppress(NodeLostError, TimeoutError):
                node.get(ref, _CLOSE_S)
            ray.kill(node.actor)
        self._pools, self._nodes, self._plans = [], [], {}

    def _ask_all(self, name: str, *args: Any) -> list[Any]:
        refs = [node.actor.ask.remote(name, *args) for node in self._nodes]
        return [node.get(ref) for node, ref in zip(self._nodes, refs, strict=True)]

    def _plan(self, env_ids: NDArray[np.int64]) -> list[_NodePart]:
        key = env_ids.tobytes()
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) > _MOST_PLANS:  # random subsets would otherwise be kept for ever
                self._plans.clear()
            owner = np.searchsorted(self._starts, env_ids, side="right") - 1
            plan = self._plans[key] = []
            for k in np.unique(owner).tolist():
                places = np.flatnonzero(owner == k)
                start = int(self._starts[k])
                plan.append(_NodePart(self._pools[k], start, env_ids[places] - start, places))
        return plan


@dataclass(frozen=True, slots=True)
class _NodePart:
    """The share of one node in a set of environments.

    Attributes:
        pool: Of the node.
        start: Global index of its first environment.
        ids: The node's own ids, ``int64 [k]``.
        places: Where they stand among the global ids.
    """

    pool: _LentPool | _StreamPool
    start: int
    ids: NDArray[np.int64]
    places: NDArray[np.int64]


def _take(actions: Tree, places: NDArray[np.int64]) -> Tree:
    if isinstance(actions, list):
        return [actions[i] for i in places.tolist()]
    return tree_map(lambda leaf: np.asarray(leaf)[places], actions)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _join_batches(
    env_ids: NDArray[np.int64], parts: Sequence[tuple[int, NDArray[np.int64]]], batches: Sequence[StepBatch]
) -> StepBatch:
    """Joins answers in the order of `env_ids`, in newly allocated memory.

    Each part says what to add to the ids in its infos, and at which places of `env_ids` its rows stand.
    """
    order = np.argsort(np.concatenate([places for _, places in parts]))

    def join(*leaves: NDArray[Any]) -> NDArray[Any]:
        joined: NDArray[Any] = np.concatenate(leaves)[order]
        return joined

    infos = {
        info.env_id + start: info._replace(env_id=info.env_id + start)
        for (start, _), batch in zip(parts, batches, strict=True)
        for info in batch.info
    }
    return StepBatch(
        env_ids,
        tree_map(join, *(batch.obs for batch in batches)),
        join(*(batch.rew for batch in batches)),
        join(*(batch.terminated for batch in batches)),
        join(*(batch.truncated for batch in batches)),
        tuple(infos[env_id] for env_id in env_ids.tolist() if env_id in infos) if infos else (),
    )
