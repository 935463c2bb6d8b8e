"""Training that begins with the network of another run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gymnasium import Space
from torch import nn

from rayvec.config import TrainConfig
from rayvec.config.references import is_unnamed
from rayvec.errors import ConfigError
from rayvec.training.agent import load_spaces
from rayvec.training.atomic_files import local_path
from rayvec.training.run_dir import load_run
from rayvec.training.runs import LEARNERS, network_of
from rayvec.training.space_checks import parts_of

__all__ = ["initial_state"]


def initial_state(config: TrainConfig, own: dict[str, Any], own_spaces: Sequence[Space[Any]]) -> dict[str, Any]:
    """Returns the state that the learner of a new run begins with: its own, with the network of `config.init_from`.

    The optimizer, the schedule and the counters are its own.

    Args:
        config: Settings of the new run.
        own: State of its learner, whose rank-local part may be missing.
        own_spaces: Observation space and action space of one of its environments.

    Raises:
        ConfigError: There is no such run, it has another network, or the learner can't begin with one.
        CheckpointError: The checkpoint of that run is missing or damaged.
    """
    if config.init_from is None:
        return own
    other_config, other = load_run(local_path(config.init_from))
    learner: Any = LEARNERS[type(config)]
    if not hasattr(learner, "with_network"):
        raise ConfigError(
            f"init_from={config.init_from} was passed, and {getattr(learner, '__name__', learner)} has no method "
            "with_network. Leave init_from out, or add the method."
        )
    name = getattr(other_config, "network", None)
    if name is not None and is_unnamed(name):  # the layers are compared below
        other_config = replace(other_config, network=getattr(config, "network", None))  # type: ignore[call-arg]
    spaces = load_spaces(other_config, other.get("spaces"))
    for name, ours, theirs in zip(("observations", "actions"), own_spaces, spaces, strict=True):
        if parts_of(ours) != parts_of(theirs):
            raise _another(config.init_from, f"{name} of {ours}", f"{name} of {theirs}")
    wanted, found = (_layers(network_of(each, *spaces)) for each in (config, other_config))
    differences = [(a, b) for a, b in zip(wanted, found, strict=False) if a != b]
    if differences or len(wanted) != len(found):
        expected, got = differences[0] if differences else (f"{len(wanted)} layers", f"{len(found)} layers")
        raise _another(config.init_from, expected, got)
    begun: dict[str, Any] = learner.with_network(own, other["learner"], config)
    shapes = [_shapes(each) for each in (own, begun)]
    if shapes[0] != shapes[1]:
        name = next(name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name))
        expected, got = (f"{name} {each[name]}" if name in each else f"no {name}" for each in shapes)
        raise _another(config.init_from, expected, got)
    return begun


def _another(run_dir: Path, expected: str, got: str) -> ConfigError:
    return ConfigError(
        f"The run {run_dir} has another network: it has {got}, and this run needs {expected}. Use the spaces and "
        "the settings of the network of that run, or leave init_from out."
    )


def _layers(module: nn.Module) -> list[str]:
    """Returns the layers of a network, each with its name, and its other parameters."""
    layers = [f"{name} {layer}" for name, layer in module.named_modules() if not list(layer.children())]
    return layers + [f"{name} {tuple(part.shape)}" for name, part in module.named_parameters() if "." not in name]


def _shapes(state: Mapping[str, Any], path: str = "") -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors of a state by their names."""
    shapes = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            shapes[f"{path}{name}"] = tuple(value.shape)
        elif isinstance(value, dict):
            shapes |= _shapes(value, f"{path}{name}.")
    return shapes
