"""An environment whose steps run in an environment server: its reset and step are messages over a socket."""

from __future__ import annotations

import builtins
import socket
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rayvec.env_server import Messages
from rayvec.errors import ConfigError

__all__ = ["ServerEnv", "ServerEnvMaker"]

_MAX_REPLY = 4096


@dataclass(frozen=True, slots=True)
class ServerEnvMaker:
    """Makes an environment in the next idle server; it may wait for one.

    Attributes:
        path: Of the Unix socket at which :class:`rayvec.EnvServers` hands over connections.
        waits: Its steps wait for another process, so that each environment gets a worker of its own by default.
    """

    path: str
    waits = True

    def __call__(self) -> ServerEnv:
        """Makes the environment.

        Raises:
            ConfigError: No servers are handed over on this machine.
            ConnectionError: The servers were told to end.
        """
        handover = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            handover.connect(self.path)
            reply, descriptors, *_ = socket.recv_fds(handover, _MAX_REPLY, 1)
        except OSError as error:
            handover.close()
            raise ConfigError(
                f"There are no environment servers at {self.path} ({error}). Their environments must step on the "
                "machine that has made rayvec.EnvServers, before it is closed: pass num_nodes=0."
            ) from None
        if not descriptors:
            handover.close()
            raise ConnectionError(reply.decode() or "rayvec.EnvServers were closed while a server was waited for.")
        return ServerEnv(socket.socket(fileno=descriptors[0]), handover, reply.decode())


class ServerEnv(gymnasium.Env[Any, Any]):
    """An environment in another process, which has dialled in.

    Args:
        connection: To the server.
        handover: Its end tells :class:`rayvec.EnvServers` that the server is free.
        name: Of the server, for errors.

    Raises:
        Exception: What the constructor of the environment raised.
    """

    def __init__(self, connection: socket.socket, handover: socket.socket, name: str) -> None:
        self._connection, self._handover, self._name = connection, handover, name
        self._messages = Messages(connection)
        made = self._ask("open")
        self.observation_space = space_of(made["observation_space"])
        self.action_space = space_of(made["action_space"])
        self.render_mode = made["render_mode"]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets the environment."""
        answer = self._ask("reset", seed=seed, options=options)
        return answer["obs"], answer["info"]

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Takes a step."""
        answer = self._ask("step", action=action)
        return answer["obs"], answer["reward"], answer["terminated"], answer["truncated"], answer["info"]

    def render(self) -> Any:
        """Renders in the server."""
        return self._ask("render")["value"]

    def close(self) -> None:
        """Closes the environment. The server dials in again."""
        if self._connection.fileno() < 0:
            return
        try:
            self._ask("close")
        finally:
            self._connection.close()
            self._handover.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = self._ask("get", name=name)
        if "missing" in found:
            raise AttributeError(f"the environment in {self._name} has no attribute {name!r}")
        return partial(self._call, name) if "method" in found else found["value"]

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Sets an attribute of the environment in the server."""
        self._ask("set", name=name, value=value)
        return True

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._ask("call", name=name, args=list(args), kwargs=kwargs)["value"]

    def _ask(self, op: str, **request: Any) -> dict[str, Any]:
        """Sends a request, and returns its answer.

        Raises:
            ConnectionError: The server is lost.
            Exception: What the environment raised: of the same type if that is one of Python's own.
        """
        message = self._messages.pack({"op": op, **request})
        try:
            self._connection.sendall(message)
            answer: dict[str, Any] = self._messages.receive()
        except OSError as error:
            raise ConnectionError(f"{self._name} was lost in {op}: {error}") from None
        if "error" in answer:
            raise _raised(answer)
        return answer


def _raised(answer: dict[str, Any]) -> Exception:
    """Returns the exception of an environment: its own type if that is one of Python's, with the server's traceback."""
    kind = getattr(builtins, answer["error"], None) if answer["module"] == "builtins" else None
    try:
        error = kind(answer["text"]) if isinstance(kind, type) and issubclass(kind, Exception) else None
    except TypeError:  # a type that takes other arguments, as UnicodeDecodeError does
        error = None
    error = error or RuntimeError(f"{answer['module']}.{answer['error']}: {answer['text']}")
    error.add_note(f"In the environment server:\n{answer['traceback']}")
    return error


def space_of(message: dict[str, Any]) -> spaces.Space[Any]:
    """Returns the space that :func:`rayvec.env_server.space_message` has described."""
    kind, given = message["space"], {key: value for key, value in message.items() if key != "space"}
    if kind == "Dict":
        return spaces.Dict(OrderedDict((key, space_of(each)) for key, each in given["spaces"].items()))
    if kind == "Tuple":
        return spaces.Tuple([space_of(each) for each in given["spaces"]])
    if kind == "Text":
        return spaces.Text(given["max_length"], min_length=given["min_length"], charset=given["characters"])
    if "dtype" in given:
        given["dtype"] = np.dtype(given["dtype"])
    if kind == "Box":
        given["shape"] = tuple(given["shape"])
    made: spaces.Space[Any] = getattr(spaces, kind)(**given)
    return made
