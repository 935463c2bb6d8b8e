"""Ranks: how they connect, what the group does when one is lost, and which settings it refuses."""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import ray
import torch
from helpers.rank_objects import Adder, Owner, StopsOnce
from helpers.sockets import listening_ports, stores_at
from ray.experimental import internal_kv

from rayvec.distributed.decentralized import DecentralizedGroup
from rayvec.distributed.memory_file import MemoryFile
from rayvec.distributed.process_host import ProcessHost
from rayvec.distributed.rank_group import RankGroup
from rayvec.distributed.rank_host import vital_signs
from rayvec.distributed.running_ranks import RankSet
from rayvec.errors import ConfigError, EnvError, LearnerError, RankLostError
from rayvec.node.fork_server import ForkServer

MakeGroup = Callable[..., RankGroup]
TIMEOUT_S = 3.0


@pytest.fixture
def make_group(ray_cluster: object) -> Iterator[MakeGroup]:
    made: list[RankGroup] = []

    def make(num_ranks: int, make: Any = Adder, **kwargs: Any) -> RankGroup:
        made.append(RankGroup(make, num_ranks, **kwargs))
        return made[-1]

    yield make
    for group in made:
        group.close()


@pytest.fixture(scope="module", params=[None, pytest.param(0, marks=pytest.mark.slow)], ids=["Ray", "processes"])
def group(ray_cluster: object, request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    """Three ranks that share memory, on Ray and without it; every test begins by loading a state."""
    with RankGroup(Adder, 3, timeout_s=TIMEOUT_S, num_nodes=request.param) as group:
        yield group


@pytest.fixture(scope="module")
def two_nodes(ray_cluster: object) -> Iterator[RankGroup]:
    """One rank on each of two nodes."""
    with RankGroup(Adder, 2, ranks_per_node=1) as group:
        yield group


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group waits less for ranks that it has lost already."""
    monkeypatch.setattr("rayvec.distributed.running_ranks._GRACE_S", 0.5)
    monkeypatch.setattr("rayvec.distributed.rank_group._PAUSE_S", 0.1)


def begin(group: RankGroup, total: float = 0.0) -> None:
    group.load_state_dict({"total": torch.full((3,), total, dtype=torch.float64)})


def check_sums(group: RankGroup, kinds: list[str]) -> None:
    """Every rank sums in the expected way, to the same bits."""
    num_ranks = len(kinds)
    assert group.run("kind_of_ranks") == [(kind, rank, num_ranks, 1) for rank, kind in enumerate(kinds)]
    sizes = [1, 1000, 100_000]
    results = group.run("sum_many", [(sizes, 7)] * num_ranks)
    generators = [torch.Generator().manual_seed(700 + rank) for rank in range(num_ranks)]
    for place, size in enumerate(sizes):
        terms = [torch.randn(size, generator=generator) for generator in generators]
        torch.testing.assert_close(results[0][place], torch.stack(terms).sum(0))
        assert all(torch.equal(result[place], results[0][place]) for result in results)


def test_ranks_of_one_node_sum_to_the_same_bits(group: RankGroup) -> None:
    check_sums(group, ["SharedMemoryRanks"] * 3)
    assert len({placement.node_id for placement in group.placements}) == 1


def test_ranks_of_different_nodes_sum_to_the_same_bits(two_nodes: RankGroup) -> None:
    check_sums(two_nodes, ["CollectiveRanks"] * 2)
    assert len({placement.node_id for placement in two_nodes.placements}) == 2


@pytest.mark.parametrize("num_ranks", [3, pytest.param(4, marks=pytest.mark.slow)], ids=["two and one", "two and two"])
@pytest.mark.slow
def test_ranks_of_two_nodes_sum_on_two_levels(make_group: MakeGroup, num_ranks: int) -> None:
    group = make_group(num_ranks, ranks_per_node=2)
    check_sums(group, ["TwoLevelRanks"] * num_ranks)
    assert len({placement.node_id for placement in group.placements}) == 2


@pytest.mark.slow
def test_one_rank_is_alone_until_its_group_is_closed(make_group: MakeGroup) -> None:
    group = make_group(1)
    check_sums(group, ["Alone"])
    group.close()
    group.close()
    with pytest.raises(LearnerError, match="closed"):
        group.ask("state_dict")
    with pytest.raises(LearnerError, match="closed"):  # also where Ray has ended: it would initialise itself
        group.put(1)


def test_a_child_that_was_forked_leaves_the_ranks_to_its_parent() -> None:
    with RankGroup(Adder, 1, num_nodes=0) as group:
        (number,) = group.run("add", [(1.0,)])
        child = os.fork()
        if child == 0:
            group.close()
            try:
                group.ask("state_dict")
            except LearnerError as error:
                os._exit("forked" not in str(error))
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert number == [1.0] * 3 and group.run("add", [(1.0,)]) == [[2.0] * 3] and group.num_starts == 1


@pytest.mark.slow
def test_ranks_begin_with_the_state_of_the_first(make_group: MakeGroup) -> None:
    def make(ranks: Any) -> Adder:
        adder = Adder(ranks)
        adder.total += ranks.rank + 5
        return adder

    group = make_group(2, make)
    assert group.run("add", [(1.0,), (2.0,)]) == [[8.0] * 3] * 2


def test_state_goes_out_and_in(group: RankGroup) -> None:
    begin(group)
    group.run("add", [(1.0,), (2.0,), (4.0,)])
    state = group.state_dict()
    assert state["total"].tolist() == [7.0] * 3
    state["total"] += 10
    assert group.state_dict()["total"].tolist() == [7.0] * 3
    group.load_state_dict(state)
    assert group.run("add", [(1.0,), (2.0,), (4.0,)]) == [[24.0] * 3] * 3


def check_fall(group: RankGroup, mark: Path, who: int, how: str) -> None:
    """The process of a rank is killed or stopped between two sums of a call, and the result is as without that."""
    num_ranks = group.num_ranks
    begin(group, 1.0)
    before, num_starts = group.pids, group.num_starts
    args = [(1.0, str(mark) if rank == who else None, how) for rank in range(num_ranks)]
    assert group.run("add_and_fall", args) == [[1.0 + 2 * num_ranks] * 3] * num_ranks
    assert mark.exists() and not set(before) & set(group.pids) and group.num_starts == num_starts + 1
    assert group.run("add", [(1.0,)] * num_ranks) == [[1.0 + 3 * num_ranks] * 3] * num_ranks


@pytest.mark.parametrize(("who", "how"), [(0, "SIGKILL"), pytest.param(2, "SIGSTOP", marks=pytest.mark.slow)])
def test_a_rank_that_dies_changes_nothing(group: RankGroup, tmp_path: Path, who: int, how: str) -> None:
    check_fall(group, tmp_path / "fallen", who, how)


@pytest.mark.slow
def test_when_a_rank_has_died_those_that_compute_are_not_waited_for(
    group: RankGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would notice in their next sum only."""
    monkeypatch.setattr("rayvec.distributed.running_ranks._GRACE_S", 1000.0)
    begin(group)
    num_starts = group.num_starts
    assert group.run("fall_while_others_compute", [(str(tmp_path),)] * 3) == [None] * 3
    assert group.num_starts == num_starts + 1


@pytest.mark.slow
def test_a_rank_that_stops_on_one_of_two_nodes_changes_nothing(make_group: MakeGroup, tmp_path: Path) -> None:
    check_fall(make_group(3, ranks_per_node=2, timeout_s=TIMEOUT_S), tmp_path / "fallen", 2, "SIGSTOP")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGSTOP", "SIGKILL", "SIGTERM"])
def test_a_single_rank_that_dies_changes_nothing(make_group: MakeGroup, tmp_path: Path, how: str) -> None:
    check_fall(make_group(1, timeout_s=TIMEOUT_S), tmp_path / "fallen", 0, how)


@pytest.mark.slow
def test_ranks_that_compute_longer_than_the_timeout_are_left_alone(make_group: MakeGroup) -> None:
    group = make_group(1, timeout_s=0.6)
    assert group.run("compute", [(1.5,)]) == [[0.0] * 3]
    assert group.num_starts == 1


@pytest.mark.parametrize("num_calls", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_calls_since_the_checkpoint_are_repeated(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch, num_calls: int
) -> None:
    monkeypatch.setattr("rayvec.distributed.rank_group._WAIT_SHARE", 1e-9)  # as few checkpoints as there may be
    group = make_group(2, num_nodes=0, timeout_s=TIMEOUT_S)
    amount = torch.ones(())
    for _ in range(num_calls):
        amount.fill_(1.0)
        group.run("add", [(MemoryFile(amount),)] * 2)
        amount.fill_(5.0)  # the caller fills its array again, which a repeated call must not see
    os.kill(group.pids[1], 9)
    assert group.run("add", [(1.0,)] * 2) == [[2.0 * (num_calls + 1)] * 3] * 2
    assert group.state_dict()["total"].tolist() == [2.0 * (num_calls + 1)] * 3
    assert group.num_starts == 2


SIZES = [0, 600_000]


@pytest.mark.parametrize("size", SIZES)
def test_values_of_any_size_arrive_between_other_arguments(group: RankGroup, size: int) -> None:
    check_that_values_arrive(group, size)


@pytest.mark.parametrize("size", SIZES)
def test_values_of_any_size_arrive_on_another_node(two_nodes: RankGroup, size: int) -> None:
    check_that_values_arrive(two_nodes, size)


def test_values_arrive_where_a_rank_can_not_open_files_of_the_driver(group: RankGroup) -> None:
    can_open = [rank.reads_memory for rank in group._set.ranks]
    group._set.ranks[1].reads_memory = False
    try:
        assert not group.reads_memory
        check_that_values_arrive(group, 1000)
        assert group.run("returned", [(group.put([1]), rank) for rank in range(3)]) == [([1], n) for n in range(3)]
    finally:
        for rank, kept in zip(group._set.ranks, can_open, strict=True):
            rank.reads_memory = kept


def check_that_values_arrive(group: RankGroup, size: int) -> None:
    begin(group)
    value = np.random.default_rng(size).integers(256, size=size).astype(np.uint8)
    expected = value.copy()
    file = MemoryFile(value)
    value += 1  # the caller fills its array again, which a later call must not see
    ranks = range(group.num_ranks)
    results = group.run("returned", [("before", file, rank) for rank in ranks])
    assert [(first, third) for first, _, third in results] == [("before", rank) for rank in ranks]
    assert all(np.array_equal(each, expected) and each.dtype == np.uint8 for _, each, _ in results)
    results = group.run("returned", [(file, file)] * group.num_ranks)
    assert all(np.array_equal(each, expected) for pair in results for each in pair)


def test_only_ranks_on_the_node_of_the_driver_open_its_files(two_nodes: RankGroup) -> None:
    here = ray.get_runtime_context().get_node_id()
    assert [rank.reads_memory for rank in two_nodes._set.ranks] == [
        placement.node_id == here for placement in two_nodes.placements
    ]
    assert not all(rank.reads_memory for rank in two_nodes._set.ranks)


def test_a_state_that_was_loaded_is_the_state(make_group: MakeGroup) -> None:
    group = make_group(2, num_nodes=0)
    group.load_state_dict({"total": torch.full((3,), 7.0, dtype=torch.float64)})
    assert group.state_dict()["total"].tolist() == [7.0] * 3


@pytest.mark.slow
def test_ranks_that_were_killed_between_calls_are_restarted(group: RankGroup) -> None:
    begin(group)
    group.run("add", [(1.0,)] * 3)
    group.state_dict()
    for pid in group.pids:
        os.kill(pid, 9)
    assert group.run("add", [(1.0,)] * 3) == [[6.0] * 3] * 3


def test_a_rank_that_has_ended_shows_no_signs_and_raises_nothing_in_ray(group: RankGroup) -> None:
    begin(group)
    host, ranks = group._host, group._set.ranks
    signs = host.signs(ranks, 60.0)
    assert signs and all(each.cpu_s > 0 and not each.is_stopped for each in signs)
    process = subprocess.Popen(["sleep", "0"])
    process.wait()
    assert vital_signs(process.pid) is None
    assert host.signs([*ranks[:-1], replace(ranks[-1], pid=process.pid)], 60.0) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "where", "then"),
    [
        (1, "tell", lambda group: group.ask_all("tell")[0]),
        (2, "state_dict", lambda group: group.run("tell")[0]),
        (1, "load_state_dict", lambda group: group.load_state_dict(group.state_dict()) or group.ask("tell")),
    ],
    ids=["ask", "after a run", "load"],
)
def test_a_rank_that_stops_where_no_other_waits_for_it_is_not_waited_for_without_end(
    make_group: MakeGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, where: str, then: Any
) -> None:
    monkeypatch.setattr("rayvec.distributed.running_ranks._ANSWER_S", 1000.0)  # not waited for: the rank is stopped
    monkeypatch.setattr("rayvec.distributed.rank_group._WAIT_SHARE", math.inf)  # a checkpoint after every call
    mark = tmp_path / "mark"
    group = make_group(num_ranks, lambda ranks: StopsOnce(ranks, mark), timeout_s=TIMEOUT_S)
    mark.write_text(where)
    group.run("add", [(1.0,)] * num_ranks)
    assert then(group) == [num_ranks] * 3
    assert mark.read_text() == "stopped" and group.num_starts == 2


def test_ranks_that_share_memory_listen_on_no_socket_of_their_own(group: RankGroup) -> None:
    actor = ray.remote(Owner).options(num_cpus=0).remote()
    is_on_ray = bool(group.placements[0].node_id)
    ports_of_an_actor = listening_ports(ray.get(actor.pid.remote())) if is_on_ray else ()
    assert [len(listening_ports(pid)) for pid in group.pids] == [len(ports_of_an_actor)] * 3
    ray.kill(actor)


def test_no_other_process_can_read_or_write_what_ranks_exchange(two_nodes: RankGroup) -> None:
    ports = [
        (placement.host, port)
        for placement, pid in zip(two_nodes.placements, two_nodes.pids, strict=True)
        for port in listening_ports(pid)
    ]
    assert ports and stores_at(ports) == []
    assert internal_kv._internal_kv_list(b"", namespace=b"rayvec-ranks") == []
    assert two_nodes.run("kind_of_ranks")[0][2] == 2


@pytest.mark.slow
def test_a_crash_loop_ends(make_group: MakeGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayvec.distributed.rank_group._MOST_LOSSES", 1)
    group = make_group(1)
    with pytest.raises(LearnerError, match="at most 1 losses in a row") as caught:
        group.run("add_and_fall", [(1.0, str(tmp_path / "never"), "SIGKILL")])
    assert str(caught.value).count("Remedy") == 1 and ".." not in str(caught.value)
    assert group.run("add", [(1.0,)]) == [[1.0] * 3]


def test_a_rank_that_dies_as_it_starts_is_not_waited_for_with_the_others() -> None:
    """Rank 1 would be waited for, and blamed, until the limit: it is stopped."""
    host = ProcessHost()
    start = host.start

    def start_and_harm(placement: Any, *args: Any) -> Any:
        rank = start(placement, *args)
        os.kill(rank.pid, signal.SIGSTOP if placement.rank == 1 else signal.SIGKILL)
        return rank

    host.start = start_and_harm  # type: ignore[method-assign]
    ranks = RankSet(host, "cpu", threads=1, timeout_s=20.0)
    with pytest.raises(RankLostError, match=r"rank 0.*its process has ended"):
        ranks.start(host.place(2), cloudpickle.dumps(lambda ranks: Adder()))


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EMFILE])
def test_a_limit_that_allows_no_process_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    tries = []

    def refuse(*args: object) -> None:
        tries.append(args)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(ForkServer, "branch", refuse)
    with pytest.raises(LearnerError, match=r"a process for rank 0.*no new process.*ulimit -u") as caught:
        RankGroup(Adder, 1, num_nodes=0).run("total")
    assert type(caught.value) is LearnerError and len(tries) == 1


class ClosesForEver(Adder):
    """Does not return from `close` on the last rank."""

    def __init__(self, ranks: Any, arrivals: Any) -> None:
        super().__init__(ranks)
        self.is_last = ranks.rank == ranks.size - 1

    def close(self) -> None:
        """Sleeps."""
        time.sleep(1e6 if self.is_last else 0.0)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_decentralized_ranks_that_do_not_close_are_killed_and_logged(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rayvec.distributed.decentralized._CLOSE_S", 0.2)
    group = DecentralizedGroup(ClosesForEver, num_ranks, ProcessHost(), timeout_s=1000.0)
    last = group.ranks[-1]
    group.close()
    assert vital_signs(last.pid) is None
    assert "killed ranks that did not close in time: A rank lives" in caplog.text
    assert f"rank {num_ranks - 1} on 127.0.0.1 (process {last.pid})" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("raise", ZeroDivisionError, "as asked"),
        ("exit", EnvError, r"SystemExit\(3\), the exception of sys.exit"),
    ],
)
def test_what_a_method_raises_is_raised_and_the_group_is_as_before(
    group: RankGroup, tmp_path: Path, how: str, kind: type[Exception], text: str
) -> None:
    begin(group)
    group.run("add", [(1.0,)] * 3)
    with pytest.raises(kind, match=text) as caught:
        group.run("add_and_fall", [(1.0, None, ""), (1.0, str(tmp_path / "never"), how), (1.0, None, "")])
    assert isinstance(caught.value.__cause__, LearnerError)
    assert "rank 1 on" in str(caught.value.__cause__) and "in add_and_fall" in str(caught.value.__cause__)
    assert group.run("add", [(1.0,)] * 3) == [[6.0] * 3] * 3


@pytest.mark.parametrize("num_nodes", [pytest.param(None, marks=pytest.mark.slow), 0], ids=["Ray", "processes"])
def test_a_result_that_cannot_be_pickled_is_an_error_of_its_own(make_group: MakeGroup, num_nodes: int | None) -> None:
    group = make_group(1, num_nodes=num_nodes)
    group.run("add", [(1.0,)])
    with pytest.raises(TypeError, match="cannot pickle") as caught:
        group.run("returned_lock")
    assert "rank 0 on" in str(caught.value.__cause__)
    assert group.run("add", [(1.0,)]) == [[2.0] * 3]


def test_a_result_without_room_in_the_object_store_is_no_lost_rank(two_nodes: RankGroup) -> None:
    @ray.remote(num_cpus=0)
    def full() -> None:
        raise ray.exceptions.OutOfDiskError("239c2f70", b"\n\x1c", "10.77.0.1")

    with pytest.raises(ConfigError, match="no room for the result of a rank"):
        two_nodes._host.result((two_nodes._set.ranks[0], full.remote()))


class Unreadable:
    def __reduce__(self) -> Any:
        return int, ("not a number",)


def test_an_argument_that_a_rank_cannot_unpickle_is_an_error_of_its_own() -> None:
    with RankGroup(Adder, 1, num_nodes=0) as group:
        with pytest.raises(ValueError, match="not a number") as caught:
            group.run("add", [(Unreadable(),)])
        assert "rank 0 on" in str(caught.value.__cause__)
        assert group.run("add", [(1.0,)]) == [[1.0] * 3]


def test_ranks_that_share_memory_need_no_directory(
    make_group: MakeGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which a killed driver would leave."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def make(ranks: Any) -> Adder:
        assert ranks.size == 2 and not any(tmp_path.iterdir())
        return Adder(ranks)

    make_group(2, make, num_nodes=0)


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
        ({"num_nodes": 1}, "runs ranks as processes of this machine"),
        ({"num_nodes": 0, "address": "auto"}, "runs ranks as processes of this machine"),
        ({"device": "tpu"}, "device has a fixed set of values"),
        ({"device": "cuda"}, r"needs a GPU for each rank.* Got: none\."),
    ],
)
def test_bad_settings_are_refused(ray_cluster: object, settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        RankGroup(Adder, **settings)
