"""Worker processes, by own instances of multiprocessing's fork server.

A fork server imports what workers need once, and forks a worker in a millisecond. There is one for each set of
preloaded modules: the server that multiprocessing itself holds belongs to the user's program. A worker gets the
environment variables, the working directory and ``sys.path`` that its owner has when the worker starts, but not its
``__main__``.

A worker is the leader of a session. It ends with its owner, whatever ends that: the kernel kills it when the fork
server ends, and a thread kills all of its session when the owner ends. What its environments have started ends with it,
but for its own resource tracker, which removes their shared memory and then ends by itself.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import functools
import io
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing import context, forkserver, reduction, resource_tracker, spawn, util
from multiprocessing.connection import wait
from multiprocessing.popen_forkserver import Popen
from multiprocessing.process import BaseProcess, parent_process
from pathlib import Path
from typing import Any, ClassVar

from rayvec.envs.owner_signals import leave_to_owner, restore_in_children

__all__ = [
    "PRELOAD",
    "Inherited",
    "OwnedProcess",
    "answer_refused_forks",
    "kill_with_parent",
    "remove_folder",
    "remove_folder_of",
]

PRELOAD = "RAYVEC_PRELOAD"
"""The environment variable that names to a fork server what it imports."""
_SERVER_MODULE = "rayvec.node.server_imports"
_STACK_SIGNAL = signal.SIGRTMAX - 1
"""The signal on which a worker writes its stack to a file that its owner reads."""
_STACK_BYTES = 1 << 16
_STACK_S = 1.0
_END_S = 5.0
_MAX_TEMPORARY = 70
"""The longest path of a temporary folder: that of a socket may have 107 bytes, and multiprocessing adds 33."""
_OWNER_END_S = 1.0
"""How long after its files an owner that ends may still be a process."""
_POLL_S = 0.01
_PR_SET_PDEATHSIG = 1
_SECRETS = ("RAY_AUTH_TOKEN",)
"""Environment variables that workers do not get: environments have no need of them."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""How many threads a process uses for linear algebra: one if unset, because there is already a worker for each core."""
_TRACKER = b"resource_tracker import main"
"""A part of the command line of a resource tracker."""
_NO_MAIN = ("init_main_from_path", "init_main_from_name")


def kill_with_parent(kills: bool) -> None:
    """Sets whether the kernel kills this process when the thread that has started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if kills else 0)


def _started_by(leader: int) -> set[int]:
    """Returns what the leader of a session has started, sessions of its children included, but no resource trackers."""
    parents, sessions = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)], sessions[int(entry.name)] = int(fields[1]), int(fields[3])
    found, size = {leader}, 0
    while len(found) > size:
        size = len(found)
        found |= {pid for pid in parents if parents[pid] in found or sessions[pid] in found}
    return {pid for pid in found - {leader} if not _is_tracker(pid)}


def _is_tracker(pid: int) -> bool:
    with suppress(OSError):
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _has_children(pid: int) -> bool:
    with suppress(OSError):
        return any(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return False


def _is_dead(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return True


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(OSError):  # it has ended
            os.kill(pid, signal.SIGKILL)


def _folder() -> str:
    """Returns the folder of the sockets of fork servers; "" in a process of multiprocessing, which has its parent's.

    It is in /tmp where the path of the temporary folder is too long for a socket.
    """
    if parent_process() is not None:
        return ""
    usual = tempfile.gettempdir()
    tempfile.tempdir = usual if len(os.fsencode(usual)) <= _MAX_TEMPORARY else "/tmp"
    try:
        return util.get_temp_dir()
    finally:
        tempfile.tempdir = usual


def remove_folder() -> None:
    """Removes the folder of the sockets of this process's fork servers. It starts no process by them afterwards."""
    shutil.rmtree(_folder(), ignore_errors=True)


def remove_folder_of(owner: int, folder: str) -> None:
    """Removes the folder of the sockets of fork servers, if the owner has ended and could not do so.

    Args:
        owner: Process id of the owner, which has started this process.
        folder: The folder; "" for none.
    """
    deadline = time.monotonic() + _OWNER_END_S
    while os.getppid() == owner:
        if time.monotonic() >= deadline:
            return
        time.sleep(_POLL_S)
    shutil.rmtree(folder, ignore_errors=True)


def answer_refused_forks() -> None:
    """Lets a fork server that the system refuses another process answer so, in place of a process id, and stay."""
    fork = os.fork

    @functools.wraps(fork)
    def answered() -> int:
        try:
            return fork()
        except OSError as error:
            return -(error.errno or errno.EAGAIN)

    os.fork = answered


def _environment() -> dict[str, str]:
    """Returns the environment variables of a worker that starts now."""
    variables = dict.fromkeys(_THREADS, os.environ.get("OMP_NUM_THREADS", "1")) | os.environ
    return {name: text for name, text in variables.items() if name not in _SECRETS}


class _Servers:
    """The fork servers of this process, by the modules that they have imported."""

    _lock = threading.Lock()
    _servers: ClassVar[dict[tuple[int, tuple[str, ...]], forkserver.ForkServer]] = {}

    @classmethod
    def running(cls, preload: Sequence[str]) -> forkserver.ForkServer:
        """Returns the fork server for some modules. It is started if it does not run."""
        with cls._lock:
            key = os.getpid(), tuple(preload)
            server = cls._servers.get(key)
            if server is None:
                server = cls._servers[key] = forkserver.ForkServer()
                server.set_forkserver_preload([_SERVER_MODULE])
            before = dict(os.environ)
            variables = _environment()
            os.environ.update({name: variables[name] for name in _THREADS})  # what the server imports reads them
            os.environ[PRELOAD] = json.dumps([[str(path) for path in sys.path], list(preload), os.getpid(), _folder()])
            for name in _SECRETS:
                os.environ.pop(name, None)
            try:
                server.ensure_running()
            finally:
                for name in {PRELOAD, *_THREADS, *_SECRETS}:
                    os.environ.pop(name, None)
                    if name in before:
                        os.environ[name] = before[name]
            return server


def _unlock_in_child() -> None:
    _Servers._lock = threading.Lock()  # another thread may have held it during the fork


os.register_at_fork(after_in_child=_unlock_in_child)


class _Popen(Popen):
    """A process that one of the own fork servers forks.

    Args:
        process: What it runs.
        server: The server.
    """

    def __init__(self, process: BaseProcess, server: Any) -> None:
        self._server = server
        super().__init__(process)

    def _launch(self, process_obj: Any) -> None:
        data = spawn.get_preparation_data(process_obj.name)
        for name in _NO_MAIN:  # functions of the script travel by value
            data.pop(name, None)
        buffer = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(data, buffer)
            reduction.dump(process_obj, buffer)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, to_child = self._server.connect_to_new_process(self._fds)  # type: ignore[attr-defined]
        parent_end = os.dup(to_child)
        self.finalizer = util.Finalize(self, util.close_fds, (parent_end, self.sentinel))  # type: ignore[attr-defined]
        with suppress(BrokenPipeError), open(to_child, "wb") as stream:  # the process id says why
            stream.write(buffer.getbuffer())


class OwnedProcess:
    """A process that ends with this one. Its start goes on when the constructor returns.

    Args:
        target: A function of a module. It runs with `args`.
        args: They are pickled; connections among them are handed over.
        name: Of the process.
        preload: Modules that the fork server imports.
        timeout_s: How long the fork server may import.

    Raises:
        EOFError, OSError: It can't be started.
    """

    def __init__(
        self, target: Callable[..., None], args: tuple[Any, ...], name: str, preload: Sequence[str], timeout_s: float
    ) -> None:
        self._stack_fd = os.memfd_create("rayvec-stack", os.MFD_CLOEXEC)
        self._server: Any = _Servers.running(preload)
        process = _Process(name, (_environment(), _Bond(os.getpid()), Inherited(self._stack_fd), target, args))
        self._popen, self._timeout_s = _Popen(process, self._server), timeout_s

    @functools.cached_property
    def pid(self) -> int:
        """Its process id, which is also that of its session. This waits until the fork server has forked it.

        Raises:
            TimeoutError, EOFError, OSError: It can't be started.
        """
        timeout_s = self._timeout_s
        if not wait([self._popen.sentinel], timeout_s):
            self._timeout_s = 0.0  # one such wait is enough
            os.kill(self._server._forkserver_pid, signal.SIGKILL)  # so that later processes get another one
            raise TimeoutError(f"the fork server has not imported its modules within {timeout_s:g} s")
        pid: int = forkserver.read_signed(self._popen.sentinel)
        if pid < 0:  # the number of an error: see `answer_refused_forks`
            self._timeout_s = 0.0
            raise OSError(-pid, os.strerror(-pid))
        self._popen.pid = pid
        return pid

    @property
    def sentinel(self) -> int:
        """A file descriptor that is readable once the process has ended, after its `pid` was read."""
        fd: int = self._popen.sentinel
        return fd

    @property
    def exitcode(self) -> int | None:
        """The exit code of the process, or the negative number of the signal that ended it; None while it runs."""
        code: int | None = self._popen.poll() if self.pid else None  # which the fork server sends before the code
        if code is None and _is_dead(self.pid):
            if not wait([self._popen.sentinel], _END_S):
                os.kill(self._server._forkserver_pid, signal.SIGKILL)  # it hangs: its end tells in place of a code
                wait([self._popen.sentinel], _END_S)
            code = self._popen.poll()
        return code

    def described_end(self) -> str:
        """Returns how the process has ended."""
        code = self.exitcode
        if code is not None and -code in set(map(int, signal.Signals)):
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"

    def stack(self) -> str:
        """Returns the stack of the process, as it is now; an empty text if the process does not write it."""
        os.ftruncate(self._stack_fd, 0)
        with suppress(ProcessLookupError):
            os.kill(self.pid, _STACK_SIGNAL)
        deadline, size = time.monotonic() + _STACK_S, 0
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            before, size = size, os.fstat(self._stack_fd).st_size
            if size and size == before:
                break
        return os.pread(self._stack_fd, _STACK_BYTES, 0).lstrip(b"\0").decode(errors="replace")

    def wait(self, timeout_s: float) -> bool:
        """Waits until the process has ended. Returns whether it has, or could not be started."""
        try:
            return bool(self.pid and wait([self._popen.sentinel], timeout_s)) and self.exitcode is not None
        except (EOFError, OSError):
            return True

    def kill(self) -> None:
        """Kills the process and what it has started, and waits until it has ended."""
        with suppress(EOFError, OSError):  # it has ended, or could not be started
            started = _started_by(self.pid) if _has_children(self.pid) else ()
            _kill([self.pid, *started])
            self.wait(_END_S)

    def release(self) -> None:
        """Ends what the process has left behind in its session, and closes the files. The process has ended."""
        with suppress(EOFError, OSError):
            os.killpg(self.pid, 0)  # else nothing is left
            _kill(_started_by(self.pid))
        if self._stack_fd >= 0:
            os.close(self._stack_fd)
            self._stack_fd = -1


class _Process(BaseProcess):
    """What the new process unpickles and runs."""

    _start_method = None  # the worker's own children start as those of the owner do

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        super().__init__(name=name, target=_main, args=args, daemon=False)


class Inherited:
    """A file descriptor that a new process gets."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (reduction.DupFd(self._fd),)


def _detached(duplicate: Any) -> int:
    fd: int = duplicate.detach()
    os.set_inheritable(fd, False)
    return fd


class _Bond:
    """Ends this process with its owner.

    Args:
        owner: Process id of the owner.
    """

    def __init__(self, owner: int) -> None:
        self._owner = owner

    def tie(self) -> None:
        """Lets this process, and what its environments start, end with the owner."""
        os.setsid()
        kill_with_parent(True)  # with the fork server, even if native code hangs
        try:
            self._watch = os.pidfd_open(self._owner)
        except ProcessLookupError:
            os._exit(1)
        threading.Thread(target=self._end_with_owner, name="rayvec-owner", daemon=True).start()

    def _end_with_owner(self) -> None:
        poll = select.poll()
        poll.register(self._watch, select.POLLIN)
        poll.poll()
        if _own_tracker() is not None:
            _kill(_started_by(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        os.killpg(0, signal.SIGKILL)


def _own_tracker() -> int | None:
    """Returns the process id of the resource tracker that this process has started; None if it has none."""
    pid: int | None = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    return pid


def _leave_tracker() -> None:
    """Lets this process, which has forked, start a resource tracker of its own when it needs one."""
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        os.close(tracker._fd)
    tracker._fd = tracker._pid = None


def _end_started() -> None:
    """Ends what this process has started. The resource tracker ends once it has removed what is left."""
    pid = _own_tracker()
    if _has_children(os.getpid()):
        _kill(_started_by(os.getpid()))
    if pid is not None:
        _leave_tracker()
        with suppress(OSError):
            wait([os.pidfd_open(pid)], _END_S)


def _main(environment: dict[str, str], bond: _Bond, stack_fd: int, target: Callable[..., None], args: Any) -> None:
    """Runs in the new process."""
    os.fork = getattr(os.fork, "__wrapped__", os.fork)  # as it is outside of the fork server
    _leave_tracker()
    bond.tie()
    faulthandler.register(_STACK_SIGNAL, file=stack_fd)
    restore_in_children()
    leave_to_owner(signal.SIGINT, signal.SIGTERM)
    os.environ.clear()
    os.environ.update(environment)
    target(*args)
    _end_started()
    util._exit_function()  # type: ignore[attr-defined]
    util._flush_std_streams()  # type: ignore[attr-defined]
    os._exit(0)  # threads of environments may never end
