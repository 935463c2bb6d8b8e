"""Connects to Ray: to an existing cluster, or to a private one that is removed afterwards.

If Ray is already initialised, a session uses it and never shuts it down. Otherwise it connects to the given address or
to ``RAY_ADDRESS``. Without an address, it starts a private local cluster with its own token and temporary directory.
The private cluster stops when its last session is released, or when this process exits or is killed. The directory of a
cluster whose process was killed is removed by the next process that starts one there.

If the head of the cluster dies, Ray ends this process after a minute. If it is stopped, calls of Ray wait for longer.
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
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray

from rayvec.data.cores import usable_cores
from rayvec.errors import ConfigError, NodeLostError, first_line
from rayvec.fleet.deferred_signals import uninterrupted

_OWNER = "owner"
"""File in the directory of a private cluster that the process which has started it holds locked."""
_PROBE_S = 5.0
_LONGEST_TEMP_DIR = 24
"""In bytes: Ray's socket paths begin with this directory, and the system limits them to 107 bytes."""
_SETTINGS = {
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # without it, Ray would write a token to the user's home directory
    "RAY_worker_niceness": "0",  # at a lower priority, a busy driver starves the workers
    "RAY_prestart_worker_first_driver": "0",  # Ray would start one process for each core; we need one
}
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


class _Connection:
    """The connection of this process to Ray.

    Attributes:
        lock: A finalizer may release a session while this thread begins another.
        num_sessions: How many sessions share it.
        ends: Ends the connection that the first session opened.
        pid: The process that opened it.
    """

    lock = threading.RLock()
    num_sessions = 0
    ends = contextlib.ExitStack()
    pid = 0


def ray_session(address: str | None = None) -> contextlib.ExitStack:
    """Connects this process to Ray. The connection is shared, and its users are counted.

    Every session must be closed, as a ``with`` block does. Closing the last one closes the connection that the first
    one opened.

    Args:
        address: Address of a running cluster. By default the already initialised Ray, ``RAY_ADDRESS``, or a private
            local cluster, in this order.

    Raises:
        ConfigError: No cluster answers at the address, this process is connected to another cluster, or the connection
            is that of Ray Client.
    """
    with _Connection.lock, contextlib.ExitStack() as stack:
        _Connection.num_sessions += 1
        stack.callback(_release)
        if ray.is_initialized():
            _check_same(address)
        else:  # also if the program has shut it down since another session began
            _begin(address or os.environ.get("RAY_ADDRESS"))
        return stack.pop_all()


def _release() -> None:
    with _Connection.lock:
        _Connection.num_sessions -= 1
        if _Connection.num_sessions == 0:
            _end()


def _begin(address: str | None) -> None:
    if address and address.startswith("ray://"):
        raise _client_error(address)
    handler = signal.getsignal(signal.SIGTERM)
    _end()
    try:
        with contextlib.ExitStack() as ends:
            if address:
                _connect(address)
            else:
                _start_private(ends)
            ends.callback(_shut_down, _connection())
            _Connection.ends, _Connection.pid = ends.pop_all(), os.getpid()
    finally:  # Ray's handler raises SystemExit, and the one of its C++ code aborts the process after three seconds
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _connection() -> tuple[str, str]:
    """Returns the address of the cluster that this process is connected to, and its job there."""
    context = ray.get_runtime_context()
    return context.gcs_address, context.get_job_id()


@atexit.register
def _end_unreleased() -> None:
    """Ends the connection of a program that has not released its sessions."""
    if _Connection.pid == os.getpid():
        _end()


def _end() -> None:
    with uninterrupted():  # processes that half a shutdown leaves write into the directory again
        _Connection.ends.close()


def _shut_down(connection: tuple[str, str]) -> None:
    """Closes a connection, unless the program has closed it and opened another."""
    if ray.is_initialized() and _connection() == connection:
        ray.shutdown()


def _remove(directory: str, lock_fd: int) -> None:
    """Removes the directory of a private cluster, into which a process that is ending may still write."""
    deadline = time.monotonic() + 1.0
    while os.path.exists(directory) and time.monotonic() < deadline:
        shutil.rmtree(directory, ignore_errors=True)
    os.close(lock_fd)
    _forget_token()


def _forget_token() -> None:
    """Clears the token that Ray has cached: Ray reads it once per process, and the next cluster may have another."""
    loader: Any = getattr(ray._raylet, "AuthenticationTokenLoader", None)
    if loader is not None:  # not every version of Ray has tokens
        loader.instance().reset_cache()


def _client_error(found: str) -> ConfigError:
    return ConfigError(
        f"rayvec runs on a machine of the Ray cluster, not through Ray Client ({found}). Start the program there, send "
        "it there as a job or as a task of ray.remote, or unset RAY_ADDRESS and pass num_nodes=0 to use this machine "
        "without Ray."
    )


def _check_same(address: str | None) -> None:
    """Raises ``ConfigError`` if the connection is that of Ray Client, or `address` names another cluster."""
    if ray.util.client.ray.is_connected():
        raise _client_error("ray.init('ray://...') has connected this program")
    connected = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", "local", connected):
        raise ConfigError(
            f"address={address!r} was passed, but this process is connected to the Ray cluster at {connected}. Leave "
            "the address out, or call ray.shutdown() first."
        )


def _connect(address: str) -> None:
    try:
        host, _, port = address.rpartition(":")
        if port.isdigit():  # Ray itself would retry for minutes
            socket.create_connection((host.strip("[]"), int(port)), _PROBE_S).close()
        # A head that acknowledges nothing is lost after 10 s, by Ray's default after two minutes. `ray.init` reads it.
        # More frequent pings would not do: Ray then ends calls of actors with "Too many pings".
        os.environ.setdefault("RAY_grpc_client_keepalive_timeout_ms", "10000")
        ray.init(address=address, **_QUIET)
    except Exception as error:
        raise ConfigError(
            f"No Ray cluster answers at address={address!r} ({type(error).__name__}: {first_line(error)}). Start one "
            "(ray start --head), or leave the address out for a private local one."
        ) from error


def _start_private(ends: contextlib.ExitStack) -> None:
    where = tempfile.gettempdir()
    where = where if len(os.fsencode(where)) <= _LONGEST_TEMP_DIR else "/tmp"
    _remove_leftovers(where)
    before = {name: os.environ.get(name) for name in (*_SETTINGS, "RAY_AUTH_MODE")}  # Ray sets the last one
    try:
        directory = tempfile.mkdtemp(prefix="rayvec-", dir=where)
        ends.callback(_remove, directory, _lock(directory))
        os.environ.update(_SETTINGS)
        _forget_token()
        cores = usable_cores()
        with uninterrupted():  # Ray ends the processes of a start that completes
            ray.init(address="local", num_cpus=cores, include_dashboard=False, _temp_dir=directory, **_QUIET)
    except BaseException as error:
        ray.shutdown()
        if not isinstance(error, Exception):
            raise
        raise ConfigError(
            f"A private Ray cluster with its files in {where} could not start ({type(error).__name__}: "
            f"{str(error).rstrip('.')}). Set TMPDIR to a directory with a short name that can be written, or raise the "
            "limit of processes and threads (ulimit -u, or the container's). num_nodes=0 does without Ray."
        ) from error
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


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


def check_connected(cause: Exception | None = None) -> None:
    """Raises ``NodeLostError`` because of `cause` if Ray is not initialised. A call of Ray would join any cluster."""
    if not ray.is_initialized():
        raise NodeLostError(
            "Ray is not initialised: ray.shutdown() was called before close(). Make the environments or ranks again, "
            "and close them before ray.shutdown()."
        ) from cause
