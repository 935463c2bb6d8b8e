"""Action masks: actions that an environment does not allow have probability 0, in acting and in learning.

The mask is a part of the observation, under the key ``action_mask``: the numbers of all choices of a Discrete or
MultiDiscrete action space, 0 where a choice is not allowed. Its logit then counts as `NOT_ALLOWED` (Huang and Ontañón,
"A closer look at invalid action masking in policy gradient algorithms", 2022, arXiv:2006.14171). The network does not
see the mask.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rayvec.data import Tree
from rayvec.errors import ConfigError
from rayvec.policies.actors import Actor, MaskedActor
from rayvec.policies.distributions import NOT_ALLOWED
from rayvec.policies.networks import ActorCriticModule, upload
from rayvec.wrappers import MASK_KEY, num_choices

__all__ = ["MaskedActorCritic", "has_mask", "seen", "without_mask"]

_OBSERVATION_KEY = "observation"


def has_mask(observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> bool:
    """Whether observations have an action mask.

    Raises:
        ConfigError: They have one of another size than the number of choices.
    """
    if not isinstance(observation_space, spaces.Dict) or MASK_KEY not in observation_space.spaces:
        return False
    sizes = num_choices(action_space)
    shape = observation_space[MASK_KEY].shape
    if sizes and shape != (sum(sizes),):
        raise ConfigError(
            f"The observation's {MASK_KEY!r} is {observation_space[MASK_KEY]}. {action_space} needs shape "
            f"{(sum(sizes),)}: correct the mask, give it another key, or pass action_masks=False to let the "
            "network read it."
        )
    return bool(sizes)


def without_mask(observation_space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Returns the space of what a network sees of observations with a mask; see :func:`seen`."""
    assert isinstance(observation_space, spaces.Dict)
    parts = {key: part for key, part in observation_space.spaces.items() if key != MASK_KEY}
    return parts[_OBSERVATION_KEY] if set(parts) == {_OBSERVATION_KEY} else spaces.Dict(parts)


def seen(obs: Tree) -> Tree:
    """Returns observations without their mask: a dict of the other parts, or the part "observation" if it is all."""
    parts = {key: part for key, part in obs.items() if key != MASK_KEY}
    return parts[_OBSERVATION_KEY] if set(parts) == {_OBSERVATION_KEY} else parts


class MaskedActorCritic(ActorCriticModule):
    """An actor-critic that gives choices that are not allowed the probability 0.

    Rows are a pair: those of the actor-critic, and the mask, ``bool [..., P]``.

    Args:
        module: The actor-critic, which reads observations without their mask; it becomes a part of this one.
    """

    is_masked = True

    def __init__(self, module: ActorCriticModule) -> None:
        super().__init__()
        self.module = module
        self.encoder, self.distribution = module.encoder, module.distribution

    @property
    def cnns(self) -> Any:  # type: ignore[override]
        """See :class:`ActorCriticModule`."""
        return self.module.cnns

    @property
    def obs_mean(self) -> Tensor | None:  # type: ignore[override]
        """See :class:`ActorCriticModule`."""
        return self.module.obs_mean

    @property
    def obs_scale(self) -> Tensor | None:  # type: ignore[override]
        """See :class:`ActorCriticModule`."""
        return self.module.obs_scale

    def encode(self, obs: Tree) -> Tree:
        """See :class:`ActorCriticModule`."""
        device = next(self.parameters()).device
        return self.module.encode(obs), upload(np.asarray(obs[MASK_KEY]) != 0, device)

    def forward(self, rows: Tree) -> tuple[Tensor, Tensor]:
        """See :class:`ActorCriticModule`."""
        params, value = self.module(rows[0])
        return _masked(params, rows[1]), value

    def action_parameters(self, rows: Tree) -> Tensor:
        """See :class:`ActorCriticModule`."""
        return _masked(self.module.action_parameters(rows[0]), rows[1])

    def value(self, rows: Tree) -> Tensor:
        """See :class:`ActorCriticModule`."""
        return self.module.value(rows[0])

    def make_actor(self) -> Actor:
        """See :class:`ActorCriticModule`."""
        return MaskedActor(self.module.make_actor())


def _masked(params: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, params, NOT_ALLOWED)
