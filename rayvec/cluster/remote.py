"""The driver's end of a node on another machine: a child of the cluster's fleet."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
from gymnasium import Space

from rayvec.cluster.node import NodeChunk
from rayvec.cluster.node_server import NodeSpec, Request
from rayvec.cluster.own_node import note_chunk, store_seeds
from rayvec.cluster.row_bytes import RowBytes, bytes_of
from rayvec.cluster.stream import Head, Stream
from rayvec.data.layouts import ArrayLayout
from rayvec.data.trees import tree_leaves
from rayvec.envs.spaces import PoolSpaces
from rayvec.errors import NodeLostError, RemoteFailure, first_line
from rayvec.fleet.commands import NO_NEWS, STEPPING, Answer, ChildLost, Command, Op
from rayvec.node.memory import action_leaves
from rayvec.node.messages import Message, pack, packed_message

__all__ = ["NodeProcess", "RemoteNode"]

_CLOSE_S = 10.0
_GRACE_S = 1.0
"""What a node is given more than the driver waits: it is the driver that ends what hangs."""


class NodeProcess(Protocol):
    """The process of a node, which serves one driver."""

    def connect(self) -> Stream:
        """Waits until it runs, and connects to it.

        Raises:
            OSError: It can't be reached.
        """
        ...

    def kept(self, number: int) -> Any:
        """Returns a reference, in Ray's object store, to a chunk that stays there."""
        ...

    def kill(self) -> None:
        """Ends it at once."""
        ...


class RemoteNode:
    """A node that another process serves.

    Args:
        process: That process.
        spec: What it starts.

    Attributes:
        name: What errors call it.

    Raises:
        ChildLost: It can't be reached.
    """

    transport = "tcp"

    def __init__(self, process: NodeProcess, spec: NodeSpec) -> None:
        self.name, self._process = f"node {spec.name}", process
        try:
            self._stream = process.connect()
        except OSError as error:
            raise self._lost(error) from error
        self._pending: list[Command] = []
        self._sent_weights: dict[int, int] = {}
        self._ask(Request.START, spec)

    def _ask(self, request: Request, value: Any) -> None:
        with suppress(OSError):  # the answer says it
            self._stream.send(Head(request), (), pack(value))

    def _reply(self) -> Any:
        """Waits for the answer to a request.

        Raises:
            ChildLost: The node is lost.
            Exception: What the node has raised.
        """
        value = self._read(lambda: self._stream.read_value(self._stream.read_head()))
        if isinstance(value, RemoteFailure):
            raise value.rebuild()
        return value

    def _read(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except (OSError, EOFError) as error:
            raise self._lost(error) from error

    def _lost(self, error: BaseException) -> ChildLost:
        return ChildLost(
            NodeLostError(
                f"{self.name} is lost.",
                expected="a node to answer until its environments are closed",
                got=f"{type(error).__name__}: {first_line(error)}",
                remedy="Look into the node's log for what ended it; on_node_loss='rehost' resumes on the nodes that "
                "remain.",
            )
        )

    def spaces(self) -> PoolSpaces:
        """Waits until the environments have been made. Returns their spaces.

        Raises:
            ChildLost: The node is lost.
            Exception: The exception that the constructor of an environment raised.
        """
        spaces: PoolSpaces = self._reply()
        return spaces

    def attach(self, observation: Space[Any], action: Space[Any], first_id: int) -> None:
        """Notes the spaces that all nodes share, and the global index of the first environment."""
        self._spaces = observation, action
        self._first_id = first_id
        self.layout, self._action_layout = ArrayLayout.with_objects(observation), ArrayLayout.of_actions(action)

    def open(self, arrays: dict[str, Any]) -> None:
        """Attaches the arrays that hold the answers of its environments, and sends how these begin."""
        self._arrays = arrays
        self._rows = RowBytes(arrays)
        self._all_rows = np.arange(len(arrays["episode"]))
        self._known_rows, self._is_all = self._all_rows, True
        leaves = list(tree_leaves(arrays["obs"]))
        self._objects = [leaves[place] for place in self.layout.objects]
        has_begun = arrays["episode"].any() or arrays["has_seed"].any()
        self._ask(Request.ALLOCATE, (*self._spaces, self._first_id, arrays if has_begun else None))
        with suppress(ChildLost):  # wait() says it
            self._reply()

    def post(self, command: Command) -> None:
        """Starts a command."""
        store_seeds(self._arrays, command)
        if command.op == Op.STEP and (leaves := action_leaves(command.actions, self._action_layout, len(command.rows))):
            head, arrays, message = self._step(command, leaves)
        else:
            head, arrays, message = Head(command.op), [], self._message(command)
        with suppress(OSError):  # wait() says that it is lost
            self._stream.send(head, arrays, message)
        self._pending.append(command)

    def _step(self, command: Command, leaves: list[Any]) -> tuple[Head, list[Any], None]:
        """Returns the frame of a step whose actions are arrays."""
        rows = command.rows
        if rows is not self._known_rows:
            self._known_rows, self._is_all = rows, np.array_equal(rows, self._all_rows)
        codes = "".join(leaf.dtype.char for leaf in leaves).encode()
        head = Head(Op.STEP, command.mode, len(codes), -1 if self._is_all else len(rows))
        ids = [] if self._is_all else [bytes_of(rows)]
        return head, [codes, *ids, *(bytes_of(np.ascontiguousarray(leaf)) for leaf in leaves)], None

    def _message(self, command: Command) -> Message:
        """Returns a command by pickle. Weights travel once for each of their versions."""
        if command.op == Op.ROLLOUT and command.rest.weights is not None:
            order = command.rest
            if self._sent_weights.get(order.key) == order.version:
                command = command._replace(rest=order._replace(weights=None))
            self._sent_weights[order.key] = order.version
        return packed_message(tuple(command))

    def wait(self, timeout_s: float) -> Answer | None:
        """Returns the answer to one of the pending commands, or None if there is none within `timeout_s`."""
        if not self._stream.poll(timeout_s):
            return None
        answer: Answer = self._read(self._answer)
        return answer

    def _answer(self) -> Answer:
        head = self._stream.read_head()
        command = self._pending[head.place]
        if head.mode:
            self._rows.write(command.rows, self._stream.read_into)
        answer = NO_NEWS
        if head.size:
            message = self._stream.read_message(head)
            try:
                answer = Answer(*message.load())
            except Exception as error:  # a class that this process can't import
                where = f"the process that unpickles an answer of {self.name}"
                answer = Answer(failure=RemoteFailure.capture(error, where))
        del self._pending[head.place]
        answer = self._noted(command, answer)
        return answer._replace(place=head.place) if head.place else answer

    def _noted(self, command: Command, answer: Answer) -> Answer:
        """Writes what an answer has brought beside raw arrays into the arrays."""
        rows = command.rows
        note_chunk(self._arrays, command, answer)
        if isinstance(answer.value, NodeChunk) and answer.value.summary is not None:
            return answer._replace(value=answer.value._replace(kept=self._process.kept(answer.value.kept)))
        if self._objects and answer.value is not None and command.op in STEPPING and command.op != Op.ROLLOUT:
            for leaf, values in zip(self._objects, answer.value, strict=True):
                leaf[rows] = np.fromiter(values, object, len(values))
            answer = answer._replace(value=None)
        return answer

    def worker_pids(self) -> list[int]:
        """Returns the process ids of the workers."""
        self._ask(Request.PIDS, None)
        pids: list[int] = self._reply()
        return pids

    def kill(self) -> None:
        """Ends the node at once."""
        self._stream.close()
        self._process.kill()

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Asks the node to close its environments."""
        self._ask(Request.CLOSE, timeout_s + _GRACE_S)

    def join(self, timeout_s: float) -> bool:
        """Waits until it has closed them, and ends it after `timeout_s`. Returns whether it has closed by itself."""
        has_ended = self._stream.wait_for_end(timeout_s)
        self.kill()
        return has_ended
