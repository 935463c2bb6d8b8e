"""Worker processes, by own instances of multiprocessing's fork server.

A fork server imports what workers need once, and forks a worker in a millisecond. There is one for each set of
preloaded modules: the server that multiprocessing itself holds belongs to the user's program. A worker gets the
environment variables, the working directory and ``sys.path`` that its owner has when the worker starts, but not its
``__main__``.

A worker is the leader of a session. It ends with its owner, whatever ends that: the kernel kills it when the fork
server ends, and a thread kills all of its session when the owner ends. Shared memory that its environments forget is
removed by the owner's resource tracker, once the owner has ended.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing import Process, context, forkserver, reduction, resource_tracker, spawn, util
from multiprocessing.connection import wait
from multiprocessing.popen_forkserver import Popen
from multiprocessing.process import current_process, parent_process
from pathlib import Path
from typing import Any

from rayvec.envs.owner_signals import LEFT_TO_OWNER, leave_to_owner, restore_in_children
from rayvec.envs.pickled_parts import modules_that_run
from rayvec.errors import ConfigError
from rayvec.fleet.deferred_signals import uninterrupted
from rayvec.node.worker_share import WorkerShare

PRELOAD = "RAYVEC_PRELOAD"
"""The environment variable that names to a fork server what it imports."""
_NAME = "rayvec "
"""How the names of processes begin."""
_SERVER_MODULE = "rayvec.node.server_imports"
_END_S = 5.0
_POLL_S = 0.01
_UNKNOWN = 255
"""The exit code of a process whose fork server was killed: it may not have ended yet."""
_MAX_TEMPORARY = 70
"""The longest path of a temporary folder: that of a socket may have 107 bytes, and multiprocessing adds 33."""
_PR_SET_PDEATHSIG = 1
_SECRETS = ("RAY_AUTH_TOKEN",)
"""Environment variables that workers do not get: environments have no need of them."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""How many threads a process uses for linear algebra. If unset, one, or what its share says."""
_threads: dict[str, str] = {}
"""The threads that preloaded modules have started, by module."""
_servers: dict[tuple[Any, ...], forkserver.ForkServer] = {}
"""The fork servers of a process, by its id, their threads, and the modules that they have imported."""
_lock = threading.Lock()
FILES_OF_A_WORKER = 5
"""The socket, two of the process, the file for its stack, and a message."""
SPARE_FILES = 64


def allow_open_files(num_workers: int) -> None:
    """Raises this process's soft limit on open files for so many more workers, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + FILES_OF_A_WORKER * num_workers + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard)
        )


def kill_with_parent(kills: bool) -> None:
    """Sets whether the kernel kills this process when the thread that has started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if kills else 0)


def import_modules(names: Iterable[str]) -> None:
    """Imports modules in a fork server. Those that can't be imported are reported on standard error."""
    for name in names:
        before = threading.enumerate()
        try:
            importlib.import_module(name)
        except Exception as error:  # workers that need the module raise it
            got = f"{type(error).__name__}: {error}"
            print(f"rayvec: preload can't import {name!r}: {got}. Workers start without it.", file=sys.stderr)
        if started := [each.name for each in threading.enumerate() if each not in before]:
            _threads[name] = ", ".join(started)


def check_threads() -> None:
    """Checks, in a worker, that no preloaded module has started a thread, which would be missing here.

    Raises:
        ConfigError: One has.
    """
    for module, threads in _threads.items():
        raise ConfigError(
            f"The module {module!r} starts a thread when it is imported ({threads}). Workers are forked from the "
            "process that preloads it, and threads do not survive that. Remove it from preload."
        )


def check_not_importing() -> None:
    """Checks, in a process of this module, that no module which it imports starts others: they would do the same.

    Raises:
        ConfigError: One does.
    """
    modules = [name for name in modules_that_run() if name != "__main__"]
    if modules and current_process().name.startswith(_NAME):
        raise ConfigError(
            f"The module {modules[0]!r} makes environments when it is imported, and a worker imports it. Make them in "
            'a function, or after `if __name__ == "__main__":`.'
        )


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


def _server(preload: Sequence[str], threads: int) -> tuple[Any, dict[str, str]]:
    """Returns the fork server for some modules, which runs, and the environment variables of its next worker."""
    with _lock, uninterrupted():  # this process has the server's variables while it starts one
        resource_tracker.ensure_running()  # here: it unblocks the signals
        unset = dict.fromkeys(_THREADS, os.environ.get("OMP_NUM_THREADS", str(threads)))
        variables = {name: text for name, text in (unset | os.environ).items() if name not in _SECRETS}
        key = os.getpid(), tuple(variables[name] for name in _THREADS), tuple(preload)  # libraries read them once
        server = _servers.setdefault(key, forkserver.ForkServer())
        server.set_forkserver_preload([_SERVER_MODULE])
        added = {name: text for name, text in variables.items() if name not in os.environ}
        added[PRELOAD] = json.dumps([[str(path) for path in sys.path], list(preload), _folder()])
        hidden = {name: os.environ.pop(name) for name in _SECRETS if name in os.environ}
        os.environ.update(added)  # what the server imports reads them
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_OWNER)  # the server inherits it, and unblocks them
        try:
            server.ensure_running()
        finally:
            for name in added:
                del os.environ[name]
            os.environ.update(hidden)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return server, variables


class OwnedProcess(Popen):
    """A process that one of the own fork servers forks, and that ends with this one.

    `poll()` returns its exit code, or the negative number of the signal that ended it; None while it runs.
    `wait(timeout)` waits for that.

    Args:
        target: A function of a module. It runs with `args`.
        args: They are pickled; connections and sockets among them are handed over.
        name: Of the process, after its beginning.
        preload: Modules that the fork server imports.
        timeout_s: How long the fork server may import.
        share: What it gets of the machine.

    Attributes:
        pid: Its process id, which is also that of its session.
        sentinel: A file descriptor that is readable once the process has ended.

    Raises:
        EOFError, OSError: It can't be started.
        ConfigError: A module starts it that another such process imports.
    """

    def __init__(
        self,
        target: Callable[..., None],
        args: tuple[Any, ...],
        name: str,
        preload: Sequence[str],
        timeout_s: float,
        share: WorkerShare = WorkerShare(),  # noqa: B008  # it is immutable
    ) -> None:
        check_not_importing()
        self._timeout_s = timeout_s
        self._server, variables = _server(preload, share.threads)  # first: the process gets the folder of its socket
        own = variables | share.variables(), os.getpid(), target, args
        process = Process(target=_main, args=own, name=_NAME + name)
        deadline = time.monotonic() + _END_S
        while True:
            try:
                super().__init__(process)
                break
            except ConnectionRefusedError:  # the server was killed: it listens no more, and has not quite ended
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_S)
                self._server, _ = _server(preload, share.threads)

    def _launch(self, process_obj: Any) -> None:
        data = spawn.get_preparation_data(process_obj.name)
        for name in ("init_main_from_path", "init_main_from_name"):  # functions of the script travel by value
            data.pop(name, None)
        buffer = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(data, buffer)
            reduction.dump(process_obj, buffer)
        finally:
            context.set_spawning_popen(None)
        with uninterrupted():  # a process that gets nothing to run would wait as long as this one lives
            self.sentinel, to_child = self._server.connect_to_new_process(self._fds)  # type: ignore[attr-defined]
            files = os.dup(to_child), self.sentinel
            self.finalizer = util.Finalize(self, util.close_fds, files)  # type: ignore[attr-defined]
            with open(to_child, "wb") as stream:
                stream.write(buffer.getbuffer())
        if not wait([self.sentinel], self._timeout_s):
            os.kill(self._server._forkserver_pid, signal.SIGKILL)  # so that later processes get another one
            raise TimeoutError(f"the fork server has not imported its modules within {self._timeout_s:g} s")
        self.pid = forkserver.read_signed(self.sentinel)

    def kill(self) -> None:
        """Kills the process and what it has started, and waits until it has ended."""
        if (code := self.poll()) is None:
            _kill([*_started_by(self.pid), self.pid])
        if code in (None, _UNKNOWN) or not os.path.exists(f"/proc/{self.pid}"):  # else it is another process's number
            with suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
        self.wait(_END_S)


def _started_by(pid: int) -> list[int]:
    """Returns the children of a process, and theirs."""
    found: list[int] = []
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, path.read_text().split()):
                found += [child, *_started_by(child)]
    return found


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(OSError):  # it has ended
            os.kill(pid, signal.SIGKILL)


def _end_with(owner: int) -> None:
    """Waits until the owner ends; `owner` is a file descriptor. Then it ends this process and its session."""
    select.select([owner], [], [])
    os.killpg(0, signal.SIGKILL)


def _main(environment: dict[str, str], owner: int, target: Callable[..., None], args: Any) -> None:
    """Runs in the new process."""
    os.setsid()
    kill_with_parent(True)  # with the fork server, even if native code hangs
    try:
        watch = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_end_with, args=(watch,), name="rayvec-owner", daemon=True).start()
    restore_in_children()
    leave_to_owner()
    os.environ.clear()
    os.environ.update(environment)
    target(*args)
    _kill(_started_by(os.getpid()))
    util._exit_function()  # type: ignore[attr-defined]
    util._flush_std_streams()  # type: ignore[attr-defined]
    os._exit(0)  # threads of environments may never end
