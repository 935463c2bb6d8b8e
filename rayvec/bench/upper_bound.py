"""The upper bound of steps/s: independent processes that step the same environments."""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
import signal
import sys
import time
from multiprocessing.connection import Connection
from types import ModuleType

from rayvec.errors import RayvecError


class UpperBound:
    """Processes of this machine that step one environment each and do not communicate.

    Args:
        factory: A pickled :class:`~rayvec.envs.factory.EnvFactory`.
        num_envs: Processes.

    Raises:
        RayvecError: An environment could not be made.
    """

    def __init__(self, factory: bytes, num_envs: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # whose imports then take place once
        self._pipes: list[Connection] = []
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")  # which no process imports
        try:
            for _ in range(num_envs):
                ours, theirs = context.Pipe()
                context.Process(target=_serve, args=(factory, theirs), daemon=True).start()
                theirs.close()
                self._pipes.append(ours)
        finally:
            sys.modules["__main__"] = main
        for pipe in self._pipes:
            _receive(pipe)

    def measure(self, seconds: float, step_s: float | None = None, num_envs: int | None = None) -> float:
        """Returns the steps/s of all processes together, or of some.

        Args:
            seconds: How long they step.
            step_s: How long a step of an emulated environment takes.
            num_envs: How many of the processes step.
        """
        pipes = self._pipes[:num_envs]
        for pipe in pipes:
            pipe.send((seconds, step_s))
        return sum(_receive(pipe) for pipe in pipes)

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            pipe.close()


def _serve(factory: bytes, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that has started this one handles Ctrl-C
    env = pickle.loads(factory).make(0)
    env.reset(seed=0)
    env.action_space.seed(0)
    actions = itertools.cycle([env.action_space.sample() for _ in range(64)])
    pipe.send(0.0)
    while True:
        try:
            seconds, step_s = pipe.recv()
        except EOFError:
            break
        if step_s is not None:
            env.unwrapped.step_s = step_s
        began, count = time.monotonic(), 0
        while time.monotonic() - began < seconds:
            _, _, terminated, truncated, _ = env.step(next(actions))
            if terminated or truncated:
                env.reset()
            count += 1
        pipe.send(count / (time.monotonic() - began))
    env.close()


def _receive(pipe: Connection) -> float:
    try:
        steps_per_s: float = pipe.recv()
        return steps_per_s
    except EOFError:
        raise RayvecError("An independent process of the upper bound exited: its traceback is above.") from None
