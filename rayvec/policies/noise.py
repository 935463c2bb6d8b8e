"""Noise that depends on the environment and the step, not on the process that computes it.

A policy that explores needs random numbers. Here they are a pure function of
(seed, environment, step, lane), so that the same run on one worker or on a hundred nodes draws the
same actions. The function is a counter-based generator: the finaliser of SplitMix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 15), applied to a
stream key per (seed, environment) plus a counter per (step, lane).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_LANES_PER_STEP = np.uint64(1 << 20)


@dataclass(frozen=True, slots=True)
class NoiseSpec:
    """How much noise a policy needs for each environment and step.

    Attributes:
        kind: ``"uniform"`` in the open interval (0, 1), or ``"normal"`` with mean 0 and variance 1.
        lanes: How many numbers for each environment and step.
    """

    kind: Literal["uniform", "normal"]
    lanes: int


NO_NOISE = NoiseSpec("uniform", 0)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def _uniform(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _normal(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Box and Muller (1958): one normal from one uniform pair, the second from a mix of the first."""
    radius = np.sqrt(-2.0 * np.log(_uniform(bits)))
    normal: NDArray[np.float64] = radius * np.cos(2.0 * np.pi * _uniform(_mix(bits + _GOLDEN)))
    return normal


_KINDS: dict[str, Callable[[NDArray[np.uint64]], NDArray[np.float64]]] = {"uniform": _uniform, "normal": _normal}


def keyed_noise(
    spec: NoiseSpec, *, seed: int, env_ids: NDArray[np.int64], first_step: int, num_steps: int
) -> NDArray[np.float64]:
    """Returns the noise of some environments for some steps, ``float64 [num_steps, k, lanes]``.

    Args:
        spec: Kind and lanes.
        seed: Of the run.
        env_ids: Global indices, ``int64 [k]``.
        first_step: Number of the first step.
        num_steps: How many steps.
    """
    with np.errstate(over="ignore"):
        stream = _mix(np.asarray(env_ids, np.int64).astype(np.uint64) * _GOLDEN + np.uint64(seed % 2**64))
        stream = _mix(stream + _GOLDEN)
        steps = np.arange(first_step, first_step + num_steps, dtype=np.uint64) * _LANES_PER_STEP
        lanes = np.arange(spec.lanes, dtype=np.uint64)
        counter = stream[None, :, None] + (steps[:, None, None] + lanes[None, None, :] + np.uint64(1)) * _GOLDEN
        return _KINDS[spec.kind](_mix(counter))
