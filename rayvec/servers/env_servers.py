"""Environments in other processes, on this machine or elsewhere, that dial in (``rayvec/env_server.py``)."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rayvec.env_server import Refused, pack, prove, read_key
from rayvec.errors import ConfigError, check_count
from rayvec.servers.server_env import ServerEnv

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_PROOF_S = 1.0
"""How long the proof of the key may take; no other connection is accepted meanwhile."""
_NOTICE_S = 10.0
"""After this time an environment says that it waits for a server."""
_END_S = 2.0
"""How long a server gets to end that a worker has started."""
_LAST_S = 1.0
"""How long the next server gets to dial in again, which then ends."""


class EnvServers(AbstractContextManager["EnvServers"]):
    """Environments that run in servers: under another Python, in a container, on another machine or system.

    It is passed where a list of callables is expected: ``rayvec.RayVecEnv(rayvec.EnvServers(8, port=9000,
    key_file="key"))``. Each server serves one environment at a time, and others dial again and again: start some more
    than there are environments, so that one that is lost is replaced at once. The environments step on this machine
    (``num_nodes=0``).

    With `command`, each worker starts the server of its environment, and another where that is lost.

    Args:
        count: How many environments.
        port: The TCP port at which servers dial in; 0 takes a free one (see :attr:`port`).
        host: The address of this machine at which it listens: by default all.
        key_file: A file with the key, at least 16 bytes, that the servers have too.
        command: Starts one server, as one string or as its words; ``--connect``, ``--key-file`` and ``--once`` are
            appended.
        start_timeout_s: How long each environment waits until its server dials in.

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
        host: str = "",
        key_file: str | Path | None = None,
        command: str | Sequence[str] | None = None,
        start_timeout_s: float = 60.0,
    ) -> None:
        self._count, self.port = check_count("count", count), check_count("port", port, least=0)
        got = {"command": command, "key_file": key_file, "port": port, "host": host}
        names = [name for name, value in got.items() if value]
        if names != ["command"] and (key_file is None or command is not None):
            raise ConfigError(
                f"EnvServers got {' and '.join(names) or 'no key_file'}. Pass key_file for servers that dial in, at "
                "port and host, or command alone to start them."
            )
        self._make: StartedServer | DialledServer
        if command is not None:
            words = shlex.split(command) if isinstance(command, str) else command
            self._make = StartedServer(tuple(words), start_timeout_s)
            return
        path = str(Path(str(key_file)).expanduser().absolute())
        try:
            self._key = read_key(path)
            self.port = self._reserved(host, port)
        except (OSError, ValueError) as error:
            raise ConfigError(f"Environment servers can't dial in: {error}.") from None
        self._make = DialledServer((host, self.port), path, start_timeout_s)
        self._creator = os.getpid()
        atexit.register(self.close)

    def _reserved(self, host: str, port: int) -> int:
        """Reserves a port that nothing has, so that this user's processes alone can listen there. Returns it."""
        with socket.create_server((host, port)) as first:
            port = first.getsockname()[1]
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind((host, port))
        return port

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[StartedServer | DialledServer]:
        """Yields what makes each environment."""
        return iter([self._make] * self._count)

    def close(self) -> None:
        """Tells the servers to end, as the end of this process does. Close the environments first."""
        if not isinstance(self._make, DialledServer) or self._socket.fileno() < 0 or os.getpid() != self._creator:
            return
        atexit.unregister(self.close)
        with self._socket, socket.create_server(self._make.address, reuse_port=True) as listener:
            while found := dialled(listener, self._key, _LAST_S):
                with suppress(OSError), found[0] as connection:
                    connection.sendall(pack({"op": "end"}))

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def dialled(
    listener: socket.socket, key: bytes, wait_s: float, has_ended: Callable[[], Any] = lambda: False
) -> tuple[socket.socket, str] | None:
    """Returns the connection and the name of the next process that dials in and has the key; others are logged.

    Args:
        listener: Where it dials in.
        key: The key.
        wait_s: How long it waits.
        has_ended: Called about ten times a second: whether none will dial in.

    Returns:
        None if none has.
    """
    listener.settimeout(_POLL_S)
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        is_last = has_ended()  # asked first: what has dialled in before is accepted
        try:
            connection, (address, port) = listener.accept()
        except TimeoutError:
            if is_last:
                break
            continue
        try:
            prove(connection, key, dials=False, timeout_s=_PROOF_S)
            return connection, f"environment server {address}:{port}"
        except (Refused, OSError) as error:
            logger.warning("refused a connection of %s:%d: %s", address, port, error)
            connection.close()
    return None


@dataclass(frozen=True, slots=True)
class DialledServer:
    """Makes the environment in the next server that dials in.

    Each environment that waits for a server listens at the same port (``SO_REUSEPORT``). A server that finds no
    listener dials again, and then serves an environment that another server has lost.

    Attributes:
        address: Host and port at which it listens.
        key_file: The file with the key.
        start_timeout_s: How long it waits.
        waits: Its steps wait for another process, so that each environment gets a worker of its own by default.
    """

    address: tuple[str, int]
    key_file: str
    start_timeout_s: float
    waits = True

    def __call__(self) -> ServerEnv:
        """Makes the environment.

        Raises:
            ConfigError: No server dials in.
        """
        where = f"port {self.address[1]} of {socket.gethostname()}"
        key = read_key(self.key_file)
        with socket.create_server(self.address, reuse_port=True) as listener:
            found = dialled(listener, key, min(_NOTICE_S, self.start_timeout_s))
            if found is None and self.start_timeout_s > _NOTICE_S:
                logger.warning("an environment waits for an environment server, which dials in at %s", where)
                found = dialled(listener, key, self.start_timeout_s - _NOTICE_S)
        if found is None:
            raise ConfigError(
                f"An environment has waited {self.start_timeout_s:g} s for an environment server at {where}. Start one "
                "for each environment, which connects to there, or pass a larger start_timeout_s."
            )
        return ServerEnv(*found)  # which may take long: other servers reach those that still listen


@dataclass(frozen=True, slots=True)
class StartedServer:
    """Starts a server beside the worker, and makes the environment in it.

    Attributes:
        command: Its words.
        start_timeout_s: How long it may take to dial in.
        waits: As of :class:`DialledServer`.
    """

    command: tuple[str, ...]
    start_timeout_s: float
    waits = True

    def __call__(self) -> ServerEnv:
        """Makes the environment.

        Raises:
            ConfigError: The server does not dial in.
        """
        key = secrets.token_hex(32)
        with socket.create_server(("127.0.0.1", 0)) as listener, tempfile.NamedTemporaryFile("w") as key_file:
            key_file.write(key)
            key_file.flush()
            where = f"127.0.0.1:{listener.getsockname()[1]}"
            command = [*self.command, "--connect", where, "--key-file", key_file.name, "--once"]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
            try:
                if found := dialled(listener, key.encode(), self.start_timeout_s, lambda: process.poll() is not None):
                    return ServerEnv(*found, partial(_end, process))
                raise self._silent(process.returncode)
            except BaseException:
                process.kill()
                process.wait()
                raise

    def _silent(self, code: int | None) -> ConfigError:
        passed = f"start_timeout_s={self.start_timeout_s:g} has passed"
        why = passed if code is None else f"it has ended with exit code {code}"
        return ConfigError(
            f"The environment server has not dialled in: {why}. Run `{shlex.join(self.command)} --help`."
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Waits until a server ends whose connection is closed, and kills it if it does not."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    process.kill()
    process.wait()
