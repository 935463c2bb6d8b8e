"""Make an environment in a server: in the next one that dials in, or in one that the worker starts."""

from __future__ import annotations

import logging
import math
import secrets
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from rayvec.env_server import Refused, prove, read_key
from rayvec.errors import ConfigError
from rayvec.servers.server_env import ServerEnv

__all__ = ["DialledServer", "StartedServer", "dialling_in"]

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_SILENT_S = 1.0
"""How long a stranger may say nothing; nobody else is accepted meanwhile."""
_NOTICE_S = 10.0
"""After this time an environment says that it waits for a server."""
_END_S = 2.0
"""How long a server gets to end."""


def dialling_in(listener: socket.socket, key: bytes, wait_s: float) -> Iterator[tuple[socket.socket, str] | None]:
    """Yields the connection and the name of each server that dials in, and None about ten times a second, for `wait_s`.

    A connection that lacks the key is refused, and logged.
    """
    listener.settimeout(_POLL_S)
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        found = None
        with suppress(TimeoutError):
            connection, (address, port) = listener.accept()
            name = f"environment server {address}:{port}"
            try:
                prove(connection, key, b"rayvec", b"server", _SILENT_S)
                found = connection, name
            except (Refused, OSError) as error:
                logger.warning("%s was refused: %s", name, error)
                connection.close()
        yield found


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
        found, notice_at = None, time.monotonic() + _NOTICE_S
        with socket.create_server(self.address, reuse_port=True) as listener:
            for found in dialling_in(listener, read_key(self.key_file), self.start_timeout_s):
                if found is not None:
                    break
                if time.monotonic() > notice_at:
                    logger.warning("an environment waits for an environment server, which dials in at %s", where)
                    notice_at = math.inf
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
                for found in dialling_in(listener, key.encode(), self.start_timeout_s):
                    if found is not None:
                        return ServerEnv(*found, partial(_end, process))
                    if process.poll() is not None:
                        break
                raise self._silent(process.returncode)
            except BaseException:
                process.kill()
                process.wait()
                raise

    def _silent(self, returncode: int | None) -> ConfigError:
        why = f"start_timeout_s={self.start_timeout_s:g} has passed"
        if returncode is not None:
            why = f"it has ended with exit code {returncode}"
        return ConfigError(
            f"The environment server has not dialled in: {why}. Run `{shlex.join(self.command)} --help`."
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Waits until a server ends whose connection is closed, and kills it if it does not."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    process.kill()
    process.wait()
