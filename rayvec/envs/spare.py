"""One environment more than there are, which a thread resets ahead: for environments whose reset takes long."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rayvec.envs.failures import FAILURES, failures_ignored


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
        self._thread = ThreadPoolExecutor(1, "rayvec-spare")
        self._reset: Future[Any] | None = None

    def begin(self, seed: int | None = None) -> None:
        """Begins to reset the environment, once a reset that is running has ended."""
        kwargs = {} if seed is None else {"seed": seed}
        self._reset = self._thread.submit(self.env.reset, **kwargs)

    def swap(self, env: Any) -> tuple[Any, Any]:
        """Takes an environment and begins to reset it. Returns the one that was reset, and what its reset returned.

        Raises:
            Exception: What that reset raised. Another environment is made for the next time.
        """
        if self._reset is None:
            self.begin()
        assert self._reset is not None
        try:
            result = self._reset.result()
        except FAILURES:
            with failures_ignored():
                self.env.close()
            self.env, self.num_finished, self._reset = self._make(), 0, None
            raise
        ready, self.env = self.env, env
        self.begin()
        return ready, result

    def close(self) -> None:
        """Closes the environment, once its reset has ended."""
        self._thread.shutdown()
        self.env.close()
