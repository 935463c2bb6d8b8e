"""A worker process: it makes a slice of the environments and executes the commands that its owner sends."""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data.global_random import seed_globals
from rayvec.data.trees import index_tree, object_leaves
from rayvec.envs.failures import FAILURES, captured
from rayvec.envs.in_process import InProcess
from rayvec.envs.native_slices import make_slice
from rayvec.envs.pickled_parts import Places, load_part
from rayvec.envs.slices import Slice
from rayvec.fleet.commands import IN_ARRAYS, NO_NEWS, Answer, Autoreset, Command, Op
from rayvec.fleet.restarts import EnvRules, seed_of
from rayvec.node.memory import CHUNK_STEP_BITS, BlockSpec, ChunkColumns, MachineBlock
from rayvec.node.messages import NO_NEWS_MESSAGE, dumps, packed_answer, receive, receive_files, send
from rayvec.node.processes import check_threads
from rayvec.node.shared_memory import keep_freed_memory
from rayvec.node.worker_share import WorkerShare, bind_cores
from rayvec.rollout.loop import ChunkRequest, PolicyHost, Rollout

logger = logging.getLogger(__name__)

STACK_SIGNAL = signal.SIGRTMAX - 1
"""The signal on which a worker writes its stack to a file that its owner reads."""
_KEPT_BYTES = 64 << 20
_MODES = tuple(Autoreset)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker starts with.

    Attributes:
        factory: Where the pickled factory of its environments lies in the file of all factories.
        first_id: Global index of its first environment.
        name: What errors call it.
        env_rules: What happens to environments that raise, hang or have run for long, and their limits.
        seed: Seeds the global random generators before the environments are made; None takes the system's numbers.
        share: What the worker gets of the machine.
    """

    factory: Places
    first_id: int
    name: str
    env_rules: EnvRules
    seed: int | None
    share: WorkerShare


@dataclass(frozen=True, slots=True)
class Attachment:
    """What a worker gets once the spaces of all environments are known; the file descriptor of the block follows.

    Attributes:
        spec: Determines the arrays of the block.
        index: Index of the worker.
        first_id: Global index of its first environment.
        objects: The last observations of its environments, as far as they are objects: an array for each such leaf.
    """

    spec: BlockSpec
    index: int
    first_id: int
    objects: list[NDArray[Any]]


def worker_main(spec: WorkerSpec, channel: socket.socket) -> None:
    """Makes the environments, reports their spaces, or an error, and executes commands until no more can come.

    Args:
        spec: What the worker starts with.
        channel: To the owner, which has sent the file of the factories, and one for the stack of this process.
    """
    os.set_inheritable(channel.fileno(), False)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the owner has exited
        factories, stack = receive_files(channel, 2)
        faulthandler.register(STACK_SIGNAL, file=stack)
        slice_ = _made(spec, channel, factories)
        if slice_ is not None:
            _serve(spec, slice_, channel)


def _made(spec: WorkerSpec, channel: socket.socket, factories: int) -> Slice | None:
    """Returns the slice. If it can't be made, it reports why, and returns None."""
    seed_globals(None)  # else every worker inherits the fork server's state
    try:
        check_threads()
        if spec.share.cores:
            bind_cores(spec.share.cores)
        factory = load_part(factories, spec.factory)
        os.close(factories)
        _seed(spec.seed, spec.first_id, 1)
        if factory.native:
            keep_freed_memory(_KEPT_BYTES)
        slice_ = make_slice(factory, spec.first_id, spec.name, spec.env_rules)
        seed = None if spec.seed is None else spec.seed % (1 << 64)
        seed_globals(seed, spec.first_id, 4)  # again, since the environments may have imported torch
        send(channel, dumps(tuple(Answer(value=slice_.spaces))))
        return slice_
    except FAILURES as error:
        send(channel, dumps(tuple(Answer(failure=captured(error, spec.name)))))
        return None


def _seed(seed: int | None, *key: int) -> None:
    """Seeds the generators that environments and policies may share in this process, if there is a seed."""
    if seed is not None:
        seed_globals(seed % (1 << 64), *key)


def _serve(spec: WorkerSpec, slice_: Slice, channel: socket.socket) -> None:
    """Executes commands until the owner sends no more. Then it closes the environments."""
    attachment: Attachment = pickle.loads(receive(channel))
    block = MachineBlock(attachment.spec, *receive_files(channel, 1))
    worker = _Worker(spec, slice_, block, attachment)
    while True:
        try:
            message = receive(channel)
        except EOFError:
            break
        where = f"{spec.name}, which unpickles what the driver has sent"
        try:
            command = worker.read(message)
            where = spec.name
            answer = worker.execute(command)
        except FAILURES as error:  # a class of a module that this process can't import; an info that holds itself
            answer = Answer(failure=captured(error, where))
        send(channel, NO_NEWS_MESSAGE if answer is NO_NEWS else packed_answer(answer, spec.name, dumps))
    slice_.close()
    block.close()


class _Worker:
    """What a worker does beside its slice: policies, global random generators, and observations that are objects.

    Args:
        spec: What it started with.
        slice_: The environments.
        block: The shared block.
        attachment: What it got with the block.
    """

    _last_step: Command

    def __init__(self, spec: WorkerSpec, slice_: Slice, block: MachineBlock, attachment: Attachment) -> None:
        self._spec, self._block = spec, block
        index, slice_.first_id = attachment.index, attachment.first_id
        self._rows = slice(*block.spec.bounds[index : index + 2])
        arrays = {name: index_tree(array, self._rows) for name, array in block.arrays.items()}
        self._objects = object_leaves(arrays["obs"])
        for leaf, values in zip(self._objects, attachment.objects, strict=True):
            leaf[:] = values
        self._envs = InProcess(slice_)
        self._envs.open(arrays, block.action_layout)
        of_worker = {name: array[index : index + 1] for name, array in block.by_worker.items()}
        slice_.progress = of_worker["progress"].data
        slice_.progress[0] = 0  # a worker that this one replaces may have died within a command
        self._chunk_step, self._cut_chunk = of_worker["chunk_step"], of_worker["cut_chunk"]
        _seed(seed_of(arrays, 0, slice_.first_id), spec.first_id, 2)
        self._all_rows = np.arange(slice_.num_envs)
        self._host = PolicyHost(self._envs)
        self._last_message = b""  # of a step of all environments whose actions lie in the block

    def read(self, message: bytes) -> Command:
        """Returns a command. Its actions may be views of the block."""
        if message == self._last_message:
            return self._last_step
        op, rows, mode, codes, rest = pickle.loads(message)
        rows = self._all_rows if rows is None else rows
        actions = rest
        if codes is not None:
            at = self._rows if rows is self._all_rows else rows + self._rows.start
            actions = self._block.action_layout.tree([leaf[at] for leaf in self._block.actions(codes)])
        command = Command(op, rows, actions if op == Op.STEP else None, _MODES[mode], rest)
        if codes is not None and rows is self._all_rows:  # the next step finds its actions in the same views
            self._last_message, self._last_step = message, command
        return command

    def execute(self, command: Command) -> Answer:
        """Executes a command."""
        if command.op in (Op.LOAD, Op.DROP, Op.ROLLOUT):
            return self._host.execute(command.op, command.rest, self._spec.name, self._take)
        if command.op == Op.RESET:
            seeds = dict(zip(command.rows.tolist(), command.rest[0], strict=True))
            _seed(seeds.get(0), self._spec.first_id, 2)
        answer = self._envs.post(command)
        if self._objects and command.op in IN_ARRAYS:
            answer = answer._replace(objects=[leaf[command.rows] for leaf in self._objects])
        return answer

    def _take(self, request: ChunkRequest) -> Rollout:
        """Takes a chunk. Returns it as it lies in its slot."""
        columns = ChunkColumns(self._block, request.place, self._rows)
        if request.place.num_weights:
            request = request._replace(weights=columns.weights)
        rollout = self._host.take(request, partial(self._is_cut, request.place.number), columns.empty)
        return rollout._replace(chunk=columns.pack(rollout.chunk))

    def _is_cut(self, number: int, num_steps: int) -> bool:
        """Reports the steps that were taken in a chunk. Returns whether the owner has cut that chunk."""
        self._chunk_step[0] = (number << CHUNK_STEP_BITS) + num_steps
        return bool(self._cut_chunk[0] == number)
