"""Serves a node: executes the commands that arrive by the stream, and answers with what they have changed."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from rayvec.cluster.node import Node
from rayvec.cluster.row_bytes import RowBytes, bytes_of
from rayvec.cluster.stream import Head, Stream
from rayvec.envs.failures import FAILURES, captured
from rayvec.envs.pickled_parts import PickledParts
from rayvec.fleet.commands import STEPPING, Answer, Autoreset, Command, Op
from rayvec.fleet.restarts import RestartPolicy
from rayvec.node.machine import Machine
from rayvec.node.messages import Message, pack
from rayvec.node.processes import remove_folder

__all__ = ["ANSWER", "NodeServer", "NodeSpec", "Request"]

logger = logging.getLogger(__name__)

ANSWER = 0
"""The kind of the frames that a node sends."""
_POLL_S = 1e-3
"""The interval at which a node that waits for its workers looks for other commands."""


class Request(IntEnum):
    """What a driver asks of a node beside commands: each is answered by one value. Smaller numbers are commands."""

    START = 100
    """The start of the workers (a :class:`NodeSpec`); the answer is their spaces."""
    ALLOCATE = 101
    """The arrays (arguments of :meth:`Node.allocate`)."""
    PIDS = 102
    """The process ids of the workers."""
    CLOSE = 103
    """The end, within so many seconds. It has no answer but the end of the connection."""


class NodeSpec(NamedTuple):
    """What the machine of a node starts with. It stands for the factory of the environments, which only workers load.

    Attributes:
        parts: The pickled factory of each worker.
        num_envs: How many environments, or native sub-batches, there are.
        seed: As of :class:`~rayvec.envs.factory.EnvFactory`.
        name: What errors call the node.
        preload: Modules that the fork server imports.
        restart_policy: Whether environments that raise, and workers that die or hang, are replaced.
        first_id: Global index of the first environment, or native sub-batch.
    """

    parts: PickledParts
    num_envs: int
    seed: int | None
    name: str
    preload: tuple[str, ...]
    restart_policy: RestartPolicy
    first_id: int

    def in_parts(self, bounds: Any) -> PickledParts:
        """Returns the pickled factories."""
        return self.parts

    def machine(self) -> Machine:
        """Starts the machine."""
        return Machine(
            self,  # type: ignore[arg-type]
            len(self.parts.places),
            node=self.name,
            preload=self.preload,
            restart_policy=self.restart_policy,
            first_id=self.first_id,
        )


class NodeServer:
    """Serves the driver at the other end of a stream until it closes the connection.

    Every command that has arrived is started before an answer is awaited, so that groups of environments step
    independently. Commands may be answered in any order.

    Args:
        stream: To the driver.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._node: Node | None = None
        self._name = "a node"
        self._pending: list[tuple[Command, Any]] = []
        self._weights: dict[int, tuple[int, Any]] = {}

    @property
    def kept(self) -> dict[int, Any]:
        """Chunks that stay here, by number."""
        return self._started.kept

    def serve(self) -> None:
        """Serves; returns when the connection is closed. The process has no use for workers afterwards."""
        try:
            with suppress(EOFError, OSError):
                while True:
                    while not self._pending or self._stream.poll(0.0):
                        self._receive()
                    self._answer_one()
        finally:
            self._close(0.0)
            remove_folder()  # here, because the driver kills this process when the stream has ended
            self._stream.close()

    def _receive(self) -> None:
        """Reads a frame, and starts what it asks for."""
        head = self._stream.read_head()
        if head.kind >= Request.START:
            message = self._stream.read_message(head)
            try:
                value = self._fulfil(Request(head.kind), message.load())
            except EOFError:
                raise
            except FAILURES as error:
                value = captured(error, self._name)
            self._stream.send(Head(head.kind), (), self._packed(value))
            return
        try:
            command = self._command(head)
            self._pending.append((command, self._started.post(command)))
        except (EOFError, OSError):
            raise
        except FAILURES as error:  # such as a class that this process can't import
            command = Command(Op(head.kind), np.zeros(0, np.int64))
            self._pending.append((command, captured(error, f"{self._name}, which unpickles a command")))

    @property
    def _started(self) -> Node:
        assert self._node is not None
        return self._node

    def _fulfil(self, request: Request, value: Any) -> Any:
        if request == Request.START:
            self._name = f"node {value.name}"
            self._node = Node(value.machine(), self._name)
            return self._node.machine.spaces
        if request == Request.ALLOCATE:
            self._started.allocate(*value)
            machine = self._started.machine
            self._rows = RowBytes(machine.arrays)
            self._all_rows = np.arange(machine.num_envs)
        if request == Request.PIDS:
            return [os.getpid(), *self._started.machine.worker_pids()]
        if request == Request.CLOSE:
            self._close(value)
            raise EOFError("the driver has closed the node")
        return None

    def _close(self, timeout_s: float) -> None:
        if self._node is not None:
            self._node.close(timeout_s)
            self._node = None

    def _command(self, head: Head) -> Command:
        """Reads a command."""
        if head.size:
            message = self._stream.read_message(head)
            command = Command(*message.load())
            if command.op == Op.ROLLOUT:
                return command._replace(rest=self._with_weights(command.rest))
            return command
        codes = bytes(self._stream.read(head.place)).decode()
        rows = self._all_rows
        if head.rows >= 0:
            rows = np.frombuffer(self._stream.read(8 * head.rows), np.int64)
        layout = self._started.machine.action_layout
        leaves = [np.empty((len(rows), *shape), code) for code, (_, shape) in zip(codes, layout.leaves, strict=True)]
        for leaf in leaves:
            self._stream.read_into(bytes_of(leaf))
        return Command(Op.STEP, rows, layout.tree(leaves), Autoreset(head.mode))

    def _with_weights(self, order: Any) -> Any:
        """Keeps the weights of an order, or adds those that an earlier one with the same version has brought."""
        if order.weights is not None:
            self._weights[order.key] = order.version, order.weights
        version, weights = self._weights.get(order.key, (None, None))
        return order._replace(weights=weights) if version == order.version else order

    def _answer_one(self) -> None:
        """Waits for answers for a moment, and sends the first that is there."""
        for place, (_, ticket) in enumerate(self._pending):
            is_alone = len(self._pending) == 1
            if self._is_answered(place, ticket, _POLL_S if is_alone else 0.0):
                return
        if not is_alone:
            self._is_answered(0, self._pending[0][1], _POLL_S / 10)

    def _is_answered(self, place: int, ticket: Any, timeout_s: float) -> bool:
        """Waits for the answer to a pending command, and sends it. Returns whether it is there."""
        node, command = self._started, self._pending[place][0]
        try:
            if not hasattr(ticket, "rebuild"):
                if not node.wait(ticket, timeout_s):
                    return False
                answer = node.take(ticket)
            else:
                answer = Answer(failure=ticket)
        except FAILURES as error:  # a worker that is not replaced
            answer = Answer(failure=captured(error, self._name))
        del self._pending[place]
        self._send_answer(place, command, answer)
        return True

    def _send_answer(self, place: int, command: Command, answer: Answer) -> None:
        arrays: Any = ()
        has_arrays = command.op in STEPPING and command.op != Op.ROLLOUT and len(command.rows) > 0
        if has_arrays:
            arrays = self._rows.read(command.rows)
            objects = self._started.objects(command.rows)
            if objects:
                answer = answer._replace(value=objects)
        head = Head(ANSWER, has_arrays, place)
        has_news = any(answer[:1] + answer[2:]) or answer.value is not None
        self._stream.send(head, [*arrays], self._packed(tuple(answer)) if has_news else None)

    def _packed(self, value: Any) -> Message:
        """Returns a value. If it can't be pickled, it returns that failure instead."""
        try:
            return pack(value)
        except FAILURES as error:
            where = f"{self._name}, in what an environment returned (infos, observations or results)"
            return pack(tuple(Answer(failure=captured(error, where))))
