"""A node on another machine: the driver's end of its stream, a child of the cluster's fleet, and what serves it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from gymnasium import Space

from rayvec.cluster.node import Node, result_leaves
from rayvec.cluster.stream import Head, Stream, bytes_of, memory_of_rows
from rayvec.data.trees import object_leaves
from rayvec.envs.failures import FAILURES, captured
from rayvec.errors import NodeLostError, first_line
from rayvec.fleet.commands import IN_ARRAYS, NO_NEWS, Answer, ChildLost, Command, Op, is_like
from rayvec.fleet.fleet import CLOSE_S
from rayvec.node.machine import MachineSpec
from rayvec.node.messages import Message, pack, packed_answer, read_answer
from rayvec.node.processes import remove_folder

__all__ = ["NodeServer", "RemoteNode"]

_GRACE_S = 1.0
"""What a node is given more than the driver waits: it is the driver that ends what hangs."""


class RemoteNode:
    """A node that another process serves.

    Args:
        process: That process, which has begun to start: `connect()` waits for it and returns the stream or raises
            ``OSError``, `kill()` ends it.
        spec: What the node starts.

    Attributes:
        name: What errors call it.
    """

    transport = "tcp"
    _stream: Stream

    def __init__(self, process: Any, spec: MachineSpec) -> None:
        self.name, self._process, self._spec = f"node {spec.name}", process, spec
        self._pending: list[Command] = []
        self._last_step: Command | None = None

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
        except (EOFError, OSError) as error:
            if isinstance(error, OSError) and error.errno is None:  # a signal's handler raised it
                raise

    def spaces(self) -> Any:
        """Waits until the environments have been made. Returns their spaces.

        Raises:
            ChildLost: The node is lost.
            Exception: The exception that the constructor of an environment raised.
        """
        return self._reply()

    def _reply(self) -> Any:
        """Waits for the result of a method of the node.

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
                memory = self._memory_of(self._pending[head.place].rows)
                stream.read_into(memory.bytes)
                memory.scatter()
            message = stream.read_message(head) if head.size else None
        except (OSError, EOFError) as error:
            raise self._lost(error) from error
        answer = NO_NEWS if message is None else read_answer(message.load, self.name)
        return answer._replace(place=head.place) if head.place else answer

    def _lost(self, error: BaseException) -> ChildLost:
        why = f"{type(error).__name__}: {first_line(error)}"
        return ChildLost(NodeLostError(f"{self.name} is lost ({why}). Its log may say what ended it."))

    def open(self, arrays: dict[str, Any], first_id: int, *spaces: Space[Any]) -> None:
        """Attaches the arrays that hold the answers of its environments, and sends how these begin."""
        self._memory_of, self._objects = memory_of_rows(result_leaves(arrays)), object_leaves(arrays["obs"])
        self._send("allocate", arrays, first_id, *spaces)
        with suppress(ChildLost):  # wait() says it
            self._reply()

    def post(self, command: Command) -> None:
        """Starts a command."""
        if is_like(command, self._last_step):
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
        for leaf, values in zip(self._objects, answer.objects, strict=False):
            leaf[command.rows] = values
        return answer

    def worker_pids(self) -> Any:
        """Returns the process ids of the owner of the workers, and of these."""
        self._send("worker_pids")
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

    A frame of the driver holds a command, the name and the arguments of a method of the node, or only the actions of
    a step that is else like the last one. Every command that has arrived is started before an answer is awaited, so
    that groups of environments step independently. Commands may be answered in any order.

    Args:
        stream: To the driver.
        gpus: The GPUs that are claimed for the environments.
    """

    _node: Node | None = None
    _last_step: Command

    def __init__(self, stream: Stream, gpus: Sequence[str] = ()) -> None:
        self._stream, self._gpus = stream, list(gpus)
        self._is_open = True

    def serve(self) -> None:
        """Serves; returns when the connection is closed. The process has no use for workers afterwards."""
        try:
            with suppress(EOFError, OSError):
                while self._is_open:
                    pending = self._node.pending[:] if self._node else []
                    if self._node is None or not pending or self._node.wait_for_news(self._stream):
                        self._receive()
                    elif answer := self._node.wait(0.0):
                        self._send(answer, pending[answer.place][0])
        finally:
            if self._node is not None:
                self._node.close(0.0)
            remove_folder()  # here, because the driver kills this process when the stream has ended
            self._stream.close()

    def _receive(self) -> None:
        """Reads a frame, and starts what it asks for."""
        head = self._stream.read_head()
        place = len(self._node.pending) if self._node else 0
        if head.has_rows:
            step = self._last_step._replace(actions=np.empty_like(self._last_step.actions))
            self._stream.read_into([bytes_of(step.actions)])
        else:
            message = self._stream.read_message(head)
        try:
            op, *rest = step if head.has_rows else message.load()
            if isinstance(op, str):
                answer = Answer(value=self._called(op, rest))
            else:
                assert self._node is not None
                command = Command(op, *rest)
                if op == Op.STEP:
                    self._last_step = command
                self._node.post(command)
                return
        except FAILURES as error:  # such as a class that this process can't import
            answer = Answer(failure=captured(error, self._node.name if self._node else "a node"), place=place)
        self._send(answer)

    def _called(self, name: str, arguments: list[Any]) -> Any:
        """Returns the result of a method of the node."""
        if name == "start":
            return self._start(*arguments)
        self._is_open = name != "close"
        return getattr(self._node, name)(*arguments)

    def _start(self, spec: MachineSpec, path: list[str]) -> Any:
        """Starts the workers. Returns the spaces of the environments. Policies are found by the driver's path."""
        sys.path[:] = dict.fromkeys([*path, *sys.path])
        self._node = Node(spec)
        self._node.gpus = self._gpus
        self._node.start()
        return self._node.spaces()

    def _send(self, answer: Answer, command: Command | None = None) -> None:
        """Sends an answer, and the rows that the command has changed."""
        arrays: Sequence[memoryview] = ()
        if self._node is not None and command is not None and command.op in IN_ARRAYS:
            arrays = self._node.memory_of(command.rows).gather()
            if self._node.objects:
                answer = answer._replace(objects=[leaf[command.rows] for leaf in self._node.objects])
        message = packed_answer(answer, "a node", pack) if answer.is_news else None
        self._stream.send(Head(answer.place, bool(arrays)), arrays, message)
