"""What all adapters share: the environments, the call that is pending in them, and when they are closed."""

from __future__ import annotations

import atexit
import logging
import math
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from threading import RLock
from typing import Any, NoReturn, Self, TypeVar

import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError

from rayvec.data import Topology
from rayvec.envs.factory import EnvFactory
from rayvec.errors import NodeLostError, WorkerLostError
from rayvec.fleet.commands import STEPPING, Answer, Command, Note, Op
from rayvec.vector.env_stats import EnvStats
from rayvec.vector.open_environments import Environments, open_environments

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_LOSSES = (NodeLostError, WorkerLostError, KeyboardInterrupt)
"""What closes the environments where an exception of a method or of a policy leaves them open."""


_EXIT_S = 1.0
"""How long environments that a script has left open get to end their step and to close at its end."""


class NotReady(multiprocessing.TimeoutError):
    """A wait reached its timeout. A ``TimeoutError`` that an environment raises is never a `NotReady`."""


class Adapter:
    """A base of vector environments: it checks whether a call may begin, and closes environments in which one fails.

    Attributes:
        closed: Whether the environments are closed, or not open yet.
        num_uses: How many resets, steps and chunks have been started. By it a collector notices uses that are not its
            own.
        interrupted_close_s: Seconds that environments get to end their step and to close after Ctrl-C in a call; None
            for as many as in :meth:`close`.
    """

    closed = True
    num_uses = 0
    interrupted_close_s: float | None = None
    close: Any  # a method of the library's own base class
    _envs: Environments
    _closed_by: type[BaseException] | None = None  # the error of the call that closed them, if one did

    def _open(self, factory: EnvFactory, **settings: Any) -> None:
        """Makes the environments; `settings` are those of `open_environments`."""
        self._creator, self._lock = os.getpid(), RLock()
        self._replaced = Counter[str]()  # children of fleets, by kind
        self._restarts: dict[int, tuple[int, str]] = {}  # how often, and why the last time, by global index
        self._posted: dict[tuple[str, Any], Any] = {}  # tickets by the name of the call, and its group or chunk
        self._envs = open_environments(factory, **settings)
        # It also keeps the files of an adapter in a cycle from being collected before the adapter's `__del__`.
        self._at_exit = partial(_close_at_exit, self._envs, self._creator)
        atexit.register(self._at_exit)
        self.closed = False

    @property
    def topology(self) -> Topology:
        """Which node holds which environments, and how many workers step them."""
        return self._envs.topology

    @property
    def transports(self) -> tuple[str, ...]:
        """How each node is reached: ``"shm"`` or ``"tcp"``, or ``"local"`` if this process steps the environments."""
        return self._envs.transports

    def take_replaced(self) -> dict[str, int]:
        """Returns how many workers and nodes were replaced since the last call, by kind: ``worker``, ``node``."""
        replaced, self._replaced = dict(self._replaced), Counter()
        return replaced

    def worker_pids(self) -> dict[str, list[int]]:
        """Process ids by the node's name: of the process that holds the workers, and after it of each worker.

        Raises:
            AlreadyPendingCallError: Another call is pending, or another thread makes one.
            NodeLostError: A node is lost; this closes all environments.
        """
        self._assert_idle("worker_pids")
        return self._guarded(self._envs.pids)

    def env_stats(self) -> tuple[EnvStats, ...]:
        """Returns how long steps and resets of each environment take, its restarts, and where it is."""
        self._assert_idle("env_stats")
        times = self._run(Command(Op.TIMES, np.arange(self._envs.num_envs))).value
        stats = []
        for node in self.topology.nodes:
            for worker, (first, stop) in enumerate(pairwise(node.worker_bounds)):
                for env in range(first, stop):
                    num_restarts, error = self._restarts.get(self._envs.first_id + env, (0, ""))
                    stats.append(EnvStats._make((*times[env], num_restarts, error, node.name, worker)))
        return tuple(stats)

    # Calls.

    @property
    def _pending(self) -> str:
        """The name of the call whose result has not been returned; "" if there is none."""
        for name, _ in self._posted:
            return name
        return ""

    def _post(self, command: Command) -> Any:
        """Starts a command. Returns its ticket."""
        self.num_uses += command.op in STEPPING
        return self._envs.post(command)

    def _start(self, name: str, command: Command, group: int = 0) -> None:
        """Starts a call, which is pending from then on. Only a ``"send"`` may be pending for several groups."""
        self._guarded(self._begin, name, command, group, stays_open=_unposted(command))

    def _begin(self, name: str, command: Command, group: int) -> None:
        if not name == self._pending == "send":
            self._assert_idle(name if name == "send" else f"{name}_async")
        elif (name, group) in self._posted:
            raise AlreadyPendingCallError(f"Calling `send` for group {group}, whose last step is pending.", name)
        self._posted[name, group] = self._post(command)

    def _wait(self, name: str, timeout_s: float | None = None, group: int = 0) -> Answer:
        """Waits for the result of a call, which is not pending any more then, unless the wait timed out."""
        return self._accepted(self._guarded(self._finished, name, timeout_s, group), closes=name != "call")

    def _finished(self, name: str, timeout_s: float | None, group: int) -> Answer:
        self._assert_pending(name, group)
        ticket = self._posted[name, group]
        if not self._envs.wait(ticket, math.inf if timeout_s is None else timeout_s):
            raise NotReady("the environments have not answered in time")
        del self._posted[name, group]
        return self._envs.take(ticket)

    def _run(self, command: Command) -> Answer:
        """Executes a command."""
        answer = self._guarded(self._executed, command, stays_open=_unposted(command))
        return self._accepted(answer, closes=command.op in STEPPING)

    def _executed(self, command: Command) -> Answer:
        ticket = self._post(command)
        self._envs.wait(ticket)
        return self._envs.take(ticket)

    def _accepted(self, answer: Answer, *, closes: bool = True) -> Answer:
        """Returns an answer, and logs what was restarted.

        Args:
            answer: The answer.
            closes: Whether the environments are closed if one of them, or a policy, raised an exception.

        Raises:
            Exception: What was raised. Its ``__cause__`` is an ``EnvError``.
        """
        self._log(answer.notes)
        if answer.failure is not None:
            error = answer.failure.rebuild()
            self._assert_open_after(error)
            if closes or isinstance(error, _LOSSES):
                self._close_failed(error)
            raise error
        return answer

    def _log(self, notes: Iterable[Note]) -> None:
        """Logs what was restarted, and counts it."""
        for note in notes:
            logger.warning(note.text)
            self._replaced.update([note.replaced] if note.replaced else ())
            for env in note.env_ids:
                self._restarts[env] = self._restarts.get(env, (0, ""))[0] + 1, note.text

    def _guarded(self, function: Callable[..., _T], *args: Any, stays_open: tuple[type[BaseException], ...] = ()) -> _T:
        """Calls the environments. An error closes them: a later call could mistake the pending result for its own.

        Args:
            function: Makes the call.
            *args: Its arguments.
            stays_open: After which errors the environments stay open.
        """
        if not self._lock.acquire(blocking=False):
            raise AlreadyPendingCallError(
                "Another thread's call has not returned. Call an environment from one thread, or hold a lock of your "
                "own; close() may come from any thread.",
                "a call of another thread",
            )
        try:
            return function(*args)
        except (NotReady, AlreadyPendingCallError, NoAsyncCallError, ClosedEnvironmentError):
            raise
        except BaseException as error:
            self._assert_open_after(error)
            if not isinstance(error, stays_open):
                self._close_failed(error)
            raise
        finally:
            self._lock.release()

    def _assert_open_after(self, error: BaseException) -> None:
        """Raises a ``ClosedEnvironmentError`` if another thread's `close` caused the error of a call."""
        if self.closed and self._closed_by is None and isinstance(error, Exception):
            raise ClosedEnvironmentError("`close()` was called by another thread during this call.") from error

    def _assert_same_process(self) -> None:
        if self._is_forked:
            raise ClosedEnvironmentError(
                f"Process {os.getpid()} was forked from process {self._creator}, which created the "
                "environment. Create it after the fork."
            )

    def _assert_running(self) -> None:
        self._assert_same_process()
        if self.closed:
            raise ClosedEnvironmentError(
                f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.{self._why_closed()}"
            )

    def _assert_idle(self, name: str) -> None:
        self._assert_running()
        if self._pending:
            raise AlreadyPendingCallError(
                f"Calling `{name}` while waiting for a pending call to `{self._pending}` to complete.", self._pending
            )

    def _assert_pending(self, name: str, group: int | None = None) -> None:
        self._assert_running()
        if self._pending != name or (group is not None and (name, group) not in self._posted):
            wait, start = ("recv", "send") if name == "send" else (f"{name}_wait", f"{name}_async")
            raise NoAsyncCallError(f"Calling `{wait}` without any prior call to `{start}`.", name)

    # Closing.

    @property
    def _is_forked(self) -> bool:
        """Whether this process was forked from the one that made the environments."""
        return os.getpid() != self._creator

    def _why_closed(self) -> str:
        """Returns a sentence about the call that closed it by an error, if one did."""
        if self._closed_by is None:
            return ""
        return f" {self._closed_by.__name__} in an earlier call closed it: make the environment again."

    def _close_envs(self, timeout_s: float | None = None) -> None:
        self.closed = True
        self._posted.clear()
        atexit.unregister(self._at_exit)
        if not self._is_forked:  # else what runs belongs to the parent
            if timeout_s is None and self._closed_by is not None and issubclass(self._closed_by, KeyboardInterrupt):
                timeout_s = self.interrupted_close_s
            try:
                self._envs.close(timeout_s)
            except KeyboardInterrupt:  # while it waits for environments: kill what has not ended
                self._envs.close(0.0)
                raise

    def _close_failed(self, error: BaseException | None = None) -> None:
        """Closes after a call that failed."""
        if not self.closed:
            self._posted.clear()
            self._closed_by = None if error is None else type(error)
            self.close()

    def __enter__(self) -> Self:
        """Returns itself; leaving the block closes it."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Closes it."""
        if not self.closed:
            self.close()

    def __reduce__(self) -> NoReturn:
        """Refuses copies and pickling: the first copy that is collected would close the environments of the others."""
        raise TypeError(
            "An environment can't be copied or pickled: it owns its workers. Make another one from the same arguments."
        )

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Closes what was not closed. At the interpreter's end, the names of this module may be gone already."""
        if not _is_finalizing():
            self._close_failed()


def _close_at_exit(envs: Environments, creator: int) -> None:
    """Closes what a script has left open at its end, before environment servers are told to end."""
    if os.getpid() == creator:  # else a child that was forked ends, and what runs belongs to its parent
        envs.close(_EXIT_S)


def _unposted(command: Command) -> tuple[type[BaseException], ...]:
    """Returns the errors by which no environment has got a command: its arguments can't be pickled."""
    return () if command.op == Op.STEP else (TypeError,)
