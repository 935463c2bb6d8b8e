"""The networks of soft actor-critic: the default ones, or your own.

A network reads *numbers*, ``float32 [B, *obs_shape]``. *Rows* are what the replay stores of observations: numbers
before they are normalised, ``[B, D]``, or with action masks ``[B, D + P]``, the mask last.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rayvec.config.references import resolve
from rayvec.data import Tree
from rayvec.errors import ConfigError
from rayvec.policies.actors import Actor
from rayvec.policies.distributions import (
    Categorical,
    Distribution,
    TanhGaussian,
    make_tanh_gaussian,
)
from rayvec.policies.encoders import Encoder, join, make_encoder, normalized, plain_encoder
from rayvec.policies.masks import allowed, has_mask, without_mask
from rayvec.policies.networks import ActorCriticModule, numpy_actor, on_device
from rayvec.policies.own_network import build_network, check_module, check_output, outputs_of, sample_batch, seeded
from rayvec.policies.precision import autocast

if TYPE_CHECKING:
    from rayvec.config import SACConfig

__all__ = ["Critics", "Ensemble", "SACActor", "make_networks", "make_sac_distribution"]


class SACActor(ActorCriticModule):
    """The actor: a network whose outputs are the parameters of a distribution. The default one acts without torch.

    Args:
        net: The network.
        is_own: Whether it is your own, else linear layers with ReLU between them.
        encoder: From observations to numbers, ``[..., D]``; it leaves an action mask out.
        distribution: Of actions.
        shape: Of the numbers of one observation.
        masked: Whether observations have an action mask.
        normalize_obs: Whether numbers are normalised.
    """

    cnns = ()

    def __init__(
        self,
        net: nn.Module,
        is_own: bool,
        encoder: Encoder,
        distribution: Distribution,
        shape: tuple[int, ...],
        *,
        masked: bool,
        normalize_obs: bool,
    ) -> None:
        super().__init__()
        self.net, self.encoder, self.distribution = net, encoder, distribution
        self.is_own, self.shape, self.is_masked = is_own, shape, masked
        self._register_statistics(encoder.num_features if normalize_obs else 0)

    def rows(self, obs: Tree) -> Any:
        """Returns what a replay stores, ``[..., D]`` or ``[..., D + P]``, arrays or tensors."""
        numbers = self.encoder(obs)
        return join([numbers, allowed(obs, self.distribution)]) if self.is_masked else numbers

    def encode(self, obs: Tree) -> Tensor:
        """Returns `rows` on the device of the parameters."""
        return on_device(self.rows(obs), next(self.parameters()).device)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns numbers ``[B, *shape]``, normalised, and which choices are allowed, ``bool [B, P]``, or None.

        A mask that allows nothing, as that after the last step of an episode may, counts as one that allows all.
        """
        size = math.prod(self.shape)
        numbers, mask = rows[:, :size], rows[:, size:] > 0
        if self.obs_mean is not None:
            numbers = normalized(numbers, self.obs_mean, self.obs_scale)
        numbers = numbers.to(next(self.parameters()).dtype).reshape(-1, *self.shape)
        return numbers, mask | ~mask.any(-1, keepdim=True) if self.is_masked else None

    def _params(self, rows: Tensor) -> Tensor:
        count = rows.shape[0]
        with autocast(self.precision, rows.device):
            params: Tensor = self.net(rows if count else rows.new_zeros(1, *rows.shape[1:]))
        return params[:count].to(rows.dtype)

    def make_actor(self) -> Actor:
        """Returns the actor with the present weights: without torch, unless the network is your own."""
        return super().make_actor() if self.is_own else numpy_actor(self, activation="relu")


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
        count = inputs[0].shape[0]
        if not count:  # a module need not know what to do then
            inputs = tuple(each.new_zeros(1, *each.shape[1:]) for each in inputs)
        return torch.stack([net(*inputs).reshape(len(inputs[0]), -1) for net in self.nets])[:, :count]


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
    settings = {"masked": is_masked, "normalize_obs": config.normalize_obs}
    encoder = make_encoder(observation_space, scaled=True, masked=is_masked, is_wide=config.normalize_obs)
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
    net = nn.Sequential(*modules[:-1])
    return SACActor(net, False, encoder, distribution, (num_features,), **settings), critics


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
    is_wide = config.normalize_obs
    if isinstance(space, spaces.Box):
        path, shape = ("observation",) if is_masked else (), space.shape
        encoder = plain_encoder(path, space, is_wide)
    else:
        encoder = make_encoder(observation_space, masked=is_masked, is_wide=is_wide)
        shape = (encoder.num_features,)
    obs = encoder(sample_batch(observation_space)).float().reshape(-1, *shape)
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
    settings = {"masked": is_masked, "normalize_obs": config.normalize_obs}
    return SACActor(actor, True, encoder, distribution, shape, **settings), Critics(critics)


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
