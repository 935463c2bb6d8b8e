"""Distributions over actions, as formulas for acting and for learning.

A *sample* is what was drawn, ``[k, C]``; an *action* is what the environment gets, a tree for a Dict or Tuple. They
differ where a Discrete space does not start at 0, and where a Box scales or cuts off what was drawn. Every distribution
has these members:

*   `noise`, the noise that a sample takes; `num_params`, P; and `num_constants`: how many of the parameters, the last
    ones, need not depend on the observation;
*   `sample` and `mode` return samples ``[k, C]`` and their log-probabilities ``[k]``, from parameters ``[k, P]`` and
    noise ``[k, lanes]``; those that SAC uses have `uniform`, which samples evenly over the space;
*   `action` returns what the environments get, `extras` what a chunk must record besides, and `recorded` the samples
    ``[..., C]`` behind both;
*   `logp_entropy` returns log-probabilities and entropies, ``[B]`` each, of tensors ``[B, P]`` and ``[B, C]``. In its
    place a `TanhGaussian` has `rsample`, which draws samples with a graph.

Where a policy acts, parameters are a NumPy array and noise comes from outside (see
:mod:`rayvec.policies.noise`); where it learns, they are a torch tensor with a graph behind it. A distribution
has both, side by side, and holds no state. This module does not import torch.

k is a number of environments, B of rows of a minibatch, P of parameters, C of components.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rayvec.errors import ConfigError
from rayvec.policies.encoders import leaf_spaces
from rayvec.policies.noise import NoiseSpec
from rayvec.policies.product import Product

if TYPE_CHECKING:
    from torch import Tensor

Float = NDArray[np.float32]
NOT_ALLOWED = -1e30
"""Logit of a choice of probability 0: far below those of a network that has diverged, and finite, also times a
coefficient, so that probability 0 times its logarithm is 0 and not NaN."""
_HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)
_LOG_2 = math.log(2)

LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0
"""Between which `TanhGaussian` squashes the logarithms of its standard deviations."""


@dataclass(frozen=True)
class Categorical:
    """C independent choices: a Discrete (C = 1), MultiDiscrete or MultiBinary action.

    The parameters are the logits of the first component, then those of the second, and so on.

    Attributes:
        sizes: Number of choices of each component.
        starts: The action that choice 0 of each component stands for.
        shape: Shape of one action.
        dtype: Of actions.
    """

    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    num_constants = 0

    @property
    def noise(self) -> NoiseSpec:
        """One uniform number for each component."""
        return NoiseSpec("uniform", len(self.sizes))

    @property
    def num_params(self) -> int:
        """One logit for each choice."""
        return sum(self.sizes)

    @cached_property
    def _columns(self) -> NDArray[np.int64] | None:
        """Which logit stands in row c, place j of the table ``[C, largest size]``; None where they already do.

        Places that a smaller component does not have refer to the column after the last logit.
        """
        if len(set(self.sizes)) == 1:
            return None
        firsts = np.cumsum((0, *self.sizes[:-1]))
        places = np.arange(max(self.sizes))
        return np.where(places < np.array(self.sizes)[:, None], firsts[:, None] + places, self.num_params)

    def sample(self, params: Float, noise: NDArray[np.float64]) -> tuple[NDArray[np.int64], Float]:
        """Inverts the cumulative distribution at one uniform number per component."""
        shifted, cumulative = self._exponentials(params)
        passed = cumulative[:, :-1] <= noise.reshape(-1, 1) * cumulative[:, -1:]
        return self._with_logp(shifted, cumulative, np.add.reduce(passed, 1, dtype=np.int64))

    def uniform(self, noise: NDArray[np.float64]) -> tuple[NDArray[np.int64], Float]:
        """Samples from equal logits."""
        return self.sample(np.zeros((len(noise), self.num_params), np.float32), noise)

    def mode(self, params: Float) -> tuple[NDArray[np.int64], Float]:
        """The first of the largest logits of each component."""
        shifted, cumulative = self._exponentials(params)
        return self._with_logp(shifted, cumulative, shifted.argmax(1))

    def action(self, sample: NDArray[Any]) -> NDArray[Any]:
        """Counts from `starts` and gives each action its shape."""
        if any(self.starts):
            sample = sample + np.array(self.starts)
        return sample.reshape(len(sample), *self.shape).astype(self.dtype, copy=False)

    def extras(self, sample: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Nothing: the action determines the sample."""
        return {}

    def recorded(self, act: NDArray[Any], extras: dict[str, NDArray[Any]]) -> NDArray[np.int64]:
        """Counts from 0 again."""
        lead = act.shape[: act.ndim - len(self.shape)]
        sample: NDArray[np.int64] = act.reshape(*lead, len(self.sizes)).astype(np.int64) - np.array(self.starts)
        return sample

    def allowed(self, mask: Any) -> Any:
        """Returns which logits a mask leaves as they are, ``bool [..., P]``, an array or a tensor."""
        return mask != 0

    def logp_entropy(self, params: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over the components, which are independent."""
        if len(set(self.sizes)) == 1:
            logits = params.view(-1, len(self.sizes), self.sizes[0])
        else:
            from torch import split, stack
            from torch.nn.functional import pad

            largest = max(self.sizes)  # an index by an array could not be compiled
            parts = zip(split(params, list(self.sizes), -1), self.sizes, strict=True)
            logits = stack([pad(part, (0, largest - size), value=NOT_ALLOWED) for part, size in parts], -2)
        logp = logits.log_softmax(-1)
        chosen = logp.gather(-1, sample.unsqueeze(-1)).squeeze(-1)
        return chosen.sum(-1), -(logp.exp() * logp).sum((-2, -1))

    def _exponentials(self, params: Float) -> tuple[Float, NDArray[np.float64]]:
        """Returns logits less their largest, and the running sums of their exponentials, each ``[k * C, size]``.

        Sums are in double precision, where u < 1 implies that u times a sum is less than the sum: a
        choice of probability 0 is never drawn.
        """
        if self._columns is not None:
            params = np.pad(params, ((0, 0), (0, 1)), constant_values=NOT_ALLOWED)[:, self._columns]
        table = params.reshape(-1, max(self.sizes))
        shifted = table - np.maximum.reduce(table, 1, keepdims=True)
        return shifted, np.add.accumulate(np.exp(shifted), 1, dtype=np.float64)

    def _with_logp(
        self, shifted: Float, cumulative: NDArray[np.float64], chosen: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], Float]:
        """Returns the choices ``[k, C]`` and their log-probabilities, summed over the components."""
        logp = shifted[np.arange(len(chosen)), chosen] - np.log(cumulative[:, -1])
        by_env = (-1, len(self.sizes))
        return chosen.reshape(by_env), np.add.reduce(logp.reshape(by_env), 1).astype(np.float32)


@dataclass(frozen=True)
class _Normal:
    """C independent normal numbers for a Box, from a mean and a number that tells the standard deviation of each.

    Attributes:
        low: Lower bounds, ``[*act_shape]``.
        high: Upper bounds, likewise.
        dtype: Of actions.
        is_scaled: Whether finite bounds are -1 and 1 in the units of samples.
    """

    low: NDArray[Any]
    high: NDArray[Any]
    dtype: np.dtype[Any]
    is_scaled: bool = True

    @property
    def noise(self) -> NoiseSpec:
        """One normal number for each component."""
        return NoiseSpec("normal", self.low.size)

    @property
    def num_params(self) -> int:
        """A mean and a number for the standard deviation for each component."""
        return 2 * self.low.size

    @cached_property
    def units(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """What a sample of 0 stands for, and the width of a unit, ``[*act_shape]`` each."""
        scales = self.is_scaled & np.isfinite(self.low) & np.isfinite(self.high)
        low, high = (np.where(scales, bound, 0).astype(self.low.dtype) for bound in (self.low, self.high))
        return 0.5 * low + 0.5 * high, np.where(scales, 0.5 * high - 0.5 * low, 1).astype(self.low.dtype)

    def action(self, sample: NDArray[Any]) -> NDArray[Any]:
        """Converts to the units of the space, and clips to the bounds."""
        centre, unit = self.units
        act = centre + unit * sample.reshape(len(sample), *self.low.shape)
        inside: NDArray[Any] = np.clip(act, self.low, self.high)
        return inside.astype(self.dtype, copy=False)


@dataclass(frozen=True)
class Gaussian(_Normal):
    """C independent normal numbers, cut off at the bounds of a Box only on their way to the environment.

    The parameters are C means, then C logarithms of standard deviations. Log-probabilities are those
    of the numbers as drawn: what was cut off tells the gradient nothing, so chunks record both.
    """

    @property
    def num_constants(self) -> int:
        """The logarithms of standard deviations."""
        return self.low.size

    def sample(self, params: Float, noise: NDArray[np.float64]) -> tuple[Float, Float]:
        """Shifts and scales the noise."""
        mean, log_std = np.split(params, 2, axis=-1)
        sample = (mean + np.exp(log_std) * noise).astype(np.float32)
        logp = np.add.reduce(-0.5 * np.square(noise) - log_std - _HALF_LOG_TAU, -1)
        return sample, logp.astype(np.float32)

    def mode(self, params: Float) -> tuple[Float, Float]:
        """The means."""
        mean, log_std = np.split(params, 2, axis=-1)
        return mean, np.add.reduce(-log_std - _HALF_LOG_TAU, -1).astype(np.float32)

    def extras(self, sample: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """The sample, as ``raw_act`` ``float32 [k, C]``: clipping can't be undone."""
        return {"raw_act": sample}

    def recorded(self, act: NDArray[Any], extras: dict[str, NDArray[Any]]) -> NDArray[Any]:
        """Returns ``raw_act``."""
        return extras["raw_act"]

    def logp_entropy(self, params: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over the components, which are independent."""
        mean, log_std = params.chunk(2, -1)
        deviation = (sample - mean) * (-log_std).exp()
        volume = log_std.sum(-1) + log_std.shape[-1] * _HALF_LOG_TAU
        return -0.5 * deviation.square().sum(-1) - volume, volume + 0.5 * log_std.shape[-1]


@dataclass(frozen=True)
class TanhGaussian(_Normal):
    """C independent normal numbers, squashed by tanh and then stretched to the bounds of a Box.

    The parameters are C means, then C numbers that tanh squashes into logarithms of standard deviations between
    `LOG_STD_MIN` and `LOG_STD_MAX`. Bounds are finite. A sample lies in [-1, 1]; its log-probability is that of the
    sample, with the correction for tanh (Haarnoja et al., 2018, arXiv:1812.05905, appendix C), whatever the bounds: the
    entropy that soft actor-critic aims at then does not depend on the units of actions.
    """

    num_constants = 0

    def sample(self, params: Float, noise: NDArray[np.float64]) -> tuple[Float, Float]:
        """Shifts and scales the noise, and squashes it."""
        mean, log_std = self._mean_log_std(params)
        x = mean + np.exp(log_std) * noise
        logp = np.add.reduce(-0.5 * np.square(noise) - log_std - _HALF_LOG_TAU - _log_volume(x), -1)
        return np.tanh(x).astype(np.float32), logp.astype(np.float32)

    def uniform(self, noise: NDArray[np.float64]) -> tuple[Float, Float]:
        """Maps the normal noise to (-1, 1) by its distribution function."""
        share = np.array([math.erf(z / math.sqrt(2)) for z in noise.flat]).reshape(noise.shape)
        return share.astype(np.float32), np.full(len(noise), -self.low.size * _LOG_2, np.float32)

    def mode(self, params: Float) -> tuple[Float, Float]:
        """The means, squashed: what the actor would do without its noise, as is usual, not quite the densest point."""
        mean, log_std = self._mean_log_std(params)
        logp = np.add.reduce(-log_std - _HALF_LOG_TAU - _log_volume(mean), -1)
        return np.tanh(mean), logp.astype(np.float32)

    def extras(self, sample: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Nothing: the action determines the sample."""
        return {}

    def rsample(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns samples ``[B, C]`` and their log-probabilities ``[B]``, both with a graph, as `sample` does."""
        from torch.nn.functional import softplus

        mean, log_std = mean_and_log_std(params)
        x = mean + log_std.exp() * noise
        volume = 2 * (_LOG_2 - x - softplus(-2 * x))
        return x.tanh(), (-0.5 * noise.square() - log_std - _HALF_LOG_TAU - volume).sum(-1)

    def recorded(self, act: NDArray[Any], extras: dict[str, NDArray[Any]]) -> Float:
        """Shrinks actions to [-1, 1] again; a component that has no width becomes 0."""
        centre, unit = self.units
        sample: NDArray[Any] = (act - centre) / np.where(unit > 0, unit, 1)
        lead = act.shape[: act.ndim - self.low.ndim]
        return sample.astype(np.float32).reshape(*lead, self.low.size)

    def _mean_log_std(self, params: Float) -> tuple[Float, Float]:
        mean, raw = np.split(params, 2, axis=-1)
        return mean, np.float32(0.5 * (LOG_STD_MAX - LOG_STD_MIN)) * (np.tanh(raw) + 1) + np.float32(LOG_STD_MIN)


def mean_and_log_std(params: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and logarithm of the standard deviation, ``[..., C]`` each, from parameters of a `TanhGaussian`."""
    mean, raw = params.chunk(2, -1)
    return mean, LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (raw.tanh() + 1)


def _log_volume(x: NDArray[Any]) -> NDArray[Any]:
    """Returns ``log(1 - tanh(x)^2)``, the logarithm of the slope of tanh, without cancellation."""
    volume: NDArray[Any] = 2 * (_LOG_2 - np.abs(x) - np.log1p(np.exp(-2 * np.abs(x))))
    return volume


Distribution: TypeAlias = Categorical | Gaussian | Product
"""What PPO and IMPALA learn by; SAC samples from a `TanhGaussian` instead."""


def make_tanh_gaussian(space: spaces.Space[Any]) -> TanhGaussian:
    """Returns the squashed normal distribution over a Box.

    Raises:
        ConfigError: The space is no floating-point Box with finite bounds.
    """
    if isinstance(space, spaces.Box) and np.issubdtype(_dtype(space), np.floating):
        if np.isfinite(space.low).all() and np.isfinite(space.high).all() and space.low.size:
            return TanhGaussian(space.low, space.high, _dtype(space))
    raise ConfigError(
        f"The action space is {space}. A squashed normal distribution needs a floating-point Box with finite "
        "bounds and at least one number: convert it by a Gymnasium wrapper, or use PPO."
    )


def make_distribution(space: spaces.Space[Any], scaled: bool = False) -> Distribution:
    """Returns the family of distributions over the actions of `space`.

    Args:
        space: Of actions.
        scaled: Whether finite bounds of a Box are -1 and 1 for the network.

    Raises:
        ConfigError: There is none for such a space.
    """
    match space:
        case spaces.Discrete():
            return Categorical((int(space.n),), (int(space.start),), (), _dtype(space))
        case spaces.MultiDiscrete():
            sizes, starts = (tuple(int(x) for x in xs.ravel()) for xs in (space.nvec, space.start))
            return Categorical(sizes, starts, space.nvec.shape, _dtype(space))
        case spaces.MultiBinary():
            count = int(np.prod(space.shape))
            return Categorical((2,) * count, (0,) * count, space.shape, _dtype(space))
        case spaces.Box() if np.issubdtype(_dtype(space), np.floating):
            return Gaussian(space.low, space.high, _dtype(space), scaled)
        case spaces.Dict() | spaces.Tuple() if len(space.spaces):
            return Product(space, tuple(make_distribution(leaf, scaled) for _, leaf in leaf_spaces(space)))
    raise ConfigError(
        f"The action space is {space}. A policy needs Discrete, MultiDiscrete, MultiBinary, a floating-point "
        "Box, or a Dict or Tuple of these: transform the actions with a Gymnasium wrapper."
    )


def _dtype(space: spaces.Space[Any]) -> np.dtype[Any]:
    return np.dtype(space.dtype)
