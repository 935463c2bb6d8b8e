"""One worker as its pool sees it: commands are posted, and waited for in their order."""

from __future__ import annotations

import contextlib
import logging
import pickle
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayvec.data import RawInfo
from rayvec.errors import RemoteFailure, WorkerLostError
from rayvec.node.chunk_memory import dumps
from rayvec.node.pipe import LOOK_S
from rayvec.node.wire import AUTORESET, COUNT, OP, NodeBlock, Op, Reply
from rayvec.node.workers import WorkerProcess
from rayvec.pools.base import NotReady
from rayvec.pools.plan import Part

__all__ = ["WorkerLink"]

_REPLY_S = 60.0
"""How long a worker may take to hand over a reply that it has begun."""

logger = logging.getLogger(__name__)


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
        process: The worker's.
        where: Its name, for errors.
        first_id: Global index of the node's first environment.

    Attributes:
        start: Index, on the node, of its first environment.
        stop: Index after that of its last.
        infos: Raw infos that nobody has asked for yet, by global environment id.
        objects: Last observation of each environment whose observations are no arrays, by index on the node.
        failures: What environments raised, by the worker's own row; -1 for what concerns all.
    """

    def __init__(self, block: NodeBlock, index: int, process: WorkerProcess, where: str, first_id: int) -> None:
        bounds = block.shape.worker_bounds
        self.index = index
        self._first_id = first_id
        self.start, self.stop = bounds[index], bounds[index + 1]
        self.where = where
        self.infos: dict[int, RawInfo] = {}
        self.objects: dict[int, Any] = {}
        self.failures: list[tuple[int, RemoteFailure]] = []
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
        self._take(process)

    def _take(self, process: WorkerProcess) -> None:
        self._process = process
        self._taken_s = time.monotonic()
        self._was_starting = self.is_starting  # when the pool last looked

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

    def post_call(self, name: str, *args: Any, num_steps: int = 1, fds: Sequence[int] = (), repeat: bool = True) -> int:
        """Posts a call of one of the worker's methods, which takes so many steps; returns the command's number.

        Args:
            name: Of the method.
            *args: Its arguments.
            num_steps: How many steps it takes.
            fds: Descriptors that go along; only where it is not repeated.
            repeat: Whether a replacement worker is to do it again.
        """
        self._ring[self.num_posted % self._depth][OP] = Op.CALL
        return self._post(dumps((name, args)), num_steps, repeat, fds)

    def post_close(self) -> None:
        """Lets the worker do what is pending, close its environments and end; its replies are not read."""
        if self.is_starting:
            self._process.watch.kill()  # it would read that it is to end only when its environments are made
        else:
            self.post_call("close")

    def give_up_what_is_not_repeated(self) -> None:
        """Takes calls that a replacement worker need not do for done."""
        while (oldest := self._posted.get(self.num_done)) is not None and not oldest.repeat:
            self._replies[self.num_done] = Reply(None)
            del self._posted[self.num_done]
            self._tail[0] += 1

    def _post(self, payload: bytes, num_steps: int = 1, repeat: bool = True, fds: Sequence[int] = ()) -> int:
        number = self.num_posted
        self._head[0] = number + 1
        self._posted[number] = _Posted(num_steps, payload, repeat)
        if number == self._tail[0]:
            self._begun_s = time.monotonic()
        self._go.post()
        if payload:
            self._process.pipe.send(payload, fds)
        return number

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
        """Takes note of the commands that are done, without waiting.

        Raises:
            WorkerLostError: The worker ended in the midst of a reply.
        """
        self._process.pipe.flush()
        while self._tail[0] < self._head[0] and self._done.try_acquire():
            self._finish()

    def take_reply(self, number: int) -> Reply:
        """Returns what the call with this number, which is done, returned."""
        return self._replies.pop(number)

    def peek_reply(self, number: int) -> Reply | None:
        """Returns what a call returned, or None if it is not done; the reply stays here."""
        return self._replies.get(number)

    def reconnect(self, process: WorkerProcess) -> None:
        """Gives the pending commands to the process that replaces the worker; it begins with the oldest."""
        self._take(process)
        for number in range(self.num_done, self.num_posted):
            self._go.post()
            if self._posted[number].payload:
                process.pipe.send(self._posted[number].payload)
        self._begun_s = time.monotonic()

    def _acquire(self, deadline: float | None) -> None:
        pipe = self._process.pipe
        while True:
            if pipe.flush():
                if self._done.acquire(LOOK_S if deadline is None else min(LOOK_S, deadline - time.monotonic())):
                    return
            elif self._done.try_acquire():
                return
            else:
                pipe.wait_to_send(LOOK_S)
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
            reply: Reply = pickle.loads(self._process.pipe.receive(time.monotonic() + _REPLY_S)[0])
        except (EOFError, NotReady) as error:
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
        """Whether the worker's process has ended."""
        return self._process.watch.ended()

    def kill(self) -> None:
        """Ends the worker's process; from then on it writes no more, and what it has done is noted."""
        self._process.watch.kill()
        with contextlib.suppress(WorkerLostError):
            self.poll()

    def raise_what_it_said(self) -> None:
        """Raises, of a worker that ended while it made its environments, what one of them raised."""
        if self.is_starting and self._process.pipe.poll():
            with contextlib.suppress(EOFError):
                said = pickle.loads(self._process.pipe.receive()[0])
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

    def hangs(self, name: str, limit_s: float) -> WorkerLostError:
        """Describes that the worker, which still runs, takes longer than a limit; shows the stack where it hangs.

        Args:
            name: Of the limit.
            limit_s: The limit.
        """
        return WorkerLostError(
            f"An environment answers within {name}.",
            expected=f"{self.where} to answer within {limit_s} s",
            got=f"no answer; the worker has been killed. Its stack was:\n{self._process.stack()}",
            remedy=f"Raise {name} if it may take so long; on_env_error='restart' replaces the worker.",
        )
