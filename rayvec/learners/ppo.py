"""Proximal policy optimisation (Schulman et al., 2017), readable from top to bottom.

Read `PPOLearner.update`, then its `_loss`, then `ActorCriticLearner._step`, which takes a step of the optimizer along
the gradient of one minibatch. Everything else is background.

The details are those of Huang et al., "The 37 implementation details of proximal policy optimization" (ICLR blog
track, 2022), with these differences:

- An episode that was truncated bootstraps from the value of its true final observation.
- Minibatches are a stratified shuffle. They differ in size by at most one sample, so that none is left over.
- Advantages are divided by the population standard deviation of their minibatch.
- Several ranks compute one update together: moments and means are those of the minibatch of all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rayvec.data import Batch, Chunk, Tree, tree_map
from rayvec.learners.actor_critic import ActorCriticLearner
from rayvec.learners.ranks import global_moments, global_range, own_part, stratified_shuffle
from rayvec.learners.returns import gae
from rayvec.learners.sequences import Sequences, draw_sequences, happened_by_sequence, join_sequences, unrolled

if TYPE_CHECKING:
    from rayvec.config import PPOConfig

_METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")


class Samples(NamedTuple):
    """B steps that happened; those of a batch environment by environment, and of each environment in time.

    Attributes:
        obs: Encoded observations, tree of ``[B, ...]``; for a recurrent network the sequences that they are in.
        sample: What the policy drew, before it became an action of the space, ``[B, C]``.
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
    """Improves an actor-critic by proximal policy optimisation."""

    config: PPOConfig
    _minibatches_have_equal_size = True
    _may_change = ("entropy_coef", "clip_coef")

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
        """
        config = self.config
        self._begin_update(batch)
        samples = self._samples(batch.chunks)
        fields = samples.obs, samples.sample, torch.stack([samples.logp, samples.value, samples.target], 1)
        local, total = global_range(self.ranks, len(samples.logp))
        stats: list[Tensor] = []
        for minibatches in self._passes(samples, batch.chunks, local, total):
            stats += self._learn(fields, minibatches)
            of_epoch = stats[-len(minibatches) :]
            if config.target_kl is not None and self._metrics(of_epoch)["approx_kl"] > config.target_kl:
                break
        self._num_updates += 1
        self._num_steps += total
        self._obs_moments.add(batch, self.ranks)
        errors_and_targets = torch.stack([samples.target - samples.value, samples.target])
        moments = torch.stack(global_moments(self.ranks, errors_and_targets, [len(local)] * 2))
        (_, target_mean), (error_variance, target_variance) = moments.tolist()
        varies = target_variance > 1e-12 * (target_mean**2 + error_variance)  # else it is rounding
        explained = 1 - error_variance / target_variance if varies else 0.0
        return {**self._metrics(stats), "explained_variance": explained, "learning_rate": self._learning_rate}

    def _samples(self, chunks: Sequence[Chunk]) -> Samples:
        """Joins the chunks in time, computes advantages and targets, and keeps the steps that happened."""
        obs, *arrays = zip(*map(self._evaluated, chunks), strict=True)
        sample, value, next_value, logp, rew, terminated, truncated, valid = map(np.concatenate, arrays)
        first = 0
        for chunk in chunks:  # an environment that restarted between two chunks has begun another episode in the second
            truncated[first - 1, chunk.restarted_before] |= first > 0
            first += len(chunk.valid)
        rew = self._rewards(chunks, rew, terminated | truncated, valid, self.ranks)
        gamma, lam = self.config.gamma, self.config.gae_lambda
        advantage, target = gae(rew, value, next_value, terminated, truncated, gamma=gamma, lam=lam, valid=valid)
        n, t = valid.T.nonzero()  # numbers and not a mask, which a GPU would wait for
        happened = torch.from_numpy(t * valid.shape[1] + n)

        def by_environment(*parts: Tensor) -> Tensor:  # from [T, N, ...] of each chunk to [B, ...]
            return torch.cat(parts).flatten(0, 1)[happened.to(parts[0].device)].to(self._device)

        observed = tree_map(by_environment, *obs) if self._recurrent is None else join_sequences(obs, valid.shape[1])
        return Samples(observed, *map(by_environment, map(torch.from_numpy, (sample, logp, value, advantage, target))))

    def _evaluated(self, chunk: Chunk) -> tuple[Any, ...]:
        """Returns what an update reads of a chunk, ``[T, N, ...]`` each.

        Encoded observations, samples, values, values of the observations after, and five arrays of the chunk.
        A recurrent network gets its sequences in place of the observations. The observation after a step is what the
        policy saw next, except where an episode ended: each observation is evaluated once.
        """
        module = self.module
        obs: Any = module.encode(chunk.obs)
        if self._recurrent is not None:
            obs, value, next_value = unrolled(self._recurrent, chunk, obs)
        else:
            values = functools.partial(module.in_slices, module.value)
            value = values(obs, chunk.valid.shape[1]).cpu().numpy()
            last = values(module.encode(chunk.last_obs)).cpu().numpy()
            next_value = np.concatenate([value[1:], last[None]])
            next_value[tuple(chunk.final_index.T)] = values(module.encode(chunk.final_obs)).cpu().numpy()
        sample = module.distribution.recorded(chunk.act, chunk.extras)
        arrays = chunk.extras["logp"], chunk.rew, chunk.terminated, chunk.truncated, chunk.valid
        return obs, sample, value, next_value, *arrays

    def _passes(
        self, samples: Samples, chunks: Sequence[Chunk], local: range, total: int
    ) -> Iterator[list[tuple[Tensor, ...]]]:
        """Shuffles the samples of all ranks into minibatches of about ``minibatch_size``, in each epoch differently.

        Args:
            samples: Those of this rank.
            chunks: Of this rank.
            local: The indices of this rank's samples among those of all ranks.
            total: Number of samples on all ranks.

        Yields:
            This rank's part of each minibatch of an epoch, or of all epochs at once without ``target_kl``, which may
            stop between two: weights, indices and normalised advantages of its samples, ``[b]`` each. The moments that
            normalise are those of the whole minibatch. For a recurrent network, the indices of its sequences follow,
            and the steps of these that the samples are.
        """
        config, ranks = self.config, self.ranks
        if not total:
            return
        generator = np.random.default_rng([config.seed, self._num_updates])
        # in a minibatch of one sample, the normalised advantage would be 0
        max_minibatches = total // 2 if config.normalize_advantage else total
        count = max(1, min(round(total / config.minibatch_size), max_minibatches))
        drawn: list[Any] = []
        epoch_ends = [0]
        for _ in range(config.num_epochs):
            if self._recurrent is None:
                for shuffled in stratified_shuffle(total, count, generator):
                    drawn.append((len(shuffled), own_part(shuffled, local)))
            else:
                happened = happened_by_sequence([c.valid for c in chunks], self._recurrent.sequence_length)
                drawn += draw_sequences(ranks, happened, count, generator)
            epoch_ends.append(len(drawn))
        uploaded = self._uploaded([vectors for _, *vectors in drawn])
        indices = [index for index, *_ in uploaded]
        advantages = samples.advantage[pad_sequence(indices, batch_first=True)]  # its end is padding
        if config.normalize_advantage:
            mean, variance = global_moments(ranks, advantages, [*map(len, indices)])
            advantages = ((advantages - mean[:, None]) / (variance[:, None].sqrt() + 1e-8)).to(advantages)
        minibatches: list[tuple[Tensor, ...]] = []
        for (size, *_), padded, (index, *sequences) in zip(drawn, advantages, uploaded, strict=True):
            advantage = padded[: len(index)]
            weight = torch.full_like(advantage, 1 / size)  # over all ranks the weights sum to 1
            minibatches.append((weight, index, advantage, *sequences))
        for first, last in pairwise(epoch_ends if config.target_kl is not None else [0, len(minibatches)]):
            yield minibatches[first:last]

    def _select(self, fields: Any, *rows: Tensor) -> Tree:
        """Returns the arguments of `_loss` for a minibatch, from `inputs` on."""
        obs, sample, logp_value_target = fields
        index, advantage, *sequences = rows
        if sequences:
            numbers, slots = sequences
            inputs: Tree = (Sequences(*obs).at(numbers), slots)
        else:
            inputs = (tree_map(functools.partial(torch.index_select, dim=0, index=index), obs),)
        return inputs, advantage, sample.index_select(0, index), *logp_value_target.index_select(0, index).unbind(1)

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

        Called with `inputs`, `network` returns the parameters of the distribution and the values, ``[b, P]`` and
        ``[b]``. `weight` is that of each sample in the means over all ranks, ``[b]``; `advantage` is normalised, and
        the rest are fields of `Samples`.
        """
        config, clip = self.config, self._coefficients["clip_coef"]
        params, value = network(*inputs)
        logp, entropy = self.module.distribution.logp_entropy(params, sample)

        log_ratio = logp - old_logp
        ratio = log_ratio.exp()
        gain = ratio * advantage
        clipped_gain = ratio.detach().clamp(1 - clip, 1 + clip) * advantage
        # their minimum: torch.minimum would also compute the gradient by the clipped ratio, which is 0
        policy_loss = -torch.where(clipped_gain < gain, clipped_gain, gain)

        error = (value - target).square()
        if config.clip_value_loss:
            clipped_value = old_value + (value - old_value).clamp(-clip, clip)
            error = torch.maximum(error, (clipped_value - target).square())
        value_loss = 0.5 * error

        loss = policy_loss + config.value_coef * value_loss
        if config.entropy_coef:
            loss = loss - self._coefficients["entropy_coef"] * entropy
        change = ratio.detach() - 1
        is_clipped = (change.abs() > clip).to(change)
        metrics = torch.stack([policy_loss, value_loss, entropy, change - log_ratio, is_clipped]).detach()
        # `@ weight` is the mean over the minibatch of all ranks, of which this rank sums its part
        return loss @ weight, metrics @ weight

    def _metrics(self, stats: list[Tensor]) -> dict[str, float]:
        """Returns means over minibatches by name, from this rank's shares; 0 where there were none."""
        if not stats:
            return dict.fromkeys(_METRICS, 0.0)
        summed = torch.stack(stats).double()
        summed[:, -1] /= self.ranks.size  # all ranks have the same norm, and the sum is to be one norm
        return dict(zip(_METRICS, self.ranks.all_reduce_(summed).mean(0).tolist(), strict=True))
