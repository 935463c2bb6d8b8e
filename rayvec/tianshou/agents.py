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
from rayvec.errors import require
from rayvec.learners.sac_networks import SACActor
from rayvec.policies.distributions import Gaussian, TanhGaussian, mean_and_log_std
from rayvec.policies.networks import ActorCritic, flat_weights
from rayvec.training import checkpoint as checkpoints
from rayvec.training.agent import load


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
        params = self.module.action_parameters(self.module.encode(_tree(obs)))
        if isinstance(self.module.distribution, Gaussian | TanhGaussian):
            is_plain = isinstance(self.module.distribution, Gaussian)
            mean, log_std = params.chunk(2, -1) if is_plain else mean_and_log_std(params)
            return (mean, log_std.exp()), state
        return params, state


class _AgentPolicy(ProbabilisticActorPolicy):
    """A policy with the network of a run of PPO or IMPALA."""

    def map_action(self, act: Any) -> Any:
        """Returns the actions for the environments: clipped to the bounds of a Box, counted from a Discrete's start."""
        return cast(Any, self.actor).module.distribution.action(self._action_to_numpy(act))


def load_policy(
    run_dir: Path | str, checkpoint: str = "checkpoint.pt"
) -> ProbabilisticActorPolicy | SACPolicy | DiscreteSACPolicy:
    """Returns the policy of a run as a policy of Tianshou, to act with or to train further.

    Outside of training steps it takes the actions of ``rayvec.load(run_dir).predict``. The statistics that normalise
    observations are part of it and stay as they are.

    Args:
        run_dir: Directory of the run.
        checkpoint: As of :func:`rayvec.load`.

    Returns:
        A ``ProbabilisticActorPolicy`` for PPO and IMPALA, for any of Tianshou's on-policy algorithms; a ``SACPolicy``
        or ``DiscreteSACPolicy`` for SAC.

    Raises:
        ConfigError: `run_dir` is not the directory of a run, or Tianshou has no such policy.
        CheckpointError: The checkpoint is missing or damaged.
    """
    agent = load(run_dir, checkpoint)
    module, action_space = agent.module.requires_grad_(True), agent.action_space
    is_sac = type(module) is SACActor
    is_discrete = isinstance(action_space, spaces.Discrete) and not (is_sac and action_space.start)
    is_known = (is_sac or type(module) is ActorCritic) and not getattr(module, "is_masked", False)
    require(
        is_known and (is_discrete or isinstance(action_space, spaces.Box)),
        f"The run's network is a {type(module).__name__}, and its actions are {action_space}. load_policy takes a "
        "run of PPO, IMPALA or SAC with a default network, without memory and without action masks, whose actions "
        "are a Box or a Discrete (of SAC one that starts at 0): act with rayvec.load, or build the policy of "
        "Tianshou from agent.module yourself.",
    )
    options: Any = {
        "actor": _Actor(module),
        "deterministic_eval": True,
        "action_space": action_space,
        "observation_space": agent.observation_space,
    }
    if not is_sac:
        return _AgentPolicy(dist_fn=_distribution, action_scaling=False, action_bound_method=None, **options)
    return DiscreteSACPolicy(**options) if is_discrete else SACPolicy(**options)


def save_policy(policy: Any, path: Path | str) -> None:
    """Writes the weights of a policy of `load_policy`, trained further or not, for :func:`rayvec.load`.

    Args:
        policy: The policy.
        path: A file in the directory of its run, such as ``runs/first/tianshou.pt``. Then
            ``rayvec.load("runs/first", "tianshou.pt")`` acts with it.

    Raises:
        ConfigError: The policy does not come from `load_policy`.
    """
    actor: Any = getattr(policy, "actor", None)
    require(
        isinstance(actor, _Actor),
        f"{type(policy).__name__} does not come from load_policy. Let other policies act by "
        "rayvec.tianshou.TianshouPolicy.",
    )
    weights = torch.from_numpy(flat_weights(actor.module))
    described = checkpoints.spaces_to_bytes(policy.observation_space, policy.action_space)
    checkpoints.save(Path(path), {"weights": weights, "spaces": described})


def _distribution(params: Any) -> Distribution:
    return Independent(Normal(*params), 1) if isinstance(params, tuple) else Categorical(logits=params)


def _tree(obs: Any) -> Tree:
    """Returns observations of Tianshou as arrays."""
    if isinstance(obs, dict | Batch):
        return {key: _tree(part) for key, part in obs.items()}
    return obs.cpu().numpy() if isinstance(obs, Tensor) else np.asarray(obs)
