"""Ranks as processes of this machine, without Ray."""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import pickle
import secrets
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait as wait_for_futures
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle

from rayvec.data.global_random import seed_globals
from rayvec.distributed.rank import MakeStore, RankPlacement, lost
from rayvec.distributed.stragglers import Arrivals, SharedArrivals
from rayvec.envs.failures import FAILURES
from rayvec.errors import LIMITS_REMEDY, ConfigError
from rayvec.node.processes import OwnedProcess
from rayvec.node.worker_share import visible_gpus

if TYPE_CHECKING:
    from rayvec.distributed.rank import Rank

_PRELOAD = ("rayvec.distributed.rank",)
"""The fork server imports torch once for all ranks."""
_START_S = 300.0
"""How long the fork server may import before it forks a rank."""
_END_S = 5.0


class _Process(NamedTuple):
    """A rank's process, and the thread that takes its answers.

    The thread is a daemon, so that this process can end while a rank computes.
    """

    placement: RankPlacement
    pipe: Connection
    process: OwnedProcess
    calls: SimpleQueue[Any]
    thread: Thread


class ProcessHost:
    """Runs ranks as processes of this machine.

    A fork server starts them. A rank ends with this process, however that ends.
    """

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def place(self, num_ranks: int, *, fewer: bool = False) -> list[RankPlacement]:
        """Places all ranks here."""
        return [RankPlacement(rank, num_ranks, "", "127.0.0.1", 0, 1) for rank in range(num_ranks)]

    def start(self, placement: RankPlacement, device: str, threads: int, timeout_s: float) -> _Process:
        """Starts a rank; the arguments are those of its :class:`~rayvec.distributed.rank.Rank`.

        Raises:
            RankLostError: The system refuses another process, or the fork server did not answer.
        """
        pipe, theirs = multiprocessing.Pipe()
        args = _own_gpu(placement.rank, device), placement, device, threads, timeout_s, theirs
        try:
            with theirs:
                process = OwnedProcess(rank_main, args, str(placement), _PRELOAD, _START_S)
        except (EOFError, OSError) as error:
            pipe.close()
            raise lost(placement, f"its process could not start ({error}). {LIMITS_REMEDY}") from error
        calls: SimpleQueue[Any] = SimpleQueue()
        thread = Thread(target=_take_answers, args=(calls,), daemon=True)
        thread.start()
        return _Process(placement, pipe, process, calls, thread)

    def call(self, process: _Process, name: str, *args: Any) -> Future[Any]:
        """Calls a method of a rank's object, after the calls before."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `_answer_of` finds that it has ended
            process.pipe.send_bytes(cloudpickle.dumps((name, args)))
        call = Future[Any]()
        process.calls.put((call, process))
        return call

    def put(self, value: Any) -> Any:
        """Returns the value: each rank gets it through its pipe."""
        return value

    def wait(self, calls: Sequence[Future[Any]], timeout_s: float) -> Collection[Future[Any]]:
        """Waits until one of these calls has ended, or its rank has; returns all that have."""
        return wait_for_futures(calls, None if timeout_s == math.inf else timeout_s, FIRST_COMPLETED).done

    def result(self, call: Future[Any]) -> Any:
        """Returns the result of a call that has ended.

        Raises:
            RankLostError: The rank's process has ended.
        """
        return call.result()

    @contextlib.contextmanager
    def rendezvous(self) -> Iterator[MakeStore]:
        """Yields what makes a store in a file that only this user can read."""
        directory = os.path.join(tempfile.gettempdir(), f"rayvec-{secrets.token_hex(16)}")
        try:
            yield functools.partial(_file_store, directory)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def arrivals(self, num_ranks: int) -> Callable[[int], Arrivals]:
        """Returns what makes the `Arrivals` of a rank, given its number."""
        return functools.partial(SharedArrivals, self._stack.enter_context(SharedArrivals.open(num_ranks)))

    def kill(self, processes: Sequence[_Process]) -> None:
        """Ends ranks, also those that hang, and whatever processes they have left."""
        for process in processes:
            process.process.kill()
            process.calls.put(None)
            process.thread.join(_END_S)
            process.pipe.close()

    def close(self) -> None:
        """Closes what ranks share."""
        self._stack.close()


def _take_answers(calls: SimpleQueue[Any]) -> None:
    """Ends the calls of a rank, one after another. None is the last."""
    while (posted := calls.get()) is not None:
        call, process = posted
        try:
            call.set_result(_answer_of(process))
        except BaseException as error:
            call.set_exception(error)
        del posted, call, process  # a rank that its owner forgets ends


def _answer_of(process: _Process) -> Any:
    """Waits for the next answer of a rank; returns it."""
    wait([process.pipe, process.process.sentinel])
    with contextlib.suppress(EOFError, OSError):
        if process.pipe.poll():
            return pickle.loads(process.pipe.recv_bytes())
    raise lost(process.placement, "its process has ended (killed, out of memory, or its own exit)")


def _own_gpu(rank: int, device: str) -> dict[str, str]:
    """Returns the setting that lets a rank see one GPU of its own.

    Raises:
        ConfigError: There are fewer GPUs than ranks.
    """
    if device != "cuda":
        return {}
    gpus = visible_gpus()
    if rank >= len(gpus):
        raise ConfigError(
            f"Rank {rank} has no GPU: this machine has {len(gpus)}, and each rank learns on one of its own. "
            "Lower num_learners, or pass learner_device='cpu'."
        )
    return {"CUDA_VISIBLE_DEVICES": gpus[rank]}


def _file_store(directory: str, timeout_s: float) -> Any:
    """Returns a store of torch.distributed in a file."""
    from datetime import timedelta

    import torch.distributed

    os.makedirs(directory, mode=0o700, exist_ok=True)  # here, since ranks that share memory need none
    store = torch.distributed.FileStore(os.path.join(directory, "ranks"), -1)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def rank_main(
    environment: Mapping[str, str],
    placement: RankPlacement,
    device: str,
    threads: int,
    timeout_s: float,
    pipe: Connection,
) -> None:
    """Runs a rank until its owner closes the pipe. A new process calls this function.

    Args:
        environment: Environment variables of this rank alone.
        placement: Where this rank is; with the next three, the arguments of its `Rank`.
        device: ``"cpu"`` or ``"cuda"``.
        threads: Number of threads that torch may use.
        timeout_s: How long ranks wait for each other, in seconds.
        pipe: To the owner.
    """
    from rayvec.distributed.rank import Rank  # imports torch

    os.environ.update(environment)
    Path("/proc/self/comm").write_text("rayvec-rank")  # what ps and top show
    seed_globals(None)  # else every rank inherits the fork server's state
    rank = Rank(placement, device, threads, timeout_s)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the owner has closed the pipe
        while True:
            pipe.send_bytes(_answer(rank, pipe.recv_bytes()))


def _answer(rank: Rank, request: bytes) -> bytes:
    """Returns the pickled result of a request; a failure if the request can't be unpickled or the result pickled."""
    try:
        name, args = pickle.loads(request)
        data: bytes = cloudpickle.dumps(rank.call(name, *args))
    except FAILURES as error:
        data = cloudpickle.dumps(rank.leave(error))
    return data
