"""Placement of ranks: on which nodes, how long it waits for cores, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from helpers.rank_objects import Adder

from rayvec.distributed.rank_group import RankGroup, open_host
from rayvec.distributed.rank_placement import (
    NodeCapacity,
    ResourceRequest,
    find_placements,
    place_ranks,
)
from rayvec.errors import ConfigError


def two_nodes() -> tuple[str, str]:
    """Returns the ids of the driver's node and of the other one."""
    here = ray.get_runtime_context().get_node_id()
    (there,) = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    return here, there


def test_too_many_ranks_are_refused(ray_cluster: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayvec.distributed.rank_placement._PLACE_S", 0.0)
    with pytest.raises(ConfigError, match=r"no room for 33 ranks: .*room for \d+, .*room for \d"):
        RankGroup(Adder, 33, open_host())


def test_ranks_can_be_kept_off_nodes(ray_cluster: object) -> None:
    here, _ = two_nodes()

    def node_of(**request: Any) -> str:
        (placement,) = find_placements(1, ResourceRequest(1, 0, **request))
        return placement.node_id

    there = node_of(avoid_nodes=[here])
    assert node_of() == here != there
    assert node_of(nodes=[there]) == there


def test_ranks_fill_the_fewest_nodes() -> None:
    nodes = [NodeCapacity("a", "a", 1), NodeCapacity("b", "b", 4), NodeCapacity("c", "c", 2)]

    def placed(num_ranks: int) -> str:
        return "".join(placement.node_id for placement in place_ranks(nodes, num_ranks))

    assert [placed(n) for n in (1, 2, 4, 5, 6, 7)] == ["a", "bb", "bbbb", "bbbba", "bbbbcc", "bbbbcca"]
