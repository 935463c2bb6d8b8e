"""Observations as rows of numbers: which leaves are images, and how the others are flattened.

An encoder takes arrays, to act and to learn, or tensors, to be exported. This module does not import torch.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rayvec.data import Tree
from rayvec.errors import ConfigError
from rayvec.wrappers import MASK_KEY

Float = NDArray[np.float32]
Path = tuple[Any, ...]

OBS_CLIP = 10.0
"""Normalised observations lie within this many standard deviations of their mean."""

NATURE_PIXELS = 36
"""The least height and width that a Nature-CNN reads."""

_LEAST_PIXELS = 8
"""The least height and width of what counts as an image."""


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

    @property
    def pixels(self) -> int:
        """The smaller one of height and width."""
        return min(self.shape[:2] if self.channels_last else self.shape[1:])


@dataclass(frozen=True)
class Encoder:
    """Turns the part of observations that is no image into rows of numbers.

    Attributes:
        leaves: For each array of an observation that is no image, the keys and places that lead to it, and the
            function that turns it from ``[..., *shape]`` into ``float32 [..., D_leaf]``.
        num_features: D, the sum of the D_leaf.
        images: The arrays of an observation that are images.
    """

    leaves: tuple[tuple[Path, _Flatten | _OneHot], ...]
    num_features: int
    images: tuple[ImageLeaf, ...] = ()

    def __call__(self, obs: Tree) -> Any:
        """Returns ``[..., D]``, float32, or float64 where that keeps digits to be normalised; a flat array as it is."""
        parts = []
        for path, encode in self.leaves:
            parts.append(encode(at(obs, path)))
        return parts[0] if len(parts) == 1 else join(parts)

    @property
    def measured(self) -> NDArray[np.bool_]:
        """Which features are numbers that were measured and not choices, ``bool [D]``."""
        parts = [np.full(encode.size, isinstance(encode, _Flatten)) for _, encode in self.leaves]
        return np.concatenate([np.zeros(0, bool), *parts])


@dataclass(frozen=True, eq=False)
class _Flatten:
    """A Box or MultiBinary of the given shape: its numbers.

    Attributes:
        shape: Of one observation.
        is_wide: Whether they are float64, else float32.
        scale: What they are multiplied by, ``float32 [D_leaf]``; None leaves them as they are.
    """

    shape: tuple[int, ...]
    is_wide: bool = False
    scale: Float | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __call__(self, obs: Any) -> Any:
        if len(self.shape) != 1:
            obs = obs.reshape(*obs.shape[: obs.ndim - len(self.shape)], math.prod(self.shape))
        if isinstance(obs, np.ndarray):
            numbers: Any = obs.astype(np.float64 if self.is_wide else np.float32, copy=False)
        else:
            numbers = obs.double() if self.is_wide else obs.float()
        return numbers if self.scale is None else numbers * _like(obs, self.scale)


@dataclass(frozen=True)
class _OneHot:
    """A Discrete or MultiDiscrete: one number for each choice of each component."""

    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def __call__(self, obs: Any) -> Any:
        components = obs.reshape(*obs.shape[: obs.ndim - len(self.shape)], len(self.sizes))
        hot = join(
            [
                components[..., c, None] == _like(obs, np.arange(start, start + size))
                for c, (size, start) in enumerate(zip(self.sizes, self.starts, strict=True))
            ]
        )
        return hot.astype(np.float32) if isinstance(hot, np.ndarray) else hot.float()


def at(tree: Tree, path: Path) -> Any:
    """Returns what is at a place of a tree."""
    return functools.reduce(operator.getitem, path, tree)


def replaced(tree: Tree, path: Path, value: Any) -> Tree:
    """Returns a tree with another value at a place.

    >>> replaced({"a": (1, 2), "b": 3}, ("a", 1), 9)
    {'a': (1, 9), 'b': 3}
    """
    if not path:
        return value
    part = replaced(tree[path[0]], path[1:], value)
    if isinstance(tree, dict):
        return {**tree, path[0]: part}
    return (*tree[: path[0]], part, *tree[path[0] + 1 :])


def join(parts: list[Any]) -> Any:
    """Returns arrays or tensors side by side, ``[..., D]``."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts, axis=-1)
    import torch

    return torch.cat(parts, -1)


def _like(obs: Any, constant: NDArray[Any]) -> Any:
    """Returns a constant as an array or as a tensor, as `obs` is."""
    if isinstance(obs, np.ndarray):
        return constant
    import torch

    return torch.from_numpy(constant).to(obs.device)


def normalized(rows: Any, mean: Any, scale: Any) -> Any:
    """Returns rows shifted and scaled, in the dtype of `scale`; arrays or tensors.

    With a mean in float64 no digits are lost where numbers are far from 0.
    """
    shifted = rows - mean
    near = shifted.astype(scale.dtype) if isinstance(rows, np.ndarray) else shifted.to(scale.dtype)
    return (near * scale).clip(-OBS_CLIP, OBS_CLIP)


def assembled(space: spaces.Space[Any], leaves: Iterator[Any]) -> Tree:
    """Returns arrays, given in the order of `leaf_spaces`, in the form of a space."""
    if isinstance(space, spaces.Dict):
        return {key: assembled(part, leaves) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(assembled(part, leaves) for part in space.spaces)
    return next(leaves)


def make_encoder(
    space: spaces.Space[Any],
    *,
    images: bool = False,
    scaled: bool = False,
    masked: bool = False,
    is_wide: bool = False,
) -> Encoder:
    """Returns the encoder of `space`: numbers as they are, choices one-hot, the parts of a Dict or Tuple side by side.

    Images are Boxes of uint8 with three dimensions, at least 8 pixels high and wide; channels are last where
    there are at most four of them, or fewer than pixels. Below 36 pixels, their upper bound is 255.

    Args:
        space: Of one environment's observations.
        images: Whether the network reads images.
        scaled: Whether the numbers of other Boxes of uint8 are divided by their upper bounds.
        masked: Whether a Dict's action mask is left out.
        is_wide: Whether numbers that float32 can't hold stay in float64, to be normalised.

    Raises:
        ConfigError: The space, or a part of it, can't be turned into a fixed number of numbers, or is an image and
            the network reads none.
    """
    leaves: list[tuple[Path, _Flatten | _OneHot]] = []
    seen: list[ImageLeaf] = []
    for path, leaf in leaf_spaces(space):
        image = _image(path, leaf)
        match leaf:
            case _ if masked and path == (MASK_KEY,):
                pass
            case spaces.Box() if image and images:
                seen.append(image)
            case spaces.Box(shape=shape) if not _is_large(image) and (len(shape) < 3 or math.prod(shape) < _FEW):
                leaves.append((path, _numbers(leaf, scaled, is_wide)))
            case spaces.MultiBinary(shape=shape):
                leaves.append((path, _Flatten(shape)))
            case spaces.Discrete():
                leaves.append((path, _OneHot((int(leaf.n),), (int(leaf.start),), ())))
            case spaces.MultiDiscrete(nvec=nvec, start=start):
                leaves.append((path, _OneHot(tuple(map(int, nvec.flat)), tuple(map(int, start.flat)), nvec.shape)))
            case spaces.Box() if image:
                raise ConfigError(
                    f"The observation {leaf} is a large image, which this network would read as a row of numbers. "
                    f"Shrink it with gymnasium.wrappers.ResizeObservation below {NATURE_PIXELS} pixels or "
                    f"{_FEW:,} numbers, use PPO or IMPALA, or pass a network of your own."
                )
            case _:
                raise ConfigError(
                    f"The observation space has the part {leaf}. A network reads Box, Discrete, MultiDiscrete, "
                    f"MultiBinary, {'images as uint8 of three dimensions, ' if images else ''}and a Dict or Tuple "
                    "of these: transform the observation with a Gymnasium wrapper, or pass a network of your own."
                )
    size = sum(encode.size for _, encode in leaves)
    if not size and not seen:
        raise ConfigError(
            f"The observation space {space} has no numbers. A network needs at least one: add a constant with a "
            "Gymnasium wrapper."
        )
    return Encoder(tuple(leaves), size, tuple(seen))


def float_encoder(space: spaces.Space[Any]) -> Encoder:
    """Returns the encoder of the parts of `space` that are Boxes of floating-point numbers, but for an action mask."""
    leaves = tuple(
        (path, _numbers(leaf, False, True))
        for path, leaf in leaf_spaces(space)
        if isinstance(leaf, spaces.Box) and np.issubdtype(leaf.dtype, np.floating) and path != (MASK_KEY,)
    )
    return Encoder(leaves, sum(encode.size for _, encode in leaves))


def plain_encoder(path: Path, space: spaces.Box, is_wide: bool) -> Encoder:
    """Returns the encoder of one Box of any shape, at a place of observations, whose numbers stay as they are."""
    return Encoder(((path, _numbers(space, False, is_wide)),), math.prod(space.shape))


def _numbers(space: spaces.Box, scaled: bool, is_wide: bool) -> _Flatten:
    high = np.asarray(space.high, np.float32).ravel()
    if not scaled or space.dtype != np.uint8 or not high.size or high.max() <= 1:
        return _Flatten(space.shape, is_wide and np.result_type(space.dtype, np.float32) == np.float64)
    return _Flatten(space.shape, scale=(1 / high.clip(1)).astype(np.float32))


_FEW = 5000  # an array of three dimensions with more numbers is an image in a form that no network here reads


def _image(path: Path, space: spaces.Space[Any]) -> ImageLeaf | None:
    """Returns what a space is as an image; None where it is none."""
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or len(space.shape) != 3:
        return None
    height, width, last = space.shape
    is_first = last > 4 and (min(width, last) >= NATURE_PIXELS or last >= min(height, width))
    image = ImageLeaf(path, (height, width, last), not is_first)
    least = _LEAST_PIXELS if space.high.min() == 255 else NATURE_PIXELS  # few numbers up to 3 or 10 are no colours
    return image if image.pixels >= least else None


def has_images(space: spaces.Space[Any]) -> bool:
    """Whether a part of an observation space is an image."""
    return any(_image(path, leaf) is not None for path, leaf in leaf_spaces(space))


def _is_large(image: ImageLeaf | None) -> bool:
    return image is not None and image.pixels >= NATURE_PIXELS


def leaf_spaces(space: spaces.Space[Any], path: Path = ()) -> Iterable[tuple[Path, spaces.Space[Any]]]:
    """Yields the parts of a space that are no Dict or Tuple, each with the keys and places that lead to it."""
    match space:
        case spaces.Dict() | spaces.Tuple():
            parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
            for key, part in parts:
                yield from leaf_spaces(part, (*path, key))
        case _:
            yield path, space
