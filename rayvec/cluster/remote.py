"""A node on another machine: the driver's end of its stream, a child of the cluster's fleet."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
from gymnasium import Space

from rayvec.cluster.node_actor import NodeActor
from rayvec.cluster.node_facts import check_versions
from rayvec.cluster.nodes import start_actor
from rayvec.cluster.stream import Head, Stream, bytes_of, connect, memory_of_rows
from rayvec.data import NodeSlice
from rayvec.data.trees import object_leaves, tree_leaves
from rayvec.env_server import Refused
from rayvec.errors import NodeLostError, first_line
from rayvec.fleet.commands import NO_NEWS, Answer, ChildLost, Command, Op, is_like
from rayvec.node.machine import MachineSpec
from rayvec.node.messages import Message, pack, read_answer

_START_S = 30.0
"""How long Ray may take to start the actor of a node, on a machine that is busy."""


class RemoteNode:
    """A node that an actor serves, which begins to start.

    Args:
        place: Where it is.
        amounts: What is claimed for its environments, by Ray's names.
        spec: What the node starts.

    Attributes:
        name: What errors call it.
    """

    transport = "tcp"
    _stream: Stream

    def __init__(self, place: NodeSlice, amounts: Mapping[str, float], spec: MachineSpec) -> None:
        self.name, self._place, self._spec = f"node {spec.name}", place, spec
        self._key = secrets.token_bytes(32)
        self._actor = start_actor(NodeActor, place, amounts)
        self._listening = self._actor.listen.remote(place.address, self._key)
        self._pending: list[Command] = []
        self._last_step: Command | None = None

    def start(self) -> None:
        """Waits until the actor runs, connects to it, and starts the workers there.

        Raises:
            ChildLost: It can't be reached.
            ConfigError: It has other versions.
        """
        where = self._place.address
        try:
            versions, port = ray.get(self._listening, timeout=_START_S)
            check_versions(versions, self._place.name)
            where += f":{port}, which a firewall may block"
            self._stream = connect(self._place.address, port, self._key)
        except (ray.exceptions.RayError, Refused, OSError) as error:
            raise self._lost(f"no connection to {where}", error) from error
        self._send(pack((self._spec, [os.path.abspath(entry) for entry in sys.path])))

    def _send(self, message: Message | None, head: Head = Head(), arrays: Sequence[Any] = ()) -> None:  # noqa: B008
        """Sends a frame. If the connection is lost, the wait for the answer raises."""
        try:
            self._stream.send(head, arrays, message)
        except (EOFError, OSError) as error:
            if isinstance(error, OSError) and error.errno is None:  # a signal's handler raised it
                raise

    def spaces(self) -> Any:
        """Waits until the environments have been made. Returns their spaces.

        Raises:
            ChildLost: The node is lost.
            Exception: The exception that the constructor of an environment raised.
        """
        answer = self._read()
        if answer.failure is not None:
            raise answer.failure.rebuild()
        return answer.value

    def _read(self) -> Answer:
        """Reads a frame. Rows of the arrays that it brings are received where they belong."""
        stream = self._stream
        try:
            head = stream.read_head()
            if head.has_rows:
                memory = self._memory_of(self._pending[head.place].rows)
                stream.read_into(memory.bytes)
                memory.scatter()
            message = stream.read_message(head) if head.size else None
        except (OSError, EOFError) as error:
            raise self._lost("the connection ended", error) from error
        answer = NO_NEWS if message is None else read_answer(message.load, self.name)
        return answer._replace(place=head.place) if head.place else answer

    def _lost(self, what: str, error: BaseException) -> ChildLost:
        why = f"{what}: {type(error).__name__}: {first_line(error)}"
        return ChildLost(NodeLostError(f"{self.name} is lost ({why}). Its log may say what ended it."))

    def open(self, arrays: dict[str, Any], first_id: int, *spaces: Space[Any]) -> None:
        """Attaches the arrays that hold the answers of its environments, and sends how these begin.

        If the node can't allocate its own, the first command is answered by that failure.
        """
        self._memory_of, self._objects = memory_of_rows(tree_leaves(arrays)), object_leaves(arrays["obs"])
        self._send(pack((arrays, first_id, *spaces)))

    def post(self, command: Command) -> None:
        """Starts a command."""
        if is_like(command, self._last_step):
            self._send(None, Head(has_rows=True), [bytes_of(np.ascontiguousarray(command.actions))])
        else:
            self._send(pack(tuple(command)))
        if command.op == Op.STEP:
            self._last_step = command
        self._pending.append(command)

    def wait(self, timeout_s: float) -> Answer | None:
        """Returns the answer to one of the pending commands, or None if there is none within `timeout_s`."""
        if not self._stream.poll(timeout_s):
            return None
        answer = self._read()
        command = self._pending.pop(answer.place)
        for leaf, values in zip(self._objects, answer.objects, strict=False):
            leaf[command.rows] = values
        return answer

    def worker_pids(self) -> Any:
        """Returns the process ids of the owner of the workers, and of these.

        Raises:
            NodeLostError: The node is lost.
        """
        try:
            return ray.get(self._actor.worker_pids.remote(), timeout=_START_S)
        except ray.exceptions.RayError as error:
            raise self._lost("its actor does not answer", error).error from error

    def kill(self) -> None:
        """Ends the node at once."""
        if hasattr(self, "_stream"):  # else it has not started
            self._stream.close()
        if ray.is_initialized():
            ray.kill(self._actor)

    def close(self, timeout_s: float) -> None:
        """Asks the node to close its environments."""
        self._stream.end()

    def join(self, timeout_s: float) -> bool:
        """Waits until it has closed them, and ends it after `timeout_s`. Returns whether it has closed by itself."""
        has_ended = self._stream.wait_for_end(timeout_s)
        self.kill()
        return has_ended
