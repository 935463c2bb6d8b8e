"""Processes that hold what is measured: started, spoken to, ended; and the peers that there are."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import rayvec
from rayvec.errors import ConfigError, RayvecError

__all__ = ["COMPARE_PEERS", "NOT_INSTALLED", "SCALING_PEERS", "PeerProcess", "check_peers", "peer_process", "venvs"]

SCALING_PEERS: dict[str, float] = {
    "rayvec": 14.0,
    "floor": 9.0,
    "gymnasium-sync": 1.0,
    "gymnasium-async": 30.0,
    "tianshou-ray": 130.0,
    "tianshou-subproc": 60.0,
    "tianshou-shmem": 60.0,
}
"""Peers that step emulated environments, and MiB that each environment's process takes."""
COMPARE_PEERS = (*SCALING_PEERS, "stable-baselines3", "envpool", "pufferlib", "torchrl", "rllib")
NOT_INSTALLED = "not installed"
_END_S = 10.0
_TERM_S = 3.0
_KILL_S = 5.0


def check_peers(names: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Refuses peers that nobody knows.

    Raises:
        ConfigError: One is unknown.
    """
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(
            "--peer names what is measured beside rayvec.",
            expected=", ".join(known),
            got=", ".join(unknown),
            remedy="Correct the name, or leave it out.",
        )


def venvs(given: tuple[str, ...]) -> dict[str, str]:
    """Returns the Python interpreter of each peer that has a virtual environment of its own.

    Args:
        given: Texts ``name=path``; what the variable RAYVEC_BENCH_VENVS names, separated by colons, comes first.

    Raises:
        ConfigError: One has another form, or there is no interpreter.
    """
    found = {}
    for text in [*filter(None, os.environ.get("RAYVEC_BENCH_VENVS", "").split(":")), *given]:
        name, _, path = text.partition("=")
        python = Path(path) / "bin" / "python"
        if name not in COMPARE_PEERS or not python.exists():
            raise ConfigError(
                "--peer-venv names a peer and the virtual environment that it is installed in.",
                expected="name=path, with an interpreter at path/bin/python",
                got=text,
                remedy="Make it with benchmarks/make_peer_venvs.sh, or leave it out.",
            )
        found[name] = str(python)
    return found


class PeerProcess:
    """A :mod:`rayvec.bench.harness.host` in a process of its own.

    Args:
        peer: Which.
        environment: Variables beside those of this process.
        python: Interpreter; by default this one.
    """

    def __init__(self, peer: str, environment: Mapping[str, str], python: str = sys.executable) -> None:
        self.peer = peer
        self._directory = tempfile.TemporaryDirectory(prefix="rayvec-peer-", ignore_cleanup_errors=True)
        path = Path(self._directory.name)
        (path / "rayvec").symlink_to(Path(rayvec.__file__).parent)  # the package alone, not what lies beside it
        self._log = path / "log.txt"
        ask_read, ask_write = os.pipe()
        answer_read, answer_write = os.pipe()
        places = os.pathsep.join(filter(None, (str(path), os.environ.get("PYTHONPATH"))))
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, "-u", "-m", "rayvec.bench.harness.host", str(ask_read), str(answer_write)],
                env={**os.environ, "PYTHONWARNINGS": "ignore", **environment, "PYTHONPATH": places},
                pass_fds=(ask_read, answer_write),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=path,
                start_new_session=True,  # Ctrl-C is for this process
            )
        os.close(ask_read)
        os.close(answer_write)
        self._ask, self._answer = os.fdopen(ask_write, "w"), os.fdopen(answer_read)

    def do(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Asks for something and waits for the answer.

        Raises:
            RayvecError: It went wrong there.
        """
        with contextlib.suppress(BrokenPipeError):
            self._ask.write(json.dumps({"do": what, **arguments}) + "\n")
            self._ask.flush()
        line = self._answer.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"its process ended\n{self._tail()}"}
        if "error" in answer:
            raise RayvecError(f"{self.peer}: {answer['error']}")
        return answer

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-5:])

    def close(self) -> None:
        """Ends it, by force if it does not come to an end."""
        with contextlib.suppress(OSError, ValueError):
            self._ask.write(json.dumps({"do": "close"}) + "\n")
            self._ask.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._answer.close()
        self._directory.cleanup()

    def kill(self) -> None:
        """Ends it and what it started by force.

        All are told to end first: multiprocessing's tracker outlives the others, and removes the semaphores they leave.
        """
        with contextlib.suppress(ProcessLookupError):
            for number in (signal.SIGTERM, signal.SIGCONT):  # it may have been stopped
                os.killpg(self._process.pid, number)
            deadline = time.monotonic() + _TERM_S
            while time.monotonic() < deadline:
                self._process.poll()
                os.killpg(self._process.pid, 0)  # until nobody is left in the group
                time.sleep(0.02)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_KILL_S)


@contextlib.contextmanager
def peer_process(
    peer: str, environment: Mapping[str, str], task: Mapping[str, Any], python: str = sys.executable
) -> Iterator[tuple[PeerProcess, dict[str, Any]]]:
    """Starts a peer on a task; yields it with what it said, and ends it. One that is not installed says ``missing``.

    Raises:
        RayvecError: It can't be started, though it is installed.
    """
    process = PeerProcess(peer, environment, python)
    try:
        started = process.do("start", peer=peer, task=dict(task))
        yield process, started
    except BaseException:
        process.kill()
        raise
    finally:
        process.close()
