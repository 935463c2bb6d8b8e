"""The environments of a cluster: a fleet of nodes, and how it is opened on Ray."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import Space

from rayvec.cluster.placement import Demand
from rayvec.cluster.places import ElasticPlaces, RayPlaces
from rayvec.cluster.ray_session import ray_session
from rayvec.data import NodeSlice, Topology
from rayvec.data.resources import EnvResources
from rayvec.data.trees import ArrayLayout
from rayvec.envs.factory import EnvFactory
from rayvec.errors import NodeLostError, WorkerLostError
from rayvec.fleet.commands import STEPPING, ChildLost, Command, Op, Ticket
from rayvec.fleet.fleet import CLOSE_S, Fleet, is_here, started
from rayvec.fleet.restarts import DEFAULT_RULES, RESTARTS_OF_A_NODE, EnvRules, own_arrays
from rayvec.node.probe import MAX_WAITING_WORKERS, MIN_WAITING_CORES, probe_step

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_MAX_ATTEMPTS = 3


class Cluster(Fleet):
    """A fleet of nodes. The constructor starts them; :meth:`allocate` follows, once their spaces are known.

    Args:
        topology: Where they are, and how many workers each has.
        places: Finds the places of nodes, and opens them; see :class:`~rayvec.cluster.places.RayPlaces`.
        rehost: Whether the environments of lost nodes resume elsewhere.
        replay_calls: Names of calls and attributes that they get again there.

    Attributes:
        session: Closed once all nodes are.

    Raises:
        NodeLostError: A node ended meanwhile.
        Exception: What the constructor of an environment raised, its ``__cause__`` an ``EnvError``.
    """

    first_id = 0
    kind = "node"
    has_nodes = True
    children: list[Any]

    def __init__(
        self,
        topology: Topology,
        places: RayPlaces,
        *,
        rehost: bool = False,
        replay_calls: Sequence[str] = (),
    ) -> None:
        self._places, self._slices = places, list(topology.nodes)
        self._rehost, self.session = rehost, ExitStack()
        starting = self._starting(self._slices)
        super().__init__(starting, self._replacement, restarts=RESTARTS_OF_A_NODE, replay_calls=replay_calls)

    def _starting(self, places: Sequence[NodeSlice]) -> Iterator[Any]:
        """Yields nodes, and then starts them: the driver's own comes last, so that others start meanwhile."""
        nodes = []
        for place in places:
            nodes.append(self._places.open(place))
            yield nodes[-1]
        for node in sorted(nodes, key=is_here):
            node.start()

    def allocate(self, observation: Space[Any], action: Space[Any]) -> None:
        """Allocates the arrays of the driver and of all nodes for these spaces."""
        self.layout, self.action_layout = ArrayLayout.of(observation), ArrayLayout.of_actions(action)
        self.open(own_arrays(self.layout, self.num_envs), observation, action)

    def post(self, command: Command) -> Ticket:
        """Starts a command. Before a reset or a chunk, environments may move to other nodes."""
        if command.op in STEPPING:
            for k, place in self._places.moves(self._slices, command.op == Op.STEP).items():
                if not self._pending[k] or self._places.leaves(self._slices[k]):
                    self._move(k, place)
        return super().post(command)

    def _move(self, k: int, place: NodeSlice) -> None:
        """Moves the environments of node k, once it has answered. If no actor starts there, they stay."""
        old, before = self.children[k], self._slices[k]
        while self._pending[k]:
            self._receive(k, _POLL_S)
        states = self._states_of(k)
        if self._slices[k] is not before:  # it was lost meanwhile
            return
        envs = f"environments {self.bounds[k]} to {self.bounds[k + 1] - 1}"
        try:
            (node,), _ = started(self._starting([place]))
        except Exception as error:
            self._places.distrust(place)
            logger.warning("%s can't move to node %s: %s", envs, place.name, error)
            return
        leaves = " (it leaves)" if self._places.leaves(before) else ""
        logger.warning("%s moved from node %s%s to node %s", envs, before.name, leaves, place.name)
        self._slices[k] = place
        try:
            self.resume(k, node, states)
        finally:
            old.close(CLOSE_S)
            old.join(CLOSE_S)

    def _states_of(self, k: int) -> list[Any] | None:
        """Returns the states of the environments of node k; None if one of them offers none, or raises."""
        ticket = super().post(Command(Op.GET_STATE, np.array(self.parts[k])))
        self.wait(ticket)
        answer = self.take(ticket)
        self.notes = [*answer.notes]
        if (failure := answer.failure) is not None:
            logger.warning("the episodes of %s are cut: %s: %s", failure.where, failure.type_name, failure.text)
        return None if answer.value is None or any(state is None for state in answer.value) else answer.value

    def _replacement(self, k: int, lost: ChildLost) -> Any:
        """Starts a node in place of one that is lost.

        Raises:
            NodeLostError: Lost nodes are not replaced, or there is no place.
            ChildLost: This one was lost while it started.
        """
        if not self._rehost:
            raise lost.error
        place = self._slices[k] = self._places.another(k, self._slices, lost.error)
        note = self.notes[-1]
        self.notes[-1] = note._replace(text=f"{note.text} They resume on node {place.name}.")
        try:
            return started(self._starting([place]))[0][0]
        except (NodeLostError, WorkerLostError) as error:
            raise ChildLost(error) from error

    @property
    def topology(self) -> Topology:
        """Which node holds which environments. Of elastic nodes, each part has a slice of its own."""
        units = self.spaces.unit_bounds
        if units is None:
            return Topology(tuple(self._slices))
        return Topology(
            tuple(replace(each, worker_bounds=tuple(units[list(each.worker_bounds)].tolist())) for each in self._slices)
        )

    @property
    def transports(self) -> tuple[str, ...]:
        """How each slice of the topology is reached: ``"shm"`` or ``"tcp"``."""
        return tuple(node.transport for node in self.children)

    def pids(self) -> dict[str, list[int]]:
        """Returns process ids by the name of the node: of the owner of its workers, and of these."""
        found: dict[str, list[int]] = {}
        for place, node in zip(self._slices, self.children, strict=True):
            owner, *workers = node.worker_pids()
            found.setdefault(place.name, [owner]).extend(workers)
        return found

    def close(self, timeout_s: float | None = None) -> None:
        """Closes the environments and ends the nodes. What runs after `timeout_s` (10 s) is killed."""
        with self.session:
            super().close(timeout_s)


def open_cluster(
    factory: EnvFactory,
    *,
    num_nodes: int | tuple[int, int] | None = None,
    workers_per_node: int | None = None,
    worker_per_env: bool = False,
    claim_cpus: bool = True,
    probe: bool = True,
    preload: Sequence[str] = (),
    env_rules: EnvRules = DEFAULT_RULES,
    rehost: bool = False,
    address: str | None = None,
    resources: EnvResources | None = None,
) -> Cluster:
    """Connects to Ray, finds nodes with free cores, and starts environments on them.

    Args:
        factory: Makes all environments.
        num_nodes: How many nodes to use; by default all that have free cores. A pair is the least and the greatest
            number: environments then move as nodes join and leave.
        workers_per_node: Worker processes on each; by default one for each free core.
        worker_per_env: Whether each environment gets a worker of its own.
        claim_cpus: Whether to claim the workers' cores from Ray, so that Ray gives them to no other task.
        probe: Whether to measure steps of an environment where `workers_per_node` is None.
        preload: Modules that the workers of a node import once.
        env_rules: What happens to environments that raise, hang or have run for long, and their limits.
        rehost: Whether environments of a lost node resume on another.
        address: Of a running Ray cluster.
        resources: What is claimed for each environment, in place of cores for workers. Each environment then gets a
            worker of its own, unless `workers_per_node` is set.

    Raises:
        ConfigError: Settings that can't work, or a cluster without the cores for them.
    """
    demand = Demand(
        factory.num_envs,
        num_nodes,
        workers_per_node,
        worker_per_env=worker_per_env,
        claim_cpus=claim_cpus,
        resources=resources,
    )
    kind = ElasticPlaces if isinstance(num_nodes, tuple | list) else RayPlaces
    places = kind(factory, preload, env_rules, demand)
    probes = probe and demand.takes_what_is_free and not (worker_per_env or factory.native)
    num_attempts = 0
    with ray_session(address) as session:
        while True:
            num_attempts += 1
            try:
                topology = places.topology()
                if probes and sum(node.num_workers for node in topology.nodes) < factory.num_envs:
                    places.demand, probes = _probed(places, topology.nodes[0]), False
                    topology = places.topology()
                unclaimed = ", ".join(node.name for node in topology.nodes if not node.num_cpus)
                if unclaimed and claim_cpus and resources is None:
                    logger.warning("no core is free on %s: workers run there without claiming any", unclaimed)
                cluster = Cluster(topology, places, rehost=rehost, replay_calls=env_rules.replay_calls)
                cluster.session = session.pop_all()
                return cluster
            except NodeLostError as error:  # a node that ended may be listed for some seconds
                if num_attempts == _MAX_ATTEMPTS:
                    raise
                logger.warning("placing environments again: %s", error)


def _probed(places: RayPlaces, node: NodeSlice) -> Demand:
    """Measures steps of one environment on a node. Returns the demand that follows."""
    place = replace(node, worker_bounds=(0, 1), num_cpus=0)

    def opened(factory: EnvFactory, env_rules: EnvRules) -> Cluster:
        return Cluster(Topology((place,)), RayPlaces(factory, places.preload, env_rules, Demand(1)))

    step = probe_step(places.factory, places.env_rules, opened)
    if step is None or not step.waits:
        return places.demand
    share = max(MIN_WAITING_CORES, step.busy)
    return replace(places.demand, worker_per_env=True, max_workers=MAX_WAITING_WORKERS, cores_per_worker=share)
