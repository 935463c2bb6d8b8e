"""A run shows itself while it trains: its status, metrics for Prometheus, and `rayvec top`."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest
from helpers.training_kit import SMALL, tiny
from rich.console import Console

import rayvec
from rayvec.cli import main
from rayvec.data.batch import NodeStats
from rayvec.errors import ConfigError
from rayvec.training import monitor, top as top_module
from rayvec.training.prometheus_names import METRICS
from rayvec.training.status import NodeStatus, RunStatus, read_status, write_status
from rayvec.training.top import _table, top

TWO_WORKERS = {"num_nodes": 0, "workers_per_node": 2}


@pytest.fixture(autouse=True)
def every_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishes after each iteration, however short."""
    monkeypatch.setattr(monitor, "_INTERVAL_S", 0.0)


class Looks:
    """Calls a function after each iteration."""

    def __init__(self, look: Callable[[rayvec.RunContext], None]) -> None:
        self.on_iteration = look


def scrape(port: int, address: str = "127.0.0.1") -> dict[tuple[str, str], float]:
    """Returns the values of metrics by name and labels, without ``run``."""
    with urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = {}
    for name, labels, value in re.findall(r"^(rayvec_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        assert 'run="a"' in labels
        found[name, re.sub(r',?run="a"', "", labels)] = float(value)
    return found


def port_of(capfd: pytest.CaptureFixture[str]) -> int:
    found = re.search(r"metrics at http://127.0.0.1:(\d+)/metrics", capfd.readouterr().err)
    assert found is not None
    return int(found[1])


def test_metrics_are_those_of_the_iterations(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[dict[tuple[str, str], float]] = []
    lines: list[dict[str, Any]] = []
    port: list[int] = []

    def look(context: rayvec.RunContext) -> None:
        port[:] = port or [port_of(capfd)]
        seen.append(scrape(port[0]))
        lines.append(context.metrics)

    config = tiny(tmp_path / "a", total_steps=256, metrics_port=0, **TWO_WORKERS)
    rayvec.train(config, callbacks=[Looks(look)])
    with pytest.raises(urllib.error.URLError):  # the port is closed with the run
        scrape(port[0])
    for number, (found, line) in enumerate(zip(seen, lines, strict=True), 1):
        assert found["rayvec_steps_total", ""] == line["steps"] == 64 * number
        assert found["rayvec_iterations_total", ""] == number
        assert found["rayvec_return_mean", ""] == pytest.approx(line["return_mean"])
        node = 'node="localhost/driver"'
        assert found["rayvec_node_environments", node] == 4 and found["rayvec_node_workers", node] == 2
        assert found["rayvec_node_steps_per_second", node] == pytest.approx(line["steps_per_s"])
        efficiency = found["rayvec_node_steps_per_second", node] * found["rayvec_node_step_seconds", node] / 2
        assert found["rayvec_node_efficiency_ratio", node] == pytest.approx(efficiency)
        assert 0 < efficiency < 1
    spent = sum(line["time_s/collect"] for line in lines)
    assert seen[-1]["rayvec_time_seconds_total", 'activity="collect"'] == pytest.approx(spent)
    assert {name for name, _ in seen[-1] if not name.endswith("_created")} <= METRICS.keys()


def test_nodes_of_a_run_that_has_ended_show_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray exports the last values of gauges as long as the program is connected to it."""
    last: dict[str, float] = {}
    sink = SimpleNamespace(record=lambda name, value, labels: last.update({name: value}))
    monkeypatch.setattr(monitor.Monitor, "_sinks", lambda self, may_open: [sink])
    rayvec.train(tiny(tmp_path / "a", total_steps=64, eval_episodes=0))
    assert {name: value for name, value in last.items() if name in monitor._PER_NODE} == dict.fromkeys(
        monitor._PER_NODE, 0.0
    )
    assert last["rayvec_steps_total"] == 64


def test_the_status_counts_what_was_restarted(tmp_path: Path) -> None:
    statuses: list[RunStatus] = []

    class Raises(gymnasium.Wrapper):  # type: ignore[type-arg]
        steps = 0

        def step(self, action: Any) -> Any:
            self.steps += 1
            if self.steps == 40:
                raise ZeroDivisionError
            return super().step(action)

    config = tiny(tmp_path / "a", total_steps=192, on_env_error="restart")
    look = Looks(lambda context: statuses.append(read_status(tmp_path / "a")))
    rayvec.train(config, env=lambda: Raises(gymnasium.make("CartPole-v1")), callbacks=[look])
    assert statuses[0].restarts == {} and statuses[-1].restarts == {"environment": 4}
    assert [node.n_restarts for node in statuses[-1].nodes] == [4]
    assert {status.state for status in statuses} == {"running"}
    assert read_status(tmp_path / "a").state == "finished"


class Dies(gymnasium.Wrapper):  # type: ignore[type-arg]
    """Kills its worker in its first step, unless another one has."""

    def __init__(self, env: Any, flag: Path) -> None:
        super().__init__(env)
        self._flag = flag

    def step(self, action: Any) -> Any:
        if not self._flag.exists():
            self._flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


@pytest.mark.slow
def test_a_worker_that_is_replaced_is_counted(tmp_path: Path) -> None:
    config = tiny(tmp_path / "a", total_steps=128, on_env_error="restart", num_nodes=0, workers_per_node=1)
    flag = tmp_path / "flag"
    rayvec.train(config, env=lambda: Dies(gymnasium.make("CartPole-v1"), flag))
    assert read_status(tmp_path / "a").restarts == {"environment": 4, "worker": 1}


def test_an_error_of_publishing_does_not_end_the_run_and_publishing_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, states = monitor.write_status, []

    def fails_twice(run_dir: Path, status: Any) -> None:
        states.append(status.state)
        if len(states) < 3:
            raise OSError("the disk is full")
        write(run_dir, status)

    monkeypatch.setattr(monitor, "write_status", fails_twice)
    monkeypatch.setattr(monitor, "_INTERVAL_S", 0.0)
    with caplog.at_level(logging.WARNING):
        assert rayvec.train(tiny(tmp_path / "a", total_steps=192)).total_steps == 192
    assert caplog.text.count("are not updated until this works again: OSError: the disk is full") == 1
    assert states[:4] == ["running"] * 4 and read_status(tmp_path / "a").steps == 192


def test_a_status_that_cannot_be_written_leaves_no_part_of_it(tmp_path: Path) -> None:
    rayvec.train(tiny(tmp_path / "a", total_steps=64))
    status, path = read_status(tmp_path / "a"), tmp_path / "a" / "status.json"
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        write_status(tmp_path / "a", status)
    assert not list((tmp_path / "a").glob(".*"))


def test_a_node_that_environments_have_left_is_not_shown() -> None:
    """Chunks that were requested before still count its steps, but it has no workers left."""
    nodes = (NodeStats("left", 0, 0, n_steps=40, environment_s=1.0), NodeStats("new", 4, 2))
    iteration: Any = SimpleNamespace(stats=SimpleNamespace(nodes=nodes))
    assert [node.node for node in monitor._nodes([iteration])] == ["new"]


def test_a_port_that_is_taken_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"a port of 127\.0\.0\.1.*Got: {port}.*Pass another"):
            rayvec.train(tiny(tmp_path / "a", metrics_port=port))
    with pytest.raises(ConfigError, match="a port of no"):
        rayvec.train(tiny(tmp_path / "a", metrics_port=0, metrics_address="no.such.host.invalid"))
    with pytest.raises(ConfigError, match="metrics_port"):
        tiny(tmp_path / "a", metrics_port=65536)
    assert not (tmp_path / "a").exists()


def test_the_extra_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"rayvec\[metrics\]"):
        rayvec.train(tiny(tmp_path / "a", metrics_port=0))
    assert rayvec.train(tiny(tmp_path / "a", total_steps=64, eval_episodes=0)).total_steps == 64


def test_top_shows_a_table_while_the_run_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[str] = []

    def look(context: rayvec.RunContext) -> None:
        capsys.readouterr()
        assert top(tmp_path / "a", None, once=True) == 0
        shown.append(capsys.readouterr().out)

    rayvec.train(tiny(tmp_path / "a", total_steps=128, **TWO_WORKERS), callbacks=[Looks(look)])
    assert "CartPole-v1 · PPO · seed 1 · running" in shown[0] and "64/128 steps" in shown[0]
    words = shown[1].splitlines()[-1].split()
    assert words[:3] == ["localhost/driver", "4", "2"] and words[-3:] == ["0", "s", "ago"]
    assert words[-6].endswith("%") and words[-5:-3] == ["0", "0"]  # efficiency, restarts, queue
    with pytest.raises(ConfigError, match=r"finished at 128 of 128 steps.*rayvec report"):
        top(tmp_path / "a", None)


def test_top_says_what_is_no_run_and_what_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(tmp_path), "--once"]) == 2
    assert "which has no config.yaml" in capsys.readouterr().err
    assert main(["top"]) == 2 and "Got: neither" in capsys.readouterr().err
    assert main(["top", str(tmp_path), "--address", "auto"]) == 2 and "Got: both" in capsys.readouterr().err

    class Fails:
        def on_iteration(self, context: rayvec.RunContext) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rayvec.train(tiny(tmp_path / "a"), callbacks=[Fails()])
    with pytest.raises(ConfigError, match=r"failed at 64 of 640 steps.*--resume"):
        top(tmp_path / "a", None, once=True)
    (tmp_path / "a" / "status.json").write_text("{}")
    with pytest.raises(ConfigError, match="writes its status when training begins"):
        top(tmp_path / "a", None, once=True)


def test_top_names_the_directory_of_a_run_that_was_moved(tmp_path: Path) -> None:
    rayvec.train(tiny(tmp_path / "a", total_steps=64, eval_episodes=0))
    (tmp_path / "a").rename(tmp_path / "b")
    with pytest.raises(ConfigError, match=rf"Got: {tmp_path / 'b'}: finished.*rayvec report {tmp_path / 'b'} "):
        top(tmp_path / "b", None, once=True)


def test_top_notices_that_the_process_has_died(tmp_path: Path) -> None:
    rayvec.train(tiny(tmp_path / "a", total_steps=64, eval_episodes=0))
    finished = json.loads((tmp_path / "a" / "status.json").read_text())
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    (tmp_path / "a" / "status.json").write_text(json.dumps({**finished, "state": "running", "pid": int(dead.stdout)}))
    with pytest.raises(ConfigError, match="has died at 64"):
        top(tmp_path / "a", None)
    (tmp_path / "a" / "status.json").write_text(json.dumps({**finished, "state": "running", "host": "elsewhere"}))
    assert top(tmp_path / "a", None, once=True) == 0  # another host's processes can't be seen here


def test_top_leaves_out_whole_columns_on_a_narrow_terminal() -> None:
    nodes = [NodeStatus(name, 16, 4, 12_345.0, 0.0123, 0.87, 0, 12, 1.0) for name in ("worker-17.example.org", "head")]
    shown = {}
    for width in (50, 120):
        with (console := Console(width=width, color_system=None)).capture() as capture:
            console.print(_table(nodes, 0.0, width))
        shown[width] = [" ".join(line.split()) for line in capture.get().splitlines()]
    assert shown[50][0] == "node envs workers steps/s last seen" and shown[50][-1] == "head 16 4 12,345 1 s ago"
    assert shown[120][-1] == "head 16 4 12,345 12.3 ms 87% 0 12 1 s ago"
    assert shown[50][1].startswith("worker-17")


def test_top_ends_with_a_line_of_its_own_where_there_is_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node = NodeStatus("head", 16, 4, 12_345.0, 0.0123, 0.87, 0, 12, 1.0)
    running = RunStatus("/runs/a", "title", "running", 1, 2, nodes=(node,))
    statuses = iter([running, dataclasses.replace(running, state="finished")])
    monkeypatch.setattr(top_module, "read_status", lambda run_dir: next(statuses))
    monkeypatch.setattr(top_module, "_INTERVAL_S", 0.0)
    assert top(tmp_path / "a", None) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "the run has ended"


def test_a_status_survives_the_way_to_json_and_back() -> None:
    status = RunStatus("/runs/a", "title", "running", 1, 2, restarts={"worker": 1})
    assert RunStatus.from_json(status.to_json()) == status
    later = json.dumps({**dataclasses.asdict(status), "unknown": 1})
    assert RunStatus.from_json(later) == status
    for text in ("", "[]", "{}", '{"nodes": 3}', '{"nodes": [{}]}'):
        with pytest.raises(ValueError):
            RunStatus.from_json(text)
    wrong = [("steps", "abc"), ("total_steps", None), ("pid", -1), ("pid", 1.5), ("time_share", {"a": "b"})]
    for name, value in [*wrong, ("restarts", 3), ("title", 3), ("return_mean", [1]), ("nodes", [{"num_envs": "a"}])]:
        with pytest.raises(ValueError, match="nodes|num_envs" if name == "nodes" else name):
            RunStatus.from_json(json.dumps({**dataclasses.asdict(status), name: value}))


@pytest.mark.slow
def test_on_ray_every_node_is_shown_and_the_board_goes_with_the_run(
    ray_cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    from rayvec.cluster.status_board import read_boards

    shown: list[str] = []

    def look(context: rayvec.RunContext) -> None:
        if context.progress.iterations > 1:
            capsys.readouterr()
            assert top(None, ray_cluster.address, once=True) == 0
            shown.append(capsys.readouterr().out)

    for learners in ({}, {"learners": "decentralized", "num_learners": 2}):
        shown.clear()
        config = tiny(tmp_path / f"a{len(learners)}", total_steps=640, eval_episodes=0)
        config = dataclasses.replace(config, **{"num_nodes": 2, "workers_per_node": 1, **learners})
        rayvec.train(config, callbacks=[Looks(look)])
        rows = [line.split() for line in shown[-1].splitlines()[4:]]
        print(shown[-1])
        assert len(rows) == 2 and [row[1:3] for row in rows] == [["2", "1"], ["2", "1"]]
        assert len({row[0] for row in rows}) == 2 and all("/" in row[0] for row in rows)
        assert not read_boards()
    assert "are not updated" not in caplog.text
    with pytest.raises(ConfigError, match="Got: none at"):
        top(None, ray_cluster.address)


def test_resuming_may_change_the_port(tmp_path: Path) -> None:
    config = tiny(tmp_path / "a", **SMALL).adjusted(metrics_port=9000, metrics_address="0.0.0.0")
    assert config.metrics_port == 9000


def test_the_dashboard_of_grafana_shows_metrics_that_exist() -> None:
    dashboard = json.loads(Path(rayvec.__file__).with_name("grafana.json").read_text())
    assert dashboard["title"] and dashboard["uid"] and dashboard["schemaVersion"] >= 36
    variables = {each["name"] for each in dashboard["templating"]["list"]}
    panels, shown = dashboard["panels"], set()
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["type"] == "timeseries" and panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs and len(set(refs)) == len(refs)
        for target in panel["targets"]:
            names = re.findall(r'__name__=~"\(ray_\)\?(\w+)"', target["expr"])  # by the port of a run, and by Ray
            if "increase(" in target["expr"]:  # summed over processes, of one of the two: both would be twice the value
                port, by_ray = target["expr"].split(" or ")
                names = re.findall(r"\b(rayvec_\w+)\{", port)
                assert by_ray == port.replace("rayvec_", "ray_rayvec_")
            else:  # one line where both have the value
                assert f"max by ({', '.join(('run', *METRICS[names[0]].labels))}) (" in target["expr"]
            assert len(names) == 1 and 'run=~"$run"' in target["expr"]
            assert target["expr"].count("(") == target["expr"].count(")")
            labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert "run" in labels <= {"run", *METRICS[names[0]].labels}
            is_summed = any(word in target["expr"] for word in ("rate(", "increase("))
            assert is_summed == (METRICS[names[0]].kind == "counter")
            for name in re.findall(r"\$\{?(\w+)", target["expr"] + target["datasource"]["uid"]):
                assert name in variables or name.startswith("__")
            shown.update(names)
    assert shown == METRICS.keys()
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
