"""Connects to Ray: to an existing cluster, or to a private one that is removed afterwards.

If Ray is already initialised, a session uses it and never shuts it down. Otherwise it connects to the given address or
to ``RAY_ADDRESS``. Without an address, it starts a private local cluster with its own token and temporary directory.
The private cluster stops when its last session is released, or when this process exits or is killed. The directory of a
cluster whose process was killed is removed by the next process that starts one there.

Ray itself notices after a minute that a node is gone. The operating system of a node accepts a connection to the port
of its raylet, however busy the node is, and even if the process is stopped. So the head must answer a request.
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
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray._private import worker
from ray.exceptions import RpcError

from rayvec.data.cores import usable_cores
from rayvec.errors import ConfigError, NodeLostError, first_line
from rayvec.fleet.deferred_signals import uninterrupted

__all__ = ["Address", "can_call_ray", "check_connected", "check_head", "put", "ray_session", "room_for", "unreachable"]

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
_ANSWER_S = 2.0
_REQUEST_S = 10.0
_MAX_THREADS = 64
Address = tuple[str, int]
_silent_heads: set[str] = set()
"""The addresses of the heads that gave no answer."""
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


class _Private(NamedTuple):
    """A private cluster: its directory, the locked file in it, and the process that has started it."""

    directory: str
    lock_fd: int
    pid: int


class _Connection:
    """The connection of this process to Ray.

    Attributes:
        lock: A finalizer may release a session while this thread begins another.
        num_sessions: How many sessions share it.
        private: The private cluster, if it runs.
        ours: The cluster and the job of the connection that the first session opened, if it did.
    """

    lock = threading.RLock()
    num_sessions = 0
    private: _Private | None = None
    ours: tuple[str, str] | None = None


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
    try:
        if address:
            _connect(address)
        else:
            _end_private()
            _start_private()
    finally:  # Ray's handler raises SystemExit, and the one of its C++ code aborts the process after three seconds
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
    _Connection.ours = _connection()


def _connection() -> tuple[str, str]:
    """Returns the address of the cluster that this process is connected to, and its job there."""
    context = ray.get_runtime_context()
    return context.gcs_address, context.get_job_id()


@atexit.register
def _end_private_cluster() -> None:
    """Ends the private cluster of a program that has not released its sessions."""
    if _Connection.private is not None and _Connection.private.pid == os.getpid():
        _end()


def _end() -> None:
    """Closes the connection, if a session has opened it: else it is that of the program."""
    with uninterrupted():  # processes that half a shutdown leaves write into the directory again
        if _Connection.ours and ray.is_initialized() and _connection() == _Connection.ours:
            if can_call_ray():
                ray.shutdown()
            else:  # it would wait without end, also when this process exits
                atexit.register(_exit_without_head)
        _Connection.ours = None
        _end_private()


def _exit_without_head() -> None:
    logging.getLogger(__name__).warning(
        "the head of the Ray cluster does not answer: this process ends without ray.shutdown(), with exit code 1"
    )
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


def _end_private() -> None:
    """Removes the directory of a private cluster, into which a process that is ending may still write."""
    if (private := _Connection.private) is None:
        return
    _Connection.private = None
    deadline = time.monotonic() + 1.0
    while os.path.exists(private.directory) and time.monotonic() < deadline:
        shutil.rmtree(private.directory, ignore_errors=True)
    os.close(private.lock_fd)
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
        ray.init(address=address, **_QUIET)
    except Exception as error:
        raise ConfigError(
            f"No Ray cluster answers at address={address!r} ({type(error).__name__}: {first_line(error)}). Start one "
            "(ray start --head), or leave the address out for a private local one."
        ) from error


def _start_private() -> None:
    where = tempfile.gettempdir()
    where = where if len(os.fsencode(where)) <= _LONGEST_TEMP_DIR else "/tmp"
    _remove_leftovers(where)
    before = {name: os.environ.get(name) for name in (*_SETTINGS, "RAY_AUTH_MODE")}  # Ray sets the last one
    try:
        directory = tempfile.mkdtemp(prefix="rayvec-", dir=where)
        _Connection.private = _Private(directory, _lock(directory), os.getpid())
        os.environ.update(_SETTINGS)
        _forget_token()
        cores = usable_cores()
        with uninterrupted():  # Ray ends the processes of a start that completes
            ray.init(address="local", num_cpus=cores, include_dashboard=False, _temp_dir=directory, **_QUIET)
    except BaseException as error:
        ray.shutdown()
        _end_private()
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


def unreachable(addresses: Mapping[str, Address]) -> set[str]:
    """Returns the ids of the nodes that do not accept a connection within two seconds."""
    with ThreadPoolExecutor(_MAX_THREADS) as threads:
        accepted = threads.map(_accepts, addresses.values())
        return {node_id for node_id, accepts in zip(addresses, accepted, strict=True) if not accepts}


def _accepts(address: Address) -> bool:
    try:
        socket.create_connection(address, _ANSWER_S).close()
    except OSError:
        return False
    return True


def can_call_ray() -> bool:
    """Whether Ray is initialised and its head answers: else calls of Ray wait for a minute or more, some without end.

    A head that gave no answer is not asked again: what closes many nodes waits for it once.
    """
    if not ray.is_initialized():
        return False
    connected: Any = worker.global_worker
    head = ray.get_runtime_context().gcs_address
    if head not in _silent_heads:
        try:
            connected.gcs_client.internal_kv_exists(b"", None, timeout=_REQUEST_S)
        except RpcError:
            _silent_heads.add(head)
    return head not in _silent_heads


def check_connected(cause: Exception | None = None) -> None:
    """Raises ``NodeLostError`` because of `cause` if Ray is not initialised. A call of Ray would join any cluster."""
    if not ray.is_initialized():
        raise NodeLostError(
            "Ray is not initialised: ray.shutdown() was called before close(). Make the environments or ranks again, "
            "and close them before ray.shutdown()."
        ) from cause


def check_head(cause: Exception | None = None) -> None:
    """Raises ``NodeLostError`` because of `cause` if the head of the cluster does not answer."""
    check_connected(cause)
    _silent_heads.clear()
    if not can_call_ray():
        if sys.excepthook is worker.custom_excepthook:  # it tells the head first, for which it waits without end
            sys.excepthook = worker.normal_excepthook
        raise NodeLostError(
            f"The head of the Ray cluster, {ray.get_runtime_context().gcs_address}, does not answer requests. Start "
            "the cluster again; a training resumes from its last checkpoint."
        ) from cause


@contextlib.contextmanager
def room_for(what: str) -> Iterator[None]:
    """Puts something into the object store, or gets it from there, in the block; `what` names it.

    Raises:
        ConfigError: The store is full, and so is the disk to which it moves what has no room.
    """
    try:
        yield
    except (ray.exceptions.OutOfDiskError, ray.exceptions.ObjectStoreFullError) as error:
        raise ConfigError(
            f"Ray's object store, and the disk of its temporary directory, have no room for {what}. Free that disk, "
            "start Ray with a larger --object-store-memory, or lower num_steps or num_envs."
        ) from error


def put(value: Any, what: str) -> Any:
    """Puts a value into the object store and returns its reference; `what` names it in errors.

    Raises:
        NodeLostError: Ray is not initialised.
        ConfigError: The store is full.
    """
    check_connected()
    with room_for(what):
        return ray.put(value)
