"""A trained network as a file that runs without rayvec: ONNX, from observations to greedy actions."""

from __future__ import annotations

import itertools
import logging
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rayvec.errors import ConfigError, first_line
from rayvec.learners.sac_networks import OwnSACActor
from rayvec.policies.distributions import NOT_ALLOWED, Categorical, Gaussian, TanhGaussian
from rayvec.policies.encoders import OBS_CLIP, Encoder, leaf_spaces
from rayvec.policies.masks import MaskedActorCritic
from rayvec.policies.networks import ActorCritic
from rayvec.policies.own_network import OwnActorCritic
from rayvec.policies.recurrent import RecurrentActorCritic
from rayvec.training.atomic_files import written_whole
from rayvec.wrappers import MASK_KEY

__all__ = ["GreedyModule", "export"]


class GreedyModule(nn.Module):
    """From the arrays of observations to greedy actions ``[B, *act_shape]``, in torch alone.

    Args:
        module: A network of a learner: an actor-critic, or the actor of SAC.
        observation_space: Of one environment.

    Raises:
        ConfigError: The network is of another kind.
    """

    def __init__(self, module: Any, observation_space: spaces.Space[Any]) -> None:
        super().__init__()
        distribution = getattr(module, "distribution", None)
        net: Any = module.module if isinstance(module, MaskedActorCritic) else module
        leaves = dict(leaf_spaces(observation_space))
        paths = list(leaves)
        self._mask = paths.index((MASK_KEY,)) if getattr(module, "is_masked", False) else None
        self._space = observation_space
        self._sees_all = isinstance(net, OwnActorCritic)
        encoder = getattr(net, "encoder", None)
        self._box: int | None = None
        if isinstance(net, OwnSACActor):
            reader: Any = net.encoder
            encoder = reader.encoder
            if encoder is None:
                encoder, self._box = Encoder((), 0), next(i for i, path in enumerate(paths) if path != (MASK_KEY,))
        is_known = isinstance(distribution, Categorical | Gaussian | TanhGaussian)
        if isinstance(net, RecurrentActorCritic) or not isinstance(encoder, Encoder) or not is_known:
            raise ConfigError(
                f"{type(module).__name__} can't be exported. That is for networks of PPO, IMPALA and SAC without "
                "memory: export the torch module itself, agent.module."
            )
        self.module = net
        self._encoder, self._distribution = encoder, distribution
        self._numbers = [
            (paths.index(path), leaves[path], getattr(encode, "scale", None)) for path, encode in encoder.leaves
        ]
        self._images = [paths.index(image.path) for image in encoder.images]
        if isinstance(distribution, Gaussian | TanhGaussian):
            for name in ("low", "high"):
                self.register_buffer(name, torch.tensor(getattr(distribution, name)), persistent=False)

    def forward(self, *obs: Tensor) -> Tensor:
        """Returns the actions for a batch; an array for each leaf of the observation space, in its order."""
        params = self._outputs(obs)
        if self._mask is not None:
            params = torch.where(obs[self._mask] != 0, params, NOT_ALLOWED)
        return self._greedy(params)

    def _outputs(self, obs: tuple[Tensor, ...]) -> Any:
        """Returns the parameters of the distribution, without a mask."""
        if self._sees_all:
            return self.module.action_parameters(self.module.read(_assembled(iter(obs), self._space)))
        if self._box is not None:
            return self.module(obs[self._box].float())
        rows = [_encoded(obs[index], space, scale) for index, space, scale in self._numbers]
        images = [obs[index] for index in self._images]
        if not isinstance(self.module, ActorCritic):
            return self.module(torch.cat(rows, -1))
        numbers = [torch.cat(rows, -1)] if rows else []
        mean, scale = self.module.obs_mean, self.module.obs_scale
        if numbers and mean is not None and scale is not None:
            numbers = [((numbers[0] - mean) * scale).clamp(-OBS_CLIP, OBS_CLIP)]
        parts = [*numbers, *images]
        return self.module.action_parameters(parts[0] if len(parts) == 1 else tuple(parts))

    def _greedy(self, params: Tensor) -> Tensor:
        """Returns the most probable actions; for a squashed normal, the means squashed."""
        distribution = self._distribution
        if isinstance(distribution, Categorical):
            ends = list(itertools.accumulate(distribution.sizes, initial=0))
            chosen = [params[..., start:end].argmax(-1) for start, end in itertools.pairwise(ends)]
            action = torch.stack(chosen, -1) + torch.tensor(distribution.starts)
            return action.reshape(-1, *distribution.shape).to(_torch_dtype(distribution.dtype))
        low, high = self.get_buffer("low"), self.get_buffer("high")
        mean = params.chunk(2, -1)[0].reshape(params.shape[0], *low.shape)
        if isinstance(distribution, TanhGaussian):
            mean = (0.5 * low + 0.5 * high) + (0.5 * high - 0.5 * low) * mean.tanh()
        return torch.minimum(torch.maximum(mean, low), high).to(low.dtype)


def _assembled(leaves: Iterator[Tensor], space: spaces.Space[Any]) -> Any:
    """Returns the arrays of a batch of observations in the form of their space."""
    if isinstance(space, spaces.Dict):
        return {key: _assembled(leaves, part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_assembled(leaves, part) for part in space.spaces)
    return next(leaves)


def _encoded(array: Tensor, space: spaces.Space[Any], scale: Any) -> Tensor:
    """Returns one leaf of an observation as numbers ``[B, D]``, as the encoder does."""
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        sizes, starts = np.atleast_1d(getattr(space, "nvec", getattr(space, "n", 0))), np.atleast_1d(space.start)
        components = array.reshape(-1, sizes.size)
        hot = [
            components[:, c, None] == torch.arange(int(start), int(start + size))
            for c, (size, start) in enumerate(zip(sizes.flat, starts.flat, strict=True))
        ]
        return torch.cat(hot, -1).float()
    numbers = array.reshape(array.shape[0], math.prod(space.shape or ())).float()
    return numbers if scale is None else numbers * torch.from_numpy(scale)


def export(module: Any, observation_space: spaces.Space[Any], path: Path) -> Path:
    """Writes a network to a file; see :meth:`rayvec.training.agent.Agent.export`."""
    if path.suffix != ".onnx":
        raise ConfigError(f"The path {path} does not end with .onnx. Policies are exported to ONNX.")
    leaves = dict(leaf_spaces(observation_space))
    greedy = GreedyModule(module, observation_space).eval().requires_grad_(False)
    with written_whole(path) as file, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch warns of its own future
        file.write(_onnx(greedy, tuple(map(_example, leaves.values())), _input_names(leaves)))
    return path


def _onnx(greedy: GreedyModule, example: tuple[Tensor, ...], names: Sequence[str]) -> bytes:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    rows = torch.export.Dim("rows", min=1)
    try:
        program = torch.onnx.export(
            greedy,
            example,
            input_names=names,
            output_names=["action"],
            dynamic_shapes=(tuple({0: rows} for _ in example),),
            verbose=False,
            dynamo=True,
        )
        assert program is not None
        graph = program.model.graph
        sizes = {value.name: value.shape[0] for value in (*graph.inputs, *graph.outputs) if value.shape}
        if fixed := [f"{name} of {size} rows" for name, size in sizes.items() if isinstance(size, int)]:
            raise ValueError(f"{fixed}: read the number of rows from obs.shape[0] in forward, not from len()")
    except Exception as error:  # torch gives no class for all of them
        raise ConfigError(
            f"The network could not be exported to ONNX: {type(error).__name__}: {first_line(error)[:200]}. "
            "Change the network so that torch can trace it for any number of observations, or, if a package is "
            "missing: pip install onnx onnxruntime onnxscript."
        ) from error
    for value in [*graph.initializers.values(), *(value for node in graph for value in node.outputs)]:
        if value.name in names:  # of an observation called "linear" or "low"
            value.name = f"{value.name}_of_policy"
    data: bytes = program.model_proto.SerializeToString()
    return data


def _input_names(paths: Iterable[tuple[Any, ...]]) -> list[str]:
    """Returns a name for each array of an observation, all different and none that of the output."""
    names: list[str] = []
    for keys in paths:
        name = "_".join(map(str, keys)) or "obs"
        while name in (*names, "action"):
            name += "_"
        names.append(name)
    return names


def _example(space: spaces.Space[Any]) -> Tensor:
    """Returns two observations of a space: one row would become a constant of the exported graph."""
    array = torch.tensor(np.stack([space.sample(), space.sample()]))
    return array.float() if array.dtype == torch.float64 else array


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, dtype)).dtype
