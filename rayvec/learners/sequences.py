"""Sequences of a recurrent network: cut out of chunks, unrolled from the states that the policy recorded.

T is the number of steps of a chunk, N of its environments, K of the sequences of each environment, L of the steps in a
sequence and B of the steps of burn-in before it. Sequence i of an environment has the steps from i L on; the last one
is padded with steps that did not happen. All sequences are numbered environment by environment, and those of an
environment in time, S in all: so the steps of a sequence follow each other where steps have that order too.

The state is reset to 0 after each step that ended an episode or did not happen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayvec.data import Tree, tree_leaves, tree_map
from rayvec.errors import LearnerError
from rayvec.learners.ranks import Ranks, global_range, own_part, stratified_shuffle
from rayvec.policies.recurrent import RecurrentActorCritic

__all__ = ["Sequences", "by_step", "cut", "draw_sequences", "join_sequences", "next_values"]


@dataclass(frozen=True, slots=True)
class Sequences:
    """S sequences of L steps, each after B steps of burn-in.

    Attributes:
        rows: Encoded observations, tree of ``[B + L, S, ...]``; numbers of steps that did not happen are 0.
        reset: Where the state is reset before a step, ``bool [B + L, S]``.
        state: The recorded state before the burn-in, or before the first step where there is none, ``[S, D]``.
        has_burn_in: Which sequences have steps of burn-in: not the first of a chunk, ``bool [S]``.
        valid: Which of the L steps happened, ``bool [S, L]``, on the CPU wherever the others are: from it follows how
            many rows there are, for which a GPU would have to be waited.
    """

    rows: Tree
    reset: Tensor
    state: Tensor
    has_burn_in: Tensor
    valid: Tensor

    def at(self, numbers: Tensor) -> Sequences:
        """Returns the sequences with these numbers, ``int64``, on the CPU."""
        here = numbers.to(self.reset.device)
        return Sequences(
            tree_map(lambda leaf: leaf[:, here], self.rows),
            self.reset[:, here],
            self.state[here],
            self.has_burn_in[here],
            self.valid[numbers],
        )

    def states(self, module: RecurrentActorCritic, features: Callable[[Tree], Tensor] | None = None) -> Tensor:
        """Returns the state after each step, ``[L, S, D]``. No gradient flows into the burn-in.

        Args:
            module: The network.
            features: Computes the inputs of the cell; by default ``module.features``.
        """
        features = features or module.features
        burn_in, state = len(self.reset) - self.valid.shape[1], self.state
        if burn_in:
            with torch.no_grad():
                first = features(tree_map(lambda leaf: leaf[:burn_in], self.rows))
                burned = module.cell(first, state, self.reset[:burn_in])[-1]
                state = torch.where(self.has_burn_in[:, None], burned, state)
        states: Tensor = module.cell(
            features(tree_map(lambda leaf: leaf[burn_in:], self.rows)), state, self.reset[burn_in:]
        )
        return states

    def outputs(self, module: RecurrentActorCritic) -> tuple[Tensor, Tensor]:
        """Returns parameters ``[M, P]`` and values ``[M]`` of the M steps that happened, sequence by sequence."""
        steps = self.valid.flatten().nonzero().squeeze(1).to(self.reset.device)
        mask = module.mask(tree_map(lambda leaf: leaf[-self.valid.shape[1] :], self.rows))

        def happened(each: Tensor) -> Tensor:
            return each.swapaxes(0, 1).flatten(0, 1)[steps]

        return module.heads(happened(self.states(module)), None if mask is None else happened(mask))


def cut(
    module: RecurrentActorCritic,
    states: NDArray[np.float32],
    rows: Tree,
    done: NDArray[np.bool_],
    valid: NDArray[np.bool_],
) -> Sequences:
    """Returns the sequences of one chunk.

    Args:
        module: The network.
        states: The recorded states, ``[K or more, N, D]``.
        rows: Encoded observations, tree of ``[T, N, ...]``.
        done: Where an episode ended, ``bool [T, N]``.
        valid: Where a step happened, ``bool [T, N]``.

    Raises:
        LearnerError: `states` are not those that this network's policy records.
    """
    length, burn_in, (num_steps, num_envs) = module.sequence_length, module.burn_in, valid.shape
    count = -(-num_steps // length)
    if len(states) < count or states.shape[2] != module.cell.state_size:
        raise LearnerError(
            "A recurrent network learns from the hidden states that its policy records where sequences begin.",
            expected=f"states [{count}, {num_envs}, {module.cell.state_size}] in a chunk of {num_steps} steps",
            got=states.shape,
            remedy="Collect with rayvec.Policy(learner.module)",
        )
    t = np.arange(-burn_in, length)[:, None] + length * np.arange(count)  # [B + L, K]
    place = t.clip(0, num_steps - 1)
    happened = valid[place] & ((t >= 0) & (t < num_steps))[..., None]
    begins = np.concatenate([np.zeros((1, num_envs), bool), (done | ~valid)[:-1]])
    device = next(tree_leaves(rows)).device

    def by_sequence(steps: Tensor) -> Tensor:  # from [B + L, K, N, ...] to [B + L, S, ...]
        return steps.swapaxes(1, 2).flatten(1, 2)

    own = by_sequence(torch.from_numpy(happened))
    kept = own.to(device)
    index = torch.from_numpy(place).to(device)

    def cut_rows(leaf: Tensor) -> Tensor:
        steps = by_sequence(leaf[index])
        if not steps.is_floating_point():
            return steps
        return steps.masked_fill(~kept.view(*kept.shape, *[1] * (steps.ndim - 2)), 0.0)

    return Sequences(
        tree_map(cut_rows, rows),
        by_sequence(torch.from_numpy(begins[place])).to(device),
        torch.from_numpy(states[:count]).swapaxes(0, 1).flatten(0, 1).to(next(module.parameters())),
        (torch.arange(count) > 0).repeat(num_envs).to(device),
        own[burn_in:].T,
    )


def join_sequences(parts: Sequence[Sequences], num_envs: int) -> Sequences:
    """Joins the sequences of chunks that follow each other."""
    if len(parts) == 1:
        return parts[0]

    def joined(axis: int, *leaves: Tensor) -> Tensor:
        counts = [leaf.shape[axis] // max(1, num_envs) for leaf in leaves]
        by_environment = [
            leaf.reshape(*leaf.shape[:axis], num_envs, count, *leaf.shape[axis + 1 :])
            for leaf, count in zip(leaves, counts, strict=True)
        ]
        return torch.cat(by_environment, axis + 1).flatten(axis, axis + 1)

    return Sequences(
        tree_map(lambda *leaves: joined(1, *leaves), *(part.rows for part in parts)),
        joined(1, *(part.reset for part in parts)),
        *(joined(0, *(getattr(part, name) for part in parts)) for name in ("state", "has_burn_in", "valid")),
    )


def next_values(
    module: RecurrentActorCritic,
    states: Tensor,
    values: NDArray[np.floating[Any]],
    valid: NDArray[np.bool_],
    last_rows: Tree,
    final_index: NDArray[np.int64],
    final_rows: Tree,
) -> NDArray[np.floating[Any]]:
    """Returns the values of the true observations after each step of a chunk, ``[T, N]``.

    That after the last step of an environment, and each final observation, is evaluated with the state after its step.

    Args:
        module: The network.
        states: States after each step of each sequence, ``[L, S, D]``.
        values: Of what the policy saw, ``[T, N]``.
        valid: Where a step happened, ``bool [T, N]``.
        last_rows: Encoded observations that the policy would see next, tree of ``[N, ...]``.
        final_index: ``(t, n)`` of each step that ended an episode, ``int64 [F, 2]``.
        final_rows: Encoded true last observations of these episodes, tree of ``[F, ...]``.
    """
    length, (num_steps, num_envs) = module.sequence_length, valid.shape
    count = -(-num_steps // length)
    following = np.concatenate([values[1:], values[-1:]])
    last_t = num_steps - 1 - valid[::-1].argmax(0)
    for rows, t, n in ((last_rows, last_t, np.arange(num_envs)), (final_rows, *final_index.T)):
        with torch.no_grad():
            places = np.stack([t % length, n * count + t // length])
            before = states.detach()[tuple(torch.from_numpy(places).to(states.device))]
            following[t, n] = module.value(rows, before).cpu().numpy()
    return following


def by_step(sequences: Tensor, num_steps: int, num_envs: int) -> Tensor:
    """Returns what there is for each step of one chunk's sequences, ``[L, S, ...]``, as ``[T, N, ...]``."""
    count = -(-num_steps // len(sequences))
    by_environment = sequences.reshape(len(sequences), num_envs, count, *sequences.shape[2:])
    return by_environment.movedim(2, 0).flatten(0, 1)[:num_steps]


def draw_sequences(
    ranks: Ranks, sequences: Sequences, num_minibatches: int, generator: np.random.Generator
) -> list[tuple[NDArray[np.int64], int, Tensor]]:
    """Shuffles the sequences of all ranks into minibatches.

    Args:
        ranks: The ranks.
        sequences: Those of this rank.
        num_minibatches: How many minibatches, at most.
        generator: In the same state on every rank.

    Returns:
        For each minibatch that has a step: the numbers of this rank's steps in it, among all that happened; how many
        steps it has on all ranks; and the numbers of this rank's sequences in it, on the CPU.
    """
    own, total = global_range(ranks, len(sequences.valid))
    shuffled = stratified_shuffle(total, min(num_minibatches, max(1, total)), generator)
    valid = sequences.valid.numpy()
    drawn = [own_part(numbers, own) for numbers in shuffled]
    counts = ranks.sum_(torch.tensor([int(valid[numbers].sum()) for numbers in drawn])).tolist()
    places = np.zeros(valid.shape, np.int64)
    places[valid] = np.arange(valid.sum())
    return [
        (places[numbers][valid[numbers]], count, torch.from_numpy(numbers))
        for numbers, count in zip(drawn, counts, strict=True)
        if count
    ]
