"""The networks of soft actor-critic: which ones a learner has for its spaces, their initial values, and the actor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from rayvec.data import Tree
from rayvec.errors import ConfigError
from rayvec.learners.sac_math import AdamState, MLPLayout, NetLayout, Nets, SACMath
from rayvec.policies.actors import Actor, MaskedActor, MLPActor
from rayvec.policies.distributions import (
    NOT_ALLOWED,
    Categorical,
    Distribution,
    make_distribution,
    make_tanh_gaussian,
)
from rayvec.policies.encoders import Encoder, make_encoder
from rayvec.policies.masks import has_mask
from rayvec.policies.networks import flat_weights, layer_places, to_tensor
from rayvec.policies.precision import autocast
from rayvec.wrappers import MASK_KEY

if TYPE_CHECKING:
    from rayvec.config import SACConfig

__all__ = [
    "InBF16",
    "Networks",
    "ReplayActor",
    "SACActor",
    "action_form",
    "default_networks",
    "initial_nets",
    "make_math",
    "make_sac_distribution",
]


class Networks(NamedTuple):
    """The networks of a learner, before they have parameters of their own.

    Attributes:
        critic: The critics.
        actor: The actor.
        initial: Initial parameters of critics and actor, flat.
        attach: From the flat parameters of the actor to the module that acts with them.
        obs_shape: Of one observation in the replay.
        is_masked: Whether it ends with an action mask.
        module: Your own module, which holds the buffers of actor and critics; else one without buffers.
    """

    critic: NetLayout
    actor: NetLayout
    initial: tuple[Tensor, Tensor]
    attach: Callable[[Tensor], Any]
    obs_shape: tuple[int, ...]
    is_masked: bool
    module: nn.Module


class ReplayActor(nn.Module):
    """An actor that reads what a replay keeps of observations.

    Args:
        encoder: From observations to what the network sees of them, ``float32 [..., *shape]``.
        distribution: Of actions.
        is_masked: Whether observations have an action mask, which the encoder leaves out.

    Attributes:
        net: The network.
    """

    net: nn.Module

    def __init__(self, encoder: Callable[[Tree], NDArray[np.float32]], distribution: Distribution, is_masked: bool):
        super().__init__()
        self.encoder, self.distribution, self.is_masked = encoder, distribution, is_masked

    def rows(self, obs: Tree) -> NDArray[np.float32]:
        """Returns what a replay keeps, ``[..., *shape]``; with action masks flat, the mask last, ``[..., D + P]``."""
        numbers = self.encoder(obs)
        if not self.is_masked:
            return numbers
        mask = np.asarray(obs[MASK_KEY]) != 0
        size = math.prod(numbers.shape[mask.ndim - 1 :])
        return np.concatenate([numbers.reshape(*mask.shape[:-1], size), mask.astype(np.float32)], -1)

    def encode(self, obs: Tree) -> Tensor:
        """Returns `rows` on the device of the parameters."""
        return to_tensor(self.rows(obs)).to(next(self.parameters()))

    def action_parameters(self, rows: Tensor) -> Tensor:
        """Returns the distribution's parameters ``[B, P]``, for what `encode` returns."""
        if not self.is_masked:
            params: Tensor = self(rows)
            return params
        count = self.distribution.num_params
        return torch.where(rows[:, -count:] > 0, self(rows[:, :-count]), NOT_ALLOWED)

    def weights(self) -> NDArray[np.float32]:
        """Returns a copy of the parameters and buffers, flat."""
        return flat_weights(self.net)


class SACActor(ReplayActor):
    """An MLP with ReLU whose outputs are the parameters of a distribution; it acts without torch.

    Args:
        encoder: From observations to rows of D numbers.
        distribution: Of actions.
        layout: Where its layers lie in a flat vector.
        flat: That vector; the layers become views of it.
        is_masked: Whether observations have an action mask, which the encoder leaves out.
    """

    encoder: Encoder
    net: nn.Sequential

    def __init__(
        self, encoder: Encoder, distribution: Distribution, layout: MLPLayout, flat: Tensor, *, is_masked: bool = False
    ) -> None:
        super().__init__(encoder, distribution, is_masked)
        modules: list[nn.Module] = []
        for weight, bias in layout.layers(flat[: layout.num_params]):
            layer = nn.Linear(weight.shape[2], weight.shape[1], device="meta")
            layer.weight = nn.Parameter(weight[0], requires_grad=False)
            layer.bias = nn.Parameter(bias[0], requires_grad=False)
            modules += [layer, nn.ReLU()]
        self.net = nn.Sequential(*modules[:-1])

    def forward(self, rows: Tensor) -> Tensor:
        """Returns the distribution's parameters ``[B, P]`` for encoded observations ``[B, D]``."""
        params: Tensor = self.net(rows)
        return params

    def make_actor(self) -> Actor:
        """Returns the actor with the present weights, free of torch."""
        weights, layers = self.weights(), layer_places(self.net, nn.Linear)
        actor = MLPActor(self.encoder, self.distribution, layers, len(weights), slice(0), activation="relu")
        actor.load_weights(weights)
        return MaskedActor(actor) if self.is_masked else actor


def make_sac_distribution(space: spaces.Space[Any]) -> Distribution:
    """Returns what the actor draws actions from: a squashed normal for a Box, a categorical for a Discrete.

    Raises:
        ConfigError: There is no soft actor-critic for such a space.
    """
    match space:
        case spaces.Discrete():
            return make_distribution(space)
        case spaces.Box():
            return make_tanh_gaussian(space)
    raise ConfigError(
        "Soft actor-critic acts on numbers between bounds, or chooses one of a few actions.",
        expected="a bounded floating-point Box, or a Discrete action space",
        got=space,
        remedy="Map a Discrete to the combinations with gymnasium.wrappers.TransformAction, or use PPO",
    )


def action_form(distribution: Distribution) -> tuple[bool, int]:
    """Returns whether actions are choices, and their number of choices, or else of components."""
    if isinstance(distribution, Categorical):
        return True, distribution.num_params
    return False, distribution.num_params // 2


def default_networks(
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    distribution: Distribution,
    config: SACConfig,
    device: torch.device,
) -> Networks:
    """Returns MLPs with ReLU.

    Raises:
        ConfigError: There is no encoder for the observations.
    """
    is_masked = config.action_masks and has_mask(observation_space, action_space)
    encoder = make_encoder(observation_space, scaled=True, masked=is_masked)
    layouts = make_mlps(encoder.num_features, distribution, config)
    initial = initial_mlps(layouts, config)
    return Networks(
        *layouts,
        initial,
        lambda flat: SACActor(encoder, distribution, layouts[1], flat, is_masked=is_masked),
        (encoder.num_features + (distribution.num_params if is_masked else 0),),
        is_masked,
        nn.Module(),
    )


def make_mlps(num_features: int, distribution: Distribution, config: SACConfig) -> tuple[MLPLayout, MLPLayout]:
    """Returns the layouts of the default critics and the default actor."""
    is_discrete, num_actions = action_form(distribution)
    inputs, outputs = (num_features, num_actions) if is_discrete else (num_features + num_actions, 1)
    return (
        MLPLayout(config.num_critics, (inputs, *config.hidden_sizes, outputs)),
        MLPLayout(1, (num_features, *config.hidden_sizes, distribution.num_params)),
    )


def make_math(
    critic: NetLayout, actor: NetLayout, distribution: Distribution, config: SACConfig, *, is_masked: bool = False
) -> SACMath:
    """Returns the formulas for a space.

    The default target entropy is -C for C components of a Box, and for n choices `target_entropy_scale` times the
    largest entropy of n choices; with action masks, of the allowed ones.
    """
    is_discrete, num_actions = action_form(distribution)
    usual = config.target_entropy_scale * math.log(num_actions) if is_discrete else -float(num_actions)
    return SACMath(
        critic=critic,
        actor=actor,
        is_discrete=is_discrete,
        gamma=config.gamma,
        tau=config.tau,
        target_entropy=usual if config.target_entropy is None else config.target_entropy,
        autotune=config.autotune,
        policy_lr=config.policy_lr,
        q_lr=config.q_lr,
        alpha_lr=config.q_lr if config.alpha_lr is None else config.alpha_lr,
        num_masked=num_actions if is_masked else 0,
        entropy_scale=config.target_entropy_scale if config.target_entropy is None else None,
    )


def initial_mlps(layouts: tuple[MLPLayout, MLPLayout], config: SACConfig) -> tuple[Tensor, Tensor]:
    """Returns the flat parameters of critics and actor, uniform within ``1 / sqrt(inputs)`` as in ``nn.Linear``."""
    generator = torch.Generator().manual_seed(config.seed)

    def draw(layout: MLPLayout) -> Tensor:
        flat = torch.empty(layout.num_params)
        for weight, bias in layout.layers(flat):
            bound = 1 / math.sqrt(weight.shape[2])
            weight.uniform_(-bound, bound, generator=generator)
            bias.uniform_(-bound, bound, generator=generator)
        return flat

    critic, actor = layouts
    first = draw(actor)  # the actor's are drawn first
    return draw(critic), first


class InBF16:
    """Nets that compute in bfloat16; their parameters and results are float32.

    Args:
        nets: The nets.
    """

    def __init__(self, nets: NetLayout) -> None:
        self._nets = nets

    @property
    def num_params(self) -> int:
        """See :class:`NetLayout`."""
        return self._nets.num_params

    def outputs(self, flat: Tensor, *inputs: Tensor) -> Tensor:
        """See :class:`NetLayout`."""
        with autocast("bf16", flat.device):
            return self._nets.outputs(flat, *inputs).to(flat.dtype)


def initial_nets(critic: Tensor, actor: Tensor, config: SACConfig, dtype: torch.dtype, device: torch.device) -> Nets:
    """Returns nets with these parameters, of critics and of the actor, with fresh optimizers."""

    def adam(param: Tensor) -> AdamState:
        param = param.to(device, dtype)
        return AdamState(param, torch.zeros_like(param), torch.zeros_like(param))

    critics = adam(critic)
    whole = adam(torch.cat([actor, torch.tensor([math.log(config.alpha)])]))
    return Nets(critics, critics.param.clone(), whole, torch.ones(1, device=device, dtype=dtype))
