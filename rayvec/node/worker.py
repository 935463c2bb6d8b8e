"""A worker process, which holds one slice of environments and serves a ring of commands.

This module imports neither Ray nor torch, so that the fork server can import it and start workers in milliseconds. A
worker exits when its owner closes the pipe. The kernel kills it when the fork server exits.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import logging
import os
import pickle
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rayvec.data import ChunkRequest, RawInfo, SubBatchInfo
from rayvec.data.global_random import seed_globals
from rayvec.data.layouts import split_actions
from rayvec.envs.pickled_parts import Places, load_part
from rayvec.errors import RemoteFailure
from rayvec.node.chunk_memory import ChunkMemory, PackedChunk
from rayvec.node.messages import dumps
from rayvec.node.pipe import MessagePipe
from rayvec.node.preloaded import check_threads
from rayvec.node.protocol import Op, Reply, Setup, WeightsRef
from rayvec.node.shared_memory import keep_freed_memory
from rayvec.node.step_memory import AUTORESET, CHUNK_STEP_BITS, COUNT, DTYPES, FIRST_ROWS, OP, ROWS_AT, NodeBlock
from rayvec.node.weight_memory import WeightMemory
from rayvec.pools.base import Autoreset, RestartPolicy
from rayvec.pools.in_process_base import FAILURES, EnvsFailed, captured, end_if_forked, failures_ignored
from rayvec.pools.make import make_pool
from rayvec.pools.restart_state import seed_of
from rayvec.pools.sub_batch_pool import NativePool
from rayvec.rollout.inference import Inference
from rayvec.rollout.loop import ActingPolicy, as_policy

__all__ = ["STACK_SIGNAL", "WorkerSpec", "worker_main"]

logger = logging.getLogger(__name__)

STACK_SIGNAL = signal.SIGRTMAX - 1
"""The signal on which a worker writes its stack to a file that its owner reads."""
_WITH_MESSAGE = (Op.CALL, Op.RESET, Op.STEP_OBJECTS)
"""Commands that come with a message through the pipe."""
_LOOK_S = 1.0
"""The interval at which an idle worker checks whether its owner has closed the pipe, in seconds."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The parameters with which a worker starts.

    Attributes:
        index: Index of the worker on its node.
        first_id: Global index of the worker's first environment.
        factory: Where the pickled factory of the worker's environments lies in the file of all factories.
        node: Name of the node, for errors.
        restart_policy: The restart policy for environments that raise.
        replacement: Whether the worker replaces one that exited. A replacement worker reports no spaces.
    """

    index: int
    first_id: int
    factory: Places
    node: str
    restart_policy: RestartPolicy
    replacement: bool = False


def worker_main(spec: WorkerSpec, fds: Sequence[int]) -> None:
    """Runs a worker until its owner closes the pipe. The fork server calls this function in a new process.

    Args:
        spec: The parameters of the worker.
        fds: File descriptors of the pipe to the owner, the file for the worker's stack, and that of the factories.
    """
    faulthandler.register(STACK_SIGNAL, file=fds[1])
    worker: Worker | None = None
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the owner has exited
        end = socket.socket(fileno=fds[0])
        try:
            worker = Worker(spec, MessagePipe(end), fds[2])
            worker.run()
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            where = f"node {spec.node}, worker {spec.index}"
            logger.error("%s: an environment has closed file descriptors of this process, which exits", where)
        finally:
            if worker is not None:
                with failures_ignored():
                    worker.pool.close()
            with contextlib.suppress(OSError):  # an environment has closed it
                end.close()


class Worker:
    """Serves one slice of environments. :attr:`Op.CALL` may name any of its public methods.

    The constructor makes the environments and reports their spaces, or an error, through the pipe. The owner sends
    the block once it knows the spaces of all environments. A replacement worker receives the block first, which holds
    the pending commands. It reports only errors.

    Args:
        spec: The parameters of the worker.
        pipe: The pipe to the owner.
        factories: File descriptor of the pickled factories.

    Raises:
        EOFError: An environment could not be made, which has been reported, or the owner has exited.
    """

    def __init__(self, spec: WorkerSpec, pipe: MessagePipe, factories: int) -> None:
        self._spec = spec
        self._pipe = pipe
        self._where = f"node {spec.node}, worker {spec.index}"
        self._closed = False
        self._fds: list[int] = []
        self._policies: dict[int, _HeldPolicy] = {}
        try:
            seed_globals(None)  # else every worker inherits the fork server's state
            if spec.replacement:
                self._take_setup()
            check_threads()
            factory = load_part(factories, spec.factory)
            os.close(factories)
            seed = self._last_seed() if spec.replacement else None
            self._seed_globals(factory.seed if seed is None else seed, 1)
            if factory.native:
                keep_freed_memory(64 << 20)
            self.pool = make_pool(factory, spec.first_id, self._where, spec.restart_policy)
            spaces = None if spec.replacement else dumps(self.pool.spaces)
        except EnvsFailed as failed:
            self._say(failed.failures[0][1])
            raise EOFError from failed
        except FAILURES as error:
            self._say(captured(error, self._where))
            raise EOFError from error
        if spaces is not None:
            self._pipe.send(spaces)
            self._take_setup()

    def _say(self, value: Any) -> None:
        self._pipe.send(dumps(value))

    def _receive(self) -> bytes:
        """Reads a message and stores its file descriptors for later use."""
        data, fds = self._pipe.receive()
        self._fds += fds
        return data

    def _take_setup(self) -> None:
        self._setup: Setup = pickle.loads(self._receive())
        fds, self._fds = self._fds, []
        self._block = NodeBlock(self._setup.shape, (fds[0], fds[1]))
        self._memory = ChunkMemory(fds[2:])
        for _ in range(self._setup.num_policies):
            key, policy = pickle.loads(self._receive())
            self.load_policy(key, policy)

    def run(self) -> None:
        """Serves commands until the owner closes the worker or its end of the pipe."""
        block, index = self._block, self._spec.index
        rows = slice(block.shape.worker_bounds[index], block.shape.worker_bounds[index + 1])
        self.pool.first_id = self._setup.first_id + rows.start
        self.pool.attach(block.layout, block.results(rows))
        self._seed_globals(self._last_seed())
        self._action_layout = block.action_layout
        self._actions = block.actions(rows)
        self._rows_of_commands = block.arrays["rows"][index]
        self._all_rows = list(range(self.pool.num_envs))
        self._inference = Inference(self.pool.num_envs)
        ring, has_reply = block.arrays["ring"][index], block.arrays["has_reply"][index]
        go, done, wants_event = block.go[index], block.done[index], block.arrays["wants_event"]
        self.pool.show_progress(block.arrays["progress"][index : index + 1])
        self._chunk_step = block.arrays["chunk_step"][index : index + 1].data
        self._cut_chunk = block.arrays["cut_chunk"][index : index + 1].data
        pid = block.arrays["pid"][index] = os.getpid()
        if not self._spec.replacement:
            self._say(pid)
        slot = self._setup.first_command % block.depth
        while not self._closed:
            while not go.acquire(_LOOK_S):
                if self._pipe.poll():  # readable without a command: the owner has closed its end
                    if go.try_acquire():
                        break
                    return
            reply = self._serve(ring[slot].tolist())
            end_if_forked(pid)
            has_reply[slot] = reply is not None
            done.post()
            if wants_event[0]:
                os.eventfd_write(block.event_fd, 1)
            if reply is not None:
                self._send(reply)
            slot = (slot + 1) % block.depth

    def _last_seed(self) -> int | None:
        """Returns the last seed of this worker's first environment, also of one that it replaces."""
        row = self._block.shape.worker_bounds[self._spec.index]
        return seed_of(self._block.arrays, row, self._setup.first_id + row)

    def _seed_globals(self, seed: int | None, *key: int) -> None:
        """Seeds the generators that environments and policies may share in this process, if there is a seed."""
        if seed is not None:
            seed_globals(seed % (1 << 64), self._spec.first_id, *(key or (2,)))

    def _serve(self, command: list[int]) -> Reply | None:
        content: Any = None
        if command[OP] in _WITH_MESSAGE:
            message = self._receive()
            try:
                content = pickle.loads(message)
            except FAILURES as error:  # such as a class of a module that this process can't import
                where = f"{self._where}, which unpickles what the driver has sent"
                return Reply(failures=((-1, captured(error, where)),))
        if command[OP] == Op.CALL:
            return self._call(*content)
        at, count = command[ROWS_AT], command[COUNT]
        rows = self._all_rows[:count] if at == FIRST_ROWS else self._rows_of_commands[at : at + count].tolist()
        failures: tuple[tuple[int, RemoteFailure], ...] = ()
        infos: Sequence[RawInfo | SubBatchInfo] = ()
        try:
            infos = self._act(command, rows, content)
        except EnvsFailed as failed:
            failures = failed.failures
        objects = self._objects(rows)
        if not (infos or failures or objects is not None or self.pool.notes):
            return None
        notes, self.pool.notes = tuple(self.pool.notes), []
        return Reply(tuple(infos), failures, objects, notes)

    def _act(self, command: list[int], rows: list[int], content: Any) -> Sequence[RawInfo | SubBatchInfo]:
        """Executes a step, a reset or an observation and returns raw infos."""
        op, pool = command[OP], self.pool
        if op in (Op.STEP, Op.STEP_OBJECTS):
            self._inference.note_absence()  # the policy that acts here next has not seen this step
            actions = self._read_actions(rows, command[DTYPES:]) if op == Op.STEP else content
            return pool.step_rows(rows, actions, Autoreset(command[AUTORESET]))
        if op == Op.RESET:
            seed = dict(zip(*content[:2], strict=True)).get(0)
            self._seed_globals(seed)
            self._inference.note_reset(content[0])
            return pool.reset_rows(*content)
        return pool.begin_rows(rows) if op == Op.BEGIN else []

    def _send(self, reply: Reply) -> None:
        """Sends a reply. If the reply can't be pickled, it sends that failure instead."""
        try:
            data = dumps(reply)
        except FAILURES as error:
            where = f"{self._where}, in what an environment returned (infos, observations or results)"
            data = dumps(Reply(failures=((-1, captured(error, where)),)))
        self._pipe.send(data)

    def _call(self, name: str, args: tuple[Any, ...]) -> Reply:
        try:
            value = getattr(self, name)(*args)
            notes, self.pool.notes = tuple(self.pool.notes), []
            return Reply(value, notes=notes)
        except EnvsFailed as failed:
            return Reply(failures=failed.failures)
        except FAILURES as error:
            return Reply(failures=((-1, captured(error, self._where)),))

    def _read_actions(self, rows: list[int], dtypes: list[int]) -> Any:
        """Copies actions out of the block, because environments may keep a reference to them."""
        assert self._action_layout is not None
        if isinstance(self.pool, NativePool):
            index: Any = self.pool.rows_of_units(rows)
        else:
            index = slice(None) if rows == self._all_rows else rows
        leaves = [leaf.view(chr(code))[index].copy() for leaf, code in zip(self._actions, dtypes, strict=True)]
        actions: Any = self._action_layout.tree(leaves)
        return actions if isinstance(self.pool, NativePool) else split_actions(actions, len(rows))

    def _objects(self, rows: Sequence[int]) -> tuple[Any, ...] | None:
        """Returns the observations of `rows` if they are objects, which the block can't hold. Otherwise None."""
        if self.pool.layout is not None:
            return None
        return tuple(self.pool.obs[row] for row in rows)

    # Methods that the owner may call. Rows are indices within the worker.

    def call(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: list[int]) -> list[Any]:
        """Calls a method or reads an attribute of some environments."""
        return self.pool.call_rows(name, args, kwargs, rows)

    def set_attr(self, name: str, values: Sequence[Any], rows: list[int]) -> None:
        """Sets an attribute of some environments. `values` holds one value for each."""
        self.pool.set_rows(name, values, rows)

    def close(self) -> None:
        """Closes the environments and ends the worker."""
        self._closed = True
        try:
            self.pool.close()
        except FAILURES:
            logger.exception("%s: an environment raised in close()", self._where)

    def load_policy(self, key: int, policy: bytes) -> None:
        """Loads a policy. The message also carried the file descriptor of the policy's weight memory."""
        memory = WeightMemory(self._setup.shape.num_workers, self._fds.pop(0))
        try:
            self._policies[key] = _HeldPolicy(as_policy(pickle.loads(policy)), memory)
        except BaseException:
            memory.close()
            raise

    def drop_policy(self, key: int) -> None:
        """Removes a policy and closes its weight memory."""
        policy = self._policies.pop(key, None)
        if policy is not None:
            policy.close()

    def rollout(self, key: int, request: ChunkRequest, weights: WeightsRef, number: int, piece: int) -> PackedChunk:
        """Steps this worker's slice with a policy and packs the chunk.

        Args:
            key: Key of the policy.
            request: How many steps are requested, and which noise.
            weights: The weights to act with.
            number: Number of the chunk, from 1.
            piece: The piece of chunk memory to write into.
        """
        self._memory.begin(piece)
        policy, cut = self._policies[key].at(weights), partial(self._is_cut, number)
        chunk, times = self._inference.take(self.pool, policy, request, weights.version, cut, self._memory.empty)
        return PackedChunk.of(chunk, self._memory, times)

    def _is_cut(self, number: int, num_steps: int) -> bool:
        """Reports the steps that were taken in a chunk. Returns whether the owner has cut that chunk."""
        self._chunk_step[0] = (number << CHUNK_STEP_BITS) + num_steps
        return self._cut_chunk[0] == number


class _HeldPolicy:
    """A policy, its weight memory, and the version of the weights that it has loaded."""

    def __init__(self, policy: ActingPolicy, memory: WeightMemory) -> None:
        self._policy = policy
        self._memory = memory
        self._version = 0

    def close(self) -> None:
        self._memory.close()

    def at(self, weights: WeightsRef) -> ActingPolicy:
        """Loads these weights from the weight memory, if the policy has another version. Returns the policy."""
        if weights.slot is not None and weights.version != self._version:
            self._policy.load_weights(self._memory.read(weights.slot))
            self._version = weights.version
        return self._policy
