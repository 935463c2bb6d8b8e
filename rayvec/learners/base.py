"""The interface of a learner, what those of rayvec share, and what they check."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rayvec.data import Batch
from rayvec.errors import CheckpointError, ConfigError, first_line
from rayvec.learners.ranks import ALONE, Ranks
from rayvec.learners.running_stats import ObsMoments
from rayvec.node.shared_memory import keep_freed_memory
from rayvec.policies.networks import ActorCriticModule, flat_weights


class Learner(Protocol):
    """Turns batches into new weights.

    :func:`rayvec.train` builds one from the spaces of an environment and the settings of the run (see
    :func:`rayvec.training.runs.register`), lets ``rayvec.Policy(learner.module)`` act, and publishes
    ``weights()`` after every update that learned something. A class with ``reads_infos = False`` gets chunks without
    infos. A learner whose policy normalises observations may have a method ``measure(batch)``, which adds those of a
    batch to the statistics and learns nothing else from it.
    """

    @property
    def module(self) -> nn.Module:
        """The module that acts in ``rayvec.Policy(learner.module)``."""

    def update(self, batch: Batch) -> dict[str, float]:
        """Learns from a batch and returns metrics by name.

        A learner that only stored the batch (its replay is still too small) returns no metrics: its weights have
        not changed and are not published.

        Raises:
            LearnerError: The loss or its gradient is not finite; the weights are those before the failed step.
        """

    def weights(self) -> NDArray[np.float32]:
        """Returns a copy of the weights, flat, as ``Policy.load_weights`` takes them; the caller may keep it."""

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of everything that the next update depends on: tensors and plain values only."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where the learner was when `state` was taken.

        Raises:
            CheckpointError: `state` is of another kind of learner or network.
        """


@runtime_checkable
class KeepsRankLocalState(Protocol):
    """Optional methods of a learner that keeps rank-local state, such as the replay of SAC.

    Its ``state_dict()`` is both parts together, and its ``load_state_dict`` takes the shared part alone, too: then
    the rank-local part is empty. It is empty on all ranks or on none.
    """

    def shared_state(self) -> dict[str, Any]:
        """Returns a copy of the part that is the same on all ranks; a group keeps it after every update."""

    def rank_local_state(self) -> dict[str, Any]:
        """Returns a copy of the part that belongs to this rank, under the names that it has in ``state_dict()``."""


class TorchLearner:
    """What PPO, IMPALA and SAC share: settings, ranks, statistics of observations, and how their state is kept.

    A subclass sets `module` and `_obs_moments`, and has `update` and `_state`.

    Args:
        config: The settings.
        device: Where to train, in place of ``config.learner_device``.

    Attributes:
        config: The settings.
        module: The network that acts.
        ranks: The ranks that compute each update together. Each rank gets the chunks of its own environments, and all
            together compute what one does with the whole batch.
    """

    reads_infos: ClassVar[bool] = False
    _counters: ClassVar[tuple[str, ...]] = ()
    """Names in the state of attributes that count; each has an underscore in front."""
    module: ActorCriticModule
    _obs_moments: ObsMoments

    def __init__(self, config: Any, device: str | None) -> None:
        keep_freed_memory(512 << 20)
        self.config = config
        self.ranks: Ranks = ALONE
        self._device = torch_device(device or config.learner_device)
        self._manual_learning_rate: float | None = None

    def set_learning_rate(self, value: float | None) -> None:
        """Sets the learning rate of the next updates, in place of its schedule; None returns to the schedule.

        With SAC it is that of actor, critics and temperature.
        """
        self._manual_learning_rate = value

    def measure(self, batch: Batch) -> None:
        """Adds the observations of a batch to the moments that normalise later ones; ``update`` does so too.

        Before the first update it lets the policy begin with normalised observations.
        """
        self._obs_moments.add(batch, self.ranks)

    def weights(self) -> NDArray[np.float32]:
        """Returns a copy of all parameters and what normalises observations, flat, as ``Policy.load_weights`` takes."""
        return flat_weights(self.module)

    def _state(self) -> dict[str, Any]:
        """Returns what the next update depends on: tensors themselves, and plain values.

        There is no random state: random numbers depend on (seed, number of the update).
        """
        counts = {name: getattr(self, f"_{name}") for name in self._counters}
        return {**counts, "obs_moments": self._obs_moments.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of what the next update depends on: tensors and plain values only."""
        return copy.deepcopy(self._state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where the learner was when `state` was taken.

        Raises:
            CheckpointError: `state` is of another kind of learner, or of another network.
        """
        own = self._state()
        check_state(own, state)
        copy_into(own, state)
        for name in self._counters:
            setattr(self, f"_{name}", int(state[name]))
        self._obs_moments.load_state_dict(state["obs_moments"])


def copy_into(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Copies the tensors of a state into those of `own` that have their names and shapes."""
    for name, part in own.items():
        if isinstance(part, Mapping):
            copy_into(part, state[name])
        elif isinstance(part, Tensor) and part.shape == state[name].shape:
            part.copy_(state[name])


def set_learning_rate(learner: Any, value: float | None) -> None:
    """Lets a learner use a learning rate from its next update on; None: its own schedule.

    Raises:
        ConfigError: The learner has no method of this name.
    """
    if not hasattr(learner, "set_learning_rate"):
        raise ConfigError(
            f"{type(learner).__name__} has no method set_learning_rate, which context.set_learning_rate calls. Add it "
            "to the learner, or leave the call out."
        )
    learner.set_learning_rate(value)


def torch_device(name: str) -> torch.device:
    """Returns the device to learn on; of several GPUs the first that this process may use.

    Raises:
        ConfigError: torch can't use it.
    """
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # an AssertionError where torch was built without CUDA
        raise ConfigError(
            f"learner_device is {name!r}, which torch {torch.__version__} can't use: {first_line(error)}. Pass "
            "learner_device='cpu', or install torch for CUDA on a machine with a GPU."
        ) from error
    return torch.device(name)


def check_state(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raises a CheckpointError unless a state has the names and the shapes of a learner's own state."""
    expected, got = (_described(each) for each in (own, state))
    if differ := [name for name in {**expected, **got} if expected.get(name) != got.get(name)]:
        raise CheckpointError(
            f"The state is of another learner: its {', '.join(sorted(differ))} differ. Use the configuration that the "
            "checkpoint was written with."
        )


def _described(tree: Any) -> Any:
    """Returns a tree of dicts with shapes in place of its tensors, without what has other shapes in other runs."""
    if isinstance(tree, Mapping):
        return {
            name: _described(part) for name, part in tree.items() if name not in ("replay", "rank_local", "returns")
        }
    return tuple(tree.shape) if isinstance(tree, Tensor) else "a value"


def scheduled(config: Any, name: str, progress: float) -> float:
    """Returns the value of a setting after a share of a run.

    Args:
        config: Has the setting: a number, which the setting ``<name>_schedule`` multiplies by a factor; or values at
            even distances over the run, between which it is interpolated.
        name: Of the setting.
        progress: The share of `total_steps` that is taken, in [0, 1].
    """
    value = getattr(config, name)
    if isinstance(value, tuple):
        return float(np.interp(progress, np.linspace(0, 1, len(value)), value))
    factors = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return float(value * factors[getattr(config, f"{name}_schedule")])
