"""IMPALA (Espeholt et al., 2018), readable from top to bottom: an actor-critic that learns from older weights' steps.

Sampling need not wait for learning: the policy that acted is some updates old, and V-trace weights each step by the
ratio of the probabilities of its action, under the policy that learns and the one that acted. Targets are computed from
the values of the critic as it is at each step of the optimizer. Losses are means over steps, where the paper has sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from rayvec.data import Batch, Chunk, Tree, as_slice, tree_map
from rayvec.learners.actor_critic import ActorCriticLearner
from rayvec.learners.adam import Adam
from rayvec.learners.base import explains_memory
from rayvec.learners.ranks import global_range, own_part, stratified_shuffle
from rayvec.learners.returns import vtrace
from rayvec.learners.sequences import by_step, cut, next_values
from rayvec.policies.networks import ActorCriticModule

if TYPE_CHECKING:
    from rayvec.config import IMPALAConfig

__all__ = ["IMPALALearner"]

_SUMMED = ("policy_loss", "value_loss", "entropy", "importance_weight", "clip_fraction", "approx_kl")
"""What a step of the optimizer sums over its samples, besides the moments of targets and their errors."""


_BY_ENVIRONMENT = ("logp", "rew", "terminated", "truncated", "valid", "states")


@dataclass(frozen=True, slots=True)
class Trajectories:
    """T steps of each of n environments.

    Attributes:
        obs: Encoded observations, tree of ``[T, n, ...]``.
        last_obs: Those that the policy would see next, tree of ``[n, ...]``.
        final_index: ``(t, environment)`` of each step that ended an episode, ``int64 [F, 2]``.
        final_obs: Encoded true last observations of these episodes, tree of ``[F, ...]``.
        sample: What the policy drew, ``[T, n, C]``.
        logp: Its log-probability by the policy that acted, ``[T, n]``.
        rew: ``[T, n]``.
        terminated: ``bool [T, n]``.
        truncated: ``bool [T, n]``.
        valid: ``bool [T, n]``.
        states: Recorded states of a recurrent policy, ``[K, n, D]``.
    """

    obs: Tree
    last_obs: Tree
    final_index: NDArray[np.int64]
    final_obs: Tree
    sample: Tensor
    logp: NDArray[np.float32]
    rew: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    valid: NDArray[np.bool_]
    states: NDArray[np.float32]

    def of(self, environments: NDArray[np.int64]) -> Trajectories:
        """Returns those of some environments, given in ascending order."""
        place = np.full(self.valid.shape[1], -1)
        place[environments] = np.arange(len(environments))
        t, n = self.final_index.T
        ended = np.flatnonzero(place[n] >= 0)
        index = as_slice(environments)
        columns, rows = (
            each if isinstance(each, slice) else torch.from_numpy(each).to(self.sample.device)
            for each in (index, ended)
        )
        return Trajectories(
            tree_map(lambda leaf: leaf[:, columns], self.obs),
            tree_map(lambda leaf: leaf[columns], self.last_obs),
            np.stack([t[ended], place[n[ended]]], -1),
            tree_map(lambda leaf: leaf[rows], self.final_obs),
            self.sample[:, columns],
            *(getattr(self, name)[:, index] for name in _BY_ENVIRONMENT),
        )


class IMPALALearner(ActorCriticLearner):
    """Improves an actor-critic by V-trace, one pass over each chunk.

    Args:
        observation_space: Of one environment.
        action_space: Of one environment.
        config: IMPALA's own settings, ``total_steps`` and ``seed``.
        module: What to train, in place of a network built from the settings; the learner then owns it.
        device: Where to train, in place of ``config.learner_device``.

    Attributes:
        module: The actor-critic in training.
        ranks: The ranks that compute each update together. Each rank gets the chunks of its own environments, which are
            numbered over all ranks, so that all together compute what one does with the whole batch.

    Raises:
        ConfigError: There is no network for these spaces, or no such device.
    """

    config: IMPALAConfig

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        config: IMPALAConfig,
        *,
        module: ActorCriticModule | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__(
            observation_space,
            action_space,
            config,
            lambda parameter: _make_optimizer(parameter, config),
            module=module,
            device=device,
        )

    @explains_memory("num_envs or num_steps, or raise num_minibatches")
    def update(self, batch: Batch) -> dict[str, float]:
        """Learns from each chunk once; no trace goes from one chunk into the next.

        A minibatch is all steps of some environments. A batch without a single valid step changes nothing.

        Returns:
            Means over all minibatches of ``policy_loss``, ``value_loss``, ``entropy`` (nats), ``importance_weight``
            (the new policy's probability of an action over that by which it was chosen), ``clip_fraction`` (how
            many weights are above ``rho_bar``), ``approx_kl`` (from the policy that acted to the new one, nats,
            ``mean(weight - 1 - log weight)``) and ``grad_norm`` (before clipping); ``explained_variance`` of the
            V-trace targets by the values; and the ``learning_rate`` used.

        Raises:
            LearnerError: The gradient is not finite, or the chunks lack what the policy records. The weights are
                those before the failed step.
        """
        learning_rate = self._anneal()
        sums: list[Tensor] = []
        for chunk in batch.chunks:
            trajectories = self._trajectories(chunk)
            generator = np.random.default_rng([self.config.seed, self._num_updates])
            for part, count in self._minibatches(trajectories, generator):
                sums.append(self._step(self._gradients(part, count)))
                self._num_steps += count
            self._num_updates += 1
        return {**self._metrics(sums), "learning_rate": learning_rate}

    def _trajectories(self, chunk: Chunk) -> Trajectories:
        """Encodes a chunk."""
        encode = self.module.encode
        self._check_recorded(chunk)
        return Trajectories(
            encode(chunk.obs),
            encode(chunk.last_obs),
            chunk.final_index,
            encode(chunk.final_obs),
            torch.from_numpy(self.module.distribution.recorded(chunk.act, chunk.extras)).to(self._device),
            chunk.extras["logp"],
            self._reward(chunk, chunk.rew, chunk.done, chunk.valid),
            chunk.terminated,
            chunk.truncated,
            chunk.valid,
            chunk.states if len(chunk.states) else np.zeros((0, chunk.num_envs, 0), np.float32),
        )

    def _minibatches(
        self, trajectories: Trajectories, generator: np.random.Generator
    ) -> Iterator[tuple[Trajectories, int]]:
        """Yields this rank's share of each minibatch, and how many steps that minibatch has on all ranks.

        The environments of all ranks are shuffled into minibatches; a minibatch without a valid step is left out.
        """
        own, total = global_range(self.ranks, trajectories.valid.shape[1])
        shuffled = stratified_shuffle(total, self.config.num_minibatches, generator)
        shares = [own_part(numbers, own) for numbers in shuffled]
        valid = trajectories.valid.sum(0)
        counts = self.ranks.sum_(torch.tensor([int(valid[environments].sum()) for environments in shares]))
        for environments, count in zip(shares, counts.tolist(), strict=True):
            if count:
                yield trajectories.of(environments), count

    def _gradients(self, part: Trajectories, count: int) -> Tensor:
        """Adds up the gradient of a minibatch's loss over all ranks, in the flat buffer; returns this rank's sums.

        Args:
            part: This rank's share.
            count: Steps of the minibatch on all ranks.

        Returns:
            ``float64 [11]``: `_SUMMED`, the count, and first and second moments of the targets and of their errors.
        """
        config, valid = self.config, tuple(torch.from_numpy(np.stack(part.valid.nonzero())).to(self._device))
        params, values, states = self._outputs(part)
        logp, entropy = self.module.distribution.logp_entropy(params[valid], part.sample[valid])
        log_ratio = logp.detach() - torch.from_numpy(part.logp).to(self._device)[valid]
        target, advantage = self._targets(part, values.detach(), log_ratio, states)
        value = values[valid]

        policy_loss = -advantage * logp
        value_loss = 0.5 * (value - target).square()
        loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
        self._flat.zero_grad()
        torch.autograd.backward(loss.sum() / count)
        self.ranks.sum_(self._flat.grad)
        with torch.no_grad():
            ratio, error = log_ratio.exp(), target - value
            is_clipped = (ratio > config.rho_bar).to(ratio)
            terms = [
                policy_loss,
                value_loss,
                entropy,
                ratio,
                is_clipped,
                ratio - 1 - log_ratio,
                torch.ones_like(ratio),
            ]
            moments = [target, target.square(), error, error.square()]
            return torch.stack([each.double().sum() for each in (*terms, *moments)])

    def _outputs(self, part: Trajectories) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns parameters ``[T, n, P]``, values ``[T, n]``, and states after each step if there are any."""
        module = self._recurrent
        if module is None:
            params, values = self.module(part.obs)
            return params, values, None
        sequences = cut(module, part.states, part.obs, part.terminated | part.truncated, part.valid)
        states = sequences.states(module)
        params, values = module.heads(by_step(states, *part.valid.shape))
        return params, values, states

    def _targets(
        self, part: Trajectories, values: Tensor, log_ratio: Tensor, states: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns V-trace targets and advantages of the valid steps, ``[B]`` each.

        The observation after a step is what the policy saw next, except where an episode ended: each observation is
        evaluated once.

        Args:
            part: What happened.
            values: Of all observations, ``[T, n]``.
            log_ratio: Logarithms of the valid steps' importance weights, ``[B]``.
            states: See `_outputs`.
        """
        value = values.cpu().numpy()
        log_ratios = np.zeros_like(value)
        log_ratios[part.valid] = log_ratio.cpu().numpy()
        config = self.config
        target, advantage = vtrace(
            part.rew,
            value,
            self._next_values(part, value, states),
            log_ratios,
            part.terminated,
            part.truncated,
            gamma=config.gamma,
            lam=config.vtrace_lambda,
            rho_bar=config.rho_bar,
            c_bar=config.c_bar,
            valid=part.valid,
        )
        rows = (torch.from_numpy(each[part.valid]).to(self._device) for each in (target, advantage))
        return next(rows), next(rows)

    def _next_values(
        self, part: Trajectories, value: NDArray[np.floating[Any]], states: Tensor | None
    ) -> NDArray[np.floating[Any]]:
        """Returns the values of the observations after each step, ``[T, n]``."""
        if self._recurrent is not None and states is not None:
            ends = part.last_obs, part.final_index, part.final_obs
            return next_values(self._recurrent, states, value, part.valid, *ends)
        t, n = part.final_index.T
        with torch.no_grad():
            following = np.concatenate([value[1:], self.module.value(part.last_obs)[None].cpu().numpy()])
            following[t, n] = self.module.value(part.final_obs).cpu().numpy()
        return following

    def _metrics(self, sums: list[Tensor]) -> dict[str, float]:
        """Returns means over minibatches, each a mean over the steps of all ranks; 0 where there were none."""
        if not sums:
            return dict.fromkeys((*_SUMMED, "grad_norm", "explained_variance"), 0.0)
        own = torch.stack(sums)
        total, norms = self.ranks.sum_(own[:, :-1].contiguous()), own[:, -1]
        means = (total[:, : len(_SUMMED)] / total[:, len(_SUMMED), None]).mean(0)
        count, target, target_square, error, error_square = total[:, len(_SUMMED) :].sum(0).tolist()
        variance = target_square / count - (target / count) ** 2
        error_variance = error_square / count - (error / count) ** 2
        return {
            **dict(zip(_SUMMED, means.tolist(), strict=True)),
            "grad_norm": float(norms.mean()),
            "explained_variance": 1 - error_variance / variance if variance > 0 else 0.0,
        }


def _make_optimizer(parameter: torch.nn.Parameter, config: IMPALAConfig) -> torch.optim.Optimizer | Adam:
    """Returns what steps the flat parameters; constants of RMSProp as in the paper's appendix."""
    if config.optimizer == "rmsprop":
        return torch.optim.RMSprop([parameter], lr=config.learning_rate, alpha=0.99, eps=config.optimizer_eps)
    return Adam(parameter, lr=config.learning_rate, eps=config.optimizer_eps)
