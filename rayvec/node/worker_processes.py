"""Starts, sets up, restarts and ends the worker processes of one node."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pickle
import resource
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

from gymnasium import Space

from rayvec.envs.pickled_parts import PickledParts
from rayvec.errors import LIMITS_REMEDY, ConfigError, RemoteFailure, WorkerLostError, duration
from rayvec.node.chunk_memory import ChunkMemory
from rayvec.node.fork_server import ForkServer
from rayvec.node.messages import dumps
from rayvec.node.pipe import MessagePipe
from rayvec.node.process_watch import ProcessWatch
from rayvec.node.protocol import Setup
from rayvec.node.step_memory import BlockShape, NodeBlock
from rayvec.node.worker import STACK_SIGNAL, WorkerSpec, worker_main
from rayvec.pools.base import NO_RESTARTS, NotReady, PoolSpaces, RestartPolicy
from rayvec.pools.restart_state import NodeState

__all__ = ["FILES_OF_A_WORKER", "SPARE_FILES", "WorkerProcess", "WorkerSet"]

logger = logging.getLogger(__name__)

_END_S = 5.0
_DUMP_S = 1.0
_STACK_BYTES = 1 << 16
FILES_OF_A_WORKER = 5
"""The pipe, the process, the file for its stack, and two pieces of chunk memory."""
SPARE_FILES = 64

_TRY = "Make one environment by hand in a fresh interpreter to see what it does."
_WAIT = "Raise start_timeout_s if this machine is overloaded. Otherwise find out what stops the fork server's process."


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """The owner's handle of a worker process.

    Attributes:
        pid: Process id of the worker.
        watch: The watch on the process.
        pipe: The pipe to the process.
        stack_fd: File descriptor of the file into which the worker writes its stack on request.
    """

    pid: int
    watch: ProcessWatch
    pipe: MessagePipe
    stack_fd: int

    def stack(self) -> str:
        """Returns the current Python stack of the process, to show where it hangs."""
        os.ftruncate(self.stack_fd, 0)
        os.lseek(self.stack_fd, 0, os.SEEK_SET)
        self.watch.signal(STACK_SIGNAL)
        deadline = time.monotonic() + _DUMP_S
        text = b""
        while time.monotonic() < deadline and not self.watch.wait(0.02):
            before, text = text, os.pread(self.stack_fd, _STACK_BYTES, 0)
            if text and text == before:
                break
        return text.decode(errors="replace") or "(not known: the process is stopped, or blocks signals)"

    def end(self, timeout_s: float = 0.0) -> bool:
        """Waits up to `timeout_s` for the process to exit, then kills it. Closes all file descriptors.

        Returns:
            Whether it exited by itself.
        """
        if self.watch.fileno() < 0:  # ended before; its replacement could not be started
            return True
        if not (has_exited := self.watch.wait(timeout_s)):
            self.watch.kill()
        self.watch.close()
        self.pipe.close()
        os.close(self.stack_fd)
        return has_exited


class WorkerSet:
    """The worker processes of one node, which are children of the pool's fork server.

    Args:
        factories: A pickled factory of environments for each worker. Only the workers unpickle them.
        worker_bounds: Global indices: worker k holds ``range(worker_bounds[k], worker_bounds[k + 1])``.
        node: Name of the node, for errors.
        preload: Modules that the fork server imports in addition to rayvec.
        restart_policy: The restart policy for environments that raise.

    Raises:
        ConfigError: The hard limit on open files is too low for so many workers.
        WorkerLostError: A worker exited, or did not make its environments within ``start_timeout_s``.
        Exception: The exception that the constructor of an environment raised. Its ``__cause__`` is an ``EnvError``.
    """

    def __init__(
        self,
        factories: PickledParts,
        worker_bounds: Sequence[int],
        node: str = "local",
        preload: Sequence[str] = (),
        restart_policy: RestartPolicy = NO_RESTARTS,
    ) -> None:
        self.first_id = worker_bounds[0]
        self.node = node
        self.bounds = tuple(bound - self.first_id for bound in worker_bounds)
        self.restart_policy = restart_policy
        self.processes: list[WorkerProcess] = []
        self.memories: list[ChunkMemory] = []
        self._block: NodeBlock | None = None
        self._preload = preload
        self._turn = threading.RLock()  # a restart and the end may come from different threads
        self._closed = False
        _allow_open_files(FILES_OF_A_WORKER * len(factories.places))
        self.server = self._open_server()
        self._specs = [
            WorkerSpec(k, worker_bounds[k], places, node, restart_policy) for k, places in enumerate(factories.places)
        ]
        self._factories = factories
        try:
            for spec in self._specs:
                self.processes.append(self._start(spec))
            deadline = time.monotonic() + restart_policy.start_timeout_s
            sizes = [self.bounds[k + 1] - self.bounds[k] for k in range(len(self._specs))]
            reports = [self._hear(k, PoolSpaces, deadline) for k in range(len(sizes))]
            sizes = [report.num_envs or size for report, size in zip(reports, sizes, strict=True)]
            self.spaces = PoolSpaces.join(list(zip(sizes, reports, strict=True)))
            self.bounds = tuple(accumulate(sizes, initial=0))  # until now, they counted native sub-batches
        except BaseException:
            self.close(0.0)
            raise

    def _open_server(self) -> ForkServer:
        try:
            return ForkServer.branch(self._preload, self.restart_policy.start_timeout_s)
        except NotReady as error:
            limit_s = self.restart_policy.start_timeout_s
            raise self._lost(0, f"no fork server within start_timeout_s={limit_s:g} ({error})", _WAIT) from error
        except EOFError as error:
            raise self._lost(0, f"the fork server could not start, or ended ({error})") from error
        except OSError as error:
            raise self._lost(0, f"no fork server: {error}", LIMITS_REMEDY) from error

    def _start(self, spec: WorkerSpec) -> WorkerProcess:
        if self.server.ended():
            self.server.close()
            self.server = self._open_server()
        limit_s = self.restart_policy.start_timeout_s
        try:
            with contextlib.ExitStack() as undo:
                ours, theirs = socket.socketpair()
                undo.callback(ours.close)
                with theirs:
                    stack_fd = os.memfd_create("rayvec-stack", os.MFD_CLOEXEC)
                    undo.callback(os.close, stack_fd)
                    pid, watch = self.server.fork(
                        pickle.dumps(partial(worker_main, spec)),
                        [theirs.fileno(), stack_fd, self._factories.fd],
                        limit_s,
                    )
                undo.pop_all()
        except EOFError as error:
            raise self._lost(spec.index, "the fork server ended (killed, or out of memory)") from error
        except NotReady as error:
            raise self._lost(spec.index, f"no new process: {error}", _WAIT) from error
        except OSError as error:
            raise self._lost(spec.index, f"no new process: {error}", LIMITS_REMEDY) from error
        return WorkerProcess(pid, watch, MessagePipe(ours, watch), stack_fd)

    def _hear(self, index: int, kind: type[Any], deadline: float) -> Any:
        """Reads a starting worker's report, which must be an instance of `kind`.

        Raises:
            WorkerLostError: The worker exited, or did not report before the deadline.
            Exception: The exception that the worker reported.
        """
        process = self.processes[index]
        try:
            said = pickle.loads(process.pipe.receive(deadline)[0])
        except EOFError as error:
            raise self._lost(index, "its process ended (killed, out of memory, or a crash in native code)") from error
        except NotReady as error:
            limit_s = self.restart_policy.start_timeout_s
            raise self._lost(
                index, f"no report within start_timeout_s={limit_s:g}; its stack:\n{process.stack()}"
            ) from error
        if isinstance(said, RemoteFailure):
            raise said.rebuild()
        assert isinstance(said, kind)
        return said

    def _lost(self, index: int, got: str, remedy: str = _TRY) -> WorkerLostError:
        return WorkerLostError(
            "A worker makes its environments and reports.",
            expected=f"a report of {self.where(index)}",
            got=got,
            remedy=remedy,
        )

    def where(self, index: int) -> str:
        """Returns the name of a worker, for errors."""
        first, stop = (self.first_id + bound for bound in self.bounds[index : index + 2])
        return f"worker {index} on node {self.node} (environments {first} to {stop - 1})"

    def allocate(self, observation: Space[Any], action: Space[Any], state: NodeState | None = None) -> NodeBlock:
        """Allocates the block for these spaces, restores `state` into it, and sends it to every worker."""
        block = self._block = NodeBlock(BlockShape(observation, action, self.bounds, self.spaces.sub_batches))
        if state is not None:
            state.restore(block.results(slice(None)))
        self.memories = [ChunkMemory() for _ in self.processes]
        try:
            for k in range(len(self.processes)):
                self._set_up(k, Setup(block.shape, first_id=self.first_id))
            deadline = time.monotonic() + self.restart_policy.start_timeout_s
            for k in range(len(self.processes)):
                self._hear(k, int, deadline)
        except BaseException:
            block.close()
            raise
        return block

    def restart(self, index: int, first_command: int, policies: Sequence[tuple[int, bytes, int]]) -> WorkerProcess:
        """Kills a worker and starts a replacement worker, which resumes with the oldest pending command.

        The call does not wait until the replacement has made its environments. Until then, the block holds the
        negative of its process id.

        Args:
            index: Index of the worker.
            first_command: Number of the oldest pending command.
            policies: Key, pickled policy, and file descriptor of the weight memory, for each policy.
        """
        with self._turn:
            if self._closed:
                raise self._lost(index, "the pool was closed meanwhile")
            assert self._block is not None
            self.processes[index].end()
            self._block.forget(index)
            process = self.processes[index] = self._start(replace(self._specs[index], replacement=True))
            self._block.arrays["pid"][index] = -process.pid
            self._set_up(index, Setup(self._block.shape, first_command, len(policies), self.first_id))
            for key, policy, fd in policies:
                self._send(index, (key, policy), [fd])
            return process

    def _set_up(self, index: int, setup: Setup) -> None:
        assert self._block is not None
        self._send(index, setup, [*self._block.fds, *self.memories[index].fds])

    def _send(self, index: int, message: Any, fds: Sequence[int]) -> None:
        with within_file_limit():
            self.processes[index].pipe.send(dumps(message), fds)

    def close(self, timeout_s: float = _END_S) -> None:
        """Ends every worker and the fork server. Workers that still run after `timeout_s` are killed."""
        with self._turn:
            self._closed = True
            deadline = time.monotonic() + timeout_s
            for process in self.processes:
                process.pipe.close()  # a worker exits when it next uses the closed pipe
            ended = [process.end(max(0.0, deadline - time.monotonic())) for process in self.processes]
            killed = ", ".join(self.where(k) for k, has_exited in enumerate(ended) if not has_exited)
            if killed and timeout_s:
                logger.warning(
                    "killed after %s, since their environments had not closed: %s", duration(timeout_s), killed
                )
            for memory in self.memories:
                memory.close()
            self.processes, self.memories = [], []
            self._factories.close()
            self.server.close()


@contextlib.contextmanager
def within_file_limit() -> Iterator[None]:
    """Raises ``WorkerLostError`` where the system refuses this process another file descriptor."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise WorkerLostError(
            "Workers get memory, policies and weights as file descriptors, which this process duplicates.",
            expected="a limit that allows a few more open files",
            got=str(error),
            remedy=LIMITS_REMEDY,
        ) from error


def _allow_open_files(count: int) -> None:
    """Raises this process's soft limit on open files, if it would not allow `count` more.

    Raises:
        ConfigError: The hard limit does not allow so many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + count + SPARE_FILES
    if resource.RLIM_INFINITY not in (soft, hard) and needed > hard:
        raise ConfigError(
            f"A pool keeps {FILES_OF_A_WORKER} files open for each worker.",
            expected=f"a limit of at least {needed} open files",
            got=f"a hard limit of {hard}",
            remedy="Raise the limit (ulimit -Hn shows it), or use fewer workers.",
        )
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
