"""The pool of a cluster: one actor for each node, each with a process pool, joined into one.

The driver reaches the node it runs on through shared memory, which that node's actor lends it, and other nodes
through a stream each. What is rare (starting, calls) and what is large (chunks, weights) goes through Ray.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import ray
from gymnasium import Space
from numpy.typing import NDArray

from rayvec.chunks import join_chunks
from rayvec.cluster import RaySession
from rayvec.envs import EnvFactory
from rayvec.errors import NodeLostError
from rayvec.placement import check_counts, free_nodes, place_again, plan_topology, wait_for_topology
from rayvec.pools.acting import ActingNodes
from rayvec.pools.base import RAISE, Autoreset, NotReady, PoolSpaces, Supervision
from rayvec.pools.link import LOOK_S, readable
from rayvec.pools.memory import ArrayLayout
from rayvec.pools.remote import LentPool, NodeHandle, NodePool, StreamPool
from rayvec.pools.supervision import RESTARTED, LastAnswers, NodeState, RestartBudget
from rayvec.types import Chunk, NodeSlice, StepBatch, Topology, Tree, as_slice, tree_map

__all__ = ["RayPool"]

_CLOSE_S = 10.0
_PLACE_S = 10.0
_MOST_PLANS = 4096
_START_ATTEMPTS = 3
_T = TypeVar("_T")

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Node:
    """A node and what it was asked for.

    Attributes:
        handle: Its actor.
        pool: Through which it is stepped.
        asked: What is under way: the node's ids, and how to ask once more.
    """

    handle: NodeHandle
    pool: NodePool
    asked: list[tuple[NDArray[np.int64], Callable[[NodePool, NDArray[np.int64]], None]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Part:
    """The share of one node in a set of environments.

    Attributes:
        node: Its number.
        start: Global index of its first environment.
        ids: The node's own ids, ``int64 [k]``.
        places: Where they stand among the global ids.
        select: The same as a slice where they are consecutive.
    """

    node: int
    start: int
    ids: NDArray[np.int64]
    places: NDArray[np.int64]
    select: Any


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a set of ids means for the nodes, worked out once for each set.

    Attributes:
        parts: One for each node concerned.
        select: The ids, as a slice where they are consecutive.
    """

    parts: list[_Part]
    select: Any


class RayPool:
    """Steps environments on the nodes of a Ray cluster.

    Started in two steps, because the shapes of the arrays are known only when the environments have been
    made: construct, look at :attr:`spaces`, then :meth:`allocate`.

    Args:
        factory: Makes all environments.
        topology: Which node holds which of them.
        preload: Modules that the workers' forkserver imports once on each node.
        supervision: What becomes of environments that raise, hang, or whose process ends.
        rehost: Whether the environments of a node that is lost go on elsewhere; else that is raised.
        loose: Whether environments are answered each as soon as it is done.
        session: Share in the connection to Ray, released when the pool is closed.

    Attributes:
        acting: The policies that act in the workers.

    Raises:
        Exception: What the constructor of an environment raised, its ``__cause__`` an ``EnvError``.
        NodeLostError: A node ended meanwhile.
    """

    def __init__(
        self,
        factory: EnvFactory,
        topology: Topology,
        preload: Sequence[str] = (),
        supervision: Supervision = RAISE,
        *,
        rehost: bool = False,
        loose: bool = False,
        session: RaySession | None = None,
    ) -> None:
        self._session = session
        self.topology = topology
        self.num_envs = topology.num_envs
        self.layout: ArrayLayout | None = None
        self.action_layout: ArrayLayout | None = None
        self._factory = factory
        self._preload = tuple(preload)
        self._supervision = supervision
        self._rehost = rehost
        self._loose = loose
        self._nodes: list[_Node] = []
        self._handles = [NodeHandle(node_slice, supervision) for node_slice in topology.nodes]
        self._starts = np.array([node_slice.env_range.start for node_slice in topology.nodes])
        self._plans: dict[bytes, _Plan] = {}
        self._under_way: dict[bytes, NDArray[np.int64]] = {}
        self._held: dict[bytes, dict[int, StepBatch]] = {}
        self.acting = ActingNodes(self._nodes, self._replace)
        self._seeds: list[int | None] = [None] * self.num_envs
        self._restarts = np.zeros(self.num_envs, np.int64)
        self._last: LastAnswers | None = None
        self._budget = RestartBudget()
        self._session, session = None, self._session  # a pool that does not come to be leaves it to its opener
        try:
            starting = [self._start(handle) for handle in self._handles]
            spaces = [handle.get(ref) for handle, ref in zip(self._handles, starting, strict=True)]
        except BaseException:
            self.close()
            raise
        self._session = session
        sizes = [len(node_slice.env_range) for node_slice in topology.nodes]
        self.spaces = PoolSpaces.join(list(zip(sizes, spaces, strict=True)))

    @classmethod
    def open(
        cls,
        factory: EnvFactory,
        *,
        num_nodes: int | None = None,
        workers_per_node: int | None = None,
        worker_per_env: bool = False,
        claim_cpus: bool = True,
        preload: Sequence[str] = (),
        supervision: Supervision = RAISE,
        rehost: bool = False,
        address: str | None = None,
    ) -> RayPool:
        """Connects to Ray, finds nodes with free cores, and starts a pool on them.

        Args:
            factory: Makes all environments.
            num_nodes: How many nodes to use; by default all that have free cores.
            workers_per_node: Worker processes on each; by default one for each free core.
            worker_per_env: A worker for each environment, answered as soon as it is done.
            claim_cpus: Whether the workers' cores are claimed from Ray, so that nobody else gets them.
            preload: As for the class.
            supervision: As for the class.
            rehost: As for the class.
            address: Of a running Ray cluster.

        Raises:
            ConfigError: Settings that can't work, or a cluster without the cores for them.
        """
        check_counts(num_nodes, workers_per_node)
        session = RaySession(address)

        def plan() -> Topology:
            nodes = free_nodes(claimed_too=not claim_cpus)
            topology = plan_topology(
                nodes, factory.num_envs, num_nodes, workers_per_node, worker_per_env=worker_per_env
            )
            return topology if claim_cpus else topology.without_claims()

        try:
            for attempt in range(_START_ATTEMPTS):
                topology = wait_for_topology(plan)
                try:
                    return cls(
                        factory, topology, preload, supervision, rehost=rehost, loose=worker_per_env, session=session
                    )
                except NodeLostError as error:  # a node that ended may be listed for some seconds
                    if attempt + 1 == _START_ATTEMPTS:
                        raise
                    logger.warning("placing environments anew: %s", error)
            raise AssertionError("unreachable")
        except BaseException:
            session.release()
            raise

    def _start(self, handle: NodeHandle) -> Any:
        return handle.actor.start.remote(self._factory.part(handle.slice.env_range).to_bytes(), self._preload)

    def allocate(self, observation: Space[Any], action: Space[Any]) -> None:
        """Makes the shared memory of every node for these spaces, and connects to each."""
        self._spaces = observation, action
        self.layout, self.action_layout = ArrayLayout.of(observation), ArrayLayout.of(action)
        if self._rehost:
            n = self.num_envs
            obs = np.full(n, None, dtype=object) if self.layout is None else self.layout.empty((n,))
            self._last = LastAnswers(obs, self.num_envs)
        allocating = [handle.actor.allocate.remote(observation, action) for handle in self._handles]
        for handle, ref in zip(self._handles, allocating, strict=True):
            self._nodes.append(_Node(handle, self._connect(handle, handle.get(ref))))

    def _connect(self, handle: NodeHandle, shape: Any) -> NodePool:
        if handle.slice.node_id == ray.get_runtime_context().get_node_id():
            return LentPool(handle, shape)
        return StreamPool(handle, shape, self._loose)

    @property
    def transports(self) -> tuple[str, ...]:
        """How each node is reached: ``"shm"`` or ``"tcp"``."""
        return tuple(node.pool.transport for node in self._nodes)

    def send(self, env_ids: NDArray[np.int64], actions: Tree, autoreset: Autoreset) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        parts = self._plan(env_ids).parts
        for part in parts:
            share = actions if len(parts) == 1 else self._take(actions, part)

            def ask(pool: NodePool, ids: NDArray[np.int64], share: Tree = share) -> None:
                pool.send(ids, share, autoreset)

            self._ask(part, ask)
        self._note_started(env_ids, autoreset == Autoreset.SAME_STEP)

    def _note_started(self, env_ids: NDArray[np.int64], stays: bool) -> None:
        self._under_way[env_ids.tobytes()] = env_ids
        if self._last is not None:
            self._last.started(self._plan(env_ids).select, stays)

    def reset(
        self, env_ids: NDArray[np.int64], seeds: Sequence[int | None], options: Mapping[str, Any] | None = None
    ) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        for env_id, seed in zip(env_ids.tolist(), seeds, strict=True):
            self._seeds[env_id] = self._seeds[env_id] if seed is None else seed
        for part in self._plan(env_ids).parts:
            by_id = dict(zip(part.ids.tolist(), (seeds[i] for i in part.places.tolist()), strict=True))

            def ask(pool: NodePool, ids: NDArray[np.int64], by_id: dict[int, int | None] = by_id) -> None:
                pool.reset(ids, [by_id[i] for i in ids.tolist()], options)

            self._ask(part, ask)
        self._note_started(env_ids, True)

    def ready(self, env_ids: NDArray[np.int64], *, begin: bool = True) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        for part in self._plan(env_ids).parts:
            self._ask(part, lambda pool, ids: pool.ready(ids, begin=begin))
        if begin:
            self._note_started(env_ids, True)
        else:
            self._under_way[env_ids.tobytes()] = env_ids

    def _ask(self, part: _Part, ask: Callable[[NodePool, NDArray[np.int64]], None]) -> None:
        node = self._nodes[part.node]
        node.asked.append((part.ids, ask))
        try:
            ask(node.pool, part.ids)
        except NodeLostError as error:
            self._replace(part.node, error)  # which asks for what is under way

    def recv(
        self,
        env_ids: NDArray[np.int64] | None = None,
        min_ready: int | None = None,
        timeout_s: float | None = None,
    ) -> StepBatch:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if env_ids is None:
            ids = np.sort(np.concatenate([np.zeros(0, np.int64), *self._under_way.values()]))
            if min_ready is not None:
                ids = self._wait_for(min(min_ready, len(ids)), deadline)
            if ids.tobytes() not in self._under_way and not self._loose:
                return self._recv_each(deadline)
            env_ids = ids
        batch = self._recv_parts(env_ids, deadline)
        self._forget_under_way(env_ids)
        if self._last is not None:
            self._keep_last(batch)
        return batch

    def _recv_parts(self, env_ids: NDArray[np.int64], deadline: float | None) -> StepBatch:
        key = env_ids.tobytes()
        parts = self._plan(env_ids).parts
        held = self._held.setdefault(key, {})  # what came before a timeout is kept for the next attempt
        for part in parts:
            if part.node not in held:
                node = self._nodes[part.node]
                try:
                    held[part.node] = node.pool.recv(part.ids, timeout_s=_left(deadline))
                except NodeLostError as error:
                    self._replace(part.node, error)
                    held[part.node] = self._on_node(part.node, partial(_recv_ids, ids=part.ids, deadline=deadline))
                self._answered(node, part.ids)
        del self._held[key]
        if len(parts) == 1 and parts[0].start == 0:
            return held[parts[0].node]
        return _join_batches(env_ids, [(p.start, p.places) for p in parts], [held[p.node] for p in parts])

    def _recv_each(self, deadline: float | None) -> StepBatch:
        """Receives everything under way, set by set as it was asked for."""
        batches = [self.recv(ids, timeout_s=_left(deadline)) for ids in list(self._under_way.values())]
        env_ids = np.sort(np.concatenate([batch.env_ids for batch in batches]))
        return _join_batches(env_ids, [(0, np.searchsorted(env_ids, batch.env_ids)) for batch in batches], batches)

    def _wait_for(self, min_ready: int, deadline: float | None) -> NDArray[np.int64]:
        """Returns the ids that are ready, once there are enough of them."""
        while True:
            found = [self._on_node(k, lambda pool: pool.ready_ids()) + self._starts[k] for k in range(len(self._nodes))]
            ids = np.concatenate(found)
            if len(ids) >= min_ready:
                return ids
            left = _left(deadline)
            if left == 0.0:
                raise NotReady(f"{len(ids)} of {min_ready} environments have answered in time")
            events = [node.pool.event_fd for node in self._nodes]
            readable(events, LOOK_S if left is None else min(LOOK_S, left))

    def _forget_under_way(self, env_ids: NDArray[np.int64]) -> None:
        if self._under_way.pop(env_ids.tobytes(), None) is not None:
            return
        received = set(env_ids.tolist())
        for key, ids in list(self._under_way.items()):
            left = np.array([i for i in ids.tolist() if i not in received], np.int64)
            if len(left) < len(ids):
                del self._under_way[key]
                if len(left):
                    self._under_way[left.tobytes()] = left

    @staticmethod
    def _answered(node: _Node, ids: NDArray[np.int64]) -> None:
        """Forgets how to ask for what has been answered."""
        for position, (asked, _) in enumerate(node.asked):
            if asked is ids or np.array_equal(asked, ids):
                del node.asked[position]
                return
        done = set(ids.tolist())
        node.asked = [
            (left, ask)
            for asked, ask in node.asked
            if len(left := np.array([i for i in asked.tolist() if i not in done], np.int64))
        ]

    def call(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], env_ids: NDArray[np.int64]
    ) -> Callable[[float | None], list[Any]]:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        parts = self._plan(env_ids).parts
        pending = {part.node: self._nodes[part.node].pool.call(name, args, kwargs, part.ids) for part in parts}
        in_order: list[Any] = [None] * len(env_ids)

        def results(timeout_s: float | None) -> list[Any]:
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            for part in parts:
                if part.node in pending:  # else it came before a timeout
                    values = pending[part.node](_left(deadline))
                    del pending[part.node]
                    for place, value in zip(part.places.tolist(), values, strict=True):
                        in_order[place] = value
            return in_order

        return results

    def set_attr(self, name: str, values: Sequence[Any], env_ids: NDArray[np.int64]) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        for part in self._plan(env_ids).parts:
            self._nodes[part.node].pool.set_attr(name, [values[i] for i in part.places.tolist()], part.ids)

    def begin_rollout(self, key: int, num_steps: int, first_step: int, noise_seed: int) -> None:
        """Lets every worker take steps with a policy over its own slice; :meth:`finish_rollout` returns the chunk."""
        self.acting.begin(key, num_steps, first_step, noise_seed)

    def finish_rollout(self, timeout_s: float | None = None) -> tuple[Chunk, float]:
        """Waits for the chunk under way.

        Returns:
            The chunk of all nodes, and the seconds that the slowest took for its part.

        Raises:
            NotReady: It takes longer; the chunk stays under way.
        """
        parts = self.acting.finish(timeout_s)
        chunk = join_chunks([chunk for chunk, _ in parts])
        for node in self._nodes:
            rows = slice(node.handle.slice.env_range.start, node.handle.slice.env_range.stop)
            node.pool.stepped_by_another(tree_map(lambda leaf, rows=rows: leaf[rows], chunk.last_obs))
        if self._last is not None:
            self._last.started(slice(None), True)
            self._last.keep(slice(None), chunk.last_obs, chunk.terminated[-1], chunk.truncated[-1])
            np.add.at(self._restarts, chunk.restarts[:, 1], 1)
        return chunk, max(seconds for _, seconds in parts)

    def _on_node(self, number: int, function: Callable[[NodePool], _T]) -> _T:
        """Does something with a node's pool; if the node is lost, with the pool that takes its place."""
        while True:
            try:
                return function(self._nodes[number].pool)
            except NodeLostError as error:
                self._replace(number, error)

    def _replace(self, number: int, error: NodeLostError) -> None:
        """Starts the environments of a lost node elsewhere, and asks there for what was under way.

        Raises:
            NodeLostError: Nodes are not replaced, or there is no core left.
        """
        node = self._nodes[number]
        if self._last is None:
            raise error
        with contextlib.suppress(Exception):
            node.pool.close()
        with contextlib.suppress(Exception):
            ray.kill(node.handle.actor)
        excluded: set[str] = set()
        while True:
            if not self._budget.spend(number):
                raise NodeLostError(f"{error} It is not replaced again: {RestartBudget.rule()}.") from error
            excluded.add(node.handle.slice.node_id)
            try:
                self._start_elsewhere(number, place_again(node.handle.slice, excluded, error), error)
                for ids, ask in node.asked:
                    ask(node.pool, ids)
                return
            except NodeLostError as again:
                if again.__cause__ is error:  # there is no other place
                    raise
                error = again

    def _start_elsewhere(self, number: int, node_slice: NodeSlice, error: NodeLostError) -> None:
        """Starts the environments of a lost node anew, in the state that they last showed."""
        assert self._last is not None
        node, old = self._nodes[number], self._nodes[number].handle.slice
        rows = slice(old.env_range.start, old.env_range.stop)
        self._restarts[rows] += 1
        logger.warning(
            "node %s is lost; environments %d to %d, seeds %s, go on on node %s: %s",
            *(old.name, rows.start, rows.stop - 1, self._seeds[rows], node_slice.name, error),
        )
        handle = node.handle = self._handles[number] = NodeHandle(node_slice, self._supervision)
        handle.wait_until_placed(_PLACE_S)
        handle.get(self._start(handle))
        obs = tree_map(lambda leaf: leaf[rows], self._last.obs)
        state = NodeState(obs, self._seeds[rows], self._restarts[rows], self._last.mid_episode(rows))
        node.pool = self._connect(handle, handle.call("allocate", *self._spaces, state))
        nodes = (*self.topology.nodes[:number], node_slice, *self.topology.nodes[number + 1 :])
        self.topology = Topology(nodes)
        self.acting.install(handle)

    def _keep_last(self, batch: StepBatch) -> None:
        assert self._last is not None
        self._last.keep(self._plan(batch.env_ids).select, batch.obs, batch.terminated, batch.truncated)
        for info in batch.info:
            if RESTARTED in info.info or RESTARTED in (info.final_info or ()):
                self._restarts[info.env_id] += 1

    def worker_pids(self) -> dict[str, list[int]]:
        """Process ids of each node's actor and workers, by the node's name."""
        return {node.handle.slice.name: node.handle.call("worker_pids") for node in self._nodes}

    def close(self) -> None:
        """Closes the environments and ends every worker and actor; may be called again."""
        for node in self._nodes:
            with contextlib.suppress(OSError):
                node.pool.close()
        closing = [handle.actor.close.remote() for handle in self._handles] if ray.is_initialized() else []
        for handle, ref in zip(self._handles, closing, strict=False):
            try:
                handle.get(ref, _CLOSE_S)
            except (NodeLostError, NotReady):
                pass  # gone already, or ended by force below
            except Exception:
                logger.exception("node %s did not close in order", handle.slice.name)
            ray.kill(handle.actor)
        self._nodes.clear()
        self._handles, self._plans = [], {}
        if self._session is not None:
            self._session.release()
            self._session = None

    def _plan(self, env_ids: NDArray[np.int64]) -> _Plan:
        key = env_ids.tobytes()
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) > _MOST_PLANS:  # random subsets would otherwise be kept for ever
                self._plans.clear()
            plan = self._plans[key] = self._make_plan(env_ids)
        return plan

    def _make_plan(self, env_ids: NDArray[np.int64]) -> _Plan:
        owner = np.searchsorted(self._starts, env_ids, side="right") - 1
        parts = []
        for k in np.unique(owner).tolist():
            places = np.flatnonzero(owner == k)
            start = int(self._starts[k])
            parts.append(_Part(k, start, env_ids[places] - start, places, as_slice(places)))
        return _Plan(parts, as_slice(env_ids))

    @staticmethod
    def _take(actions: Tree, part: _Part) -> Tree:
        if isinstance(actions, np.ndarray):
            return actions[part.select]
        if isinstance(actions, list):
            return [actions[i] for i in part.places.tolist()]
        return tree_map(lambda leaf: np.asarray(leaf)[part.select], actions)


def _recv_ids(pool: NodePool, ids: NDArray[np.int64], deadline: float | None) -> StepBatch:
    return pool.recv(ids, timeout_s=_left(deadline))


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _join_batches(
    env_ids: NDArray[np.int64], parts: Sequence[tuple[int, NDArray[np.int64]]], batches: Sequence[StepBatch]
) -> StepBatch:
    """Joins answers in the order of `env_ids`, in newly allocated memory.

    Each part says what to add to the ids in its infos, and at which places of `env_ids` its rows stand.
    """
    places = np.concatenate([places for _, places in parts])
    in_order = bool((places[:-1] < places[1:]).all())
    order = None if in_order else np.argsort(places)

    def join(*leaves: NDArray[Any]) -> NDArray[Any]:
        joined: NDArray[Any] = np.concatenate(leaves)
        return joined if order is None else joined[order]

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
