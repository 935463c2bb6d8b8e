"""What all actor-critic learners share: the network in flat buffers, its optimizer, and the state of both."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from rayvec.data import Chunk, Tree
from rayvec.errors import CheckpointError, ConfigError, LearnerError
from rayvec.learners.actor_critic_networks import make_module
from rayvec.learners.adam import FlatOptimizer
from rayvec.learners.base import FlatParameters, buffers_of, check_buffers, load_buffers, torch_device
from rayvec.learners.compiled_step import CompiledStep
from rayvec.learners.paired_mlps import PairedMLPs, paired_mlps
from rayvec.learners.ranks import ALONE, Ranks
from rayvec.learners.running_stats import ReturnScale, RunningMoments
from rayvec.learners.sequences import OverSequences
from rayvec.policies.networks import ActorCriticModule, flat_weights
from rayvec.policies.precision import prepare
from rayvec.policies.recurrent import RecurrentActorCritic
from rayvec.pools.shared_memory import keep_freed_memory

if TYPE_CHECKING:
    from rayvec.config.network import ActorCriticConfig

__all__ = ["ActorCriticLearner"]


class ActorCriticLearner:
    """Holds an actor-critic and everything that its updates depend on; a subclass defines the update.

    Args:
        observation_space: Of one environment.
        action_space: Of one environment.
        config: The algorithm's own settings, ``total_steps`` and ``seed``.
        module: What to train, in place of a network built from the settings; the learner then owns it.
        device: Where to train, in place of ``config.learner_device``.

    Attributes:
        config: The settings.
        module: The actor-critic in training.
        ranks: The ranks that compute each update together.

    Raises:
        ConfigError: There is no network for these spaces, or no such device.
    """

    config: ActorCriticConfig
    _num_statistics: ClassVar[int]
    """How many numbers `_loss_of_rows` returns besides the loss."""
    _is_joining: ClassVar[bool] = False
    """Whether minibatches differ little in their lengths."""

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        config: Any,
        *,
        module: ActorCriticModule | None = None,
        device: str | None = None,
    ) -> None:
        keep_freed_memory(512 << 20)
        self.config = config
        self.ranks: Ranks = ALONE
        normalize_obs = getattr(config, "normalize_obs", False)
        self.module = module or make_module(observation_space, action_space, config, normalize_obs)
        self._recurrent = self.module if isinstance(self.module, RecurrentActorCritic) else None
        if (self._recurrent is None) != (config.recurrent is None):
            raise ConfigError(
                "The setting `recurrent` says what network there is.",
                expected=f"a network that fits recurrent={config.recurrent!r}",
                got=type(self.module).__name__,
                remedy="Change the setting, or pass another module.",
            )
        self._network = self.module if self._recurrent is None else OverSequences(self._recurrent)
        self._device = torch_device(device or config.learner_device)
        self.module.to(self._device)
        self.module.compute_in(config.precision)
        prepare(config.precision, self._device)
        self._obs_moments = None if self.module.obs_mean is None else RunningMoments(len(self.module.obs_mean))
        self._return_scale = ReturnScale(config.gamma) if config.normalize_reward else None
        self._flat = FlatParameters(self.module)
        self._optimizer = self._make_optimizer(self._flat.param)
        self._compiled = self._make_compiled() if config.compile is True else None
        self._paired: PairedMLPs | None = None
        self._num_updates = 0
        self._num_steps = 0

    def _make_optimizer(self, parameter: torch.nn.Parameter) -> FlatOptimizer:
        """Returns what steps the flat parameters."""
        raise NotImplementedError

    def _make_compiled(self) -> CompiledStep:
        parts = self._network, self._loss_of_rows, self._optimizer, self.config.max_grad_norm, self._num_statistics
        return CompiledStep(*parts, is_joining=self._is_joining and self._recurrent is None)

    def _check_recorded(self, chunk: Chunk) -> None:
        """Raises a LearnerError where a chunk lacks the probabilities of its actions."""
        if "logp" not in chunk.extras:
            raise LearnerError(
                f"{self.config.algorithm.upper()} weighs actions by the probability with which they were chosen.",
                expected='extras["logp"] in every chunk',
                got=sorted(chunk.extras),
                remedy="Collect with rayvec.Policy(learner.module)",
            )

    def _learn(self, fields: tuple[Tree, ...], minibatches: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
        """Takes a step along the gradient of the loss of each minibatch.

        Args:
            fields: What minibatches index.
            minibatches: What this rank has of each, as `_loss_of_rows` takes it: weights, then what else it needs.

        Returns:
            Of each, this rank's statistics, and then the norm of the gradient, as `_metrics` reads them.
        """
        if self._compiled is not None and self.ranks.size == 1:
            return self._compiled.steps(minibatches)
        return [self._step(self._gradients(fields, *rows)) for rows in minibatches]

    def _gradients(self, fields: tuple[Tree, ...], *rows: Tensor) -> Tensor:
        """Computes the gradient of a minibatch's loss into the flat buffer, summed over all ranks.

        Returns:
            This rank's statistics.
        """
        if self._compiled is not None:
            gradient, stats = self._compiled.gradient(*rows)
            self._flat.grad.copy_(gradient)
        else:
            loss, stats = self._loss_of_rows(self._paired or self._network, fields, *rows)
            self._flat.zero_grad()
            torch.autograd.backward(loss)
            if self._paired is not None:
                self._paired.backward()
        self.ranks.sum_(self._flat.grad)
        return stats

    def _loss_of_rows(
        self, call: Callable[..., tuple[Tensor, Tensor]], fields: tuple[Tree, ...], *rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the loss of a minibatch, and its statistics without a graph.

        Args:
            call: Calls the network.
            fields: See `_learn`.
            rows: Likewise.
        """
        raise NotImplementedError

    def _step(self, stats: Tensor) -> Tensor:
        """Clips the gradient and lets the optimizer step, if the gradient is finite.

        Args:
            stats: What `_metrics` reads of this minibatch besides the norm of the gradient before clipping.

        Returns:
            Both.
        """
        norm = self._flat.clip_grad_norm(self.config.max_grad_norm)
        self._optimizer.step(norm)
        return torch.cat([stats, norm.reshape(1).to(stats)])

    def _check_finite(self, stats: list[Tensor]) -> None:
        """Raises a LearnerError where one of the minibatches so far had a gradient that was not finite.

        The weights are those before that minibatch: no later one has changed them.
        """
        if stats and self._optimizer.failed.item():
            failed = next(each for each in stats if not math.isfinite(each[-1]))  # the same on all ranks
            raise LearnerError(
                f"A loss and its gradient are finite numbers (update {self._num_updates}).",
                expected="finite numbers",
                got=self._metrics([failed]),
                remedy="Look for NaN, and for numbers beyond float32, in observations and rewards, and lower "
                "learning_rate or max_grad_norm",
            )

    def _metrics(self, stats: list[Tensor]) -> dict[str, float]:
        """Returns means over minibatches of all ranks, by name."""
        raise NotImplementedError

    def _reward(
        self, first: Chunk, rew: NDArray[np.float64], done: NDArray[np.bool_], valid: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """Returns the rewards to learn from; logs and evaluations show those of the environment.

        Args:
            first: The first chunk of the batch.
            rew: ``[T, N]``.
            done: Where an episode ended, ``bool [T, N]``.
            valid: Where a step happened, ``bool [T, N]``.
        """
        clip = self.config.clip_reward
        if self._return_scale is not None:
            lost = np.zeros(first.num_envs, bool)
            lost[first.restarts[first.restarts[:, 0] == -1, 1]] = True
            rew = self._return_scale(rew, done, valid, lost, self.ranks, first.env_ids)
        return rew if clip is None else rew.clip(-clip, clip)

    def _begin_update(self) -> float:
        """Begins an update: chooses what evaluates the network, and sets the learning rate, which it returns.

        The rate is in proportion to the remaining steps.
        """
        self._paired = paired_mlps(self.module, self._flat)
        self._optimizer.failed.zero_()
        left = 1 - self._num_steps / self.config.total_steps if self.config.anneal_lr else 1.0
        learning_rate = self.config.learning_rate * max(left, 0.0)
        self._optimizer.param_groups[0]["lr"] = learning_rate
        return learning_rate

    def _normalize(self) -> None:
        """Sets the mean and scale with which the network and its actors normalise observations."""
        moments, module = self._obs_moments, self.module
        if moments is not None and module.obs_mean is not None and module.obs_scale is not None:
            measured = torch.from_numpy(module.encoder.measured)
            module.obs_mean.copy_(torch.where(measured, moments.mean, 0.0))
            module.obs_scale.copy_(torch.where(measured, moments.scale, 1.0))

    def weights(self) -> NDArray[np.float32]:
        """Returns a copy of all parameters and what normalises observations, flat, as ``Policy.load_weights`` takes."""
        return flat_weights(self.module)

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of what the next update depends on: tensors and plain values only.

        There is no random state: minibatches depend on (seed, number of the update).
        """
        return copy.deepcopy(
            {
                "parameters": self._flat.data,
                "optimizer": self._optimizer.state_dict(),
                "num_updates": self._num_updates,
                "num_steps": self._num_steps,
                "obs_moments": self._obs_moments.state_dict() if self._obs_moments else {},
                "return_scale": self._return_scale.state_dict() if self._return_scale else {},
                "buffers": buffers_of(self.module),
            }
        )

    @staticmethod
    def with_network(own: dict[str, Any], other: Mapping[str, Any], config: Any) -> dict[str, Any]:
        """Returns the state `own` with the network of the state `other`, statistics of observations included."""
        network = {name: other.get(name) for name in ("parameters", "obs_moments")}
        return {**own, **network, "buffers": other.get("buffers", own["buffers"])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where the learner was when `state` was taken.

        Raises:
            CheckpointError: `state` is of another kind of learner, or of another network.
        """
        saved = state.get("optimizer") or {}
        if saved.get("state"):  # RMSProp as torch writes it, in runs before it was ours
            first, group = saved["state"][0], saved["param_groups"][0]
            state = {**state, "optimizer": {"square_avg": first["square_avg"], "lr": group["lr"]}}
        expected, got = (_shape(each) for each in (self.state_dict(), state))
        if got != expected:
            raise CheckpointError(
                "A learner continues from the state of one with the same network and the same statistics.",
                expected=expected,
                got=got,
                remedy="Use the configuration that the checkpoint was written with",
            )
        check_buffers(self.module, state)
        self._flat.data.copy_(state["parameters"])
        load_buffers(self.module, state)
        self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self._num_updates = int(state["num_updates"])
        self._num_steps = int(state["num_steps"])
        if self._obs_moments:
            self._obs_moments.load_state_dict(state["obs_moments"])
            self._normalize()
        if self._return_scale:
            self._return_scale.load_state_dict(state["return_scale"])


def _shape(state: Mapping[str, Any]) -> str:
    """Describes a state; states of the same kind of learner have the same description."""
    statistics = [name for name in ("obs_moments", "return_scale") if state.get(name)]
    optimizer = f"optimizer of {', '.join(sorted(state.get('optimizer', ())))}"
    names = sorted(state.keys() - {"buffers"})  # which older checkpoints lack
    return ", ".join([f"{len(state.get('parameters', ()))} parameters", *names, *statistics, optimizer])
