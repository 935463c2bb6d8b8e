"""The owner's end of a worker process: a child of a machine's fleet."""

from __future__ import annotations

import os
import pickle
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from rayvec.data.trees import as_slice, object_leaves
from rayvec.errors import LIMITS_REMEDY, WorkerLostError
from rayvec.fleet.commands import NO_NEWS, Answer, ChildLost, Command, Op, is_like
from rayvec.fleet.spaces import PoolSpaces
from rayvec.node.memory import ChunkColumns, MachineBlock, action_leaves
from rayvec.node.messages import MAX_POSTED, NO_NEWS_MESSAGE, dumps, read_answer, receive, send, send_files
from rayvec.node.processes import OwnedProcess
from rayvec.node.worker_main import STACK_SIGNAL, Attachment, WorkerSpec, worker_main

_END_S = 5.0
_POLL_S = 0.1
_STACK_BYTES = 1 << 16
_STACK_S = 1.0
_STACK_POLL_S = 0.01
_START = Command(Op.LOAD, np.arange(0))
"""Stands for the making of the environments, which the worker answers first."""


class LocalWorker:
    """A worker process on this machine.

    Args:
        spec: What it starts with.
        index: Its index among the workers of the machine.
        factories: File descriptor of the pickled factories of all workers.
        preload: Modules that the fork server imports.

    Attributes:
        name: What errors call it.
        pid: Its process id.

    Raises:
        WorkerLostError: It can't be started.
    """

    _block: MachineBlock
    _held = ""

    def __init__(self, spec: WorkerSpec, index: int, factories: int, preload: Sequence[str]) -> None:
        self.name, self._rules, self._index = spec.name, spec.env_rules, index
        self._pending = deque[tuple[Command, bytes]]([(_START, b"")])
        self._spaces: PoolSpaces | None = None  # until they are made
        self._last_step: Command | None = None  # that the block holds
        self._num_posted = 1
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._events = select.poll()
        self._events.register(self._channel, select.POLLIN)
        self._stack_file = open(os.memfd_create("rayvec-stack", os.MFD_CLOEXEC), "rb+", 0)
        send_files(self._channel, factories, self._stack_file.fileno())
        name, timeout_s = f"worker {index}", self._rules.start_timeout_s
        try:
            with theirs:
                self._process = OwnedProcess(worker_main, (spec, theirs), name, preload, timeout_s, spec.share)
        except (EOFError, OSError) as error:
            self._close_files()
            raise WorkerLostError(
                f"{self.name} could not be started: {type(error).__name__}: {error}. A preloaded module may be at "
                f"fault, or take longer than start_timeout_s, {timeout_s:g} s. {LIMITS_REMEDY}"
            ) from error
        self._events.register(self._process.sentinel, select.POLLIN)
        self.pid = self._process.pid
        self._since, self._progress = time.monotonic(), 0

    def spaces(self) -> PoolSpaces:
        """Waits until its environments have been made. Returns their spaces.

        Raises:
            ChildLost: It has died, or takes longer than ``start_timeout_s``.
            Exception: The exception that the constructor of an environment raised.
        """
        while self._spaces is None:
            self.wait(_POLL_S)
        return self._spaces

    def _has_answered(self, timeout_s: float) -> bool:
        """Waits for a message, for up to `timeout_s`. Returns whether there is one.

        Raises:
            ChildLost: It has died without one. A child of its own may hold its socket open.
        """
        found = dict(self._events.poll(1000 * timeout_s))
        if found and self._channel.fileno() not in found:
            found = dict(self._events.poll(0))  # it may have answered and ended while the first poll looked
            if self._channel.fileno() not in found:
                raise self._died()
        return bool(found)

    def open(self, arrays: dict[str, Any], first_id: int, block: MachineBlock) -> None:
        """Attaches the worker to its rows of the block; `first_id` is the global index of its first environment."""
        self._block, self._objects = block, object_leaves(arrays["obs"])
        self._rows = slice(*block.spec.bounds[self._index : self._index + 2])
        self._all_rows = np.arange(self._rows.stop - self._rows.start)
        self._held = f" It held environments {first_id} to {first_id + len(self._all_rows) - 1}."
        with suppress(OSError):  # it has died: wait() says so
            send(self._channel, dumps(Attachment(block.spec, self._index, first_id, self._objects)))
            send_files(self._channel, block.file.fileno())

    def post(self, command: Command) -> None:
        """Starts a command."""
        if is_like(command, self._last_step):
            message = self._last_message
            self._last_target[:] = command.actions
        else:
            message = self._message(command)
        self._pending.append((command, message))
        self._send_pending()

    def _message(self, command: Command) -> bytes:
        """Returns the message of a command. Actions that arrays can hold go into the block."""
        rest, codes = command.rest, None
        is_all = np.array_equal(command.rows, self._all_rows)
        if command.op == Op.STEP:
            rest = command.actions
            leaves = action_leaves(rest, self._block.action_layout, len(command.rows))
            rows = as_slice(command.rows + self._rows.start)
            if leaves is not None:
                rest, codes = None, [leaf.dtype.char for leaf in leaves]
                for actions, leaf in zip(self._block.actions(codes), leaves, strict=True):
                    actions[rows] = leaf
        message = dumps((int(command.op), None if is_all else command.rows, int(command.mode), codes, rest))
        if codes is not None and type(command.actions) is np.ndarray and isinstance(rows, slice):
            self._last_step, self._last_message = command, message
            self._last_target = self._block.actions(codes)[0][rows]
        return message

    def _send_pending(self) -> None:
        """Sends commands, up to as many as the socket has room for together with their answers."""
        while self._num_posted < min(len(self._pending), MAX_POSTED):
            if self._num_posted == 0:
                self._since = time.monotonic()
            try:
                send(self._channel, self._pending[self._num_posted][1])
            except ConnectionError:  # it has died: wait() says so
                pass
            self._num_posted += 1

    def fileno(self) -> int:
        """Returns the descriptor of the socket through which it answers."""
        return self._channel.fileno()

    def wait(self, timeout_s: float) -> Answer | None:
        """Returns the answer to the oldest pending command, or None if there is none within `timeout_s`.

        Raises:
            ChildLost: The worker has died, or takes longer than its limits allow.
            Exception: The exception that the constructor of an environment raised.
        """
        if not self._has_answered(timeout_s):
            if self._pending:
                self._check()
            return None
        try:
            message = receive(self._channel)
        except (EOFError, OSError) as error:
            raise self._died() from error
        is_news = message != NO_NEWS_MESSAGE
        answer = read_answer(partial(pickle.loads, message), self.name) if is_news else NO_NEWS
        command, _ = self._pending.popleft()
        self._num_posted -= 1
        self._since = time.monotonic()
        self._send_pending()
        if command is _START:
            if answer.failure is not None:
                raise answer.failure.rebuild()
            self._spaces = answer.value
            return None
        for leaf, values in zip(self._objects, answer.objects, strict=False):
            leaf[command.rows] = values
        if command.op == Op.ROLLOUT and answer.value is not None:
            chunk = ChunkColumns(self._block, command.rest.place).unpack(answer.value.chunk)
            answer = answer._replace(value=answer.value._replace(chunk=chunk))
        return answer

    def _check(self) -> None:
        """Raises ``ChildLost`` if the worker takes longer than its limits allow."""
        progress = int(self._block.by_worker["progress"][self._index]) if hasattr(self, "_block") else 0
        waited_s = time.monotonic() - self._since
        name, limit_s, times = self._limit()
        if progress != self._progress:
            self._progress, self._since = progress, time.monotonic()
        elif limit_s is not None and waited_s > limit_s * times:
            raise self._hangs(name, limit_s * times, waited_s)

    def _limit(self) -> tuple[str, float | None, int]:
        """Returns the name and the seconds of the present limit, and how many such limits may pass.

        The limit is that of a start also while a step makes an environment again. While a policy acts, as many may pass
        as its chunk has steps: its first call may compile it.
        """
        command, policy_acts = self._pending[0][0], self._progress % 2 == 0
        if command.op == Op.LOAD or self._progress < 0:
            return "start_timeout_s", self._rules.start_timeout_s, 1
        steps = command.rest.num_steps if command.op == Op.ROLLOUT and policy_acts else 1
        return "step_timeout_s", self._rules.step_timeout_s, steps

    def _died(self) -> ChildLost:
        code = self._process.wait(_END_S) or 0
        how = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
        text = f"{self.name} died ({how}).{self._held} The system's log may say what killed it."
        return ChildLost(WorkerLostError(text))

    def _hangs(self, limit: str, limit_s: float, waited_s: float) -> ChildLost:
        error = WorkerLostError(
            f"{self.name} did not answer within {limit_s:g} s ({limit}), and was killed.{self._held} Raise {limit} if "
            f"it may take so long. Its stack was:\n{self._stack() or 'not known: the process is stopped'}"
        )
        return ChildLost(error, waited_s)

    def _stack(self) -> str:
        """Returns the stack of the worker, as it is now; an empty text if the worker does not write it."""
        self._stack_file.truncate(0)
        with suppress(ProcessLookupError):
            os.kill(self.pid, STACK_SIGNAL)
        deadline, size = time.monotonic() + _STACK_S, 0
        while time.monotonic() < deadline:
            time.sleep(_STACK_POLL_S)
            before, size = size, os.fstat(self._stack_file.fileno()).st_size
            if size and size == before:
                break
        return os.pread(self._stack_file.fileno(), _STACK_BYTES, 0).lstrip(b"\0").decode(errors="replace")

    def kill(self) -> None:
        """Kills the worker, and what its environments have started."""
        self._process.kill()
        self._close_files()

    def _close_files(self) -> None:
        self._channel.close()
        self._stack_file.close()

    def close(self, timeout_s: float) -> None:
        """Asks the worker to close its environments once it has executed the pending commands."""
        with suppress(OSError):  # it has died
            self._channel.shutdown(socket.SHUT_WR)

    def join(self, timeout_s: float) -> bool:
        """Waits until the worker has ended, and kills it after `timeout_s`. Returns whether it ended by itself."""
        has_ended = self._process.wait(timeout_s) is not None
        self.kill()
        return has_ended
