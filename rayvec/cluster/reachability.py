"""Which nodes of the cluster the network reaches. Ray itself notices after a minute that one is gone.

The operating system of a node accepts a connection to the port of its raylet, however busy the node is, and even if the
process is stopped. So the head of the cluster must answer a request, too. A node
refuses connections to the port of a raylet that has died.
"""

from __future__ import annotations

import math
import socket
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray._private import worker
from ray.exceptions import RpcError

from rayvec.errors import NodeLostError
from rayvec.node.object_store import room_for

__all__ = [
    "alive_nodes",
    "can_call_ray",
    "check_connected",
    "check_head",
    "head_answers",
    "put",
    "unreachable",
]

_ANSWER_S = 2.0
_REQUEST_S = 10.0
_SILENCE_S = 10.0
_MOST_THREADS = 64
Address = tuple[str, int]
_head_was_silent_s: dict[str, float] = {}
"""When the head of a cluster last gave no answer, by its address."""


def alive_nodes() -> list[dict[str, Any]]:
    """Returns what Ray says of each node that it takes for alive.

    Raises:
        NodeLostError: The head of the cluster does not answer; Ray would wait for it without end.
    """
    check_head()
    return [node for node in ray.nodes() if node["Alive"]]


def unreachable(addresses: Mapping[str, Address]) -> set[str]:
    """Returns the ids of the nodes that do not accept a connection within two seconds."""
    with ThreadPoolExecutor(min(len(addresses), _MOST_THREADS) or 1) as threads:
        answers = dict(zip(addresses, threads.map(_answers, addresses.values()), strict=True))
    return {node_id for node_id, does_answer in answers.items() if not does_answer}


def _answers(address: Address, *, refused_is_answer: bool = False) -> bool:
    try:
        socket.create_connection(address, _ANSWER_S).close()
    except ConnectionRefusedError:
        return refused_is_answer
    except OSError:
        return False
    return True


def _serves() -> bool:
    """Whether the head's process answers a request: for one that is stopped, the system still accepts connections."""
    connected: Any = worker.global_worker
    try:
        connected.gcs_client.internal_kv_exists(b"", None, timeout=_REQUEST_S)
    except RpcError:
        return False
    return True


def head_answers() -> bool:
    """Whether the head of the cluster answers; else calls of Ray wait for a minute or more, some without end."""
    if not ray.is_initialized():
        return False
    address = ray.get_runtime_context().gcs_address
    host, _, port = address.rpartition(":")
    is_there = _answers((host.strip("[]"), int(port)), refused_is_answer=True)  # a head that restarts refuses
    does_answer = is_there and _serves()
    _head_was_silent_s[address] = -math.inf if does_answer else time.monotonic()
    return does_answer


def can_call_ray() -> bool:
    """Whether Ray is initialised and its head answers.

    A head that gave no answer is asked again only ten seconds later: what closes many nodes waits for it once.
    """
    if not ray.is_initialized():
        return False
    silent_s = _head_was_silent_s.get(ray.get_runtime_context().gcs_address, -math.inf)
    return time.monotonic() - silent_s > _SILENCE_S and head_answers()


def check_connected(cause: Exception | None = None) -> None:
    """Raises ``NodeLostError`` because of `cause` if Ray is not initialised. A call of Ray would join any cluster."""
    if not ray.is_initialized():
        raise NodeLostError(
            "A program stays connected to Ray until it has closed what it runs there.",
            expected="an initialised Ray",
            got="none: ray.shutdown() was called",
            remedy="Call close() before ray.shutdown(). After ray.init(), make the environments or ranks again.",
        ) from cause


def check_head(cause: Exception | None = None) -> None:
    """Raises ``NodeLostError`` because of `cause` if the head of the cluster does not answer."""
    check_connected(cause)
    if not head_answers():
        if sys.excepthook is worker.custom_excepthook:  # it tells the head first, for which it waits without end
            sys.excepthook = worker.normal_excepthook
        raise NodeLostError(
            "The head of a Ray cluster runs as long as the cluster.",
            expected=f"{ray.get_runtime_context().gcs_address} to accept connections and answer requests",
            got=f"no connection within {_ANSWER_S:g} s, or no answer within {_REQUEST_S:g} s",
            remedy="Start the cluster again; a training resumes from its last checkpoint.",
        ) from cause


def put(value: Any, what: str) -> Any:
    """Puts a value into the object store and returns its reference; `what` names it in errors.

    Raises:
        NodeLostError: Ray is not initialised.
        ConfigError: The store is full.
    """
    check_connected()
    with room_for(what):
        return ray.put(value)
