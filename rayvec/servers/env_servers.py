"""Environments in other processes, on this machine or elsewhere, that dial in (``rayvec/env_server.py``)."""

from __future__ import annotations

import atexit
import shlex
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from rayvec.env_server import Messages, read_key
from rayvec.errors import ConfigError, check_count
from rayvec.servers.makers import DialledServer, StartedServer, dialling_in

__all__ = ["EnvServers"]

_END_S = 1.0
"""How long the next server gets to dial in again, which then ends."""


class EnvServers:
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
        if not isinstance(self._make, DialledServer) or self._socket.fileno() < 0:
            return
        atexit.unregister(self.close)
        with self._socket, socket.create_server(self._make.address, reuse_port=True) as listener:
            while found := next(filter(None, dialling_in(listener, self._key, _END_S)), None):
                with suppress(OSError), found[0] as connection:
                    connection.sendall(Messages(connection).pack({"op": "end"}))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
