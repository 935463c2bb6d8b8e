"""A trained network as a file that runs without rayvec: ONNX, from observations to greedy actions."""

from __future__ import annotations

import itertools
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rayvec.errors import ConfigError, first_line
from rayvec.policies.distributions import Categorical, Gaussian, TanhGaussian
from rayvec.policies.encoders import assembled, leaf_spaces
from rayvec.policies.networks import ActorCriticModule
from rayvec.policies.recurrent import RecurrentActorCritic
from rayvec.training.atomic_files import written_whole

__all__ = ["GreedyModule", "export"]


class GreedyModule(nn.Module):
    """From the arrays of observations to greedy actions ``[B, *act_shape]``, in torch alone.

    A network with memory takes states ``[B, D]`` after the observations, and returns the next ones after the actions.

    Args:
        module: A network of a learner: an actor-critic, or the actor of SAC.
        observation_space: Of one environment.

    Raises:
        ConfigError: The network is of another kind.
    """

    def __init__(self, module: Any, observation_space: spaces.Space[Any]) -> None:
        super().__init__()
        distribution: Any = getattr(module, "distribution", None)
        is_known = isinstance(distribution, Categorical | Gaussian | TanhGaussian)
        if not isinstance(module, ActorCriticModule) or not is_known:
            raise ConfigError(
                f"{type(module).__name__} can't be exported. That is for networks of PPO, IMPALA and SAC whose actions "
                "are one array: export the torch module itself, agent.module."
            )
        self.module, self._space, self._distribution = module, observation_space, distribution
        if not isinstance(distribution, Categorical):
            arrays = (distribution.low, distribution.high, *distribution.units)
            for name, array in zip(("low", "high", "centre", "unit"), arrays, strict=True):
                self.register_buffer(name, torch.tensor(array), persistent=False)

    def forward(self, *arrays: Tensor) -> Any:
        """Returns the actions for a batch; an array for each leaf of the observation space, in its order."""
        obs, rest = assembled(self._space, leaves := iter(arrays)), list(leaves)
        rows = self.module.encode(obs)
        if not rest:
            return self._greedy(self.module.action_parameters(rows))
        following = self.module.next_state(rows, rest[0])  # type: ignore[operator]
        return self._greedy(self.module.heads(following, self.module.split(rows)[1])[0]), following  # type: ignore[operator]

    def _greedy(self, params: Tensor) -> Tensor:
        """Returns the most probable actions; for a squashed normal, the means squashed."""
        distribution = self._distribution
        if isinstance(distribution, Categorical):
            ends = list(itertools.accumulate(distribution.sizes, initial=0))
            chosen = [params[..., start:end].argmax(-1) for start, end in itertools.pairwise(ends)]
            action = torch.stack(chosen, -1) + torch.tensor(distribution.starts)
            return action.reshape(-1, *distribution.shape).to(torch.from_numpy(np.zeros(0, distribution.dtype)).dtype)
        low, high, centre, unit = map(self.get_buffer, ("low", "high", "centre", "unit"))
        mean = params.chunk(2, -1)[0].reshape(params.shape[0], *low.shape)
        if isinstance(distribution, TanhGaussian):
            mean = mean.tanh()
        return torch.minimum(torch.maximum(centre + unit * mean, low), high).to(low.dtype)


def export(module: Any, observation_space: spaces.Space[Any], path: Path) -> Path:
    """Writes a network to a file; see :meth:`rayvec.training.agent.Agent.export`."""
    if path.suffix != ".onnx":
        raise ConfigError(f"The path {path} does not end with .onnx. Policies are exported to ONNX.")
    greedy = GreedyModule(module, observation_space).eval().requires_grad_(False)
    inputs, outputs, examples = [], ["action"], []
    for keys, space in leaf_spaces(observation_space):
        name = "_".join(map(str, keys)) or "obs"
        inputs.append(f"{name}_" if name in ("action", "state", "next_state") else name)
        examples.append(torch.tensor(np.stack([space.sample(), space.sample()])))  # of one row torch makes a constant
    if isinstance(module, RecurrentActorCritic):
        examples.append(torch.zeros(2, module.cell.state_size))
        inputs, outputs = [*inputs, "state"], ["action", "next_state"]
    rows = torch.export.Dim("rows", min=1)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with written_whole(path) as file, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch warns of its own future
        try:
            program: Any = torch.onnx.export(
                greedy,
                tuple(examples),
                input_names=inputs,
                output_names=outputs,
                dynamic_shapes=(tuple({0: rows} for _ in examples),),
                verbose=False,
                dynamo=True,
            )
        except Exception as error:  # torch gives no class for all of them
            raise ConfigError(
                f"The network could not be exported to ONNX: {type(error).__name__}: {first_line(error)[:200]}. "
                "Change the network so that torch can trace it for any number of observations, or, if a package is "
                "missing: pip install onnx onnxruntime onnxscript."
            ) from error
        file.write(program.model_proto.SerializeToString())
    return path
