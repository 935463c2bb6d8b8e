"""The owner's end of a worker process: a child of a machine's fleet."""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from rayvec.data.trees import tree_leaves
from rayvec.envs.spaces import PoolSpaces
from rayvec.errors import LIMITS_REMEDY, RemoteFailure, WorkerLostError
from rayvec.fleet.commands import NO_NEWS, STEPPING, Answer, ChildLost, Command, Op
from rayvec.node.memory import MachineBlock, Ring
from rayvec.node.messages import pack, packed_message, receive, send, send_fd
from rayvec.node.processes import Inherited, OwnedProcess
from rayvec.node.serve import CLOSE, Attachment, WorkerSpec, worker_main

__all__ = ["LocalWorker"]

logger = logging.getLogger(__name__)

_END_S = 5.0
_POLL_S = 0.1
_NOBODY = np.zeros(0, np.int64)


class LocalWorker:
    """A worker process on this machine.

    Args:
        spec: What it starts with.
        index: Its index among the workers of the machine.
        factories: File descriptor of the pickled factories of all workers.
        preload: Modules that the fork server imports.

    Attributes:
        name: What errors call it.

    Raises:
        WorkerLostError: It can't be started.
    """

    def __init__(self, spec: WorkerSpec, index: int, factories: int, preload: Sequence[str]) -> None:
        self.name, self._policy, self._index = spec.name, spec.restart_policy, index
        self._first_id = spec.first_id
        self._pipe, theirs = multiprocessing.Pipe()
        try:
            self._process = OwnedProcess(
                worker_main,
                (spec, theirs, Inherited(factories)),
                f"rayvec worker {index}",
                preload,
                self._policy.start_timeout_s,
            )
        except (EOFError, OSError) as error:
            raise self._not_started(error) from error
        finally:
            theirs.close()
        self._is_starting, self._since = True, time.monotonic()
        self._progress = 0
        self._pending = deque[Command]()
        self._ring: Ring | None = None
        self._shared: set[int] = set()

    @property
    def pid(self) -> int:
        """Its process id.

        Raises:
            WorkerLostError: It can't be started.
        """
        self.await_fork()
        return self._process.pid

    def await_fork(self) -> None:
        """Waits until the fork server has forked it.

        Raises:
            WorkerLostError: It can't be started.
        """
        try:
            _ = self._process.pid
        except (EOFError, OSError) as error:
            raise self._not_started(error) from error

    def _not_started(self, error: Exception) -> WorkerLostError:
        return WorkerLostError(
            f"{self.name} could not be started.",
            expected=f"a fork server that starts it within {self._policy.start_timeout_s:g} s (start_timeout_s)",
            got=f"{type(error).__name__}: {error}",
            remedy=f"Correct the preloaded modules. {LIMITS_REMEDY}",
        )

    def spaces(self) -> PoolSpaces:
        """Waits until its environments have been made. Returns their spaces.

        Raises:
            ChildLost: It has died, or takes longer than ``start_timeout_s``.
            Exception: The exception that the constructor of an environment raised.
        """
        self.await_fork()
        while not self._pipe.poll(0.1):
            self._check()
        return self._started()

    def _started(self) -> PoolSpaces:
        """Reads the first message of the worker."""
        try:
            said = receive(self._pipe).load()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if isinstance(said, RemoteFailure):
            raise said.rebuild()
        self._is_starting, self._since = False, time.monotonic()
        spaces: PoolSpaces = said
        return spaces

    def attach(self, block: MachineBlock, first_id: int) -> None:
        """Notes which block :meth:`open` shares with the worker, and the global index of its first environment."""
        self._block, self._first_id = block, first_id
        count = block.spec.bounds[self._index + 1] - block.spec.bounds[self._index]
        self._held = f" It held environments {first_id} to {first_id + count - 1}."

    def open(self, arrays: dict[str, Any]) -> None:
        """Attaches the worker to its rows of the block."""
        block = self._block
        leaves = list(tree_leaves(arrays["obs"]))
        self._objects = [leaves[place] for place in block.layout.objects]
        self._ring = Ring(block, self._index, initialise=True)
        objects = [leaf.tolist() for leaf in self._objects]
        with suppress(OSError):  # it has died: wait() says so
            send(self._pipe, pack(Attachment(block.spec, self._index, self._first_id, objects)))
            send_fd(self._pipe, block.block.fd)

    def post(self, command: Command) -> None:
        """Starts a command."""
        assert self._ring is not None
        rest = self._ring.write(command)
        message = None if rest is None else packed_message(rest)
        self._ring.advance()
        if not self._pending:
            self._since = time.monotonic()
        self._pending.append(command)
        self._ring.go.post()
        if message is not None:
            with suppress(OSError):  # it has died: wait() says so
                send(self._pipe, message)
                if command.op == Op.ROLLOUT:
                    self._share(command.rest.place.slot)

    def _share(self, slot: int) -> None:
        """Shares the memory of a chunk with the worker, once."""
        if slot not in self._shared:
            self._shared.add(slot)
            send_fd(self._pipe, self._block.slots[slot].fd)

    def wait(self, timeout_s: float) -> Answer | None:
        """Returns the answer to the oldest pending command, or None if there is none within `timeout_s`."""
        ring = self._ring
        assert ring is not None
        if not ring.done.acquire(timeout_s):
            if self._is_starting and self._pipe.poll():
                self._started()
            if self._pending:
                self._check()
            return None
        if self._is_starting:
            self._started()
        return self._answer(ring)

    def _answer(self, ring: Ring) -> Answer:
        """Reads an answer that is there."""
        command, slot = self._pending[0], self._taken
        answer = NO_NEWS
        if ring.has_rest[slot]:
            try:
                while not self._pipe.poll(_POLL_S):  # a child of the worker may hold the pipe open
                    if self._process.exitcode is not None and not self._pipe.poll():
                        raise self._died()
                message = receive(self._pipe)
            except (EOFError, OSError) as error:
                raise self._died() from error
            try:
                answer = Answer(*message.load())
            except Exception as error:  # a class that this process can't import
                where = f"the process that unpickles an answer of {self.name}"
                answer = Answer(failure=RemoteFailure.capture(error, where))
        self._pending.popleft()
        self._taken = (slot + 1) % len(ring.has_rest)
        self._since = time.monotonic()
        if self._objects and answer.value is not None and command.op in STEPPING and command.op != Op.ROLLOUT:
            for leaf, values in zip(self._objects, answer.value, strict=True):
                leaf[command.rows] = np.fromiter(values, object, len(values))
            answer = answer._replace(value=None)
        elif command.op == Op.ROLLOUT and answer.value is not None:
            taken, num_bytes = answer.value
            memory = self._block.slots[command.rest.place.slot]
            memory.num_bytes = max(memory.num_bytes, num_bytes)
            answer = answer._replace(value=taken._replace(chunk=memory.unpack(taken.chunk)))
        return answer

    _taken = 0
    _held = ""

    def _check(self) -> None:
        """Raises ``ChildLost`` if the worker has died, or takes longer than its limits allow."""
        self.await_fork()
        if self._process.exitcode is not None:
            if self._ring is not None and self._ring.done.try_acquire():  # it answered before it died
                self._ring.done.post()
                return
            raise self._died()
        waited_s = time.monotonic() - self._since
        name, limit_s, times = self._limit()
        if self._ring is not None and int(self._ring.progress[0]) != self._progress:
            self._progress, self._since = int(self._ring.progress[0]), time.monotonic()
        elif limit_s is not None and waited_s > limit_s * times:
            raise self._hangs(name, limit_s * times, waited_s)

    def _limit(self) -> tuple[str, float | None, int]:
        """Returns the name and the seconds of the present limit, and how many such limits may pass.

        While a policy acts, these are as many as its chunk has steps: its first call may compile it.
        """
        if self._is_starting or (self._pending and self._pending[0].op == Op.LOAD):
            return "start_timeout_s", self._policy.start_timeout_s, 1
        command, policy_acts = self._pending[0] if self._pending else None, self._progress % 2 == 0
        steps = command.rest.request.num_steps if command and command.op == Op.ROLLOUT and policy_acts else 1
        return "step_timeout_s", self._policy.step_timeout_s, steps

    def _died(self) -> ChildLost:
        self.await_fork()
        self._process.wait(_END_S)
        error = WorkerLostError(
            f"{self.name} died ({self._process.described_end()}).{self._held}",
            expected="a worker process to run until its environments are closed",
            got="its end",
            remedy="Look into the system's log for what killed it; on_env_error='restart' replaces the worker.",
        )
        return ChildLost(error)

    def _hangs(self, limit: str, limit_s: float, waited_s: float) -> ChildLost:
        error = WorkerLostError(
            f"{self.name} did not answer in time, and was killed.{self._held}",
            expected=f"an answer within {limit_s:g} s ({limit})",
            got=f"none. Its stack was:\n{self._process.stack() or 'not known: the process is stopped'}",
            remedy=f"Raise {limit} if it may take so long; on_env_error='restart' replaces the worker.",
        )
        return ChildLost(error, waited_s)

    def kill(self) -> None:
        """Kills the worker, and what its environments have started."""
        self._process.kill()
        self._process.release()
        self._pipe.close()

    def close(self) -> None:
        """Asks the worker to close its environments once it has executed the pending commands."""
        if self._ring is None or self._is_starting:
            self._pipe.close()
            return
        self.post(Command(CLOSE, _NOBODY))

    def join(self, timeout_s: float) -> bool:
        """Waits until the worker has ended, and kills it after `timeout_s`. Returns whether it ended by itself."""
        has_ended = self._process.wait(timeout_s)
        self.kill()
        return has_ended
