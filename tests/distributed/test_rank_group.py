"""Ranks as Ray actors: how they meet, what is done when one is lost, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from helpers.rank_objects import Adder, Holder, StopsOnce
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayvec.distributed.rank_group import RankGroup
from rayvec.distributed.rank_placement import Room, find_seats, seat_ranks
from rayvec.errors import ConfigError, LearnerError

MakeGroup = Callable[..., RankGroup]


@pytest.fixture
def make_group(ray_cluster: object) -> Iterator[MakeGroup]:
    made: list[RankGroup] = []

    def make(num_ranks: int, make: Any = Adder, **kwargs: Any) -> RankGroup:
        made.append(RankGroup(make, num_ranks, **kwargs))
        return made[-1]

    yield make
    for group in made:
        group.close()


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node", "kinds"),
    [
        (1, None, ["Alone"]),
        (3, None, ["SharedMemoryRanks"] * 3),
        (2, 1, ["CollectiveRanks"] * 2),
        (3, 2, ["TwoLevelRanks"] * 3),
        (4, 2, ["TwoLevelRanks"] * 4),
    ],
    ids=["one", "one node", "a rank on each node", "two and one", "two and two"],
)
def test_ranks_sum_to_the_same_bits_wherever_they_are(
    make_group: MakeGroup, num_ranks: int, ranks_per_node: int | None, kinds: list[str]
) -> None:
    group = make_group(num_ranks, ranks_per_node=ranks_per_node)
    assert group.run("kind_of_ranks") == [(kind, rank, num_ranks, 1) for rank, kind in enumerate(kinds)]
    assert len({seat.node_id for seat in group.seats}) == (1 if ranks_per_node is None else 2)
    sizes = [1, 1000, 100_000]
    results = group.run("sum_many", [(sizes, 7)] * num_ranks)
    generators = [torch.Generator().manual_seed(700 + rank) for rank in range(num_ranks)]
    for place, size in enumerate(sizes):
        terms = [torch.randn(size, generator=generator) for generator in generators]
        torch.testing.assert_close(results[0][place], torch.stack(terms).sum(0))
        assert all(torch.equal(result[place], results[0][place]) for result in results)


def test_ranks_begin_with_the_state_of_the_first(make_group: MakeGroup) -> None:
    def make(ranks: Any) -> Adder:
        adder = Adder(ranks)
        adder.total += ranks.rank + 5
        return adder

    group = make_group(2, make)
    assert group.run("add", [(1.0,), (2.0,)]) == [[8.0] * 3] * 2


def test_state_goes_out_and_in(make_group: MakeGroup) -> None:
    group = make_group(2)
    group.run("add", [(1.0,), (2.0,)])
    state = group.state_dict()
    assert state["total"].tolist() == [3.0] * 3
    state["total"] += 10
    assert group.state_dict()["total"].tolist() == [3.0] * 3
    group.load_state_dict(state)
    assert group.run("add", [(1.0,), (2.0,)]) == [[16.0] * 3] * 2


@pytest.mark.parametrize(
    ("who", "how", "ranks_per_node"),
    [(0, "SIGKILL", None), (2, "SIGSTOP", 2)],
    ids=["killed", "stopped on one of two nodes"],
)
def test_a_rank_that_falls_changes_nothing(
    make_group: MakeGroup, tmp_path: Path, who: int, how: str, ranks_per_node: int | None
) -> None:
    """A process is killed or stopped for good between two sums of a call."""
    num_ranks = 3
    group = make_group(num_ranks, ranks_per_node=ranks_per_node, timeout_s=3.0)
    group.run("add", [(1.0,)] * num_ranks)
    before = group.pids
    mark = str(tmp_path / "fallen")
    args = [(1.0, mark if rank == who else None, how) for rank in range(num_ranks)]
    assert group.run("add_and_fall", args) == [[9.0] * 3] * 3
    assert os.path.exists(mark) and not set(before) & set(group.pids)
    assert group.run("add", [(1.0,)] * num_ranks) == [[12.0] * 3] * 3


def test_one_rank_alone_may_fall_too(make_group: MakeGroup, tmp_path: Path) -> None:
    group = make_group(1)
    group.run("add", [(1.0,)])
    assert group.run("add_and_fall", [(1.0, str(tmp_path / "fallen"), "SIGKILL")]) == [[3.0] * 3]


def test_ranks_that_were_killed_between_calls_are_started_again(make_group: MakeGroup) -> None:
    group = make_group(2)
    group.run("add", [(1.0,), (2.0,)])
    group.state_dict()
    for pid in group.pids:
        os.kill(pid, 9)
    assert group.run("add", [(1.0,), (2.0,)]) == [[6.0] * 3] * 2


@pytest.mark.parametrize(
    ("num_ranks", "where", "then"),
    [
        (2, "state_dict", lambda group: group.run("tell")[0]),
        (1, "tell", lambda group: group.ask_all("tell")[0]),
        (1, "load_state_dict", lambda group: group.load_state_dict(group.state_dict()) or group.ask("tell")),
    ],
    ids=["after a run", "ask", "load"],
)
def test_a_rank_that_stops_where_no_other_waits_for_it_is_not_waited_for_without_end(
    make_group: MakeGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, where: str, then: Any
) -> None:
    monkeypatch.setattr("rayvec.distributed.rank_group._ANSWER_S", 3.0)
    mark = tmp_path / "mark"
    group = make_group(num_ranks, lambda ranks: StopsOnce(ranks, mark), timeout_s=3.0)
    mark.write_text(where)
    group.run("add", [(1.0,)] * num_ranks)
    assert then(group) == [num_ranks] * 3
    assert mark.read_text() == "stopped" and group.num_starts == 2


def test_a_crash_loop_ends(make_group: MakeGroup, tmp_path: Path) -> None:
    group = make_group(2)
    args = [(1.0, str(tmp_path / "never"), "SIGKILL"), (1.0, None, "")]
    with pytest.raises(LearnerError, match="at most 3 losses in a row"):
        group.run("add_and_fall", args)
    assert group.run("add", [(1.0,), (2.0,)]) == [[3.0] * 3] * 2


def test_what_a_method_raises_is_raised_and_the_group_is_as_before(make_group: MakeGroup, tmp_path: Path) -> None:
    group = make_group(2)
    group.run("add", [(1.0,), (2.0,)])
    with pytest.raises(ZeroDivisionError, match="as asked") as caught:
        group.run("add_and_fall", [(1.0, None, ""), (1.0, str(tmp_path / "never"), "raise")])
    assert isinstance(caught.value.__cause__, LearnerError)
    assert "rank 1 on" in str(caught.value.__cause__) and "in add_and_fall" in str(caught.value.__cause__)
    assert group.run("add", [(1.0,), (2.0,)]) == [[6.0] * 3] * 2


def test_a_make_that_raises_is_raised(ray_cluster: object) -> None:
    def make(ranks: Any) -> Adder:
        raise ZeroDivisionError(f"on rank {ranks.rank}")

    with pytest.raises(ZeroDivisionError, match=r"on rank [01]") as caught:
        RankGroup(make, 2)
    assert "in make" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"num_ranks": 0}, "num_ranks is a count"),
        ({"threads": 0}, "threads is a count"),
        ({"ranks_per_node": 0}, "ranks_per_node is a count"),
        ({"device": "tpu"}, "device has a fixed set of values"),
        ({"device": "cuda"}, r"needs a GPU for each rank.* Got: none\."),
    ],
)
def test_bad_settings_are_refused(ray_cluster: object, settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        RankGroup(Adder, **settings)


def test_too_many_ranks_are_refused(ray_cluster: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayvec.distributed.rank_placement._PLACE_S", 0.0)
    with pytest.raises(ConfigError, match=r"room for 33 rank\(s\)\. Got: .*room for 2\d, .*room for \d"):
        RankGroup(Adder, 33)


def test_a_place_that_somebody_else_took_meanwhile_is_not_waited_for_without_end(
    ray_cluster: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = ray.get_runtime_context().get_node_id()
    (there,) = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    taken: list[Any] = []

    def find_and_take(num_ranks: int, wish: Any) -> Any:
        seats = find_seats(num_ranks, wish)
        place = NodeAffinitySchedulingStrategy(there, soft=False)
        taken.append(ray.remote(Holder).options(num_cpus=8, scheduling_strategy=place).remote())
        ray.get(taken[0].hold.remote())
        return seats

    monkeypatch.setattr("rayvec.distributed.rank_group.find_seats", find_and_take)
    monkeypatch.setattr("rayvec.distributed.rank_group._START_S", 1.0)
    try:
        with pytest.raises(ConfigError, match=r"1 rank\(s\) that run within 1 s\. Got: no answer yet from rank 0"):
            RankGroup(Adder, 1, nodes=[there], timeout_s=1.0)
    finally:
        ray.kill(taken[0])


def test_ranks_can_be_kept_off_nodes(make_group: MakeGroup) -> None:
    here = ray.get_runtime_context().get_node_id()
    (seat,) = make_group(1, avoid_nodes=[here]).seats
    assert seat.node_id != here
    assert make_group(1, nodes=[seat.node_id]).seats[0].node_id == seat.node_id
    assert make_group(1).seats[0].node_id == here


def test_a_closed_group_says_so(make_group: MakeGroup) -> None:
    group = make_group(1)
    group.close()
    group.close()
    with pytest.raises(LearnerError, match="closed"):
        group.ask("state_dict")


def test_ranks_fill_the_fewest_nodes() -> None:
    rooms = [Room("a", "a", 1), Room("b", "b", 4), Room("c", "c", 2)]

    def seated(num_ranks: int) -> str:
        return "".join(seat.node_id for seat in seat_ranks(rooms, num_ranks))

    assert [seated(n) for n in (1, 2, 4, 5, 6, 7)] == ["a", "bb", "bbbb", "bbbba", "bbbbcc", "bbbbcca"]
