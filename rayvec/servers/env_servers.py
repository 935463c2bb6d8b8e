"""Environments in other processes, on this machine or elsewhere, that dial in (``rayvec/env_server.py``)."""

from __future__ import annotations

import contextlib
import logging
import secrets
import select
import shlex
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Condition, Thread
from types import TracebackType
from typing import Any, NamedTuple, Self

from rayvec.env_server import Messages, Refused, admit, read_key
from rayvec.errors import ConfigError, check_count
from rayvec.servers.server_env import ServerEnv, ServerEnvMaker

__all__ = ["EnvServers", "served"]

logger = logging.getLogger(__name__)

_PROGRESS_S = 10.0
_REDIAL_S = 5.0
"""How long a server takes at most to dial in again. One that this process has started is killed after it."""
_END_S = 2.0
"""How long servers get to end."""

_open: set[Any] = set()
"""Those that are not closed: their servers outlive a variable, ``RayVecEnv(EnvServers(8, ...))`` has none."""


class EnvServers:
    """Environments that run in servers: under another Python, in a container, on another machine or system.

    It is passed where a list of callables is expected: ``rayvec.RayVecEnv(rayvec.EnvServers(8, port=9000,
    key_file="key"))``. Each server serves one environment at a time. One that is lost is replaced by the next that is
    idle: let some more dial in than there are environments. The environments step on this machine (``num_nodes=0``).

    Args:
        count: How many environments.
        port: The TCP port at which servers dial in; 0 takes a free one (see :attr:`port`).
        host: The address of this machine at which it listens: by default all, with `command` only its own.
        key_file: A file with the key, at least 16 bytes, that the servers have too. With `command` there is one
            already.
        command: Starts one server on this machine, as one string or as its words; ``--connect`` and ``--key-file`` are
            appended. It runs `count` times, and again when a server ends.
        start_timeout_s: How long iterating waits until `count` servers have dialled in.

    Attributes:
        port: The port at which servers dial in.

    Raises:
        ConfigError: No key, one that can't be read, or a port that is not free.
    """

    def __init__(
        self,
        count: int,
        *,
        port: int = 0,
        host: str | None = None,
        key_file: str | Path | None = None,
        command: str | Sequence[str] | None = None,
        start_timeout_s: float = 60.0,
    ) -> None:
        self._count = count = check_count("count", count)
        check_count("port", port, least=0)
        if (key_file is None) == (command is None):
            raise ConfigError(
                f"EnvServers got {'both' if command else 'neither'} of key_file and command. Pass key_file for servers "
                "that dial in, or command to start them."
            )
        self._start_timeout_s = start_timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="rayvec-servers-")
        self._key_file = Path(key_file or Path(self._folder.name, "key")).expanduser()
        if key_file is None:  # the folder is this user's alone
            self._key_file.write_text(secrets.token_hex(32))
        try:
            key = read_key(str(self._key_file))
            host = host or ("" if command is None else "127.0.0.1")
            self._listener = socket.create_server((host, port))
        except (OSError, ValueError) as error:
            self._folder.cleanup()
            raise ConfigError(f"Environment servers can't dial in: {error}.") from None
        self.port: int = self._listener.getsockname()[1]
        self._path = str(Path(self._folder.name, "handover"))
        self._handover = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._handover.bind(self._path)
        self._handover.listen(256)
        if command is not None:
            words = shlex.split(command) if isinstance(command, str) else command
            command = [*words, "--connect", f"127.0.0.1:{self.port}", "--key-file", str(self._key_file)]
        self._servers = _Servers(key, command, count)
        _serve(self._listener, self._servers.admit)
        _serve(self._handover, self._servers.hand_over)
        self._end = weakref.finalize(self, _end, self._servers, (self._handover, self._listener), self._folder)
        _open.add(self)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Callable[[], ServerEnv]]:
        """Yields what makes each environment, once all servers have dialled in.

        Raises:
            TimeoutError: They have not within `start_timeout_s`.
        """
        self._servers.wait_for(self._count, self._start_timeout_s, self.port)
        return iter([ServerEnvMaker(self._path)] * self._count)

    def close(self) -> None:
        """Tells the servers to end, as the end of this process does. Close the environments first."""
        self._end()
        _open.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def served(config: Any, env: Any) -> contextlib.AbstractContextManager[Any]:
    """Returns a context: of `env`, or of the servers that the settings of a run ask for where it is None."""
    settings = getattr(config, "env_servers", None)
    if env is not None or not settings:
        return contextlib.nullcontext(env)
    return EnvServers(config.num_envs, start_timeout_s=config.start_timeout_s, **settings)


class _Servers:
    """The servers that have dialled in and are idle, and the processes that this process has started.

    Its methods run in threads: one for each server that dials in, and one for each worker that has or wants one.
    """

    def __init__(self, key: bytes, command: Sequence[str] | None, count: int) -> None:
        self._key, self._command, self._count = key, command, count
        self._idle: list[_Idle] = []
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._dialled: dict[int, int] = {}  # how often, by process id
        self._wanted = 0  # how many workers have or want one
        self._is_ending = False
        self._changed = Condition()

    def admit(self, connection: socket.socket) -> None:
        """Lets a server in that has the key. If the servers are to end, it is told so."""
        name = "environment server {}:{}".format(*connection.getpeername()[:2])
        try:
            pid = admit(connection, self._key)
        except (Refused, OSError) as error:
            logger.warning("%s was refused: %s", name, error)
            connection.close()
            return
        with self._changed:
            self._dialled[pid] = self._dialled.get(pid, 0) + 1
            self._idle.append(_Idle(connection, pid, name, self._dialled[pid]))
            if self._is_ending:
                self._dismiss_idle()
            self._changed.notify_all()

    def hand_over(self, worker: socket.socket) -> None:
        """Gives a worker the connection of the next idle server, and waits until the worker closes its own."""
        with self._changed:
            self._wanted += 1
        with worker:
            server = self._next_idle(worker)
            if server is not None:
                with contextlib.suppress(OSError), server.connection:
                    socket.send_fds(worker, [server.name.encode()], [server.connection.fileno()])
                with contextlib.suppress(OSError):
                    worker.recv(1)
        if server is not None:
            self._await_return(server)
        with self._changed:
            self._wanted -= 1
            self._changed.notify_all()

    def wait_for(self, count: int, timeout_s: float, port: int) -> None:
        """Waits until so many servers are idle. See :meth:`EnvServers.__iter__`."""
        began_s = logged_s = time.monotonic()
        with self._changed:
            self._wanted += count
            try:
                while True:
                    ended = self._start_missing()
                    self._forget_lost()
                    if len(self._idle) >= count:
                        return
                    here = f"{len(self._idle)} of {count} environment servers have dialled in at port {port}"
                    if ended:
                        raise ConfigError(f"{here}: one that was started has ended with exit code {ended[0]}.")
                    now_s = time.monotonic()
                    if now_s > began_s + timeout_s:
                        raise TimeoutError(
                            f"{here} within {timeout_s:g} s. Start more, or pass a larger start_timeout_s."
                        )
                    if now_s > logged_s + _PROGRESS_S:
                        logger.info("%s", here)
                        logged_s = now_s
                    self._changed.wait(0.2)
            finally:
                self._wanted -= count

    def end(self) -> None:
        """Tells all servers to end, those too that dial in again within a moment."""
        with self._changed:
            self._is_ending = True
            self._dismiss_idle()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._wanted, _END_S)
        for process in self._processes.values():
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _next_idle(self, worker: socket.socket) -> _Idle | None:
        """Waits for an idle server. Returns None if the worker has gone, or the servers are to end."""
        with self._changed:
            while not self._is_ending and not _has_ended(worker):
                self._start_missing()
                self._forget_lost()
                if self._idle:
                    return self._idle.pop(0)
                self._changed.wait(0.2)
        return None

    def _await_return(self, server: _Idle) -> None:
        """Waits until a server dials in again. One that this process has started and that does not is killed."""
        process = self._processes.get(server.pid)
        with self._changed:
            returned = self._changed.wait_for(lambda: self._dialled[server.pid] > server.times, _REDIAL_S)
        if not returned and process is not None:
            process.kill()
            process.wait()

    def _start_missing(self) -> list[int]:
        """Starts servers in place of those that have ended. Returns the exit codes of these."""
        if self._command is None:
            return []
        ended = [pid for pid, process in self._processes.items() if process.poll() is not None]
        codes = [self._processes.pop(pid).returncode for pid in ended]
        while len(self._processes) < max(self._count, self._wanted) and not self._is_ending:
            process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)
            self._processes[process.pid] = process
        return codes

    def _forget_lost(self) -> None:
        """Forgets idle servers whose connection has ended. An idle server sends nothing."""
        for server in [each for each in self._idle if _has_ended(each.connection)]:
            self._idle.remove(server)
            server.connection.close()

    def _dismiss_idle(self) -> None:
        for server in self._idle:
            with contextlib.suppress(OSError), server.connection:
                server.connection.sendall(Messages(server.connection).pack({"op": "end"}))
        self._idle.clear()


class _Idle(NamedTuple):
    """A server that waits for work, and how many times it has dialled in."""

    connection: socket.socket
    pid: int
    name: str
    times: int


def _has_ended(connection: socket.socket) -> bool:
    """Whether the other side, which sends nothing, has closed a connection."""
    return bool(select.select([connection], [], [], 0)[0])


def _serve(listener: socket.socket, handle: Callable[[socket.socket], None]) -> None:
    """Handles each connection in a thread of its own until the listener is shut down."""

    def accept_all() -> None:
        with contextlib.suppress(OSError):
            while True:
                Thread(target=handle, args=(listener.accept()[0],), daemon=True).start()

    Thread(target=accept_all, daemon=True).start()


def _end(servers: _Servers, listeners: Sequence[socket.socket], folder: tempfile.TemporaryDirectory[str]) -> None:
    """Ends the servers, and closes what they dialled."""
    servers.end()
    for listener in listeners:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    folder.cleanup()
