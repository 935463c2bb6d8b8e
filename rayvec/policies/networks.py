"""Torch modules for actors and critics, and how any module acts."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from rayvec.data import Tree, tree_leaves, tree_map
from rayvec.policies.actors import MLPActor, split_weights
from rayvec.policies.cnns import SQRT2, initialised, make_cnn
from rayvec.policies.distributions import Distribution, make_distribution
from rayvec.policies.encoders import Encoder, at, make_encoder, normalized
from rayvec.policies.masks import allowed, masked

PAGE_LOCKED = frozenset({"cuda"})
"""Devices that arrays reach through page-locked memory."""

_IMAGES_AT_ONCE = 2048
"""How many images are evaluated in one call without a gradient; the first layer outputs 50 kB for each."""


_LEAST_FOR_SIGMOID = 1 << 14
"""How many numbers a tanh must have to be quicker by the sigmoid: 256 rows of 64."""


class Tanh(nn.Module):
    """tanh; of many float32 numbers on a CPU as ``2 / (1 + exp(-2 x)) - 1``, which is right to 2e-7."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the tanh of each number."""
        is_small = not torch.compiler.is_compiling() and x.numel() < _LEAST_FOR_SIGMOID
        if is_small or x.is_cuda or x.dtype != torch.float32:
            return x.tanh()
        return torch.sigmoid_(2 * x).mul(2).sub_(1)  # in place saves memory to write


Activation = Literal["tanh", "relu", "elu", "gelu"]
_ACTIVATIONS: dict[Activation, Callable[[], nn.Module]] = {
    "tanh": Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": lambda: nn.GELU("tanh"),
}


class ActorCriticModule(nn.Module):
    """What learners of an actor-critic train: a module that encodes observations, acts on them and values them.

    *Rows* are encoded observations: a tree of tensors ``[..., *shape]``. With action masks they are a pair: what the
    network reads, and which parameters of the distribution the mask leaves as they are, ``bool [..., P]``. A subclass
    has `_read`, `_params` and `_value`.

    Attributes:
        encoder: From observations to rows of numbers.
        distribution: Of actions.
        is_masked: Whether observations have an action mask, which the encoder leaves out.
        cnns: Networks that may read images: where there are some, values are computed for few observations at once.
        obs_mean: Mean of the numbers, ``float64 [D]``, which the learner sets; None leaves the numbers as they are.
        obs_scale: By what the numbers less their mean are multiplied, ``[D]``.
    """

    is_masked = False
    encoder: Encoder
    distribution: Any
    cnns: nn.ModuleList | tuple[nn.Module, ...]
    obs_mean: Tensor | None
    obs_scale: Tensor | None

    def _register_statistics(self, count: int) -> None:
        """Adds the buffers that normalise so many numbers; none for 0."""
        self.register_buffer("obs_mean", torch.zeros(count, dtype=torch.float64) if count else None)
        self.register_buffer("obs_scale", torch.ones(count) if count else None)

    def _numbers(self, obs: Tree) -> Tensor:
        """Returns the numbers of observations, ``[..., D]``, normalised, on the device of the parameters."""
        like = next(self.parameters())
        numbers = to_device(self.encoder(obs), like.device)
        if self.obs_mean is not None:
            numbers = normalized(numbers, self.obs_mean, self.obs_scale)
        return numbers.to(like.dtype)

    def encode(self, obs: Tree) -> Tree:
        """Returns rows for an observation tree of ``[..., *obs_shape]``, of arrays or tensors."""
        rows = self._read(obs)
        if not self.is_masked:
            return rows
        return rows, to_device(allowed(obs, self.distribution), next(self.parameters()).device)

    def split(self, rows: Tree) -> tuple[Tree, Tensor | None]:
        """Returns what the network reads of rows, and what their mask allows; None for a network without masks."""
        return rows if self.is_masked else (rows, None)

    def forward(self, rows: Tree) -> tuple[Tensor, Tensor]:
        """Returns the distribution's parameters ``[..., P]`` and values ``[...]``."""
        read, mask = self.split(rows)
        features = self._features(read)
        params = self._params_of(features)
        return params if mask is None else masked(params, mask), self._value_of(features)

    def action_parameters(self, rows: Tree) -> Tensor:
        """Returns the distribution's parameters ``[..., P]``."""
        read, mask = self.split(rows)
        params = self._params_of(self._features(read))
        return params if mask is None else masked(params, mask)

    def value(self, rows: Tree) -> Tensor:
        """Returns values ``[...]``."""
        return self._value_of(self._features(self.split(rows)[0]))

    @torch.no_grad()
    def in_slices(self, function: Callable[[Tree], Tensor], rows: Tree, width: int = 1) -> Tensor:
        """Calls a function on a few images at a time, to bound its memory. Vectors go in one call.

        Args:
            function: From rows to a tensor.
            rows: Encoded observations, tree of ``[T, ...]``.
            width: How many observations each of the T is.
        """
        if not self.cnns:
            return function(rows)
        at_once = max(1, _IMAGES_AT_ONCE // max(1, width))
        starts = range(0, max(1, len(next(tree_leaves(rows)))), at_once)
        parts = (tree_map(lambda leaf: leaf[start : start + at_once], rows) for start in starts)  # noqa: B023
        return torch.cat([*map(function, parts)])

    def _read(self, obs: Tree) -> Tree:
        """Returns what the network reads of observations."""
        raise NotImplementedError

    def _features(self, rows: Tree) -> Any:
        """Returns what parameters and values are computed from, for what the network reads; here the two themselves."""
        raise NotImplementedError

    def _params_of(self, features: Any) -> Tensor:
        params: Tensor = features[0]
        return params

    def _value_of(self, features: Any) -> Tensor:
        value: Tensor = features[1]
        return value

    def make_actor(self) -> MLPActor | ModuleActor:
        """Returns the actor with the present weights."""
        return EncodedActor(self, self.distribution)


class ActorCritic(ActorCriticModule):
    """Two networks: the actor outputs the parameters of a distribution, the critic values.

    Two MLPs read the numbers of an observation. They share all hidden layers if `shared_trunk` is set, else
    nothing. Each image is read by a CNN that both share; the MLPs read its features, joined with the numbers.
    Where there are images alone, the MLPs have no hidden layers.

    Weights are orthogonal, with a gain of sqrt(2) for hidden layers, 0.01 for the actor's last, so that it starts
    near the uniform or standard normal distribution, and 1 for the critic's last; biases are 0 (Andrychowicz et
    al., "What matters in on-policy reinforcement learning?", ICLR 2021). The standard deviation of a Gaussian does
    not depend on the observation.

    *Rows* are encoded observations: ``[..., D]`` numbers, or ``uint8 [..., *shape]`` images, or, where there are
    several of these, a tuple: numbers first, then the images.

    Args:
        observation_space: Of one environment.
        action_space: Of one environment.
        hidden_sizes: Widths of the hidden layers, the same for actor and critic.
        masked: Whether the network leaves out the observation's action mask and applies it.
        scaled: Whether finite bounds of a Box of actions are -1 and 1 for the network.
        shared_trunk: Whether actor and critic share their hidden layers.
        normalize_obs: Whether numbers are shifted and scaled by ``obs_mean`` and ``obs_scale``, buffers ``[D]`` that
            the learner sets and that travel with the weights, and clipped to ±10.
        activation: Function after each hidden layer of the MLPs: tanh, ReLU, ELU, or GELU in its approximation by tanh.
        layer_norm: Whether each hidden layer of the MLPs is normalised before its activation.
        cnn: Which network reads images; see :func:`rayvec.policies.cnns.make_cnn`.
        log_std_init: Logarithm of the standard deviation of a Gaussian at the start.
        seed: Of the initial weights; torch's own generator is neither read nor moved.

    Raises:
        ConfigError: There is no encoder for the observations, or no distribution for the actions.
    """

    log_std: nn.Parameter | None

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        hidden_sizes: Sequence[int] = (64, 64),
        *,
        masked: bool = False,
        scaled: bool = False,
        shared_trunk: bool = False,
        normalize_obs: bool = False,
        activation: Activation = "tanh",
        layer_norm: bool = False,
        cnn: Literal["nature", "impala"] = "nature",
        log_std_init: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        encoder = make_encoder(observation_space, images=True, scaled=True, masked=masked, is_wide=normalize_obs)
        distribution = make_distribution(action_space, scaled)
        self.encoder, self.distribution, self.is_masked = encoder, distribution, masked
        num_outputs = distribution.num_params - distribution.num_constants
        self._numpy_activation = activation if activation in ("tanh", "relu") and not layer_norm else None
        self.cnns = nn.ModuleList(make_cnn(cnn, image, generator) for image in encoder.images)
        width = encoder.num_features + sum(net.num_features for net in self.cnns)  # type: ignore[misc]
        hidden = tuple(hidden_sizes) if encoder.num_features else ()

        def after(units: int) -> list[nn.Module]:
            return [*([nn.LayerNorm(units)] if layer_norm else []), _ACTIVATIONS[activation]()]

        self.trunk = nn.Sequential()
        if shared_trunk and hidden:
            self.trunk = nn.Sequential(*_mlp((width, *hidden), SQRT2, generator, after), *after(hidden[-1]))
            width, hidden = hidden[-1], ()
        self.actor = _mlp((width, *hidden, num_outputs), 0.01, generator, after)
        self.critic = _mlp((width, *hidden, 1), 1.0, generator, after)
        constants = torch.full((distribution.num_constants,), log_std_init)
        self.log_std = nn.Parameter(constants) if len(constants) else None
        self._register_statistics(encoder.num_features if normalize_obs else 0)

    def _read(self, obs: Tree) -> Tree:
        rows = [self._numbers(obs)] if self.encoder.num_features else []
        for image in self.encoder.images:
            rows.append(to_device(at(obs, image.path), next(self.parameters()).device))
        return rows[0] if len(rows) == 1 else tuple(rows)

    def _features(self, rows: Tree) -> Tensor:
        """Returns what actor and critic share, ``[..., F]``."""
        parts = [*rows] if isinstance(rows, tuple) else [rows]
        for k, cnn in enumerate(self.cnns, len(parts) - len(self.cnns)):
            parts[k] = cnn(parts[k])
        features: Tensor = self.trunk(parts[0] if len(parts) == 1 else torch.cat(parts, -1))
        return features

    def _params_of(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.actor(features)
        if self.log_std is None:
            return outputs
        return torch.cat([outputs, self.log_std.expand(*outputs.shape[:-1], len(self.log_std))], -1)

    def _value_of(self, features: Tensor) -> Tensor:
        values: Tensor = self.critic(features)
        return values.squeeze(-1)

    def make_actor(self) -> MLPActor | ModuleActor:
        """Returns the actor with the present weights: without torch for numbers, tanh or ReLU, and no layer norms."""
        if self.cnns or self._numpy_activation is None:
            return super().make_actor()
        return numpy_actor(self, ("trunk.", "actor."), self._numpy_activation)


def numpy_actor(module: ActorCriticModule, prefixes: tuple[str, ...], activation: Any) -> MLPActor:
    """Returns the actor of a module in NumPy: its linear layers whose names begin with one of the prefixes."""
    named = module.named_modules()
    layers = tuple(name for name, layer in named if isinstance(layer, nn.Linear) and name.startswith(prefixes))
    shapes = {name: shape for name, _, shape in _parts(module)}
    actor = MLPActor(module.encoder, module.distribution, shapes, layers, activation)
    actor.load_weights(flat_weights(module))
    return actor


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
        load_flat_weights(self._module, weights)


class EncodedActor(ModuleActor):
    """Acts with a module that encodes observations, through torch: one that reads images, your own, or on a GPU.

    A mask is applied by the module, too.
    """

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


def flat_weights(module: nn.Module) -> NDArray[np.float32]:
    """Returns a copy of a module's weights as one ``float32`` vector: parameters in their order, then buffers.

    A buffer in float64, such as the mean of observations, is there twice: rounded, and then what rounding took away.
    """
    parts = []
    for _, part, shape in _parts(module):
        whole = part.detach().reshape(-1)
        parts.append(whole.float())
        if len(shape) > part.ndim:
            parts.append((whole - parts[-1]).float())
    return torch.cat(parts).cpu().numpy()


def load_flat_weights(module: nn.Module, weights: NDArray[np.float32]) -> None:
    """Copies what `flat_weights` returned into a module.

    Raises:
        ConfigError: The vector is of another length than the module's parameters and buffers.
    """
    pieces = split_weights(weights, {name: shape for name, _, shape in _parts(module)})
    with torch.no_grad():
        for name, part, shape in _parts(module):
            piece = torch.from_numpy(pieces[name])
            part.copy_(piece.to(part.dtype).sum(0) if len(shape) > part.ndim else piece)


def _parts(module: nn.Module) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    """Yields each part of the flat vector of a module's weights, with its name and its shape there.

    That of a buffer in float64 has a leading 2.
    """
    yield from ((name, part, tuple(part.shape)) for name, part in module.named_parameters())
    for name, part in module.named_buffers():
        yield name, part, ((2, *part.shape) if part.dtype == torch.float64 else tuple(part.shape))


def to_tensor(array: NDArray[Any]) -> Tensor:
    """Returns a tensor of the array's dtype, but float64 as float32; it shares memory unless that is read-only."""
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def to_device(part: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Returns an array or a tensor on a device, in its own dtype or another.

    To a GPU it goes through page-locked memory: the copy runs beside what the host does next.
    """
    if isinstance(part, np.ndarray):
        part = torch.from_numpy(part if part.flags.writeable else part.copy())
    tensor: Tensor = part.to(dtype or part.dtype)
    if device.type in PAGE_LOCKED and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _mlp(
    sizes: Sequence[int], last_gain: float, generator: torch.Generator, after: Callable[[int], list[nn.Module]]
) -> nn.Sequential:
    """Returns linear layers; `after` returns what follows each but the last, given its units."""
    modules: list[nn.Module] = []
    for i, (ins, outs) in enumerate(itertools.pairwise(sizes)):
        is_last = i == len(sizes) - 2
        layer = initialised(nn.Linear(ins, outs, device="meta"), last_gain if is_last else SQRT2, generator)
        modules += [layer] if is_last else [layer, *after(outs)]
    return nn.Sequential(*modules)
