"""The interface of a learner, and the flat buffers that learners keep their parameters in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import vector_to_parameters

from rayvec.data import Batch
from rayvec.errors import CheckpointError, ConfigError, LearnerError, first_line

__all__ = [
    "FlatModule",
    "FlatParameters",
    "KeepsRankLocalState",
    "Learner",
    "MeasuresObservations",
    "buffers_of",
    "check_buffers",
    "check_gpu",
    "explains_memory",
    "load_buffers",
    "torch_device",
]

P = ParamSpec("P")
R = TypeVar("R")


class Learner(Protocol):
    """Turns batches into new weights.

    :func:`rayvec.train` builds one from the spaces of an environment and the settings of the run (see
    :func:`rayvec.training.runs.register`), lets ``rayvec.Policy(learner.module)`` act, and publishes
    ``weights()`` after every update that learned something.
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
        "learner_device says where updates are computed.",
        expected=f"{'a GPU' if name.startswith('cuda') else 'a device'} that torch can use, for {name!r}",
        got=reason,
        remedy="Pass learner_device='cpu', or install torch for CUDA on a machine with a GPU.",
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
                    "What a learner needs fits into the memory of its device.",
                    expected="enough free memory",
                    got=asked or type(error).__name__,
                    remedy=f"{remedy}, or end other programs that use the memory",
                ) from error

        return explained

    return explaining


def _is_of_memory(error: Exception) -> bool:
    texts = ("DefaultCPUAllocator", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in texts)


class FlatParameters:
    """Moves all parameters of a module into one flat buffer, and their gradients into another.

    The parameters stay leaves of their own, so that autograd runs as before (through one flat leaf it costs 9 %
    more), but they and their ``.grad`` are views. One fused optimizer step, one norm, one array to average or
    broadcast then serve them all. Parameters are laid out in the order of ``module.parameters()``.

    ``module.to(...)`` and ``zero_grad(set_to_none=True)``, the default of modules and optimizers, would replace the
    views: use `zero_grad`.

    Attributes:
        param: The flat parameters as the one leaf to give to an optimizer, ``[P]``; its ``.grad`` is `grad`.
        grad: The flat gradient, ``[P]``.

    Raises:
        ConfigError: The module has no parameters, or of several dtypes or devices.
    """

    def __init__(self, module: nn.Module) -> None:
        leaves = list(module.parameters())
        if len({(leaf.dtype, leaf.device) for leaf in leaves}) != 1:
            raise ConfigError(
                "A flat buffer has one dtype and lies on one device.",
                expected="parameters of one dtype on one device",
                got=sorted({f"{leaf.dtype} on {leaf.device}" for leaf in leaves}),
                remedy="Convert the module with module.to(device, dtype) first",
            )
        self.param = nn.Parameter(flat_parameters(leaves))
        vector_to_parameters(self.data, leaves)
        self.grad = torch.zeros_like(self.data)
        self.param.grad = self.grad
        for leaf, grad in zip(leaves, torch.split(self.grad, [leaf.numel() for leaf in leaves]), strict=True):
            leaf.grad = grad.view_as(leaf)

    @property
    def data(self) -> Tensor:
        """The flat parameters without a graph, ``[P]``; written to in place."""
        return self.param.data

    def zero_grad(self) -> None:
        """Sets all gradients to 0 in place."""
        self.grad.zero_()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scales the gradient down to a Euclidean norm of at most `max_norm`; returns the norm before, a scalar."""
        norm: Tensor = torch.linalg.vector_norm(self.grad)
        self.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm


def flat_parameters(parameters: Iterable[Tensor]) -> Tensor:
    """Returns a copy of parameters, flat. Those of one module may have any memory format."""
    return torch.cat([each.detach().reshape(-1) for each in parameters])


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns copies of a module's buffers by name."""
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def check_buffers(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Raises a CheckpointError unless the buffers in a learner's state are those of its module.

    States of older versions have none: those of the module stay as they are.
    """
    own = {name: list(buffer.shape) for name, buffer in module.named_buffers()}
    saved = {name: list(buffer.shape) for name, buffer in (state.get("buffers") or {}).items()}
    if "buffers" in state and saved != own:
        raise CheckpointError(
            "A learner continues from the state of one whose network has the same buffers.",
            expected=f"buffers of shapes {own}",
            got=f"buffers of shapes {saved}",
            remedy="Use the network that the checkpoint was written with",
        )


def load_buffers(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Copies the buffers in a learner's state, which :func:`check_buffers` has checked, into its module."""
    for name, buffer in (state.get("buffers") or {}).items():
        module.get_buffer(name).copy_(buffer)


class FlatModule:
    """A module that is called with parameters from a flat vector, where they lie in the order of ``parameters()``.

    Args:
        module: The module; its own parameters are not read.

    Attributes:
        num_params: P.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places = [(name, each.shape, each.requires_grad) for name, each in module.named_parameters()]
        self._sizes = [each.numel() for each in module.parameters()]
        self.num_params = sum(self._sizes)

    def __call__(self, flat: Tensor, *inputs: Any) -> Any:
        """Returns what the module returns for `inputs` with the parameters in `flat`, ``[P]``."""
        parameters = {
            name: (part if is_trained else part.detach()).view(shape)
            for (name, shape, is_trained), part in zip(self._places, torch.split(flat, self._sizes), strict=True)
        }
        return functional_call(self._module, parameters, inputs)
