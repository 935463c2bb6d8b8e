"""Interrupts or kills trainings at random moments, resumes each, and accounts for every one.

    PYTHONPATH=tests python tests/interrupts.py --signal SIGINT --count 500
    PYTHONPATH=tests python tests/interrupts.py --signal SIGKILL --count 500

A small PPO on worker processes without Ray saves a checkpoint after every update. Half of the signals come at a moment
drawn from the time that a whole run takes, imports included, and half come soon after an update. Then the same run is
resumed and gets the next signal, until it completes. After each signal the script checks the exit code, that the last
checkpoint is whole and not older than the one before, and that no process, shared memory or temporary file is left.
Each run that completes must have one line of metrics for every iteration.
``tests/training/test_stop_signals.py`` has a short form of this.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from helpers.processes import Command, assert_nothing_left, running
from helpers.training_kit import SMALL, options
from helpers.waiting import shm_names

from rayvec.training.run_dir import load_run, read_metrics

_STEPS, _TOTAL_STEPS = 64, 10_240
_LOOP_S = 0.5
_SETTINGS = {**SMALL, "total_steps": _TOTAL_STEPS, "eval_episodes": 4, "num_nodes": 0, "checkpoint_interval_s": 0}
_LIMIT_S = 300.0


class Runs:
    """Trainings, one after the other, each of which is resumed until it completes.

    Args:
        directory: An empty directory.
        number: The signal to send.
        seed: Of the moments.

    Attributes:
        outcomes: How often each thing happened.
        signals: How many runs a signal was sent to.
    """

    def __init__(self, directory: Path, number: signal.Signals, seed: int) -> None:
        self._directory, self._number, self._moments = directory, number, random.Random(seed)
        self._temporary = directory / "temporary"
        self._temporary.mkdir()
        os.environ["TMPDIR"] = str(self._temporary)
        self._completed, self._whole_s = 0, 0.0
        self.outcomes: Counter[str] = Counter()
        self.signals = 0

    @property
    def _run_dir(self) -> Path:
        return self._directory / f"run{self._completed}"

    def one(self, *, interrupt: bool = True) -> None:
        """Starts or resumes a training and sends it the signal at a random moment, or lets it complete."""
        before, begin_s = self._saved_steps(), time.monotonic()
        how = (
            [f"--resume={self._run_dir}"]
            if self._run_dir.exists()
            else [*options(_SETTINGS), f"--run-dir={self._run_dir}"]
        )
        with running(["train", "ppo", *how], self._directory) as command:
            was_running = interrupt and self._interrupt(command)
            code = command.process.wait(_LIMIT_S)
            assert_nothing_left(command)
            if code == 0:
                self._complete()
            else:
                assert was_running, command.stderr.read_text()
                self._account(code, command, before)
        self._whole_s = self._whole_s or time.monotonic() - begin_s
        assert not list(self._temporary.iterdir()), list(self._temporary.iterdir())

    def _interrupt(self, command: Command) -> bool:
        """Sends the signal unless the command has ended before the moment; returns whether it has not."""
        self.signals += 1
        if self.signals % 2:
            self._wait_for_an_update(command)
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.process.wait(self._moments.uniform(0, _LOOP_S if self.signals % 2 else self._whole_s))
        if command.process.poll() is not None:
            return False
        os.killpg(command.process.pid, self._number)
        return True

    def _wait_for_an_update(self, command: Command) -> None:
        """Waits until the run saves a checkpoint, or ends."""
        path = self._run_dir / "checkpoint.pt"
        before = path.stat().st_ino if path.exists() else 0
        while command.process.poll() is None and (not path.exists() or path.stat().st_ino == before):
            time.sleep(0.01)

    def _saved_steps(self) -> int:
        """Returns the steps of the last checkpoint, 0 without a run; raises if the checkpoint is damaged."""
        return load_run(self._run_dir)[1]["progress"]["steps"] if self._run_dir.exists() else 0

    def _account(self, code: int, command: Command, before: int) -> None:
        said, printed, saved = command.stderr.read_text(), command.stdout.read_text(), self._saved_steps()
        assert saved >= before, (saved, before)
        where = "with no new checkpoint" if saved == before else "after a new checkpoint"
        if self._number == signal.SIGKILL:
            assert code == -signal.SIGKILL and "Traceback" not in said, (code, said)
            self.outcomes[f"killed {where}"] += 1
        elif code == -signal.SIGINT:  # before or after `main`: the signal ends Python, which shells show as 130
            assert "rayvec: 4 environments" not in said or "greedy return" in printed, said
            self.outcomes["interrupted before or after main(), shown as 130"] += 1
        elif code == 1:
            assert "Fatal Python error" in said, said
            self.outcomes["interrupted while Python started, code 1"] += 1
        else:
            assert code == 130 and "rayvec: " in said and "Traceback" not in said, (code, said)
            metrics = self._run_dir / "metrics.jsonl"
            if metrics.exists():  # the checkpoint holds every iteration that was logged
                assert max((line["steps"] for line in read_metrics(metrics)), default=0) in (saved, saved + _STEPS)
            self.outcomes[f"interrupted {where}, code 130"] += 1

    def _complete(self) -> None:
        lines = [line for line in read_metrics(self._run_dir / "metrics.jsonl") if "eval/return_mean" not in line]
        steps = [line["steps"] for line in lines]
        assert steps == list(range(_STEPS, _TOTAL_STEPS + 1, _STEPS)), steps
        assert (self._run_dir / "result.json").exists() and not list(self._run_dir.glob("*.tmp"))
        self.outcomes["runs completed"] += 1
        self._completed += 1


def main() -> None:
    """Parses the command line, sends the signals, and prints what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signal", choices=["SIGINT", "SIGKILL"], default="SIGINT")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs us in the background has it ignored
    os.environ["OMP_NUM_THREADS"] = "1"
    before = shm_names()
    with tempfile.TemporaryDirectory(prefix="rvi-", dir="/tmp") as directory:
        runs = Runs(Path(directory), signal.Signals[args.signal], args.seed)
        runs.one(interrupt=False)
        while runs.signals < args.count:
            runs.one()
            if runs.signals % 25 == 0:
                print(f"{runs.signals} signals: {dict(runs.outcomes)}", flush=True)
        runs.one(interrupt=False)
    assert shm_names() <= before, shm_names() - before
    print(f"{dict(runs.outcomes)}\n{args.count} x {args.signal}, all accounted for, and nothing is left")


if __name__ == "__main__":
    sys.exit(main())
