"""Replay: the transitions of many environments, each observation stored once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayvec.data import Chunk, Tree
from rayvec.errors import CheckpointError, ConfigError, check_count
from rayvec.policies.networks import upload

__all__ = ["ReplayBuffer", "Transitions"]

_CPU = torch.device("cpu")
_TENSORS = ("obs", "act", "rew", "terminated")


@dataclass(frozen=True, slots=True)
class Transitions:
    """B transitions, in newly allocated memory of the buffer's device.

    Attributes:
        obs: ``[B, *obs_shape]``.
        act: ``[B, *act_shape]``.
        rew: ``float32 [B]``.
        next_obs: The true observation after the step, also where an episode ended, ``[B, *obs_shape]``.
        terminated: Whether there is nothing to bootstrap from, ``bool [B]``; False for what was truncated.
    """

    obs: Tensor
    act: Tensor
    rew: Tensor
    next_obs: Tensor
    terminated: Tensor


class ReplayBuffer:
    """The last transitions of N environments, in the order in which they were taken.

    Every environment has its own ring of ``capacity_steps + 1`` slots; steps that did not happen take none. The
    observation after a step lies in the next slot, and the one that the policy sees next in the slot after the last
    step. Only where an episode ended, or where what followed is not known to follow, does a table beside the rings
    hold the observation after the step. Consecutive chunks are compared bit by bit: where
    the first observation of a chunk is not the one that the chunk before ended with (a new episode began, or the
    environment restarted), the transition before it keeps the observation that it really led to.

    Observations and actions keep the dtype that they have after `encode_obs` and `encode_act`, but float64 becomes
    float32. Memory is allocated by the first chunk; on a CPU it is touched as it fills. Which slots are filled is known
    in the host's memory, so sampling on another device uploads row numbers once and reads nothing back.

    Args:
        capacity_steps: Steps of each environment that are kept.
        encode_obs: From a tree of ``[..., *obs_shape]`` to the one array that is stored; as it is if left out.
        encode_act: The same for actions.
        device: Where transitions are stored.

    Raises:
        ConfigError: `capacity_steps` is not positive.
    """

    obs: Tensor
    act: Tensor
    rew: Tensor
    terminated: Tensor
    final_row: NDArray[np.int32]
    env_ids: NDArray[np.int64] | None
    _finals: _FinalTable

    def __init__(
        self,
        capacity_steps: int,
        encode_obs: Callable[[Tree], NDArray[Any]] = np.asarray,
        encode_act: Callable[[Tree], NDArray[Any]] = np.asarray,
        device: torch.device = _CPU,
    ) -> None:
        self.capacity_steps = check_count("capacity_steps", capacity_steps)
        self._encode_obs, self._encode_act, self._device = encode_obs, encode_act, device
        self._empty()

    def __len__(self) -> int:
        """Transitions that can be sampled, of all environments together."""
        return int(self.sizes.sum())

    def add(self, chunk: Chunk) -> None:
        """Stores the steps of a chunk that happened, over the oldest ones.

        Where it is interrupted, or memory runs out, while it writes, the buffer is empty afterwards.

        Raises:
            ConfigError: The chunk is of other environments than those before.
        """
        self._check_envs(chunk)
        obs, last_obs = _float32(self._encode_obs(chunk.obs)), _float32(self._encode_obs(chunk.last_obs))
        finals, act = _float32(self._encode_obs(chunk.final_obs)), _float32(self._encode_act(chunk.act))
        try:
            self._add(chunk, obs, act, last_obs, finals)
        except BaseException:  # some arrays may have changed and others not
            self._empty()
            raise

    def _add(
        self, chunk: Chunk, obs: NDArray[Any], act: NDArray[Any], last_obs: NDArray[Any], finals: NDArray[Any]
    ) -> None:
        """Stores the steps of a chunk, whose observations and actions are encoded."""
        self._allocate(chunk, obs, act)
        if not chunk.valid.any():
            return
        # A step that neither ended an episode nor is followed by a step that happened is cut where the chunk shows it.
        following = np.concatenate([obs[1:], last_obs[None]])
        followed = np.concatenate([chunk.valid[1:], np.ones((1, chunk.num_envs), bool)])
        final_row = np.full(chunk.valid.shape, -1, np.int32)
        happened = chunk.valid[tuple(chunk.final_index.T)]
        t, n = chunk.final_index[happened].T
        final_row[t, n] = self._finals.keep(finals[happened])
        cut = chunk.valid & ~chunk.done & ~followed
        final_row[cut] = self._finals.keep(following[cut])
        self._cut_heads(chunk.valid, obs)
        self._write(chunk, obs, act, final_row)
        self._write_heads(chunk.valid, last_obs)

    def sample(self, ages: NDArray[np.int64], envs: NDArray[np.int64]) -> Transitions:
        """Returns transitions.

        Args:
            ages: Which of an environment's transitions, 0 for the oldest that is kept, below its size, ``int64 [B]``.
            envs: Which environment, ``int64 [B]``.
        """
        num_slots, num_envs = self.final_row.shape
        slots = (self._heads[envs] - self.sizes[envs] + ages) % num_slots
        row, row_after = slots * num_envs + envs, (slots + 1) % num_slots * num_envs + envs
        final_row = self.final_row.take(row)
        ended = np.flatnonzero(final_row >= 0)
        parts = (row, row_after, ended, final_row[ended])
        uploaded = upload(np.concatenate(parts), self._device)
        at, after, ends, at_finals = torch.split(uploaded, [*map(len, parts)])
        obs, act, rew, terminated = (getattr(self, name).flatten(0, 1) for name in _TENSORS)
        next_obs = obs.index_select(0, after)
        next_obs.index_copy_(0, ends, self._finals.obs.index_select(0, at_finals))
        obs, act, rew, terminated = (each.index_select(0, at) for each in (obs, act, rew, terminated))
        return Transitions(obs, act, rew, next_obs, terminated)

    def _check_envs(self, chunk: Chunk) -> None:
        if self.env_ids is not None and not np.array_equal(chunk.env_ids, self.env_ids):
            raise ConfigError(
                "A replay holds the steps of one set of environments.",
                expected=f"environments {self.env_ids.tolist()}",
                got=chunk.env_ids.tolist(),
                remedy="Use one replay for each set of environments.",
            )

    def _empty(self) -> None:
        """Forgets all steps and environments; the next chunk allocates memory."""
        for name in (*_TENSORS, "_finals"):
            self.__dict__.pop(name, None)
        self.env_ids, self.sizes, self._heads = None, np.zeros(0, np.int64), np.zeros(0, np.int64)

    def _allocate(self, chunk: Chunk, obs: NDArray[Any], act: NDArray[Any]) -> None:
        if self.env_ids is not None:
            return
        lead = (self.capacity_steps + 1, chunk.num_envs)
        self.obs = _zeros((*lead, *obs.shape[2:]), obs.dtype, self._device)
        self.act = _zeros((*lead, *act.shape[2:]), act.dtype, self._device)
        self.rew = _zeros(lead, np.float32, self._device)
        self.terminated = _zeros(lead, bool, self._device)
        self.final_row = np.full(lead, -1, np.int32)
        self.sizes = np.zeros(chunk.num_envs, np.int64)
        self._heads = np.zeros(chunk.num_envs, np.int64)
        self._finals = _FinalTable(self.obs.new_zeros(0, *obs.shape[2:]), np.zeros(0, np.int32))
        self.env_ids = chunk.env_ids.copy()

    def _cut_heads(self, valid: NDArray[np.bool_], obs: NDArray[Any]) -> None:
        """Stores the observation after the last transition of each environment whose episode does not continue."""
        envs = np.flatnonzero(valid.any(0) & (self.sizes > 0))
        heads = self._heads[envs]
        last = (heads - 1) % len(self.final_row)
        known = self.obs.flatten(0, 1).index_select(0, self._rows(heads, envs)).cpu().numpy()
        same = (known == obs[0, envs]).all(axis=tuple(range(1, known.ndim)))
        continues = valid[0, envs] & same
        cut = ~continues & (self.final_row[last, envs] < 0)
        self.final_row[last[cut], envs[cut]] = self._finals.keep(known[cut])

    def _write(self, chunk: Chunk, obs: NDArray[Any], act: NDArray[Any], final_row: NDArray[np.int32]) -> None:
        counts = chunk.valid.sum(0)
        place = np.cumsum(chunk.valid, 0) - 1
        kept = chunk.valid & (place >= counts - self.capacity_steps)  # of a longer chunk, the last steps
        self._finals.release(final_row[chunk.valid & ~kept])
        t, n = np.nonzero(kept)
        slots = (self._heads[n] + place[t, n]) % len(self.final_row)
        self._release(slots, n)
        rows = self._rows(slots, n)
        steps = (obs[t, n], act[t, n], chunk.rew[t, n].astype(np.float32), chunk.terminated[t, n])
        for name, values in zip(_TENSORS, steps, strict=True):
            stored = getattr(self, name)
            stored.flatten(0, 1).index_copy_(0, rows, upload(values, self._device, stored.dtype))
        self.final_row[slots, n] = final_row[t, n]
        self._heads = (self._heads + counts) % len(self.final_row)
        self.sizes = np.minimum(self.sizes + counts, self.capacity_steps)

    def _write_heads(self, valid: NDArray[np.bool_], last_obs: NDArray[Any]) -> None:
        """Stores what the policy sees next after the last step of each environment."""
        envs = np.flatnonzero(valid.any(0))
        heads = self._heads[envs]
        self._release(heads, envs)
        self.obs.flatten(0, 1).index_copy_(0, self._rows(heads, envs), upload(last_obs[envs], self._device))

    def _rows(self, slots: NDArray[np.int64], envs: NDArray[np.int64]) -> Tensor:
        """Returns where slots lie among those of all environments, ``int64`` on the device."""
        return upload(slots * self.final_row.shape[1] + envs, self._device)

    def _release(self, slots: NDArray[np.int64], envs: NDArray[np.int64]) -> None:
        """Frees the final observations of slots that are about to be overwritten."""
        self._finals.release(self.final_row[slots, envs])
        self.final_row[slots, envs] = -1

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of what is stored, as tensors: only the part of the rings that was ever filled."""
        if self.env_ids is None:
            return {}
        was_full = (self.sizes != self._heads).any()
        used = min(int((self.capacity_steps if was_full else self._heads.max(initial=-1)) + 1), len(self.final_row))
        arrays = {
            "final_row": self.final_row[:used],
            "env_ids": self.env_ids,
            "sizes": self.sizes,
            "heads": self._heads,
            "free": self._finals.free,
        }
        tensors = {name: getattr(self, name)[:used] for name in _TENSORS} | {"finals": self._finals.obs}
        tensors |= {name: torch.from_numpy(array) for name, array in arrays.items()}
        return {name: tensor.to(_CPU, copy=True) for name, tensor in tensors.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state_dict` was taken.

        Raises:
            CheckpointError: The state is of a replay with more steps for each environment, or with fewer, of which
                some have been overwritten.
        """
        if not state:
            self._empty()
            return
        final_row, env_ids, sizes, heads, free = (
            state[name].numpy().copy() for name in ("final_row", "env_ids", "sizes", "heads", "free")
        )
        num_slots = self.capacity_steps + 1
        used = len(final_row)
        is_ring = used != num_slots and (sizes != heads).any()
        if is_ring or used > num_slots or sizes.max(initial=0) > self.capacity_steps:
            raise CheckpointError(
                "A replay is restored into one of the same capacity.",
                expected=f"{self.capacity_steps} steps of each environment",
                got=used - 1,
                remedy="Use the configuration that the checkpoint was written with.",
            )
        for name in _TENSORS:
            values = state[name]
            full = _zeros((num_slots, *values.shape[1:]), values.numpy().dtype, self._device)
            full[:used].copy_(values)
            setattr(self, name, full)
        self.final_row = np.full((num_slots, *final_row.shape[1:]), -1, np.int32)
        self.final_row[:used] = final_row
        self.env_ids, self.sizes, self._heads = env_ids, sizes, heads
        self._finals = _FinalTable(state["finals"].to(self._device, copy=True), free)


class _FinalTable:
    """Observations at the ends of episodes, in rows that are reused; the table grows as needed.

    Args:
        obs: Rows, ``[M, *obs_shape]``.
        free: Which of them are not in use.
    """

    def __init__(self, obs: Tensor, free: NDArray[np.int32]) -> None:
        self.obs = obs
        self._num_free = len(free)
        self._stack = np.concatenate([free, np.zeros(len(obs) - len(free), np.int32)])

    @property
    def free(self) -> NDArray[np.int32]:
        """Rows that are not in use."""
        return self._stack[: self._num_free]

    def keep(self, obs: NDArray[Any]) -> NDArray[np.int32]:
        """Stores observations ``[F, *obs_shape]``; returns their rows."""
        if len(obs) > self._num_free:
            old, more = len(self.obs), max(len(obs), len(self.obs) // 2, 64)
            self.obs = torch.cat([self.obs, self.obs.new_zeros(more, *self.obs.shape[1:])])
            self._stack = np.concatenate(
                [self.free, np.arange(old, old + more), np.zeros(old, np.int32)], dtype=np.int32
            )
            self._stack = self._stack[: len(self.obs)]
            self._num_free += more
        rows = self._stack[self._num_free - len(obs) : self._num_free].copy()
        self._num_free -= len(obs)
        device = self.obs.device
        self.obs.index_copy_(0, upload(rows.astype(np.int64), device), upload(obs, device))
        return rows

    def release(self, rows: NDArray[np.int32]) -> None:
        """Frees rows; negative ones are ignored."""
        rows = rows[rows >= 0]
        self._stack[self._num_free : self._num_free + len(rows)] = rows
        self._num_free += len(rows)


def _float32(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _zeros(shape: tuple[int, ...], dtype: Any, device: torch.device) -> Tensor:
    """Returns zeros. On a CPU their memory is not touched before something is written to it."""
    untouched = torch.from_numpy(np.zeros(shape, dtype))
    return untouched if device.type == "cpu" else torch.zeros(shape, dtype=untouched.dtype, device=device)
