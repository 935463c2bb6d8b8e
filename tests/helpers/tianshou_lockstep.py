"""Does the same to rayvec's and Tianshou's vector environments, and compares what comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tianshou.env import BaseVectorEnv

from helpers.testing import assert_identical


def canonical(value: Any) -> Any:
    """The same with the keys of dicts in order, as of Tianshou's shared memory, and scalars for arrays without axes."""
    if isinstance(value, dict):
        return {key: canonical(value[key]) for key in sorted(value)}
    if isinstance(value, (tuple, list)):
        items = map(canonical, value)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return value[()]
    if isinstance(value, np.ndarray) and value.dtype == object:
        flat = np.empty(value.size, dtype=object)
        flat[:] = [canonical(item) for item in value.flat]
        return flat.reshape(value.shape)
    return value


def assert_same(got: Any, expected: Any, what: str = "value") -> None:
    assert_identical(canonical(got), canonical(expected), what)


def both(ours: BaseVectorEnv, theirs: BaseVectorEnv, do: Callable[[BaseVectorEnv], Any], what: str = "result") -> Any:
    """Does the same to both; asserts that the same comes out, be it an error."""

    def outcome(venv: BaseVectorEnv) -> Any:
        try:
            return do(venv), None
        except (TypeError, ValueError, IndexError, AttributeError, AssertionError) as error:
            return None, error

    (got, our_error), (expected, their_error) = outcome(ours), outcome(theirs)
    assert type(our_error) is type(their_error), (our_error, their_error)
    if their_error is None:
        assert_same(got, expected, what)
    return expected


def in_lockstep(ours: BaseVectorEnv, theirs: BaseVectorEnv, num_steps: int, groups: Any = None) -> int:
    """Steps both alike, subsets in any order; returns how many episodes ended."""
    random = np.random.default_rng(3)
    n = len(theirs)
    assert len(ours) == n
    both(ours, theirs, lambda v: v.seed(5))
    both(ours, theirs, lambda v: v.reset(), "first reset")
    both(ours, theirs, lambda v: v.reset([n - 1, 0], seed=9), "reset with a seed")
    action_spaces = theirs.action_space
    ended = 0
    for t in range(num_steps):
        ids: Any = random.permutation(n)[: random.integers(1, n + 1)] if groups is None else groups[t % len(groups)]
        action = np.stack([action_spaces[i].sample() for i in ids])
        ids = [None, ids.tolist(), ids][t % 3] if groups is None and len(ids) == n else ids
        step = both(ours, theirs, lambda v, action=action, ids=ids: v.step(action, ids), f"step {t} of {ids}")
        done = step[2] | step[3]
        ended += int(done.sum())
        if done.any():
            over = (np.arange(n) if ids is None else np.asarray(ids))[done]
            both(ours, theirs, lambda v, over=over: v.reset(over), f"reset after step {t}")
    return ended
