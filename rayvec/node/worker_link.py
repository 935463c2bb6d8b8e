"""One worker as its client sees it: commands are posted, and waited for in their order."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayvec.data import RawInfo
from rayvec.errors import RemoteFailure, WorkerLostError
from rayvec.node.chunk_memory import dumps
from rayvec.node.wire import AUTORESET, COUNT, OP, NodeBlock, Op, Reply
from rayvec.pools.base import NotReady
from rayvec.pools.plan import Part

__all__ = ["LOOK_S", "ProcessWatch", "WorkerLink", "readable"]

LOOK_S = 0.1
"""How often a wait looks whether the worker still lives."""
_KILL_S = 10.0
_PIPE_BYTES = 1 << 16
"""What surely fits into a pipe that nobody reads."""

logger = logging.getLogger(__name__)


def readable(fds: Sequence[int], timeout_s: float) -> bool:
    """Waits until one of some file descriptors is readable, for up to `timeout_s`; returns whether one is."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000.0 * timeout_s))


class ProcessWatch:
    """Tells whether a process of this machine has ended, whoever started it.

    Args:
        pid: Of the process.
    """

    def __init__(self, pid: int) -> None:
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = -1

    def ended(self) -> bool:
        """Whether it has."""
        if self._fd < 0:
            return True
        return readable([self._fd], 0.0)

    def kill(self) -> None:
        """Kills it, and waits until it has ended."""
        if self._fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)
            readable([self._fd], _KILL_S)

    def close(self) -> None:
        """Stops watching."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Posted(NamedTuple):
    """A command under way.

    Attributes:
        num_steps: How many steps it takes.
        payload: What went with it through the pipe.
        repeat: Whether a worker that takes the place of this one is to do it again.
    """

    num_steps: int = 1
    payload: bytes = b""
    repeat: bool = True


_STEP = _Posted()


class WorkerLink:
    """Commands to one worker, and what came back.

    Args:
        block: Of the node.
        index: Of the worker.
        pipe: To the worker.
        where: Its name, for errors.
        first_id: Global index of the node's first environment.

    Attributes:
        start: Index, on the node, of its first environment.
        stop: Index after that of its last.
        infos: Raw infos that nobody has asked for yet, by global environment id.
        objects: Last observation of each environment whose observations are no arrays, by index on the node.
        failures: What environments raised, by the worker's own row; -1 for what concerns all.
        wait_for_room: Waits until the oldest command is done, for who posts one that has no room in the pipe.
    """

    def __init__(self, block: NodeBlock, index: int, pipe: Connection, where: str, first_id: int) -> None:
        bounds = block.shape.worker_bounds
        self.index = index
        self._first_id = first_id
        self.start, self.stop = bounds[index], bounds[index + 1]
        self.where = where
        self.infos: dict[int, RawInfo] = {}
        self.objects: dict[int, Any] = {}
        self.failures: list[tuple[int, RemoteFailure]] = []
        self.wait_for_room: Callable[[WorkerLink], None] = lambda link: link.wait(link.num_done, None)
        self._replies: dict[int, Reply] = {}
        self._posted: dict[int, _Posted] = {}
        self._begun_s = 0.0  # when the worker may have begun with the oldest of them
        self._progress = block.arrays["progress"][index : index + 1]
        self._seen, self._seen_s = 0, 0.0  # its progress within that, and since when
        self._go, self._done = block.go[index], block.done[index]
        self._ring = block.arrays["ring"][index]
        self._has_reply = block.arrays["has_reply"][index]
        self._head, self._tail = block.arrays["head"][index : index + 1], block.arrays["tail"][index : index + 1]
        self._pid = block.arrays["pid"][index : index + 1]
        self._depth, self._first_id_at = block.depth, block.first_id_at
        self._take(pipe)

    def _take(self, pipe: Connection) -> None:
        self.pipe = pipe
        self._watched = abs(int(self._pid[0]))
        self._process = ProcessWatch(self._watched)
        self._taken_s = time.monotonic()
        self._was_starting = self.is_starting  # when somebody last looked

    @property
    def replaced(self) -> bool:
        """Whether another client of the node has started another process in the place of the one watched here."""
        return abs(int(self._pid[0])) != self._watched

    @property
    def is_starting(self) -> bool:
        """Whether the worker, in the place of one that has ended, is still making its environments."""
        return bool(self._pid[0] < 0)

    @property
    def startup_s(self) -> float:
        """For how long a worker that is starting has been."""
        return time.monotonic() - self._taken_s

    @property
    def num_posted(self) -> int:
        """How many commands have been posted: the number of the next."""
        return int(self._head[0])

    @property
    def num_done(self) -> int:
        """How many commands are done and noted: the number of the oldest under way."""
        return int(self._tail[0])

    def post(self, op: Op, rows: NDArray[np.int64], *, autoreset: int = 0, payload: Any = None) -> int:
        """Posts what is no plain step, of these rows (the worker's own); returns the command's number."""
        command = self._ring[self.num_posted % self._depth]
        count, at = len(rows), self._first_id_at
        command[OP] = op
        command[AUTORESET] = autoreset
        command[COUNT] = count
        command[at : at + count] = rows
        return self._post(b"" if payload is None else dumps(payload))

    def post_step(self, part: Part, autoreset: int, dtypes: Sequence[int]) -> int:
        """Posts a step whose actions are in the block; returns the command's number."""
        number = int(self._head[0])
        key = autoreset, *dtypes
        command = part.commands.get(key)
        if command is None:
            head = [Op.STEP, autoreset, len(part.rows), *dtypes]
            command = part.commands[key] = np.array([*head, *part.rows.tolist()], np.int64)
        self._ring[number % self._depth][: len(command)] = command
        self._head[0] = number + 1
        self._posted[number] = _STEP
        if number == self._tail[0]:
            self._begun_s = time.monotonic()
        self._go.post()
        return number

    def post_call(self, name: str, *args: Any, num_steps: int = 1, repeat: bool = True) -> int:
        """Posts a call of one of the worker's methods, which takes so many steps.

        Args:
            name: Of the method.
            *args: Its arguments.
            num_steps: How many steps it takes.
            repeat: Whether a worker that takes the place of this one is to do it again.
        """
        self._ring[self.num_posted % self._depth][OP] = Op.CALL
        return self._post(dumps((name, args)), num_steps, repeat)

    def give_up_what_is_not_repeated(self) -> None:
        """Takes calls that the worker's successor needs not do for done."""
        while (oldest := self._posted.get(self.num_done)) is not None and not oldest.repeat:
            self._replies[self.num_done] = Reply(None)
            del self._posted[self.num_done]
            self._tail[0] += 1

    def _post(self, payload: bytes, num_steps: int = 1, repeat: bool = True) -> int:
        number = self.num_posted
        if payload:
            self._make_room(len(payload))
        self._head[0] = number + 1
        self._posted[number] = _Posted(num_steps, payload, repeat)
        if number == self._tail[0]:
            self._begun_s = time.monotonic()
        self._go.post()
        if payload:
            self._send(payload)
        return number

    def _make_room(self, num_bytes: int) -> None:
        """Waits until what lies in the pipe leaves room: the worker may be writing too, and both would block."""
        while self._posted and num_bytes + sum(len(posted.payload) for posted in self._posted.values()) > _PIPE_BYTES:
            self.wait_for_room(self)

    def _send(self, payload: bytes) -> None:
        try:
            self.pipe.send_bytes(payload)
        except OSError:
            pass  # the worker is gone, as whoever waits for it finds out

    def wait(self, number: int, deadline: float | None) -> None:
        """Waits until the command with this number is done.

        What came with steps and resets is kept, by environment, for :meth:`PoolClient.recv`; what calls
        returned, by number, for :meth:`take_reply`.

        Raises:
            NotReady: It was not done at `deadline` (of ``time.monotonic``).
            WorkerLostError: The worker ended.
        """
        while self._tail[0] <= number:
            self._acquire(deadline)
            self._finish()

    @property
    def waited_s(self) -> float:
        """How long the oldest command under way, or the step within it, has been waited for."""
        return time.monotonic() - max(self._begun_s, self._seen_s)

    def overdue_s(self, step_timeout_s: float) -> float:
        """When the oldest command under way, or the step within it, takes too long, by ``time.monotonic``.

        To be asked again and again: progress is taken for as old as it was first seen, and what is under way begins
        when the environments are made.
        """
        if self._was_starting:
            self._begun_s = time.monotonic()
            self._was_starting = self.is_starting
        num_steps = self._posted[self.num_done].num_steps
        whole_s = self._begun_s + num_steps * step_timeout_s
        if num_steps == 1:
            return whole_s
        if (seen := int(self._progress[0])) != self._seen:
            self._seen, self._seen_s = seen, time.monotonic()
        if seen % 2 == 0:  # the policy acts, which may have to be compiled first
            return whole_s
        return min(whole_s, max(self._begun_s, self._seen_s) + step_timeout_s)

    def poll(self) -> None:
        """Takes note of the commands that are done, without waiting."""
        while self._tail[0] < self._head[0] and self._done.try_acquire():
            self._finish()

    def take_reply(self, number: int) -> Reply:
        """Returns what the call with this number, which is done, returned."""
        return self._replies.pop(number)

    def reconnect(self, pipe: Connection, *, repeat: bool) -> None:
        """Goes on with another process in the place of the one that ended.

        Args:
            pipe: To the new process, which begins with the oldest command that is under way.
            repeat: Whether commands under way are ours to give to it again.
        """
        self.close()
        self._take(pipe)
        if not repeat:
            return
        for number in range(self.num_done, self.num_posted):
            self._go.post()
            if self._posted[number].payload:
                self._send(self._posted[number].payload)
        self._begun_s = time.monotonic()

    def _acquire(self, deadline: float | None) -> None:
        while not self._done.acquire(LOOK_S if deadline is None else min(LOOK_S, deadline - time.monotonic())):
            if self.ended():
                if self._done.try_acquire():  # it had just done it
                    return
                raise self.lost()
            if deadline is not None and time.monotonic() >= deadline:
                raise NotReady(f"{self.where} has not answered in time")

    def _finish(self) -> None:
        """Takes note of the oldest command under way, which is done."""
        number = self.num_done
        slot = number % self._depth
        if self._has_reply[slot]:
            self._hear(number, slot)
        self._tail[0] = number + 1
        self._posted.pop(number, None)
        if self._posted:  # the next begins only now: what came before it kept the worker
            self._begun_s = time.monotonic()

    def _hear(self, number: int, slot: int) -> None:
        """Takes the reply that came with a command."""
        try:
            reply: Reply = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError) as error:
            raise self.lost() from error
        for note in reply.notes:
            logger.warning(note)
        if self._ring[slot][OP] == Op.CALL:
            self._replies[number] = reply
        else:
            self._keep(self._ring[slot], reply)

    def _keep(self, command: NDArray[np.int64], reply: Reply) -> None:
        self.failures += reply.failures
        infos = reply.infos
        if reply.objects is not None:
            rows = command[self._first_id_at : self._first_id_at + command[COUNT]].tolist()
            infos = tuple(self._with_known_final(info) for info in infos)
            for row, obs in zip(rows, reply.objects, strict=True):
                if obs is not None:  # a process that took another's place does not know the last one
                    self.objects[self.start + row] = obs
        for info in infos:
            self.infos[info.env_id] = info

    def _with_known_final(self, info: RawInfo) -> RawInfo:
        if info.final_info is None or info.final_obs is not None:
            return info
        return info._replace(final_obs=self.objects.get(info.env_id - self._first_id))

    def ended(self) -> bool:
        """Whether the worker's process has ended.

        Its pipe would not tell: a child of the environment may hold it open.
        """
        return self._process.ended()

    def kill(self) -> None:
        """Ends the worker's process; from then on it writes no more, and what it has done is noted."""
        self._process.kill()
        with contextlib.suppress(WorkerLostError):
            self.poll()

    def raise_what_it_said(self) -> None:
        """Raises, of a worker that ended while it made its environments, what one of them raised."""
        if self.is_starting and not self.pipe.closed and self.pipe.poll():
            with contextlib.suppress(EOFError, ConnectionResetError):
                said = pickle.loads(self.pipe.recv_bytes())
                assert isinstance(said, RemoteFailure)
                raise said.rebuild()

    def lost(self) -> WorkerLostError:
        """Describes that the worker is gone."""
        return WorkerLostError(
            "A worker process runs until the pool is closed.",
            expected=f"{self.where} to answer",
            got="its process has ended (killed, out of memory, or a crash in an environment's native code)",
            remedy="Look into the system's log for what killed it; on_env_error='restart' makes it anew.",
        )

    def hangs(self, step_timeout_s: float) -> WorkerLostError:
        """Describes that the worker takes too long."""
        return WorkerLostError(
            "An environment answers within step_timeout_s.",
            expected=f"{self.where} to answer within {step_timeout_s} s",
            got="no answer; the worker has been killed",
            remedy="Raise step_timeout_s if steps may take so long; on_env_error='restart' makes it anew.",
        )

    def close(self) -> None:
        """Closes the pipe, upon which the worker ends."""
        self.pipe.close()
        self._process.close()
