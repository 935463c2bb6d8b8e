"""PufferLib, whose workers look for work without ever blocking while there is any, so that they rest in between."""

from __future__ import annotations

import inspect
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from rayvec.bench.harness.foreign import Foreign
from rayvec.bench.harness.task import Adapter, Task

__all__ = ["pufferlib"]

_TRIAL_S = 0.5


class Spinning(Foreign):
    """A vector environment whose worker processes spin: they are stopped while it is not their turn.

    Args:
        env: PufferLib's.
        num_envs: In all.
        actions: Batches to take in turns.
    """

    def __init__(self, env: Any, num_envs: int, actions: list[Any]) -> None:
        super().__init__(num_envs, "shm, busy waiting", env.step, actions, env.close)
        self._pids: Sequence[int] = [process.pid for process in env.processes]

    def wake(self) -> None:
        """Lets the workers go on."""
        self._signal(signal.SIGCONT)

    def rest(self) -> None:
        """Stops the workers, which have nothing to do between two calls."""
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Ends it; a process that is stopped would not hear of it."""
        self.wake()
        super().close()

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            os.kill(pid, number)


def pufferlib(task: Task) -> Foreign:
    """Makes what PufferLib does best with here: its serial backend, or its workers that spin.

    Spinning is best with cores to spare and worst without, so both are tried.
    """
    import pufferlib.emulation
    import pufferlib.vector

    known = inspect.signature(pufferlib.emulation.GymnasiumPufferEnv).parameters

    def make(**given: Any) -> Any:
        named = {name: value for name, value in given.items() if name in known}  # buf and seed came with version 2
        return pufferlib.emulation.GymnasiumPufferEnv(env_creator=task.make, **named)

    def start(backend: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        env = pufferlib.vector.make(make, num_envs=task.num_envs, backend=backend, **kwargs)
        env.reset(seed=0)
        return env, task.single_actions(env.single_action_space)

    env, actions = start(pufferlib.vector.Serial)
    serial = Foreign(task.num_envs, "none", env.step, actions, env.close)
    serial_steps_per_s = _tried_steps_per_s(serial)  # before anybody spins
    workers = max(count for count in range(1, task.workers + 1) if task.num_envs % count == 0)
    env, actions = start(pufferlib.vector.Multiprocessing, num_workers=workers)
    spinning = Spinning(env, task.num_envs, actions)
    if _tried_steps_per_s(spinning) < serial_steps_per_s:
        spinning.close()
        return serial
    serial.close()
    return spinning


def _tried_steps_per_s(adapter: Adapter) -> float:
    """Returns steps per second of a short trial."""
    adapter.advance()
    begin, steps = time.monotonic(), 0
    while time.monotonic() - begin < _TRIAL_S:
        steps += adapter.advance()
    return steps / (time.monotonic() - begin)
