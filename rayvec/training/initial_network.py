"""Training that begins with the network of another run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from gymnasium import Space

from rayvec.config import TrainConfig
from rayvec.errors import ConfigError
from rayvec.training.atomic_files import local_path
from rayvec.training.run_dir import load_run
from rayvec.training.runs import LEARNERS
from rayvec.training.space_checks import check_kept_spaces

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
    _, other = load_run(local_path(config.init_from))
    check_kept_spaces(own_spaces, other)
    learner: Any = LEARNERS[type(config)]
    try:
        begun: dict[str, Any] = learner.with_network(own, other["learner"], config)
    except (AttributeError, KeyError) as error:
        raise ConfigError(
            f"The learner can't begin with the network of {config.init_from} ({type(error).__name__}: {error}). Use a "
            "run of the same algorithm, whose learner has a method with_network."
        ) from error
    expected, got = _shapes(own), _shapes(begun)
    for name in {**expected, **got}:
        if expected.get(name) != got.get(name):
            raise ConfigError(
                f"The run {config.init_from} has another network: {name} has the shape {got.get(name)}, and this run "
                f"needs {expected.get(name)}. Use the settings of the network of that run, or leave init_from out."
            )
    return begun


def _shapes(state: Mapping[str, Any], path: str = "") -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors of a state by their names."""
    shapes = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            shapes[f"{path}{name}"] = tuple(value.shape)
        elif isinstance(value, dict):
            shapes |= _shapes(value, f"{path}{name}.")
    return shapes
