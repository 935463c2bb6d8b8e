"""The Ray that we run on: one that is there already, or a private one that leaves nothing behind.

A Ray that is already initialised is used and never shut down. An explicit address, or ``RAY_ADDRESS``, is
connected to. Otherwise a private local cluster is started, with a token and a temporary directory of its
own; it ends with the last environment that uses it, or with this process, however that ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import ray

from rayvec.errors import ConfigError

__all__ = ["CLUSTER_MARK", "RaySession", "end_reaper", "start_reaper"]

CLUSTER_MARK = "RAYVEC_CLUSTER"
"""The environment variable that names, to its processes, the directory of a private cluster."""
_REAPER = Path(__file__).with_name("_reaper.py")
_REAP_S = 20.0
_PROBE_S = 5.0
_TOKEN = secrets.token_hex(32)
"""What our private clusters ask of who connects. One for this process, since Ray reads it only once; without
it Ray would write one to the user's home."""
_SETTINGS = {
    "RAY_worker_niceness": "0",  # else a busy driver starves the workers
    "RAY_prestart_worker_first_driver": "0",  # one process for each core, of which we need one
}


class RaySession:
    """A share in this process's connection to Ray.

    Every share must be released; the last one ends what the first one began.

    Args:
        address: Of a running cluster. Without it, the Ray that is already initialised, ``RAY_ADDRESS``, or
            a private local cluster, in this order.

    Raises:
        ConfigError: There is no cluster at the address, or another one is already connected.
    """

    _lock = threading.Lock()
    _returned: ClassVar[deque[RaySession]] = deque()
    _shares = 0
    _reaper: subprocess.Popen[bytes] | None = None
    _ours = False

    def __init__(self, address: str | None = None) -> None:
        self._released = False
        try:
            with RaySession._lock:
                if RaySession._shares == 0:
                    RaySession._begin(address)
                else:
                    _check_same(address)
                RaySession._shares += 1
        finally:
            RaySession._settle()

    @classmethod
    def _begin(cls, address: str | None) -> None:
        if ray.is_initialized():
            _check_same(address)
            cls._ours = False
            return
        address = address or os.environ.get("RAY_ADDRESS")
        if address:
            _connect(address)
        else:
            cls._reaper = _start_private()
        cls._ours = True

    def release(self) -> None:
        """Gives the share back; may be called again, and by a finalizer that runs while this thread holds the lock."""
        if self._released:
            return
        self._released = True
        RaySession._returned.append(self)
        RaySession._settle()

    @classmethod
    def _settle(cls) -> None:
        """Takes shares back that were returned; where the lock is held, its holder does so when it has left it."""
        while cls._returned and cls._lock.acquire(blocking=False):
            try:
                with contextlib.suppress(IndexError):  # another thread was quicker
                    cls._returned.popleft()
                    cls._take_back()
            finally:
                cls._lock.release()

    @classmethod
    def _take_back(cls) -> None:
        cls._shares -= 1
        if cls._shares == 0 and cls._ours:
            ray.shutdown()
            if cls._reaper is not None:
                end_reaper(cls._reaper)
                cls._reaper = None
            cls._ours = False


def _check_same(address: str | None) -> None:
    """Refuses an address beside the cluster that is connected already."""
    connected = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", "local", connected):
        raise ConfigError(
            "One process is connected to one Ray cluster.",
            expected=f"no address, or that of the cluster which is connected ({connected})",
            got=repr(address),
            remedy="Leave the address out, or call ray.shutdown() first.",
        )


def _connect(address: str) -> None:
    try:
        host, _, port = address.rpartition(":")
        if port.isdigit():  # Ray itself would go on trying for minutes
            socket.create_connection((host, int(port)), _PROBE_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise ConfigError(
            "address names a running Ray cluster.",
            expected="a cluster that answers, such as 'auto' or 'host:6379'",
            got=f"{address!r} ({type(error).__name__}: {error})",
            remedy="Start one (ray start --head), or leave the address out for a private local one.",
        ) from error


def _start_private() -> subprocess.Popen[bytes]:
    directory = tempfile.mkdtemp(prefix="rayvec-")
    reaper = start_reaper(directory)
    try:
        with _environment(RAY_AUTH_TOKEN=_TOKEN, **_SETTINGS, **{CLUSTER_MARK: directory}):
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=directory,
            )
    except BaseException:
        ray.shutdown()
        end_reaper(reaper)
        raise
    return reaper


def start_reaper(directory: str) -> subprocess.Popen[bytes]:
    """Starts who clears up after a private cluster, also when this process is killed.

    Args:
        directory: Of the cluster; its processes have it in their environment as :data:`CLUSTER_MARK`.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_REAPER), CLUSTER_MARK, directory, str(os.getpid())],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def end_reaper(reaper: subprocess.Popen[bytes]) -> None:
    """Lets the reaper see that we are done; it clears up as it would after a crash, and ends."""
    assert reaper.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has been killed
        reaper.stdin.write(b".")
        reaper.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        reaper.wait(_REAP_S)


@contextlib.contextmanager
def _environment(**settings: str) -> Iterator[None]:
    """Sets environment variables for the processes that are started meanwhile.

    Ray itself turns authentication by token on for a cluster that it starts, and notes that in the
    environment too.
    """
    before = {name: os.environ.get(name) for name in (*settings, "RAY_AUTH_MODE")}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
