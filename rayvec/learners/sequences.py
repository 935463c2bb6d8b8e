"""Sequences of a recurrent network: cut out of chunks, unrolled from the states that the policy recorded.

T is the number of steps of a chunk, N of its environments, K of the sequences of each environment and L of the steps in
a sequence. Sequence i of an environment has the steps from i L on; the last one
is padded with steps that did not happen. All sequences are numbered environment by environment, and those of an
environment in time, S in all: so the steps of a sequence follow each other where steps have that order too.

The state is reset to 0 after each step that ended an episode or did not happen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rayvec.data import Chunk, Tree, tree_leaves, tree_map
from rayvec.errors import LearnerError
from rayvec.learners.ranks import Ranks, global_range, own_part, stratified_shuffle
from rayvec.policies.recurrent import RecurrentActorCritic


class Sequences(NamedTuple):
    """S sequences of L steps.

    Attributes:
        rows: Encoded observations, tree of ``[S, L, ...]``; numbers of steps that did not happen are 0.
        reset: Where the state is reset before a step, ``bool [S, L]``.
        state: The recorded state before the first step, ``[S, D]``.
    """

    rows: Tree
    reset: Tensor
    state: Tensor

    def at(self, numbers: Tensor) -> Sequences:
        """Returns the sequences with these numbers, ``int64``."""
        return Sequences(*tree_map(lambda leaf: leaf.index_select(0, numbers), tuple(self)))

    def states(self, module: RecurrentActorCritic, features: Callable[[Tree], Tensor] | None = None) -> Tensor:
        """Returns the state after each step, ``[S, L, D]``.

        Args:
            module: The network.
            features: Computes the inputs of the cell; by default ``module.features``.
        """
        reset = self.reset.T
        # a compiled layer serves any number of rows only if these are one dimension
        rows = tree_map(lambda leaf: leaf.swapaxes(0, 1).flatten(0, 1), self.rows)
        inputs = torch.unflatten((features or module.features)(rows), 0, reset.shape)
        following: Tensor = module.cell(inputs, self.state, reset)
        return following.swapaxes(0, 1)


class OverSequences(nn.Module):
    """A recurrent network that is called with sequences and returns what it computes for the steps that happened.

    Args:
        network: The network; its parameters are those of this module.
    """

    def __init__(self, network: RecurrentActorCritic) -> None:
        super().__init__()
        self.network = network

    def forward(
        self, sequences: tuple[Any, ...], slots: Tensor, following: tuple[Tree, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns parameters ``[M, P]`` and values ``[M + X]``: of M steps, then of X observations after steps.

        Args:
            sequences: S sequences, the fields of a `Sequences`.
            slots: Which of their S L steps, sequence by sequence, these M are, ``int64 [M]``.
            following: Encoded observations, tree of ``[X, ...]``, and which step of all S L each comes after, ``int64
                [X]``. No gradient flows through their values.
        """
        network, whole = self.network, Sequences(*sequences)
        states = whole.states(network).flatten(0, 1)
        _, mask = network.split(tree_map(lambda leaf: leaf.flatten(0, 1), whole.rows))
        happened = None if mask is None else mask.index_select(0, slots)
        params, values = network.heads(states.index_select(0, slots), happened)
        if following is not None:
            rows, before = following
            with torch.no_grad():
                others = network.value(rows, states.index_select(0, before))
            values = torch.cat([values, others])
        return params, values


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
    length, (num_steps, num_envs) = module.sequence_length, valid.shape
    count = -(-num_steps // length)
    if len(states) < count or states.shape[2] != module.cell.state_size:
        raise LearnerError(
            f"A chunk has hidden states of shape {states.shape}. A chunk of {num_steps} steps needs states "
            f"[{count}, {num_envs}, {module.cell.state_size}]: collect with rayvec.Policy(learner.module)."
        )
    t = np.arange(length) + length * np.arange(count)[:, None]  # [K, L]
    place = t.clip(max=num_steps - 1)
    happened = valid[place] & (t < num_steps)[..., None]
    begins = np.concatenate([np.zeros((1, num_envs), bool), (done | ~valid)[:-1]])
    device = next(tree_leaves(rows)).device

    def by_sequence(steps: Tensor) -> Tensor:  # from [K, L, N, ...] to [S, L, ...]
        return steps.movedim(2, 0).flatten(0, 1)

    happened_here = by_sequence(torch.from_numpy(happened)).to(device)
    index = torch.from_numpy(place).to(device)

    def cut_rows(leaf: Tensor) -> Tensor:
        steps = by_sequence(leaf[index])
        if not steps.is_floating_point():
            return steps
        return steps.masked_fill(~happened_here.view(*happened_here.shape, *[1] * (steps.ndim - 2)), 0.0)

    return Sequences(
        tree_map(cut_rows, rows),
        by_sequence(torch.from_numpy(begins[place])).to(device),
        torch.from_numpy(states[:count]).swapaxes(0, 1).flatten(0, 1).to(next(module.parameters())),
    )


def join_sequences(parts: Sequence[Sequences], num_envs: int) -> Sequences:
    """Joins the sequences of chunks that follow each other."""
    if len(parts) == 1:
        return parts[0]

    def joined(*leaves: Tensor) -> Tensor:
        counts = [len(leaf) // max(1, num_envs) for leaf in leaves]
        by_env = [torch.unflatten(leaf, 0, (num_envs, count)) for leaf, count in zip(leaves, counts, strict=True)]
        return torch.cat(by_env, 1).flatten(0, 1)

    return Sequences(*tree_map(joined, *map(tuple, parts)))


def happened_by_sequence(valid: Sequence[NDArray[np.bool_]], length: int) -> NDArray[np.bool_]:
    """Returns which steps of the sequences of chunks that follow each other happened, ``bool [S, L]``.

    Args:
        valid: Which steps of each chunk happened, ``bool [T, N]`` each.
        length: L.

    >>> happened_by_sequence([np.ones((3, 1), bool)], 2)
    array([[ True,  True],
           [ True, False]])
    """
    padded = [np.pad(each, ((0, -len(each) % length), (0, 0))) for each in valid]
    return np.concatenate(padded).T.reshape(-1, length)


@torch.no_grad()
def unrolled(
    module: RecurrentActorCritic, chunk: Chunk, rows: Tree
) -> tuple[Sequences, NDArray[np.float32], NDArray[np.float32]]:
    """Returns the sequences of a chunk, the values of what the policy saw, and those of what came after each step.

    Values are ``[T, N]``. That after the last step of an environment, and each final observation, is evaluated with the
    state after its step.

    Args:
        module: The network.
        chunk: The chunk.
        rows: Its encoded observations, tree of ``[T, N, ...]``.
    """
    num_steps, num_envs = chunk.valid.shape
    sequences = cut(module, chunk.states, rows, chunk.done, chunk.valid)
    states = sequences.states(module, functools.partial(module.in_slices, module.features))
    width = len(states) // num_envs * module.sequence_length if num_envs else num_steps
    by_env = states.reshape(num_envs, width, module.cell.state_size)
    value = module.heads(by_env)[1][:, :num_steps].T.cpu().numpy()
    following = np.concatenate([value[1:], value[-1:]])
    last_t = num_steps - 1 - chunk.valid[::-1].argmax(0)
    for obs, t, n in ((chunk.last_obs, last_t, np.arange(num_envs)), (chunk.final_obs, *chunk.final_index.T)):
        before = by_env[tuple(torch.from_numpy(np.stack([n, t])).to(states.device))]
        following[t, n] = module.value(module.encode(obs), before).cpu().numpy()
    return sequences, value, following


def draw_sequences(
    ranks: Ranks, happened: NDArray[np.bool_], num_minibatches: int, generator: np.random.Generator
) -> list[tuple[int, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
    """Shuffles the sequences of all ranks into minibatches.

    Args:
        ranks: The ranks.
        happened: Which steps of this rank's sequences happened, ``bool [S, L]``.
        num_minibatches: How many minibatches, at most.
        generator: In the same state on every rank.

    Returns:
        For each minibatch that has a step: how many steps it has on all ranks; the numbers of this rank's steps in it,
        among all that happened; the numbers of this rank's sequences in it, and which steps of these happened, the
        `slots` of :class:`OverSequences`.
    """
    own, total = global_range(ranks, len(happened))
    shuffled = stratified_shuffle(total, min(num_minibatches, max(1, total)), generator)
    drawn = [own_part(numbers, own) for numbers in shuffled]
    counts = ranks.all_reduce_(torch.tensor([int(happened[numbers].sum()) for numbers in drawn])).tolist()
    places = np.zeros(happened.shape, np.int64)
    places[happened] = np.arange(happened.sum())
    return [
        (count, places[numbers][happened[numbers]], numbers, np.flatnonzero(happened[numbers]))
        for numbers, count in zip(drawn, counts, strict=True)
        if count
    ]
