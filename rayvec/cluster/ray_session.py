"""Connects to Ray: to an existing cluster, or to a private one that is removed afterwards.

If Ray is already initialised, a session uses it and never shuts it down. Otherwise it connects to the given address or
to ``RAY_ADDRESS``. Without an address, it starts a private local cluster with its own token and temporary directory.
The private cluster stops when its last session is released, or when this process exits or is killed. The directory of a
cluster whose process was killed is removed by the next process that starts one there.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import ray

from rayvec.cluster.reachability import can_call_ray
from rayvec.data.cores import usable_cores
from rayvec.errors import ConfigError

__all__ = ["RaySession"]

_OWNER = "owner"
"""File in the directory of a private cluster that the process which has started it holds locked."""
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


class _Private(NamedTuple):
    """A private cluster: its directory, the locked file in it, and the process that has started it."""

    directory: str
    lock_fd: int
    pid: int

    def remove(self) -> None:
        """Removes the directory, into which a process that is ending may still write."""
        for _ in range(20):
            shutil.rmtree(self.directory, ignore_errors=True)
            if not os.path.exists(self.directory):
                break
            time.sleep(0.05)
        os.close(self.lock_fd)


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
    _private: ClassVar[_Private | None] = None
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
                cls._private = _start_private()
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
        if cls._private is not None:
            cls._private.remove()
            cls._private = None
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


@atexit.register
def _end_private_cluster() -> None:
    """Ends the private cluster of a program that has not released its sessions."""
    if RaySession._private is not None and RaySession._private.pid == os.getpid():
        RaySession._shares = 1
        RaySession._take_back()


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


def _start_private() -> _Private:
    directory = _short_temp_dir()
    private = _Private(directory, _lock(directory), os.getpid())
    try:
        with _environment(RAY_AUTH_TOKEN=_TOKEN, **_SETTINGS):
            _forget_token()
            ray.init(
                address="local",
                num_cpus=usable_cores(),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=directory,
            )
    except BaseException as error:
        ray.shutdown()
        private.remove()
        if not isinstance(error, Exception):
            raise
        raise ConfigError(
            "Without an address, environments on Ray start a private local cluster.",
            expected="Ray to start",
            got=f"{type(error).__name__}: {error}".rstrip("."),
            remedy="If this is about files, set TMPDIR to a directory that can be written. If Ray timed out, raise the "
            "limit of processes and threads (ulimit -u, or the container's). Or pass num_nodes=0 to do without Ray.",
        ) from error
    return private


def _short_temp_dir() -> str:
    """Makes a directory for a private cluster: below /tmp if the usual place has too long a name."""
    where = tempfile.gettempdir()
    where = where if len(os.fsencode(where)) <= _LONGEST_TEMP_DIR else "/tmp"
    _remove_leftovers(where)
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


def _lock(directory: str) -> int:
    """Locks a file in the directory until this process ends; returns its descriptor."""
    lock_fd = os.open(f"{directory}/{_OWNER}.new", os.O_CREAT | os.O_WRONLY)
    fcntl.flock(lock_fd, fcntl.LOCK_EX)
    os.rename(f"{directory}/{_OWNER}.new", f"{directory}/{_OWNER}")
    return lock_fd


def _remove_leftovers(where: str) -> None:
    """Removes directories of private clusters whose process has been killed."""
    for owner in Path(where).glob(f"rayvec-*/{_OWNER}"):
        with contextlib.suppress(OSError), owner.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(owner.parent, ignore_errors=True)


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
