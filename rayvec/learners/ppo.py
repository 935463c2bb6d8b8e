"""Proximal policy optimisation (Schulman et al., 2017), readable from top to bottom.

The details are those of Huang et al., "The 37 implementation details of proximal policy optimization" (ICLR blog
track, 2022), with two differences: an episode that was truncated bootstraps from the value of its true final
observation, and the minibatches of an epoch differ in size by at most one sample, so that none is left over.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rayvec.data import Batch, Chunk, Tree, tree_leaves, tree_map
from rayvec.learners.actor_critic import ActorCriticLearner
from rayvec.learners.base import explains_memory
from rayvec.learners.minibatches import check_minibatch, own_part, stratified_shuffle
from rayvec.learners.ranks import global_moments, global_range
from rayvec.learners.returns import gae
from rayvec.learners.sequences import (
    Sequences,
    cut,
    draw_sequences,
    happened_by_sequence,
    join_sequences,
    next_values,
)
from rayvec.policies.recurrent import RecurrentActorCritic

if TYPE_CHECKING:
    from rayvec.config import PPOConfig

__all__ = ["PPOLearner"]

_ROWS_AT_ONCE = 2048
"""Images whose values are computed at once; the first layer outputs 50 kB for each."""

_METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")


class Samples(NamedTuple):
    """B steps that happened; those of a batch environment by environment, and of each environment in time.

    Attributes:
        obs: Encoded observations, tree of ``[B, ...]``; for a recurrent network the sequences that they are in.
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


class PPOLearner(ActorCriticLearner):
    """Improves an actor-critic by proximal policy optimisation.

    Args:
        observation_space: Of one environment.
        action_space: Of one environment.
        config: PPO's own settings, ``total_steps`` and ``seed``.
        module: What to train, in place of a network built from the settings; the learner then owns it.
        device: Where to train, in place of ``config.learner_device``.

    Attributes:
        module: The actor-critic in training.
        ranks: The ranks that compute each update together. Each rank gets the chunks of its own environments; samples
            are numbered over all ranks, so that all together compute what one does with the whole batch.

    Raises:
        ConfigError: There is no network for these spaces, or no such device.
    """

    config: PPOConfig
    _are_even = True
    _may_change = ("entropy_coef", "clip_coef")

    @explains_memory("Lower minibatch_size, num_envs or num_steps")
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
            ConfigError: There are more ranks than samples in a minibatch.
        """
        config = self.config
        check_minibatch(self.ranks, config.minibatch_size)
        learning_rate = self._begin_update()
        samples = self._samples(batch)
        own, total = global_range(self.ranks, len(samples.logp))
        generator = np.random.default_rng([config.seed, self._num_updates])
        valid = [chunk.valid for chunk in batch.chunks]
        epochs, explained_variance = self._draw(samples, valid, own, total, generator)
        if config.target_kl is None:
            epochs = [list(itertools.chain(*epochs))]  # nothing is decided between two epochs
        stats: list[Tensor] = []
        for epoch in epochs:
            stats += self._learn(tuple(samples), epoch)
            if config.target_kl is not None and self._metrics(stats[-len(epoch) :])["approx_kl"] > config.target_kl:
                break
        self._check_finite(stats)
        self._num_updates += 1
        self._num_steps += total
        self.measure(batch)
        return {
            **self._metrics(stats),
            "explained_variance": explained_variance,
            "learning_rate": learning_rate,
        }

    def _samples(self, batch: Batch) -> Samples:
        """Joins the chunks in time, computes advantages and targets, and keeps the steps that happened."""
        obs, *arrays = zip(*map(self._inputs, batch.chunks), strict=True)
        sample, logp, value, next_value, rew, terminated, truncated, valid = map(np.concatenate, arrays)
        truncated[_episodes_cut_by_restarts(batch.chunks)] = True
        rew = self._reward(batch.chunks[0], rew, terminated | truncated, valid)
        gamma, lam = self.config.gamma, self.config.gae_lambda
        advantage, target = gae(rew, value, next_value, terminated, truncated, gamma=gamma, lam=lam, valid=valid)
        n, t = valid.T.nonzero()  # numbers and not a mask, which a GPU would wait for
        happened = torch.from_numpy(t * valid.shape[1] + n)

        def by_environment(*parts: Tensor) -> Tensor:
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            return whole.flatten(0, 1)[happened.to(whole.device)].to(self._device)

        observed = tree_map(by_environment, *obs) if self._recurrent is None else join_sequences(obs, valid.shape[1])
        others = (by_environment(torch.from_numpy(array)) for array in (sample, logp, value, advantage, target))
        return Samples(observed, *others)

    def _inputs(self, chunk: Chunk) -> tuple[Tree, ...]:
        """Returns what the update reads of a chunk, ``[T, N, ...]`` each, values included.

        The observation after a step is what the policy saw next, except where an episode ended: each
        observation is evaluated once.
        """
        distribution, (t, n) = self.module.distribution, chunk.final_index.T
        self._check_recorded(chunk)
        obs = self.module.encode(chunk.obs)
        if self._recurrent is not None:
            obs, value, next_value = self._unrolled(self._recurrent, chunk, obs)
        else:
            value = self._values(obs, chunk.num_envs)
            next_value = np.concatenate([value[1:], self._values(self.module.encode(chunk.last_obs))[None]])
            next_value[t, n] = self._values(self.module.encode(chunk.final_obs))
        sample = distribution.recorded(chunk.act, chunk.extras)
        ends = (chunk.rew, chunk.terminated, chunk.truncated, chunk.valid)
        return (obs, sample, chunk.extras["logp"], value, next_value, *ends)

    def _unrolled(
        self, module: RecurrentActorCritic, chunk: Chunk, obs: Tree
    ) -> tuple[Sequences, NDArray[np.float32], NDArray[np.float32]]:
        """Returns the sequences of a chunk, and its values and next values ``[T, N]`` by the recurrent network."""
        sequences = cut(module, chunk.states, obs, chunk.done, chunk.valid)
        with torch.no_grad():
            states = sequences.states(module, lambda rows: self._in_parts(module.features, rows, 1))
            by_env = module.heads(states)[1].reshape(chunk.num_envs, -1 if chunk.num_envs else chunk.num_steps)
            value = by_env[:, : chunk.num_steps].T.cpu().numpy()
        last, final = module.encode(chunk.last_obs), module.encode(chunk.final_obs)
        return sequences, value, next_values(module, states, value, chunk.valid, last, chunk.final_index, final)

    def _values(self, obs: Tree, width: int = 1) -> NDArray[np.float32]:
        """Returns values ``[T, ...]`` for encoded observations ``[T, ...]``, `width` of them in each place."""
        values: NDArray[np.float32] = self._in_parts(self.module.value, obs, width).cpu().numpy()
        return values

    def _in_parts(self, function: Callable[[Tree], Tensor], obs: Tree, width: int) -> Tensor:
        """Returns what a function without a graph returns for encoded observations, of which it gets some at a time."""
        count = len(next(tree_leaves(obs)))
        at_once = max(1, _ROWS_AT_ONCE // max(1, width)) if self.module.cnns else max(1, count)
        with torch.no_grad():
            parts = [
                function(tree_map(lambda leaf: leaf[start : start + at_once], obs))  # noqa: B023
                for start in range(0, max(1, count), at_once)
            ]
        return torch.cat(parts)

    def _draw(
        self,
        samples: Samples,
        valid: Sequence[NDArray[np.bool_]],
        own: range,
        total: int,
        generator: np.random.Generator,
    ) -> tuple[list[list[tuple[Tensor, ...]]], float]:
        """Shuffles the samples of all ranks into parts of about ``minibatch_size``, anew for each epoch.

        Args:
            samples: Those of this rank.
            valid: Which steps of each of this rank's chunks happened, ``bool [T, N]`` each.
            own: Their numbers among those of all ranks.
            total: Number of samples on all ranks.
            generator: In the same state on every rank.

        Returns:
            Two results. First, for each epoch, this rank's part of each minibatch: the weights, numbers and normalised
            advantages of its samples, ``[b]`` each. The moments that normalise are those of the whole minibatch. For a
            recurrent network, the numbers of its sequences follow, and the steps of these that the samples are.
            Second, the share of the variance of the targets that the values before the update explain.
        """
        num_epochs = self.config.num_epochs if total else 0
        epochs = [self._shuffled(valid, own, total, generator) for _ in range(num_epochs)]
        places, counts, sequences = zip(*itertools.chain(*epochs), strict=True) if total else ((), (), ())
        at = pad_sequence([torch.from_numpy(each) for each in places] or [torch.zeros(0, dtype=torch.int64)], True)
        at = at.to(self._device)
        advantages, lengths = samples.advantage[at], list(map(len, places))
        targets = torch.stack([samples.target, samples.target - samples.value])
        own_counts = [*(lengths or [0]), *map(len, targets)]
        mean, variance = global_moments(self.ranks, [advantages, targets], [*(counts or [0]), total, total], own_counts)
        if self.config.normalize_advantage:
            scale = 1 / (variance[:-2, None].sqrt() + 1e-8)
            advantages = ((advantages - mean[:-2, None]) * scale).to(advantages)
        rows = (
            (advantages.new_full((length,), 1 / count), at[k, :length], advantages[k, :length], *others)
            for k, (length, count, others) in enumerate(zip(lengths, counts, map(self._upload, sequences), strict=True))
        )
        explained = _share_explained(*torch.cat([mean[-2:-1], variance[-2:]]).tolist())
        return [list(itertools.islice(rows, len(epoch))) for epoch in epochs], explained

    def _upload(self, arrays: Sequence[NDArray[np.int64]]) -> Iterator[Tensor]:
        return (torch.from_numpy(each).to(self._device) for each in arrays)

    def _shuffled(
        self, valid: Sequence[NDArray[np.bool_]], own: range, total: int, generator: np.random.Generator
    ) -> Sequence[tuple[NDArray[np.int64], int, tuple[NDArray[np.int64], ...]]]:
        """Returns for each minibatch of an epoch which samples of this rank it has, its size and its sequences."""
        num_minibatches = max(1, round(total / self.config.minibatch_size))
        if self.config.normalize_advantage:  # a minibatch of one sample would have the advantage 0
            num_minibatches = max(1, min(num_minibatches, total // 2))
        if self._recurrent is not None:
            happened = happened_by_sequence(valid, self._recurrent.sequence_length)
            return draw_sequences(self.ranks, happened, num_minibatches, generator)
        shuffled = stratified_shuffle(total, num_minibatches, generator)
        return [(own_part(numbers, own), len(numbers), ()) for numbers in shuffled]

    def _select(self, fields: Any, weight: Tensor, *rows: Tensor) -> Tree:
        """Returns the rows of a minibatch: what the network reads, `advantage`, and four attributes of `Samples`."""
        obs, sample, logp, value, _, target = fields
        at, advantage, *sequences = rows
        if sequences:
            numbers, slots = sequences
            inputs: Tree = (Sequences(*obs).at(numbers), slots)
        else:
            inputs = (tree_map(lambda leaf: leaf.index_select(0, at), obs),)
        return inputs, advantage, *(each.index_select(0, at) for each in (sample, logp, value, target))

    def _loss(
        self,
        network: Callable[..., tuple[Tensor, Tensor]],
        weight: Tensor,
        inputs: Any,
        advantage: Tensor,
        sample: Tensor,
        old_logp: Tensor,
        old_value: Tensor,
        target: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Returns this rank's part of the loss (Schulman et al., 2017, equations 7 and 9), and of the first 5 metrics.

        Args:
            network: Returns the parameters of the distribution and the values, ``[b, P]`` and ``[b]``.
            weight: Of each sample in the means over all ranks, ``[b]``.
            inputs: Arguments of the network.
            advantage: ``[b]``.
            sample: What the policy drew, ``[b, C]``.
            old_logp: Its log-probability at the time, ``[b]``.
            old_value: The value before the update, ``[b]``.
            target: What the value should be, ``[b]``.
        """
        config, clip = self.config, self._coefficient("clip_coef")
        params, value = network(*inputs)
        logp, entropy = self.module.distribution.logp_entropy(params, sample)

        log_ratio = logp - old_logp
        ratio = log_ratio.exp()
        policy_loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)

        error = (value - target).square()
        if config.clip_value_loss:
            near = old_value + (value - old_value).clamp(-clip, clip)
            error = torch.maximum(error, (near - target).square())
        value_loss = 0.5 * error

        entropy_coef = self._coefficient("entropy_coef")
        loss = (policy_loss + config.value_coef * value_loss - entropy_coef * entropy) @ weight
        is_clipped = ((ratio - 1).abs() > clip).to(ratio)
        metrics = torch.stack([policy_loss, value_loss, entropy, ratio - 1 - log_ratio, is_clipped]).detach()
        return loss, metrics @ weight

    def _metrics(self, stats: list[Tensor]) -> dict[str, float]:
        """Returns means over minibatches by name, from this rank's shares; 0 where there were none."""
        if not stats:
            return dict.fromkeys(_METRICS, 0.0)
        summed = torch.stack(stats).double()
        summed[:, -1] /= self.ranks.size  # the norm was that of the whole gradient already
        return dict(zip(_METRICS, self.ranks.sum_(summed).mean(0).tolist(), strict=True))


def _episodes_cut_by_restarts(chunks: Sequence[Chunk]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns where joined chunks cut an episode of which no chunk says so: ``(t, n)`` of its last step.

    An environment that restarted between two chunks has begun another episode in the second. For the learner, the
    episode before was truncated at its last observation.
    """
    starts = np.cumsum([0, *(chunk.num_steps for chunk in chunks)])
    places = [
        chunk.restarts[chunk.restarts[:, 0] == -1] + (start, 0)
        for chunk, start in zip(chunks[1:], starts[1:], strict=False)
    ]
    t, n = np.concatenate([np.zeros((0, 2), np.int64), *places]).T
    return t, n


def _share_explained(mean: float, variance: float, left: float) -> float:
    """Returns 1 - Var(target - value) / Var(target); 0 where the targets differ by rounding, or not at all."""
    return 1 - left / variance if variance > 1e-12 * (mean**2 + left) else 0.0
