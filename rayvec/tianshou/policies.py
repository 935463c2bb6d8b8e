"""Tianshou's policies as policies that act where the environments are.

A policy is sent pickled. After that only its parameters and buffers are sent, as one flat vector, bit for bit. Where
anything else of it has changed, such as the epsilon of a DQN, it is sent again.
"""

from __future__ import annotations

import copy
import random
import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from numpy.typing import NDArray
from tianshou.algorithm.algorithm_base import Algorithm, Policy
from tianshou.data import Batch, to_numpy
from tianshou.data.collector import get_stddev_from_dist

from rayvec.data import Tree
from rayvec.errors import ConfigError
from rayvec.policies.noise import NoiseSpec
from rayvec.tianshou.policy_state import pickled_without_tensors, seed_own_generators, tensors_of

__all__ = ["RandomActions", "TianshouPolicy", "joint_logp", "policy_entry", "record_logp", "records_logp"]

_ARRAY, _TENSOR = "array:", "tensor:"
_PROCESS = secrets.token_hex(8)
"""Names this process."""


class TianshouPolicy:
    """Acts with a policy of Tianshou, for :func:`rayvec.rollout.loop` and both collectors.

    It does what Tianshou's Collector does in one step: forward pass, exploration noise, mapping to the action
    space. The extras hold what else goes into a buffer: ``act``, the action before mapping; the
    policy's own entry, hidden state included (:func:`policy_entry`); ``dist_std``.

    Two things differ. The policy gets no infos. And the generators that it draws from (the global ones of torch, NumPy
    and Python, and those that it holds) are seeded, where it acts, by the seed of the rollout: its draws are repeatable
    on the same topology, not across topologies. In the driver, also with ``workers_per_node=0``, rayvec does not seed
    the global generators: the policy draws from them as in Tianshou.

    Args:
        policy: A policy, or an algorithm, whose policy is taken. It is not copied.
        exploration_noise: Whether to add the policy's exploration noise.
    """

    noise = NoiseSpec("uniform", 1)

    def __init__(self, policy: Policy | Algorithm[Any, Any], *, exploration_noise: bool = False) -> None:
        self._policy: Policy = policy.policy if isinstance(policy, Algorithm) else policy
        self._exploration_noise = exploration_noise
        self._state: Any = None
        self._seeds_own = self._seeds_global = False
        # Without autograd torch evaluates an LSTM by another kernel, which differs in the last bits.
        self._with_grad = any(isinstance(module, torch.nn.RNNBase) for module in self._policy.modules())

    def act(self, obs: Tree, noise: NDArray[np.float64]) -> tuple[Tree, dict[str, NDArray[Any]]]:
        """Chooses actions for k environments; see :class:`rayvec.rollout.loop.ActingPolicy`."""
        if self._seeds_own:
            self._seed(noise)
        batch: Any = Batch(obs=obs, info=Batch())
        with torch.set_grad_enabled(self._with_grad):
            result = self._policy(batch, self._state)
        act = to_numpy(result.act)
        if self._exploration_noise:
            act = self._policy.add_exploration_noise(act, batch)
        self._state = _detached(result.get("state", None))
        entry = result.get("policy", Batch())
        extras = dict(_flatten(entry if self._state is None else Batch(entry, hidden_state=self._state), ""))
        mapped = self._policy.map_action(act)
        if mapped is not act:
            extras["act"] = np.asarray(act)
        dist = result.get("dist", None)
        if dist is not None:
            extras["dist_std"] = to_numpy(get_stddev_from_dist(dist)).reshape(len(act), -1)
        return mapped, extras

    def begin_episodes(self, rows: NDArray[np.int64]) -> None:
        """Clears the hidden state of some environments."""
        if isinstance(self._state, Batch):
            self._state.empty_(rows)
        elif self._state is not None:
            self._state[rows] = None if self._state.dtype == object else 0

    def weights(self) -> NDArray[np.float32]:
        """Returns parameters and buffers as one flat vector of bits, which mean nothing as numbers."""
        tensors = [tensor.cpu().reshape(-1).view(torch.uint8).numpy() for tensor in tensors_of(self._policy)]
        stream = np.concatenate([np.zeros(0, np.uint8), *tensors])
        return np.pad(stream, (0, -len(stream) % 4)).view(np.float32)

    def structure(self) -> bytes:
        """Returns what :meth:`weights` don't hold. A copy acts as the policy does while this does not change.

        States of random generators are left out.

        Raises:
            ConfigError: The policy can't be pickled.
        """
        try:
            return pickled_without_tensors(self._policy)
        except Exception as error:
            raise ConfigError(f"The policy can't be pickled: {error}. Pass inference='driver'.") from error

    def load_weights(self, weights: NDArray[np.float32]) -> None:
        """Loads what :meth:`weights` returned in another process.

        Raises:
            ConfigError: It comes from a policy with other parameters.
        """
        tensors = list(tensors_of(self._policy))
        *ends, size = np.cumsum([0, *(each.numel() * each.element_size() for each in tensors)])
        if weights.size != -(-size // 4):
            raise ConfigError(
                f"The weights have {weights.size} numbers, but the policy takes {-(-size // 4)}. Pass what weights() "
                "of the same TianshouPolicy returned; publish a changed policy again."
            )
        parts = np.split(np.ascontiguousarray(weights).view(np.uint8)[:size].copy(), ends[1:])
        with torch.no_grad():
            for tensor, part in zip(tensors, parts, strict=False):
                tensor.copy_(torch.from_numpy(part.copy()).view(tensor.dtype).view(tensor.shape))

    def __getstate__(self) -> dict[str, Any]:
        """Moves a copy to the CPU; the hidden state stays behind."""
        policy = self._policy
        if any(tensor.is_cuda for tensor in tensors_of(policy)):
            policy = copy.deepcopy(policy).cpu()
        return {"policy": policy, "exploration_noise": self._exploration_noise, "process": _PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["policy"], exploration_noise=state["exploration_noise"])  # type: ignore[misc]
        self._policy.eval()
        self._seeds_own = True  # else each copy would draw the same
        self._seeds_global = state["process"] != _PROCESS  # the driver's generators are the caller's

    def _seed(self, noise: NDArray[np.float64]) -> None:
        self._seeds_own = False
        seed = _whole(noise[0, 0])
        seed_own_generators(self._policy, seed)
        if self._seeds_global:
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)


class RandomActions:
    """Samples an action space, with a generator for each environment that the rollout's noise seeds.

    Args:
        space: The action space of one environment.
    """

    noise = NoiseSpec("uniform", 1)

    def __init__(self, space: Space[Any]) -> None:
        self._space = space
        self._spaces: list[Space[Any]] = []

    def act(self, obs: Tree, noise: NDArray[np.float64]) -> tuple[Tree, dict[str, NDArray[Any]]]:
        """Samples; see :class:`rayvec.rollout.loop.ActingPolicy`."""
        if not self._spaces:
            self._spaces = [copy.deepcopy(self._space) for _ in noise]
            for space, number in zip(self._spaces, noise[:, 0], strict=True):
                space.seed(_whole(number) % 2**31)
        return np.array([space.sample() for space in self._spaces]), {}

    def load_weights(self, weights: NDArray[np.float32]) -> None:
        """Does nothing: there are no weights."""


def record_logp(policy: Policy) -> None:
    """Lets a policy record the log-probability of each action that it draws, from now on, wherever it acts.

    Every collector puts it into the buffer, in the policy's entry: ``batch.policy.logp``.
    """
    if not records_logp(policy):
        policy.register_forward_hook(_note_logp)


def records_logp(policy: Policy) -> bool:
    """Whether :func:`record_logp` was called for it, in this process or in the one that it comes from."""
    return _note_logp in policy._forward_hooks.values()


def joint_logp(dist: torch.distributions.Distribution, act: torch.Tensor) -> torch.Tensor:
    """Returns log-probabilities of actions ``[B]``, summed over components where `dist` keeps them separate."""
    return dist.log_prob(act).reshape(len(act), -1).sum(-1)


def _note_logp(policy: Policy, args: tuple[Any, ...], result: Any) -> Any:
    entry = result.get("policy", Batch())
    entry.logp = joint_logp(result.dist, result.act).detach()
    result.policy = entry
    return result


def policy_entry(extras: dict[str, NDArray[Any]]) -> Batch:
    """Returns the entry ``policy`` of a chunk's steps as Tianshou has it, arrays and tensors ``[T, N, ...]``."""
    entry = Batch()
    for name, value in extras.items():
        for prefix in (_ARRAY, _TENSOR):
            if name.startswith(prefix):
                path = name.removeprefix(prefix).split("/")
                *path, last = [key.replace("~1", "/").replace("~0", "~") for key in path]
                place = entry
                for key in path:
                    place = place.__dict__.setdefault(key, Batch())
                place.__dict__[last] = torch.from_numpy(value) if prefix == _TENSOR else value
    return entry


def _flatten(value: Any, path: str) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yields arrays with their paths, keys escaped as in a JSON pointer."""
    if isinstance(value, dict | Batch):
        for key, part in value.items():
            name = key.replace("~", "~0").replace("/", "~1")
            yield from _flatten(part, f"{path}/{name}" if path else name)
    elif isinstance(value, torch.Tensor):
        yield _TENSOR + path, value.detach().cpu().numpy()
    elif value is not None:
        yield _ARRAY + path, np.asarray(value)


def _detached(state: Any) -> Any:
    if isinstance(state, dict | Batch):
        return Batch({key: _detached(part) for key, part in state.items()})
    return state.detach() if isinstance(state, torch.Tensor) else state


def _whole(number: float) -> int:
    return int(number * 2**53)
