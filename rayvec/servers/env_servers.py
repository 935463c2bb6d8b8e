"""Environments in other processes, on this machine or elsewhere, that dial in (``rayvec/env_server.py``)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rayvec.env_server import read_key
from rayvec.errors import ConfigError, check_count
from rayvec.servers.door import Door
from rayvec.servers.makers import DialledServer, StartedServer

__all__ = ["EnvServers"]


class EnvServers:
    """Environments that run in servers: under another Python, in a container, on another machine or system.

    It is passed where a list of callables is expected: ``rayvec.RayVecEnv(rayvec.EnvServers(8, port=9000,
    key_file="key"))``. Each server serves one environment at a time. One that is lost is replaced by the next that is
    idle: let some more dial in than there are environments. The environments step on this machine (``num_nodes=0``).

    With `command`, each worker starts the server of its environment, and another where that is lost.

    Args:
        count: How many environments.
        port: The TCP port at which servers dial in; 0 takes a free one (see :attr:`port`).
        host: The address of this machine at which it listens: by default all.
        key_file: A file with the key, at least 16 bytes, that the servers have too.
        command: Starts one server, as one string or as its words; ``--connect``, ``--key-file`` and ``--once`` are
            appended.
        start_timeout_s: How long iterating waits until `count` servers have dialled in, or how long one that was
            started may take to dial in.

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
        self._start_timeout_s, self._door = start_timeout_s, None
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
        try:
            self._door = Door(host, port, read_key(str(Path(str(key_file)).expanduser())))
        except (OSError, ValueError) as error:
            raise ConfigError(f"Environment servers can't dial in: {error}.") from None
        self.port, self._make = self._door.port, DialledServer(self._door.path)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[StartedServer | DialledServer]:
        """Yields what makes each environment, once servers that dial in have done so.

        Raises:
            TimeoutError: They have not within `start_timeout_s`.
        """
        if self._door is not None:
            self._door.wait_for(self._count, self._start_timeout_s)
        return iter([self._make] * self._count)

    def close(self) -> None:
        """Tells the servers to end, as the end of this process does. Close the environments first."""
        if self._door is not None:
            self._door.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
