"""``rayvec bench compare`` and ``rayvec bench learner`` at their smallest, through the command line."""

from __future__ import annotations

import csv
import json
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from conftest import AssertRefused
from helpers.processes import assert_nothing_left, running

from rayvec.bench import compare, learner, simulate
from rayvec.bench.harness.adapters import ADAPTERS
from rayvec.bench.harness.ddp import UPDATES
from rayvec.bench.harness.learners import LearnerTask, Threads
from rayvec.bench.learner import show
from rayvec.bench.measured_processes import COMPARE_PEERS, SCALING_PEERS
from rayvec.bench.results import Results
from rayvec.bench.settings import LearnerBench
from rayvec.cli import main

COMPARE = "bench compare --num-envs 2 --workers 1 --repeats 1 --window 0.05 --out out --peer".split()


def ran(arguments: Sequence[str], tmp_path: Path) -> tuple[dict[str, Any], str]:
    """Runs ``rayvec bench COMMAND``; returns its result file, and what it printed."""
    with running(arguments, tmp_path) as command:
        assert command.process.wait(500) == 0, command.stderr.read_text()
        printed = command.stdout.read_text()
        assert_nothing_left(command)
    content = json.loads((tmp_path / "out" / f"{arguments[1]}.json").read_text())
    assert content["schema"] == f"rayvec-bench-{arguments[1]}"
    return content, printed


def compared(peers: str, tmp_path: Path) -> tuple[dict[str, Any], str]:
    """Runs ``rayvec bench compare`` with some peers; returns its rows by name, and what it printed."""
    content, printed = ran([*COMPARE, *peers.split()], tmp_path)
    with (tmp_path / "out" / "compare.csv").open() as file:
        assert [row["way"] for row in csv.DictReader(file)] == [row["way"] for row in content["rows"]]
    return {row["way"]: row for row in content["rows"]}, printed


def assert_measured(row: dict[str, Any]) -> None:
    assert row["steps_per_s"] > 0 and row["steps_per_cpu_s"] > 0 and row["num_envs"] == 2
    assert row["of_bound"] > 0 and len(row["of_bound_all"]) == 1
    shares = row["split"]
    assert sum(shares.values()) == pytest.approx(1.0) and shares["environment"] > 0
    assert shares["unattributed"] <= 0.05 and min(shares.values()) >= 0


def test_rayvec_beside_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "OURS", ("rayvec-worker",))
    assert main([*COMPARE, "upper-bound", "no_such_library:no_such_peer"]) == 0
    printed = capsys.readouterr().out
    rows = {row["way"]: row for row in json.loads(Path("out/compare.json").read_text())["rows"]}
    assert list(rows) == ["rayvec-worker", "upper-bound", "no-such-peer"]
    for way in ("rayvec-worker", "upper-bound"):
        assert_measured(rows[way])
    assert rows["rayvec-worker"]["transport"] == "shm x 1"
    assert "no_such_library" in rows["no-such-peer"]["missing"] and "not installed" in printed
    assert "where the time of the processes that step goes" in printed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_peers_of_the_package(tmp_path: Path) -> None:
    rows, _ = compared("upper-bound gymnasium-sync gymnasium-async process-pool rayvec-tcp", tmp_path)
    assert len(rows) == 7 and rows["rayvec-tcp"]["transport"] == "tcp x 1"
    for row in rows.values():
        assert_measured(row)


@pytest.mark.slow
def test_a_policy_net_acts(tmp_path: Path) -> None:
    rows, _ = compared("upper-bound --hidden-sizes 8", tmp_path)
    for row in rows.values():
        assert row["steps_per_s"] > 0 and not row["split"] and "undivided" not in row


WAYS = ("threads", "ranks", "processes", "shared-memory", "gloo", "ddp", "share")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("algorithm", "ways"),
    [
        ("ppo", ["shared-memory"]),
        pytest.param("impala", WAYS, marks=pytest.mark.slow),
        pytest.param("sac", WAYS, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_two_learners(tmp_path: Path, algorithm: str, ways: Sequence[str]) -> None:
    arguments = f"bench learner --algorithm {algorithm} --num-learners 2 --window 0.01 --out out --num-envs 4".split()
    content, _ = ran([*arguments, "--minibatch-size", "128", "--way", *ways], tmp_path)
    assert [row["way"] for row in content["rows"]] == list(ways)
    for row in content["rows"]:
        assert row.get("samples_per_s", 0) > 0 and len(row["update_ms_all"]) >= 2, row


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ("compare --num-envs 2 --repeats 1 --window 0.05 --peer gymnasium-sync gymnasium-async", "compare.json"),
        ("learner --num-learners 1 --way threads --algorithm ppo impala sac --window 0.05", "learner.json"),
    ],
)
def test_ctrl_c_keeps_the_finished_rows(tmp_path: Path, arguments: str, result: str) -> None:
    path = tmp_path / "out" / result
    with running(["bench", *arguments.split(), "--out", "out"], tmp_path) as command:
        command.wait_until(lambda: path.exists() and "_per_s" in path.read_text())
        assert command.interrupt() == 130
        assert f"the finished rows are in out/{result}" in command.stderr.read_text()
        assert "Traceback" not in command.stderr.read_text()
        assert_nothing_left(command)
    rows = json.loads(path.read_text())["rows"]
    assert rows and all(row.get("steps_per_s", row.get("samples_per_s", 0)) > 0 for row in rows)


@pytest.mark.slow
def test_an_environment_that_fails_fails_its_rows_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (
        "bench compare --env-id bench_failing:Failing-v0 --num-envs 1 --repeats 1 --window 0.05 --out out".split()
    )
    (tmp_path / "bench_failing.py").write_text(FAILING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    content, printed = ran([*arguments, "--peer", "upper-bound", "gymnasium-sync"], tmp_path)
    rows = content["rows"]
    assert [row["way"] for row in rows] == ["rayvec-driver", "rayvec-worker", "upper-bound", "gymnasium-sync"]
    assert all("no such step" in row["failed"] for row in rows) and "failed, see below" in printed


FAILING = """
import gymnasium
from helpers.testing import CountingEnv

class Failing(CountingEnv):
    def step(self, action):
        raise KeyError("no such step")

gymnasium.register("Failing-v0", Failing)
"""


@pytest.mark.parametrize(("algorithm", "samples"), [("ppo", 8 * 256), ("sac", 16 * 64), ("impala", 256)])
def test_samples_are_rows_of_minibatches(algorithm: str, samples: int) -> None:
    task = LearnerTask(algorithm, num_envs=4, minibatch_size=64, hidden_sizes=(8,), obs_size=3)
    updates = Threads(task)
    updates.advance()
    assert updates.advance() == samples


@pytest.fixture
def group_of_one() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize(("algorithm", "epochs"), [("ppo", 8), ("impala", 1)])
def test_ddp_learns_from_as_many_on_policy(algorithm: str, epochs: int, images: bool, group_of_one: None) -> None:
    task = LearnerTask(
        algorithm, num_envs=4, num_steps=8, minibatch_size=16, hidden_sizes=(8,), obs_size=3, images=images
    )
    assert_ddp_learns(task, epochs * 32)


def test_ddp_learns_from_as_many_off_policy(group_of_one: None) -> None:
    assert_ddp_learns(LearnerTask("sac", num_envs=4, minibatch_size=64, hidden_sizes=(8,), obs_size=3), 16 * 64)


def assert_ddp_learns(task: LearnerTask, samples: int) -> None:
    update = UPDATES[task.algorithm](task, torch.device("cpu"))
    nets = [cell.cell_contents for cell in update.__closure__ or () if isinstance(cell.cell_contents, torch.nn.Module)]
    before = [parameter.detach().clone() for net in nets for parameter in net.parameters()]
    assert before and update() == samples
    after = [parameter for net in nets for parameter in net.parameters()]
    assert all(parameter.isfinite().all() for parameter in after)
    assert not any(map(torch.equal, before, after))


def test_a_batch_grows_with_ranks_where_the_scaling_is_weak() -> None:
    strong, weak = LearnerTask("ppo", 4), LearnerTask("ppo", 4, weak=True)
    assert (weak.rows, weak.minibatch) == (4 * strong.rows, 4 * strong.minibatch) and weak.config().num_envs == 64


def test_efficiency_is_over_one_rank(tmp_path: Path) -> None:
    rows = [
        {
            "algorithm": "ppo",
            "way": "ranks",
            "minibatch_size": 64,
            "num_learners": n,
            "cores": 2,
            "scaling": "weak",
            "samples_per_s": rate,
            "update_ms": 1,
            "update_ms_all": [1, 2],
        }
        for n, rate in ((1, 100.0), (4, 300.0))
    ]
    results = Results("learner", {}, tmp_path / "learner.json", rows)
    show(results)
    assert [row["efficiency"] for row in results.rows] == [1.0, 0.75]


def test_ctrl_c_before_the_first_row_names_no_file(tmp_path: Path) -> None:
    results = Results("learner", {}, tmp_path / "learner.json")
    with pytest.raises(KeyboardInterrupt, match=r"^interrupted; nothing was measured$"), results.shown(show):
        raise KeyboardInterrupt


def test_a_learner_benchmark_that_measures_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(learner, "_measured", lambda settings, row: {"failed": f"{row['way']}: no memory"})
    arguments = ["bench", "learner", "--images", "--way", "ranks", "--num-learners", "1", "--out", str(tmp_path)]
    assert main(arguments) == 1
    shown = capsys.readouterr().out
    assert "ppo by ranks, 1: no memory" in shown and "impala by" in shown and "sac" not in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("compare --peer warp-drive", ["warp-drive"]),
        ("compare --reference warp-drive", ["--reference names", "Got: warp-drive"]),
        ("compare --out /dev/null", ["--out names the directory", "/dev/null is no directory"]),
        ("compare --reference rayvec-tcp", ["rayvec-tcp", "process-pool"]),
        ("compare --env-id NoSuchEnvironment-v0", ["NoSuchEnvironment-v0"]),
        ("compare --peer-venv rllib=/nowhere", ["rllib=/nowhere", "make_peer_venvs.sh"]),
        ("compare --peer-venv /usr", ["/usr", "name=path"]),
        ("compare --num-envs 0", ["num_envs"]),
        ("learner --num-learners 0", ["num_learners"]),
        ("learner --window 0", ["window"]),
        ("learner --way", ["--way", "at least one"]),
        ("learner --minibatch-size 64 4097", ["from 1 to num_envs * num_steps = 4,096 for ppo", "Got: 4097"]),
        ("learner --minibatch-size 32", ["from 64 to", "for impala", "Got: 32"]),
        ("learner --images --algorithm ppo sac", ["measures SAC without images"]),
        ("model --cores-per-node 0", ["cores_per_node"]),
        ("model --step-duration -1", ["step_duration"]),
        ("model --fit nowhere.json", ["nowhere.json"]),
        ("model --fit nowhere.json --address 127.0.0.1:1", ["--address", "one of the two"]),
        ("model --address 127.0.0.1:1", ["127.0.0.1:1", "ray start --head"]),
        ("learner --address 127.0.0.1:1", ["127.0.0.1:1", "ray start --head"]),
    ],
)
def test_what_cannot_work(arguments: str, words: list[str], assert_refused: AssertRefused) -> None:
    assert_refused(["bench", *arguments.split()], *words)


def test_an_address_that_never_answers(assert_refused: AssertRefused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "_PROBE_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert_refused(["bench", "model", "--address", address], address, "no answer within", "ray start --head")


def test_every_peer_has_an_adapter() -> None:
    assert set(SCALING_PEERS) <= set(COMPARE_PEERS) <= {*ADAPTERS, "rayvec-tcp"}
    assert set(get_args(get_args(get_type_hints(LearnerBench)["way"])[0])) <= set(ADAPTERS)
