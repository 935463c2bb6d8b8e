"""The return of n steps, which V-trace on policy is compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def n_step(
    rew: NDArray[np.floating[Any]],
    next_value: NDArray[np.floating[Any]],
    terminated: NDArray[np.bool_],
    truncated: NDArray[np.bool_],
    *,
    gamma: float,
    num_steps: int,
    valid: NDArray[np.bool_] | None = None,
) -> NDArray[np.floating[Any]]:
    """Returns the discounted sum of the next rewards, and of the value where they end.

    Sutton and Barto, "Reinforcement learning: an introduction", 2018, equation 7.1, for the return of `num_steps` steps
    from each step. Fewer are summed where the episode or the chunk ends before: one that was truncated and
    the chunk bootstrap from `next_value` there, one that terminated does not bootstrap.

    Args:
        rew: Rewards, ``[T, N]``.
        next_value: Values of the true observations after each step, ``[T, N]``; see `gae`.
        terminated: ``bool [T, N]``.
        truncated: ``bool [T, N]``.
        gamma: Discount factor.
        num_steps: How many rewards to sum, at least 1; T or more reaches to the end of the chunk.
        valid: Where a step happened, ``bool [T, N]``; None means everywhere. A step that did not has return 0, and
            the one before it bootstraps from its `next_value`.

    Returns:
        ``[T, N]`` in the dtype of `next_value`.
    """
    dtype = next_value.dtype
    reward = rew.astype(dtype, copy=False)
    bootstrap = np.where(terminated, dtype.type(0), next_value)
    continues = ~(terminated | truncated)[:-1]
    if valid is not None:
        continues &= valid[1:]
    target: NDArray[np.floating[Any]] = reward + dtype.type(gamma) * bootstrap
    for _ in range(min(num_steps, len(rew)) - 1):  # the sum of k + 1 rewards from that of k, a step later
        target[:-1] = reward[:-1] + dtype.type(gamma) * np.where(continues, target[1:], bootstrap[:-1])
    if valid is not None:
        target[~valid] = 0
    return target
