"""Tianshou's policies as policies that act where the environments are."""

from __future__ import annotations

import io
import pickle
import random
import secrets
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from tianshou.algorithm.algorithm_base import Algorithm, Policy
from tianshou.data import Batch, to_numpy
from tianshou.data.collector import get_stddev_from_dist
from torch.nn.parameter import is_lazy

from rayvec.data import Tree
from rayvec.envs.pickled_parts import names_what_cannot_be_imported
from rayvec.errors import require
from rayvec.policies.noise import NoiseSpec

_ARRAY, _TENSOR = "array:", "tensor:"
_PROCESS = secrets.token_hex(8)
"""Names this process."""


class TianshouPolicy:
    """Acts with a policy of Tianshou, for :func:`rayvec.rollout.loop` and both collectors.

    It does what Tianshou's Collector does in one step: forward pass, exploration noise, mapping to the action
    space. The extras hold what else goes into a buffer: ``act``, the action before mapping; the
    policy's own entry, hidden state included (:func:`policy_entry`); ``dist_std``.

    Two things differ. The policy gets no infos. And in workers the global generators of torch, NumPy and Python are
    seeded by the seed of the rollout: its draws are repeatable on the same topology, not across topologies. In the
    driver, also with ``workers_per_node=0``, rayvec does not seed them: the policy draws from them as in Tianshou.

    Args:
        policy: A policy, or an algorithm, whose policy is taken. It is not copied.
        exploration_noise: Whether to add the policy's exploration noise.

    Attributes:
        policy: The policy that acts.
    """

    noise = NoiseSpec("uniform", 1)

    def __init__(self, policy: Policy | Algorithm[Any, Any], *, exploration_noise: bool = False) -> None:
        self._use(policy.policy if isinstance(policy, Algorithm) else policy)
        self._exploration_noise = exploration_noise
        self._state: Any = None
        self._loaded = b""  # the policy without its tensors, where that came from another process
        self._must_seed = False

    def _use(self, policy: Policy) -> None:
        self.policy = policy
        self._is_recurrent = any(isinstance(module, torch.nn.RNNBase) for module in policy.modules())

    def act(self, obs: Tree, noise: NDArray[np.float64]) -> tuple[Tree, dict[str, NDArray[Any]]]:
        """Chooses actions for k environments; see :class:`rayvec.rollout.loop.ActingPolicy`."""
        if self._must_seed:
            self._must_seed = False
            seed = int(noise[0, 0] * 2**53)
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
        batch: Any = Batch(obs=obs, info=Batch())
        # Without autograd torch evaluates an LSTM by another kernel, which differs in the last bits.
        with torch.set_grad_enabled(self._is_recurrent):
            result = self.policy(batch, self._state)
        act = to_numpy(result.act)
        if self._exploration_noise:
            act = self.policy.add_exploration_noise(act, batch)
        self._state = _detached(result.get("state", None))
        entry = result.get("policy", Batch())
        extras = dict(_flatten(entry if self._state is None else Batch(entry, hidden_state=self._state), ""))
        mapped = self.policy.map_action(act)
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
        """Returns the policy as it is, its parameters bit for bit, as a vector of bytes that mean no numbers.

        Raises:
            ConfigError: A lazy layer has not run yet.
        """
        tensors = [*self.policy.parameters(), *self.policy.buffers()]
        require(
            not any(map(is_lazy, tensors)),
            "A lazy layer of the policy has no shapes yet: it gets them when it first runs. Call the policy once "
            "before: policy(Batch(obs=obs, info=Batch())), with obs of env.reset().",
        )
        structure = _pickled((self.policy, self._exploration_noise), tensors)
        data = [_bytes_of(each.detach().cpu()) for each in tensors]
        content = pickle.dumps((_PROCESS, structure, np.concatenate([np.zeros(0, np.uint8), *data])))
        return np.frombuffer(content + bytes(-len(content) % 4), np.float32)

    def load_weights(self, weights: NDArray[np.float32]) -> None:
        """Loads what :meth:`weights` returned in another process.

        Where more than the tensors has changed since the last time, the policy is replaced. Its hidden state stays.
        """
        process, structure, data = pickle.loads(np.ascontiguousarray(weights).tobytes())
        if structure != self._loaded:
            self._loaded = structure
            policy, self._exploration_noise = _Unpickler(io.BytesIO(structure)).load()
            self._use(policy.eval())
            self._must_seed = process != _PROCESS  # the driver's generators are the caller's
        for own in map(_bytes_of, chain(self.policy.parameters(), self.policy.buffers())):
            own[:], data = data[: own.size], data[own.size :]

    def __getstate__(self) -> dict[str, Any]:
        return {"weights": self.weights()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._state, self._loaded = None, b""
        self.load_weights(state["weights"])


def _pickled(value: Any, tensors: list[torch.Tensor]) -> bytes:
    """Pickles a value without its tensors, for each of which its number and its form stand.

    Functions and classes of the script, and of modules that `cloudpickle` is to pickle by value, are pickled by value,
    which takes five times as long.
    """
    forms = [(k, type(each), each.requires_grad, each.dtype, each.shape) for k, each in enumerate(tensors)]
    form_of = dict(zip(map(id, tensors), forms, strict=True))

    def pickled(kind: type[pickle.Pickler]) -> bytes:
        pickler = kind(file := io.BytesIO(), 5)
        pickler.persistent_id = lambda each: form_of.get(id(each))  # type: ignore[method-assign]
        pickler.dump(value)
        return file.getvalue()

    with suppress(Exception):  # such as a local class
        data = pickled(pickle.Pickler)
        if not names_what_cannot_be_imported(data):
            return data
    return pickled(cloudpickle.Pickler)


class _Unpickler(pickle.Unpickler):
    """Makes tensors where the pickler has left them out."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._made: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> torch.Tensor:
        """Returns a tensor, or parameter, of the form of the one that was left out."""
        number, kind, needs_grad, dtype, shape = pid
        if number not in self._made:
            tensor = torch.empty(shape, dtype=dtype)
            self._made[number] = torch.nn.Parameter(tensor, needs_grad) if kind is torch.nn.Parameter else tensor
        return self._made[number]


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Returns the bytes of a contiguous tensor on the CPU, which may be written."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


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
                *path, last = name.removeprefix(prefix).split("/")
                place = entry
                for key in path:
                    place = place.__dict__.setdefault(key, Batch())
                place.__dict__[last] = torch.from_numpy(value) if prefix == _TENSOR else value
    return entry


def _flatten(value: Any, path: str) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yields arrays with their paths."""
    if isinstance(value, dict | Batch):
        for key, part in value.items():
            yield from _flatten(part, f"{path}/{key}" if path else key)
    elif isinstance(value, torch.Tensor):
        yield _TENSOR + path, value.detach().cpu().numpy()
    elif value is not None:
        yield _ARRAY + path, np.asarray(value)


def _detached(state: Any) -> Any:
    if isinstance(state, dict | Batch):
        return Batch({key: _detached(part) for key, part in state.items()})
    return state.detach() if isinstance(state, torch.Tensor) else state
