"""Processes that hold what is measured: how they start, answer and end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import rayvec
from rayvec.bench.harness.host import MARK
from rayvec.bench.hosts import without_ray
from rayvec.errors import ConfigError, RayvecError

__all__ = [
    "COMPARE_PEERS",
    "NOT_INSTALLED",
    "SCALING_PEERS",
    "PeerProcess",
    "check_peers",
    "marked_environment",
    "peer_process",
    "rates",
    "short_name",
    "venvs",
]

SCALING_PEERS = ("upper-bound", "gymnasium-sync", "gymnasium-async")
COMPARE_PEERS = (*SCALING_PEERS, "process-pool", "rayvec-tcp")
NOT_INSTALLED = "not installed"
_TASK = "rayvec.bench.harness.task:Task"
_END_S = 15.0
_TERM_S = 3.0
_KILL_S = 5.0


def check_peers(names: tuple[str, ...], known: tuple[str, ...], option: str = "--peer") -> None:
    """Refuses unknown peers of an option; ``module:name`` is looked up when it starts.

    Raises:
        ConfigError: One is unknown.
    """
    unknown = [name for name in names if name not in known and ":" not in name]
    if unknown:
        raise ConfigError(
            f"{option} names what is measured beside rayvec.",
            expected=f"{', '.join(known)}, or module:name of an adapter",
            got=", ".join(unknown),
            remedy="Correct the name, or leave it out. Peers of other libraries are in benchmarks/peers.py.",
        )


def short_name(peer: str) -> str:
    """Returns the name of a peer in tables.

    >>> short_name("peers:tianshou_ray"), short_name("upper-bound")
    ('tianshou-ray', 'upper-bound')
    """
    return peer.rpartition(":")[2].replace("_", "-")


def venvs(given: tuple[str, ...]) -> dict[str, str]:
    """Returns the Python interpreter of each peer that has a virtual environment of its own, by short name.

    Args:
        given: Texts ``name=path``; those in the variable RAYVEC_BENCH_VENVS, separated by colons, come first.

    Raises:
        ConfigError: One has another form, or there is no interpreter.
    """
    found = {}
    for text in [*filter(None, os.environ.get("RAYVEC_BENCH_VENVS", "").split(":")), *given]:
        name, _, path = text.partition("=")
        python = Path(path) / "bin" / "python"
        if not path or not python.exists():
            raise ConfigError(
                "--peer-venv names a peer and the virtual environment that it is installed in.",
                expected="name=path, with an interpreter at path/bin/python",
                got=text,
                remedy="Make it with benchmarks/make_peer_venvs.sh, or leave it out.",
            )
        found[name] = str(python)
    return found


def marked_environment() -> dict[str, str]:
    """Returns environment variables for the processes of one peer on this machine, with a mark of their own."""
    return {MARK: uuid.uuid4().hex, "RAY_ADDRESS": "", "RAY_worker_niceness": "0"}


class PeerProcess:
    """A :mod:`rayvec.bench.harness.host` in a process of its own.

    Args:
        peer: Which.
        environment: Variables in addition to those of this process; on another host, Ray's variables are left out.
        python: Interpreter; by default this one.
        enter: Words before the command, which run it on another host of this machine.
    """

    def __init__(
        self, peer: str, environment: Mapping[str, str], python: str = sys.executable, enter: Sequence[str] = ()
    ) -> None:
        self.peer = peer
        self._directory = tempfile.TemporaryDirectory(prefix="rayvec-peer-", ignore_cleanup_errors=True)
        path = Path(self._directory.name)
        (path / "rayvec").symlink_to(Path(rayvec.__file__).parent)  # the package without its neighbours
        self._log = path / "log.txt"
        places = os.pathsep.join(filter(None, (str(path), os.environ.get("PYTHONPATH"))))
        own = without_ray() if enter else os.environ
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*enter, "env", f"--chdir={path}", python, "-u", "-m", "rayvec.bench.harness.host"],
                env={**own, "PYTHONWARNINGS": "ignore", **environment, "PYTHONPATH": places, "TMPDIR": str(path)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C is for this process
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._ask, self._answer = self._process.stdin, self._process.stdout

    def do(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Sends a request and returns the answer.

        Raises:
            RayvecError: The host or the adapter failed.
        """
        with contextlib.suppress(BrokenPipeError):
            self._ask.write(json.dumps({"do": what, **arguments}) + "\n")
            self._ask.flush()
        line = self._answer.readline()
        if not line:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-5:])
            raise RayvecError(f"{self.peer}: its process exited\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RayvecError(f"{self.peer}: {answer['error']}")
        return answer

    def close(self) -> None:
        """Ends it, by force if it does not exit."""
        with contextlib.suppress(OSError, ValueError):
            self._ask.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._answer.close()
        self._directory.cleanup()

    def kill(self) -> None:
        """Ends it and what it started by force.

        All get SIGTERM first: multiprocessing's tracker exits last, and removes the semaphores of the others.
        """
        with contextlib.suppress(ProcessLookupError):
            for number in (signal.SIGTERM, signal.SIGCONT):  # it may have been stopped
                os.killpg(self._process.pid, number)
            deadline = time.monotonic() + _TERM_S
            while time.monotonic() < deadline:
                self._process.poll()
                os.killpg(self._process.pid, 0)  # raises once the group is empty
                time.sleep(0.02)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_KILL_S)


def rates(windows: Sequence[dict[str, Any]], references: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the rates of a row from its windows and, one for each, those of its reference."""
    found = {
        "steps_per_s": [each["steps_per_s"] for each in windows],
        "of_bound": [a["steps_per_s"] / b["steps_per_s"] for a, b in zip(windows, references, strict=True)],
        "steps_per_cpu_s": [each["steps"] / max(each["cpu_s"], 0.01) for each in windows],
    }
    medians = {name: statistics.median(values) for name, values in found.items()}
    return medians | {f"{name}_all": values for name, values in found.items()}


@contextlib.contextmanager
def peer_process(
    peer: str,
    environment: Mapping[str, str],
    task: Mapping[str, Any],
    python: str = sys.executable,
    task_type: str = _TASK,
    record: bool = False,
    enter: Sequence[str] = (),
) -> Iterator[tuple[PeerProcess, dict[str, Any]]]:
    """Starts a peer on a task; yields it with its first answer, and ends it. ``missing`` says that it isn't installed.

    Args:
        peer: Its name, or ``module:name`` of an adapter.
        environment: Variables in addition to those of this process.
        task: Fields of the task.
        python: Interpreter.
        task_type: Class of the task, ``module:name``.
        record: Whether environments record when they step, so that a window's time can be divided.
        enter: Words before the command, which run it on another host of this machine.

    Raises:
        RayvecError: It is installed but can't be started.
    """
    process = PeerProcess(short_name(peer), environment, python, enter)
    try:
        started = process.do("start", peer=peer, task=dict(task), task_type=task_type, record=record)
        yield process, started
    except BaseException:
        process.kill()
        raise
    finally:
        process.close()
