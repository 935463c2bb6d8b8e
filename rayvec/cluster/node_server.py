"""Serves a node: executes the commands that arrive by the stream, and answers with what they have changed."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

from rayvec.cluster.node import Node, NodeSpec, bytes_of, changes_rows, result_leaves
from rayvec.cluster.stream import Head, Stream
from rayvec.data import Chunk
from rayvec.data.trees import as_slice
from rayvec.envs.failures import FAILURES, captured
from rayvec.fleet.commands import NO_NEWS, Answer, Command, Op
from rayvec.node.messages import pack
from rayvec.node.processes import remove_folder

__all__ = ["NodeServer"]

_POLL_S = 1e-3
"""The interval at which a node that waits for its workers looks for other commands."""


class NodeServer:
    """Serves the driver at the other end of a stream until it closes the connection.

    A frame of the driver holds a command, or the name and the arguments of a method of this class. Every command that
    has arrived is started before an answer is awaited, so that groups of environments step independently. Commands may
    be answered in any order.

    Args:
        stream: To the driver.

    Attributes:
        kept: Chunks that stay here, by number, until Ray's object store gets them.
    """

    _node: Node | None = None

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.kept: dict[int, Chunk] = {}
        self._numbers = itertools.count()
        self._weights: dict[int, tuple[int, Any]] = {}
        self._is_open = True

    def serve(self) -> None:
        """Serves; returns when the connection is closed. The process has no use for workers afterwards."""
        try:
            with suppress(EOFError, OSError):
                while self._is_open:
                    pending = self._node.pending[:] if self._node else []
                    if not pending or self._stream.poll(0.0):
                        self._receive()
                    elif self._node and (answer := self._node.wait(_POLL_S)):
                        self._send(answer, pending[answer.place][0])
        finally:
            self.close(0.0)
            remove_folder()  # here, because the driver kills this process when the stream has ended
            self._stream.close()

    def _receive(self) -> None:
        """Reads a frame, and starts what it asks for."""
        message = self._stream.read_message(self._stream.read_head())
        node, place = self._node, len(self._node.pending) if self._node else 0
        try:
            op, *rest = message.load()
            if isinstance(op, str):
                answer = Answer(value=getattr(self, op)(*rest))
            else:
                assert node is not None
                node.post(self._with_weights(Command(op, *rest)))
                return
        except FAILURES as error:  # such as a class that this process can't import
            answer = Answer(failure=captured(error, node.name if node else "a node"), place=place)
        self._send(answer)

    def start(self, spec: NodeSpec) -> Any:
        """Starts the workers. Returns the spaces of the environments."""
        self._node = Node(spec, self._keep)
        self._node.start()
        return self._node.spaces()

    def allocate(self, *arguments: Any) -> None:
        """Allocates the arrays; the arguments are those of :meth:`Node.allocate`."""
        assert self._node is not None
        self._node.allocate(*arguments)
        machine = self._node.machine
        self._leaves = [leaf for leaf in result_leaves(machine.arrays) if not leaf.dtype.hasobject]
        leaves = machine.layout.flatten(machine.arrays["obs"])
        self._objects = [leaves[place] for place in machine.layout.objects]

    def pids(self) -> list[int]:
        """Returns the process ids of this process and of the workers."""
        return self._node.worker_pids() if self._node else []

    def close(self, timeout_s: float) -> None:
        """Closes the environments, and ends the service."""
        self._is_open = False
        if self._node is not None:
            self._node.close(timeout_s)
            self._node = None

    def _keep(self, chunk: Chunk) -> int:
        number = next(self._numbers)
        self.kept[number] = chunk
        return number

    def _with_weights(self, command: Command) -> Command:
        """Keeps the weights of a chunk, or adds those that an earlier one with the same version has brought."""
        if command.op != Op.ROLLOUT:
            return command
        order = command.rest
        if order.weights is not None:
            self._weights[order.key] = order.version, order.weights
        version, weights = self._weights.get(order.key, (None, None))
        return command._replace(rest=order._replace(weights=weights)) if version == order.version else command

    def _send(self, answer: Answer, command: Command | None = None) -> None:
        """Sends an answer, and the rows that the command has changed."""
        arrays, has_rows = [], command is not None and changes_rows(command) and len(command.rows) > 0
        if command is not None and has_rows:
            rows = as_slice(command.rows)
            arrays = [bytes_of(leaf[rows]) for leaf in self._leaves]
            if self._objects:
                answer = answer._replace(value=[leaf[rows].tolist() for leaf in self._objects])
        try:
            message = None if answer._replace(place=0) == NO_NEWS else pack(tuple(answer))
        except FAILURES as error:
            where = "a node, in what an environment returned (infos, observations or results)"
            message = pack(tuple(Answer(failure=captured(error, where))))
        self._stream.send(Head(answer.place, has_rows), arrays, message)
