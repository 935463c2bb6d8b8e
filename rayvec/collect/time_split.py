"""What the time of a batch was spent on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rayvec.data import Rollout

__all__ = ["time_split_s"]


def time_split_s(rollouts: Sequence[Rollout], elapsed_s: float) -> dict[str, float]:
    """Returns what the wall time of a call was spent on; see :class:`CollectStats`."""
    split = dict.fromkeys(("environment", "inference", "waiting"), 0.0)
    for rollout in rollouts:
        whole_s, environment_s, inference_s = np.array(rollout.times).T
        share = min(1.0, rollout.waited_s / whole_s.max())  # the rest was done before the call waited for it
        split["environment"] += share * float(environment_s.mean())
        split["inference"] += share * float(inference_s.mean())
        split["waiting"] += share * float(whole_s.max() - whole_s.mean())
    return {**split, "transport": elapsed_s - sum(split.values())}
