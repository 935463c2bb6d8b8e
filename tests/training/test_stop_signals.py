"""Ctrl-C and SIGTERM: at once or after the iteration, never lost, with their exit codes and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from helpers.processes import assert_nothing_left, running
from helpers.training_kit import SMALL, options, tiny

import rayvec
import rayvec.training.loop  # now, so that it keeps none of the functions that a test replaces
from rayvec.training.run_dir import load_run, read_metrics
from rayvec.training.stop_signals import Interrupts, Terminated

pytestmark = pytest.mark.timeout(600)  # commands in processes of their own, on a busy machine


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_the_first_press_in_the_loop_is_a_request_and_the_second_an_interrupt(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts, interrupts.deferred():
        assert not interrupts.requested
        press()
        assert interrupts.requested
        assert "\nfinishing the current iteration; Ctrl-C again stops at once\n" in capsys.readouterr().err
        press()


def test_sigterm_is_a_request_in_the_loop_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), Interrupts() as interrupts:
        assert signal.getsignal(signal.SIGTERM) is before
        with interrupts.deferred():
            signal.raise_signal(signal.SIGTERM)
            assert interrupts.requested and interrupts.kind is Terminated
            press()  # the first of its kind
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_of_yours_for_sigterm_stays() -> None:
    came = []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append(1))
    try:
        with Interrupts() as interrupts, interrupts.deferred():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [1] and not interrupts.requested


def test_an_interrupt_that_a_library_drops_is_raised_later() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        with contextlib.suppress(KeyboardInterrupt):
            press()
        with interrupts.deferred():
            reached.append("the loop")
    assert not reached
    with pytest.raises(KeyboardInterrupt), Interrupts(), contextlib.suppress(KeyboardInterrupt):
        press()


def test_an_interrupt_that_a_library_turns_into_an_error_is_one_again() -> None:
    error = ImportError("initialisation failed")
    with pytest.raises(KeyboardInterrupt) as caught, Interrupts():
        try:
            press()
        except KeyboardInterrupt:
            raise error from None
    assert caught.value.__cause__ is error


def test_errors_that_follow_a_request_stay_errors() -> None:
    with pytest.raises(OSError, match="disk"), Interrupts() as interrupts, interrupts.deferred():
        press()
        raise OSError("the disk is full")


@pytest.mark.parametrize(
    ("where", "signum"),
    [
        pytest.param("--num-nodes=0", signal.SIGINT, marks=pytest.mark.slow),  # test_many_seeds presses Ctrl-C too
        ("--num-nodes=0", signal.SIGTERM),
        pytest.param(  # test_rank_trainer presses Ctrl-C
            "--learners=decentralized --num-learners=2", signal.SIGTERM, marks=pytest.mark.slow
        ),
        pytest.param("--num-nodes=1", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("--num-nodes=1", signal.SIGTERM, marks=pytest.mark.slow),  # Ray's own handler ends a process
    ],
)
def test_a_signal_saves_says_how_to_resume_and_leaves_nothing(tmp_path: Path, where: str, signum: int) -> None:
    run_dir = tmp_path / "a"
    arguments = ["train", "ppo", *where.split(), "--total-steps", "1_000_000", "--run-dir", str(run_dir)]
    with running(arguments, tmp_path) as command:
        metrics = run_dir / "metrics.jsonl"
        command.wait_until(lambda: metrics.exists() and len(list(read_metrics(metrics))) >= 3)
        if signum == signal.SIGINT:
            os.killpg(command.process.pid, signum)  # Ctrl-C reaches the whole foreground group
        elif where == "--num-nodes=1":
            command.process.send_signal(signum)
        else:
            for pid in command.pids():  # schedulers such as Slurm reach every process of a job
                os.kill(pid, signum)
        assert command.process.wait(60) == 128 + signum
        assert_nothing_left(command)
    error = command.stderr.read_text()
    assert f"resume with: rayvec train ppo --resume {run_dir}" in error and "Traceback" not in error
    state = load_run(run_dir)[1]
    assert state["progress"]["steps"] == list(read_metrics(metrics))[-1]["steps"] >= 3 * 1024
    assert (run_dir / "learning_curve.png").stat().st_size > 0


STUCK = """
import time
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Stuck(CartPoleEnv):
    steps = 0

    def step(self, action):
        self.steps += 1
        while self.steps > 60:
            time.sleep(1)
        return super().step(action)

gymnasium.register("Stuck-v0", Stuck)
"""


@pytest.mark.slow
def test_the_second_ctrl_c_waits_for_no_environment(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    run_dir = tmp_path / "a"
    arguments = ["train", "impala", "--env-id=stuck:Stuck-v0", "--num-steps=50", "--num-nodes=1", "--no-probe"]
    with running([*arguments, f"--run-dir={run_dir}"], tmp_path) as command:
        metrics = run_dir / "metrics.jsonl"
        command.wait_until(lambda: metrics.exists() and len(list(read_metrics(metrics))) == 1)
        command.process.send_signal(signal.SIGINT)
        command.wait_until(lambda: "Ctrl-C again" in command.stderr.read_text())
        assert command.interrupt() == 130
        assert_nothing_left(command)
    assert command.stderr.read_text().endswith(
        f"\nrayvec: interrupted\nresume with: rayvec train impala --resume {run_dir}\n"
    )
    # The first checkpoint, or what the first Ctrl-C saved if it came before the loop waited for the next chunk.
    assert load_run(run_dir)[1]["progress"]["steps"] in (0, 800)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("num_nodes", "count"), [(0, 40), (1, 15)])
def test_an_interrupt_at_any_moment_of_a_run_ends_it(tmp_path: Path, num_nodes: int, count: int) -> None:
    """From the start of Python to the last line. The moments are drawn, with a seed, over the time of a whole run."""
    settings = {**SMALL, "total_steps": 2560, "eval_episodes": 4, "num_nodes": num_nodes}
    arguments = ["train", "ppo", *options(settings)]
    began_s = time.monotonic()
    with running(arguments, tmp_path) as command:
        assert command.process.wait(300) == 0, command.stderr.read_text()
    whole_s, moments, codes = time.monotonic() - began_s, random.Random(num_nodes), []
    for number in range(count):
        directory = tmp_path / str(number)
        directory.mkdir()
        with running(arguments, directory) as command:
            with contextlib.suppress(subprocess.TimeoutExpired):
                command.process.wait(moments.uniform(0, whole_s))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(command.process.pid, signal.SIGINT)
            codes.append(command.process.wait(300))
            assert_nothing_left(command)
        said = command.stderr.read_text()
        if codes[-1] == 0:
            assert "greedy return" in command.stdout.read_text(), said
        elif codes[-1] == -signal.SIGINT:  # before or after `main`: the signal ends Python, which shells show as 130
            assert "rayvec: 4 environments" not in said or "greedy return" in command.stdout.read_text(), said
        elif codes[-1] == 1:  # while Python itself starts
            assert "Fatal Python error: init_import_site" in said or "Could not import runpy module" in said, said
        else:
            assert codes[-1] == 130 and "rayvec: " in said and "Traceback" not in said, said
    assert 130 in codes, codes


def test_sigterm_while_a_run_directory_is_made_leaves_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayvec.training.checkpoint.save", lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Terminated):
        rayvec.train(tiny(tmp_path / "a"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("part", ["rank_trainer.open_env", "trainer.Trainer.evaluate"])
def test_sigterm_before_and_after_the_loop_ends_the_run_as_ctrl_c_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(f"rayvec.training.{part}", lambda *args, **_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Terminated) as caught:
        rayvec.train(tiny(tmp_path / "a"))
    has_begun = part == "trainer.Trainer.evaluate"
    assert (tmp_path / "a").exists() == has_begun
    assert any("resume with" in note for note in getattr(caught.value, "__notes__", [])) == has_begun


def test_sigterm_stays_sigterm_if_a_library_raises_a_keyboard_interrupt_of_its_own() -> None:
    """As Ray does, in whose calls the driver waits."""
    with pytest.raises(KeyboardInterrupt) as caught, Interrupts() as interrupts, interrupts.taking_sigterm():
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None
    assert caught.type is Terminated
