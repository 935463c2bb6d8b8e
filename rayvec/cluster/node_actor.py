"""The actor of a node other than the driver's: it serves the driver at the other end of a stream."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from rayvec.cluster.node import Node
from rayvec.cluster.node_facts import own_versions, restore_variables
from rayvec.cluster.nodes import ClaimActor
from rayvec.cluster.stream import Head, Stream, accept, bytes_of
from rayvec.envs.failures import FAILURES, captured
from rayvec.fleet.commands import IN_ARRAYS, Answer, Command, Op
from rayvec.fleet.spaces import PoolSpaces
from rayvec.node.machine import MachineSpec
from rayvec.node.messages import pack, packed_answer
from rayvec.node.processes import remove_folder

_CLOSE_S = 1e6
"""How long environments may take to close: the driver ends what hangs, and Ray does when the driver has ended."""


class NodeActor(ClaimActor):
    """The process of a node. A thread serves the driver until that sends no more.

    The first frame of the driver holds what the node starts with; the answer has the spaces of the environments. The
    second holds what its arrays follow from; only a failure is answered, in place of the first command. All others hold
    a command, or only the actions of a step that is else like the last one. Every command that has arrived is started
    before an answer is awaited, so that groups of environments step independently. Commands may be answered in any
    order.
    """

    _node: Node
    _stream: Stream
    _last_step: Command

    def __init__(self) -> None:
        restore_variables("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")  # environments get those of the node

    def listen(self, address: str, key: bytes) -> tuple[dict[str, str], int]:
        """Begins to serve at this node's own address. Returns the versions of this process, and the port."""
        listener = socket.create_server((address, 0))
        port: int = listener.getsockname()[1]
        self._gpus = self.gpus()
        threading.Thread(target=self._serve, args=(listener, key), name="rayvec-node", daemon=True).start()
        return own_versions(), port

    def worker_pids(self) -> list[int]:
        """Returns the process ids of this process and of the workers."""
        return self._node.worker_pids()

    def _serve(self, listener: socket.socket, key: bytes) -> None:
        self._stream = accept(listener, key)
        try:
            with suppress(EOFError, OSError):
                self._call(self._start)
                self._call(self._node.allocate)
                while True:
                    pending = self._node.pending[:]
                    if not pending or self._node.wait_for_news(self._stream):
                        self._post()
                    elif answer := self._node.wait(0.0):
                        self._send(answer, pending[answer.place][0])
        finally:
            if hasattr(self, "_node"):
                self._node.close(_CLOSE_S)
            remove_folder()  # here, because the driver kills this process when the stream has ended
            self._stream.close()

    def _call(self, function: Callable[..., Any]) -> None:
        """Calls a function with the arguments in the next frame, and sends what it returns, or raises."""
        message = self._stream.read_message(self._stream.read_head())
        try:
            answer = Answer(value=function(*message.load()))
        except FAILURES as error:
            answer = Answer(failure=captured(error, "a node"))
        if answer.is_news:
            self._send(answer)
        if answer.failure is not None:
            raise EOFError("the driver gives this node up")

    def _start(self, spec: MachineSpec, path: list[str]) -> PoolSpaces:
        """Starts the workers. Returns the spaces of the environments. Policies are found by the driver's path."""
        sys.path[:] = dict.fromkeys([*path, *sys.path])
        self._node = Node(spec, self._gpus)
        self._node.start()
        return self._node.spaces()

    def _post(self) -> None:
        """Reads a frame, and starts its command."""
        head = self._stream.read_head()
        if head.has_rows:
            actions = np.empty_like(self._last_step.actions)
            self._stream.read_into([bytes_of(actions)])
            self._node.post(self._last_step._replace(actions=actions))
            return
        message = self._stream.read_message(head)
        try:
            command = Command(*message.load())
            if command.op == Op.STEP:
                self._last_step = command
            self._node.post(command)
        except FAILURES as error:  # such as a class that this process can't import
            self._send(Answer(failure=captured(error, self._node.name), place=len(self._node.pending)))

    def _send(self, answer: Answer, command: Command | None = None) -> None:
        """Sends an answer, and the rows that the command has changed."""
        arrays: Sequence[memoryview] = ()
        if command is not None and command.op in IN_ARRAYS:
            arrays = self._node.memory_of(command.rows).gather()
            if self._node.objects:
                answer = answer._replace(objects=[leaf[command.rows] for leaf in self._node.objects])
        message = packed_answer(answer, "a node", pack) if answer.is_news else None
        self._stream.send(Head(answer.place, bool(arrays)), arrays, message)
