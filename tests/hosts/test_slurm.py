"""The Slurm script of the examples, with a stub of Slurm that runs its tasks on hosts in namespaces."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.hosts import long, on_hosts
from helpers.network import DEADLINE_S, Network, kill_group, without_ray

from rayvec.training.run_dir import read_metrics

pytestmark = on_hosts
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "cluster" / "slurm.sh"
SRUN = """#!/bin/bash
# Runs a command on each host; its exit code is the first one that is not 0.
for number in $(seq "$SLURM_JOB_NUM_NODES"); do
    enter="STUB_ENTER_$number"
    RAY_TMPDIR="$STUB_TMP/$number" SLURM_PROCID=$((number - 1)) ${!enter} "$@" & tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit "${code:-0}"
"""
SCONTROL = """#!/bin/bash
if [ "$1 $2" = "show hostnames" ]; then tr , '\\n' <<<"$3"; else echo "$@" >> "$STUB_TMP/requeued"; fi
"""


class Job:
    """A job of two nodes: hosts that exist while it runs, and the script."""

    def __init__(self, directory: Path, stub_tmp: Path, *arguments: str) -> None:
        self.network = Network(2)
        environment = without_ray() | {
            "PATH": f"{directory}:{ROOT / '.venv' / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_CPUS_PER_TASK": "2",
            "SLURM_JOB_NODELIST": ",".join(host.address for host in self.network.hosts),
            "SLURM_SUBMIT_DIR": str(directory),
            "STUB_TMP": str(stub_tmp),
            "RECONNECT_S": "3",
        }
        for number, host in enumerate(self.network.hosts, 1):
            environment[f"STUB_ENTER_{number}"] = " ".join(host.enter)
            (stub_tmp / str(number)).mkdir(exist_ok=True)
        self.output = directory / "output.txt"
        with self.output.open("a") as output:
            self.process = subprocess.Popen(
                ["bash", str(SCRIPT), *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                text=True,
                start_new_session=True,
            )

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for `condition`; fails if the script ends before."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline_s, self.output.read_text()
            time.sleep(0.05)

    def end(self) -> None:
        """Ends the job at once, as a node failure does."""
        self.network.close()
        kill_group(self.process)


@pytest.fixture
def stub_tmp() -> Iterator[Path]:
    """A directory with a short name, for sockets of Ray."""
    with tempfile.TemporaryDirectory(prefix="s-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


@long
def test_a_job_that_is_requeued_resumes(tmp_path: Path, stub_tmp: Path) -> None:
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    run_dir = tmp_path / "runs" / "slurm-7"
    metrics = run_dir / "metrics.jsonl"
    small = ["--num-envs=4", "--num-steps=32", "--minibatch-size=64", "--eval-episodes=2", "--checkpoint-interval-s=1"]
    arguments = ["--env-id=CartPole-v1", "--total-steps=4000", *small]
    first = Job(tmp_path, stub_tmp, *arguments)
    try:
        first.wait_until(lambda: metrics.exists() and len(list(read_metrics(metrics))) > 3)
        first.process.send_signal(signal.SIGUSR1)  # Slurm's warning before the time limit
        first.wait_until((stub_tmp / "requeued").exists)
        assert (stub_tmp / "requeued").read_text() == "requeue 7\n"
        assert first.process.poll() is None
    finally:
        first.end()
    token = run_dir.with_suffix(".token")
    assert token.stat().st_mode & 0o77 == 0 and token.read_text().strip() not in first.output.read_text()
    second = Job(tmp_path, stub_tmp, *arguments)
    try:
        assert second.process.wait(3 * DEADLINE_S) == 0, second.output.read_text()
    finally:
        second.end()
    assert "greedy return" in second.output.read_text() and (run_dir / "result.json").exists()
    steps = [line["steps"] for line in read_metrics(metrics)]
    assert steps == sorted(set(steps)) and steps[-1] >= 4000
