"""The command line: its output, and its exit codes: 2 for wrong input, 1 for a failed run, 130 after Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import AssertRefused
from helpers.processes import DEADLINE_S, RAYVEC, running
from helpers.testing import CountingEnv
from helpers.training_kit import HERE, SMALL, lengthen, options

import rayvec
from rayvec.cli import main
from rayvec.config import CONFIGS, PPOConfig
from rayvec.config.schema import fields_of
from rayvec.training.run_dir import load_config, load_run

TINY = [*options({**SMALL, **HERE}), "--total-steps=64"]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rayvec {rayvec.__version__}\n"


def help_of(arguments: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as exit_info:
        main(arguments.split())
    assert exit_info.value.code == 0
    return capsys.readouterr().out


def test_every_setting_is_an_option(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of("train ppo --help-all", 100, monkeypatch, capsys)
    assert text.isascii()
    for name in [*fields_of(PPOConfig), "resume", "config"]:
        assert f"--{name.replace('_', '-')} " in text


@pytest.mark.parametrize("algorithm", CONFIGS)
def test_the_help_is_short_and_in_groups(
    algorithm: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = help_of(f"train {algorithm} --help", 100, monkeypatch, capsys).splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 100
    titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["run:", "environment:", "algorithm:", "network:", "evaluation:", "logging:"]
    assert max(map(len, help_of("train ppo --help-all", 80, monkeypatch, capsys).splitlines())) <= 80


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("", "--learning-rate 0.008* "),
        ("--env-id Maze-v0", "--learning-rate 0.001 "),
        ("--no-normalize-advantage", "--normalize-advantage False "),
        ("", "--target-kl unset "),
        ("", "--hidden-sizes 64 64 "),
    ],
)
def test_the_help_shows_the_value_that_applies(
    options: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert line in help_of(f"train ppo {options} --help", 100, monkeypatch, capsys)


def test_a_run_starts_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = (tmp_path / name for name in "abc")
    assert main(["train", "ppo", *TINY, "--seed=7", "--eval-episodes=0", f"--run-dir={first}"]) == 0
    said = capsys.readouterr()
    assert "rayvec: preset classic: learning_rate=0.008, gamma=0.98," in said.err
    assert "greedy return none after 64 steps" in said.out
    text = (first / "config.yaml").read_text()
    assert "gradients. (Chosen by the preset.)" not in text and "(Chosen by the preset.)\ngamma: 0.98" in text
    assert main(["train", f"--config={first}/config.yaml", "--gamma=0.5", f"--run-dir={second}"]) == 0
    assert load_config(second) == replace(load_config(first), gamma=0.5, run_dir=second)
    (tmp_path / "run.yaml").write_text("algorithm: ppo\neval_episodes: 0\nseed: 3\n")
    options = ["--env-id=Acrobot-v1", *TINY, f"--run-dir={third}"]
    assert main(["train", f"--config={tmp_path}/run.yaml", *options]) == 0
    config = load_config(third)
    assert (config.seed, config.env_id, config.gamma) == (3, "Acrobot-v1", 0.98)  # type: ignore[attr-defined]


@pytest.mark.parametrize("arguments", [[], ["bench"], ["train"]])
def test_a_command_without_its_name(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2 and "usage: rayvec" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("fly", ["'fly' is no command"]),
        ("tarin ppo", ["Did you mean train?"]),
        ("bench scalign", ["'bench scalign'", "Did you mean scaling?"]),
        ("train magic", ["'magic'", "rayvec train --help"]),
        ("train PPO", ["Did you mean ppo?"]),
        ("train --seed 3", ["--seed"]),
        ("train ppo --nmu-envs 3", ["--nmu-envs is no option", "Did you mean --num-envs?"]),
        ("train ppo --env X-v0", ["Did you mean --env-id?"]),
        ("train sac --lr 1", ["Did you mean --policy-lr?"]),
        ("train ppo --gamma", ["--gamma", "expected one argument"]),
        ("train ppo --num-nodes 0 --resources-per-env license 1", ["license", "num_nodes"]),
        ("train ppo --learners decentralized --cores-per-env 1", ["cores_per_env", "decentralized"]),
        ("train --config nowhere.yaml", ["nowhere.yaml can't be read"]),
        ("train ppo --config a --resume b", ["a can't be read"]),
        ("train --plugin", ["plugin"]),
        ("--plugin= train", ["plugin"]),
        ("train --plugin --seed 3", ["plugin"]),
        ("eval", ["run_dir is missing"]),
        ("train ppo --env-kwargs size", ["--env-kwargs has 1 word.", "NAME VALUE"]),
        ("eval nowhere", ["config.yaml"]),
        ("eval . --episodes 0", ["episodes", "is 0"]),
        ("eval . --num-nodes -1", ["equal to 0", "is -1"]),
        ("doctor --env-id NoSuch-v0", ["NoSuch-v0"]),
        ("train ppo --num-envs 0", ["num_envs", "equal to 1", "is 0"]),
        ("train ppo --gamma 1.5", ["gamma", "less than or equal to 1", "is 1.5"]),
        ("train ppo --env-id NoSuchEnvironment-v0", ["NoSuchEnvironment-v0"]),
        ("train ppo --resume nowhere", ["config.yaml"]),
        ("train ppo --num-nodes 1 --workers-per-node 0", ["workers_per_node is 0"]),
        ("train ppo --wrappers no_such_module:f", ["'no_such_module:f'", "No module named"]),
        (f"train ppo --num-envs {10**18}", ["memory", "Out of memory: MemoryError", "Lower num_envs"]),
        ("train ppo --clip_range=0.1", ["Did you mean --clip-coef?"]),
        ("train ppo --num-nodes 1:2 --learners dedicated", ["one number of nodes"]),
        pytest.param("train ppo --learner-device cuda", ["learner_device", "a GPU", "'cpu'"], marks=without_gpu),
    ],
)
def test_what_cannot_work(arguments: str, words: list[str], assert_refused: AssertRefused) -> None:
    assert_refused(arguments.split(), *words)


class WrongShape(CountingEnv):
    def step(self, action: Any) -> Any:
        return np.zeros(3), *super().step(action)[1:]


@pytest.mark.parametrize(
    ("args", "value"), [(["--no-prefetch"], False), (["--prefetch", "--seed=1"], True), (["--prefetch", "None"], None)]
)
def test_settings_that_are_on_or_off_or_unset(tmp_path: Path, args: list[str], value: bool | None) -> None:
    run_dir = tmp_path / "a"
    settings = ["--num-envs=2", "--num-steps=8", "--num-minibatches=1", "--total-steps=16", "--eval-episodes=0"]
    assert main(["train", "impala", *settings, *args, "--num-nodes=0", f"--run-dir={run_dir}"]) == 0
    assert load_config(run_dir).prefetch is value  # type: ignore[attr-defined]


def test_an_environment_whose_constructor_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--env-id", f"{__name__}:{WrongShape.__name__}"]  # rayvec itself calls its constructor
    for env_id in ([], own):
        arguments = ["train", "ppo", *TINY, *env_id, "--env-kwargs", "wings", "2", "--run-dir", str(tmp_path / "a")]
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert "TypeError" in error and "wings" in error
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("breaks", ["RuntimeError: the", "wears out", ", environment ", 'helpers/wrap.py", line ', ", in reward"]),
        ("goes_blind", ["must be finite", "nan"]),
    ],
)
def test_a_run_that_fails_says_how_to_resume(
    name: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "a"
    arguments = [*TINY, "--total-steps", "100_000", "--checkpoint-interval-s", "0"]
    assert main(["train", "ppo", *arguments, "--wrappers", f"helpers.wrap:{name}", "--run-dir", str(run_dir)]) == 1
    error = capsys.readouterr().err
    for word in (*words, f"resume with: rayvec train ppo --resume {run_dir}"):
        assert word in error
    assert "Lower num_envs" not in error
    _, state = load_run(run_dir)
    assert 0 < state["progress"]["steps"] < 100_000 and bool(state["weights"].isfinite().all())


@pytest.mark.parametrize(
    "pressed",
    [
        "signal.raise_signal(signal.SIGINT)",
        "with contextlib.suppress(KeyboardInterrupt): signal.raise_signal(signal.SIGINT)",
        "try: signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt: raise ImportError from None",
    ],
    ids=["raised", "dropped by a library", "turned into an error by a library"],
)
def test_ctrl_c_while_a_run_starts(
    pressed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever a library makes of the interrupt, the command ends before it begins a run."""
    name = f"pressed_{abs(hash(pressed))}"
    (tmp_path / f"{name}.py").write_text(f"import contextlib, signal\n{pressed}\ndef f(env): return env\n")
    monkeypatch.syspath_prepend(tmp_path)
    run_dir = tmp_path / "a"
    assert main(["train", "ppo", *TINY, "--wrappers", f"{name}:f", "--run-dir", str(run_dir)]) == 130
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "rayvec: interrupted" and len(said) <= 2 and not list(run_dir.glob("metrics.jsonl"))


def test_ctrl_c_while_torch_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The import completes: torch aborts the process otherwise."""
    (tmp_path / "torch.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nopen('imported', 'w')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with running(["train", "ppo", *TINY], tmp_path) as command:
        assert command.process.wait(DEADLINE_S) == 130
    assert command.stderr.read_text() == "rayvec: interrupted\n" and (tmp_path / "imported").exists()


TERMINATED = """
import contextlib, signal, sys
from rayvec import cli

def run(doctor):
    with contextlib.ExitStack() as stack:
        stack.callback(print, "cleaned")
        signal.raise_signal(signal.SIGTERM)

cli.Doctor.run = run
sys.exit(cli.main(["doctor"]))
"""


def test_sigterm_lets_a_command_clean_up() -> None:
    done = subprocess.run([sys.executable, "-c", TERMINATED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (143, "cleaned\n", "rayvec: interrupted\n")


CALLED = """
import os, sys
from rayvec import cli

before = sys.stdout.errors, os.fstat(1)
code = cli.main(["--version"])
os._exit(code if before == (sys.stdout.errors, os.fstat(1)) else 1)
"""


def test_a_command_whose_output_has_no_reader_ends_quietly(tmp_path: Path) -> None:
    """A training that writes progress there makes a checkpoint first. A program that calls it keeps its own output."""
    run_dir = tmp_path / "a"
    train = [
        *RAYVEC,
        "train",
        "ppo",
        *TINY,
        f"--total-steps={10**8}",
        "--checkpoint-interval-s=1000",
        f"--run-dir={run_dir}",
    ]
    for arguments, errors, first in (
        ([*RAYVEC, "--version"], subprocess.PIPE, ""),
        ([sys.executable, "-c", CALLED], subprocess.PIPE, ""),
        ([*RAYVEC, "train", "ppo", "--help-all"], subprocess.PIPE, ""),
        (train, subprocess.STDOUT, "taking the first"),
    ):
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=errors, text=True) as command:
            assert command.stdout
            while first and first not in command.stdout.readline():
                pass
            command.stdout.close()
            assert command.wait(DEADLINE_S) == 141 and not (command.stderr and command.stderr.read())
    assert load_run(run_dir)[1]["progress"]["steps"] > 0


def test_train_resume_and_eval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], assert_refused: AssertRefused
) -> None:
    run_dir = tmp_path / "a"
    assert main(["train", "ppo", *TINY, "--eval-episodes", "6", "--run-dir", str(run_dir)]) == 0
    assert str(run_dir) in capsys.readouterr().out
    assert main(["eval", str(run_dir), "--episodes", "6"]) == 0
    printed = capsys.readouterr().out
    first = re.search(r"-?\d+\.\d+", printed)
    expected = json.loads((run_dir / "result.json").read_text())["eval_return_mean"]
    assert first and float(first[0]) == pytest.approx(expected, abs=0.005)
    assert first.start() == re.search(r"\d", printed).start()
    lengthen(run_dir, 64, 128)
    assert main(["train", "ppo", "--resume", str(run_dir), "--inference", "driver", "--num-steps=16"]) == 0
    assert load_run(run_dir)[1]["progress"]["steps"] == 128
    assert_refused(["train", "sac", "--resume", str(run_dir)], "keeps its directory and its algorithm, ppo.")
    assert_refused(["train", "--resume", str(run_dir), "--run-dir", "b"], "keeps its directory", "--init-from")
    another = ["train", "ppo", "--resume", str(run_dir), *"--gamma 0.98 --seed 3".split()]
    another += ["--learning-rate-schedule", "cosine"]
    assert_refused(another, "learning_rate_schedule is 'cosine', but 'linear' in the run")
    shorter = ["train", "--resume", str(run_dir), "--total-steps=100"]
    assert_refused(shorter, "total_steps is 100, and the run has taken 128 steps. Pass at least")
    assert load_config(run_dir).total_steps == 128
    for text in ("algorithm: ppo\nwings: 2\n", "algorithm: fly\n", "a: b: c\n"):
        (tmp_path / "run.yaml").write_text(text)
        assert_refused(["train", "--config=run.yaml"], "rayvec: run.yaml: ")


@pytest.mark.usefixtures("ray_cluster")
def test_a_run_moves_between_ray_and_this_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where `num_nodes` is not given, Ray is used, since it is initialised. Each command says what it uses."""
    run_dir = tmp_path / "a"
    settings = options({**SMALL, "workers_per_node": 1, "total_steps": 64, "eval_episodes": 4, "run_dir": run_dir})
    evaluate = ["eval", str(run_dir), "--episodes=4", "--num-nodes=1", "--workers-per-node=2"]
    for arguments, where in (
        (["train", "ppo", *settings], "on Ray (nodes: 2, workers: 2)"),
        (["train", "ppo", "--resume", str(run_dir), "--num-nodes=0"], "on this machine, without Ray"),
        (evaluate, "on Ray (nodes: 1, workers: 2)"),
    ):
        assert main(arguments) == 0
        assert f"rayvec: 4 environments {where}\n" in capsys.readouterr().err
