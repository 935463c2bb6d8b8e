"""Whether a run compiles its updates: what ``compile="auto"`` decides.

The rule depends on the settings and on the observation space alone, so that all ranks, a resumed run and a second run
with the same seed decide alike; compiled updates differ from others by rounding. :func:`rayvec.train` decides: a
learner that is made directly compiles with ``compile=True`` alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gymnasium import spaces

from rayvec.policies.encoders import has_images

_SAVED_MS = {"ppo": 0.5, "impala": 0.5, "sac": 2.0}
"""What a compiled minibatch saves on a CPU, in milliseconds: a lower bound of what `benchmarks/updates.py`
measured. For other algorithms nothing is known."""

_SAVED_MS_PER_IMAGE = 0.05
_SAVED_MS_RECURRENT = 1.5


def compiles(config: Any, observation_space: spaces.Space[Any]) -> bool:
    """Whether the learner of a run compiles its updates.

    With ``compile="auto"`` it does where that is known to save twice what it costs: on a CPU, with the default network.

    Args:
        config: Settings of the run.
        observation_space: Of one environment.
    """
    if config.compile != "auto":
        return bool(config.compile)
    if config.algorithm not in _SAVED_MS or config.learner_device != "cpu" or config.network is not None:
        return False
    count, rows = config.minibatches
    saved_ms = _SAVED_MS_RECURRENT if getattr(config, "recurrent", None) else _SAVED_MS[config.algorithm]
    if has_images(observation_space):
        saved_ms += _SAVED_MS_PER_IMAGE * rows
    return bool(1e-3 * count * saved_ms >= 2 * compile_s(config))


def compile_s(config: Any) -> float:
    """Returns about how many seconds compiling takes: all steps of a recurrent network are in the graph."""
    steps = config.sequence_length if getattr(config, "recurrent", None) else 0
    return 30.0 + 1.5 * steps


def decided(config: Any, observation_space: spaces.Space[Any]) -> Any:
    """Returns settings in which ``compile`` is True or False, for a learner; others as they are."""
    is_open = getattr(config, "compile", None) == "auto"
    return replace(config, compile=compiles(config, observation_space)) if is_open else config
