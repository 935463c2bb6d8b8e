"""Torch modules for actors and critics, and how any module acts."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from rayvec.distributions import Distribution, Gaussian, make_distribution
from rayvec.policies import Encoder, MLPActor, check_length, make_encoder
from rayvec.types import Tree, tree_map

__all__ = ["ActorCritic", "ModuleActor", "make_actor_critic"]


class ActorCritic(nn.Module):
    """Two MLPs with tanh that share nothing: one puts out the parameters of a distribution, one values.

    Weights are orthogonal, with a gain of sqrt(2) for hidden layers, 0.01 for the actor's last, so that it starts
    near the uniform or standard normal distribution, and 1 for the critic's last; biases are 0 (Andrychowicz et
    al., "What matters in on-policy reinforcement learning?", ICLR 2021). The standard deviation of a Gaussian does
    not depend on the observation and starts at 1.

    Args:
        encoder: From observations to rows of D numbers.
        distribution: Of actions.
        hidden_sizes: Widths of the hidden layers, the same for actor and critic.
        seed: Of the initial weights; torch's own generator is neither read nor moved.
    """

    log_std: nn.Parameter | None

    def __init__(
        self, encoder: Encoder, distribution: Distribution, hidden_sizes: Sequence[int] = (64, 64), *, seed: int = 0
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.encoder, self.distribution = encoder, distribution
        is_gaussian = isinstance(distribution, Gaussian)
        num_outputs = distribution.num_params // 2 if is_gaussian else distribution.num_params
        self.actor = _mlp((encoder.num_features, *hidden_sizes, num_outputs), 0.01, generator)
        self.critic = _mlp((encoder.num_features, *hidden_sizes, 1), 1.0, generator)
        self.log_std = nn.Parameter(torch.zeros(num_outputs)) if is_gaussian else None

    def encode(self, obs: Tree) -> Tensor:
        """Returns ``[..., D]`` for an observation tree of ``[..., *obs_shape]``."""
        return to_tensor(self.encoder(obs))

    def action_parameters(self, rows: Tensor) -> Tensor:
        """Returns the distribution's parameters ``[B, P]`` for encoded observations ``[B, D]``."""
        outputs: Tensor = self.actor(rows)
        if self.log_std is None:
            return outputs
        return torch.cat([outputs, self.log_std.expand_as(outputs)], -1)

    def value(self, rows: Tensor) -> Tensor:
        """Returns values ``[...]`` for encoded observations ``[..., D]``."""
        values: Tensor = self.critic(rows)
        return values.squeeze(-1)

    def make_actor(self) -> MLPActor:
        """Returns the actor with the present weights, free of torch."""
        sizes = {name: parameter.numel() for name, parameter in self.named_parameters()}
        starts = dict(zip(sizes, itertools.accumulate([0, *sizes.values()]), strict=False))
        constants = slice(starts["log_std"], starts["log_std"] + sizes["log_std"]) if "log_std" in sizes else slice(0)
        layers = [(name, layer) for name, layer in self.actor.named_children() if isinstance(layer, nn.Linear)]
        actor = MLPActor(
            self.encoder,
            self.distribution,
            layers=tuple(
                (starts[f"actor.{name}.weight"], starts[f"actor.{name}.bias"], layer.out_features, layer.in_features)
                for name, layer in layers
            ),
            num_weights=sum(sizes.values()),
            constants=constants,
        )
        actor.load_weights(flat_weights(self))
        return actor


def make_actor_critic(
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    hidden_sizes: Sequence[int] = (64, 64),
    *,
    seed: int = 0,
) -> ActorCritic:
    """Returns an actor-critic for the spaces of one environment.

    Raises:
        ConfigError: There is no encoder for the observations, or no distribution for the actions.
    """
    return ActorCritic(make_encoder(observation_space), make_distribution(action_space), hidden_sizes, seed=seed)


class ModuleActor:
    """Acts with any module, through torch but without autograd.

    The number of torch's threads is left alone: a pool starts its workers with one.

    Args:
        module: From observations (tree of tensors ``[k, *obs_shape]``) to parameters ``[k, P]``; a copy is kept, in
            evaluation mode.
        distribution: Of actions.
    """

    def __init__(self, module: nn.Module, distribution: Distribution) -> None:
        self.distribution = distribution
        self._module = copy.deepcopy(module).requires_grad_(False).eval()
        for parameter in self._module.parameters():
            parameter.grad = None
            parameter.data = parameter.data.clone()  # of its own: a view would pickle the whole buffer behind it

    def __call__(self, obs: Tree) -> NDArray[np.float32]:
        """Returns parameters ``float32 [k, P]``."""
        with torch.inference_mode():
            params: Tensor = self._module(tree_map(to_tensor, obs))
            return params.float().numpy()

    def load_weights(self, weights: NDArray[np.float32]) -> None:
        """Copies one flat vector into the parameters, in the order of ``module.parameters()``."""
        parameters = list(self._module.parameters())
        check_length(weights, sum(parameter.numel() for parameter in parameters))
        start = 0
        for parameter in parameters:
            part = weights[start : start + parameter.numel()]
            parameter.copy_(torch.tensor(part).view_as(parameter))
            start += len(part)


def flat_weights(module: nn.Module) -> NDArray[np.float32]:
    """Returns a copy of all parameters as one ``float32`` vector, in the order of ``module.parameters()``."""
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
    return flat.float().cpu().numpy()


def to_tensor(array: NDArray[Any]) -> Tensor:
    """Returns a tensor of the array's dtype, but float64 as float32; it shares memory unless that is read-only."""
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def _mlp(sizes: Sequence[int], last_gain: float, generator: torch.Generator) -> nn.Sequential:
    modules: list[nn.Module] = []
    for i, (ins, outs) in enumerate(itertools.pairwise(sizes)):
        is_last = i == len(sizes) - 2
        layer = nn.Linear(ins, outs, device="meta").to_empty(device="cpu")
        nn.init.orthogonal_(layer.weight, last_gain if is_last else math.sqrt(2), generator)
        nn.init.zeros_(layer.bias)
        modules += [layer] if is_last else [layer, nn.Tanh()]
    return nn.Sequential(*modules)
