"""What the vector environments of Gymnasium and of Tianshou share: a pool, and the call that is pending in it."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any, NoReturn, Self, TypeVar

import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError

from rayvec.data import ChunkRequest, Rollout, Topology, Tree, tree_map
from rayvec.envs.factory import EnvFactory
from rayvec.envs.pickled_parts import pickled_for_workers
from rayvec.errors import NodeLostError, WorkerLostError, check_count
from rayvec.node.chunk_memory import packed
from rayvec.pools.base import ActingPool, Cut, NotReady
from rayvec.pools.publish_weights import WeightStore
from rayvec.rollout.loop import as_policy
from rayvec.vector.open_pool import open_pool

__all__ = ["LOSSES", "PendingCall", "PoolAdapter"]

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


class PoolAdapter:
    """A base of vector environments: it owns a pool, checks whether a call may begin, and closes what fails.

    Attributes:
        closed: Whether the pool is closed, or not open yet.
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
    _pool: ActingPool
    _creator: int
    _unused: list[int]  # keys of policies whose store was garbage-collected
    _pending: PendingCall | None = None
    _thread: int | None = None  # which thread calls the pool
    _closed_by: type[BaseException] | None = None  # the error of the call that closed it, if one did
    close: Any  # a method of the library's own base class

    def _open(self, factory: EnvFactory, **settings: Any) -> None:
        """Opens the pool; `settings` are those of :func:`rayvec.vector.open_pool.open_pool`."""
        self._creator = os.getpid()
        self._unused = []
        self._pool = open_pool(factory, **settings)
        self.closed = False

    def observe(self) -> Tree:
        """Returns a copy of the current observation of each environment, in the form of chunks.

        Trees of ``[N, *obs_shape]``; objects are in an object array. Before the first reset there are none.
        """
        self._assert_idle("observe")
        ids = np.arange(self._pool.num_envs)

        def whole() -> Tree:
            self._pool.observe(ids)
            return tree_map(np.copy, self._pool.recv(ids).obs)

        return self._guarded(whole)

    def first_info(self, seed: int | None) -> dict[str, Any]:
        """Resets the first environment alone and returns its info. A reset of all must follow before they are used."""
        first = np.zeros(1, np.int64)

        def whole() -> dict[str, Any]:
            self._pool.reset(first, [seed])
            infos = self._pool.recv(first).info
            return infos[0].info if infos else {}

        return self._guarded(whole)

    @property
    def topology(self) -> Topology:
        """Which node holds which environments, and how many workers step them."""
        return self._pool.topology

    @property
    def transports(self) -> tuple[str, ...]:
        """How each node is reached: ``"shm"`` or ``"tcp"``, or ``"local"`` if this process steps the environments."""
        return self._pool.transports

    def take_replaced(self) -> dict[str, int]:
        """Returns how many workers and nodes were replaced since the last call, by kind: ``worker``, ``node``."""
        return self._pool.take_replaced()

    def worker_pids(self) -> dict[str, list[int]]:
        """Process ids by the node's name: of the process that holds the workers, and after it of each worker.

        Raises:
            AlreadyPendingCallError: Another call is pending, or another thread makes one.
            NodeLostError: A node is lost, and its environments do not restart elsewhere; this closes all of them.
        """
        self._assert_idle("worker_pids")
        return self._guarded(self._pool.worker_pids, LOSSES)

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
        while self._unused and not self._pool.acting.num_pending:
            guarded(partial(self._pool.acting.drop, self._unused.pop()))
        return WeightStore(self._pool, pickled, first_version, guarded, on_node=on_node, unused=self._unused)

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
        if not is_rollout or not self._pool.acting.has_room(weights.key, part):
            self._assert_idle("rollout")
        check_count("num_steps", num_steps)

        def start() -> Wait:
            self._pool.begin_rollout(weights.key, ChunkRequest(num_steps, first_step, noise_seed, by_reference), part)
            return self._pool.finish_rollout

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
        return self._finish_chunk(lambda: self._pool.finish_rollout(timeout, cut))

    @property
    def parts(self) -> tuple[range, ...]:
        """The environments of each part that takes chunks by itself: a worker, or a node of a cluster."""
        return self._pool.parts

    def part_wait(self, parts: Sequence[int]) -> tuple[int, Rollout]:
        """Waits until one of some parts has finished its oldest pending chunk.

        Args:
            parts: The parts, in the order of preference if several have finished.

        Returns:
            The part, and its chunk.

        Raises:
            NoAsyncCallError: Nothing was started.
        """
        return self._finish_chunk(lambda: self._pool.finish_any(parts))

    def _finish_chunk(self, finish: Callable[[], _T]) -> _T:
        """Calls what waits for a pending chunk."""
        self._assert_pending("rollout")
        acting = self._pool.acting
        num_pending = acting.num_pending
        try:
            rollout = self._guarded(finish, Exception)
        except Exception:
            raise
        except BaseException as error:  # Ctrl-C leaves pending what others do
            if acting.num_pending < num_pending or not isinstance(error, KeyboardInterrupt):
                self._close_failed(error)
            raise
        if not acting.num_pending:
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
        """Refuses copies and pickling: the first copy that is collected would close the pool of the others."""
        raise TypeError(
            "An environment can't be copied or pickled: it owns its workers. Make another one from the same arguments."
        )

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Closes what was not closed. At the interpreter's end, the names of this module may be gone already."""
        if not _is_finalizing():
            self._close_failed()

    def _close_pool(self, timeout_s: float | None = None) -> None:
        self.closed = True
        if not self._is_forked:  # else what runs belongs to the parent
            if timeout_s is None and self._closed_by is not None and issubclass(self._closed_by, KeyboardInterrupt):
                timeout_s = self.interrupted_close_s
            try:
                self._pool.close(timeout_s)
            except KeyboardInterrupt:  # while it waits for environments: kill what has not ended
                self._pool.close(0.0)
                raise

    def _close_failed(self, error: BaseException | None = None) -> None:
        """Closes after a call that failed."""
        self._pending = None
        if not self.closed:
            self._closed_by = None if error is None else type(error)
            self.close()

    def _guarded(self, function: Callable[[], _T], fatal: _Fatal = BaseException) -> _T:
        """Calls the pool. A timeout leaves the pool as it is; any other error closes it.

        Ctrl-C closes it too: a later call could mistake the pending result for its own.
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
            if self.closed and isinstance(error, Exception):
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
        if options and not self._pool.steps_here:
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
