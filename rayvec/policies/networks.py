"""Torch modules for actors and critics, and how any module acts."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from rayvec.data import Tree, tree_map
from rayvec.policies.actors import Actor, MLPActor, check_length
from rayvec.policies.distributions import Distribution, Gaussian, make_distribution
from rayvec.policies.encoders import OBS_CLIP, Encoder, ImageLeaf, make_encoder

__all__ = [
    "ActorCritic",
    "ModuleActor",
    "NatureCNN",
    "copy_to_cpu",
    "flat_weights",
    "linear_places",
    "make_actor_critic",
]

_SQRT2 = math.sqrt(2)


class NatureCNN(nn.Module):
    """Three convolutions and a layer of 512 units, with ReLU (Mnih et al., Nature 2015, "Model architecture").

    Args:
        image: Form of the images.
        generator: Of the initial weights, which are orthogonal with a gain of sqrt(2).
    """

    num_features = 512

    def __init__(self, image: ImageLeaf, generator: torch.Generator) -> None:
        super().__init__()
        self._channels_last = image.channels_last
        channels, height, width = np.roll(image.shape, 1) if image.channels_last else image.shape
        layers: list[nn.Module] = []
        for outs, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            layers += [_initialised(nn.Conv2d(int(channels), outs, kernel, stride, device="meta"), _SQRT2, generator)]
            layers += [nn.ReLU()]
            channels, height, width = outs, (height - kernel) // stride + 1, (width - kernel) // stride + 1
        linear = nn.Linear(int(channels * height * width), self.num_features, device="meta")
        self.layers = nn.Sequential(*layers, nn.Flatten(), _initialised(linear, _SQRT2, generator), nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        """Returns ``[..., 512]`` for ``uint8 [..., *shape]``."""
        lead = images.shape[:-3]
        images = images.reshape(-1, *images.shape[-3:])
        if self._channels_last:
            images = images.movedim(-1, 1)
        layout = torch.channels_last if images.device.type == "cpu" else torch.preserve_format  # the fastest on CPUs
        numbers = images.to(next(self.parameters()).dtype, memory_format=layout)
        features: Tensor = self.layers(numbers / 255)
        return features.view(*lead, self.num_features)


class ActorCritic(nn.Module):
    """Two networks: the actor outputs the parameters of a distribution, the critic values.

    Two MLPs with tanh read the numbers of an observation. They share all hidden layers if `shared_trunk` is set, else
    nothing. Each image is read by a `NatureCNN` that both share; the MLPs read its features, joined with the numbers.
    Where there are images alone, the MLPs have no hidden layers.

    Weights are orthogonal, with a gain of sqrt(2) for hidden layers, 0.01 for the actor's last, so that it starts
    near the uniform or standard normal distribution, and 1 for the critic's last; biases are 0 (Andrychowicz et
    al., "What matters in on-policy reinforcement learning?", ICLR 2021). The standard deviation of a Gaussian does
    not depend on the observation and starts at 1.

    *Rows* are encoded observations: ``[..., D]`` numbers, or ``uint8 [..., *shape]`` images, or, where there are
    several of these, a tuple: numbers first, then the images.

    Args:
        encoder: From observations to rows.
        distribution: Of actions.
        hidden_sizes: Widths of the hidden layers, the same for actor and critic.
        shared_trunk: Whether actor and critic share them.
        normalize_obs: Whether numbers are shifted and scaled by ``obs_mean`` and ``obs_scale``, buffers ``[D]`` that
            the learner sets and that travel with the weights, and clipped to ±10.
        seed: Of the initial weights; torch's own generator is neither read nor moved.
    """

    log_std: nn.Parameter | None
    obs_mean: Tensor | None
    obs_scale: Tensor | None

    def __init__(
        self,
        encoder: Encoder,
        distribution: Distribution,
        hidden_sizes: Sequence[int] = (64, 64),
        *,
        shared_trunk: bool = False,
        normalize_obs: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.encoder, self.distribution = encoder, distribution
        is_gaussian = isinstance(distribution, Gaussian)
        num_outputs = distribution.num_params // 2 if is_gaussian else distribution.num_params
        self.cnns = nn.ModuleList(NatureCNN(image, generator) for image in encoder.images)
        width = encoder.num_features + len(self.cnns) * NatureCNN.num_features
        hidden = tuple(hidden_sizes) if encoder.num_features else ()
        self.trunk = nn.Sequential()
        if shared_trunk and hidden:
            self.trunk = nn.Sequential(*_mlp((width, *hidden), _SQRT2, generator), nn.Tanh())
            width, hidden = hidden[-1], ()
        self.actor = _mlp((width, *hidden, num_outputs), 0.01, generator)
        self.critic = _mlp((width, *hidden, 1), 1.0, generator)
        self.log_std = nn.Parameter(torch.zeros(num_outputs)) if is_gaussian else None
        numbers = torch.zeros(encoder.num_features) if normalize_obs and encoder.num_features else None
        self.register_buffer("obs_mean", numbers)
        self.register_buffer("obs_scale", None if numbers is None else torch.ones_like(numbers))

    def encode(self, obs: Tree) -> Tree:
        """Returns rows for an observation tree of ``[..., *obs_shape]``, on the device of the parameters."""
        like = next(self.parameters())
        rows = [to_tensor(images).to(like.device) for images in self.encoder.image_arrays(obs)]
        if self.encoder.num_features:
            rows.insert(0, self._normalized(to_tensor(self.encoder(obs)).to(like)))
        return rows[0] if len(rows) == 1 else tuple(rows)

    def _normalized(self, numbers: Tensor) -> Tensor:
        if self.obs_mean is None or self.obs_scale is None:
            return numbers
        return ((numbers - self.obs_mean) * self.obs_scale).clamp(-OBS_CLIP, OBS_CLIP)

    def forward(self, rows: Tree) -> tuple[Tensor, Tensor]:
        """Returns the distribution's parameters ``[..., P]`` and values ``[...]``."""
        features = self._features(rows)
        return self._outputs(features), self._value(features)

    def action_parameters(self, rows: Tree) -> Tensor:
        """Returns the distribution's parameters ``[..., P]``."""
        return self._outputs(self._features(rows))

    def value(self, rows: Tree) -> Tensor:
        """Returns values ``[...]``."""
        return self._value(self._features(rows))

    def _features(self, rows: Tree) -> Tensor:
        """Returns what actor and critic share, ``[..., F]``."""
        parts = rows if isinstance(rows, tuple) else (rows,)
        images = parts[len(parts) - len(self.cnns) :]
        seen = [cnn(image) for cnn, image in zip(self.cnns, images, strict=True)]
        joined = [*parts[: len(parts) - len(self.cnns)], *seen]
        features: Tensor = self.trunk(joined[0] if len(joined) == 1 else torch.cat(joined, -1))
        return features

    def _outputs(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.actor(features)
        if self.log_std is None:
            return outputs
        return torch.cat([outputs, self.log_std.expand_as(outputs)], -1)

    def _value(self, features: Tensor) -> Tensor:
        values: Tensor = self.critic(features)
        return values.squeeze(-1)

    def make_actor(self) -> Actor:
        """Returns the actor with the present weights: without torch, unless there are images."""
        if self.cnns:
            return EncodedActor(self, self.distribution)
        starts, stop = _starts(self)
        constants = (
            slice(starts["log_std"], starts["log_std"] + len(self.log_std)) if self.log_std is not None else slice(0)
        )
        actor = MLPActor(
            self.encoder,
            self.distribution,
            layers=linear_places(self, ("trunk.", "actor.")),
            num_weights=stop,
            constants=constants,
            normalizer=(starts["obs_mean"], starts["obs_scale"]) if "obs_mean" in starts else None,
        )
        actor.load_weights(flat_weights(self))
        return actor


def make_actor_critic(
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    hidden_sizes: Sequence[int] = (64, 64),
    *,
    shared_trunk: bool = False,
    normalize_obs: bool = False,
    seed: int = 0,
) -> ActorCritic:
    """Returns an actor-critic for the spaces of one environment.

    Raises:
        ConfigError: There is no encoder for the observations, or no distribution for the actions.
    """
    return ActorCritic(
        make_encoder(observation_space, images=True),
        make_distribution(action_space),
        hidden_sizes,
        shared_trunk=shared_trunk,
        normalize_obs=normalize_obs,
        seed=seed,
    )


class ModuleActor:
    """Acts with any module, through torch but without autograd.

    The number of torch's threads is left alone: a pool starts its worker processes with one.

    Args:
        module: From observations (tree of tensors ``[k, *obs_shape]``) to parameters ``[k, P]``; a copy is kept, in
            evaluation mode.
        distribution: Of actions.
        device: Where to compute; the copy moves there when it is first called.
    """

    def __init__(self, module: nn.Module, distribution: Distribution, device: str = "cpu") -> None:
        self.distribution = distribution
        self._device = device
        self._is_placed = device == "cpu"
        self._module = copy_to_cpu(module).requires_grad_(False).eval()

    def __call__(self, obs: Tree) -> NDArray[np.float32]:
        """Returns parameters ``float32 [k, P]``."""
        if not self._is_placed:
            self._module.to(self._device)
            self._is_placed = True
        with torch.inference_mode():
            return self._evaluate(obs).float().cpu().numpy()

    def _evaluate(self, obs: Tree) -> Tensor:
        params: Tensor = self._module(tree_map(lambda leaf: to_tensor(leaf).to(self._device), obs))
        return params

    def load_weights(self, weights: NDArray[np.float32]) -> None:
        """Copies one flat vector into the module: its parameters in their order, then its buffers."""
        parts = list(_parts(self._module))
        check_length(weights, sum(part.numel() for part in parts))
        start = 0
        for part in parts:
            values = weights[start : start + part.numel()]
            part.copy_(torch.tensor(values).view_as(part))
            start += len(values)


class EncodedActor(ModuleActor):
    """Acts with a module that encodes observations, through torch: an actor-critic that reads images, or on a GPU."""

    _module: Any

    def _evaluate(self, obs: Tree) -> Tensor:
        params: Tensor = self._module.action_parameters(self._module.encode(obs))
        return params


def copy_to_cpu(module: nn.Module) -> Any:
    """Returns a copy of a module on the CPU, without gradients."""
    copied = copy.deepcopy(module).cpu()
    for parameter in copied.parameters():
        parameter.grad = None
        parameter.data = parameter.data.clone()  # pickling a view would pickle the whole buffer behind it
    return copied


def linear_places(module: nn.Module, prefixes: Sequence[str] = ("",)) -> tuple[tuple[int, int, int, int], ...]:
    """Returns where the linear layers lie in the flat vector of a module's weights; see `MLPActor.layers`."""
    starts, _ = _starts(module)
    return tuple(
        (starts[f"{name}.weight"], starts[f"{name}.bias"], layer.out_features, layer.in_features)
        for prefix in prefixes
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and name.startswith(prefix)
    )


def flat_weights(module: nn.Module) -> NDArray[np.float32]:
    """Returns a copy of a module's weights as one ``float32`` vector: parameters in their order, then buffers."""
    flat = torch.cat([part.detach().reshape(-1).float() for part in _parts(module)])
    return flat.cpu().numpy()


def _parts(module: nn.Module) -> Iterator[Tensor]:
    return itertools.chain(module.parameters(), module.buffers())


def _starts(module: nn.Module) -> tuple[dict[str, int], int]:
    """Returns where each part begins in the flat vector of a module's weights, by name, and where it ends."""
    sizes = {name: part.numel() for name, part in itertools.chain(module.named_parameters(), module.named_buffers())}
    ends = list(itertools.accumulate([0, *sizes.values()]))
    return dict(zip(sizes, ends, strict=False)), ends[-1]


def to_tensor(array: NDArray[Any]) -> Tensor:
    """Returns a tensor of the array's dtype, but float64 as float32; it shares memory unless that is read-only."""
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def _mlp(sizes: Sequence[int], last_gain: float, generator: torch.Generator) -> nn.Sequential:
    modules: list[nn.Module] = []
    for i, (ins, outs) in enumerate(itertools.pairwise(sizes)):
        is_last = i == len(sizes) - 2
        layer = _initialised(nn.Linear(ins, outs, device="meta"), last_gain if is_last else _SQRT2, generator)
        modules += [layer] if is_last else [layer, nn.Tanh()]
    return nn.Sequential(*modules)


def _initialised(layer: nn.Module, gain: float, generator: torch.Generator) -> nn.Module:
    """Returns a layer, given without values, with orthogonal weights and biases of 0."""
    for name, parameter in list(layer.named_parameters()):  # layer.to_empty() would import sympy for half a second
        setattr(layer, name, nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")))
    nn.init.orthogonal_(layer.get_parameter("weight"), gain, generator)
    nn.init.zeros_(layer.get_parameter("bias"))
    return layer
