"""Actors with a hidden state: recurrent cells in NumPy, and what keeps a state for each environment.

k is a number of environments, H the size of a cell, D that of its state, P a number of parameters. The state of a GRU
is its output (D = H). That of an LSTM is its output, then what it remembers (D = 2 H).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Tree, tree_leaves
from rayvec.policies.actors import MLPActor, masked_logits
from rayvec.policies.distributions import Distribution

__all__ = [
    "CellKind",
    "NumPyRecurrentActor",
    "RecurrentActor",
    "StatefulActor",
    "num_gates",
    "state_size",
]

Float = NDArray[np.float32]
CellKind = Literal["gru", "lstm"]


def num_gates(kind: CellKind) -> int:
    """Returns how many vectors of H numbers a cell computes from its input."""
    return 3 if kind == "gru" else 4


def state_size(kind: CellKind, size: int) -> int:
    """Returns D for a cell of `size` units.

    >>> state_size("gru", 64), state_size("lstm", 64)
    (64, 128)
    """
    return size if kind == "gru" else 2 * size


class RecurrentActor(Protocol):
    """The part of a recurrent module that acts; see :class:`rayvec.policies.actors.Actor`.

    It keeps no state between calls: the caller passes one, and gets the next one.
    """

    @property
    def distribution(self) -> Distribution:
        """What the parameters are parameters of."""

    def initial_state(self, count: int) -> Float:
        """Returns the state of `count` environments at the beginning of their episodes, ``float32 [count, D]``."""

    def __call__(self, obs: Tree, state: Float) -> tuple[Float, Float]:
        """Returns parameters ``float32 [k, P]`` and the next states ``float32 [k, D]``.

        Args:
            obs: Observation tree of ``[k, *obs_shape]``.
            state: States before it, ``float32 [k, D]``; not changed.
        """

    def load_weights(self, weights: Float) -> None:
        """Loads one flat vector: ``module.parameters()`` in their order, then ``module.buffers()``."""


@dataclass
class NumPyRecurrentActor:
    """A GRU or an LSTM between layers of an MLP, without torch.

    The equations are those of ``torch.nn.GRU`` (Cho et al., 2014, arXiv:1406.1078, with the reset gate applied after
    the matrix product) and ``torch.nn.LSTM`` (Hochreiter and Schmidhuber, 1997, with a forget gate).

    Attributes:
        kind: Of the cell.
        inputs: From observations to what the cell's gates get from them: ``[k, 3 H]`` or ``[k, 4 H]``.
        recurrent: Where in the flat vector of weights the weight ``[3 H or 4 H, H]`` and the bias start by which the
            gates see the state, and H.
        outputs: From the output of the cell to parameters.
    """

    kind: CellKind
    inputs: MLPActor
    recurrent: tuple[int, int, int]
    outputs: MLPActor
    _weight: Float = field(init=False, repr=False)
    _bias: Float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.load_weights(np.zeros(self.inputs.num_weights, np.float32))

    @property
    def distribution(self) -> Distribution:
        """What the parameters are parameters of."""
        return self.outputs.distribution

    def initial_state(self, count: int) -> Float:
        """See :class:`RecurrentActor`."""
        return np.zeros((count, state_size(self.kind, self.recurrent[2])), np.float32)

    def __call__(self, obs: Tree, state: Float) -> tuple[Float, Float]:
        """See :class:`RecurrentActor`."""
        step = _gru if self.kind == "gru" else _lstm
        size = self.recurrent[2]
        state = step(self.inputs(obs), state[:, :size] @ self._weight + self._bias, state)
        return self.outputs(state[:, :size]), state

    def load_weights(self, weights: Float) -> None:
        """Copies the weights.

        Raises:
            ConfigError: The vector is of another length than the module's parameters.
        """
        self.inputs.load_weights(weights)
        self.outputs.load_weights(weights)
        start, bias, size = self.recurrent
        count = num_gates(self.kind) * size
        self._weight = weights[start : start + count * size].reshape(count, size).T.copy()
        self._bias = weights[bias : bias + count].copy()


def _gru(inputs: Float, recurrent: Float, state: Float) -> Float:
    """Returns the next states; gates are those for reset, update and the new state."""
    size = state.shape[1]
    gates = _sigmoid(inputs[:, : 2 * size] + recurrent[:, : 2 * size])
    new = np.tanh(inputs[:, 2 * size :] + gates[:, :size] * recurrent[:, 2 * size :])
    following: Float = new + gates[:, size:] * (state - new)
    return following


def _lstm(inputs: Float, recurrent: Float, state: Float) -> Float:
    """Returns the next states; gates are those for input, forgetting, the new memory and output."""
    size = state.shape[1] // 2
    sums = inputs + recurrent
    enter, keep = _sigmoid(sums[:, :size]), _sigmoid(sums[:, size : 2 * size])
    memory = keep * state[:, size:] + enter * np.tanh(sums[:, 2 * size : 3 * size])
    return np.concatenate([_sigmoid(sums[:, 3 * size :]) * np.tanh(memory), memory], axis=1)


def _sigmoid(x: Float) -> Float:
    """Computes the logistic function without overflow."""
    half = np.float32(0.5)
    result: Float = half * np.tanh(half * x) + half
    return result


class StatefulActor:
    """Keeps the hidden state of each environment between calls; it acts on the same environments in each of them.

    The state is not pickled: where a copy acts, all episodes begin.

    Args:
        actor: Computes parameters and the next states.
        sequence_length: L, the number of steps in a sequence of the learner.
        burn_in: B, the number of steps before a sequence that only bring the state up to date; less than L.

    Attributes:
        actor: The actor.
        is_masked: Whether observations have an action mask.
        distribution: What the parameters are parameters of.
        state: ``float32 [k, D]``. A row that is not there yet is 0.
    """

    def __init__(
        self, actor: RecurrentActor, sequence_length: int, burn_in: int = 0, *, is_masked: bool = False
    ) -> None:
        self.actor, self.is_masked = actor, is_masked
        self.distribution = actor.distribution
        self.state = actor.initial_state(0)
        self._sequence_length, self._burn_in = sequence_length, burn_in

    def __call__(self, obs: Tree) -> Float:
        """Returns parameters ``float32 [k, P]``, and keeps the next states."""
        params, self.state = self.actor(obs, self._states(len(next(tree_leaves(obs)))))
        return masked_logits(params, obs, self.distribution) if self.is_masked else params

    def begin_episodes(self, rows: NDArray[np.int64]) -> None:
        """Resets the state of some environments to 0; see :class:`rayvec.rollout.loop.RecurrentPolicy`."""
        self.state[rows[rows < len(self.state)]] = 0

    def state_to_record(self, t: int, count: int) -> Float | None:
        """Returns the states of `count` environments if the chunk keeps them before its step t, else None.

        Sequence i has the steps from i L on, and starts its burn-in from the state before step i L - B. The first
        sequence of a chunk has no burn-in: the chunk keeps the state before step 0.
        """
        is_start = t == 0 or (t + self._burn_in) % self._sequence_length == 0
        return self._states(count) if is_start else None

    def _states(self, count: int) -> Float:
        missing = max(0, count - len(self.state))
        return np.concatenate([self.state[:count], self.actor.initial_state(missing)])

    def load_weights(self, weights: Float) -> None:
        """See :class:`RecurrentActor`; states stay as they are."""
        self.actor.load_weights(weights)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "state": self.state[:0]}
