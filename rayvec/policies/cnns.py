"""Networks that read images."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from rayvec.policies.encoders import NATURE_PIXELS, ImageLeaf

__all__ = ["ImageNet", "ImpalaCNN", "NatureCNN", "SmallCNN", "initialised", "make_cnn"]

SQRT2 = math.sqrt(2)


class ImageNet(nn.Module):
    """Reads images of bytes in either order of axes; a subclass sets `layers`.

    Args:
        image: Form of the images.

    Attributes:
        num_features: Numbers that it returns for each image.
        layers: From ``[B, channels, height, width]``, in [0, 1], to ``[B, num_features]``.
        channels: Of the images.
        size: Their height and width.
    """

    num_features = 256
    layers: nn.Sequential

    def __init__(self, image: ImageLeaf) -> None:
        super().__init__()
        self._channels_last = image.channels_last
        channels, height, width = np.roll(image.shape, 1).tolist() if image.channels_last else image.shape
        self.channels, self.size = int(channels), (int(height), int(width))

    def forward(self, images: Tensor) -> Tensor:
        """Returns ``[..., num_features]`` for ``uint8 [..., *shape]``."""
        lead = images.shape[:-3]
        images = images.reshape(-1, *images.shape[-3:])
        if self._channels_last:
            images = images.movedim(-1, 1)
        device = images.device.type  # channels last is the fastest on CPUs, and on GPUs in bfloat16
        is_last = device == "cpu" or (device == "cuda" and torch.is_autocast_enabled(device))
        layout = torch.channels_last if is_last else torch.preserve_format
        numbers = images.to(next(self.parameters()).dtype, memory_format=layout)
        features: Tensor = self.layers(numbers / 255)
        return features.view(*lead, self.num_features)


class NatureCNN(ImageNet):
    """Three convolutions and a layer of 512 units, with ReLU (Mnih et al., Nature 2015, "Model architecture").

    Args:
        image: Form of the images.
        generator: Of the initial weights, which are orthogonal with a gain of sqrt(2).
    """

    num_features = 512

    def __init__(self, image: ImageLeaf, generator: torch.Generator) -> None:
        super().__init__(image)
        self.layers = _convolutions(self, ((32, 8, 4, 0), (64, 4, 2, 0), (64, 3, 1, 0)), generator)


class SmallCNN(ImageNet):
    """Three convolutions of 3x3 and a layer of 256 units, with ReLU, for images below 36 pixels.

    Args:
        image: Form of the images.
        generator: Of the initial weights, which are orthogonal with a gain of sqrt(2).
    """

    def __init__(self, image: ImageLeaf, generator: torch.Generator) -> None:
        super().__init__(image)
        self.layers = _convolutions(self, ((32, 3, 2, 1), (64, 3, 2, 1), (64, 3, 1, 1)), generator)


class ImpalaCNN(ImageNet):
    """Three blocks, each with two residual parts, and a layer of 256 units (Espeholt et al., 2018, figure 3, right).

    Args:
        image: Form of the images, of any size.
        generator: Of the initial weights, which are orthogonal with a gain of sqrt(2).
    """

    def __init__(self, image: ImageLeaf, generator: torch.Generator) -> None:
        super().__init__(image)
        channels, (height, width) = self.channels, self.size
        layers: list[nn.Module] = []
        for outs in (16, 32, 32):
            layers += [_convolution(channels, outs, generator), nn.MaxPool2d(3, 2, 1)]
            layers += [_Residual(outs, generator), _Residual(outs, generator)]
            channels, height, width = outs, -(-height // 2), -(-width // 2)
        linear = nn.Linear(channels * height * width, self.num_features, device="meta")
        self.layers = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), initialised(linear, SQRT2, generator), nn.ReLU())


class _Residual(nn.Module):
    """Adds two convolutions, each after a ReLU, to its input."""

    def __init__(self, channels: int, generator: torch.Generator) -> None:
        super().__init__()
        first, second = (_convolution(channels, channels, generator) for _ in range(2))
        self.layers = nn.Sequential(nn.ReLU(), first, nn.ReLU(), second)

    def forward(self, images: Tensor) -> Tensor:
        change: Tensor = self.layers(images)
        return images + change


def make_cnn(kind: Literal["nature", "impala"], image: ImageLeaf, generator: torch.Generator) -> ImageNet:
    """Returns the network for images of a form; "nature" is a :class:`SmallCNN` where they are small."""
    if kind == "impala":
        return ImpalaCNN(image, generator)
    return (SmallCNN if image.pixels < NATURE_PIXELS else NatureCNN)(image, generator)


def initialised(layer: nn.Module, gain: float, generator: torch.Generator) -> nn.Module:
    """Returns a layer, given without values, with orthogonal weights and biases of 0."""
    for name, parameter in list(layer.named_parameters()):  # layer.to_empty() would import sympy for half a second
        setattr(layer, name, nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")))
    nn.init.orthogonal_(layer.get_parameter("weight"), gain, generator)
    nn.init.zeros_(layer.get_parameter("bias"))
    return layer


def _convolution(channels: int, outs: int, generator: torch.Generator) -> nn.Module:
    return initialised(nn.Conv2d(channels, outs, 3, 1, 1, device="meta"), SQRT2, generator)


def _convolutions(
    net: ImageNet, forms: tuple[tuple[int, int, int, int], ...], generator: torch.Generator
) -> nn.Sequential:
    """Returns convolutions with ReLU and a last layer; `forms` are channels, kernel, stride and padding of each."""
    channels, (height, width) = net.channels, net.size
    layers: list[nn.Module] = []
    for outs, kernel, stride, padding in forms:
        convolution = nn.Conv2d(channels, outs, kernel, stride, padding, device="meta")
        layers += [initialised(convolution, SQRT2, generator), nn.ReLU()]
        channels = outs
        height, width = ((side + 2 * padding - kernel) // stride + 1 for side in (height, width))
    linear = nn.Linear(channels * height * width, net.num_features, device="meta")
    return nn.Sequential(*layers, nn.Flatten(), initialised(linear, SQRT2, generator), nn.ReLU())
