"""What a recurrent network computes, one step at a time with torch's own cells."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rayvec.data import Chunk, tree_map
from rayvec.policies.recurrent import RecurrentActorCritic


class StepByStep:
    """A recurrent actor-critic in the words of ``torch.nn.GRUCell`` and ``torch.nn.LSTMCell``.

    It has the parameters of a network of rayvec, by reference, so that gradients come to those.
    """

    def __init__(self, module: RecurrentActorCritic) -> None:
        self.module, self.size = module, module.cell.size
        cell = nn.GRUCell if module.cell.kind == "gru" else nn.LSTMCell
        self.cell = cell(module.cell.inputs.in_features, self.size)
        own = module.cell
        parameters = [own.inputs.weight, own.recurrent.weight, own.inputs.bias, own.recurrent.bias]
        for name, parameter in zip(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), parameters, strict=True):
            setattr(self.cell, name, parameter)

    def step(self, obs: Any, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the actor's parameters ``[P]``, the value and the next state ``[D]`` of one observation."""
        features = self.module.features(self.module.encode(tree_map(lambda leaf: leaf[None], obs)))
        if isinstance(self.cell, nn.LSTMCell):
            output, memory = self.cell(features, (state[None, : self.size], state[None, self.size :]))
            state = torch.cat([output[0], memory[0]])
        else:
            output = self.cell(features, state[None])
            state = output[0]
        params = self.module.actor(output)[0]
        if self.module.log_std is not None:
            params = torch.cat([params, self.module.log_std])
        if isinstance(obs, dict) and "action_mask" in obs:
            params = torch.where(torch.from_numpy(np.asarray(obs["action_mask"]) != 0), params, -1e9)
        return params, self.module.critic(output)[0, 0], state

    def unroll(self, chunk: Chunk) -> tuple[list[list[Tensor]], list[list[Tensor]], NDArray[np.float32]]:
        """Returns parameters and values of each step, ``[T][N]``, and the next values ``[T, N]``, from stored states.

        Steps that did not happen have what this computes of their observations, of which nothing may depend.
        """
        length = self.module.sequence_length
        num_steps, num_envs = chunk.rew.shape
        params: list[list[Any]] = [[None] * num_envs for _ in range(num_steps)]
        values: list[list[Any]] = [[None] * num_envs for _ in range(num_steps)]
        following = np.zeros((num_steps, num_envs), np.float32)
        finals = {(t, n): row for row, (t, n) in enumerate(chunk.final_index.tolist())}
        last = {n: max([t for t in range(num_steps) if chunk.valid[t, n]], default=-1) for n in range(num_envs)}

        def at(tree: Any, *index: int) -> Any:
            return tree_map(lambda leaf: leaf[index], tree)

        for n in range(num_envs):
            for start in range(0, num_steps, length):
                state = torch.from_numpy(chunk.states[start // length, n].copy()).to(self.module.critic[0].weight.dtype)
                for t in range(start, min(start + length, num_steps)):
                    if t > start and (chunk.done[t - 1, n] or not chunk.valid[t - 1, n]):
                        state = torch.zeros_like(state)
                    obs = at(chunk.obs, t, n)
                    if not chunk.valid[t, n]:
                        obs = tree_map(np.nan_to_num, obs)
                    step_params, value, state = self.step(obs, state)
                    params[t][n], values[t][n] = step_params, value
                    if t > 0 and chunk.valid[t, n] and (t - 1, n) not in finals:
                        following[t - 1, n] = value.detach()
                    with torch.no_grad():
                        if (t, n) in finals:
                            following[t, n] = self.step(at(chunk.final_obs, finals[t, n]), state)[1]
                        elif t == last[n]:
                            following[t, n] = self.step(at(chunk.last_obs, n), state)[1]
        return params, values, following
