"""Proximal policy optimisation (Schulman et al., 2017), readable from top to bottom.

The details are those of Huang et al., "The 37 implementation details of proximal policy optimization" (ICLR blog
track, 2022), with two differences: an episode that was truncated bootstraps from the value of its true final
observation, and the minibatches of an epoch differ in size by at most one row, so that none is left over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from rayvec.data import Batch, Chunk, Tree, tree_leaves, tree_map
from rayvec.learners.actor_critic import ActorCriticLearner
from rayvec.learners.adam import Adam
from rayvec.learners.ppo_graph import CompiledGradient
from rayvec.learners.ranks import check_minibatch, deal, gather_counts, global_moments
from rayvec.learners.returns import gae
from rayvec.policies.networks import ActorCritic

if TYPE_CHECKING:
    from rayvec.config import PPOConfig

__all__ = ["PPOLearner"]

_ROWS_AT_ONCE = 2048
"""Images whose values are computed at once: of each, the first layer puts out 50 kB."""

_METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")


@dataclass(frozen=True, slots=True)
class Rows:
    """B steps that happened; those of a batch column by column, and in each column in time.

    Attributes:
        obs: Encoded observations, tree of ``[B, ...]``.
        sample: What the policy drew, ``[B, C]``.
        logp: Its log-probability at the time, ``[B]``.
        value: Value of `obs` before the update, ``[B]``.
        advantage: ``[B]``.
        target: What the value should have been, ``[B]``.
    """

    obs: Tree
    sample: Tensor
    logp: Tensor
    value: Tensor
    advantage: Tensor
    target: Tensor

    def __len__(self) -> int:
        """B."""
        return len(self.logp)

    @property
    def columns(self) -> tuple[Tree, ...]:
        """All of them, `obs` first."""
        return tuple(getattr(self, name) for name in self.__slots__)

    def __getitem__(self, index: Tensor) -> Rows:
        """Returns the rows that `index` selects."""
        return Rows(*tree_map(lambda leaf: leaf[index], self.columns))


class PPOLearner(ActorCriticLearner):
    """Improves an actor-critic by proximal policy optimisation.

    Args:
        observation_space: Of one environment.
        action_space: Of one environment.
        config: PPO's own settings, ``total_steps`` and ``seed``.
        module: What to train, in place of a net after the settings; it then belongs to the learner.
        device: Where to, in place of ``config.learner_device``.

    Attributes:
        module: The actor-critic in training.
        ranks: Who computes each update together. Each rank gets the chunks of its own environments; rows are
            numbered through over the ranks, so that all together do what one does with the whole batch.

    Raises:
        ConfigError: There is no net for these spaces, or no such device.
    """

    config: PPOConfig

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        config: PPOConfig,
        *,
        module: ActorCritic | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__(
            observation_space,
            action_space,
            config,
            lambda parameter: Adam(parameter, lr=config.learning_rate, eps=1e-5),
            module=module,
            device=device,
            normalize_obs=config.normalize_obs,
        )
        self._compiled = CompiledGradient(self.module, self._loss, config.minibatch_size) if config.compile else None

    def update(self, batch: Batch) -> dict[str, float]:
        """Learns from a batch: values and advantages once, then several epochs of minibatches.

        A batch without a single valid step changes nothing.

        Returns:
            Means over all minibatches of ``policy_loss``, ``value_loss``, ``entropy`` (nats), ``approx_kl`` (nats,
            Schulman's estimator ``mean(ratio - 1 - log ratio)``), ``clip_fraction`` and ``grad_norm`` (before
            clipping); ``explained_variance`` of the value targets by the values before the update; and the
            ``learning_rate`` used.

        Raises:
            LearnerError: The loss or its gradient is not finite, or the chunks lack what the policy records. The
                weights are those before the failed step.
            ConfigError: There are more ranks than a minibatch has rows.
        """
        config = self.config
        check_minibatch(self.ranks, config.minibatch_size)
        rows = self._rows(batch)
        counts = gather_counts(self.ranks, len(rows))
        first, total = sum(counts[: self.ranks.rank]), sum(counts)
        learning_rate = self._anneal()
        generator = np.random.default_rng([config.seed, self._num_updates])
        steps: list[Tensor] = []
        for _ in range(config.num_epochs if total else 0):
            minibatches = self._minibatches(rows, first, total, generator)
            epoch = self._whole([self._step(self._gradients(part, count)) for part, count in minibatches])
            steps += epoch
            if config.target_kl is not None and _mean(epoch)["approx_kl"] > config.target_kl:
                break
        self._num_updates += 1
        self._num_steps += total
        self._measure(batch)
        return {
            **_mean(steps),
            "explained_variance": self._explained_variance(rows, total),
            "learning_rate": learning_rate,
        }

    def _rows(self, batch: Batch) -> Rows:
        """Joins the chunks in time, computes advantages and targets, and keeps the steps that happened."""
        obs, *columns = zip(*map(self._columns, batch.chunks), strict=True)
        sample, logp, value, next_value, rew, terminated, truncated, valid = map(np.concatenate, columns)
        truncated[_cuts(batch.chunks)] = True
        rew = self._reward(batch.chunks[0], rew, terminated | truncated, valid)
        gamma, lam = self.config.gamma, self.config.gae_lambda
        advantage, target = gae(rew, value, next_value, terminated, truncated, gamma=gamma, lam=lam, valid=valid)
        kept = torch.from_numpy(valid.T)

        def by_column(*parts: Tensor) -> Tensor:
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            return whole.swapaxes(0, 1)[kept.to(whole.device)].to(self._device)

        others = (by_column(torch.from_numpy(column)) for column in (sample, logp, value, advantage, target))
        return Rows(tree_map(by_column, *obs), *others)

    def _columns(self, chunk: Chunk) -> tuple[Tree, ...]:
        """Returns what the update reads of a chunk, ``[T, N, ...]`` each, values included.

        The observation after a step is what the policy saw next, except where an episode ended: each
        observation is evaluated once.
        """
        distribution, (t, n) = self.module.distribution, chunk.final_index.T
        self._check_recorded(chunk)
        obs = self.module.encode(chunk.obs)
        value = self._values(obs, chunk.num_envs)
        next_value = np.concatenate([value[1:], self._values(self.module.encode(chunk.last_obs))[None]])
        next_value[t, n] = self._values(self.module.encode(chunk.final_obs))
        sample = distribution.recorded(chunk.act, chunk.extras)
        ends = (chunk.rew, chunk.terminated, chunk.truncated, chunk.valid)
        return (obs, sample, chunk.extras["logp"], value, next_value, *ends)

    def _values(self, obs: Tree, width: int = 1) -> NDArray[np.float32]:
        """Returns values ``[T, ...]`` for encoded observations ``[T, ...]``, `width` of them in each place."""
        count = len(next(tree_leaves(obs)))
        at_once = max(1, _ROWS_AT_ONCE // max(1, width)) if self.module.cnns else max(1, count)
        with torch.no_grad():
            parts = [
                self.module.value(tree_map(lambda leaf: leaf[start : start + at_once], obs))  # noqa: B023
                for start in range(0, max(1, count), at_once)
            ]
        values: NDArray[np.float32] = torch.cat(parts).cpu().numpy()
        return values

    def _measure(self, batch: Batch) -> None:
        """Lets the observations of a batch, all used by now, count in how later ones are normalised."""
        if self._obs_moments is not None:
            rows = [self.module.encoder(chunk.obs)[chunk.valid] for chunk in batch.chunks]
            self._obs_moments.add(torch.from_numpy(np.concatenate(rows)), self.ranks)
            self._normalize()

    def _minibatches(
        self, rows: Rows, first: int, total: int, generator: np.random.Generator
    ) -> Iterator[tuple[Rows, int]]:
        """Yields the rows of all ranks once, dealt at random into parts of about ``minibatch_size``.

        Args:
            rows: Those of this rank.
            first: The number of its first row among those of all ranks.
            total: How many rows there are on all ranks.
            generator: In the same state on every rank.

        Yields:
            This rank's rows of a minibatch, advantages normalised by the whole minibatch's moments, and how many
            rows the whole one has.
        """
        dealt = deal(total, max(1, round(total / self.config.minibatch_size)), generator)
        counts = [len(numbers) for numbers in dealt]
        bounds = [numbers.searchsorted([first, first + len(rows)]) for numbers in dealt]
        own = [
            torch.from_numpy(numbers[start:stop] - first).to(self._device)
            for numbers, (start, stop) in zip(dealt, bounds, strict=True)
        ]
        advantages = [rows.advantage[index] for index in own]
        if self.config.normalize_advantage:
            mean, variance = global_moments(self.ranks, advantages, counts)
            scale = 1 / (variance.sqrt() + 1e-8)
            advantages = [(each - mean[k]) * scale[k] for k, each in enumerate(advantages)]
        for index, advantage, count in zip(own, advantages, counts, strict=True):
            yield replace(rows[index], advantage=advantage), count

    def _gradients(self, rows: Rows, count: int) -> Tensor:
        """Computes the gradient of a minibatch's loss into the flat buffer, summed over all ranks.

        Args:
            rows: This rank's rows of the minibatch.
            count: How many rows the whole minibatch has.

        Returns:
            This rank's share of the first five metrics, ``[5]``.
        """
        if self._compiled is not None:
            gradient, shares = self._compiled(self._flat.data, rows.columns, count, self.ranks.size)
            self._flat.grad.copy_(gradient)
        else:
            loss, metrics = self._loss(self.module(rows.obs), *rows.columns[1:])
            self._flat.zero_grad()
            torch.autograd.backward(loss.sum() / count)
            shares = metrics.sum(1) / count
        self.ranks.sum_(self._flat.grad)
        return shares

    def _loss(
        self,
        outputs: tuple[Tensor, Tensor],
        sample: Tensor,
        old_logp: Tensor,
        old_value: Tensor,
        advantage: Tensor,
        target: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Returns each row's loss, ``[B]``, and its metrics without a graph, ``[5, B]``."""
        config, (params, value) = self.config, outputs
        logp, entropy = self.module.distribution.logp_entropy(params, sample)
        log_ratio = logp - old_logp
        ratio = log_ratio.exp()
        clipped_ratio = ratio.clamp(1 - config.clip_coef, 1 + config.clip_coef)
        policy_loss = -torch.minimum(advantage * ratio, advantage * clipped_ratio)

        value_loss = 0.5 * (value - target).square()
        if config.clip_value_loss:
            clipped_value = old_value + (value - old_value).clamp(-config.clip_coef, config.clip_coef)
            value_loss = torch.maximum(value_loss, 0.5 * (clipped_value - target).square())

        loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
        is_clipped = ((ratio - 1).abs() > config.clip_coef).to(ratio)
        metrics = torch.stack([policy_loss, value_loss, entropy, ratio - 1 - log_ratio, is_clipped])
        return loss, metrics.detach()

    def _step(self, stats: Tensor) -> Tensor:
        """Clips the gradient and lets the optimizer step; returns `stats` and the norm before clipping, ``[6]``."""
        norm = self._flat.clip_grad_norm(self.config.max_grad_norm).reshape(1)
        stats = torch.cat([stats, norm])
        if not math.isfinite(norm):  # the same on all ranks, unlike their shares of the metrics
            raise self._not_finite(_mean(self._whole([stats])))
        self._optimizer.step()
        return stats

    def _whole(self, stats: list[Tensor]) -> list[Tensor]:
        """Returns the metrics of whole minibatches from this rank's shares; the norm was that of the whole already."""
        summed = torch.stack(stats)
        summed[:, -1] /= self.ranks.size
        return list(self.ranks.sum_(summed))

    def _explained_variance(self, rows: Rows, total: int) -> float:
        """Returns 1 - Var(target - value) / Var(target); 0 where the targets do not vary."""
        _, variances = global_moments(self.ranks, [rows.target, rows.target - rows.value], [total, total])
        variance, left = variances.tolist()
        return 1 - left / variance if variance > 0 else 0.0


def _cuts(chunks: Sequence[Chunk]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns where joined chunks end an episode of which no chunk says so: ``(t, n)`` of its last step.

    An environment that was made anew between two chunks has begun another episode in the second. The first had ended
    by then, with its last observation; to the learner that is a truncation.
    """
    starts = np.cumsum([0, *(chunk.num_steps for chunk in chunks)])
    places = [
        chunk.restarts[chunk.restarts[:, 0] == -1] + (start, 0)
        for chunk, start in zip(chunks[1:], starts[1:], strict=False)
    ]
    t, n = np.concatenate([np.zeros((0, 2), np.int64), *places]).T
    return t, n


def _mean(stats: list[Tensor]) -> dict[str, float]:
    """Returns the means over minibatches, by name; 0 where there were none."""
    return dict(zip(_METRICS, torch.stack(stats).mean(0).tolist() if stats else [0.0] * len(_METRICS), strict=True))
