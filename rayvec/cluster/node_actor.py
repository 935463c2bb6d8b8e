"""The actor of a node, which serves the driver, and what is claimed from Ray for a node's environments."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rayvec.cluster.node import Node
from rayvec.cluster.node_facts import own_versions, restore_variables
from rayvec.cluster.nodes import reserved_bundles
from rayvec.cluster.ray_session import check_connected
from rayvec.cluster.stream import Head, Stream, accept, bytes_of
from rayvec.data import NodeSlice
from rayvec.envs.failures import FAILURES, captured
from rayvec.errors import NodeLostError
from rayvec.fleet.commands import IN_ARRAYS, Answer, ChildLost, Command, Op
from rayvec.node.machine import MachineSpec
from rayvec.node.messages import pack, packed_answer
from rayvec.node.processes import remove_folder

_PLACE_S = 10.0


class NodeActor:
    """The process of a node. A thread serves the driver at the other end of a stream until it closes the connection.

    A frame of the driver holds a command, the name and the arguments of a method of the node, or only the actions of
    a step that is else like the last one. Every command that has arrived is started before an answer is awaited, so
    that groups of environments step independently. Commands may be answered in any order.
    """

    _node: Node | None = None
    _is_open = True
    _stream: Stream
    _last_step: Command

    def __init__(self) -> None:
        restore_variables("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")  # environments get those of the node

    def gpus(self) -> list[str]:
        """Returns the GPUs that Ray has given to this actor."""
        ids: list[str] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return ids

    def listen(self, address: str, key: bytes) -> tuple[dict[str, str], int]:
        """Begins to serve at this node's own address. Returns the versions of this process, and the port."""
        listener = socket.create_server((address, 0))
        port: int = listener.getsockname()[1]
        self._gpus = self.gpus()
        threading.Thread(target=self._serve, args=(listener, key), name="rayvec-node", daemon=True).start()
        return own_versions(), port

    def _serve(self, listener: socket.socket, key: bytes) -> None:
        self._stream = accept(listener, key)
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


def start_actor(place: NodeSlice, amounts: Mapping[str, float]) -> Any:
    """Starts an actor on a node that claims what its environments need, in a reserved bundle of the node if any."""
    check_connected()
    group, bundles = reserved_bundles()
    strategy: Any = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
    custom = dict(amounts)
    if place.node_id in bundles:
        index, bundle = bundles[place.node_id][0]
        custom = {name: min(amount, bundle.get(name, 0)) for name, amount in amounts.items()}
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    num_cpus, num_gpus = custom.pop("CPU", 0), custom.pop("GPU", 0)
    kind: Any = ray.remote(max_restarts=0, max_task_retries=0)(NodeActor)
    claims = kind.options(num_cpus=num_cpus, num_gpus=num_gpus, resources=custom, scheduling_strategy=strategy)
    return claims.remote()


class Claim:
    """What Ray gives to nothing else until it is released, or until this process ends: for the driver's own node.

    In a driver, a placement group holds it, which needs no process: Ray removes it with the driver's job. Within a
    task or an actor, such as a trial of Ray Tune, the job outlives the process. There an actor holds it, which ends
    with the process that made it. So it does with GPUs, because only an actor knows which ones it has.

    Args:
        place: The node.
        amounts: What is claimed, by Ray's names.
    """

    def __init__(self, place: NodeSlice, amounts: Mapping[str, float]) -> None:
        self._name, self._amounts = place.name, dict(amounts)
        is_in_job = ray.get_runtime_context().worker.mode == ray.WORKER_MODE
        self._actor = start_actor(place, amounts) if is_in_job or "GPU" in amounts else None
        self._group: Any = None
        if self._actor is None:
            self._group = placement_group([dict(amounts)], bundle_label_selector=[{"ray.io/node-id": place.node_id}])

    def wait(self) -> list[str]:
        """Waits until Ray has reserved it. Returns the GPUs.

        Raises:
            ChildLost: It did not become free in time.
        """
        with suppress(ray.exceptions.GetTimeoutError):
            if self._actor is not None:
                return list(ray.get(self._actor.gpus.remote(), timeout=_PLACE_S))
            if self._group.wait(_PLACE_S):
                return []
        raise ChildLost(NodeLostError(f"node {self._name} has not had {self._amounts} free for {_PLACE_S:g} s."))

    def release(self) -> None:
        """Makes it free again."""
        if ray.is_initialized():
            remove_placement_group(self._group) if self._actor is None else ray.kill(self._actor)
