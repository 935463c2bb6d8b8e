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
from helpers.processes import DEADLINE_S, assert_nothing_left, running
from helpers.training_kit import SMALL, options

import rayvec
from rayvec.training.run_dir import load_run, read_metrics
from rayvec.training.stop_signals import Terminated

pytestmark = pytest.mark.timeout(600)  # commands in processes of their own, on a busy machine


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
        assert command.process.wait(DEADLINE_S) == 128 + signum
        assert_nothing_left(command)
    error = command.stderr.read_text()
    assert f"resume with: rayvec train ppo --resume {run_dir}" in error and "Traceback" not in error
    state = load_run(run_dir)[1]
    assert state["progress"]["steps"] == list(read_metrics(metrics))[-1]["steps"] >= 3 * 1024
    assert (run_dir / "learning_curve.png").stat().st_size > 0


class Terminates:
    def on_iteration(self, context: rayvec.RunContext) -> None:
        if context.progress.iterations == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def test_sac_stops_though_its_next_chunk_is_pending(tmp_path: Path) -> None:
    here = {"num_envs": 2, "num_nodes": 0, "workers_per_node": 0, "eval_episodes": 0}
    config = rayvec.SACConfig(env_id="Pendulum-v1", run_dir=tmp_path / "a", **here)  # type: ignore[arg-type]
    with pytest.raises(Terminated, match="resume with: rayvec train sac --resume"):
        rayvec.train(config, callbacks=[Terminates()])


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
