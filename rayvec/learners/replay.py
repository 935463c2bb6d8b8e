"""Replay: the last transitions of many environments, each with the observation before it and the true one after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayvec.data import Chunk, Tree
from rayvec.errors import ConfigError, check_count
from rayvec.policies.networks import to_device

_CPU = torch.device("cpu")


class ReplayBuffer:
    """A ring of transitions for each of N environments; steps that did not happen take no place.

    Observations keep the dtype that they have after `encode_obs`, and so do actions, but for float64, which becomes
    float32. Memory is allocated by the first chunk; on a CPU it is touched as it fills. Which places are filled is
    known in the host's memory, so sampling on another device uploads row numbers once and reads nothing back.

    Args:
        capacity_steps: Steps of each environment that are stored.
        encode_obs: From a tree of ``[..., *obs_shape]`` to the one array that is stored; as it is if left out.
        encode_act: The same for actions.
        device: Where transitions are stored.

    Attributes:
        columns: ``obs``, ``act``, ``rew``, ``next_obs`` and ``terminated`` by name, ``[capacity_steps, N, ...]`` each.
        sizes: How many steps of each environment there are, ``int64 [N]``.
        env_ids: The environments, ``int64 [N]``; None before the first chunk.

    Raises:
        ConfigError: `capacity_steps` is not positive.
    """

    def __init__(
        self,
        capacity_steps: int,
        encode_obs: Callable[[Tree], NDArray[Any]] = np.asarray,
        encode_act: Callable[[Tree], NDArray[Any]] = np.asarray,
        device: torch.device = _CPU,
    ) -> None:
        self.capacity_steps = check_count("capacity_steps", capacity_steps)
        self._encode_obs, self._encode_act, self._device = encode_obs, encode_act, device
        self.columns: dict[str, Tensor] = {}
        self.env_ids: NDArray[np.int64] | None = None
        self.sizes, self._heads = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def __len__(self) -> int:
        """Transitions that can be sampled, of all environments together."""
        return int(self.sizes.sum())

    def add(self, chunk: Chunk) -> None:
        """Stores the steps of a chunk that happened, over the oldest ones.

        Where that is interrupted, the steps that were to be overwritten are gone, and the chunk's are not there.

        Raises:
            ConfigError: The chunk is of other environments than those before.
        """
        if self.env_ids is not None and not np.array_equal(chunk.env_ids, self.env_ids):
            raise ConfigError(
                f"A chunk is of the environments {chunk.env_ids.tolist()}, and the replay holds those of "
                f"{self.env_ids.tolist()}. Use one replay for each set of environments."
            )
        columns = {
            "obs": self._encode_obs(chunk.obs),
            "act": self._encode_act(chunk.act),
            "rew": chunk.rew,
            "next_obs": self._encode_obs(chunk.next_obs()),
            "terminated": chunk.terminated,
        }
        if self.env_ids is None:
            lead = (self.capacity_steps, chunk.num_envs)
            empty = {name: _stored(name, each[:0]) for name, each in columns.items()}
            self.columns = {
                name: _zeros((*lead, *each.shape[2:]), each.dtype, self._device) for name, each in empty.items()
            }
            self.sizes, self._heads = np.zeros((2, chunk.num_envs), np.int64)
            self.env_ids = chunk.env_ids.copy()
        counts, place = chunk.valid.sum(0), chunk.valid.cumsum(0) - 1
        t, n = np.nonzero(chunk.valid & (place >= counts - self.capacity_steps))  # of a longer chunk, the last steps
        rows = to_device((self._heads[n] + place[t, n]) % self.capacity_steps * chunk.num_envs + n, self._device)
        self.sizes = np.minimum(self.sizes, (self.capacity_steps - counts).clip(min=0))
        for name, values in columns.items():
            self.columns[name].flatten(0, 1).index_copy_(0, rows, to_device(_stored(name, values[t, n]), self._device))
        self._heads = (self._heads + counts) % self.capacity_steps
        self.sizes = np.minimum(self.sizes + counts, self.capacity_steps)

    def sample(self, ages: NDArray[np.int64], envs: NDArray[np.int64]) -> dict[str, Tensor]:
        """Returns copies of transitions by the names of `columns`, ``[B, ...]`` each, on the buffer's device.

        Args:
            ages: Which of an environment's transitions, 0 for the oldest, of any shape ``[B]``; the newest for others.
            envs: Which environment; others stand for some environment of the buffer.
        """
        envs = envs.clip(0, max(0, len(self.sizes) - 1))
        ages = np.minimum(ages, np.maximum(self.sizes[envs] - 1, 0))
        slots = (self._heads[envs] - self.sizes[envs] + ages) % self.capacity_steps
        rows = to_device((slots * len(self.sizes) + envs).ravel(), self._device)
        found = {name: each.flatten(0, 1).index_select(0, rows) for name, each in self.columns.items()}
        return {name: each.view(*envs.shape, *each.shape[1:]) for name, each in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of what is stored, as tensors: only the part of the rings that was ever filled."""
        if self.env_ids is None:
            return {}
        was_full = (self.sizes != self._heads).any()
        used = self.capacity_steps if was_full else int(self._heads.max(initial=0))
        arrays = {"env_ids": self.env_ids, "sizes": self.sizes, "heads": self._heads}
        return {name: each[:used].to(_CPU, copy=True) for name, each in self.columns.items()} | {
            name: torch.from_numpy(array.copy()) for name, array in arrays.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets an empty replay continue where that of the same capacity was when `state_dict` was taken."""
        if not state:
            return
        self.env_ids, self.sizes, self._heads = (state[name].numpy().copy() for name in ("env_ids", "sizes", "heads"))
        for name in ("obs", "act", "rew", "next_obs", "terminated"):
            values = state[name]
            self.columns[name] = _zeros((self.capacity_steps, *values.shape[1:]), values.numpy().dtype, self._device)
            self.columns[name][: len(values)].copy_(values)


def _stored(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Returns what is stored of a column: of observations all digits, which a mean may take away."""
    return array if name.endswith("obs") or array.dtype != np.float64 else array.astype(np.float32)


def _zeros(shape: tuple[int, ...], dtype: Any, device: torch.device) -> Tensor:
    """Returns zeros. On a CPU their memory is not touched before something is written to it."""
    untouched = torch.from_numpy(np.zeros(shape, dtype))
    return untouched if device.type == "cpu" else torch.zeros(shape, dtype=untouched.dtype, device=device)
