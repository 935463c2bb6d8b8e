"""A node on another machine: the driver's end of its stream, a child of the cluster's fleet, and what serves it."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from gymnasium import Space

from rayvec.cluster.node import Node, NodeChunk, NodeSpec, begun, bytes_of, changes_rows, result_leaves
from rayvec.cluster.stream import Head, Stream
from rayvec.data import Chunk
from rayvec.data.layouts import ArrayLayout
from rayvec.data.trees import as_slice, objects, tree_leaves
from rayvec.envs.failures import FAILURES, captured
from rayvec.errors import NodeLostError, RemoteFailure, first_line
from rayvec.fleet.commands import NO_NEWS, Answer, ChildLost, Command, Op
from rayvec.node.machine import CLOSE_S
from rayvec.node.messages import Message, is_raised_by_handler, pack
from rayvec.node.processes import remove_folder

__all__ = ["NodeServer", "RemoteNode"]

_POLL_S = 1e-3
"""The interval at which a node that waits for its workers looks for other commands."""
_GRACE_S = 1.0
"""What a node is given more than the driver waits: it is the driver that ends what hangs."""


class RemoteNode:
    """A node that another process serves.

    Args:
        process: That process, which has begun to start: `connect()` waits for it and returns the stream or raises
            ``OSError``, `kept(number)` returns a reference to a chunk that stays there, `kill()` ends it.
        spec: What the node starts.

    Attributes:
        name: What errors call it.
        allocation: The spaces that all nodes share, and the global index of the first environment, for :meth:`open`.
    """

    transport = "tcp"
    allocation: tuple[Space[Any], Space[Any], int]
    _stream: Stream
    _known_rows: Any
    _known_parts: Any

    def __init__(self, process: Any, spec: NodeSpec) -> None:
        self.name, self._process, self._spec = f"node {spec.name}", process, spec
        self._pending: list[Command] = []
        self._last_step: Command | None = None
        self._sent_weights: dict[int, int] = {}

    def start(self) -> None:
        """Connects to the process, and starts the workers there.

        Raises:
            ChildLost: It can't be reached.
        """
        try:
            self._stream = self._process.connect()
        except OSError as error:
            raise self._lost(error) from error
        self._send("start", self._spec, [os.path.abspath(entry) for entry in sys.path])

    def _send(self, *request: Any) -> None:
        self._transmit(Head(), (), pack(request))

    def _transmit(self, head: Head, arrays: Sequence[Any] = (), message: Message | None = None) -> None:
        """Sends a frame. If the connection is lost, the wait for the answer raises."""
        try:
            self._stream.send(head, arrays, message)
        except EOFError:
            pass
        except OSError as error:
            if is_raised_by_handler(error):
                raise

    def spaces(self) -> Any:
        """Waits until the environments have been made. Returns their spaces.

        Raises:
            ChildLost: The node is lost.
            Exception: The exception that the constructor of an environment raised.
        """
        return self._reply()

    def _reply(self) -> Any:
        """Waits for the result of a method of the server.

        Raises:
            ChildLost: The node is lost.
            Exception: What the node has raised.
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
                given = self._pending[head.place].rows
                if given is not self._known_rows:
                    self._known_rows, rows = given, as_slice(given)
                    parts = [leaf[rows] for leaf in self._leaves]
                    self._known_parts = rows, parts, [bytes_of(part) for part in parts]
                rows, parts, views = self._known_parts
                stream.read_into(views)
                if not isinstance(rows, slice):  # the parts are copies
                    for leaf, part in zip(self._leaves, parts, strict=True):
                        leaf[rows] = part
            message = stream.read_message(head) if head.size else None
        except (OSError, EOFError) as error:
            raise self._lost(error) from error
        try:
            answer = NO_NEWS if message is None else Answer(*message.load())
        except Exception as error:  # a class that this process can't import
            where = f"the process that unpickles an answer of {self.name}"
            answer = Answer(failure=RemoteFailure.capture(error, where))
        return answer._replace(place=head.place) if head.place else answer

    def _lost(self, error: BaseException) -> ChildLost:
        why = f"{type(error).__name__}: {first_line(error)}"
        return ChildLost(NodeLostError(f"{self.name} is lost ({why}). Its log may say what ended it."))

    def open(self, arrays: dict[str, Any]) -> None:
        """Attaches the arrays that hold the answers of its environments, and sends how these begin."""
        self._known_rows = None
        self._leaves = [leaf for leaf in result_leaves(arrays) if not leaf.dtype.hasobject]
        leaves = list(tree_leaves(arrays["obs"]))
        self._objects = [leaves[place] for place in ArrayLayout.with_objects(self.allocation[0]).objects]
        self._send("allocate", *self.allocation, begun(arrays))
        with suppress(ChildLost):  # wait() says it
            self._reply()

    def post(self, command: Command) -> None:
        """Starts a command. Weights travel once for each of their versions."""
        if command.op == Op.ROLLOUT and command.rest.weights is not None:
            order = command.rest
            if self._sent_weights.get(order.key) == order.version:
                command = command._replace(rest=order._replace(weights=None))
            self._sent_weights[order.key] = order.version
        if _is_like(command, self._last_step):
            self._transmit(Head(has_rows=True), [bytes_of(np.ascontiguousarray(command.actions))])
        else:
            self._send(*command)
        if command.op == Op.STEP:
            self._last_step = command
        self._pending.append(command)

    def wait(self, timeout_s: float) -> Answer | None:
        """Returns the answer to one of the pending commands, or None if there is none within `timeout_s`."""
        if not self._stream.poll(timeout_s):
            return None
        answer = self._read()
        command = self._pending.pop(answer.place)
        if isinstance(answer.value, NodeChunk) and answer.value.kept is not None:
            return answer._replace(value=answer.value._replace(kept=self._process.kept(answer.value.kept)))
        if self._objects and answer.value is not None and changes_rows(command):
            for leaf, values in zip(self._objects, answer.value, strict=True):
                leaf[command.rows] = objects(values)
            answer = answer._replace(value=None)
        return answer

    def worker_pids(self) -> Any:
        """Returns the process ids of the owner of the workers, and of these."""
        self._send("pids")
        return self._reply()

    def kill(self) -> None:
        """Ends the node at once."""
        if hasattr(self, "_stream"):  # else it has not started
            self._stream.close()
        self._process.kill()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Asks the node to close its environments."""
        self._send("close", timeout_s + _GRACE_S)

    def join(self, timeout_s: float) -> bool:
        """Waits until it has closed them, and ends it after `timeout_s`. Returns whether it has closed by itself."""
        has_ended = self._stream.wait_for_end(timeout_s)
        self.kill()
        return has_ended


class NodeServer:
    """Serves the driver at the other end of a stream until it closes the connection.

    A frame of the driver holds a command, the name and the arguments of a method of this class, or only the actions of
    a step that is else like the last one. Every command that has arrived is started before an answer is awaited, so
    that groups of environments step independently. Commands may be answered in any order.

    Args:
        stream: To the driver.
        gpus: The GPUs that are claimed for the environments.

    Attributes:
        kept: Chunks that stay here, by number, until Ray's object store gets them.
    """

    _node: Node | None = None
    _last_step: Command

    def __init__(self, stream: Stream, gpus: Sequence[str] = ()) -> None:
        self._stream, self._gpus = stream, list(gpus)
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
        head = self._stream.read_head()
        node, place = self._node, len(self._node.pending) if self._node else 0
        if head.has_rows:
            request = [*self._last_step._replace(actions=np.empty_like(self._last_step.actions))]
            self._stream.read_into([bytes_of(request[2])])
        else:
            message = self._stream.read_message(head)
        try:
            op, *rest = request if head.has_rows else message.load()
            if isinstance(op, str):
                answer = Answer(value=getattr(self, op)(*rest))
            else:
                assert node is not None
                command = self._with_weights(Command(op, *rest))
                if op == Op.STEP:
                    self._last_step = command
                node.post(command)
                return
        except FAILURES as error:  # such as a class that this process can't import
            answer = Answer(failure=captured(error, node.name if node else "a node"), place=place)
        self._send(answer)

    def start(self, spec: NodeSpec, path: list[str]) -> Any:
        """Starts the workers. Returns the spaces of the environments. Policies are found by the driver's path."""
        sys.path[:] = dict.fromkeys([*path, *sys.path])
        self._node = Node(spec, self._keep)
        self._node.gpus = self._gpus
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


def _is_like(command: Command, last: Command | None) -> bool:
    """Whether a command is a step that differs from the last one in the values of its actions alone."""
    if last is None or command.op != Op.STEP or command.rows is not last.rows or command.mode != last.mode:
        return False
    new, old = command.actions, last.actions
    if type(new) is not np.ndarray or type(old) is not np.ndarray or new.dtype.hasobject:
        return False
    return bool(new.dtype == old.dtype and new.shape == old.shape)
