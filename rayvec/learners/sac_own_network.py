"""Your own networks as those of soft actor-critic."""

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
from torch.nn.utils import vector_to_parameters

from rayvec.config.references import resolve
from rayvec.data import Tree, tree_map
from rayvec.errors import ConfigError
from rayvec.learners.base import FlatModule, flat_parameters
from rayvec.learners.sac_networks import Networks, ReplayActor, action_form
from rayvec.policies.actors import Actor, MaskedActor
from rayvec.policies.distributions import Distribution
from rayvec.policies.encoders import make_encoder
from rayvec.policies.masks import has_mask, seen, without_mask
from rayvec.policies.networks import ModuleActor, copy_to_cpu
from rayvec.policies.own_network import build_network, check_module, check_output, outputs_of, sample_batch, seeded

if TYPE_CHECKING:
    from rayvec.config import SACConfig

__all__ = ["OwnSACActor", "own_networks"]


def own_networks(
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    distribution: Distribution,
    config: SACConfig,
    device: torch.device,
) -> Networks:
    """Returns your own networks: a module with ``actor`` and ``critics``.

    They read observations as float32: ``[B, *obs_shape]`` where the space is a Box, else rows ``[B, D]`` of numbers
    (choices one-hot, parts side by side). They do not see an action mask. ``actor(obs)`` returns the parameters of the
    distribution, ``[B, P]``. For a Box of actions, each of the ``critics`` returns values ``critic(obs, act)``, ``[B]``
    or ``[B, 1]``, for actions ``[B, C]`` scaled to [-1, 1]. For a Discrete it returns the values of all choices,
    ``critic(obs)``, ``[B, C]``.

    Raises:
        ConfigError: They are something else, or can't be trained or pickled.
    """
    assert config.network is not None
    is_masked = config.action_masks and has_mask(observation_space, action_space)
    space = without_mask(observation_space) if is_masked else observation_space
    read = Reader(observation_space, is_masked)
    obs = torch.from_numpy(read(tree_map(lambda leaf: leaf.numpy(), sample_batch(observation_space))))
    with seeded(config.seed):
        module = build_network(resolve("network", config.network), space, action_space, config)
        actor, critics = _actor_and_critics(module)
        _check_outputs(actor, critics, distribution, obs)
    shape = tuple(obs.shape[1:])
    layouts = _ModuleLayout(critics, shape), _ModuleLayout([actor], shape)
    of_critics = itertools.chain(*(critic.parameters() for critic in critics))
    initial = flat_parameters(of_critics), flat_parameters(actor.parameters())
    module.to(device)  # with the buffers
    return Networks(
        *layouts,
        initial,
        lambda flat: OwnSACActor(read, distribution, actor, flat, shape),
        (math.prod(shape) + distribution.num_params,) if is_masked else shape,
        is_masked,
        module,
    )


def _actor_and_critics(module: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """Returns the parts of a module, in evaluation mode.

    Raises:
        ConfigError: It lacks them, they can't be trained, or they share parameters.
    """
    actor, critics = getattr(module, "actor", None), list(getattr(module, "critics", None) or ())
    if not isinstance(actor, nn.Module) or not critics or not all(isinstance(each, nn.Module) for each in critics):
        raise ConfigError(
            "SAC trains an actor and critics.",
            expected="a module with an attribute `actor`, a module, and `critics`, a torch.nn.ModuleList",
            got=f"{type(module).__name__} with {', '.join(name for name, _ in module.named_children()) or 'neither'}",
            remedy="Assign both in the module that network returns.",
        )
    for net in (actor, *critics):
        check_module(net.eval())
    counts = Counter(id(each) for net in (actor, *critics) for each in net.parameters())
    if (num_shared := sum(count > 1 for count in counts.values())) > 0:
        raise ConfigError(
            "The actor and each critic of SAC are trained apart.",
            expected="parameters that belong to one of them",
            got=f"{num_shared} parameters that several of them have",
            remedy="Make new layers for each, for example torch.nn.ModuleList(make_critic() for _ in range(2)).",
        )
    return actor, critics


def _check_outputs(actor: nn.Module, critics: Sequence[nn.Module], distribution: Distribution, obs: Tensor) -> None:
    """Raises a ConfigError where an output for some observations has another shape than it must have."""
    is_discrete, num_actions = action_form(distribution)
    inputs = (obs,) if is_discrete else (obs, torch.zeros(len(obs), num_actions))
    check_output("the parameters of the distribution over actions", outputs_of(actor, obs), distribution.num_params)
    for critic in critics:
        name = "one value for each action" if is_discrete else "one value"
        check_output(name, outputs_of(critic, *inputs), num_actions if is_discrete else None)


class Reader:
    """What your own networks see of observations, ``float32 [..., *obs_shape]``.

    Args:
        space: Of observations.
        is_masked: Whether they have an action mask, which is left out.

    Attributes:
        is_masked: As above.
        encoder: Turns observations into rows of numbers; None where a Box is seen, which is read as it is.
    """

    def __init__(self, space: spaces.Space[Any], is_masked: bool) -> None:
        self.is_masked = is_masked
        sees_box = isinstance(without_mask(space) if is_masked else space, spaces.Box)
        self.encoder = None if sees_box else make_encoder(space, masked=is_masked)

    def __call__(self, obs: Tree) -> NDArray[np.float32]:
        if self.encoder is not None:
            return self.encoder(obs)
        return np.asarray(seen(obs) if self.is_masked else obs, np.float32)


class _ModuleLayout:
    """Modules whose parameters lie one after another in a flat vector.

    Args:
        nets: The modules.
        shape: Of what they see of one observation.
    """

    def __init__(self, nets: Sequence[nn.Module], shape: tuple[int, ...]) -> None:
        self._nets, self._shape = [FlatModule(net) for net in nets], shape

    @property
    def num_params(self) -> int:
        """See :class:`NetLayout`."""
        return sum(net.num_params for net in self._nets)

    def outputs(self, flat: Tensor, *inputs: Tensor) -> Tensor:
        """See :class:`NetLayout`."""
        parts = torch.split(flat, [net.num_params for net in self._nets])
        obs, *rest = inputs
        obs = obs.reshape(-1, *self._shape)
        results = [net(part, obs, *rest) for net, part in zip(self._nets, parts, strict=True)]
        stacked = torch.stack([result if result.ndim == 2 else result.unsqueeze(-1) for result in results])
        return stacked.to(flat.dtype)  # a module may compute in another dtype


class OwnSACActor(ReplayActor):
    """Your own actor.

    Args:
        reader: From observations to what the actor sees.
        distribution: Of actions.
        net: The actor; its parameters become views of the flat vector.
        flat: That vector, and whatever follows the parameters in it.
        shape: Of what the actor sees of one observation.
    """

    encoder: Reader

    def __init__(
        self, reader: Reader, distribution: Distribution, net: nn.Module, flat: Tensor, shape: tuple[int, ...]
    ) -> None:
        super().__init__(reader, distribution, reader.is_masked)
        self.net, self._shape = net.to(flat.device, flat.dtype), shape
        vector_to_parameters(flat, net.parameters())
        net.requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        """Returns the distribution's parameters ``[B, P]`` for what the actor sees."""
        params: Tensor = self.net(rows.reshape(-1, *self._shape))
        return params

    def make_actor(self) -> Actor:
        """Returns the actor with the present weights. It acts through torch."""
        actor = _ReadingActor(copy_to_cpu(self.net).float(), self.distribution, self.encoder)
        return MaskedActor(actor) if self.is_masked else actor


class _ReadingActor(ModuleActor):
    """Acts with a module that reads what an encoder returns."""

    def __init__(self, module: nn.Module, distribution: Distribution, encoder: Callable[[Tree], Any]) -> None:
        super().__init__(module, distribution)
        self._encoder = encoder

    def _evaluate(self, obs: Tree) -> Tensor:
        return super()._evaluate(self._encoder(obs))
