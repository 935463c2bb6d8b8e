"""A worker process: one slice of environments behind a ring of commands.

Imports neither Ray nor torch, so that a forkserver that has imported this module starts workers in
milliseconds. A worker ends when it is told to, and also when the process that started it is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from rayvec.data import RawInfo
from rayvec.errors import RemoteFailure
from rayvec.node.chunk_memory import MOST_CHUNKS, ChunkMemory, PackedChunk, dumps
from rayvec.node.wire import AUTORESET, COUNT, DTYPES, OP, NodeBlock, Op, Reply, Setup
from rayvec.pools.base import Autoreset, Supervision
from rayvec.pools.memory import SharedBlock, split_actions
from rayvec.pools.serial import EnvsFailed, SerialPool
from rayvec.rollout.loop import ActingPolicy, Stopwatch, as_policy, rollout

__all__ = ["WorkerSpec", "worker_main"]

_PR_SET_PDEATHSIG = 1
_LOOK_S = 1.0
"""How often an idle worker looks whether its client has hung up."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker is told when it starts.

    Attributes:
        index: Of the worker on its node.
        first_id: Global index of its first environment.
        factory: By cloudpickle, of exactly its environments.
        node: Name of the node, for errors.
        supervision: What becomes of environments that raise.
        successor: Whether it takes the place of one that has ended: nobody waits for its reports then.
    """

    index: int
    first_id: int
    factory: bytes
    node: str
    supervision: Supervision
    successor: bool = False


def worker_main(spec: WorkerSpec, pipe: Connection) -> None:
    """Runs a worker until its pipe ends; the target of a process."""
    _end_with_parent()
    os.setsid()  # what environments start is in a group with us, and ends with us where we are killed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which closes us
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # environments may have children
    worker: Worker | None = None
    try:
        worker = Worker(spec, pipe)
        worker.run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the client is gone: nobody is left to tell
    finally:
        if worker is not None:
            with contextlib.suppress(Exception):
                worker.pool.close()


def _end_with_parent() -> None:
    """Asks the kernel to kill this process when the forkserver that it came from ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        sys.exit(1)


class Worker:
    """Serves one slice. Its public methods are what an :attr:`Op.CALL` may name.

    The constructor makes the environments and reports their spaces, or what one of them raised, through
    the pipe; the block follows when the client knows the spaces of all. A successor takes the block first, which
    has the commands under way, and reports nothing but what its environments raise.
    """

    def __init__(self, spec: WorkerSpec, pipe: Connection) -> None:
        self._spec = spec
        self._pipe = pipe
        self._where = f"node {spec.node}, worker {spec.index}"
        self._closed = False
        self._policies: dict[int, _HeldPolicy] = {}
        self._acted: int | None = None
        try:
            if spec.successor:
                self._take_setup()
            factory = pickle.loads(spec.factory)
            self.pool = SerialPool(factory, spec.first_id, self._where, spec.supervision)
        except EnvsFailed as failed:
            self._say(failed.failures[0][1])
            raise EOFError from failed
        except Exception as error:
            self._say(RemoteFailure.capture(error, self._where))
            raise EOFError from error
        if not spec.successor:
            self._say(self.pool.spaces)
            self._take_setup()

    def _say(self, value: Any) -> None:
        self._pipe.send_bytes(dumps(value))

    def _take_setup(self) -> None:
        self._setup: Setup = pickle.loads(self._pipe.recv_bytes())
        self._block = NodeBlock(
            self._setup.shape, (reduction.recv_handle(self._pipe), reduction.recv_handle(self._pipe))
        )
        self._memory = ChunkMemory([reduction.recv_handle(self._pipe) for _ in range(MOST_CHUNKS)])
        for key, policy, size in self._setup.policies:
            self.load_policy(key, policy)
            if size is not None:
                self.attach_weights(key, size)

    def run(self) -> None:
        """Serves commands until the client closes."""
        block, index = self._block, self._spec.index
        rows = slice(block.shape.worker_bounds[index], block.shape.worker_bounds[index + 1])
        self.pool.attach(block.layout, block.results(rows))
        self._action_layout = block.action_layout
        self._actions = block.actions(rows)
        self._first_id_at = block.first_id_at
        self._all_rows = list(range(self.pool.num_envs))
        ring, has_reply = block.arrays["ring"][index], block.arrays["has_reply"][index]
        go, done, wants_event = block.go[index], block.done[index], block.arrays["wants_event"]
        self.pool.show_progress(block.arrays["progress"][index : index + 1])
        block.arrays["pid"][index] = os.getpid()
        if not self._spec.successor:
            self._say(os.getpid())
        slot = self._setup.first_command % block.depth
        while not self._closed:
            while not go.acquire(_LOOK_S):
                if self._pipe.poll():  # nothing is sent without a command: the other end has been closed
                    if go.try_acquire():
                        break
                    return
            reply = self._serve(ring[slot].tolist())
            has_reply[slot] = reply is not None
            done.post()
            if wants_event[0]:
                os.eventfd_write(block.event_fd, 1)
            if reply is not None:
                self._send(reply)
            slot = (slot + 1) % block.depth

    def _serve(self, command: list[int]) -> Reply | None:
        if command[OP] == Op.CALL:
            name, args = pickle.loads(self._pipe.recv_bytes())
            return self._call(name, args)
        rows = command[self._first_id_at : self._first_id_at + command[COUNT]]
        failures: tuple[tuple[int, RemoteFailure], ...] = ()
        infos: Sequence[RawInfo] = ()
        try:
            infos = self._act(command, rows)
        except EnvsFailed as failed:
            failures = failed.failures
        objects = self._objects(rows)
        if not (infos or failures or objects is not None or self.pool.notes):
            return None
        notes, self.pool.notes = tuple(self.pool.notes), []
        return Reply(tuple(infos), failures, objects, notes)

    def _act(self, command: list[int], rows: list[int]) -> list[RawInfo]:
        """Steps or resets rows."""
        op, pool = command[OP], self.pool
        if op == Op.STEP:
            actions = self._read_actions(rows, command[DTYPES : self._first_id_at])
            return pool.step_rows(rows, actions, Autoreset(command[AUTORESET]))
        if op == Op.LOOK:
            return []
        if op == Op.READY:
            return pool.ready_rows(rows)
        payload = pickle.loads(self._pipe.recv_bytes())
        if op == Op.RESET:
            return pool.reset_rows(rows, *payload)
        return pool.step_rows(rows, payload, Autoreset(command[AUTORESET]))

    def _send(self, reply: Reply) -> None:
        """Sends a reply; if it can't be pickled, that is what is sent."""
        try:
            self._say(reply)
        except (OSError, EOFError):
            raise  # nobody is left to tell
        except Exception as error:
            where = f"{self._where}, in what an environment returned (infos, observations or results)"
            self._say(Reply(failures=((-1, RemoteFailure.capture(error, where)),)))

    def _call(self, name: str, args: tuple[Any, ...]) -> Reply:
        try:
            value = getattr(self, name)(*args)
            notes, self.pool.notes = tuple(self.pool.notes), []
            return Reply(value, notes=notes)
        except EnvsFailed as failed:
            return Reply(failures=failed.failures)
        except Exception as error:
            return Reply(failures=((-1, RemoteFailure.capture(error, self._where)),))

    def _read_actions(self, rows: list[int], dtypes: list[int]) -> Iterable[Any]:
        """Copies actions out of the block, since environments may keep them."""
        assert self._action_layout is not None
        index: Any = slice(None) if rows == self._all_rows else rows
        leaves = [leaf.view(chr(code))[index].copy() for leaf, code in zip(self._actions, dtypes, strict=True)]
        actions: Iterable[Any] = split_actions(self._action_layout.tree(leaves), len(rows))
        return actions

    def _objects(self, rows: Sequence[int]) -> tuple[Any, ...] | None:
        """Observations that have no place in the block."""
        if self.pool.layout is not None:
            return None
        return tuple(self.pool.obs[row] for row in rows)

    # What the client may call. Rows are the worker's own.

    def call(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: list[int]) -> list[Any]:
        """Calls a method of the environments."""
        return self.pool.call_rows(name, args, kwargs, rows)

    def set_attr(self, name: str, values: Sequence[Any], rows: list[int]) -> None:
        """Sets an attribute of the environments."""
        self.pool.set_rows(name, values, rows)

    def close(self) -> None:
        """Closes the environments and ends the worker."""
        self._closed = True
        self.pool.close()

    def load_policy(self, key: int, policy: bytes) -> None:
        """Keeps a policy under a key."""
        self._policies[key] = _HeldPolicy(as_policy(pickle.loads(policy)))

    def attach_weights(self, key: int, size: int) -> None:
        """Takes the block that a policy's weights are published in; its descriptor follows in the pipe."""
        fd = reduction.recv_handle(self._pipe)
        self._policies[key].attach(SharedBlock({"weights": (np.float32, (size,))}, fd))

    def drop_policy(self, key: int) -> None:
        """Forgets a policy."""
        policy = self._policies.pop(key, None)
        if policy is not None:
            policy.close()

    def rollout(
        self, key: int, num_steps: int, first_step: int, noise_seed: int, weights_version: int, turn: int
    ) -> PackedChunk:
        """Takes steps with a policy over this worker's slice; the chunk lies where it is the turn."""
        stopwatch = Stopwatch()
        self._memory.begin(turn)
        begun = np.arange(self.pool.num_envs) if key != self._acted else None
        self._acted = key
        chunk = rollout(
            self.pool,
            self._policies[key].at(weights_version),
            num_steps,
            noise_seed=noise_seed,
            first_step=first_step,
            first_id=self._spec.first_id,
            weights_version=weights_version,
            begun=begun,
            stopwatch=stopwatch,
            empty=self._memory.empty,
        )
        times = stopwatch.read()
        return PackedChunk.of(chunk, self._memory, times)


class _HeldPolicy:
    """A policy, the block its weights are published in, and the version that it has."""

    def __init__(self, policy: ActingPolicy) -> None:
        self._policy = policy
        self._block: SharedBlock | None = None
        self._version = 0

    def attach(self, block: SharedBlock) -> None:
        self.close()
        self._block = block

    def close(self) -> None:
        if self._block is not None:
            self._block.close()
            self._block = None

    def at(self, version: int) -> ActingPolicy:
        """Returns the policy with this version of its weights: what the block holds, or what it brought along."""
        if self._block is not None and version != self._version:
            self._policy.load_weights(self._block.arrays["weights"])
            self._version = version
        return self._policy
