"""What all actor-critic learners share: a network in one flat vector, a step of its optimizer, and their state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from rayvec.data import Batch, Tree
from rayvec.errors import ConfigError, LearnerError
from rayvec.learners.base import TorchLearner, scheduled
from rayvec.learners.compiled_steps import CompiledSteps, pad, rounded_length
from rayvec.learners.compiling import can_capture
from rayvec.learners.gradient import Gradient, Loss
from rayvec.learners.onednn import fast_products
from rayvec.learners.optimizer import Adam
from rayvec.learners.running_stats import ObsMoments, Rewards
from rayvec.learners.sequences import OverSequences
from rayvec.policies.networks import ActorCriticModule, to_device
from rayvec.policies.own_network import make_module
from rayvec.policies.precision import in_precision
from rayvec.policies.recurrent import RecurrentActorCritic


class ActorCriticLearner(TorchLearner):
    """Holds an actor-critic and everything that its updates depend on.

    A subclass has `update`, `_select`, `_loss` and `_metrics`.

    Args:
        observation_space: Of one environment.
        action_space: Of one environment.
        config: The algorithm's own settings, ``total_steps`` and ``seed``.
        module: What to train, in place of a network built from the settings; the learner then owns it.
        device: Where to train, in place of ``config.learner_device``.

    Raises:
        ConfigError: There is no network for these spaces, or no such device.
    """

    _counters = ("num_updates", "num_steps")
    _minibatches_have_equal_size: ClassVar[bool] = False
    """Whether minibatches differ little in size, so that one compiled call takes the steps of several."""
    _may_change: ClassVar[tuple[str, ...]] = ("entropy_coef",)
    """Settings that the loss reads and that may have a schedule."""
    _select: Callable[..., Tree]
    """Returns what the loss reads of a minibatch, after its weights; for the arguments see `_learn`."""
    _loss: Loss
    """Returns this rank's part of the loss of a minibatch, and of its statistics, which have no graph.

    Its arguments are the network, `weight`, which is 0 for padding, and what `_select` returns.
    """
    _metrics: Callable[[list[Tensor]], dict[str, float]]
    """Returns means over minibatches of all ranks, by name, from what `_learn` returns."""

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        config: Any,
        *,
        module: ActorCriticModule | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__(config, device)
        self.module = module or make_module(observation_space, action_space, config)
        self._recurrent = self.module if isinstance(self.module, RecurrentActorCritic) else None
        if (self._recurrent is None) != (config.recurrent is None):
            raise ConfigError(
                f"The module is a {type(self.module).__name__}, which does not fit "
                f"recurrent={config.recurrent!r}. Change the setting, or pass another module."
            )
        self.module.to(self._device)
        self._obs_moments = ObsMoments(self.module)
        self._rewards = Rewards(config)
        self._coefficients: dict[str, Any] = {name: torch.zeros((), device=self._device) for name in self._may_change}
        self._is_compiled = config.compile is True
        called: nn.Module = self.module if self._recurrent is None else OverSequences(self._recurrent)
        network = in_precision(called, config.precision, self._device)
        self._gradient = Gradient(network, self._loss, self._is_compiled, varies=True)
        self._optimizer = Adam(self._gradient.flat, eps=1e-5)
        self._learning_rate = 0.0
        can_loop = self._minibatches_have_equal_size and self._recurrent is None and self._device.type == "cpu"
        parts = self._gradient, self._select, self._optimizer, config.max_grad_norm
        self._compiled_steps = CompiledSteps(*parts) if self._is_compiled and can_loop else None
        self._num_updates = 0
        self._num_steps = 0

    def _begin_update(self, batch: Batch) -> None:
        """Sets the learning rate of an update, and other settings that have a schedule.

        Raises:
            LearnerError: A chunk lacks the probabilities of its actions.
        """
        for chunk in batch.chunks:
            if "logp" not in chunk.extras:
                raise LearnerError(
                    f"A chunk has the extras {sorted(chunk.extras)} without 'logp', the probabilities of its actions. "
                    "Collect with rayvec.Policy(learner.module)."
                )
        self._optimizer.failed.zero_()
        progress = min(1.0, self._num_steps / self.config.total_steps)
        for name in self._may_change:
            value = scheduled(self.config, name, progress)
            if self._is_compiled:  # a graph reads the same tensor at each call
                self._coefficients[name].fill_(value)
            else:
                self._coefficients[name] = value
        manual = self._manual_learning_rate
        self._learning_rate = scheduled(self.config, "learning_rate", progress) if manual is None else manual

    def _uploaded(self, minibatches: Sequence[Sequence[NDArray[Any]]]) -> list[tuple[Tensor, ...]]:
        """Returns vectors of each minibatch as tensors on the learner's device, in one upload for all minibatches."""
        columns = []
        for column in zip(*minibatches, strict=True):
            whole = to_device(np.concatenate(column), self._device)
            if whole.is_floating_point():
                whole = whole.to(self._gradient.flat.dtype)
            columns.append(torch.split(whole, [len(part) for part in column]))
        return list(zip(*columns, strict=True))

    def _learn(self, fields: Tree, minibatches: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
        """Takes a step along the gradient of the loss of each minibatch.

        Args:
            fields: What minibatches index.
            minibatches: What this rank has of each: the weight of each row, ``[b]``, and then numbers of rows, each of
                one dimension.

        Returns:
            Of each, this rank's statistics, and then the norm of the gradient, as `_metrics` reads them.

        Raises:
            LearnerError: A gradient is not finite. The weights are those before: no later minibatch has changed them.
        """
        loop, num_rows = self._compiled_steps, max((len(weight) for weight, *_ in minibatches), default=0)
        if self._recurrent is not None:
            num_rows //= self._recurrent.sequence_length
        with fast_products(num_rows, len(self._gradient.flat), self.config.network is not None):
            if loop is not None and self.ranks.size == 1 and loop.accepts(minibatches):
                stats = loop(fields, minibatches, self._learning_rate)
            else:
                stats = [self._step(fields, *rows) for rows in minibatches]
        if self._optimizer.failed.item():
            failed = next(each for each in stats if not math.isfinite(each[-1]))  # the same on all ranks
            raise LearnerError(
                f"A loss or its gradient is not finite (update {self._num_updates}): {self._metrics([failed])}. "
                "Look for NaN, and for numbers beyond float32, in observations and rewards, or lower "
                "learning_rate or max_grad_norm."
            )
        return stats

    def _step(self, fields: Tree, *rows: Tensor) -> Tensor:
        """Takes a step along the gradient of one minibatch, which all ranks add up; returns what `_learn` returns."""
        if self._is_compiled and len(rows[0]):
            lengths = [rounded_length(len(each)) if can_capture(self._device) else 2 for each in rows]
            rows = tuple(pad(each, length, k == 0) for k, (each, length) in enumerate(zip(rows, lengths, strict=True)))
        weight, *numbers = rows
        stats = self._gradient(weight, *self._select(fields, *numbers))
        gradient = self.ranks.all_reduce_(self._gradient.grad)
        norm = torch.linalg.vector_norm(gradient)
        gradient.mul_((self.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        self._optimizer.step(gradient, norm, self._learning_rate)
        return torch.cat([stats, norm.reshape(1).to(stats)])

    def _state(self) -> dict[str, Any]:
        return {
            **super()._state(),
            "parameters": self._gradient.flat,
            "buffers": dict(self.module.named_buffers()),
            "optimizer": self._optimizer.state_dict(),
            "return_scale": self._rewards.state_dict(),
        }

    @staticmethod
    def with_network(own: dict[str, Any], other: Mapping[str, Any], config: Any) -> dict[str, Any]:
        """Returns the state `own` with the network of the state `other`, statistics of observations included."""
        return {**own, **{name: other[name] for name in ("parameters", "buffers", "obs_moments")}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: D102
        super().load_state_dict(state)
        self._rewards.load_state_dict(state["return_scale"])
