"""Advantages and value targets from chunks of experience: pure functions of ``[T, N]`` arrays.

What does not depend on the next step is computed at once; only the recursion itself loops over T. For
``[128, 64]`` that takes 0.11 ms, a thousandth of the update that follows. Compiling the loop with
numba would save 0.1 ms a chunk and cost half a second of import and compilation in every learner.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["gae"]

Float = NDArray[np.float32]


def gae(
    rew: NDArray[np.floating[Any]],
    value: Float,
    next_value: Float,
    terminated: NDArray[np.bool_],
    truncated: NDArray[np.bool_],
    *,
    gamma: float,
    lam: float,
    valid: NDArray[np.bool_] | None = None,
) -> tuple[Float, Float]:
    """Returns the generalised advantage estimate and the value target of each step.

    Contract: arrays are ``[T, N]``, values float32, masks bool, rewards of any float; nothing is checked or changed.

    Schulman et al., "High-dimensional continuous control using generalized advantage estimation",
    ICLR 2016, equation 16: the advantage of step t is the sum over l of ``(gamma * lam)**l`` times the
    TD error of step t + l. A TD error bootstraps from `next_value` unless the step terminated its
    episode; the sum ends with the episode, whether it terminated or was truncated, and with the chunk.

    Args:
        rew: Rewards, ``[T, N]``.
        value: Values of the observations that the policy saw, ``float32 [T, N]``.
        next_value: Values of the true observations after each step, ``float32 [T, N]``: where an
            episode ended, of its final observation, not of the first one of the next episode.
        terminated: ``bool [T, N]``.
        truncated: ``bool [T, N]``.
        gamma: Discount factor.
        lam: The estimator's lambda: 0 is the one-step TD error, 1 the discounted return minus the value.
        valid: Where a step happened, ``bool [T, N]``; None means everywhere. A step that did not
            has advantage 0, and what comes after it does not reach what came before.

    Returns:
        ``(advantage, target)``, each ``float32 [T, N]``; the target is advantage + value.
    """
    bootstrap = np.where(terminated, np.float32(0), next_value)
    advantage: Float = np.float32(gamma) * bootstrap + rew.astype(np.float32) - value
    decay: Float = np.where(terminated | truncated, np.float32(0), np.float32(gamma * lam))
    if valid is not None:
        advantage[~valid] = 0
        decay[~valid] = 0
    for t in range(len(advantage) - 2, -1, -1):
        advantage[t] += decay[t] * advantage[t + 1]
    return advantage, advantage + value
