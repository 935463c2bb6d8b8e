"""Which network a learner trains: your own or the default one, with or without action masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gymnasium import spaces

from rayvec.config.references import resolve
from rayvec.policies.distributions import make_distribution
from rayvec.policies.masks import MaskedActorCritic, has_mask, seen, without_mask
from rayvec.policies.networks import ActorCriticModule, make_actor_critic
from rayvec.policies.own_network import OwnActorCritic, build_network, seeded
from rayvec.policies.recurrent import make_recurrent_actor_critic

if TYPE_CHECKING:
    from rayvec.config.algorithms import ActorCriticConfig

__all__ = ["make_module"]


def make_module(
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    config: ActorCriticConfig,
    normalize_obs: bool,
) -> ActorCriticModule:
    """Returns the actor-critic that the settings ask for, with its initial weights.

    Args:
        observation_space: Of one environment.
        action_space: Of one environment.
        config: The settings.
        normalize_obs: Whether observations are normalised.

    Raises:
        ConfigError: There is no network for these spaces, or your own can't be trained.
    """
    is_masked = config.action_masks and has_mask(observation_space, action_space)
    module: ActorCriticModule
    spaces_and_sizes = observation_space, action_space, config.hidden_sizes
    settings: dict[str, Any] = {
        "normalize_obs": normalize_obs,
        "activation": config.activation,
        "layer_norm": config.layer_norm,
        "cnn": config.cnn,
        "log_std_init": config.log_std_init,
        "seed": config.seed,
    }
    if config.recurrent is not None:
        settings |= {name: getattr(config, name) for name in ("recurrent_size", "sequence_length", "burn_in")}
        return make_recurrent_actor_critic(*spaces_and_sizes, masked=is_masked, kind=config.recurrent, **settings)
    if config.network is None:
        module = make_actor_critic(*spaces_and_sizes, masked=is_masked, shared_trunk=config.shared_trunk, **settings)
    else:
        space = without_mask(observation_space) if is_masked else observation_space
        see, normalized_space = seen if is_masked else None, observation_space if normalize_obs else None
        with seeded(config.seed):
            net = build_network(resolve("network", config.network), space, action_space, config)
            module = OwnActorCritic(net, space, make_distribution(action_space), see, normalized_space)
    return MaskedActorCritic(module) if is_masked else module
