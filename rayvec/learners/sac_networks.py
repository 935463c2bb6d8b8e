"""The networks of soft actor-critic: the default ones, or your own.

A network reads *numbers*, ``float32 [B, *obs_shape]``. *Rows* are what the replay stores of observations: numbers
before they are normalised, ``[B, D]``, or with action masks ``[B, D + P]``, the mask last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rayvec.config.references import resolve
from rayvec.data import Tree
from rayvec.errors import ConfigError
from rayvec.policies.actors import MLPActor
from rayvec.policies.distributions import Categorical, TanhGaussian, make_tanh_gaussian
from rayvec.policies.encoders import Encoder, join, make_encoder, normalized, plain_encoder
from rayvec.policies.masks import allowed, has_mask, without_mask
from rayvec.policies.networks import ActorCriticModule, ModuleActor, numpy_actor, to_device
from rayvec.policies.own_network import build_network, check_output, sample_batch, seeded

if TYPE_CHECKING:
    from rayvec.config import SACConfig


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
        distribution: TanhGaussian | Categorical,
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
        return to_device(self.rows(obs), next(self.parameters()).device)

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

    def _features(self, rows: Tensor) -> tuple[Tensor]:
        count = rows.shape[0]
        params: Tensor = self.net(rows if count else rows.new_zeros(1, *rows.shape[1:]))
        return (params[:count].to(rows.dtype),)

    def make_actor(self) -> MLPActor | ModuleActor:
        """Returns the actor with the present weights: without torch, unless the network is your own."""
        return super().make_actor() if self.is_own else numpy_actor(self, ("net.",), "relu")


class Ensemble(nn.Module):
    """The default critics: E MLPs with ReLU side by side, one batched product a layer.

    Args:
        count: E.
        sizes: Numbers of inputs, of units of each hidden layer, and of outputs.
        generator: Of the initial weights.
    """

    def __init__(self, count: int, sizes: Sequence[int], generator: torch.Generator) -> None:
        super().__init__()
        pairs = itertools.pairwise(sizes)
        self.layers = nn.ModuleList(nn.ParameterList(_drawn(*pair, generator, count)) for pair in pairs)

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


def make_networks(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any], config: SACConfig
) -> tuple[SACActor, nn.Module]:
    """Returns the actor and the critics with their initial weights.

    Raises:
        ConfigError: There are no actions that SAC takes, no encoder for the observations, or your own networks can't be
            trained.
    """
    distribution: TanhGaussian | Categorical
    match action_space:
        case spaces.Discrete(n=n, start=start):
            distribution = Categorical((int(n),), (int(start),), (), np.dtype(action_space.dtype))
            num_act, num_values = 0, int(n)
        case spaces.Box():
            distribution = make_tanh_gaussian(action_space)
            num_act, num_values = distribution.num_params // 2, 1
        case _:
            raise ConfigError(
                f"The action space is {action_space}. SAC needs a bounded floating-point Box, or Discrete: map a "
                "Discrete to the combinations with gymnasium.wrappers.TransformAction, or use PPO."
            )
    is_masked = config.action_masks and has_mask(observation_space, action_space)
    settings = {"masked": is_masked, "normalize_obs": config.normalize_obs}
    if config.network is not None:
        act = [torch.zeros(1, num_act)] if num_act else []
        return _own_networks(observation_space, action_space, distribution, act, num_values, config, settings)
    encoder = make_encoder(observation_space, scaled=True, masked=is_masked, is_wide=config.normalize_obs)
    num_features, hidden = encoder.num_features, config.hidden_sizes
    generator = torch.Generator().manual_seed(config.seed)
    layers: list[nn.Module] = []
    for ins, outs in itertools.pairwise((num_features, *hidden, distribution.num_params)):
        layer = nn.Linear(ins, outs, device="meta")
        layer.weight, layer.bias = _drawn(ins, outs, generator)
        layers += [layer, nn.ReLU()]
    actor = SACActor(nn.Sequential(*layers[:-1]), False, encoder, distribution, (num_features,), **settings)
    return actor, Ensemble(config.num_critics, (num_features + num_act, *hidden, num_values), generator)


def _drawn(ins: int, outs: int, generator: torch.Generator, *lead: int) -> list[nn.Parameter]:
    """Returns weights ``[*lead, out, in]`` and biases ``[*lead, out]``, uniform within ``1 / sqrt(in)``."""
    bound = 1 / math.sqrt(ins)
    shapes = (*lead, outs, ins), (*lead, outs)
    return [nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=generator)) for shape in shapes]


def _own_networks(
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    distribution: TanhGaussian | Categorical,
    act: list[Tensor],
    num_values: int,
    config: Any,
    settings: dict[str, bool],
) -> tuple[SACActor, nn.Module]:
    """Returns the networks of a user's module with ``actor`` and ``critics``, in evaluation mode.

    They read observations as float32: ``[B, *obs_shape]`` where the space is a Box, else rows ``[B, D]`` of numbers
    (choices one-hot, parts side by side). They do not see an action mask. ``actor(obs)`` returns the parameters of the
    distribution, ``[B, P]``. For a Box of actions, each of the ``critics`` returns values ``critic(obs, act)``, ``[B]``
    or ``[B, 1]``, for actions ``[B, C]`` scaled to [-1, 1]. For a Discrete it returns the values of all choices,
    ``critic(obs)``, ``[B, C]``.
    """
    is_masked, is_wide = settings["masked"], settings["normalize_obs"]
    space = without_mask(observation_space) if is_masked else observation_space
    if isinstance(space, spaces.Box):
        encoder, shape = plain_encoder(("observation",) if is_masked else (), space, is_wide), space.shape
    else:
        encoder = make_encoder(observation_space, masked=is_masked, is_wide=is_wide)
        shape = (encoder.num_features,)
    obs = encoder(sample_batch(observation_space)).float().reshape(-1, *shape)
    with seeded(config.seed):
        module = build_network(resolve("network", config.network), space, action_space, config)
        actor, critics = _actor_and_critics(module)
        check_output("the parameters of the distribution over actions", actor(obs), distribution.num_params)
        for critic in critics:
            values = critic(obs, *(each.expand(len(obs), -1) for each in act))
            check_output("the values of actions", values, None if act else num_values)
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
    module.eval()
    parameters = [id(each) for net in (actor, *critics) for each in net.parameters()]
    if num_shared := len(parameters) - len({*parameters}):
        raise ConfigError(
            f"{num_shared} parameters belong to several of the actor and the critics, which SAC trains apart. "
            "Make new layers for each, for example torch.nn.ModuleList(make_critic() for _ in range(2))."
        )
    return actor, critics
