"""Connects to Ray: to an existing cluster, or to a private one that is removed afterwards.

If Ray is already initialised, a session uses it and never shuts it down. Otherwise it connects to the given address or
to ``RAY_ADDRESS``. Without an address, it starts a private local cluster with its own token and temporary directory.
The private cluster stops when its last session is released, or when this process exits or is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import ray

from rayvec.cluster.reachability import can_call_ray
from rayvec.errors import ConfigError

__all__ = ["CLUSTER_MARK", "RaySession", "end_reaper", "start_reaper"]

CLUSTER_MARK = "RAYVEC_CLUSTER"
"""Environment variable that holds the directory of a private cluster, set in the cluster's processes."""
_REAPER = Path(__file__).with_name("_reaper.py")
_REAP_S = 20.0
_PROBE_S = 5.0
_LONGEST_TEMP_DIR = 24
"""In bytes: Ray's socket paths begin with this directory, and the system limits them to 107 bytes."""
_TOKEN = secrets.token_hex(32)
"""Token that clients of our private clusters must present. Without it, Ray would write a token to the user's home
directory."""
_SETTINGS = {
    "RAY_worker_niceness": "0",  # at a lower priority, a busy driver starves the workers
    "RAY_prestart_worker_first_driver": "0",  # Ray would start one process for each core; we need one
}


class RaySession(contextlib.AbstractContextManager["RaySession"]):
    """A shared, reference-counted connection of this process to Ray.

    Every session must be released, as a ``with`` block does. Releasing the last one closes the connection that the
    first one opened.

    Args:
        address: Address of a running cluster. By default the already initialised Ray, ``RAY_ADDRESS``, or a private
            local cluster, in this order.

    Raises:
        ConfigError: No cluster answers at the address, this process is connected to another cluster, or the connection
            is that of Ray Client.
    """

    _lock = threading.Lock()
    _returned: ClassVar[deque[RaySession]] = deque()
    _shares = 0
    _reaper: subprocess.Popen[bytes] | None = None
    _ending: threading.Thread | None = None
    _ours: tuple[str, str] | None = None  # cluster and job of the connection that the first session opened, if it did

    def __init__(self, address: str | None = None) -> None:
        self._released = False
        try:
            with RaySession._lock:
                if ray.is_initialized():
                    _check_same(address)
                else:  # also if the program has shut it down since another session began
                    RaySession._begin(address)
                RaySession._shares += 1
        finally:
            RaySession._settle()

    @classmethod
    def _begin(cls, address: str | None) -> None:
        address = address or os.environ.get("RAY_ADDRESS")
        if address and address.startswith("ray://"):
            raise _client_error(address)
        with _keeping_sigterm():
            if address:
                _connect(address)
            else:
                cls._end_private()
                cls._reaper = _start_private()
        cls._ours = _connection()

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def release(self) -> None:
        """Releases the session; further calls do nothing.

        A finalizer may call it while this thread holds the lock.
        """
        if self._released:
            return
        self._released = True
        RaySession._returned.append(self)
        RaySession._settle()

    @classmethod
    def _settle(cls) -> None:
        """Counts released sessions. If the lock is held, its holder counts them after it releases the lock."""
        while cls._returned and cls._lock.acquire(blocking=False):
            try:
                with contextlib.suppress(IndexError):  # another thread has counted it
                    cls._returned.popleft()
                    cls._take_back()
            finally:
                cls._lock.release()

    @classmethod
    def _take_back(cls) -> None:
        cls._shares -= 1
        if cls._shares:
            return
        if cls._ours and ray.is_initialized() and _connection() == cls._ours:  # else the program has made its own
            if can_call_ray():
                ray.shutdown()
            else:  # it would wait for minutes, and hide the error that ends a run
                cls._ending = threading.Thread(target=ray.shutdown, name="rayvec-shutdown", daemon=True)
                cls._ending.start()
        cls._end_private()
        cls._ours = None

    @classmethod
    def _end_private(cls) -> None:
        if cls._reaper is not None:
            end_reaper(cls._reaper)
            cls._reaper = None
            _forget_token()


@atexit.register
def _end_without_head() -> None:
    """Ends a process whose cluster has lost its head, with exit code 1. Ray itself would wait at exit, or crash."""
    if RaySession._ending is not None and RaySession._ending.is_alive():
        logging.getLogger(__name__).warning(
            "the head of the Ray cluster does not answer: this process ends without ray.shutdown(), with exit code 1"
        )
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)


def _connection() -> tuple[str, str]:
    """Returns the address of the cluster that this process is connected to, and its job there."""
    context = ray.get_runtime_context()
    return context.gcs_address, context.get_job_id()


def _client_error(got: str) -> ConfigError:
    return ConfigError(
        "rayvec runs on a machine of the Ray cluster, not through Ray Client (ray://host:10001).",
        expected="the address of the cluster's head, such as 'host:6379', or 'auto'",
        got=got,
        remedy="Start the program on a machine of the cluster, send it there as a job or as a task of ray.remote, "
        "or unset RAY_ADDRESS and pass num_nodes=0 to use this machine without Ray.",
    )


def _check_same(address: str | None) -> None:
    """Raises ``ConfigError`` if the connection is that of Ray Client, or `address` names another cluster."""
    if ray.util.client.ray.is_connected():
        raise _client_error("a program that is connected by ray.init('ray://...')")
    connected = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", "local", connected):
        raise ConfigError(
            "One process is connected to one Ray cluster.",
            expected=f"no address, or that of the cluster which is connected ({connected})",
            got=repr(address),
            remedy="Leave the address out, or call ray.shutdown() first.",
        )


@contextlib.contextmanager
def _keeping_sigterm() -> Iterator[None]:
    """Keeps the program's own handler of SIGTERM, also while ``ray.init`` runs.

    Ray sets one that raises SystemExit, with the number of the signal as exit code. Ray's own code may swallow that
    exception; then the signal is lost. Its C++ code sets another one below Python's: it prints a stack trace, calls
    Python's handler, and aborts the process three seconds later.
    """
    before = signal.getsignal(signal.SIGTERM)
    if before in (None, signal.SIG_DFL) or threading.current_thread() is not threading.main_thread():
        yield
        return
    utils: Any = ray._private.utils
    original, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = original
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))  # in place of the C++ handler


def _forget_token() -> None:
    """Clears the token that Ray has cached: Ray reads it once per process, and the next cluster may have another."""
    loader: Any = getattr(ray._raylet, "AuthenticationTokenLoader", None)
    if loader is not None:  # not every version of Ray has tokens
        loader.instance().reset_cache()


def _connect(address: str) -> None:
    try:
        host, _, port = address.rpartition(":")
        if port.isdigit():  # Ray itself would retry for minutes
            socket.create_connection((host.strip("[]"), int(port)), _PROBE_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise ConfigError(
            "address names a running Ray cluster.",
            expected="a cluster that answers, such as 'auto' or 'host:6379'",
            got=f"{address!r} ({type(error).__name__}: {error})",
            remedy="Start one (ray start --head), or leave the address out for a private local one.",
        ) from error


def _start_private() -> subprocess.Popen[bytes]:
    directory = _short_temp_dir()
    reaper = start_reaper(directory)
    try:
        with _environment(RAY_AUTH_TOKEN=_TOKEN, **_SETTINGS, **{CLUSTER_MARK: directory}):
            _forget_token()
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=directory,
            )
    except BaseException as error:
        ray.shutdown()
        end_reaper(reaper)
        if not isinstance(error, Exception):
            raise
        raise ConfigError(
            "Without an address, environments on Ray start a private local cluster.",
            expected="Ray to start",
            got=f"{type(error).__name__}: {error}".rstrip("."),
            remedy="If this is about files, set TMPDIR to a directory that can be written. If Ray timed out, raise the "
            "limit of processes and threads (ulimit -u, or the container's). Or pass num_nodes=0 to do without Ray.",
        ) from error
    return reaper


def _short_temp_dir() -> str:
    """Makes a directory for a private cluster: below /tmp if the usual place has too long a name."""
    where = tempfile.gettempdir()
    where = where if len(os.fsencode(where)) <= _LONGEST_TEMP_DIR else "/tmp"
    try:
        return tempfile.mkdtemp(prefix="rayvec-", dir=where)
    except OSError as error:
        raise ConfigError(
            f"A private Ray cluster keeps its files in TMPDIR, or in /tmp if TMPDIR has more than {_LONGEST_TEMP_DIR} "
            "bytes.",
            expected="a directory that can be written",
            got=f"{where} ({error.strerror})",
            remedy="Set TMPDIR to one with a short name, or pass num_nodes=0 to do without Ray.",
        ) from error


def start_reaper(directory: str) -> subprocess.Popen[bytes]:
    """Starts the process that cleans up after a private cluster, even if this process is killed.

    Args:
        directory: Directory of the cluster; the cluster's processes have it in their environment as
            :data:`CLUSTER_MARK`.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_REAPER), CLUSTER_MARK, directory, str(os.getpid())],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def end_reaper(reaper: subprocess.Popen[bytes]) -> None:
    """Notifies the reaper, which cleans up as after a crash, and waits until it exits."""
    assert reaper.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the reaper was killed
        reaper.stdin.write(b".")
        reaper.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        reaper.wait(_REAP_S)


@contextlib.contextmanager
def _environment(**settings: str) -> Iterator[None]:
    """Sets environment variables for processes that are started inside the context.

    It also restores ``RAY_AUTH_MODE``, which Ray sets when it turns on token authentication for a cluster that it
    starts.
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
