"""Helpers for Gymnasium batches: spaces, and checks of actions, masks and spaces."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import batch_differing_spaces, batch_space, iterate
from numpy.typing import NDArray

from rayvec.data import Tree, objects
from rayvec.data.trees import ArrayLayout
from rayvec.errors import ConfigError
from rayvec.fleet.spaces import PoolSpaces


class ActionTypeError(ConfigError, TypeError):
    """A single action was passed instead of one for each environment."""


class SpacesError(ConfigError, RuntimeError, TypeError):
    """Observation or action spaces of environments differ, or are not spaces. Gymnasium raises these types."""


def in_batch_order(space: Space[Any], batched: Space[Any]) -> Space[Any]:
    """Returns an action space whose keys are in the order of the batched space: so ``SyncVectorEnv`` passes them on."""
    if isinstance(space, spaces.Dict) and isinstance(batched, spaces.Dict):
        return spaces.Dict([(key, in_batch_order(space[key], part)) for key, part in batched.spaces.items()])
    if isinstance(space, spaces.Tuple) and isinstance(batched, spaces.Tuple):
        return spaces.Tuple([in_batch_order(*pair) for pair in zip(space.spaces, batched.spaces, strict=True)])
    return space


def batched_observations(found: PoolSpaces, mode: Any, num_envs: int) -> tuple[Space[Any], Space[Any]]:
    """Returns the batched and the single observation space for an `observation_mode`.

    Raises:
        SpacesError: There is no such mode, or the environments' spaces do not match it.
    """
    single = found.observation
    if isinstance(mode, tuple) and len(mode) == 2 and all(isinstance(space, Space) for space in mode):
        batched, single = mode
    elif mode not in ("same", "different"):
        raise SpacesError(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch "
            f"observation space, actual got {mode}."
        )
    check_spaces(found, mode, single)
    if mode == "same":
        batched = batch_space(single, num_envs)
    elif mode == "different":
        batched = batch_differing_spaces(list(found.observations or (single,) * num_envs))
    return batched, single


def check_spaces(found: PoolSpaces, mode: Any, single: Space[Any]) -> None:
    """Raises ``SpacesError`` if action spaces differ, or observation spaces more than the mode allows."""
    if (misfit := found.misfit(single, same=mode == "same")) is not None:
        index, other = misfit
        raise SpacesError(
            f"Environment {index} has the observation space {other}, and {single} was expected: the sub-environments "
            "observation spaces are not equivalent. Make them equal by a wrapper. If this is intentional, use "
            "`observation_mode='different'` instead, which allows other bounds."
        )
    if found.actions_differ is not None:
        differ, other = found.actions_differ
        raise SpacesError(
            f"Environment {differ} has the action space {other}, and environment 0 has {found.action}. "
            "Make them equal by a wrapper."
        )


def checked_actions(actions: Any, layout: ArrayLayout, count: int, single: Space[Any]) -> Tree:
    """Returns actions as a tree of arrays, each ``[count, ...]``; an array of objects where no other holds them.

    Raises:
        ActionTypeError: A single action was passed.
        ConfigError: The actions have other shapes.
    """
    if layout.objects:
        each = list(iterate(batch_space(single, count), actions))
        check_number(len(each), count, single)
        return objects(each)
    try:
        leaves = [np.asarray(leaf) for leaf in layout.flatten(actions)]
        got = f"shapes {[leaf.shape for leaf in leaves]}"
    except ValueError as error:
        leaves, got = [], str(error)
    if [leaf.shape for leaf in leaves] != [(count, *shape) for _, shape in layout.leaves]:
        kind = ActionTypeError if any(leaf.ndim == 0 for leaf in leaves) else ConfigError
        raise _misfit(got, count, single, kind)
    return layout.tree(leaves)


def check_number(got: int, count: int, single: Space[Any]) -> None:
    """Raises ``ConfigError`` if the number of actions differs from the number of environments."""
    if got != count:
        raise _misfit(f"{got} actions", count, single)


def _misfit(got: str, count: int, single: Space[Any], kind: type[ConfigError] = ConfigError) -> ConfigError:
    return kind(
        f"Actions do not fit {batch_space(single, count)}: {got.rstrip('.')}. Pass one action for each environment, "
        "stacked as action_space.sample() stacks them."
    )


def checked_mask(mask: Any, num_envs: int, *, is_first: bool = False) -> NDArray[np.bool_]:
    """Returns ``options["reset_mask"]`` if it is valid. Errors have the types and words of Gymnasium.

    Args:
        mask: The mask.
        num_envs: N.
        is_first: Whether this is the first reset: environments that it leaves out would have no observation.

    Raises:
        TypeError: The mask is no NumPy array, or its dtype isn't bool.
        ValueError: The mask has another shape, or no True value.
        ConfigError: The first reset leaves environments out.
    """
    rule = "`options['reset_mask']` must"
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"{rule} be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(f"{rule} have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"{rule} have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError(f"{rule} contain a boolean array with at least one True value, got reset_mask={mask}")
    if is_first and not mask.all():
        raise ConfigError(
            f"reset_mask selects {mask.sum()} of {num_envs} environments in the first reset. The first reset must "
            "include all: call reset() without a mask."
        )
    return mask
