"""Which network a learner trains: the default one, or your own, which is checked before a run begins."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import Space, spaces
from gymnasium.vector.utils import batch_space
from torch import Tensor, nn

from rayvec.config.references import resolve
from rayvec.data import Tree, tree_map
from rayvec.errors import ConfigError, require
from rayvec.policies.distributions import Distribution, make_distribution
from rayvec.policies.encoders import Encoder, at, float_encoder, leaf_spaces, replaced
from rayvec.policies.masks import has_mask, seen, without_mask
from rayvec.policies.networks import ActorCritic, ActorCriticModule, to_device, to_tensor
from rayvec.policies.recurrent import RecurrentActorCritic

if TYPE_CHECKING:
    from rayvec.config.algorithms import ActorCriticConfig

_BATCH = 3


class OwnActorCritic(ActorCriticModule):
    """Your own module as an actor-critic.

    The module is called with the observations as tensors ``[B, *obs_shape]``, in their own dtype but float64 as
    float32; a dict or tuple of these where the space is one. It returns the parameters ``[B, P]`` of the distribution
    and values ``[B]`` or ``[B, 1]``. It stays in evaluation mode, so that learning computes the probabilities that
    actions were drawn with.

    Args:
        net: The module; it becomes a part of this one.
        observation_space: Of one environment.
        distribution: Of actions.
        masked: Whether observations have an action mask, which the module does not see.
        normalize_obs: Whether floating-point numbers are shifted and scaled by ``obs_mean`` and ``obs_scale``, and
            clipped to ±10.

    Raises:
        ConfigError: The module returns something else.
    """

    def __init__(
        self,
        net: nn.Module,
        observation_space: Space[Any],
        distribution: Distribution,
        *,
        masked: bool = False,
        normalize_obs: bool = False,
    ) -> None:
        super().__init__()
        self.net, self.distribution, self.is_masked = net.eval(), distribution, masked
        self.cnns = (net,)
        self.encoder = float_encoder(observation_space) if normalize_obs else Encoder((), 0)
        self._register_statistics(self.encoder.num_features)
        space = without_mask(observation_space) if masked else observation_space
        self._path, _ = next(iter(leaf_spaces(space)))
        sample = sample_batch(space)
        self._num_axes = tree_map(lambda leaf: leaf.ndim - 1, sample)
        outputs = net(sample)
        if not isinstance(outputs, tuple) or len(outputs) != 2:
            raise ConfigError(
                f"The network returned {_kind(outputs)}. Let forward return a tuple (parameters of the distribution, "
                "values)."
            )
        check_output("the parameters of the distribution over actions", outputs[0], distribution.num_params)
        check_output("one value", outputs[1], None)

    def train(self, mode: bool = True) -> OwnActorCritic:
        """Keeps the evaluation mode."""
        return super().train(False)

    def _read(self, obs: Tree) -> Tree:
        """Returns what the module sees of whole observations: normalised, and without a mask."""
        device = next(self.parameters()).device
        obs = tree_map(lambda leaf: to_device(leaf, device), obs)
        if self.obs_mean is not None:
            numbers = self._numbers(obs)
            sizes = [encode.size for _, encode in self.encoder.leaves]
            for (path, encode), part in zip(self.encoder.leaves, torch.split(numbers, sizes, -1), strict=True):
                obs = replaced(obs, path, part.reshape(*part.shape[:-1], *encode.shape))
        obs = tree_map(lambda leaf: leaf.float() if leaf.dtype == torch.float64 else leaf, obs)
        return seen(obs) if self.is_masked else obs

    def _features(self, rows: Tree) -> tuple[Tensor, Tensor]:
        leaf = at(rows, self._path)
        lead = leaf.shape[: leaf.ndim - at(self._num_axes, self._path)]
        params, value = self.net(self._flat(rows, lead))
        if not math.prod(lead):
            params, value = params[:0], value[:0]
        return params.reshape(*lead, self.distribution.num_params).float(), value.reshape(lead).float()

    def _flat(self, rows: Tree, lead: torch.Size) -> Tree:
        """Returns observations with one leading axis, and zeros for no row: a module need not know what to do then."""
        if len(lead) == 1 and lead[0]:
            return rows

        def flat(part: Tensor, axes: int) -> Tensor:
            shape = part.shape[part.ndim - axes :]
            return part.reshape(-1, *shape) if math.prod(lead) else part.new_zeros(1, *shape)

        return tree_map(flat, rows, self._num_axes)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Lets torch's generator begin with a seed, and then be as it was before.

    Layers of the user's own network draw their weights from it: most when they are made, lazy ones in their first call.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def build_network(
    function: Callable[..., Any], observation_space: Space[Any], action_space: Space[Any], config: Any
) -> nn.Module:
    """Returns the module that a user's function makes.

    Args:
        function: Of the two spaces and the settings.
        observation_space: What the network sees.
        action_space: Of one environment.
        config: The settings.

    Raises:
        ConfigError: The function returns no module, one without trainable parameters, or one with parameters of another
            dtype than float32.
    """
    net = function(observation_space, action_space, config)
    if not isinstance(net, nn.Module):
        raise ConfigError(
            f"The function that makes the network returned {type(net).__name__}. It must return a torch.nn.Module."
        )
    found = sorted({str(each.dtype) for each in net.parameters()})
    require(
        found == ["torch.float32"] and any(each.requires_grad for each in net.parameters()),
        f"The network has parameters of the dtypes {found}, or none to train. All must be torch.float32: call "
        "module.float(); and at least one parameter must have requires_grad=True.",
    )
    return net


def sample_batch(space: Space[Any]) -> Tree:
    """Returns three random elements of a space as tensors ``[3, *shape]``; the space's own generator stays as it is.

    Raises:
        ConfigError: A part of the space has no arrays of a fixed shape.
    """
    for _, leaf in leaf_spaces(space):
        if not isinstance(leaf, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
            raise ConfigError(
                f"The observation space has the part {leaf}. A network reads Box, Discrete, MultiDiscrete, "
                "MultiBinary, or a Dict or Tuple of these: transform the observation with a Gymnasium wrapper."
            )
    batched = batch_space(copy.deepcopy(space), _BATCH)
    batched.seed(0)
    return tree_map(lambda leaf: to_tensor(np.asarray(leaf)), batched.sample())


def check_output(name: str, output: Any, width: int | None) -> None:
    """Raises a ConfigError unless a module returned a tensor ``[B, width]``, or ``[B]`` where `width` is None."""
    shapes = {(_BATCH,), (_BATCH, 1)} if width is None else {(_BATCH, width)}
    if not isinstance(output, Tensor) or tuple(output.shape) not in shapes:
        raise ConfigError(
            f"The network returned {_kind(output)} as {name} of {_BATCH} observations. It must be a tensor of "
            f"shape {(_BATCH,) if width is None else (_BATCH, width)}: change the last layer, see "
            "docs/own-network.md."
        )


def _kind(output: Any) -> str:
    """Says what a module returned: a shape, or the type of what is no tensor."""
    return f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__


def make_module(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any], config: ActorCriticConfig
) -> ActorCriticModule:
    """Returns the actor-critic that the settings ask for, with its initial weights.

    Raises:
        ConfigError: There is no network for these spaces, or your own can't be trained.
    """
    is_masked = config.action_masks and has_mask(observation_space, action_space)
    settings: dict[str, Any] = {"masked": is_masked, "normalize_obs": config.normalize_obs}
    if config.network is not None:
        space = without_mask(observation_space) if is_masked else observation_space
        with seeded(config.seed):
            net = build_network(resolve("network", config.network), space, action_space, config)
            distribution = make_distribution(action_space, config.scale_actions)
            return OwnActorCritic(net, observation_space, distribution, **settings)
    settings |= {name: getattr(config, name) for name in ("activation", "layer_norm", "cnn", "log_std_init", "seed")}
    settings |= {"scaled": config.scale_actions, "hidden_sizes": config.hidden_sizes}
    if config.recurrent is None:
        return ActorCritic(observation_space, action_space, shared_trunk=config.shared_trunk, **settings)
    settings |= {name: getattr(config, name) for name in ("recurrent_size", "sequence_length")}
    return RecurrentActorCritic(observation_space, action_space, kind=config.recurrent, **settings)
