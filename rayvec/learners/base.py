"""The interface of a learner, and the flat buffers that learners keep their parameters in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rayvec.data import Batch
from rayvec.errors import CheckpointError, ConfigError, LearnerError, first_line

__all__ = [
    "KeepsRankLocalState",
    "Learner",
    "MeasuresObservations",
    "buffers_of",
    "check_buffers",
    "check_gpu",
    "explains_memory",
    "load_buffers",
    "set_learning_rate",
    "torch_device",
]

P = ParamSpec("P")
R = TypeVar("R")


class Learner(Protocol):
    """Turns batches into new weights.

    :func:`rayvec.train` builds one from the spaces of an environment and the settings of the run (see
    :func:`rayvec.training.runs.register`), lets ``rayvec.Policy(learner.module)`` act, and publishes
    ``weights()`` after every update that learned something. A class with ``reads_infos = False`` gets chunks without
    infos.
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
class MeasuresObservations(Protocol):
    """An optional method of a learner whose policy normalises observations by their statistics."""

    def measure(self, batch: Batch) -> None:
        """Adds the observations of a batch to the statistics, from which nothing else is learned."""


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
    reason = f"none (torch {torch.__version__})"
    try:
        if name != "cuda" or torch.cuda.is_available():
            torch.empty(0, device=name)
            return torch.device(name)
    except (RuntimeError, AssertionError) as error:  # an AssertionError where torch was built without CUDA
        reason = f"none (torch {torch.__version__}: {first_line(error)})"
    raise ConfigError(
        f"learner_device is {name!r}, which torch can't use: {reason}. Pass learner_device='cpu', or install "
        "torch for CUDA on a machine with a GPU."
    )


def check_gpu() -> None:
    """Raises a ConfigError where torch sees no GPU; it leaves GPUs alone."""
    if not torch.cuda.is_available():
        torch_device("cuda")


def explains_memory(remedy: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Lets a function say what to do where memory runs out, of a GPU or of the machine.

    Args:
        remedy: Names the settings that the function's memory depends on.
    """

    def explaining(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def explained(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except (RuntimeError, MemoryError) as error:
                if not _is_of_memory(error):
                    raise
                asked = " ".join(str(error).split())[:300]
                raise LearnerError(
                    f"Out of memory on the device of the learner: {asked or type(error).__name__}. {remedy}, or "
                    "end other programs that use the memory."
                ) from error

        return explained

    return explaining


def _is_of_memory(error: Exception) -> bool:
    texts = ("DefaultCPUAllocator", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in texts)


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns copies of a module's buffers by name."""
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def check_buffers(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Raises a CheckpointError unless the buffers in a learner's state are those of its module."""
    own = {name: list(buffer.shape) for name, buffer in module.named_buffers()}
    saved = {name: list(buffer.shape) for name, buffer in (state.get("buffers") or {}).items()}
    if saved != own:
        raise CheckpointError(
            f"The state has buffers of shapes {saved}, and the network has {own}. Use the network that the "
            "checkpoint was written with."
        )


def load_buffers(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Copies the buffers in a learner's state, which :func:`check_buffers` has checked, into its module."""
    for name, buffer in module.named_buffers():
        buffer.copy_(state["buffers"][name])
