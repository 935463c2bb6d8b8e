"""From free cores to a topology: every environment has one place, every worker a core."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rayvec.cluster.cluster import open_cluster
from rayvec.cluster.nodes import FreeNode
from rayvec.cluster.placement import Demand, plan_topology
from rayvec.data.resources import EnvResources
from rayvec.envs.factory import EnvFactory
from rayvec.errors import ConfigError

nodes_of_any_size = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=6).map(
    lambda cores: [free(min(part, all), all, f"{i:040x}") for i, (part, all) in enumerate(cores)]
)


@given(
    nodes=nodes_of_any_size,
    num_envs=st.integers(1, 60),
    num_nodes=st.none() | st.integers(1, 6),
    workers_per_node=st.none() | st.integers(1, 9),
    worker_per_env=st.booleans(),
)
def test_every_plan_is_sound_or_explained(
    nodes: list[FreeNode], num_envs: int, num_nodes: int | None, workers_per_node: int | None, worker_per_env: bool
) -> None:
    topology = plan_topology(nodes, Demand(num_envs, num_nodes, workers_per_node, worker_per_env=worker_per_env))
    if topology is None:
        wanted = [min(workers_per_node, node.all_cpus) if workers_per_node else 0 for node in nodes]
        usable = sum(node.cpus >= cores for node, cores in zip(nodes, wanted, strict=True))
        assert usable < (min(num_nodes, num_envs) if num_nodes else 1)
        return
    free = {node.node_id: node.cpus for node in nodes}
    assert [i for node in topology.nodes for i in node.env_range] == list(range(num_envs))
    sizes = []
    for node in topology.nodes:
        slices = [last - first for first, last in zip(node.worker_bounds, node.worker_bounds[1:], strict=False)]
        assert all(size >= 1 for size in slices)
        assert min(1, free[node.node_id]) <= node.num_cpus <= free[node.node_id]
        assert node.num_cpus <= node.num_workers
        sizes += slices
    assert max(sizes) - min(sizes) <= 1
    if worker_per_env:
        assert set(sizes) == {1}
    elif workers_per_node is not None:
        assert all(node.num_workers <= workers_per_node for node in topology.nodes)
    if num_nodes is not None:
        assert len(topology.nodes) <= num_nodes


def free(cpus: float, all_cpus: int, name: str = "a") -> FreeNode:
    return FreeNode(name, "10.0.0.1", {"CPU": cpus}, {"CPU": all_cpus})


@pytest.mark.parametrize(
    ("cpus", "kwargs", "bounds", "claims"),
    [
        ([(4, 4)], {}, [(0, 2, 4, 6, 7)], [4]),
        ([(8, 8)] * 2, {"workers_per_node": 1}, [(0, 4), (4, 7)], [1, 1]),
        ([(8, 8)] * 2, {"num_nodes": 1, "workers_per_node": 3}, [(0, 3, 5, 7)], [3]),
        ([(4, 4)], {"workers_per_node": 9}, [(0, 1, 2, 3, 4, 5, 6, 7)], [4]),  # a node with fewer cores claims all
        ([(1, 1), (0, 4), (3, 3)], {}, [(0, 2), (2, 4, 6, 7)], [1, 3]),
        ([(0, 4), (2, 4)], {"num_nodes": 2}, [(0, 3, 5), (5, 7)], [2, 0]),
        ([(0, 4)], {}, [(0, 2, 4, 6, 7)], [0]),
        ([(0.7, 1)], {}, [(0, 7)], [0]),
        ([(0.7, 1)], {"worker_per_env": True, "cores_per_worker": 0.05}, [(0, 1, 2, 3, 4, 5, 6, 7)], [0.35]),
        ([(2, 2)] * 2, {"worker_per_env": True, "max_workers": 2}, [(0, 2, 4), (4, 6, 7)], [2, 2]),
        ([(4, 4)], {"worker_per_env": True, "cores_per_worker": 0.05}, [(0, 1, 2, 3, 4, 5, 6, 7)], [0.35]),
        ([(4, 4)], {"worker_per_env": True, "cores_per_worker": 0.6}, [(0, 1, 2, 3, 4, 5, 6, 7)], [4]),
    ],
)
def test_plans(
    cpus: list[tuple[float, int]], kwargs: dict[str, Any], bounds: list[tuple[int, ...]], claims: list[float]
) -> None:
    nodes = [free(*of_node, name) for of_node, name in zip(cpus, "abc", strict=False)]
    topology = plan_topology(nodes, Demand(7, **kwargs))
    assert topology is not None
    assert [node.worker_bounds for node in topology.nodes] == bounds
    assert [node.num_cpus for node in topology.nodes] == claims


@pytest.mark.parametrize("kwargs", [{"num_nodes": -1}, {"workers_per_node": 0}, {"workers_per_node": True}])
def test_counts_are_checked_before_ray_is_needed(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be a whole number"):
        open_cluster(EnvFactory.build("CartPole-v1", 2), address="nowhere:1", **kwargs)


@pytest.mark.parametrize(
    ("nodes", "kwargs", "words"),
    [
        ([free(4, 4)], {"num_nodes": 2}, "10 environments need 1 CPU on each of 2 nodes.* 4 free of 4 CPU"),
        ([free(1, 4)], {"workers_per_node": 3}, "need 3 CPU on each of 1 node.* 1 free of 4 CPU"),
        ([free(3, 4)], {"workers_per_node": 5}, "need 5 CPU.* 3 free of 4 CPU"),
        ([], {}, "no living node.*num_nodes=0 uses this machine without Ray"),
    ],
)
def test_too_few_cores_for_what_was_asked(nodes: list[FreeNode], kwargs: dict[str, int], words: str) -> None:
    demand = Demand(10, **kwargs)
    assert plan_topology(nodes, demand) is None and re.search(words, str(demand.too_much_for(nodes)))


def having(name: str = "a", **free: float) -> FreeNode:
    return FreeNode(name, "10.0.0.1", free, free)


@pytest.mark.parametrize(
    ("nodes", "num_nodes", "resources", "workers_per_node", "bounds"),
    [
        ([having(CPU=4), having("b", CPU=9)], None, EnvResources(2), None, [(0, 1, 2), (2, 3, 4, 5, 6)]),
        ([having(CPU=4), having("b", CPU=12)], 1, EnvResources(2), None, [(0, 1, 2, 3, 4, 5, 6)]),
        ([having(CPU=4), having("b", CPU=12)], 1, EnvResources(2), 2, [(0, 3, 6)]),
        ([having(CPU=9), having("b", CPU=0, sim=6)], None, EnvResources(0, custom={"sim": 1}), 1, [(0, 6)]),
        ([having(CPU=9, GPU=1), having("b", CPU=9, GPU=2)], None, EnvResources(1, 0.4), 2, [(0, 1, 2), (2, 4, 6)]),
    ],
)
def test_places_of_environments_that_need_resources(
    nodes: list[FreeNode],
    num_nodes: int | None,
    resources: EnvResources,
    workers_per_node: int | None,
    bounds: list[tuple[int, ...]],
) -> None:
    topology = plan_topology(nodes, Demand(6, num_nodes, workers_per_node, resources=resources))
    assert topology is not None
    assert [node.worker_bounds for node in topology.nodes] == bounds
    assert [node.num_cpus for node in topology.nodes] == [resources.cores * len(n.env_range) for n in topology.nodes]


@pytest.mark.parametrize(
    ("resources", "words"),
    [
        (EnvResources(5), "10 environments need 50 CPU together.* 8 free of 8 CPU"),
        (EnvResources(0, 0.25), "need 3 GPU together.* 2 free of 2 GPU"),
        (EnvResources(0, custom={"license": 1}), "need 10 license together.* 0 free of 0 license"),
    ],
)
def test_resources_that_the_cluster_lacks(resources: EnvResources, words: str) -> None:
    demand, nodes = Demand(10, resources=resources), [having(CPU=8, GPU=2)]
    assert plan_topology(nodes, demand) is None and re.search(words, str(demand.too_much_for(nodes)))
