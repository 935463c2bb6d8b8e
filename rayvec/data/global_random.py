"""The global random generators of a process: of Python's ``random``, of NumPy, and of torch."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import numpy as np

__all__ = ["global_seed", "seed_globals"]


def seed_globals(seed: int | None, *key: int) -> None:
    """Seeds the global generators of Python's ``random``, of NumPy and of torch.

    A process that has not imported torch yet seeds it as soon as it is imported.

    Args:
        seed: A number of at least 0; None takes the system's random numbers.
        key: Numbers of at least 0 that tell the processes of one seed apart, such as the index of an environment.
    """
    words = np.random.SeedSequence(None if seed is None else [seed, *key]).generate_state(8)
    random.seed(words.tobytes())
    np.random.seed(words)
    sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _SeedsTorch)]
    torch_seed = int(words[:2].view(np.uint64)[0])
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(torch_seed)
    else:
        sys.meta_path.insert(0, _SeedsTorch(torch_seed))


@contextlib.contextmanager
def global_seed(seed: int, *key: int) -> Iterator[None]:
    """Seeds the global generators for the block, as :func:`seed_globals`; after it, they continue as before it."""
    import torch

    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        seed_globals(seed, *key)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


class _SeedsTorch(MetaPathFinder):
    """Finds torch as Python's own finder does, and seeds it once it is imported."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == "torch" else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_seed(module: Any) -> None:
                execute(module)
                sys.meta_path.remove(self)
                module.manual_seed(self._seed)

            spec.loader.exec_module = execute_and_seed  # type: ignore[method-assign]
        return spec
