"""Fork servers. They import what a process needs once, so that workers and ranks start in milliseconds.

Each process has at most one *root* fork server for each set of preloaded modules. It starts on demand and exits a few
seconds after the last pool is closed. The root forks a *branch* for each pool, and the branch forks that pool's
workers. The ranks of this machine have a branch in the same way. All of them communicate through unnamed sockets.

No process outlives its pool. A branch exits when its pool is closed or when the owner's process ends for any reason.
Before it exits, it kills its workers and all processes that their environments started. When a worker exits, the
branch kills the rest of the worker's process group. If a branch is killed, the kernel kills its workers, and the root
kills the remaining processes. Only Python's resource trackers are not killed at once: they remove the shared memory of
the killed processes, and then exit by themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import fcntl
import gc
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from rayvec.envs.owner_signals import fork_with_signals_blocked, leave_to_owner, restore_in_children
from rayvec.fleet.deferred_signals import Uninterrupted
from rayvec.node.pipe import MessagePipe
from rayvec.node.preloaded import import_modules
from rayvec.node.process_watch import ProcessWatch, readable
from rayvec.pools.base import NotReady

__all__ = ["ForkServer", "end_with_parent", "python_command", "serve"]

_PID = struct.Struct("<q")
_END_S = 5.0
_START_S = 300.0
_IDLE_S = 3.0
"""How long a root without a branch waits before it exits."""
_LOOK_S = 1.0
"""The interval at which a wait for a fork checks whether a signal has come."""
_TRACKER_S = 1.0
"""How long a server that ends waits for resource trackers before it kills them."""
_TRACKER = b".resource_tracker import main"
"""In the command line of the resource trackers of multiprocessing and of joblib."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SECRETS = {"RAY_AUTH_TOKEN"}
"""Environment variables that workers do not get: environments have no need of them."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""How many threads a process uses for linear algebra: one if unset, because there is already a worker for each core."""
_START = """
import os
try:
    pid = os.fork()
except OSError as error:
    os._exit(error.errno)
if pid:
    os._exit(0)
from rayvec.node.fork_server import serve
serve({fd}, {owner}, {preload!r}, is_root=True)
"""


def python_command(code: str) -> list[str]:
    """Returns the command that executes code in a new interpreter with the flags and the ``sys.path`` of this one."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", f"import sys\nsys.path[:] = {[*map(str, sys.path)]!r}\n{code}"]


class ForkServer:
    """The owner's side of a fork server.

    Args:
        sock: The socket to the server.
        pid: The server's process id.
        watch: The watch on the server's process.
    """

    _lock = threading.Lock()
    _roots: ClassVar[dict[tuple[Any, ...], ForkServer]] = {}

    def __init__(self, sock: socket.socket, pid: int, watch: ProcessWatch) -> None:
        self.pid = pid
        self._socket = sock
        self._watch = watch
        self._turn = threading.Lock()

    @classmethod
    def branch(cls, preload: Sequence[str] = (), timeout_s: float = _START_S) -> ForkServer:
        """Returns a new fork server for one pool.

        Args:
            preload: Modules to import once, in addition to those that every worker needs.
            timeout_s: How long the imports may take, in seconds.

        Raises:
            EOFError: The fork server could not be started.
            OSError: Likewise, for lack of memory, processes or open files.
            NotReady: The modules were not imported in time.
        """
        key = os.getpid(), tuple(preload), tuple(sys.path), os.getcwd(), frozenset(os.environ.items())
        with cls._lock:
            for ended in [each for each, root in cls._roots.items() if each[0] == key[0] and root.ended()]:
                cls._roots.pop(ended).close()
            if key in cls._roots:
                with contextlib.suppress(EOFError):
                    return cls._roots[key]._branch(timeout_s)
                cls._roots.pop(key).close()
            root = cls._roots[key] = cls._start_root(preload, timeout_s)
            return root._branch(timeout_s)

    def _branch(self, timeout_s: float) -> ForkServer:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                return ForkServer(ours, *self.fork(b"", [theirs.fileno()], timeout_s))
            except BaseException:
                ours.close()
                raise

    @classmethod
    def _start_root(cls, preload: Sequence[str], timeout_s: float) -> Self:
        ours, theirs = socket.socketpair()
        variables = dict.fromkeys(_THREADS, os.environ.get("OMP_NUM_THREADS", "1")) | os.environ
        code = _START.format(fd=theirs.fileno(), owner=os.getpid(), preload=tuple(preload))
        try:
            with theirs:  # the root is not a child of this process, which would have to reap it
                started = subprocess.run(
                    python_command(code),
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={name: text for name, text in variables.items() if name not in _SECRETS},
                    start_new_session=True,
                )
            if started.returncode in (errno.EAGAIN, errno.ENOMEM):
                raise OSError(started.returncode, os.strerror(started.returncode))
            pid, pidfds = MessagePipe(ours).receive(time.monotonic() + timeout_s)
        except BaseException:
            ours.shutdown(socket.SHUT_RDWR)  # which ends it, whatever its imports do
            ours.close()
            raise
        return cls(ours, _PID.unpack(pid)[0], ProcessWatch(pidfd=pidfds[0]))

    def ended(self) -> bool:
        """Whether the server has exited. Its workers exit with it."""
        return self._watch.ended()

    def fork(self, main: bytes, fds: Sequence[int], timeout_s: float = _START_S) -> tuple[int, ProcessWatch]:
        """Forks a process. On the root, forks a branch.

        Args:
            main: The pickled function that the process runs with the list of its file descriptors. No bytes for a
                branch.
            fds: File descriptors for the process. For a branch, its socket.
            timeout_s: How long the fork may take, in seconds.

        Returns:
            The process id and a watch on the process.

        Raises:
            EOFError: The fork server has exited.
            NotReady: The fork server did not answer in time, and was killed. Once SIGINT or SIGTERM has come, it
                has one second at most.
            OSError: The process could not be forked, for lack of memory, processes or open files.
        """
        with self._turn, Uninterrupted() as signals:  # else the next call would read this one's answer
            pipe = MessagePipe(self._socket, self._watch)
            pipe.send(main, fds)
            deadline = time.monotonic() + timeout_s
            while True:
                look_s = min(deadline, time.monotonic() + _LOOK_S)
                try:
                    answer, pidfds = pipe.receive(look_s)  # too small to come in parts
                    break
                except NotReady:
                    if time.monotonic() < deadline and not signals.received:
                        continue
                    self._watch.kill()  # a later answer would be taken for another request's
                    limit = "before SIGINT or SIGTERM came" if signals.received else f"within {timeout_s:g} s"
                    raise NotReady(f"the fork server (process {self.pid}) did not answer {limit}") from None
        (pid,) = _PID.unpack(answer)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid, ProcessWatch(pidfd=pidfds[0])

    def close(self) -> None:
        """Ends the server, which kills its remaining workers, and waits until it has exited."""
        with contextlib.suppress(OSError):  # the server has already exited
            self._socket.shutdown(socket.SHUT_RDWR)  # also affects copies in forked children
        self._socket.close()
        if not self._watch.wait(_END_S):
            self._watch.kill()
        self._watch.close()

    def kill(self) -> None:
        """Kills the server without waiting; its workers end with it."""
        self._watch.signal(signal.SIGKILL)
        self._watch.close()


def _unlock_in_child() -> None:
    ForkServer._lock = threading.Lock()  # another thread may have held it during the fork


os.register_at_fork(after_in_child=_unlock_in_child)


@atexit.register
def _end_roots() -> None:
    for key, root in ForkServer._roots.items():
        if key[0] == os.getpid():  # a forked child of the owner must not close it
            try:
                root.close()
            except KeyboardInterrupt:  # Ctrl-C here means: exit at once, without a traceback
                root.kill()


def serve(fd: int, owner: int, preload: Sequence[str] = (), *, is_root: bool = False) -> None:
    """Forks workers or branches on request until the owner closes its socket or exits.

    Args:
        fd: File descriptor of the socket to the owner.
        owner: Process id of the owner.
        preload: Modules to import first.
        is_root: Whether this server forks branches. Otherwise it forks workers.
    """
    with _ending_with_peer(fd) if is_root else contextlib.nullcontext():
        import rayvec.node.worker  # noqa: F401  # imported once for all workers

        import_modules(preload)
    if is_root:  # processes that it forks do the same in _run()
        restore_in_children()
        leave_to_owner(signal.SIGINT, signal.SIGTERM)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with socket.socket(fileno=fd) as end:
        _Server(end, owner, is_root).run()
    gc.freeze()  # skips a garbage collection of all imported modules at exit


@contextlib.contextmanager
def _ending_with_peer(fd: int) -> Iterator[None]:
    """Lets the kernel end this process when the peer of a socket closes it or exits; the peer sends nothing."""
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_ASYNC)  # SIGIO, whose default is to end
    if readable([fd], 0.0):  # it was closed before
        os._exit(0)
    yield
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)


class _Server:
    """Forks and reaps children.

    Args:
        end: Socket to the owner.
        owner: Process id of the owner.
        is_root: As of :func:`serve`.
    """

    def __init__(self, end: socket.socket, owner: int, is_root: bool) -> None:
        self._owner, self._is_root = owner, is_root
        self._exits, exits = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # readable once a child has exited
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(exits, warn_on_full_buffer=False)
        self._pipe, self._watch = MessagePipe(end), ProcessWatch(owner)
        self._events = self._pipe.fileno(), self._watch.fileno(), self._exits
        self._own_fds = *self._events, exits
        self._forked: set[int] = set()

    def run(self) -> None:
        """Forks on request until the owner closes its socket or exits, and then kills all children."""
        if self._watch.ended():  # during the imports
            return
        poll = select.poll()
        for fd in self._events:
            poll.register(fd, select.POLLIN)
        if self._is_root:
            _tell(self._pipe, os.getpid())
        while not self._watch.ended():
            is_idle = self._is_root and not self._forked
            ready = {fd for fd, _ in poll.poll(1000 * _IDLE_S if is_idle else None)}
            if not ready:
                break
            if self._exits in ready:
                self._reap()
            if self._pipe.fileno() in ready and not self._take_request():
                break
        deadline = time.monotonic() + _TRACKER_S
        while children := _children():
            left_s = deadline - time.monotonic()
            _kill(children, with_trackers=left_s <= 0.0)
            readable([self._exits], left_s if left_s > 0.0 else None)
            self._reap()

    def _reap(self) -> None:
        """Reaps children that have exited and kills the rest of their process groups."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._exits, 1 << 12)
        with contextlib.suppress(ChildProcessError):
            while (info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)) is not None:
                self._forked.discard(info.si_pid)
                if _children() - self._forked - {info.si_pid}:  # else it has left nothing behind
                    _kill_group(info.si_pid)
                os.waitpid(info.si_pid, 0)
        if self._is_root:
            _kill(_children() - self._forked)  # inherited from a branch that was killed

    def _take_request(self) -> bool:
        """Forks what the owner requests. Returns whether the owner's socket is still open."""
        try:
            main, fds = self._pipe.receive()
        except EOFError:
            return False
        except OSError as error:  # too many open files
            _tell(self._pipe, -error.errno)  # type: ignore[operator]
            return True
        pid = self._fork(main, fds)
        for fd in fds:
            os.close(fd)
        if pid > 0:
            self._forked.add(pid)
        _tell(self._pipe, pid)
        return True

    def _fork(self, main: bytes, fds: Sequence[int]) -> int:
        """Forks a worker or a branch. Returns its process id, or the negative number of an error."""
        server = os.getpid()
        try:
            pid = fork_with_signals_blocked(signal.SIGINT, signal.SIGTERM)
        except OSError as error:
            return -error.errno  # type: ignore[operator]
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in self._own_fds:
                os.close(fd)
            _run(server, partial(serve, fds[0], self._owner) if self._is_root else lambda: pickle.loads(main)(fds))
        return pid


def _tell(pipe: MessagePipe, pid: int) -> None:
    """Sends a process id and a file descriptor of that process to the owner, or the negative number of an error."""
    pidfds: list[int] = []
    if pid > 0:
        try:
            pidfds.append(os.pidfd_open(pid))
        except OSError as error:  # too many open files
            os.kill(pid, signal.SIGKILL)
            pid = -error.errno  # type: ignore[operator]
    with contextlib.suppress(BrokenPipeError):  # the owner has just exited
        pipe.send(_PID.pack(pid), pidfds)
    for each in pidfds:
        os.close(each)


def _children() -> set[int]:
    """Returns the process ids of all children, also of inherited ones and of those that are not yet reaped."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def _kill_group(leader: int) -> None:
    """Kills a process group, apart from resource trackers. Its leader must not be reaped before."""
    killed: set[int] = set()
    while found := _group(leader) - killed:  # again for those that were forked meanwhile
        _kill(found)
        killed |= found


def _group(leader: int) -> set[int]:
    """Returns the process ids of the members of a process group."""
    members = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(int(pid)) == leader:
                members.add(int(pid))
    return members


def _kill(pids: Collection[int], *, with_trackers: bool = False) -> None:
    """Kills processes. By default, it does not kill resource trackers."""
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just exited
            if with_trackers or _TRACKER not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


_libc = ctypes.CDLL(None)


def end_with_parent(parent: int, signum: int) -> bool:
    """Lets the kernel send a signal to this process when its parent exits. Returns False if it has exited already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signum)
    return os.getppid() == parent


def _run(server: int, target: Callable[[], None]) -> None:
    """Runs a target in a newly forked child and does not return.

    The child leads its own process group. The kernel kills it when the server exits.
    """
    code = 1
    try:
        leave_to_owner(signal.SIGINT, signal.SIGTERM)
        if end_with_parent(server, signal.SIGKILL):
            os.setsid()
            target()
            code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # an environment may have closed or replaced it
                stream.flush()
        os._exit(code)
