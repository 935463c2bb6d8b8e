"""Policies that rayvec has trained, in scripts for Tianshou, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from tianshou.algorithm.modelfree.discrete_sac import DiscreteSACPolicy
from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
from tianshou.algorithm.modelfree.sac import SACPolicy
from tianshou.data import Batch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from rayvec.data import Tree
from rayvec.errors import ConfigError
from rayvec.learners.sac_networks import SACActor
from rayvec.policies.distributions import Gaussian, TanhGaussian, mean_and_log_std
from rayvec.policies.networks import ActorCritic, flat_weights
from rayvec.training import checkpoint as checkpoints
from rayvec.training.agent import load
from rayvec.training.checkpoint import space_to_plain

__all__ = ["AgentPolicy", "load_critic", "load_policy", "save_policy"]


class _Actor(nn.Module):
    """The actor of a run in the form of Tianshou's: from observations to what its distribution takes.

    Args:
        module: The network of a run.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, obs: Any, state: Any = None, info: Any = None) -> tuple[Any, Any]:
        """Returns logits ``[B, n]``, or means and standard deviations, each ``[B, C]``; and `state`."""
        module = self.module
        params = module.action_parameters(module.encode(_tree(obs)))
        if isinstance(module.distribution, Gaussian):
            mean, log_std = params.chunk(2, -1)
            return (mean, log_std.exp()), state
        if isinstance(module.distribution, TanhGaussian):
            mean, log_std = mean_and_log_std(params)
            return (mean, log_std.exp()), state
        return params, state


class _Critic(nn.Module):
    """The critic of a run in the form of Tianshou's.

    Args:
        module: The network of a run of PPO or IMPALA.
    """

    def __init__(self, module: ActorCritic) -> None:
        super().__init__()
        self.module = module

    def forward(self, obs: Any, **kwargs: Any) -> Tensor:
        """Returns values ``[B, 1]``."""
        return self.module.value(self.module.encode(_tree(obs))).unsqueeze(-1)


class AgentPolicy(ProbabilisticActorPolicy):
    """A policy of Tianshou with the network of a run of PPO or IMPALA, for any of its on-policy algorithms.

    Args:
        module: The network.
        action_space: Of one environment, Discrete or Box.
        observation_space: Of one environment.
    """

    def __init__(
        self, module: ActorCritic, action_space: spaces.Space[Any], observation_space: spaces.Space[Any]
    ) -> None:
        super().__init__(
            actor=cast(Any, _Actor(module)),
            dist_fn=_distribution,
            deterministic_eval=True,
            action_space=action_space,
            observation_space=observation_space,
            action_scaling=False,
            action_bound_method=None,
        )

    def map_action(self, act: Any) -> Any:
        """Returns the actions for the environments: clipped to the bounds of a Box, counted from a Discrete's start."""
        module = cast(Any, self.actor).module
        return module.distribution.action(self._action_to_numpy(act))


def load_policy(run_dir: Path | str, checkpoint: str = "checkpoint.pt") -> AgentPolicy | SACPolicy | DiscreteSACPolicy:
    """Returns the policy of a run as a policy of Tianshou, to act with or to train further.

    Outside of training steps it takes the actions of ``rayvec.load(run_dir).predict``. The statistics that normalise
    observations are part of it and stay as they are.

    Args:
        run_dir: Directory of the run.
        checkpoint: As of :func:`rayvec.load`.

    Returns:
        A :class:`AgentPolicy` for PPO and IMPALA; a ``SACPolicy`` or ``DiscreteSACPolicy`` for SAC.

    Raises:
        ConfigError: `run_dir` is not the directory of a run, or its actions are neither Discrete nor a Box.
        CheckpointError: The checkpoint is missing or damaged.
    """
    agent = load(run_dir, checkpoint)
    module, action_space = agent.module.requires_grad_(True), agent.action_space
    starts_at_0 = isinstance(action_space, spaces.Discrete) and action_space.start == 0
    if type(module) not in (ActorCritic, SACActor) or getattr(module, "is_masked", False):
        raise ConfigError(
            f"The run's network is a {type(module).__name__}, or it has action masks. load_policy takes a run of PPO, "
            "IMPALA or SAC with a default network, without memory and without action masks: act with rayvec.load, or "
            "build the policy of Tianshou from agent.module yourself."
        )
    is_known = isinstance(action_space, spaces.Box) or starts_at_0
    if not is_known and not (isinstance(module, ActorCritic) and isinstance(action_space, spaces.Discrete)):
        raise ConfigError(
            f"The actions are {action_space}. A policy of Tianshou takes a Box, or a Discrete that starts at 0: wrap "
            "the environment's actions, or act with rayvec.load."
        )
    if isinstance(module, ActorCritic):
        return AgentPolicy(module, action_space, agent.observation_space)
    kind: Any = DiscreteSACPolicy if starts_at_0 else SACPolicy
    policy: SACPolicy | DiscreteSACPolicy = kind(
        actor=_Actor(module),
        deterministic_eval=True,
        action_space=action_space,
        observation_space=agent.observation_space,
    )
    return policy


def load_critic(policy: AgentPolicy) -> nn.Module:
    """Returns the critic that belongs to a policy of `load_policy`, as Tianshou's on-policy algorithms take it.

    Args:
        policy: Of a run of PPO or IMPALA.

    Raises:
        ConfigError: The policy has none.
    """
    return _Critic(_module(policy, ActorCritic))


def save_policy(policy: Any, path: Path | str) -> None:
    """Writes the weights of a policy of `load_policy`, trained further or not, for :func:`rayvec.load`.

    Args:
        policy: The policy.
        path: A file in the directory of its run, such as ``runs/first/tianshou.pt``. Then
            ``rayvec.load("runs/first", "tianshou.pt")`` acts with it.

    Raises:
        ConfigError: The policy does not come from `load_policy`.
    """
    module = _module(policy, nn.Module)
    described = [space_to_plain(space) for space in (policy.observation_space, policy.action_space)]
    state = {"weights": torch.from_numpy(flat_weights(module)), "spaces": None if None in described else described}
    checkpoints.save(Path(path), state)


def _module(policy: Any, kind: type[nn.Module]) -> Any:
    module = getattr(getattr(policy, "actor", None), "module", None)
    if not isinstance(module, kind) or not hasattr(module, "encoder"):
        raise ConfigError(
            f"{type(policy).__name__} does not come from load_policy"
            + (" of a run of PPO or IMPALA. " if kind is ActorCritic else ". ")
            + "Let other policies act by rayvec.tianshou.TianshouPolicy."
        )
    return module


def _distribution(params: Any) -> Distribution:
    if isinstance(params, tuple):
        return Independent(Normal(*params), 1)
    return Categorical(logits=params)


def _tree(obs: Any) -> Tree:
    """Returns observations of Tianshou as arrays."""
    if isinstance(obs, dict | Batch):
        return {key: _tree(part) for key, part in obs.items()}
    return obs.cpu().numpy() if isinstance(obs, Tensor) else np.asarray(obs)
