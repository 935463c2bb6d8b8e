"""Networks that read images."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from rayvec.policies.encoders import NATURE_PIXELS, ImageLeaf

SQRT2 = math.sqrt(2)


class ImageNet(nn.Module):
    """Reads images of bytes in either order of axes.

    Args:
        image: Form of the images.
        layers: From ``[B, channels, height, width]``, in [0, 1], to ``[B, num_features]``.
        num_features: Numbers that it returns for each image.
    """

    def __init__(self, image: ImageLeaf, layers: nn.Sequential, num_features: int) -> None:
        super().__init__()
        self._channels_last, self.layers, self.num_features = image.channels_last, layers, num_features

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
    """Returns the network for images of a form, with orthogonal weights and a gain of sqrt(2).

    "nature" has three convolutions and a layer of 512 units, with ReLU (Mnih et al., Nature 2015, "Model
    architecture"); for images below 36 pixels three convolutions of 3x3 and a layer of 256 units. "impala" has three
    blocks, each with two residual parts, and a layer of 256 units (Espeholt et al., 2018, figure 3, right).
    """
    channels, height, width = np.roll(image.shape, 1).tolist() if image.channels_last else image.shape
    layers: list[nn.Module] = []
    if kind == "impala":
        for outs in (16, 32, 32):
            layers += [_convolution(channels, outs, generator), nn.MaxPool2d(3, 2, 1)]
            layers += [_Residual(outs, generator), _Residual(outs, generator)]
            channels, height, width = outs, -(-height // 2), -(-width // 2)
        layers.append(nn.ReLU())
    else:
        small, large = ((32, 3, 2, 1), (64, 3, 2, 1), (64, 3, 1, 1)), ((32, 8, 4, 0), (64, 4, 2, 0), (64, 3, 1, 0))
        for outs, kernel, stride, padding in small if image.pixels < NATURE_PIXELS else large:
            layers += [_convolution(channels, outs, generator, kernel, stride, padding), nn.ReLU()]
            channels = outs
            height, width = ((side + 2 * padding - kernel) // stride + 1 for side in (height, width))
    num_features = 512 if kind == "nature" and image.pixels >= NATURE_PIXELS else 256
    linear = nn.Linear(channels * height * width, num_features, device="meta")
    return ImageNet(
        image, nn.Sequential(*layers, nn.Flatten(), initialised(linear, SQRT2, generator), nn.ReLU()), num_features
    )


def initialised(layer: nn.Module, gain: float, generator: torch.Generator) -> nn.Module:
    """Returns a layer, given without values, with orthogonal weights and biases of 0."""
    for name, parameter in list(layer.named_parameters()):  # layer.to_empty() would import sympy for half a second
        setattr(layer, name, nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")))
    nn.init.orthogonal_(layer.get_parameter("weight"), gain, generator)
    nn.init.zeros_(layer.get_parameter("bias"))
    return layer


def _convolution(
    channels: int, outs: int, generator: torch.Generator, kernel: int = 3, stride: int = 1, padding: int = 1
) -> nn.Module:
    return initialised(nn.Conv2d(channels, outs, kernel, stride, padding, device="meta"), SQRT2, generator)
