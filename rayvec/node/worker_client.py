"""The pool's client of one worker process: it posts commands to the worker and waits for them in order."""

from __future__ import annotations

import contextlib
import logging
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayvec.data import RawInfo
from rayvec.errors import RemoteFailure, WorkerLostError
from rayvec.node.messages import packed
from rayvec.node.pipe import LOOK_S
from rayvec.node.protocol import Op, Reply
from rayvec.node.step_memory import AUTORESET, COUNT, FIRST_ROWS, OP, ROWS_AT, NodeBlock, Unknown
from rayvec.node.worker_processes import WorkerProcess
from rayvec.pools.base import NotReady, seconds_until
from rayvec.pools.ids_by_owner import Part

__all__ = ["Reports", "WorkerClient", "pack_call"]

_REPLY_S = 60.0
"""How long a worker may take to send a whole reply."""
_ENDED = "its process has ended (killed, out of memory, or a crash in an environment's native code)"

logger = logging.getLogger(__name__)


class _Posted(NamedTuple):
    """A pending command.

    Attributes:
        num_steps: Number of environment steps in the command.
        payload: The message that accompanied the command through the pipe.
        repeat: Whether a replacement worker repeats the command.
    """

    num_steps: int = 1
    payload: bytes = b""
    repeat: bool = True


_STEP = _Posted()


@dataclass(slots=True)
class Reports:
    """What the workers of a node have sent beside the arrays.

    Attributes:
        first_id: Global index of the node's first environment.
        infos: Raw infos that the pool has not received yet, by global environment id.
        objects: Last observation of each environment, by index on the node, if observations are objects.
    """

    first_id: int
    infos: dict[int, RawInfo] = field(default_factory=dict)
    objects: dict[int, Any] = field(default_factory=dict)

    def add(self, infos: Sequence[RawInfo], indices: Sequence[int], objects: Sequence[Any] | None) -> None:
        """Stores the infos and the observations of some environments, given by index on the node."""
        for info in infos:
            if objects is not None and info.final_obs is Unknown.OBS:  # of an episode that was cut
                info = info._replace(final_obs=self.objects.get(info.env_id - self.first_id))
            self.infos[info.env_id] = info
        for index, obs in zip(indices, objects or (), strict=False):
            if obs is not Unknown.OBS:
                self.objects[index] = obs


def pack_call(name: str, *args: Any) -> bytes:
    """Returns the message that calls a method of a worker."""
    return packed((name, args))


class WorkerClient:
    """The commands to one worker and their results.

    Args:
        block: The node's shared block.
        index: Index of the worker.
        process: The worker process.
        where: Name of the worker, for errors.
        reports: What all workers of the node have sent.

    Attributes:
        start: Index, on the node, of the worker's first environment.
        stop: One more than the index of the worker's last environment.
        num_posted: The number of posted commands, which is also the number of the next command.
        num_done: The number of completed commands, which is also the number of the oldest pending command.
        failures: Pairs of an environment's row within the worker and the failure. Row -1 stands for all rows.
    """

    def __init__(self, block: NodeBlock, index: int, process: WorkerProcess, where: str, reports: Reports) -> None:
        bounds = block.shape.worker_bounds
        self.index = index
        self._reports = reports
        self.start, self.stop = bounds[index], bounds[index + 1]
        self.where = where
        self.num_posted = self.num_done = 0
        self.failures: list[tuple[int, RemoteFailure]] = []
        self._replies: dict[int, Reply] = {}
        self._posted: dict[int, _Posted] = {}
        self._progress = block.arrays["progress"][index : index + 1]
        self._seen = 0  # the newest progress
        self._since_s = time.monotonic()  # when the newest progress of the oldest pending command was seen
        self._go, self._done = block.go[index], block.done[index]
        self._ring = block.arrays["ring"][index]
        self._has_reply = block.arrays["has_reply"][index]
        self._pid = block.arrays["pid"][index : index + 1]
        self._rows, self._next_row = block.arrays["rows"][index], 0
        self._depth = block.depth
        self._take(process)

    def _take(self, process: WorkerProcess) -> None:
        self._process = process
        self._taken_s = time.monotonic()
        self._was_starting = self.is_starting  # at the last check

    @property
    def is_starting(self) -> bool:
        """Whether a replacement worker is still making its environments."""
        return bool(self._pid[0] < 0)

    @property
    def startup_s(self) -> float:
        """Seconds since the worker process was started."""
        return time.monotonic() - self._taken_s

    def post(self, op: Op, rows: NDArray[np.int64], *, autoreset: int = 0, payload: Any = None) -> int:
        """Posts any command except a plain step or a call, for rows within the worker. Returns its number."""
        command = self._ring[self.num_posted % self._depth]
        command[OP] = op
        command[AUTORESET] = autoreset
        command[COUNT] = len(rows)
        command[ROWS_AT] = self._write_rows(rows)
        return self._post(_STEP if payload is None else _Posted(payload=packed(payload)))

    def post_step(self, part: Part, autoreset: int, dtypes: Sequence[int]) -> int:
        """Posts a step whose actions the pool has written into the shared block. Returns the command's number."""
        key = autoreset, *dtypes
        command = part.commands.get(key)
        if command is None:
            are_first = np.array_equal(part.units, np.arange(len(part.units)))
            head = [Op.STEP, autoreset, len(part.units), FIRST_ROWS if are_first else 0]
            command = part.commands[key] = np.array([*head, *dtypes], np.int64)
        if command[ROWS_AT] != FIRST_ROWS:
            command[ROWS_AT] = self._write_rows(part.units)
        self._ring[self.num_posted % self._depth] = command
        return self._post(_STEP)

    def _write_rows(self, rows: NDArray[np.int64]) -> int:
        """Writes the rows that a command names where no pending command has its own. Returns the place."""
        start, stop = self._next_row, self._next_row + len(rows)
        if stop > len(self._rows):
            start, stop = 0, len(rows)
        self._rows[start:stop] = rows
        self._next_row = stop
        return start

    def post_call(self, message: bytes, num_steps: int = 1, fds: Sequence[int] = ()) -> int:
        """Posts a call of one of the worker's methods. Returns the command's number.

        Args:
            message: See :func:`pack_call`.
            num_steps: Number of environment steps in the call.
            fds: File descriptors to send with the call. A replacement worker does not repeat such a call.
        """
        self._ring[self.num_posted % self._depth][OP] = Op.CALL
        return self._post(_Posted(num_steps, message, repeat=not fds), fds)

    def post_close(self) -> None:
        """Requests that the worker completes its pending commands, closes its environments and exits.

        The pool does not read the replies. A worker that is still starting is killed.
        """
        if self.is_starting:
            self._process.watch.kill()  # it reads commands only after it has made its environments
        else:
            self.post_call(pack_call("close"))

    def _post(self, command: _Posted, fds: Sequence[int] = ()) -> int:
        number = self.num_posted
        self.num_posted += 1
        self._posted[number] = command
        if number == self.num_done:
            self._since_s = time.monotonic()
        self._go.post()
        if command.payload:
            self._process.pipe.send(command.payload, fds)
        return number

    def wait(self, number: int, deadline: float) -> None:
        """Waits until the command with this number has completed.

        Replies to steps and resets are stored by environment, in the reports and in :attr:`failures`. Replies to calls
        are stored by number, for :meth:`take_reply`.

        Raises:
            NotReady: The `deadline`, a ``time.monotonic`` time, was reached.
            WorkerLostError: The worker exited.
        """
        while self.num_done <= number:
            self._acquire(deadline)
            self._finish()

    @property
    def waited_s(self) -> float:
        """Seconds that the oldest pending command, or the current step within it, has taken so far."""
        return time.monotonic() - self._since_s

    def note_progress(self) -> None:
        """Notes the worker's progress. The age of a step counts from the call that first saw it.

        The pending commands of a replacement worker start when its environments have been made.
        """
        progress = int(self._progress[0])
        if self._was_starting or progress != self._seen:
            self._since_s = time.monotonic()
        self._was_starting, self._seen = self._was_starting and self.is_starting, progress

    @property
    def is_loading(self) -> bool:
        """Whether the oldest pending command loads a policy: that is no step, and may import modules."""
        return not self._posted[self.num_done].repeat

    @property
    def _num_limits(self) -> int:
        """How many limits of a step may pass now: as many as the chunk has steps while its policy acts, else one.

        The first call of a policy may include its compilation.
        """
        policy_acts = self._seen % 2 == 0
        return self._posted[self.num_done].num_steps if policy_acts else 1

    def overdue_in(self, limit_s: float) -> float:
        """Returns the seconds after which the oldest pending command, or its current step, is overdue."""
        return self._num_limits * limit_s - self.waited_s

    def poll(self) -> None:
        """Records completed commands, without waiting.

        Raises:
            WorkerLostError: The worker exited in the middle of a reply.
        """
        self._process.pipe.flush()
        while self.num_done < self.num_posted and self._done.try_acquire():
            self._finish()

    def take_reply(self, number: int) -> Reply:
        """Removes and returns the reply to the completed call with this number."""
        return self._replies.pop(number)

    def reply(self, number: int) -> Reply:
        """Returns what the call with this number, which is done, returned; it stays here for :meth:`take_reply`."""
        return self._replies[number]

    def reconnect(self, process: WorkerProcess) -> None:
        """Attaches a replacement worker and posts the pending commands to it, oldest first."""
        self._take(process)
        for number in range(self.num_done, self.num_posted):
            posted = self._posted[number]
            if not posted.repeat:  # the replacement knows what the call would tell it
                command = self._ring[number % self._depth]
                command[OP], command[COUNT] = Op.OBSERVE, 0
                self._replies[number] = Reply(None)
            self._go.post()
            if posted.repeat and posted.payload:
                process.pipe.send(posted.payload)
        self._since_s = time.monotonic()

    def _acquire(self, deadline: float) -> None:
        pipe = self._process.pipe
        while True:
            if pipe.flush():
                if self._done.acquire(min(LOOK_S, seconds_until(deadline))):
                    return
            elif self._done.try_acquire():
                return
            else:
                pipe.wait_to_send(LOOK_S)
            if self.ended():
                if self._done.try_acquire():  # it completed the command before it exited
                    return
                raise self.lost()
            if time.monotonic() >= deadline:
                raise NotReady(f"{self.where} has not answered in time")

    def _finish(self) -> None:
        """Records that the oldest pending command has completed."""
        number = self.num_done
        slot = number % self._depth
        if self._has_reply[slot]:
            self._hear(number, slot)
        self.num_done += 1
        self._posted.pop(number, None)
        if self._posted:  # the worker starts the next command only now
            self._since_s = time.monotonic()

    def _hear(self, number: int, slot: int) -> None:
        """Reads and stores the reply to a command.

        Raises:
            WorkerLostError: The worker exited, or did not send the whole reply in time.
        """
        try:
            data, _ = self._process.pipe.receive(time.monotonic() + _REPLY_S)
        except EOFError as error:
            raise self.lost() from error
        except NotReady as error:
            raise self.lost(f"no whole reply within {_REPLY_S:g} s after it began") from error
        try:
            reply: Reply = pickle.loads(data)
        except Exception as error:  # a class that this process can't import, or whose constructor takes other arguments
            where = f"the process that unpickles a reply of {self.where}"
            reply = Reply(failures=((-1, RemoteFailure.capture(error, where)),))
        for note in reply.notes:
            logger.warning(note)
        command = self._ring[slot]
        if command[OP] == Op.CALL:
            self._replies[number] = reply
            return
        self.failures += reply.failures
        at, count = command[ROWS_AT], command[COUNT]
        rows = np.arange(count) if at == FIRST_ROWS else self._rows[at : at + count]
        self._reports.add(reply.value, (self.start + rows).tolist(), reply.objects)

    def ended(self) -> bool:
        """Whether the worker's process has exited."""
        return self._process.watch.ended()

    def kill(self) -> None:
        """Kills the worker's process, waits until it has exited, and records its completed commands."""
        self._process.watch.kill()
        with contextlib.suppress(WorkerLostError):
            self.poll()

    def raise_what_it_said(self) -> None:
        """Raises the exception that an environment's constructor raised, if a starting worker has reported one."""
        if self.is_starting and self._process.pipe.poll():
            with contextlib.suppress(EOFError):
                said = pickle.loads(self._process.pipe.receive()[0])
                assert isinstance(said, RemoteFailure)
                raise said.rebuild()

    def lost(self, got: str = _ENDED) -> WorkerLostError:
        """Returns the error for a worker that no longer answers."""
        return WorkerLostError(
            "A worker process runs until the pool is closed.",
            expected=f"{self.where} to answer",
            got=got,
            remedy="Look into the system's log for what killed it; on_env_error='restart' replaces the worker.",
        )

    def hangs(self, name: str, limit_s: float) -> WorkerLostError:
        """Returns the error for a worker that exceeds a time limit, with the worker's current stack.

        Args:
            name: Name of the limit.
            limit_s: The limit in seconds.
        """
        rule, seconds = f"A worker steps, resets or calls all its environments within {name}.", limit_s
        if self.is_loading:
            rule = f"A worker loads a policy within {name}."
        elif self.is_starting:
            rule = f"An environment answers within {name}."
        elif self._num_limits > 1:
            rule, seconds = f"A policy acts within {name}, times the steps of its chunk.", self._num_limits * limit_s
        return WorkerLostError(
            rule,
            expected=f"{self.where} to answer within {seconds} s",
            got=f"no answer; the worker has been killed. Its stack was:\n{self._process.stack()}",
            remedy=f"Raise {name} if it may take so long; on_env_error='restart' replaces the worker.",
        )
