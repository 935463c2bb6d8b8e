"""Ranks as processes of this machine, without Ray."""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import pickle
import secrets
import select
import shutil
import socket
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from rayvec.data.global_random import seed_globals
from rayvec.distributed.memory_file import MemoryFile
from rayvec.distributed.rank_host import MakeStore, RankPlacement, RunningRank, VitalSigns, lost, vital_signs
from rayvec.errors import LIMITS_REMEDY, ConfigError, LearnerError
from rayvec.node.fork_server import ForkServer
from rayvec.node.pipe import MessagePipe
from rayvec.node.process_watch import ProcessWatch
from rayvec.pools.base import NotReady
from rayvec.pools.in_process_base import FAILURES
from rayvec.pools.waited_time import WaitedTime

if TYPE_CHECKING:
    from rayvec.distributed.rank_actor import RankActor

__all__ = ["ProcessHost", "rank_main"]

_LOOK_S = 0.5
"""How long a wait sleeps at most, so that a pause of the job does not count as waiting."""
_MESSAGE_S = 60.0
"""A rank that takes more seconds than this to send the rest of a message is lost."""
_PRELOAD = ("rayvec.distributed.rank_actor",)
"""The fork server imports torch once for all ranks, also for those that replace lost ones."""
_REFUSED = (errno.EAGAIN, errno.EMFILE, errno.ENFILE)
"""What the system answers at a limit; restarting the ranks would not help."""


@dataclass(slots=True, eq=False)
class _Ref:
    """A requested call, and its result once the call has ended."""

    rank: RunningRank
    has_ended: bool = False
    result: Any = None


@dataclass(slots=True)
class _Process:
    """A rank's process, and its pending calls.

    Attributes:
        pipe: The pipe to it.
        watch: The watch on it.
        calls: The pending calls, oldest first.
        has_ended: Whether the process has ended.
    """

    pipe: MessagePipe
    watch: ProcessWatch
    calls: deque[_Ref] = field(default_factory=deque)
    has_ended: bool = False


class ProcessHost:
    """Runs ranks as processes of this machine; see :class:`~rayvec.distributed.ray_host.RayHost`.

    A fork server starts them. A rank ends with this process, however that ends.
    """

    def __init__(self) -> None:
        self._server: ForkServer | None = None

    def place(self, num_ranks: int, *, fewer: bool = False) -> list[RankPlacement]:
        """Places all ranks here."""
        return [RankPlacement(rank, num_ranks, "", "127.0.0.1", rank, num_ranks, 0, 1) for rank in range(num_ranks)]

    def start(self, placement: RankPlacement, device: str, threads: int, timeout_s: float) -> RunningRank:
        """See :class:`~rayvec.distributed.ray_host.RayHost`.

        Raises:
            LearnerError: The system refuses another process, or another open file.
            RankLostError: The fork server ended, or did not answer.
        """
        main = functools.partial(rank_main, _own_gpu(placement.rank, device), placement, device, threads, timeout_s)
        try:
            with contextlib.ExitStack() as undo:
                ours, theirs = socket.socketpair()
                undo.callback(ours.close)
                with theirs:
                    if self._server is None:
                        self._server = ForkServer.branch(_PRELOAD)
                    pid, watch = self._server.fork(pickle.dumps(main), [theirs.fileno()])
                undo.pop_all()
        except (EOFError, NotReady, OSError) as error:
            if isinstance(error, OSError) and error.errno in _REFUSED:
                raise LearnerError(
                    "Each rank is a process of its own.",
                    expected=f"a process for {placement}",
                    got=f"no new process: {error}",
                    remedy=LIMITS_REMEDY,
                ) from error
            raise lost(RunningRank(placement, None), f"its process could not start ({error})") from error
        return RunningRank(placement, _Process(MessagePipe(ours, watch), watch), pid)

    def is_here(self, placement: RankPlacement) -> bool:
        """Returns True: all ranks are on this machine."""
        return True

    def call(self, rank: RunningRank, method: str, *args: Any) -> _Ref:
        """See :class:`~rayvec.distributed.ray_host.RayHost`."""
        values = [self._sent(arg, rank) for arg in args]
        handle: _Process = rank.handle
        handle.pipe.send(cloudpickle.dumps((method, values)))
        handle.calls.append(_Ref(rank))
        return handle.calls[-1]

    def _sent(self, arg: Any, rank: RunningRank) -> Any:
        if isinstance(arg, MemoryFile) and not rank.reads_memory:
            return arg.value()
        return self.result(arg) if isinstance(arg, _Ref) else arg

    def put(self, value: Any) -> MemoryFile:
        """See :class:`~rayvec.distributed.ray_host.RayHost`."""
        return MemoryFile(value)

    def wait(self, refs: Sequence[_Ref], num_results: int, timeout_s: float | None) -> list[_Ref]:
        """See :class:`~rayvec.distributed.ray_host.RayHost`."""
        waited, limit_s = WaitedTime(), math.inf if timeout_s is None else timeout_s
        ranks = list({id(ref.rank): ref.rank for ref in refs}.values())
        while True:
            done = [ref for ref in refs if ref.has_ended or ref.rank.handle.has_ended]
            if len(done) >= num_results or waited.look() > limit_s:
                return done
            running = [rank.handle for rank in ranks if not rank.handle.has_ended]
            self._receive(running, min(_LOOK_S, limit_s - waited.seconds))

    def _receive(self, processes: Sequence[_Process], timeout_s: float) -> None:
        """Waits until a process says something or ends; takes what has come."""
        poll = select.poll()
        for each in processes:
            has_sent = each.pipe.flush()
            poll.register(each.pipe.fileno(), select.POLLIN | (0 if has_sent else select.POLLOUT))
            poll.register(each.watch.fileno(), select.POLLIN)
        poll.poll(1000 * timeout_s)
        for each in processes:
            has_ended = each.watch.ended()  # before the last look at what it said
            while each.pipe.poll():
                try:
                    data, _ = each.pipe.receive(time.monotonic() + _MESSAGE_S)
                except (EOFError, NotReady):
                    each.has_ended = True
                    break
                call = each.calls.popleft()
                call.result, call.has_ended = pickle.loads(data), True
            each.has_ended |= has_ended

    def result(self, ref: _Ref) -> Any:
        """See :class:`~rayvec.distributed.ray_host.RayHost`."""
        self.wait([ref], 1, None)
        if not ref.has_ended:
            raise lost(ref.rank, "its process has ended (killed, out of memory, or its own exit)")
        return ref.result

    def signs(
        self, ranks: Sequence[RunningRank], timeout_s: float, pending: Sequence[_Ref] = ()
    ) -> list[VitalSigns] | None:
        """See :class:`~rayvec.distributed.ray_host.RayHost`."""
        signs = [each for rank in ranks if (each := vital_signs(rank.pid))]
        return signs if len(signs) == len(ranks) else None  # the result of the rank says what is wrong

    def watch(self, ranks: Sequence[RunningRank]) -> None:
        """Does nothing: all ranks are on this machine."""

    def unreachable(self, ranks: Sequence[RunningRank]) -> RunningRank | None:
        """Returns None: all ranks are on this machine."""
        return None

    @contextlib.contextmanager
    def rendezvous(self) -> Iterator[MakeStore]:
        """Yields what makes a store in a file that only this user can read."""
        directory = Path(tempfile.gettempdir(), f"rayvec-{secrets.token_hex(16)}")
        try:
            yield functools.partial(_file_store, directory / "ranks")
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def end(self, ranks: Sequence[RunningRank]) -> None:
        """See :class:`~rayvec.distributed.ray_host.RayHost`."""
        for rank in ranks:
            rank.handle.watch.kill()
            rank.handle.pipe.close()
            rank.handle.watch.close()
            rank.handle.has_ended = True

        server, self._server = self._server, None
        if server is not None:
            server.close()  # and whatever processes the ranks have left

    def close(self) -> None:
        """Does nothing: the fork server has ended with the ranks."""


def _own_gpu(rank: int, device: str) -> dict[str, str]:
    """Returns the setting that lets a rank see one GPU of its own.

    Raises:
        ConfigError: There are fewer GPUs than ranks.
    """
    if device != "cuda":
        return {}
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [*map(str, range(torch.cuda.device_count()))] if visible is None else [*filter(None, visible.split(","))]
    if rank >= len(gpus):
        raise ConfigError(
            "Each rank learns on a GPU of its own.",
            expected=f"at least {rank + 1} GPUs on this machine",
            got=len(gpus),
            remedy="Lower num_learners, or pass learner_device='cpu'.",
        )
    return {"CUDA_VISIBLE_DEVICES": gpus[rank]}


def _file_store(path: Path, timeout_s: float) -> Any:
    """Returns a store of torch.distributed in a file."""
    from datetime import timedelta

    import torch.distributed

    path.parent.mkdir(mode=0o700, exist_ok=True)  # here, since ranks that share memory need none
    store = torch.distributed.FileStore(os.fspath(path), -1)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def rank_main(
    environment: Mapping[str, str],
    placement: RankPlacement,
    device: str,
    threads: int,
    timeout_s: float,
    fds: Sequence[int],
) -> None:
    """Runs a rank until its owner closes the pipe. The fork server calls this function in a new process.

    Args:
        environment: Environment variables of this rank alone.
        placement: Where this rank is; with the next three, the arguments of its `RankActor`.
        device: ``"cpu"`` or ``"cuda"``.
        threads: Number of threads that torch may use.
        timeout_s: How long ranks wait for each other, in seconds.
        fds: File descriptor of the pipe to the owner.
    """
    from rayvec.distributed.rank_actor import RankActor  # imports torch

    os.environ.update(environment)
    Path("/proc/self/comm").write_text("rayvec-rank")  # what ps and top show
    seed_globals(None)  # else every rank inherits the fork server's state
    pipe = MessagePipe(socket.socket(fileno=fds[0]))
    actor = RankActor(placement, device, threads, timeout_s)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the owner has closed the pipe
        while True:
            pipe.send(_answer(actor, pipe.receive()[0]))


def _answer(actor: RankActor, request: bytes) -> bytes:
    """Returns the pickled result of a request; a failure if the request can't be unpickled or the result pickled."""
    try:
        method, args = pickle.loads(request)
        data: bytes = cloudpickle.dumps(getattr(actor, method)(*args))
    except FAILURES as error:
        data = cloudpickle.dumps(actor.leave(error))
    return data
