"""The global random generators of a process: of Python's ``random``, of NumPy, and of torch."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import numpy as np


def seed_globals(seed: int | None, *key: int) -> None:
    """Seeds the global generators of Python's ``random``, of NumPy and, where it has been imported, of torch.

    Args:
        seed: A number of at least 0; None takes the system's random numbers.
        key: Numbers of at least 0 that tell the processes of one seed apart, such as the index of an environment.
    """
    words = np.random.SeedSequence(None if seed is None else [seed, *key]).generate_state(8)
    random.seed(words.tobytes())
    np.random.seed(words)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(int(words[:2].view(np.uint64)[0]))


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
