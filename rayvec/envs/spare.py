"""One environment more than there are, which a thread resets ahead: for environments whose reset takes long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rayvec.envs.failures import FAILURES, failures_ignored

__all__ = ["Spare"]


class Spare:
    """Resets an environment in a thread, and gives it for one whose episode has ended.

    Args:
        make: Makes the first environment, and another after a reset that raised.

    Attributes:
        env: The environment.
        num_finished: How many episodes it has ended; the owner counts them.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self.env, self.num_finished = make, make(), 0
        self._thread: threading.Thread | None = None
        self._result: Any = None
        self._error: BaseException | None = None

    def begin(self, seed: int | None = None) -> None:
        """Begins to reset the environment, once a reset that is running has ended."""
        self._join()
        self._error = None
        kwargs = {} if seed is None else {"seed": seed}
        self._thread = threading.Thread(target=self._reset, args=(kwargs,), name="rayvec-spare", daemon=True)
        self._thread.start()

    def _reset(self, kwargs: dict[str, Any]) -> None:
        try:
            self._result = self.env.reset(**kwargs)
        except FAILURES as error:  # it is raised where the environment is asked for
            self._error = error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def swap(self, env: Any) -> tuple[Any, Any]:
        """Takes an environment and begins to reset it. Returns the one that was reset, and what its reset returned.

        Raises:
            Exception: What that reset raised. Another environment is made for the next time.
        """
        if self._thread is None:
            self.begin()
        self._join()
        if (error := self._error) is not None:
            with failures_ignored():
                self.env.close()
            self.env, self.num_finished, self._error = self._make(), 0, None
            raise error
        ready, result = self.env, self._result
        self.env = env
        self.begin()
        return ready, result

    def close(self) -> None:
        """Closes the environment, once its reset has ended."""
        self._join()
        self.env.close()
