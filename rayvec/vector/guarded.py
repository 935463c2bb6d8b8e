"""What a vector environment may do now: it is open, in the process that made it, and no other call is pending."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any, TypeVar

from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from rayvec.errors import message
from rayvec.pools.base import NotReady

__all__ = ["GuardedCalls"]

_T = TypeVar("_T")
_Fatal = type[BaseException] | tuple[type[BaseException], ...]


class GuardedCalls(VectorEnv[Any, Any, NDArray[Any]]):
    """A base of vector environments: it checks whether a call may begin, and closes what fails."""

    _creator: int
    _pending: str | None
    _pending_groups: set[int]
    _late: bool

    def _guarded(self, function: Callable[[], _T], fatal: _Fatal = BaseException) -> _T:
        """Calls the pool. A timeout leaves the pool as it is; any other error closes it.

        Ctrl-C closes it too: a later call could mistake the pending answer for its own.
        """
        try:
            return function()
        except NotReady as error:
            self._late = True
            raise multiprocessing.TimeoutError(str(error)) from error
        except fatal as error:
            self._pending = None
            if self.closed and isinstance(error, Exception):
                raise ClosedEnvironmentError("`close()` was called by another thread during this call.") from error
            self.close()
            raise

    def _assert_running(self) -> None:
        if os.getpid() != self._creator:
            raise ClosedEnvironmentError(
                message(
                    "An environment is used by the process that created it.",
                    expected=f"process {self._creator}",
                    got=f"process {os.getpid()}, which was forked from it",
                    remedy="Create the environment after the fork.",
                )
            )
        if self.closed:
            raise ClosedEnvironmentError(f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.")

    def _assert_pending(self, what: str) -> None:
        self._assert_running()
        if self._pending != what:
            raise NoAsyncCallError(f"Calling `{what}_wait` without any prior call to `{what}_async`.", what)

    def _assert_idle(self, name: str) -> None:
        self._assert_running()
        pending = self._pending or ("send" if self._pending_groups else None)
        if pending is not None:
            raise AlreadyPendingCallError(
                f"Calling `{name}` while waiting for a pending call to `{pending}` to complete.", pending
            )
        self._late = False
