"""The suite itself: Ctrl-C leaves no process, no shared memory and no temporary folder."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.reaper import processes
from helpers.waiting import shm_names

MARK = "RAYVEC_TEST_SUITE"
DEADLINE_S = 300.0
RUN = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
FILES = ["node/test_machine.py", "vector/test_vector_calls.py", "distributed/test_rank_group.py", "test_cli.py"]


def wait_until(condition: Callable[[], bool], output: Path) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, output.read_text()
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("options", [[], ["-n", "2", "--dist", "loadfile"]], ids=["one process", "two processes"])
def test_ctrl_c_leaves_nothing(options: list[str]) -> None:
    """Also while tests use the shared cluster, worker processes, ranks and commands."""
    before, moments = shm_names(), random.Random(len(options))
    with tempfile.TemporaryDirectory(prefix="rvi-", dir="/tmp") as directory:
        tmp, output = Path(directory, "tmp"), Path(directory, "output.txt")
        tmp.mkdir()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with output.open("w") as file:
            process = subprocess.Popen(
                [*RUN, *options, *(str(Path(__file__).parent / name) for name in moments.sample(FILES, len(FILES)))],
                env={**inherited, "TMPDIR": str(tmp), "PYTEST_DEBUG_TEMPROOT": str(tmp), MARK: directory},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            passed = moments.randrange(1, 60)
            wait_until(lambda: output.read_text().count("PASSED") >= passed or process.poll() is not None, output)
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(DEADLINE_S) == pytest.ExitCode.INTERRUPTED, output.read_text()
            wait_until(lambda: not processes(MARK, directory), output)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert not [path for path in tmp.rglob("*") if not path.name.startswith("pytest-")]
        wait_until(lambda: shm_names() <= before, output)
