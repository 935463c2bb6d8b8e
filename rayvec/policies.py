"""Policies that act: what a worker needs to turn observations into actions.

Nothing here imports torch. The actor of an MLP is evaluated with NumPy, which for the small batches of a
worker costs a third of what calling the torch module does (9 against 29 µs for 32 rows of a 64x64 net),
and spares every worker the two seconds and 40 MB of importing torch. Any other module acts through torch.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rayvec.distributions import Distribution, make_distribution
from rayvec.errors import ConfigError, message
from rayvec.noise import NO_NOISE, NoiseSpec
from rayvec.types import Tree

__all__ = ["OBS_CLIP", "Actor", "Encoder", "ImageLeaf", "MLPActor", "Policy", "make_encoder"]

Float = NDArray[np.float32]
Path = tuple[Any, ...]

OBS_CLIP = 10.0
"""Normalised observations lie within this many standard deviations of their mean."""


@dataclass(frozen=True)
class ImageLeaf:
    """Where the images of an observation are, and their form.

    Attributes:
        path: The keys and places that lead to them.
        shape: Of one image.
        channels_last: Whether it is (height, width, channels), else (channels, height, width).
    """

    path: Path
    shape: tuple[int, int, int]
    channels_last: bool


@dataclass(frozen=True)
class Encoder:
    """Turns the part of observations that is no image into rows of numbers.

    Attributes:
        leaves: For each array of an observation that is no image, the keys and places that lead to it, and the
            function that turns it from ``[..., *shape]`` into ``float32 [..., D_leaf]``.
        num_features: D, the sum of the D_leaf.
        images: The others.
    """

    leaves: tuple[tuple[Path, Callable[[NDArray[Any]], Float]], ...]
    num_features: int
    images: tuple[ImageLeaf, ...] = ()

    def __call__(self, obs: Tree) -> Float:
        """Returns ``float32 [..., D]``; a flat float32 array is returned as it is, without a copy."""
        rows = [encode(functools.reduce(operator.getitem, path, obs)) for path, encode in self.leaves]
        return rows[0] if len(rows) == 1 else np.concatenate(rows, axis=-1)

    def image_arrays(self, obs: Tree) -> list[NDArray[np.uint8]]:
        """Returns the images, each ``uint8 [..., *shape]``, as they are."""
        return [functools.reduce(operator.getitem, image.path, obs) for image in self.images]

    @property
    def measured(self) -> NDArray[np.bool_]:
        """Which features are numbers that were measured and not choices, ``bool [D]``."""
        parts = [np.full(encode.size, isinstance(encode, _Flatten)) for _, encode in self.leaves]  # type: ignore[attr-defined]
        return np.concatenate([np.zeros(0, bool), *parts])


@dataclass(frozen=True)
class _Flatten:
    """A Box or MultiBinary of the given shape: its numbers."""

    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __call__(self, obs: NDArray[Any]) -> Float:
        if len(self.shape) != 1:
            obs = obs.reshape(*obs.shape[: obs.ndim - len(self.shape)], math.prod(self.shape))
        return obs.astype(np.float32, copy=False)


@dataclass(frozen=True)
class _OneHot:
    """A Discrete or MultiDiscrete: one number for each choice of each component."""

    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def __call__(self, obs: NDArray[Any]) -> Float:
        components = obs.reshape(*obs.shape[: obs.ndim - len(self.shape)], len(self.sizes))
        hot = [
            components[..., c, None] == np.arange(start, start + size)
            for c, (size, start) in enumerate(zip(self.sizes, self.starts, strict=True))
        ]
        return np.concatenate(hot, axis=-1).astype(np.float32)


def make_encoder(space: spaces.Space[Any], *, images: bool = False) -> Encoder:
    """Returns the encoder of `space`: numbers as they are, choices one-hot, the parts of a Dict or Tuple side by side.

    Images are Boxes of uint8 with three dimensions, at least 36 pixels high and wide; channels are last where
    there are at most four of them. Smaller ones are taken for numbers.

    Args:
        space: Of one environment's observations.
        images: Whether the net can see.

    Raises:
        ConfigError: The space, or a part of it, can't be turned into a fixed number of numbers, or is an image and
            the net can't see.
    """
    leaves: list[tuple[Path, _Flatten | _OneHot]] = []
    seen: list[ImageLeaf] = []
    for path, leaf in _leaf_spaces(space, ()):
        image = _image(path, leaf)
        match leaf:
            case spaces.Box() if image and images:
                seen.append(image)
            case spaces.Box(shape=shape) if not image and (len(shape) < 3 or math.prod(shape) < _FEW):
                leaves.append((path, _Flatten(shape)))
            case spaces.MultiBinary(shape=shape):
                leaves.append((path, _Flatten(shape)))
            case spaces.Discrete():
                leaves.append((path, _OneHot((int(leaf.n),), (int(leaf.start),), ())))
            case spaces.MultiDiscrete(nvec=nvec, start=start):
                leaves.append((path, _OneHot(tuple(map(int, nvec.flat)), tuple(map(int, start.flat)), nvec.shape)))
            case _:
                raise ConfigError(
                    message(
                        "A net reads a fixed number of numbers" + (", and images." if images else "."),
                        expected="Box of numbers, Discrete, MultiDiscrete, MultiBinary, "
                        + ("images as uint8 of three dimensions, " if images else "")
                        + "or a Dict or Tuple of these",
                        got=leaf,
                        remedy="Transform the observation with a Gymnasium wrapper, or pass a module of your own",
                    )
                )
    return Encoder(tuple(leaves), sum(encode.size for _, encode in leaves), tuple(seen))


_FEW = 5000  # an array of three dimensions with more numbers is an image in some form that no net here can see


def _image(path: Path, space: spaces.Space[Any]) -> ImageLeaf | None:
    """Returns what a space is as an image; None where it is none."""
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or len(space.shape) != 3:
        return None
    channels_last = space.shape[2] <= 4
    height, width = space.shape[:2] if channels_last else space.shape[1:]
    if min(height, width) < 36:
        return None
    return ImageLeaf(path, (space.shape[0], space.shape[1], space.shape[2]), channels_last)


def _leaf_spaces(
    space: spaces.Space[Any], path: tuple[Any, ...]
) -> Iterable[tuple[tuple[Any, ...], spaces.Space[Any]]]:
    match space:
        case spaces.Dict() | spaces.Tuple():
            parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
            for key, part in parts:
                yield from _leaf_spaces(part, (*path, key))
        case _:
            yield path, space


class Actor(Protocol):
    """The part of a module that acts, in the form that travels to workers.

    Attributes:
        distribution: What the parameters it returns are parameters of.
    """

    distribution: Distribution

    def __call__(self, obs: Tree) -> Float:
        """Returns parameters ``float32 [k, P]`` for an observation tree of ``[k, *obs_shape]``."""

    def load_weights(self, weights: Float) -> None:
        """Takes over one flat vector: ``module.parameters()`` in their order, then ``module.buffers()``."""


@dataclass
class MLPActor:
    """Linear layers with tanh or ReLU between them, in NumPy.

    Attributes:
        encoder: From observations to rows of numbers.
        distribution: What the outputs are parameters of.
        layers: Of each layer, where in the flat vector its weight ``[out, in]`` and its bias ``[out]`` start, and out
            and in.
        num_weights: Length of the flat vector.
        constants: Where in the flat vector the parameters lie that are the same for every observation (logarithms
            of standard deviations), which follow those that the last layer puts out.
        normalizer: Where in the flat vector the mean of the rows and the factors to scale them by start; None
            leaves them as they are.
        activation: What stands between the layers.
    """

    encoder: Encoder
    distribution: Distribution
    layers: tuple[tuple[int, int, int, int], ...]
    num_weights: int
    constants: slice
    normalizer: tuple[int, int] | None = None
    activation: Literal["tanh", "relu"] = "tanh"
    _moments: tuple[Float, Float] | None = field(init=False, repr=False, default=None)
    _arrays: list[tuple[Float, Float]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.load_weights(np.zeros(self.num_weights, np.float32))

    def __call__(self, obs: Tree) -> Float:
        """Returns parameters ``float32 [k, P]``."""
        rows = self.encoder(obs)
        if self._moments is not None:
            mean, scale = self._moments
            rows = ((rows - mean) * scale).clip(-OBS_CLIP, OBS_CLIP)
        for weight, bias in self._arrays[:-1]:
            rows = rows @ weight
            rows += bias
            if self.activation == "relu":
                np.maximum(rows, 0, out=rows)
            else:
                np.tanh(rows, rows)
        weight, bias = self._arrays[-1]
        rows = rows @ weight
        rows += bias
        return rows

    def load_weights(self, weights: Float) -> None:
        """Copies each weight as ``[in, out]``, in which form a product of few rows takes two thirds of the time.

        Constants become biases whose weights are 0.

        Raises:
            ConfigError: The vector is of another length than the module's parameters.
        """
        check_length(weights, self.num_weights)
        arrays = [
            (weights[start : start + outs * ins].reshape(outs, ins).T.copy(), weights[bias : bias + outs].copy())
            for start, bias, outs, ins in self.layers
        ]
        constants = weights[self.constants]
        if len(constants):
            weight, bias = arrays[-1]
            zeros = np.zeros((len(weight), len(constants)), np.float32)
            arrays[-1] = (np.hstack([weight, zeros]), np.concatenate([bias, constants]))
        self._arrays = arrays
        if self.normalizer is not None:
            mean, scale = (weights[start : start + self.encoder.num_features].copy() for start in self.normalizer)
            self._moments = mean, scale


def check_length(weights: Float, num_weights: int) -> None:
    if weights.shape != (num_weights,):
        raise ConfigError(
            message(
                "Weights are one flat vector of all parameters and buffers of the module.",
                expected=(num_weights,),
                got=weights.shape,
                remedy="Build the policy from the same kind of module as the learner",
            )
        )


class Policy:
    """Acts with a module: draws from the distribution that it puts out, or takes the most probable action.

    Only the part that acts runs here. Values are left to the learner, which computes them for a whole chunk in one
    large batch, with the weights it is about to change: cheaper than in small batches beside every step.

    What an environment gets is a valid action of its space: a normal sample is clipped to the Box on its way. The
    sample itself, to which ``logp`` belongs, goes into the extras as ``raw_act``.

    The policy holds a copy of the module's weights: training the module does not change it, `load_weights` does. It
    pickles without gradients and, for a module that has ``make_actor``, without torch.

    Args:
        module: Either an ``nn.Module`` with a method ``make_actor() -> Actor``, such as
            :class:`rayvec.nets.ActorCritic`, or any ``nn.Module`` that is called with the observations as tensors
            (``[k, *obs_shape]``, in their own dtype but float64 as float32; a dict or tuple of these where the space
            is one) and returns the parameters ``[k, P]`` of the distribution that fits `action_space`: all logits
            for Discrete, MultiDiscrete and MultiBinary (two per bit), or means, then logarithms of standard
            deviations, for Box.
        action_space: Of one environment; needed by a module without ``make_actor``.
        deterministic: Take the most probable action instead of drawing one.
        random_start: Draw every action with the same probability until weights are loaded for the first time.

    Raises:
        ConfigError: The module has no ``make_actor`` and there is no action space, or none that has a distribution.
    """

    noise: NoiseSpec

    def __init__(
        self,
        module: Any,
        action_space: spaces.Space[Any] | None = None,
        *,
        deterministic: bool = False,
        random_start: bool = False,
    ) -> None:
        self._actor = _make_actor(module, action_space)
        self._random = random_start
        self._deterministic = deterministic
        self.noise = NO_NOISE if deterministic else self._actor.distribution.noise

    def act(self, obs: Tree, noise: NDArray[np.float64]) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
        """Chooses an action for each of k environments.

        Args:
            obs: Observations, tree of ``[k, *obs_shape]``.
            noise: ``float64 [k, lanes]``, of the kind that `noise` asks for.

        Returns:
            Actions ``[k, *act_shape]`` in the dtype of the space, and extras: ``logp`` ``float32 [k]``, the
            log-probability of the sample, and for a Box ``raw_act`` ``float32 [k, C]``, the sample before clipping.
        """
        distribution = self._actor.distribution
        if self._random:
            sample, logp = distribution.uniform(noise)
        else:
            params = self._actor(obs)
            sample, logp = distribution.mode(params) if self._deterministic else distribution.sample(params, noise)
        return distribution.action(sample), {"logp": logp, **distribution.extras(sample)}

    def load_weights(self, weights: Float) -> None:
        """Takes over new weights, ``float32``: one flat vector of the module's parameters, then its buffers; copied.

        Raises:
            ConfigError: The vector is of another length than the module's parameters.
        """
        self._actor.load_weights(weights)
        self._random = False


def _make_actor(module: Any, action_space: spaces.Space[Any] | None) -> Actor:
    if hasattr(module, "make_actor"):
        return cast(Actor, module.make_actor())
    if action_space is None:
        raise ConfigError(
            message(
                "A module that does not know its actions needs to be told.",
                expected="a module with make_actor(), or action_space=",
                got=type(module).__name__,
                remedy="Pass action_space=env.single_action_space",
            )
        )
    from rayvec.nets import ModuleActor

    return ModuleActor(module, make_distribution(action_space))
