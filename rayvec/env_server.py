"""Serves one environment to rayvec on another machine, or in another Python.

This file needs Python 3.8 or newer and NumPy, and nothing of rayvec: copy it to where the simulator runs.

    python env_server.py CartPole-v1 --connect trainer.example:9000 --key-file key
    python env_server.py my_simulator:Plant --connect trainer.example:9000 --key-file key --kwargs '{"port": 7000}'

It dials in, so that it works from a container and from behind a firewall, makes the environment when rayvec asks for
it, and dials in again when the connection ends. It ends when rayvec closes its servers. An environment is one of
Gymnasium, of Gym, or any object with ``reset``, ``step``, ``observation_space`` and ``action_space``.

Nothing is pickled. A message is a JSON text and the bytes of its arrays. Both sides prove that they have the key, by
HMAC-SHA256 of a fresh number of the other side; what follows is not encrypted. The nodes of a cluster prove their key
to the driver in the same way, and checkpoints hold spaces and states of environments in the format of these messages.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import hmac
import importlib
import inspect
import json
import os
import re
import socket
import struct
import sys
import time
import traceback
from typing import Any

import numpy as np

GREETING = b"rayvec 7\n"
"""Ends with the version of the protocol, which both sides must share."""
LENGTHS = struct.Struct("!IQ")
"""A message begins with the lengths of its text and of its arrays."""
_NONCE = 32
_RETRY_S = (0.1, 0.2, 0.5)
_SILENT_S = 30


class Refused(Exception):
    """The other side speaks another version, or has another key."""


# Messages: a JSON text, and the bytes of arrays, whose types and shapes the text has.

_ARRAY_KINDS = "biufcSUmM"
"""Of the types of arrays, as NumPy names them: no objects, which would be addresses."""


def pack(message: Any, is_a: Any = issubclass) -> bytes:
    """Returns the bytes of a message: dicts, tuples, lists, strings, numbers and NumPy arrays.

    Args:
        message: The message.
        is_a: As of :func:`encoded`.

    Raises:
        TypeError: Something else is in the message.
    """
    arrays: list[bytes] = []
    text, data = json.dumps(encoded(message, arrays, is_a)).encode(), b"".join(arrays)
    return b"".join((LENGTHS.pack(len(text), len(data)), text, data))


def unpack(content: bytearray, text_bytes: int) -> Any:
    """Returns a message whose text has so many bytes; its arrays are views of the content."""
    return decoded(json.loads(content[:text_bytes].decode()), content, [text_bytes])


def receive(connection: socket.socket) -> Any:
    """Receives a message.

    Raises:
        OSError: The connection has ended.
    """
    lengths = LENGTHS.unpack(_receive_exactly(connection, LENGTHS.size))
    return unpack(_receive_exactly(connection, sum(lengths)), lengths[0])


def _receive_exactly(connection: socket.socket, num_bytes: int, deadline: float | None = None) -> bytearray:
    received = bytearray(num_bytes)
    view = memoryview(received)
    while view:
        if deadline is not None:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the other side has closed the connection")
        view = view[count:]
    return received


def encoded(value: Any, arrays: list[bytes], is_a: Any = issubclass) -> Any:
    """Returns a value as JSON has it, all but strings and numbers as lists with a tag; adds the bytes of arrays.

    Args:
        value: The value.
        arrays: Gets the bytes of each array.
        is_a: By default subclasses of containers and arrays count as these; with ``operator.is_`` they don't.
    """
    kind = type(value)
    if value is None or kind in (str, bool, int, float):
        return value
    if (is_a(kind, np.ndarray) or issubclass(kind, np.generic)) and value.dtype.kind in _ARRAY_KINDS:
        arrays.append(value.tobytes())
        return ("array" if isinstance(value, np.ndarray) else "scalar", value.dtype.str, value.shape)
    if is_a(kind, dict):
        pairs = value.items()
        return ("dict", [(encoded(key, arrays, is_a), _encoded_at(key, each, arrays, is_a)) for key, each in pairs])
    if is_a(kind, list) or is_a(kind, tuple):
        return ("list" if isinstance(value, list) else "tuple", [encoded(each, arrays, is_a) for each in value])
    name = f"array of {value.dtype}s" if kind is np.ndarray else kind.__name__
    raise TypeError(
        f" is a {name}, which can't be sent. Use numbers, strings, lists, tuples, dicts or arrays of numbers."
    )


def _encoded_at(key: Any, value: Any, arrays: list[bytes], is_a: Any) -> Any:
    try:
        return encoded(value, arrays, is_a)
    except TypeError as error:
        raise TypeError(f"[{key!r}]{error}") from None


def decoded(form: Any, data: Any, place: list[int]) -> Any:
    """Returns the value of which `encoded` has made a form.

    Args:
        form: The form, from JSON.
        data: The bytes of all arrays, which the value's own arrays are views of.
        place: Where those of the next array begin; it moves to where they end.
    """
    if not isinstance(form, list):
        return form
    tag, content = form[:2]
    if tag == "dict":
        return {decoded(key, data, place): decoded(each, data, place) for key, each in content}
    if tag in ("list", "tuple"):
        parts = [decoded(each, data, place) for each in content]
        return parts if tag == "list" else tuple(parts)
    dtype = np.dtype(content)
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"It has an array of {dtype}s. There must be arrays of numbers or strings only.")
    array: Any = np.ndarray(form[2], dtype, data, place[0])
    place[0] += array.nbytes
    return array if tag == "array" else array[()]


# Spaces, by the names of their classes, so that Gym's and Gymnasium's are understood alike.

_SPACES = {
    "Box": ("low", "high", "shape", "dtype"),
    "Discrete": ("n", "start", "dtype"),
    "MultiDiscrete": ("nvec", "start", "dtype"),
    "MultiBinary": ("n",),
    "Text": ("min_length", "max_length", "characters"),
}


def space_message(space: Any) -> Any:
    """Returns a space as a message.

    Raises:
        TypeError: A space of another kind.
    """
    name = type(space).__name__
    if name == "Dict":
        return {"space": name, "spaces": {key: space_message(each) for key, each in space.spaces.items()}}
    if name == "Tuple":
        return {"space": name, "spaces": [space_message(each) for each in space.spaces]}
    if name not in _SPACES:
        raise TypeError(f"a space of class {name} can't be sent. Use {', '.join(_SPACES)}, Dict or Tuple.")
    message = {key: getattr(space, key) for key in _SPACES[name] if hasattr(space, key)}
    if "dtype" in message:
        message["dtype"] = np.dtype(message["dtype"]).str
    if "characters" in message:
        message["characters"] = "".join(sorted(message["characters"]))
    return {"space": name, **message}


# The key: each side signs the nonces of both, and its part, so that it can't be answered with its own proof.


def dial(address: tuple[str, int], key: bytes) -> socket.socket:
    """Connects to rayvec; both sides prove that they have the key.

    Raises:
        Refused: The other side has another key or version.
        OSError: There is no connection.
    """
    connection = socket.create_connection(address, timeout=10)
    try:
        prove(connection, key, dials=True)
    except BaseException:
        connection.close()
        raise
    return connection


def prove(connection: socket.socket, key: bytes, *, dials: bool, timeout_s: float = 10.0) -> None:
    """Proves to the other side of a connection that this one has the key, and checks the proof of the other.

    Args:
        connection: The connection.
        key: The key.
        dials: Whether this side has connected: an environment server, or the driver to a node.
        timeout_s: How long the other side may take in all.

    Raises:
        Refused: The other side has another key or version.
        OSError: The connection has ended, or nothing came in time.
    """
    deadline = time.monotonic() + timeout_s
    connection.settimeout(timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    own, other = (b"dialler", b"listener") if dials else (b"listener", b"dialler")
    nonces = {own: os.urandom(_NONCE)}
    connection.sendall(GREETING + nonces[own])
    if _receive_exactly(connection, len(GREETING), deadline) != GREETING:
        raise Refused("it speaks another protocol, or has another version: both sides need the same env_server.py")
    nonces[other] = bytes(_receive_exactly(connection, _NONCE, deadline))
    both = nonces[b"dialler"] + nonces[b"listener"]
    connection.sendall(signature(key, own, both))
    if not hmac.compare_digest(_receive_exactly(connection, 32, deadline), signature(key, other, both)):
        raise Refused("it has another key")
    watch_silence(connection, _SILENT_S, _SILENT_S)


def signature(key: bytes, side: bytes, nonces: bytes) -> bytes:
    """Returns what proves that `side` has the key."""
    return hmac.new(key, side + nonces, hashlib.sha256).digest()


def watch_silence(connection: socket.socket, silent_s: int, unanswered_s: int) -> None:
    """Lets waits last for ever, and ends the connection when the other machine is gone.

    Args:
        connection: The connection.
        silent_s: About how long the other machine may be silent.
        unanswered_s: How long it may acknowledge nothing; 0 for the system's time.
    """
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    silence = {"TCP_KEEPIDLE": silent_s // 3, "TCP_KEEPINTVL": silent_s // 5, "TCP_KEEPCNT": 3}
    for name, value in {**silence, "TCP_USER_TIMEOUT": 1000 * unanswered_s}.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def read_key(path: str) -> bytes:
    """Returns the key in a file, without white space around it.

    Raises:
        ValueError: It has fewer than 16 bytes.
    """
    with open(path, "rb") as file:
        key = file.read().strip()
    if len(key) < 16:
        raise ValueError(f"the key in {path} has {len(key)} bytes. It must have at least 16.")
    return key


# The environment.


def env_maker(name: str) -> Any:
    """Returns what makes an environment: of an id ("CartPole-v1"), or a class or function ("module:Class").

    Raises:
        ImportError: There is no such module.
        AttributeError: The module lacks the class.
        ValueError: The name has no module.
    """
    if re.search(r"-v\d+$", name):
        try:
            library = importlib.import_module("gymnasium")
        except ImportError:
            library = importlib.import_module("gym")
        return functools.partial(library.make, name)
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


class Served:
    """An environment behind the operations that rayvec sends, each a method that takes its request."""

    def __init__(self, maker: Any, kwargs: dict[str, Any]) -> None:
        self.maker, self.kwargs = maker, kwargs
        self.env: Any = None

    def open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Makes the environment, after it has closed the one before."""
        self.close({})
        self.env = self.maker(**self.kwargs)
        return {
            "observation_space": space_message(self.env.observation_space),
            "action_space": space_message(self.env.action_space),
            "render_mode": getattr(self.env, "render_mode", None),
        }

    def reset(self, request: dict[str, Any]) -> dict[str, Any]:
        """Resets it with a seed and options, as far as it takes these."""
        given = {key: request[key] for key in ("seed", "options")}
        accepted = inspect.signature(self.env.reset).parameters
        if not any(each.kind is each.VAR_KEYWORD for each in accepted.values()):
            given = {key: value for key, value in given.items() if key in accepted}
        if "seed" not in given and request["seed"] is not None and hasattr(self.env, "seed"):
            self.env.seed(request["seed"])
        result = self.env.reset(**given)
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            return {"obs": result[0], "info": result[1]}
        return {"obs": result, "info": {}}

    def step(self, request: dict[str, Any]) -> dict[str, Any]:
        """Takes a step; of four values, as Gym gives them, the info says whether a time limit has ended the episode."""
        result = self.env.step(request["action"])
        if len(result) == 4:
            obs, reward, done, info = result
            truncated = bool(done and info.get("TimeLimit.truncated", False))
            result = obs, reward, bool(done and not truncated), truncated, info
        obs, reward, terminated, truncated, info = result
        return {"obs": obs, "reward": reward, "terminated": terminated, "truncated": truncated, "info": info}

    def get(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns an attribute, or says that it is a method, or that there is none."""
        owner = self._owner(request["name"])
        if owner is None:
            return {"missing": True}
        value = getattr(owner, request["name"])
        return {"method": True} if callable(value) else {"value": value}

    def set(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sets an attribute of the wrapper that has it, or of the environment itself."""
        owner = self._owner(request["name"])
        setattr(getattr(self.env, "unwrapped", self.env) if owner is None else owner, request["name"], request["value"])
        return {}

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Calls a method."""
        method = getattr(self._owner(request["name"]), request["name"])
        return {"value": method(*request["args"], **request["kwargs"])}

    def close(self, request: dict[str, Any]) -> dict[str, Any]:
        """Closes the environment."""
        env, self.env = self.env, None
        if hasattr(env, "close"):
            env.close()
        return {}

    def _owner(self, name: str) -> Any:
        """Returns the outermost wrapper that has an attribute, or None."""
        layer = self.env
        while layer is not None:
            if hasattr(layer, name):
                return layer
            layer = layer.__dict__.get("env")
        return None


def serve(connection: socket.socket, served: Served) -> None:
    """Answers requests until rayvec asks this server to end.

    Raises:
        OSError: The connection has ended.
    """
    while True:
        request = receive(connection)
        if request["op"] == "end":
            return
        try:
            answer = pack(getattr(served, request["op"])(request))
        except Exception as error:
            answer = pack(_failure(error))
        connection.sendall(answer)


def _failure(error: Exception) -> dict[str, Any]:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {"error": type(error).__name__, "module": type(error).__module__, "text": str(error), "traceback": text}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line. Returns its exit code: 0 when rayvec ended it, 1 when rayvec refuses it."""
    parser = argparse.ArgumentParser(description="Serve one environment to rayvec.")
    parser.add_argument("env", help='an id ("CartPole-v1"), or a class or function ("module:Class")')
    parser.add_argument("--connect", required=True, metavar="HOST:PORT", help="where rayvec waits for servers")
    parser.add_argument("--key-file", required=True, help="file with the key that rayvec has too")
    parser.add_argument(
        "--once",
        action="store_true",
        help="end with the connection, and where there is none, instead of dialling in again",
    )
    parser.add_argument("--kwargs", type=json.loads, default={}, help="arguments of the environment, as JSON")
    args = parser.parse_args(arguments)
    host, _, port = args.connect.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        parser.error(f"--connect is {args.connect!r}. It must be HOST:PORT, for example trainer:9000.")
    sys.path.insert(0, os.getcwd())
    try:
        try:
            served = Served(env_maker(args.env), args.kwargs)
            key = read_key(args.key_file)
        except (ImportError, AttributeError, ValueError, OSError) as error:
            raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
            if raised_in != __file__ and not raised_in.startswith("<"):  # in the module that the name is of
                traceback.print_exc()
            parser.error(str(error))
        return _run((host, int(port)), key, served, args.once)
    except KeyboardInterrupt:
        return 130


def _run(address: tuple[str, int], key: bytes, served: Served, once: bool) -> int:
    """Serves, and dials in again whenever the connection ends, or serves `once`. Returns the exit code."""
    failures = 0
    while True:
        try:
            connection = dial(address, key)
        except Refused as error:
            print(f"env_server: refused by {address[0]}:{address[1]}: {error}", file=sys.stderr)
            return 1
        except OSError as error:
            if not failures:
                print(f"env_server: no connection to {address[0]}:{address[1]} yet ({error})", file=sys.stderr)
            time.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
            failures += 1
            if once:
                return 1
            continue
        failures = 0
        try:
            serve(connection, served)
            return 0
        except OSError:
            if once:
                return 0
        finally:
            connection.close()
            try:
                served.close({})
            except Exception:
                traceback.print_exc()


if __name__ == "__main__":
    sys.exit(main())
