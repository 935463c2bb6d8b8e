"""IMPALA (Espeholt et al., 2018), readable from top to bottom: an actor-critic that learns from older weights' steps.

Sampling need not wait for learning: the policy that acted is some updates old, and V-trace weights each step by the
ratio of the probabilities of its action, under the policy that learns and the one that acted. Targets are computed from
the values of the critic as it is at each step of the optimizer. Losses are means over steps, where the paper has sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayvec.data import Batch, Chunk, Tree, tree_map
from rayvec.learners.actor_critic import ActorCriticLearner
from rayvec.learners.ranks import global_range, own_part, stratified_shuffle
from rayvec.learners.returns import num_rounds, vtrace_of_rows
from rayvec.learners.sequences import Sequences, cut, happened_by_sequence

if TYPE_CHECKING:
    from rayvec.config import IMPALAConfig

_SUMMED = ("policy_loss", "value_loss", "entropy", "importance_weight", "clip_fraction", "approx_kl")
"""What a step of the optimizer sums over its samples, besides the moments of targets and their errors."""


class IMPALALearner(ActorCriticLearner):
    """Improves an actor-critic by V-trace, one pass over each chunk."""

    config: IMPALAConfig
    _num_rounds = 0
    """See `vtrace_of_rows`; a constant of the compiled graph."""

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
        self._begin_update(batch)
        stats: list[Tensor] = []
        for chunk in batch.chunks:
            rounds = num_rounds(max(self.config.num_steps, chunk.num_steps))
            if rounds > self._num_rounds:
                self._num_rounds = rounds
                self._gradient.reset()
            own, total = global_range(self.ranks, chunk.num_envs)
            generator = np.random.default_rng([self.config.seed, self._num_updates])
            shuffled = stratified_shuffle(total, self.config.num_minibatches, generator)
            shares = [own_part(numbers, own) for numbers in shuffled]
            num_valid = chunk.valid.sum(0)
            counts = self.ranks.all_reduce_(torch.tensor([int(num_valid[share].sum()) for share in shares])).tolist()
            fields, next_row = self._fields(chunk)
            shared = zip(shares, counts, strict=True)
            minibatches = [self._rows(chunk, next_row, share, count) for share, count in shared if count]
            stats += self._learn(fields, self._uploaded(minibatches))
            self._num_steps += sum(counts)
            self._num_updates += 1
        self._obs_moments.add(batch, self.ranks)
        return {**self._metrics(stats), "learning_rate": self._learning_rate}

    def _fields(self, chunk: Chunk) -> tuple[Tree, NDArray[np.int64]]:
        """Returns what minibatches index, and where the observation after each step of a chunk is.

        Row t N + n is step t of environment n; steps that did not happen have rows, too.

        Returns:
            Three fields and an array. First, encoded observations of the T N steps, then the N that the policy would
            see next, then the F true last observations of episodes that ended, tree of ``[(T + 1) N + F, ...]``.
            Second, `sample` to `chain` of `_loss`. Third, for a recurrent network, K sequences of each environment,
            for others nothing. The array is ``int64 [T, N]``; where a step terminated its episode, it has the row of
            the step itself.
        """
        encode, (num_steps, num_envs), like = self.module.encode, chunk.valid.shape, self._gradient.flat
        seen = encode(chunk.obs)
        parts = tree_map(lambda leaf: leaf.flatten(0, 1), seen), encode(chunk.last_obs)
        obs = tree_map(lambda *leaves: torch.cat(leaves), *parts, encode(chunk.final_obs))
        network = self._recurrent
        sequences = () if network is None else cut(network, chunk.states, seen, chunk.done, chunk.valid)
        chain = ~chunk.done
        chain[:-1] &= chunk.valid[1:]
        chain[-1:] = False
        rows = np.arange((num_steps + 1) * num_envs).reshape(num_steps + 1, num_envs)
        next_row = rows[1:].copy()
        next_row[tuple(chunk.final_index.T)] = rows.size + np.arange(len(chunk.final_index))
        reward = self._rewards([chunk], chunk.rew, chunk.done, chunk.valid, self.ranks)
        discount = np.where(chunk.terminated, 0.0, self.config.gamma)
        sample = torch.from_numpy(self.module.distribution.recorded(chunk.act, chunk.extras))
        arrays = chunk.extras["logp"], reward, discount, chain
        numbers = (torch.from_numpy(each).flatten().to(like) for each in arrays)
        steps = sample.flatten(0, 1).to(self._device), *numbers
        return (obs, steps, tuple(sequences)), np.where(chunk.terminated, rows[:-1], next_row)

    def _rows(
        self, chunk: Chunk, next_row: NDArray[np.int64], environments: NDArray[np.int64], size: int
    ) -> tuple[NDArray[Any], ...]:
        """Returns which rows a minibatch has, of `size` steps on all ranks, these environments of this rank.

        Returns:
            Four vectors. The weight of each of its B steps in the loss, ``[B]``. The rows of these steps, environment
            by environment in the order of time, ``int64 [B]``. Where the observation after each step is, ``int64
            [B]``: the number of one of these steps, or -1 - i for the i-th of the other observations. The rows of
            these others, each once. For a recurrent network, the numbers of the sequences follow, and `slots` and
            `before` of `OverSequences`.
        """
        steps = _rows_of_steps(chunk.valid, environments)
        following = next_row.ravel()[steps]
        place = np.full(next_row.size + next_row.shape[1] + len(chunk.final_index), -1)
        place[steps] = np.arange(len(steps))
        is_other = place[following] < 0
        others = following[is_other]
        place[others] = -1 - np.arange(len(others))
        arrays: list[NDArray[Any]] = [np.full(len(steps), 1 / size), steps, place[following], others]
        if self._recurrent is not None:
            length = self._recurrent.sequence_length
            count = -(-chunk.num_steps // length)
            numbers = (environments[:, None] * count + np.arange(count)).ravel()
            slots = np.flatnonzero(happened_by_sequence([chunk.valid[:, environments]], length))
            arrays += [numbers, slots, slots[is_other]]
        return tuple(arrays)

    def _select(self, fields: Any, *rows: Tensor) -> Tree:
        """Returns what the network reads of a minibatch, the places of the values after its steps, and these steps."""
        obs, steps, recorded = fields
        at, after, others, *sequences = rows
        if sequences:
            numbers, slots, before = sequences
            following = tree_map(lambda leaf: leaf.index_select(0, others), obs)
            inputs: Tree = (Sequences(*recorded).at(numbers), slots, (following, before))
        else:
            seen = torch.cat([at, others])
            inputs = (tree_map(lambda leaf: leaf.index_select(0, seen), obs),)
        place = torch.where(after < 0, len(at) - 1 - after, after)
        return inputs, place, *(each.index_select(0, at) for each in steps)

    def _loss(
        self,
        network: Callable[..., tuple[Tensor, Tensor]],
        weight: Tensor,
        inputs: Any,
        place: Tensor,
        sample: Tensor,
        old_logp: Tensor,
        rew: Tensor,
        discount: Tensor,
        chain: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Returns this rank's part of the loss (Espeholt et al., 2018, section 4.2), and of its statistics.

        Args:
            network: Returns the parameters of the distribution and values: of B steps, and then of other observations.
            weight: Of each step in the means over all ranks, ``[B]``.
            inputs: Arguments of the network, which evaluates each observation once.
            place: Which value is that of the observation after each step, ``int64 [B]``.
            sample: What the policy drew, ``[B, C]``; the steps of an environment are neighbours, in the order of time.
            old_logp: Its log-probability by the policy that acted, ``[B]``.
            rew: ``[B]``.
            discount: Of the value of the observation after the step: 0 where the step terminated its episode, ``[B]``.
            chain: 1 where the environment's next step followed in the same episode, else 0, ``[B]``.

        Returns:
            The loss, and ``float64 [11]``: the number of steps, and weighted sums of `_SUMMED`, of the targets, of
            their squares, of their errors and of the squares of these.
        """
        config = self.config
        params, values = network(*inputs)
        params, value, next_value = params[: len(weight)], values[: len(weight)], values.index_select(0, place)
        logp, entropy = self.module.distribution.logp_entropy(params, sample)
        log_ratio = logp.detach() - old_logp

        target, advantage = vtrace_of_rows(
            rew,
            value.detach(),
            next_value.detach(),
            log_ratio,
            discount,
            chain,
            decay=config.gamma * config.vtrace_lambda,
            rho_bar=config.rho_bar,
            c_bar=config.c_bar,
            rounds=self._num_rounds,
        )
        policy_loss = -logp * advantage
        value_loss = 0.5 * (value - target).square()
        loss = (policy_loss + config.value_coef * value_loss - self._coefficients["entropy_coef"] * entropy) @ weight

        ratio, error = log_ratio.exp(), target - value
        is_clipped = (ratio > config.rho_bar * (1 + 1e-5)).to(ratio)  # rounding of two equal probabilities is no clip
        terms = [policy_loss, value_loss, entropy, ratio, is_clipped, ratio - 1 - log_ratio]
        terms += [target, target.square(), error, error.square()]
        count = (weight > 0).sum(dtype=torch.float64).reshape(1)
        sums = (torch.stack(terms).detach() * weight).sum(1, dtype=torch.float64)
        return loss, torch.cat([count, sums])

    def _metrics(self, stats: list[Tensor]) -> dict[str, float]:
        """Returns means over minibatches, each a mean over the steps of all ranks; 0 where there were none."""
        if not stats:
            return dict.fromkeys((*_SUMMED, "grad_norm", "explained_variance"), 0.0)
        shares = torch.stack(stats)
        shares[:, -1] /= self.ranks.size  # all ranks have the same norm, and the sum is to be one norm
        counts, *means, target, target_square, error, error_square, norms = self.ranks.all_reduce_(shares).T
        weight = counts / counts.sum()

        def variance(mean: Tensor, square: Tensor) -> float:
            return float(weight @ square - (weight @ mean) ** 2)

        whole = variance(target, target_square)
        varies = whole > 3e-7 * float(weight @ target_square)  # else it may be rounding
        return {
            **{name: float(each.mean()) for name, each in zip(_SUMMED, means, strict=True)},
            "grad_norm": float(norms.mean()),
            "explained_variance": 1 - variance(error, error_square) / whole if varies else 0.0,
        }


def _rows_of_steps(valid: NDArray[np.bool_], environments: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the rows of what happened in some environments, environment by environment; see `_fields`.

    >>> _rows_of_steps(np.array([[True, True, True], [True, True, False]]), np.array([0, 2]))
    array([0, 3, 2])
    """
    num_steps, num_envs = valid.shape
    rows: NDArray[np.int64] = np.arange(num_steps) * num_envs + environments[:, None]
    return rows[valid.T[environments]]
