"""An environment whose steps run in an environment server: its reset and step are messages over a socket."""

from __future__ import annotations

import builtins
import socket
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rayvec.env_server import pack, receive


class ServerEnv(gymnasium.Env[Any, Any]):
    """An environment in another process, which has dialled in.

    Args:
        connection: To the server.
        name: Of the server, for errors.
        end: Called once the connection is closed.

    Raises:
        Exception: What the constructor of the environment raised.
    """

    def __init__(self, connection: socket.socket, name: str, end: Callable[[], None] = lambda: None) -> None:
        self._connection, self._name, self._end = connection, name, end
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
        return self._call("render")

    def close(self) -> None:
        """Closes the environment. The server ends, or dials in again."""
        if self._connection.fileno() < 0:
            return
        try:
            self._ask("close")
        finally:
            self._connection.close()
            self._end()

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
        message = pack({"op": op, **request})
        try:
            self._connection.sendall(message)
            answer: dict[str, Any] = receive(self._connection)
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
        given["dtype"] = np.dtype(given["dtype"]).type
    if kind == "Discrete" and given.get("dtype") is np.int64:  # older versions of Gymnasium take none
        del given["dtype"]
    made: spaces.Space[Any] = getattr(spaces, kind)(**given)
    return made
