"""Make an environment in a server: in one that the worker starts, or in the next one that has dialled in."""

from __future__ import annotations

import secrets
import shlex
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from rayvec.errors import ConfigError
from rayvec.servers.door import admitted
from rayvec.servers.server_env import ServerEnv

__all__ = ["DialledServer", "StartedServer"]

_POLL_S = 0.1
_END_S = 2.0
"""How long a server gets to end."""
_MAX_NAME = 4096


@dataclass(frozen=True, slots=True)
class StartedServer:
    """Starts a server beside the worker, and makes the environment in it.

    Attributes:
        command: Its words.
        start_timeout_s: How long it may take to dial in.
        waits: Its steps wait for another process, so that each environment gets a worker of its own by default.
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
                connection = self._accepted(listener, process, key.encode())
                return ServerEnv(connection, f"environment server {where}", partial(_end, process))
            except BaseException:
                process.kill()
                process.wait()
                raise

    def _accepted(self, listener: socket.socket, process: subprocess.Popen[bytes], key: bytes) -> socket.socket:
        """Waits until the server dials in. Returns the connection."""
        listener.settimeout(_POLL_S)
        deadline = time.monotonic() + self.start_timeout_s
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(TimeoutError):
                connection = listener.accept()[0]
                if admitted(connection, key):
                    return connection
        why = f"start_timeout_s={self.start_timeout_s:g} has passed"
        if process.returncode is not None:
            why = f"it has ended with exit code {process.returncode}"
        raise ConfigError(f"The environment server has not dialled in: {why}. Run `{shlex.join(self.command)} --help`.")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Waits until a server ends whose connection is closed, and kills it if it does not."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    process.kill()
    process.wait()


@dataclass(frozen=True, slots=True)
class DialledServer:
    """Makes the environment in the next idle server; it may wait for one.

    Attributes:
        path: Of the Unix socket at which :class:`rayvec.servers.door.Door` hands over connections.
        waits: As of :class:`StartedServer`.
    """

    path: str
    waits = True

    def __call__(self) -> ServerEnv:
        """Makes the environment.

        Raises:
            ConfigError: No servers are handed over on this machine.
            ConnectionError: The servers were told to end.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as handover:
            try:
                handover.connect(self.path)
                name, descriptors, *_ = socket.recv_fds(handover, _MAX_NAME, 1)
            except OSError as error:
                raise ConfigError(
                    f"There are no environment servers at {self.path} ({error}). Their environments must step on the "
                    "machine that has made rayvec.EnvServers, before it is closed: pass num_nodes=0."
                ) from None
        if not descriptors:
            raise ConnectionError("rayvec.EnvServers were closed while a server was waited for.")
        return ServerEnv(socket.socket(fileno=descriptors[0]), name.decode())
