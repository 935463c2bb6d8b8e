"""Which network a learner trains: your own or the default one, with or without action masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gymnasium import spaces

from rayvec.config.references import resolve
from rayvec.policies.distributions import make_distribution
from rayvec.policies.masks import has_mask, without_mask
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
) -> ActorCriticModule:
    """Returns the actor-critic that the settings ask for, with its initial weights.

    Args:
        observation_space: Of one environment.
        action_space: Of one environment.
        config: The settings.

    Raises:
        ConfigError: There is no network for these spaces, or your own can't be trained.
    """
    is_masked = config.action_masks and has_mask(observation_space, action_space)
    settings: dict[str, Any] = {
        "masked": is_masked,
        "scaled": config.scale_actions,
        "normalize_obs": config.normalize_obs,
        "activation": config.activation,
        "layer_norm": config.layer_norm,
        "cnn": config.cnn,
        "log_std_init": config.log_std_init,
        "seed": config.seed,
    }
    spaces_and_sizes = observation_space, action_space, config.hidden_sizes
    if config.recurrent is not None:
        settings |= {name: getattr(config, name) for name in ("recurrent_size", "sequence_length", "burn_in")}
        return make_recurrent_actor_critic(*spaces_and_sizes, kind=config.recurrent, **settings)
    if config.network is None:
        return make_actor_critic(*spaces_and_sizes, shared_trunk=config.shared_trunk, **settings)
    space = without_mask(observation_space) if is_masked else observation_space
    distribution = make_distribution(action_space, config.scale_actions)
    with seeded(config.seed):
        net = build_network(resolve("network", config.network), space, action_space, config)
        return OwnActorCritic(
            net, observation_space, distribution, masked=is_masked, normalize_obs=config.normalize_obs
        )
