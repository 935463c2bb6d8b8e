"""What the adapters share: the environments, and the call that is pending in them."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any, ClassVar, NoReturn, Self, TypeVar

import numpy as np
from gymnasium import Space
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError

from rayvec.data import ChunkRequest, Rollout, Topology
from rayvec.data.chunk import Cut
from rayvec.data.columns import info_of
from rayvec.envs.factory import EnvFactory
from rayvec.envs.pickled_parts import pickled_for_workers
from rayvec.errors import NodeLostError, WorkerLostError, check_count
from rayvec.fleet.commands import Answer, Command, Op
from rayvec.node.messages import packed
from rayvec.rollout.loop import as_policy
from rayvec.rollout.policy_host import ChunkOrder
from rayvec.vector.chunks import Chunks
from rayvec.vector.environments import Environments, NotReady, answer_of
from rayvec.vector.open_environments import open_environments
from rayvec.vector.weights import WeightStore

__all__ = ["LOSSES", "Adapter", "PendingCall"]

_T = TypeVar("_T")
_Fatal = type[BaseException] | tuple[type[BaseException], ...]
Wait = Callable[[float | None], Any]
"""Waits for up to so many seconds, and returns the result of a call."""
LOSSES: _Fatal = (NodeLostError, WorkerLostError, KeyboardInterrupt)
"""What closes the environments where an exception of a method or of a policy leaves them open."""


@dataclass(slots=True)
class PendingCall:
    """A call that was started and whose result has not been returned.

    Attributes:
        name: ``"reset"``, ``"step"``, ``"call"``, ``"send"`` or ``"rollout"``.
        waits: For each group of environments that is busy, what waits for it. Only a ``"send"`` has several groups.
        timed_out: Whether a wait has timed out.
    """

    name: str
    waits: dict[int, Wait]
    timed_out: bool = False


class _Overtaken(Exception):
    """Another thread has started or ended a call since this one was checked."""


class Adapter:
    """A base of vector environments: it checks whether a call may begin, and closes environments in which one fails.

    Attributes:
        closed: Whether the environments are closed, or not open yet.
        num_uses: How many resets, steps and chunks have been started. By it a collector notices uses that are not its
            own.
        fresh_at: `num_uses` after the last reset of all environments; None before the first.
        interrupted_close_s: Seconds that environments get to end their step and to close after Ctrl-C in a call; None
            for as many as in :meth:`close`.
    """

    closed = True
    num_uses = 0
    fresh_at: int | None = None
    interrupted_close_s: float | None = None
    _envs: Environments
    _chunks: Chunks
    _creator: int
    _pending: PendingCall | None = None
    _thread: int | None = None  # which thread calls the environments
    _closed_by: type[BaseException] | None = None  # the error of the call that closed them, if one did
    close: Any  # a method of the library's own base class
    _open_envs: ClassVar[set[Any]] = set()
    """What is not closed. Without it, the files of an adapter in a cycle could be collected before its ``__del__``."""

    def _open(self, factory: EnvFactory, **settings: Any) -> None:
        """Makes the environments; `settings` are those of `open_environments`."""
        self._creator = os.getpid()
        self._envs = open_environments(factory, **settings)
        self._open_envs.add(self._envs)
        self.closed = False

    def _allocate(self, observation: Space[Any], action: Space[Any]) -> None:
        """Allocates the arrays for these spaces."""
        self._envs.allocate(observation, action)
        self._chunks = Chunks(self._envs)

    def _post(self, command: Command) -> Any:
        """Starts a command. Returns its ticket."""
        self._chunks.note(command)
        return self._envs.post(command)

    def _answer(self, ticket: Any, timeout_s: float | None = None) -> Answer:
        """Waits for a command, and returns the answer. A wait that is interrupted closes the environments."""
        try:
            is_ready = self._envs.wait(ticket, math.inf if timeout_s is None else timeout_s)
        except BaseException as error:  # what a signal handler raised, too: the answer may be half received
            self._close_failed(error)
            raise
        if not is_ready:
            raise NotReady("the environments have not answered in time")
        return answer_of(self._envs, ticket)

    def _run(self, command: Command) -> Answer:
        """Executes a command."""
        return self._answer(self._post(command))

    def first_info(self, seed: int | None) -> dict[str, Any]:
        """Resets the first environment alone and returns its info. A reset of all must follow before they are used."""
        self._assert_idle("first_info")
        reset = Command(Op.RESET, np.zeros(1, np.int64), rest=([seed], None))
        return info_of(self._guarded(lambda: self._run(reset)).infos, 0)

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
        return self._envs.take_replaced()

    def worker_pids(self) -> dict[str, list[int]]:
        """Process ids by the node's name: of the process that holds the workers, and after it of each worker.

        Raises:
            AlreadyPendingCallError: Another call is pending, or another thread makes one.
            NodeLostError: A node is lost, and its environments do not restart elsewhere; this closes all of them.
        """
        self._assert_idle("worker_pids")
        return self._guarded(self._envs.pids, LOSSES)

    def publish(self, policy: Any, first_version: int = 0, *, on_node: bool = False) -> WeightStore:
        """Sends a policy to every worker; returns the store through which it gets its weights.

        The workers forget the policies of stores that were garbage-collected.

        Args:
            policy: Pickled as it is now.
            first_version: The version of the weights that the policy contains.
            on_node: Whether it acts in the process that owns the workers of a node, in place of each worker.
        """
        self._assert_idle("publish")
        remedy = "Make the object when the policy first acts, or let the policy act here: inference='driver'."
        pickled = pickled_for_workers(as_policy(policy), "a policy", remedy)
        return self._publish(pickled, first_version, on_node=on_node)

    def _publish(self, pickled: bytes, first_version: int, *, on_node: bool = False) -> WeightStore:
        guarded = partial(self._guarded, fatal=LOSSES)  # a policy's error is no loss
        while self._chunks.unused and not self._chunks.num_pending:
            guarded(partial(self._chunks.drop, self._chunks.unused.pop()))
        return WeightStore(self._chunks, pickled, first_version, guarded, on_node=on_node)

    def rollout_async(
        self,
        weights: WeightStore,
        num_steps: int,
        first_step: int,
        noise_seed: int,
        *,
        by_reference: bool = False,
        part: int | None = None,
    ) -> None:
        """Starts a chunk of steps that the workers take with a published policy.

        :meth:`rollout_wait` returns it, and :meth:`part_wait` the chunk of a part.

        Environments are reset within the step that ends their episode. Until the wait they are busy. Weights may be
        published meanwhile: the next chunk starts with them. Another chunk may be started before the wait; the workers
        then go from one to the other by themselves.

        Args:
            weights: Of the policy.
            num_steps: T.
            first_step: How many steps the environments had taken in chunks before.
            noise_seed: Of the noise.
            by_reference: Whether the chunk stays in the object store.
            part: Index in :attr:`parts` of the only part that takes the chunk; None for all of them together.

        Raises:
            AlreadyPendingCallError: Too many chunks are pending, or one whose policy acts in another process: in the
                workers, or in the process that owns them.
        """
        self._assert_running()
        is_rollout = self._pending is not None and self._pending.name == "rollout"
        if not is_rollout or not self._chunks.has_room(weights.key, part):
            self._assert_idle("rollout")
        check_count("num_steps", num_steps)

        def start() -> Wait:
            request = ChunkRequest(num_steps, first_step, noise_seed, by_reference)
            self._chunks.begin(ChunkOrder(weights.key, request, weights.version, weights.weights), part)
            return self._chunks.finish

        self._start("rollout", start)

    def rollout_wait(self, timeout: float | None = None, cut: Cut | None = None) -> Rollout:
        """Waits for the first :meth:`rollout_async` that has not been waited for, for up to `timeout` seconds.

        Args:
            timeout: The longest wait in seconds; None waits without limit.
            cut: Called about every millisecond with the number of steps that all environments together have taken.
                Once it returns True, every worker ends the chunk after its present step. Requires ``num_nodes=0``.

        Raises:
            NoAsyncCallError: Nothing was started.
            multiprocessing.TimeoutError: It takes longer; it stays pending.
        """
        return self._finish_chunk(lambda: self._chunks.finish(timeout, cut))

    @property
    def parts(self) -> tuple[range, ...]:
        """The environments of each part that takes chunks by itself: a worker, or a node of a cluster."""
        return self._envs.parts

    def part_wait(self, parts: Sequence[int]) -> tuple[int, Rollout]:
        """Waits until one of some parts has finished its oldest pending chunk.

        Args:
            parts: The parts, in the order of preference if several have finished.

        Returns:
            The part, and its chunk.

        Raises:
            NoAsyncCallError: Nothing was started.
        """
        return self._finish_chunk(lambda: self._chunks.finish_any(parts))

    def _finish_chunk(self, finish: Callable[[], _T]) -> _T:
        """Calls what waits for a pending chunk."""
        self._assert_pending("rollout")
        num_pending = self._chunks.num_pending
        try:
            rollout = self._guarded(finish, Exception)
        except Exception:
            raise
        except BaseException as error:  # Ctrl-C leaves pending what others do
            if self._chunks.num_pending < num_pending or not isinstance(error, KeyboardInterrupt):
                self._close_failed(error)
            raise
        if not self._chunks.num_pending:
            self._pending = None
        return rollout

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

    def _close_envs(self, timeout_s: float | None = None) -> None:
        self.closed = True
        self._open_envs.discard(self._envs)
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
        self._pending = None
        if not self.closed:
            self._closed_by = None if error is None else type(error)
            self.close()

    def _guarded(self, function: Callable[[], _T], fatal: _Fatal = BaseException) -> _T:
        """Makes a call. A timeout leaves the environments as they are; any other error closes them.

        Ctrl-C closes them too: a later call could mistake the pending result for its own.
        """
        thread, outer = get_ident(), self._thread
        if outer is not None and outer != thread:
            raise _another_thread()
        self._thread = thread
        try:
            return function()
        except NotReady as error:
            if self._pending is not None:
                self._pending.timed_out = True
            raise multiprocessing.TimeoutError(str(error)) from error
        except _Overtaken:
            raise _another_thread() from None
        except fatal as error:
            if self.closed and self._closed_by is not type(error) and isinstance(error, Exception):
                raise ClosedEnvironmentError("`close()` was called by another thread during this call.") from error
            self._close_failed(error)
            raise
        finally:
            self._thread = outer

    def _start(self, name: str, start: Callable[[], Wait], group: int = 0, fatal: _Fatal = BaseException) -> None:
        """Starts a call, which is pending from then on; `start` returns what waits for its result."""

        def begin() -> None:
            call = self._pending
            if call is not None and (call.name != name or (name != "rollout" and group in call.waits)):
                raise _Overtaken
            if name != "call":
                self.num_uses += 1
            wait = start()
            if call is None:
                self._pending = PendingCall(name, {group: wait})
            else:
                call.waits[group] = wait

        self._guarded(begin, fatal)

    def _wait(self, name: str, timeout_s: float | None, group: int = 0, fatal: _Fatal = BaseException) -> Any:
        """Waits for the result of a call, which is not pending any more then, unless the wait timed out."""
        call = self._assert_pending(name)

        def finish() -> Any:
            wait = call.waits.pop(group, None)
            if wait is None:
                raise _Overtaken
            try:
                return wait(timeout_s)
            except NotReady:
                call.waits[group] = wait
                raise
            finally:
                if not call.waits:
                    self._pending = None

        return self._guarded(finish, fatal)

    def _check_options(self, options: Any) -> None:
        """Raises a `TypeError` for options that workers can't get, before any environment begins its reset."""
        if options and self.transports != ("local",):
            packed(options)

    @property
    def _is_forked(self) -> bool:
        """Whether this process was forked from the one that made the environments."""
        return os.getpid() != self._creator

    def _assert_same_process(self) -> None:
        if self._is_forked:
            raise ClosedEnvironmentError(
                f"Process {os.getpid()} was forked from process {self._creator}, which created the "
                "environment. Create it after the fork."
            )

    def _why_closed(self) -> str:
        """Returns a sentence about the call that closed it by an error, if one did."""
        if self._closed_by is None:
            return ""
        return f" {self._closed_by.__name__} in an earlier call closed it: make the environment again."

    def _assert_running(self) -> None:
        self._assert_same_process()
        if self.closed:
            rule = f"Trying to operate on `{type(self).__name__}`, after a call to `close()`."
            raise ClosedEnvironmentError(rule + self._why_closed())

    def _assert_idle(self, name: str) -> None:
        self._assert_running()
        if self._pending is not None:
            pending = self._pending.name
            raise AlreadyPendingCallError(
                f"Calling `{name}` while waiting for a pending call to `{pending}` to complete.", pending
            )

    def _assert_pending(self, name: str) -> PendingCall:
        self._assert_running()
        call = self._pending
        if call is None or call.name != name:
            raise NoAsyncCallError(f"Calling `{name}_wait` without any prior call to `{name}_async`.", name)
        return call


def _another_thread() -> AlreadyPendingCallError:
    text = (
        "Another thread's call has not returned. Call an environment from one thread, or hold a lock of your "
        "own; close() may come from any thread."
    )
    return AlreadyPendingCallError(text, "a call of another thread")
