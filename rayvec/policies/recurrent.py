"""An actor-critic with a recurrent cell between what reads observations and its two heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from rayvec.data import Tree, tree_leaves
from rayvec.policies.masks import masked as apply_mask
from rayvec.policies.networks import ActorCritic, ModuleActor

CellKind = Literal["gru", "lstm"]


class RecurrentCell(nn.Module):
    """A GRU or an LSTM with the equations of ``torch.nn.GRU`` and ``torch.nn.LSTM``, of one layer.

    The state of a GRU is its output, that of an LSTM its output and then what it remembers, side by side. Weights are
    orthogonal, gate by gate. Biases are 0, apart from that of the GRU's update gate and the LSTM's forget gate, which
    is 1, so that a new cell keeps its state (Jozefowicz, Zaremba and Sutskever, "An empirical exploration of recurrent
    network architectures", ICML 2015, section 2.2).

    Args:
        kind: ``"gru"`` or ``"lstm"``.
        num_features: F, the length of an input.
        size: H, the number of units.
        generator: Of the initial weights.
    """

    def __init__(self, kind: CellKind, num_features: int, size: int, generator: torch.Generator) -> None:
        super().__init__()
        self.kind, self.size, self.state_size = kind, size, size if kind == "gru" else 2 * size
        gates = [size] * (3 if kind == "gru" else 4)
        self.inputs = _linear(num_features, gates, 1.0, generator)
        self.recurrent = _linear(size, gates, 1.0, generator)
        with torch.no_grad():
            self.inputs.bias[size : 2 * size] = 1.0

    def forward(self, features: Tensor, state: Tensor, reset: Tensor) -> Tensor:
        """Returns the state after each step, ``[L, S, D]``, whose first H numbers are the outputs of the cell.

        Args:
            features: Inputs, ``[L, S, F]``.
            state: State before the first step, ``[S, D]``.
            reset: Where the state is set to 0 before a step, ``bool [L, S]``.
        """
        states = []
        inputs = self.inputs(features.flatten(0, 1)).to(state.dtype)  # of all steps at once; states are not bfloat16
        inputs = inputs.unflatten(0, reset.shape)
        # from a GPU it would be read after all that was launched before, and a compiled graph can't read it
        is_here = reset.device.type == "cpu" and not torch.compiler.is_compiling()
        any_begin = reset.any(1).tolist() if is_here else [True] * len(reset)
        for gates, begins, any_begins in zip(inputs, reset.unsqueeze(-1), any_begin, strict=True):
            if any_begins:
                state = state.masked_fill(begins, 0.0)
            state = self._after(gates, state)
            states.append(state)
        return torch.stack(states)

    def step(self, features: Tensor, state: Tensor) -> Tensor:
        """Returns the states after one step, ``[S, D]``, for inputs ``[S, F]`` and states ``[S, D]``."""
        return self._after(self.inputs(features).to(state.dtype), state)

    def _after(self, inputs: Tensor, state: Tensor) -> Tensor:
        return self._gru(inputs, state) if self.kind == "gru" else self._lstm(inputs, state)

    def _gru(self, inputs: Tensor, state: Tensor) -> Tensor:
        gates, new = inputs.tensor_split((2 * self.size,), -1)
        recurrent_gates, recurrent_new = self.recurrent(state).tensor_split((2 * self.size,), -1)
        reset, update = (gates + recurrent_gates).sigmoid().chunk(2, -1)
        return torch.lerp(torch.tanh(new + reset * recurrent_new), state, update)

    def _lstm(self, inputs: Tensor, state: Tensor) -> Tensor:
        output, memory = state.chunk(2, -1)
        enter, keep, new, leave = (inputs + self.recurrent(output)).chunk(4, -1)
        memory = keep.sigmoid() * memory + enter.sigmoid() * new.tanh()
        return torch.cat([leave.sigmoid() * memory.tanh(), memory], -1)


class RecurrentActorCritic(ActorCritic):
    """An actor and a critic that share a memory: hidden layers or a CNN, then a recurrent cell, then a head each.

    Hidden layers, initial weights and *rows* are those of :class:`~rayvec.policies.networks.ActorCritic` with
    ``shared_trunk``.

    Args:
        observation_space: Of one environment.
        action_space: Of one environment.
        hidden_sizes: Widths of the hidden layers before the cell.
        kind: Of the cell, ``"gru"`` or ``"lstm"``.
        recurrent_size: H, the number of units of the cell.
        sequence_length: L, the number of steps in a sequence of the learner; the policy records a state for each.
        seed: Of the initial weights.
        settings: Further arguments of :class:`~rayvec.policies.networks.ActorCritic`, but not ``shared_trunk``.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        hidden_sizes: Sequence[int] = (64, 64),
        *,
        kind: CellKind = "gru",
        recurrent_size: int = 64,
        sequence_length: int = 16,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        super().__init__(observation_space, action_space, hidden_sizes, shared_trunk=True, seed=seed, **settings)
        generator = torch.Generator().manual_seed(seed)
        last = self.actor[-1]  # heads on the cell's output replace those on the features
        assert isinstance(last, nn.Linear)
        self.sequence_length = sequence_length
        self.cell = RecurrentCell(kind, last.in_features, recurrent_size, generator)
        self.actor = nn.Sequential(_linear(recurrent_size, [last.out_features], 0.01, generator))
        self.critic = nn.Sequential(_linear(recurrent_size, [1], 1.0, generator))

    def forward(self, rows: Tree, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the distribution's parameters ``[k, P]`` and values ``[k]`` of one observation each.

        Args:
            rows: Encoded observations, tree of ``[k, ...]``.
            state: States before them, ``[k, D]``; None where episodes begin.
        """
        return self.heads(self.next_state(rows, state), self.split(rows)[1])

    def action_parameters(self, rows: Tree, state: Tensor | None = None) -> Tensor:
        """Returns the first part of what `forward` returns."""
        return self.forward(rows, state)[0]

    def value(self, rows: Tree, state: Tensor | None = None) -> Tensor:
        """Returns the second part of what `forward` returns."""
        return self.forward(rows, state)[1]

    def next_state(self, rows: Tree, state: Tensor | None = None) -> Tensor:
        """Returns the states after one observation each, ``[k, D]``; arguments are those of `forward`."""
        features = self.features(rows)
        if state is None:
            state = features.new_zeros(features.shape[0], self.cell.state_size)
        return self.cell.step(features, state)

    def features(self, rows: Tree) -> Tensor:
        """Returns the inputs of the cell, ``[..., F]``, for encoded observations, tree of ``[..., ...]``."""
        return self._features(self.split(rows)[0])

    def heads(self, states: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns parameters ``[..., P]`` and values ``[...]``.

        Args:
            states: States of the cell, ``[..., D]``.
            mask: Second part of what `split` returns; without it every choice is allowed.
        """
        output = states[..., : self.cell.size]
        params = self._params_of(output)
        return params if mask is None else apply_mask(params, mask), self._value_of(output)

    def make_actor(self) -> RecurrentActor:
        """Returns the actor with the present weights."""
        return RecurrentActor(self)


class RecurrentActor(ModuleActor):
    """Acts with a copy of a recurrent module, and keeps the hidden state of each environment between calls.

    It acts on the same environments in each call. The state is not pickled: where a copy acts, all episodes begin.

    Attributes:
        state: ``float32 [k, D]``. A row that is not there yet is 0.
    """

    _module: RecurrentActorCritic

    def __init__(self, module: RecurrentActorCritic) -> None:
        super().__init__(module, module.distribution)
        self.state = self.initial_state(0)

    def initial_state(self, count: int) -> NDArray[np.float32]:
        """Returns the state of `count` environments at the beginning of their episodes, ``float32 [count, D]``."""
        return np.zeros((count, self._module.cell.state_size), np.float32)

    def step(self, obs: Tree, state: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Returns parameters ``float32 [k, P]``, without a mask, and the states after `state`, ``float32 [k, D]``."""
        with torch.inference_mode():
            following = self._module.next_state(self._module.encode(obs), torch.from_numpy(state))
            return self._module.heads(following)[0].numpy(), following.numpy()

    def __call__(self, obs: Tree) -> NDArray[np.float32]:  # noqa: D102
        params, self.state = self.step(obs, self._states(len(next(tree_leaves(obs)))))
        return params

    def begin_episodes(self, rows: NDArray[np.int64]) -> None:
        """Resets the state of some environments to 0; see :class:`rayvec.rollout.loop.ActingPolicy`."""
        self.state[rows[rows < len(self.state)]] = 0

    def state_to_record(self, t: int, count: int) -> NDArray[np.float32] | None:
        """Returns the states of `count` environments if the chunk keeps them before its step t, else None.

        Sequence i has the steps from i L on.
        """
        return self._states(count) if t % self._module.sequence_length == 0 else None

    def _states(self, count: int) -> NDArray[np.float32]:
        missing = max(0, count - len(self.state))
        return np.concatenate([self.state[:count], self.initial_state(missing)])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "state": self.state[:0]}


def _linear(num_inputs: int, parts: Sequence[int], gain: float, generator: torch.Generator) -> nn.Linear:
    """Returns a layer with outputs in parts, whose weights are orthogonal within each, and biases of 0."""
    layer = nn.Linear(num_inputs, sum(parts), device="meta")
    weights = [nn.init.orthogonal_(torch.empty(part, num_inputs), gain, generator) for part in parts]
    layer.weight = nn.Parameter(torch.cat(weights))
    layer.bias = nn.Parameter(torch.zeros(sum(parts)))
    return layer
