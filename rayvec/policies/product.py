"""A distribution over the actions of a Dict or Tuple space: a product of those over its parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rayvec.data import Tree
from rayvec.policies.encoders import assembled, join, leaf_spaces
from rayvec.policies.noise import NoiseSpec
from rayvec.wrappers import num_choices

if TYPE_CHECKING:
    from torch import Tensor

    from rayvec.policies.distributions import Distribution

Float = NDArray[np.float32]


@dataclass(frozen=True)
class Product:
    """Independent parts: the Boxes, Discretes, MultiDiscretes and MultiBinaries of a Dict or Tuple.

    The parameters are those of the parts without their constants, side by side, and then the constants of all parts. A
    sample has the samples of the parts side by side, as ``float32``.

    Attributes:
        space: Of actions.
        parts: Distributions over the leaves of the space, in their order.
    """

    space: spaces.Space[Any]
    parts: tuple[Distribution, ...]

    @property
    def noise(self) -> NoiseSpec:
        """Uniform numbers: one for a choice, two for a normal number."""
        return NoiseSpec("uniform", sum(_lanes(part) for part in self.parts))

    @property
    def num_params(self) -> int:
        """Those of all parts."""
        return sum(part.num_params for part in self.parts)

    @property
    def num_constants(self) -> int:
        """Those of all parts."""
        return sum(part.num_constants for part in self.parts)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of choices to which an action mask applies, component by component."""
        return num_choices(self.space)

    def sample(self, params: Float, noise: NDArray[np.float64]) -> tuple[Float, Float]:
        """Draws each part."""
        numbers = self._noise(noise)
        drawn = [part.sample(own, next(numbers)) for part, own in zip(self.parts, self._params(params), strict=True)]
        return _joined(drawn)

    def mode(self, params: Float) -> tuple[Float, Float]:
        """The most probable sample of each part."""
        return _joined([part.mode(own) for part, own in zip(self.parts, self._params(params), strict=True)])

    def action(self, sample: NDArray[Any]) -> Tree:
        """Returns the actions of the parts in the form of the space."""
        pieces = zip(self.parts, self._samples(sample), strict=True)
        actions = [part.action(own.astype(np.int64) if _is_choice(part) else own) for part, own in pieces]
        return assembled(self.space, iter(actions))

    def extras(self, sample: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """The sample, as ``raw_act`` ``float32 [k, C]``."""
        return {"raw_act": sample}

    def recorded(self, act: Tree, extras: dict[str, NDArray[Any]]) -> NDArray[Any]:
        """Returns ``raw_act``."""
        return extras["raw_act"]

    def logp_entropy(self, params: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over the parts."""
        pieces = zip(self.parts, self._params(params), self._samples(sample), strict=True)
        terms = [part.logp_entropy(own, drawn.long() if _is_choice(part) else drawn) for part, own, drawn in pieces]
        return sum(logp for logp, _ in terms), sum(entropy for _, entropy in terms)  # type: ignore[return-value]

    def allowed(self, mask: NDArray[Any]) -> NDArray[np.bool_]:
        """Returns which parameters a mask leaves as they are, ``bool [..., P]``: all but the logits of some choices."""
        allowed = np.ones((*mask.shape[:-1], self.num_params), bool)
        start = first = 0
        for (_, leaf), part in zip(leaf_spaces(self.space), self.parts, strict=True):
            count = sum(num_choices(leaf))
            allowed[..., start : start + count] = mask[..., first : first + count] != 0
            start, first = start + part.num_params - part.num_constants, first + count
        return allowed

    def _params(self, params: Any) -> Iterator[Any]:
        """Yields the parameters of each part, arrays or tensors."""
        start, constant = 0, self.num_params - self.num_constants
        for part in self.parts:
            stop, last = start + part.num_params - part.num_constants, constant + part.num_constants
            pieces = [params[..., start:stop], params[..., constant:last]]
            yield join(pieces) if part.num_constants else pieces[0]
            start, constant = stop, last

    def _samples(self, sample: Any) -> Iterator[Any]:
        """Yields the samples of each part."""
        start = 0
        for part in self.parts:
            stop = start + part.noise.lanes
            yield sample[..., start:stop]
            start = stop

    def _noise(self, noise: NDArray[np.float64]) -> Iterator[NDArray[np.float64]]:
        """Yields noise for each part; normal numbers by Box and Muller (1958)."""
        start = 0
        for part in self.parts:
            stop = start + _lanes(part)
            uniform = noise[:, start:stop]
            if part.noise.kind == "normal":
                radius, angle = np.split(uniform, 2, axis=-1)
                uniform = np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle)
            yield uniform
            start = stop


def _is_choice(part: Distribution) -> bool:
    return part.noise.kind == "uniform"


def _lanes(part: Distribution) -> int:
    return part.noise.lanes * (2 if part.noise.kind == "normal" else 1)


def _joined(drawn: Sequence[tuple[NDArray[Any], Float]]) -> tuple[Float, Float]:
    """Returns samples side by side, and the log-probability of all."""
    samples, logps = zip(*drawn, strict=True)
    return np.concatenate(samples, -1).astype(np.float32), np.add.reduce(logps).astype(np.float32)
