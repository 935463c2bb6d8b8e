"""Ranks: how they connect, what becomes of a group when one is lost or raises, and which settings it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import ray
import torch
from helpers.rank_objects import Adder
from helpers.waiting import alive, wait_until

from rayvec.distributed.rank_group import RankGroup, open_host
from rayvec.distributed.rank_placement import NodeCapacity, ResourceRequest, find_placements, place_ranks
from rayvec.distributed.ray_host import RayHost
from rayvec.errors import ConfigError, EnvError, LearnerError, RankLostError

MakeGroup = Callable[..., RankGroup]
TIMEOUT_S = 3.0
HOSTS = pytest.mark.parametrize("where", [{"num_nodes": 0}, pytest.param({}, marks=pytest.mark.slow)], ids=str)


@pytest.fixture
def make_group(ray_cluster: object) -> Iterator[MakeGroup]:
    with ExitStack() as stack:

        def make_one(num_ranks: int, timeout_s: float = 60.0, **where: Any) -> RankGroup:
            return stack.enter_context(RankGroup(Adder, num_ranks, open_host(**where), timeout_s=timeout_s))

        yield make_one


@pytest.fixture(scope="module")
def two_nodes(ray_cluster: object) -> Iterator[RankGroup]:
    """One rank on each of two nodes."""
    with RankGroup(Adder, 2, RayHost(ResourceRequest(1, 0, num_nodes=2))) as group:
        yield group


def check_sums(group: RankGroup, kind: str) -> None:
    """Every rank sums in the expected way, to the same bits."""
    num_ranks = group.num_ranks
    assert group.run("kind_of_ranks") == [(kind, rank, num_ranks, 1) for rank in range(num_ranks)]
    sizes = [1, 1000, 100_000]
    results = group.run("sum_many", [(sizes, 7)] * num_ranks)
    generators = [torch.Generator().manual_seed(700 + rank) for rank in range(num_ranks)]
    for place, size in enumerate(sizes):
        terms = [torch.randn(size, generator=generator) for generator in generators]
        torch.testing.assert_close(results[0][place], torch.stack(terms).sum(0))
        assert all(torch.equal(result[place], results[0][place]) for result in results)


@HOSTS
def test_ranks_of_one_machine_share_memory(make_group: MakeGroup, where: dict[str, Any]) -> None:
    check_sums(make_group(3, **where), "SharedMemoryRanks")


def test_ranks_of_several_nodes_sum_through_sockets(two_nodes: RankGroup) -> None:
    check_sums(two_nodes, "CollectiveRanks")
    assert len({placement.node_id for placement in two_nodes.placements}) == 2


def test_one_rank_is_alone_until_its_group_is_closed(make_group: MakeGroup) -> None:
    group = make_group(1, num_nodes=0)
    check_sums(group, "Alone")
    group.close()
    group.close()
    with pytest.raises(LearnerError, match="RankGroup has ended"):
        group.ask("kind_of_ranks")


def test_calls_run_in_the_order_in_which_they_were_posted(make_group: MakeGroup) -> None:
    group = make_group(2, num_nodes=0)
    first, second = group.post("add", [(1.0,), (2.0,)]), group.post("add", [(3.0,), (4.0,)])
    assert group.gather(second) == [[10.0] * 3] * 2
    assert group.gather(first) == [[3.0] * 3] * 2


@HOSTS
@pytest.mark.parametrize(
    ("num_ranks", "who", "how"),
    [(2, 0, "SIGKILL"), (1, 0, "SIGKILL"), pytest.param(3, 2, "SIGSTOP", marks=pytest.mark.slow)],
)
def test_a_group_ends_with_a_rank_that_is_lost(
    make_group: MakeGroup, where: dict[str, Any], num_ranks: int, who: int, how: str
) -> None:
    """The process of a rank is killed or stopped between two sums of a call."""
    group = make_group(num_ranks, timeout_s=TIMEOUT_S, **where)
    expected = rf"rank {who} on .* is lost" if how != "SIGSTOP" else rf"Rank {who} did not come to a sum within 3 s"
    with pytest.raises(RankLostError, match=expected):
        group.run("add_and_fall", [(1.0, how if rank == who else None) for rank in range(num_ranks)])
    assert group.has_ended
    for pid in group.pids:
        wait_until(lambda pid=pid: not alive(pid), "the rank has ended")
    with pytest.raises(LearnerError, match="RankGroup has ended"):
        group.post("add")


@HOSTS
@pytest.mark.parametrize(
    ("name", "args", "kind", "text"),
    [
        ("add_and_fall", (1.0, "raise"), ZeroDivisionError, "as asked"),
        ("add_and_fall", (1.0, "exit"), EnvError, r"SystemExit\(3\)"),
        ("returned_lock", (), TypeError, "cannot pickle"),
    ],
)
def test_what_a_rank_raises_is_raised_and_the_group_ends(
    make_group: MakeGroup, where: dict[str, Any], name: str, args: Any, kind: type[Exception], text: str
) -> None:
    group = make_group(2, **where)
    other = (1.0, None) if args else ()
    with pytest.raises(kind, match=text) as caught:
        group.run(name, [other, args])
    assert isinstance(caught.value.__cause__, LearnerError) and "rank " in str(caught.value.__cause__)
    assert group.has_ended


PENDING = """
import atexit, time
from rayvec.distributed.rank_group import RankGroup, open_host
class Slow:
    def __init__(self, ranks):
        pass
    def sleep(self):
        time.sleep(3000)
    def close(self):
        print("closed", flush=True)
groups = [RankGroup(Slow, 1, open_host(num_nodes=0)) for _ in range(2)]
groups[0].post("sleep")
atexit.register(groups[1].close)
"""


def test_a_script_ends_while_a_rank_computes_and_may_close_a_group_then() -> None:
    ended = subprocess.run([sys.executable, "-c", PENDING], capture_output=True, text=True, timeout=120, check=True)
    assert (ended.stdout, ended.stderr) == ("closed\n", "")


@HOSTS
def test_a_make_that_raises_is_raised(ray_cluster: object, where: dict[str, Any]) -> None:
    def make(ranks: Any) -> Adder:
        raise ZeroDivisionError(f"on rank {ranks.rank}")

    with pytest.raises(ZeroDivisionError, match=r"on rank [01]") as caught:
        RankGroup(make, 2, open_host(**where))
    assert "in make" in str(caught.value.__cause__)


def node_ids() -> tuple[str, str]:
    """Returns the ids of the driver's node and of the other one."""
    here = ray.get_runtime_context().get_node_id()
    (there,) = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    return here, there


@pytest.mark.slow
def test_too_many_ranks_are_refused(ray_cluster: object) -> None:
    """It waits for cores for some seconds."""
    with pytest.raises(ConfigError, match=r"no room for 33 ranks: .*room for \d+, .*room for \d"):
        RankGroup(Adder, 33, open_host())


def test_ranks_can_be_kept_off_nodes(ray_cluster: object) -> None:
    here, _ = node_ids()

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
