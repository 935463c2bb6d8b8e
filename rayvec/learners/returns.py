"""Advantages and value targets from chunks of experience: pure functions of ``[T, N]`` arrays.

What does not depend on the next step is computed at once; only the recursion itself loops over T. For
``[128, 64]`` that takes 0.11 ms, a thousandth of the update that follows. Compiling the loop with
numba would save 0.1 ms a chunk and cost half a second of import and compilation in every learner.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["gae", "vtrace"]

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
    _add_later_steps(advantage, decay, valid)
    return advantage, advantage + value


def vtrace(
    rew: NDArray[np.floating[Any]],
    value: NDArray[np.floating[Any]],
    next_value: NDArray[np.floating[Any]],
    log_ratio: NDArray[np.floating[Any]],
    terminated: NDArray[np.bool_],
    truncated: NDArray[np.bool_],
    *,
    gamma: float,
    lam: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    valid: NDArray[np.bool_] | None = None,
) -> tuple[NDArray[np.floating[Any]], NDArray[np.floating[Any]]]:
    """Returns the V-trace target and the policy-gradient advantage of each step, for actions of an older policy.

    Espeholt et al., "IMPALA: scalable distributed deep-RL with importance weighted actor-learner architectures",
    ICML 2018, arXiv:1802.01561. The target of step s is equation 1, ``v_s = V(x_s)`` plus the sum over t from s on of
    ``gamma**(t - s) * (c_s * ... * c_{t-1}) * rho_t * (r_t + gamma * V(x_{t+1}) - V(x_t))``,
    with ``rho_t = min(rho_bar, ratio_t)`` and, by remark 2, ``c_t = lam * min(c_bar, ratio_t)``. The advantage is that
    of section 4.2, ``rho_s * (r_s + gamma * v_{s+1} - V(x_s))``. A step that terminated its episode bootstraps from
    0, one that was truncated and the last of the chunk from `next_value`; no sum goes beyond any of them.

    Args:
        rew: Rewards, ``[T, N]``.
        value: Values of the observations that the policy saw, ``[T, N]``.
        next_value: Values of the true observations after each step, ``[T, N]``; see :func:`gae`.
        log_ratio: Log-probability of each action by the policy that learns, less that by the policy that acted,
            ``[T, N]``.
        terminated: ``bool [T, N]``.
        truncated: ``bool [T, N]``.
        gamma: Discount factor.
        lam: Lambda: 1 is the paper's equation 1, 0 takes one step only.
        rho_bar: Where importance weights of TD errors and advantages are cut off; what the targets converge to
            lies between the value of the policy that acted (near 0) and of the one that learns (infinity).
        c_bar: Where those of the trace are cut off, which bounds the variance.
        valid: Where a step happened, ``bool [T, N]``; None means everywhere. A step that did not has its own
            value as target and advantage 0, and what comes after it does not reach what came before.

    Returns:
        ``(target, advantage)``, each ``[T, N]`` in the dtype of `value`.
    """
    dtype = value.dtype
    bootstrap = np.where(terminated, dtype.type(0), next_value)
    rho = np.exp(np.minimum(log_ratio, math.log(rho_bar))).astype(dtype, copy=False)
    c = np.exp(np.minimum(log_ratio, math.log(c_bar))).astype(dtype, copy=False)
    reward = rew.astype(dtype, copy=False)
    correction = rho * (reward + dtype.type(gamma) * bootstrap - value)  # v_s - V(x_s)
    decay = np.where(terminated | truncated, dtype.type(0), dtype.type(gamma * lam) * c)
    _add_later_steps(correction, decay, valid)
    continues = ~(terminated | truncated)[:-1]
    next_target = bootstrap.astype(dtype, copy=False)
    next_target[:-1][continues] += correction[1:][continues]
    advantage = rho * (reward + dtype.type(gamma) * next_target - value)
    if valid is not None:
        advantage[~valid] = 0
    return value + correction, advantage


def _add_later_steps(
    terms: NDArray[np.floating[Any]], decay: NDArray[np.floating[Any]], valid: NDArray[np.bool_] | None
) -> None:
    """Adds to the term of each step, in place, that of the next step times the decay; both change.

    Terms and decays of steps that did not happen become 0.
    """
    if valid is not None:
        terms[~valid] = 0
        decay[~valid] = 0
    for t in range(len(terms) - 2, -1, -1):
        terms[t] += decay[t] * terms[t + 1]
