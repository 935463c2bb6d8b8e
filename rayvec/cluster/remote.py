"""A node on another machine: the driver's end of its stream, a child of the cluster's fleet, and its actor's end."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import ray
from gymnasium import Space

from rayvec.cluster.node import Node
from rayvec.cluster.node_facts import check_versions, own_versions, restore_variables
from rayvec.cluster.nodes import ClaimActor, start_actor
from rayvec.cluster.ray_session import check_connected
from rayvec.cluster.stream import Head, Stream, accept, bytes_of, connect, memory_of_rows
from rayvec.data import NodeSlice
from rayvec.data.trees import object_leaves, tree_leaves
from rayvec.env_server import Refused
from rayvec.envs.failures import FAILURES, captured
from rayvec.errors import NodeLostError, first_line
from rayvec.fleet.commands import IN_ARRAYS, NO_NEWS, Answer, ChildLost, Command, Op, is_like
from rayvec.fleet.fleet import CLOSE_S
from rayvec.fleet.spaces import PoolSpaces
from rayvec.node.machine import MachineSpec
from rayvec.node.messages import Message, pack, packed_answer, read_answer
from rayvec.node.processes import remove_folder

_START_S = 30.0
"""How long Ray may take to start the actor of a node, on a machine that is busy."""
_UNLIMITED_S = 1e6
"""How long environments may take to close where the driver, or Ray once the driver has ended, ends what hangs."""


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
        return self._value()

    def _value(self) -> Any:
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
        """Attaches the arrays that hold the answers of its environments, and waits until the node has its own.

        Raises:
            ChildLost: The node is lost.
            Exception: Why the node can't allocate its own.
        """
        self._memory_of, self._objects = memory_of_rows(tree_leaves(arrays)), object_leaves(arrays["obs"])
        self._send(pack((arrays, first_id, *spaces)))
        self._value()

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
            NodeLostError: The node is lost, or Ray is not initialised.
        """
        check_connected()
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


class NodeActor(ClaimActor):
    """The process of a node. A thread serves the driver until that sends no more.

    The first frame of the driver holds what the node starts with; the answer has the spaces of the environments. The
    second holds what its arrays follow from. All others hold a command, or only the actions of a step that is else like
    the last one. Every command that has arrived is started
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
        close_s = CLOSE_S
        try:
            with suppress(OSError):  # the connection broke, of which an idle driver does not know
                self._call(self._start)
                self._call(self._node.allocate)
                while True:
                    pending = self._node.pending[:]
                    if not pending or self._node.wait_for_news(self._stream):
                        self._post()
                    elif answer := self._node.wait(0.0):
                        self._send(answer, pending[answer.place][0])
        except EOFError:
            close_s = _UNLIMITED_S
        finally:
            remove_folder()  # first: the driver kills this process when it has waited long enough
            if hasattr(self, "_node"):
                self._node.close(close_s)
            self._stream.close()

    def _call(self, function: Callable[..., Any]) -> None:
        """Calls a function with the arguments in the next frame, and sends what it returns, or raises."""
        message = self._stream.read_message(self._stream.read_head())
        try:
            answer = Answer(value=function(*message.load()))
        except FAILURES as error:
            answer = Answer(failure=captured(error, "a node"))
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
        else:
            message = self._stream.read_message(head)
        try:
            command = self._last_step._replace(actions=actions) if head.has_rows else Command(*message.load())
            if command.op == Op.STEP:
                self._last_step = command
            self._node.post(command)
        except FAILURES as error:  # such as a class that this process can't import, or a worker that is not replaced
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
