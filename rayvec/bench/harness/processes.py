"""Processes of a benchmark that answer requests, all at once: the upper bound's, and ranks without Ray."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

__all__ = ["Processes"]


class Processes:
    """Processes that answer the same requests.

    Args:
        make: Makes, in each process, a function from a request to an answer.
        arguments: Of `make`, for each process.

    Attributes:
        pids: The processes.
    """

    def __init__(self, make: Callable[..., Callable[[Any], Any]], arguments: Sequence[tuple[Any, ...]]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([make.__module__])  # whose imports then take place once
        self._pipes, self._processes = [], []
        for given in arguments:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(make, given, theirs), daemon=True)
            main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
            process.start()  # without importing the main module again, in a Ray worker all of Ray
            sys.modules["__main__"] = main
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.pids = [process.pid or 0 for process in self._processes]
        for pipe in self._pipes:
            _receive(pipe)

    def ask(self, request: Any) -> list[Any]:
        """Sends a request to all; returns their answers.

        Raises:
            RuntimeError: One of them raised or exited.
        """
        for pipe in self._pipes:
            pipe.send(request)
        return [_receive(pipe) for pipe in self._pipes]

    def close(self) -> None:
        """Ends them."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


def _serve(make: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...], pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        answer = make(*arguments)
        pipe.send(None)
        while (request := pipe.recv()) is not None:
            pipe.send(answer(request))
    except Exception as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
        raise


def _receive(pipe: Connection) -> Any:
    try:
        found = pipe.recv()
    except EOFError:
        raise RuntimeError("a process of the benchmark exited") from None
    if isinstance(found, RuntimeError):
        raise found
    return found
