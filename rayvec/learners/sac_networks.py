"""The networks of soft actor-critic: the default ones, or your own.

A network reads *numbers*, ``float32 [B, *obs_shape]``. *Rows* are what the replay stores of observations: numbers, or
with action masks ``[B, D + P]``, the mask last.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from rayvec.config.references import resolve
from rayvec.data import Tree, tree_map
from rayvec.errors import ConfigError
from rayvec.policies.actors import Actor, MaskedActor, MLPActor
from rayvec.policies.distributions import (
    NOT_ALLOWED,
    Categorical,
    Distribution,
    TanhGaussian,
    make_tanh_gaussian,
)
from rayvec.policies.encoders import make_encoder
from rayvec.policies.masks import has_mask, seen, without_mask
from rayvec.policies.networks import ModuleActor, copy_to_cpu, flat_weights, layer_places, to_tensor
from rayvec.policies.own_network import build_network, check_module, check_output, outputs_of, sample_batch, seeded
from rayvec.policies.precision import Precision, autocast
from rayvec.wrappers import MASK_KEY

if TYPE_CHECKING:
    from rayvec.config import SACConfig

__all__ = ["Critics", "Ensemble", "OwnSACActor", "SACActor", "make_networks", "make_sac_distribution"]


class SACActor(nn.Module):
    """The actor: a network whose outputs are the parameters of a distribution. The default one acts without torch.

    Args:
        net: The network.
        encoder: From observations to numbers, ``[..., *shape]``; it leaves an action mask out.
        distribution: Of actions.
        shape: Of the numbers of one observation.
        is_masked: Whether observations have an action mask.

    Attributes:
        precision: In which it computes.
    """

    precision: Precision = "float32"

    def __init__(
        self,
        net: nn.Module,
        encoder: Callable[[Tree], NDArray[np.float32]],
        distribution: Distribution,
        shape: tuple[int, ...],
        is_masked: bool,
    ) -> None:
        super().__init__()
        self.net, self.encoder, self.distribution = net, encoder, distribution
        self.shape, self.is_masked = shape, is_masked

    def rows(self, obs: Tree) -> NDArray[np.float32]:
        """Returns what a replay stores, ``[..., *shape]``; with action masks flat, the mask last, ``[..., D + P]``."""
        numbers = self.encoder(obs)
        if not self.is_masked:
            return numbers
        mask = np.asarray(obs[MASK_KEY]) != 0
        flat = numbers.reshape(*mask.shape[:-1], math.prod(self.shape))
        return np.concatenate([flat, mask.astype(np.float32)], -1)

    def encode(self, obs: Tree) -> Tensor:
        """Returns `rows` on the device of the parameters."""
        return to_tensor(self.rows(obs)).to(next(self.parameters()))

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns numbers ``[B, *shape]``, and which choices are allowed, ``bool [B, P]``, or None.

        A mask that allows nothing, as that after the last step of an episode may, counts as one that allows all.
        """
        size = math.prod(self.shape)
        allowed = rows[:, size:] > 0 if self.is_masked else None
        numbers = rows[:, :size] if self.is_masked else rows
        return numbers.reshape(-1, *self.shape), None if allowed is None else allowed | ~allowed.any(-1, keepdim=True)

    def forward(self, numbers: Tensor) -> Tensor:
        """Returns the distribution's parameters ``[B, P]``, for all choices."""
        with autocast(self.precision, numbers.device):
            params: Tensor = self.net(numbers.reshape(-1, *self.shape))
        return params.to(numbers.dtype)

    def action_parameters(self, rows: Tensor) -> Tensor:
        """Returns the distribution's parameters ``[B, P]``, for what `encode` returns."""
        numbers, allowed = self.split(rows)
        params: Tensor = self(numbers)
        return params if allowed is None else torch.where(allowed, params, NOT_ALLOWED)

    def weights(self) -> NDArray[np.float32]:
        """Returns a copy of the parameters and buffers, flat."""
        return flat_weights(self.net)

    def make_actor(self) -> Actor:
        """Returns the actor with the present weights, free of torch."""
        weights, layers = self.weights(), layer_places(self.net, nn.Linear)
        encoder: Any = self.encoder
        actor = MLPActor(encoder, self.distribution, layers, len(weights), slice(0), activation="relu")
        actor.load_weights(weights)
        return MaskedActor(actor) if self.is_masked else actor


class OwnSACActor(SACActor):
    """Your own actor. It acts through torch."""

    def make_actor(self) -> Actor:
        """Returns the actor with the present weights."""
        actor = _ReadingActor(copy_to_cpu(self.net).float(), self.distribution, self.encoder)
        return MaskedActor(actor) if self.is_masked else actor


class _ReadingActor(ModuleActor):
    """Acts with a module that reads what an encoder returns."""

    def __init__(self, module: nn.Module, distribution: Distribution, encoder: Callable[[Tree], Any]) -> None:
        super().__init__(module, distribution)
        self._encoder = encoder

    def _evaluate(self, obs: Tree) -> Tensor:
        return super()._evaluate(self._encoder(obs))


class Ensemble(nn.Module):
    """The default critics: E MLPs with ReLU side by side, one batched product a layer.

    Args:
        weights: Of each layer, ``[E, out, in]``.
        biases: Of each layer, ``[E, out]``.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        super().__init__()
        pairs = zip(weights, biases, strict=True)
        self.layers = nn.ModuleList(nn.ParameterList(pair) for pair in pairs)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Returns outputs ``[E, B, out]`` for inputs ``[B, ...]`` side by side."""
        rows = torch.cat(inputs, -1)
        for k, layer in enumerate(self.layers):
            weight, bias = layer.parameters()
            rows = rows.relu() if k else rows.expand(len(weight), -1, -1)
            rows = torch.bmm(rows, weight.mT) + bias.unsqueeze(1)
        return rows


class Critics(nn.Module):
    """Your own critics.

    Args:
        nets: E modules.
    """

    def __init__(self, nets: Sequence[nn.Module]) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Returns what each returns, ``[E, B, 1]`` or of all choices ``[E, B, P]``."""
        return torch.stack([net(*inputs).reshape(len(inputs[0]), -1) for net in self.nets])


class Reader:
    """What your own networks see of observations, ``float32 [..., *obs_shape]``.

    Args:
        space: Of observations.
        is_masked: Whether they have an action mask, which is left out.

    Attributes:
        encoder: Turns observations into rows of numbers; None where a Box is seen, which is read as it is.
    """

    def __init__(self, space: spaces.Space[Any], is_masked: bool) -> None:
        self._is_masked = is_masked
        sees_box = isinstance(without_mask(space) if is_masked else space, spaces.Box)
        self.encoder = None if sees_box else make_encoder(space, masked=is_masked)

    def __call__(self, obs: Tree) -> NDArray[np.float32]:
        if self.encoder is not None:
            return self.encoder(obs)
        return np.asarray(seen(obs) if self._is_masked else obs, np.float32)


def make_sac_distribution(space: spaces.Space[Any]) -> TanhGaussian | Categorical:
    """Returns what the actor draws actions from: a squashed normal for a Box, a categorical for a Discrete.

    Raises:
        ConfigError: There is no soft actor-critic for such a space.
    """
    match space:
        case spaces.Discrete():
            return Categorical((int(space.n),), (int(space.start),), (), np.dtype(space.dtype))
        case spaces.Box():
            return make_tanh_gaussian(space)
    raise ConfigError(
        f"The action space is {space}. SAC needs a bounded floating-point Box, or Discrete: map a Discrete to the "
        "combinations with gymnasium.wrappers.TransformAction, or use PPO."
    )


def make_networks(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any], config: SACConfig
) -> tuple[SACActor, nn.Module]:
    """Returns the actor and the critics with their initial weights.

    Raises:
        ConfigError: There is no encoder for the observations, or your own networks can't be trained.
    """
    distribution = make_sac_distribution(action_space)
    is_masked = config.action_masks and has_mask(observation_space, action_space)
    if config.network is not None:
        return _own_networks(observation_space, action_space, distribution, is_masked, config)
    encoder = make_encoder(observation_space, scaled=True, masked=is_masked)
    generator, num_features = torch.Generator().manual_seed(config.seed), encoder.num_features
    layers = _drawn(1, (num_features, *config.hidden_sizes, distribution.num_params), generator)
    modules: list[nn.Module] = []
    for weight, bias in layers:
        layer = nn.Linear(weight.shape[2], weight.shape[1], device="meta")
        layer.weight, layer.bias = nn.Parameter(weight[0]), nn.Parameter(bias[0])
        modules += [layer, nn.ReLU()]
    num_act, outputs = (0, distribution.num_params) if is_discrete(distribution) else (distribution.num_params // 2, 1)
    sizes = (num_features + num_act, *config.hidden_sizes, outputs)
    critics = Ensemble(*zip(*_drawn(config.num_critics, sizes, generator), strict=True))
    return SACActor(nn.Sequential(*modules[:-1]), encoder, distribution, (num_features,), is_masked), critics


def is_discrete(distribution: Distribution) -> bool:
    """Whether actions are choices, whose values critics return without reading an action."""
    return isinstance(distribution, Categorical)


def _drawn(count: int, sizes: Sequence[int], generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """Returns weights ``[E, out, in]`` and biases ``[E, out]``, uniform within ``1 / sqrt(in)`` as in ``nn.Linear``."""
    layers = []
    for ins, outs in itertools.pairwise(sizes):
        bound = 1 / math.sqrt(ins)
        shapes = (count, outs, ins), (count, outs)
        layers.append(tuple(torch.empty(shape).uniform_(-bound, bound, generator=generator) for shape in shapes))
    return layers  # type: ignore[return-value]


def _own_networks(
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    distribution: TanhGaussian | Categorical,
    is_masked: bool,
    config: SACConfig,
) -> tuple[SACActor, nn.Module]:
    """Returns the networks of a user's module with ``actor`` and ``critics``, in evaluation mode.

    They read observations as float32: ``[B, *obs_shape]`` where the space is a Box, else rows ``[B, D]`` of numbers
    (choices one-hot, parts side by side). They do not see an action mask. ``actor(obs)`` returns the parameters of the
    distribution, ``[B, P]``. For a Box of actions, each of the ``critics`` returns values ``critic(obs, act)``, ``[B]``
    or ``[B, 1]``, for actions ``[B, C]`` scaled to [-1, 1]. For a Discrete it returns the values of all choices,
    ``critic(obs)``, ``[B, C]``.
    """
    assert config.network is not None
    space = without_mask(observation_space) if is_masked else observation_space
    read = Reader(observation_space, is_masked)
    obs = torch.from_numpy(read(tree_map(lambda leaf: leaf.numpy(), sample_batch(observation_space))))
    with seeded(config.seed):
        module = build_network(resolve("network", config.network), space, action_space, config)
        actor, critics = _actor_and_critics(module)
        width = distribution.num_params // (1 if is_discrete(distribution) else 2)
        inputs = (obs,) if is_discrete(distribution) else (obs, torch.zeros(len(obs), width))
        name = "the parameters of the distribution over actions"
        check_output(name, outputs_of(actor, obs), distribution.num_params)
        name = "one value for each action" if is_discrete(distribution) else "one value"
        for critic in critics:
            check_output(name, outputs_of(critic, *inputs), width if is_discrete(distribution) else None)
    return OwnSACActor(actor, read, distribution, tuple(obs.shape[1:]), is_masked), Critics(critics)


def _actor_and_critics(module: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """Returns the parts of a module, in evaluation mode.

    Raises:
        ConfigError: It lacks them, they can't be trained, or they share parameters.
    """
    actor, critics = getattr(module, "actor", None), list(getattr(module, "critics", None) or ())
    if not isinstance(actor, nn.Module) or not critics or not all(isinstance(each, nn.Module) for each in critics):
        raise ConfigError(
            f"{type(module).__name__} has the modules "
            f"{', '.join(name for name, _ in module.named_children()) or 'none'}. SAC trains an attribute "
            "`actor`, a module, and `critics`, a torch.nn.ModuleList: assign both in the module that network "
            "returns."
        )
    for net in (actor, *critics):
        check_module(net.eval())
    counts = Counter(id(each) for net in (actor, *critics) for each in net.parameters())
    if (num_shared := sum(count > 1 for count in counts.values())) > 0:
        raise ConfigError(
            f"{num_shared} parameters belong to several of the actor and the critics, which SAC trains apart. "
            "Make new layers for each, for example torch.nn.ModuleList(make_critic() for _ in range(2))."
        )
    return actor, critics
