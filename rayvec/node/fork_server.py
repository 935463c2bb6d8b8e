"""A process that forks workers: it has imported what they need, so that each takes milliseconds and a few megabytes.

The fork server is single-threaded and speaks through a socket without a name. It watches the process that started it
and ends with it, however that ends. Each worker leads a process group of its own; when a worker ends, the fork server
kills what is left of that group, such as subprocesses of its environments. The kernel kills the workers when the fork
server itself is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import ClassVar

from rayvec.node.pipe import MessagePipe, ProcessWatch

__all__ = ["ForkServer", "serve"]

_PID = struct.Struct("<q")
_END_S = 5.0
_PR_SET_PDEATHSIG = 1
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
"""Workers have one thread for linear algebra each: there is a worker for every core already."""
_START = """
import sys
sys.path[:] = {path!r}
from rayvec.node.fork_server import serve
serve({fd}, {owner}, {preload!r})
"""


class ForkServer:
    """The owner's side of a fork server; :meth:`shared` returns the one of this process.

    Args:
        preload: Modules that it imports once, beside those that every worker needs.
    """

    _lock = threading.Lock()
    _shared: ClassVar[dict[tuple[int, tuple[str, ...]], ForkServer]] = {}

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._owner = os.getpid()
        self._turn = threading.Lock()
        self._socket, theirs = socket.socketpair()
        command = _START.format(path=sys.path, fd=theirs.fileno(), owner=self._owner, preload=tuple(preload))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", command],  # type: ignore[attr-defined]
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_ONE_THREAD},
                start_new_session=True,
            )
        self._watch = ProcessWatch(self._process.pid)

    @classmethod
    def shared(cls, preload: Sequence[str] = ()) -> ForkServer:
        """Returns this process's fork server with these modules; starts it if it is not running."""
        with cls._lock:
            key = os.getpid(), tuple(preload)
            server = cls._shared.get(key)
            if server is None or server.ended():
                if server is not None:
                    server.stop()
                server = cls._shared[key] = cls(preload)
            return server

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ended(self) -> bool:
        """Whether it has ended, and its workers with it."""
        return self._watch.ended()

    def fork(self, spec: bytes, fds: Sequence[int]) -> tuple[int, ProcessWatch]:
        """Forks a worker.

        Args:
            spec: The pickled :class:`~rayvec.node.worker.WorkerSpec`.
            fds: Descriptors for :func:`~rayvec.node.worker.worker_main`.

        Returns:
            The worker's process id and a watch on it.

        Raises:
            EOFError: The fork server has ended.
        """
        with self._turn:
            pipe = MessagePipe(self._socket, self._watch)
            pipe.send(spec, fds)
            pid, pidfds = pipe.receive()
        return _PID.unpack(pid)[0], ProcessWatch(pidfd=pidfds[0])

    def stop(self) -> None:
        """Ends it, and with it every worker that is left."""
        if os.getpid() != self._owner:
            return
        self._socket.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._watch.close()


@atexit.register
def _stop_all() -> None:
    for server in ForkServer._shared.values():
        server.stop()


def serve(fd: int, owner: int, preload: Sequence[str]) -> None:
    """Forks workers on request until the owner closes its socket or ends; runs in the fork server.

    Args:
        fd: Of the socket.
        owner: Process id of the process that started this one.
        preload: Modules to import first.
    """
    from rayvec.node.worker import worker_main

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in preload:
        with contextlib.suppress(Exception):  # the worker that needs it raises
            importlib.import_module(name)
    pipe, watch = MessagePipe(socket.socket(fileno=fd)), ProcessWatch(owner)
    children: dict[int, int] = {}  # process ids by pidfd
    while not watch.ended():
        poll = select.poll()
        for each in (pipe.fileno(), watch.fileno(), *children):
            poll.register(each, select.POLLIN)
        ready = {each for each, _ in poll.poll()}
        for pidfd in ready & children.keys():
            _reap(children.pop(pidfd), pidfd)
        if pipe.fileno() not in ready:
            continue
        try:
            spec, fds = pipe.receive()
        except EOFError:
            break
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            for each in (pipe.fileno(), watch.fileno(), *children):
                os.close(each)
            _run(worker_main, server, spec, fds)
        for each in fds:
            os.close(each)
        pidfd = os.pidfd_open(pid)
        children[pidfd] = pid
        with contextlib.suppress(BrokenPipeError):  # the owner has just ended
            pipe.send(_PID.pack(pid), [pidfd])
    for pidfd, pid in children.items():
        _reap(pid, pidfd)


def _reap(pid: int, pidfd: int) -> None:
    """Kills what is left of a worker's process group, and the worker itself; its id is free after this."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # it may not lead its group yet
    os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.close(pidfd)


def _run(target: object, server: int, spec: bytes, fds: Sequence[int]) -> None:
    """Becomes a worker: runs its target and exits."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server:  # else it ended before the kernel was asked to end us with it
            os.setsid()
            assert callable(target)
            target(pickle.loads(spec), fds)
            code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
