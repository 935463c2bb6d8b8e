"""Action masks: actions that an environment does not allow have probability 0, in acting and in learning.

The mask is a part of the observation, under the key ``action_mask``: the numbers of all choices of a Discrete or
MultiDiscrete action space, or of these parts of a Dict or Tuple, 0 where a choice is not allowed. Its logit then counts
as `NOT_ALLOWED` (Huang and Ontañón, "A closer look at invalid action masking in policy gradient algorithms", 2022,
arXiv:2006.14171). The network does not see the mask. This module does not import torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from rayvec.data import Tree
from rayvec.errors import ConfigError
from rayvec.policies.distributions import NOT_ALLOWED
from rayvec.wrappers import MASK_KEY, num_choices

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


def allowed(obs: Tree, distribution: Any) -> Any:
    """Returns which parameters the mask of observations leaves as they are, ``bool [..., P]``, as `obs` is."""
    return distribution.allowed(obs[MASK_KEY])


def masked(params: Any, allowed: Any) -> Any:
    """Returns parameters ``[..., P]`` in which choices that are not allowed have probability 0; arrays or tensors."""
    if isinstance(params, np.ndarray):
        return np.where(allowed, params, np.float32(NOT_ALLOWED))
    return params.masked_fill(~allowed, NOT_ALLOWED)
