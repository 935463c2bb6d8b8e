"""Trackers get every metric, a resumed run continues in the same run of theirs, and one that is away loses no work."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.training_kit import HERE, SMALL, lengthen, options, tiny

import rayvec
from rayvec.cli import main
from rayvec.errors import ConfigError
from rayvec.training import trackers
from rayvec.training.loggers import read_metrics
from rayvec.training.run_dir import load_run
from rayvec.training.status import read_status


def runs_of_mlflow(folder: Path) -> Any:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=(folder / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("rayvec")
    return client, client.search_runs([experiment.experiment_id])


@pytest.fixture
def without_tracker_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE", "WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def closed_port() -> Iterator[int]:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # no other program gets the port, and without `listen` it refuses connections
        yield silent.getsockname()[1]


@pytest.mark.filterwarnings("ignore")  # of MLflow
@pytest.mark.usefixtures("without_tracker_settings")
def test_mlflow_has_what_the_file_has_and_resume_continues_its_run(tmp_path: Path) -> None:
    rayvec.train(tiny(tmp_path / "a", total_steps=128, track="mlflow"))
    lengthen(tmp_path / "a", 128, 192)
    rayvec.resume(tmp_path / "a")
    client, found = runs_of_mlflow(tmp_path)
    (run,) = found
    assert run.info.status == "FINISHED" and run.info.run_name == "a" and run.data.params["gamma"] == "0.98"
    points = {each.step: each.value for each in client.get_metric_history(run.info.run_id, "return_mean")}
    assert points == {line["steps"]: line["return_mean"] for line in read_metrics(tmp_path / "a" / "metrics.jsonl")}
    assert list(points) == [64, 128, 192]
    assert {each.step for each in client.get_metric_history(run.info.run_id, "eval/return_mean")} == {128, 192}
    assert {"time_s/collect", "time_s/collect.environment", "learner/entropy"} < run.data.metrics.keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("without_tracker_settings")
def test_a_run_that_fails_has_failed_in_mlflow_too(tmp_path: Path) -> None:
    class Fails:
        def on_iteration(self, context: rayvec.RunContext) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rayvec.train(tiny(tmp_path / "a", track="mlflow"), callbacks=[Fails()])
    assert runs_of_mlflow(tmp_path)[1][0].info.status == "FAILED"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("without_tracker_settings")
def test_a_run_that_ctrl_c_ends_was_killed(tmp_path: Path) -> None:
    class Interrupts:
        def __init__(self, times: int) -> None:
            self.times = times

        def on_iteration(self, context: rayvec.RunContext) -> None:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)

    for times, name in ((1, "a"), (2, "b")):  # after the iteration, at once
        with pytest.raises(KeyboardInterrupt):
            rayvec.train(tiny(tmp_path / name, track="mlflow"), callbacks=[Interrupts(times)])
        assert read_status(tmp_path / name).state == "interrupted"
    assert {run.info.run_name: run.info.status for run in runs_of_mlflow(tmp_path)[1]} == {"a": "KILLED", "b": "KILLED"}


@pytest.mark.usefixtures("without_tracker_settings")
@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("failed", 1), ("interrupted", 130)])
def test_wandb_gets_the_exit_code_of_the_run(state: str, code: int) -> None:
    """Its process and its server are left out."""
    from wandb import Run

    calls = []
    tracker = trackers.WandbTracker.__new__(trackers.WandbTracker)
    tracker._run = SimpleNamespace(finish=lambda **kwargs: calls.append(signature(Run.finish).bind(None, **kwargs)))
    tracker.close(state)
    assert [call.arguments["exit_code"] for call in calls] == [code]


@pytest.mark.usefixtures("without_tracker_settings")
def test_credentials_of_a_tracker_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], closed_port: int
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://ann:pa55word@127.0.0.1:{closed_port}/x?token=t0ken")
    command = ["train", "ppo", *options({**SMALL, **HERE}), "--track=mlflow", f"--run-dir={tmp_path / 'a'}"]
    assert main(command) == 2
    shown = capsys.readouterr()
    assert "mlflow at http://127.0.0.1" in shown.err
    with pytest.raises(ConfigError) as error_info:
        rayvec.train(tiny(tmp_path / "a", track="mlflow"))
    text = "".join(traceback.format_exception(error_info.value)) + shown.out + shown.err
    assert not any(secret in text for secret in ("pa55word", "ann:", "t0ken"))


OFFLINE = """
import sys
from rayvec.cli import main
raise SystemExit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("without_tracker_settings")
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    small = options({**SMALL, **HERE, "eval_episodes": 2, "total_steps": 128})
    first = ["train", "ppo", *small, "--track=wandb", f"--run-dir={tmp_path / 'a'}"]
    for arguments in (first, ["train", "ppo", f"--resume={tmp_path / 'a'}"]):
        command = [sys.executable, "-c", OFFLINE, *arguments]
        printed = subprocess.run(command, check=True, capture_output=True, cwd=tmp_path, text=True)
        assert "tracking ends" not in printed.stderr
        lengthen(tmp_path / "a", 128, 192) if arguments is first else None
    name, run_id = load_run(tmp_path / "a")[1]["progress"]["tracker_run"].split("/")
    assert name == "wandb"
    written = sorted((tmp_path / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(written) in (1, 2)  # of one run; both sittings may begin in the same second
    assert b"return_mean" in b"".join(path.read_bytes() for path in written)
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == len(written)


BESIDE_A_RUN = """
import rayvec, wandb
from helpers.training_kit import tiny

mine = wandb.init(project="mine")
for name in ("a", "b"):
    rayvec.train(tiny(name, total_steps=64, eval_episodes=0, track="wandb"))
    assert wandb.run is mine
mine.log({"alive": 1})
mine.finish()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("without_tracker_settings")
def test_runs_of_wandb_in_one_process_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MODE", "offline"), ("SILENT", "true"), ("CACHE_DIR", str(tmp_path / "cache"))):
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    subprocess.run([sys.executable, "-c", BESIDE_A_RUN], check=True, cwd=tmp_path)
    ids = {load_run(tmp_path / name)[1]["progress"]["tracker_run"] for name in ("a", "b")}
    assert len(ids) == 2 and len(list((tmp_path / "wandb").glob("offline-run-*"))) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("without_tracker_settings")
@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_tracker_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed_port: int, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    address = f"http://127.0.0.1:{closed_port}"
    monkeypatch.setenv({"mlflow": "MLFLOW_TRACKING_URI", "wandb": "WANDB_BASE_URL"}[name], address)
    command = ["train", "ppo", *options({**SMALL, **HERE}), f"--track={name}", f"--run-dir={tmp_path / 'a'}"]
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, *command], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 2, done.stderr
    assert f"an answer of {name}" in done.stderr and "leave track out" in done.stderr
    assert not (tmp_path / "a").exists()


def test_a_tracker_that_is_not_installed_or_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"rayvec\[wandb\]"):
        rayvec.train(tiny(tmp_path / "a", track="wandb"))
    assert not (tmp_path / "a").exists()
    with pytest.raises(ConfigError, match=r"'wandb' \| 'mlflow' \| None.*'aim'"):
        tiny(tmp_path / "a", track="aim")
    with pytest.raises(SystemExit) as exit_info:
        main(["train", "ppo", "--track", "aim"])
    assert exit_info.value.code == 2


def test_an_error_of_a_tracker_ends_tracking_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: Counter[str] = Counter()

    class Breaks:
        run_id = "one"

        def log(self, steps: int, metrics: Any) -> None:
            calls["log"] += 1
            raise OSError("the server is gone")

        def close(self, state: str) -> None:
            calls["close"] += 1

    monkeypatch.setitem(trackers.TRACKERS, "mlflow", lambda *args: Breaks())
    monkeypatch.setattr("rayvec.training.loop.check_tracker", lambda config: None)
    with caplog.at_level(logging.WARNING):
        assert rayvec.train(tiny(tmp_path / "a", total_steps=256, track="mlflow")).total_steps == 256
    assert calls == {"log": 1} and caplog.text.count("the server is gone") == 1
