"""A worker process: it makes a slice of the environments and executes the commands of its ring."""

from __future__ import annotations

import errno
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from rayvec.data.global_random import seed_globals
from rayvec.data.layouts import ArrayLayout, index_tree
from rayvec.data.trees import tree_leaves
from rayvec.envs.failures import FAILURES, captured, end_if_forked
from rayvec.envs.native_slices import NativeSlice
from rayvec.envs.pickled_parts import Places, load_part
from rayvec.envs.slices import Slice
from rayvec.fleet.commands import NO_NEWS, STEPPING, Answer, Command, Op
from rayvec.fleet.restarts import RestartPolicy, seed_of
from rayvec.node.chunk_slots import ChunkColumns, ChunkSlot
from rayvec.node.memory import CHUNK_STEP_BITS, BlockSpec, MachineBlock
from rayvec.node.messages import Message, pack, receive, send
from rayvec.node.preloaded import check_threads
from rayvec.node.shared_memory import keep_freed_memory
from rayvec.rollout.policy_host import ChunkOrder, PolicyHost, TakenChunk
from rayvec.rollout.stepper import Here, Stepper

__all__ = ["CLOSE", "WorkerSpec", "worker_main"]

logger = logging.getLogger(__name__)

CLOSE = Op.DROP
"""A command to drop nothing, without a rest, ends the worker."""
_POLL_S = 1.0
"""The interval at which an idle worker checks whether its owner has closed the pipe."""
_KEPT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker starts with.

    Attributes:
        factory: Where the pickled factory of its environments lies in the file of all factories.
        first_id: Global index of its first environment.
        name: What errors call it.
        restart_policy: Whether environments that raise are restarted.
        seed: Seeds the global random generators before the environments are made; None takes the system's numbers.
    """

    factory: Places
    first_id: int
    name: str
    restart_policy: RestartPolicy
    seed: int | None


@dataclass(frozen=True, slots=True)
class Attachment:
    """What a worker gets once the spaces of all environments are known; the file descriptor of the block follows.

    Attributes:
        spec: Determines the arrays of the block.
        index: Index of the worker.
        first_id: Global index of its first environment.
        objects: The last observations of its environments, as far as they are objects: a list for each such leaf.
    """

    spec: BlockSpec
    index: int
    first_id: int
    objects: list[list[Any]]


def worker_main(spec: WorkerSpec, pipe: Connection, factories: int) -> None:
    """Makes the environments, reports their spaces, or an error, through the pipe, and serves commands.

    Args:
        spec: What the worker starts with.
        pipe: To the owner.
        factories: File descriptor of the pickled factories.
    """
    os.set_inheritable(pipe.fileno(), False)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the owner has exited
        try:
            slice_ = _made(spec, pipe, factories)
            if slice_ is not None:
                _serve(spec, slice_, pipe)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            logger.error("%s: an environment has closed file descriptors of this process, which exits", spec.name)


def _made(spec: WorkerSpec, pipe: Connection, factories: int) -> Slice | None:
    """Returns the slice. If it can't be made, it reports why, and returns None."""
    seed_globals(None)  # else every worker inherits the fork server's state
    try:
        check_threads()
        factory = load_part(factories, spec.factory)
        os.close(factories)
        _seed(spec.seed, spec.first_id, 1)
        if factory.native:
            keep_freed_memory(_KEPT_BYTES)
        kind = NativeSlice if factory.native else Slice
        slice_: Slice = kind(factory, spec.first_id, spec.name, spec.restart_policy)
        spaces = pack(slice_.spaces)
    except FAILURES as error:
        send(pipe, pack(captured(error, spec.name)))
        return None
    send(pipe, spaces)
    return slice_


def _seed(seed: int | None, *key: int) -> None:
    """Seeds the generators that environments and policies may share in this process, if there is a seed."""
    if seed is not None:
        seed_globals(seed % (1 << 64), *key)


def _serve(spec: WorkerSpec, slice_: Slice, pipe: Connection) -> None:
    """Executes commands until one ends the worker, or the owner closes the pipe."""
    attachment: Attachment = receive(pipe).load()
    block = MachineBlock(attachment.spec, _received_fd(pipe))
    ring, slice_.first_id = block.ring(attachment.index), attachment.first_id
    arrays = {name: index_tree(array, ring.rows) for name, array in block.arrays.items()}
    leaves = list(tree_leaves(arrays["obs"]))
    objects = [leaves[place] for place in block.layout.objects]
    for leaf, values in zip(objects, attachment.objects, strict=True):
        leaf[:] = np.fromiter(values, object, len(values))
    slice_.open(block.layout, arrays)
    slice_.progress = ring.progress.data
    _seed(seed_of(arrays, 0, slice_.first_id), spec.first_id, 2)
    worker = _Worker(spec, slice_, objects, block, attachment.index)
    pid = os.getpid()
    while True:
        while not ring.go.acquire(_POLL_S):
            if pipe.poll():  # readable without a command: the owner has closed its end
                if ring.go.try_acquire():
                    break
                return
        try:
            command = ring.read(pipe)
        except (EOFError, OSError):
            return
        except FAILURES as error:  # such as a class of a module that this process can't import
            answer = Answer(failure=captured(error, f"{spec.name}, which unpickles what the driver has sent"))
        else:
            if command.op == CLOSE and command.rest is None:
                worker.close()
                return
            if command.op == Op.ROLLOUT and command.rest.place.slot not in block.slots:
                block.slots[command.rest.place.slot] = ChunkSlot(_received_fd(pipe))
            answer = worker.execute(command)
            end_if_forked(pid)
        message = None if answer is NO_NEWS else _packed(answer, spec.name)
        ring.has_rest[ring.slot] = message is not None
        ring.advance()
        ring.done.post()
        if message is not None:
            send(pipe, message)


def _received_fd(pipe: Connection) -> int:
    fd = reduction.recv_handle(pipe)
    os.set_inheritable(fd, False)
    return fd


def _packed(answer: Answer, name: str) -> Message:
    """Returns an answer. If it can't be pickled, it returns that failure instead."""
    try:
        return pack(tuple(answer))
    except FAILURES as error:
        where = f"{name}, in what an environment returned (infos, observations or results)"
        return pack(tuple(Answer(failure=captured(error, where))))


class _Worker:
    """What a worker does beside its slice: policies, global random generators, and observations that are objects.

    Args:
        spec: What it started with.
        slice_: The environments.
        objects: The leaves of the observations that are objects.
        block: The shared block.
        index: Index of the worker.
    """

    def __init__(self, spec: WorkerSpec, slice_: Slice, objects: list[Any], block: MachineBlock, index: int) -> None:
        self._spec, self._slice, self._objects = spec, slice_, objects
        self._slots, self._rows = block.slots, slice(*block.spec.bounds[index : index + 2])
        arrays = block.block.arrays
        self._chunk_step, self._cut_chunk = (arrays[name][index : index + 1] for name in ("chunk_step", "cut_chunk"))
        layout = ArrayLayout.of(slice_.spaces.action)
        self._stepper = Stepper(Here(slice_), layout, slice_.first_id, slice_.native_mode)
        self._host = PolicyHost(self._stepper)

    def execute(self, command: Command) -> Answer:
        """Executes a command."""
        if command.op in (Op.LOAD, Op.DROP, Op.ROLLOUT):
            return self._act(command)
        if command.op == Op.STEP:
            self._host.note_absence()
        if command.op == Op.RESET:
            self._host.note_reset(command.rows)
            seeds = dict(zip(command.rows.tolist(), command.rest[0], strict=True))
            _seed(seeds.get(0), self._spec.first_id, 2)
        answer = self._slice.execute(command)
        if self._objects and command.op in STEPPING:
            answer = answer._replace(value=[leaf[command.rows].tolist() for leaf in self._objects])
        return answer

    def _act(self, command: Command) -> Answer:
        """Executes a command for policies."""
        value = None
        try:
            if command.op == Op.LOAD:
                self._host.load(*command.rest)
            elif command.op == Op.DROP:
                self._host.drop(*command.rest)
            else:
                value = self._take(command.rest)
        except FAILURES as error:
            return Answer(failure=captured(error, self._spec.name))
        notes = tuple(self._stepper.notes)
        self._stepper.notes.clear()
        return Answer(value=value, notes=notes)

    def _take(self, order: ChunkOrder) -> tuple[TakenChunk, int]:
        """Takes a chunk. Returns it as it lies in its slot, and the bytes that it needs there."""
        place = order.place
        assert place is not None
        slot = self._slots[place.slot]
        slot.map()
        if place.num_weights:
            order = order._replace(weights=slot.weights(place.num_weights))
        columns = ChunkColumns(slot, place, self._rows)
        taken = self._host.take(order, partial(self._is_cut, place.number), columns.empty)
        return taken._replace(chunk=slot.pack(taken.chunk)), columns.num_bytes

    def _is_cut(self, number: int, num_steps: int) -> bool:
        """Reports the steps that were taken in a chunk. Returns whether the owner has cut that chunk."""
        self._chunk_step[0] = (number << CHUNK_STEP_BITS) + num_steps
        return bool(self._cut_chunk[0] == number)

    def close(self) -> None:
        """Closes the environments."""
        try:
            self._slice.close()
        except FAILURES:
            logger.exception("%s: an environment raised in close()", self._spec.name)
