"""V-trace by its definition: slow and obvious."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def vtrace_by_definition(
    rew: Array,
    value: Array,
    next_value: Array,
    log_ratio: Array,
    terminated: Array,
    truncated: Array,
    valid: Array,
    gamma: float,
    lam: float,
    rho_bar: float,
    c_bar: float,
) -> tuple[Array, Array]:
    """Equation 1 of Espeholt et al. (2018) with remark 2, and the advantage of section 4.2, in double precision."""
    num_steps, num_envs = rew.shape
    ratio = np.exp(log_ratio.astype(float))
    rho, c = np.minimum(rho_bar, ratio), lam * np.minimum(c_bar, ratio)
    target, advantage = value.astype(float), np.zeros(rew.shape)
    for n in range(num_envs):
        bootstraps = [0.0 if terminated[t, n] else float(next_value[t, n]) for t in range(num_steps)]
        for s in range(num_steps):
            for t in range(s, num_steps):
                if not valid[t, n]:
                    break
                td_error = rho[t, n] * (float(rew[t, n]) + gamma * bootstraps[t] - float(value[t, n]))
                target[s, n] += gamma ** (t - s) * np.prod(c[s:t, n]) * td_error
                if terminated[t, n] or truncated[t, n]:
                    break
        for s in range(num_steps):
            if valid[s, n]:
                last = s == num_steps - 1 or terminated[s, n] or truncated[s, n] or not valid[s + 1, n]
                following = bootstraps[s] if last else target[s + 1, n]
                advantage[s, n] = rho[s, n] * (float(rew[s, n]) + gamma * following - float(value[s, n]))
    return target, advantage
