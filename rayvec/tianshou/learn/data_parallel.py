"""Tianshou's algorithms on several learner ranks, as algorithms that Tianshou's trainers run."""

from __future__ import annotations

import copy
import functools
import weakref
from dataclasses import dataclass
from typing import Any, Literal

import cloudpickle
import numpy as np
import tianshou.algorithm
import torch
from numpy.typing import NDArray
from tianshou.algorithm.algorithm_base import Algorithm, OnPolicyAlgorithm, TrainingStats
from tianshou.algorithm.modelfree.sac import AutoAlpha, FixedAlpha
from tianshou.data import ReplayBuffer

from rayvec.distributed.rank_group import RankGroup
from rayvec.errors import ConfigError, check_choice, check_count
from rayvec.tianshou.learn.algorithm_rank import AlgorithmRank
from rayvec.tianshou.learn.algorithm_state import AlgorithmState, Numbers
from rayvec.tianshou.learn.impala import IMPALA
from rayvec.tianshou.learn.shards import Ahead, Generators, OffPolicyUpdate, OnPolicyUpdate, cut_batch

__all__ = ["EQUAL", "DataParallel", "data_parallel"]

_NAMES = "A2C C51 DDPG DQN DiscreteSAC FQF IQN PPO QRDQN REDQ RainbowDQN SAC TD3"
EQUAL: tuple[type[Algorithm[Any, Any]], ...] = (IMPALA, *(getattr(tianshou.algorithm, name) for name in _NAMES.split()))
"""The algorithms for which tests show that N ranks do what one does."""


def data_parallel(
    algorithm: Algorithm[Any, Any],
    num_learners: int = 1,
    device: Literal["cpu", "cuda"] = "cpu",
    *,
    learner_threads: int = 1,
    num_cpus: int | None = None,
    timeout_s: float = 60.0,
    num_nodes: Literal[0] | None = None,
    address: str | None = None,
) -> Any:
    """Returns an algorithm whose updates are computed by several learner ranks together.

    It has the class of `algorithm` and shares its policy, nets and optimizers: Tianshou's trainers and collectors
    use it like `algorithm`. Its ``update`` sends every rank a contiguous part of the buffer, or of the sampled
    batch. A rank computes the losses of its rows, the gradients of all ranks are summed before they are clipped, and
    every rank takes the same step. Afterwards the policy, the nets, the states of optimizers and the lagged networks
    of this process are those of the ranks.

    N ranks do what plain Tianshou does with the same data, the same order of minibatches and the same noise, up to
    rounding. For that, NumPy's and torch's global generators are sent to the ranks, and come back as an update of plain
    Tianshou would have left them (torch's off-policy only). On ``"cuda"`` the GPU draws noise of the same distribution.

    Numbers that you change between updates (a learning rate, the momenta of a schedule, a coefficient) reach the
    ranks with the next update; so do weights, states of optimizers and which parameters require a gradient, however
    they are changed. The structure must not change. Buffers that a forward pass changes and, on-policy, random numbers
    in networks raise an error in `update`. A copy or a pickle of the returned algorithm is a plain one.

    Args:
        algorithm: An algorithm of :data:`EQUAL`, or of a subclass that changes none of its methods. Its nets
            must treat rows one by one: batch normalisation and dropout are refused.
        num_learners: Number of ranks. With fewer rows than ranks, some have no work; the result is the same.
        device: Where each rank computes; ``"cuda"`` gives each a GPU. The algorithm itself stays where it is.
        learner_threads: How many threads torch may use on each rank.
        num_cpus: Cores that each rank claims from Ray; by default as many as `learner_threads`.
        timeout_s: How long ranks wait for each other, in seconds.
        num_nodes: 0 runs the ranks as processes of this machine, without Ray. Unset: as Ray actors.
        address: Of a running Ray cluster.

    Returns:
        The algorithm, a :class:`DataParallel` and a ``type(algorithm)``. Its ranks end with ``close()``, with the block
        of a ``with`` statement, or when it is garbage-collected.

    Raises:
        ConfigError: `algorithm` is not one that can be computed on several ranks, or the ranks can't be placed.
        LearnerError: From ``update``: ranks died again while an update was repeated after ranks had died.
    """
    check_count("num_learners", num_learners)
    check_choice("device", device, ("cpu", "cuda"))
    _check_algorithm(algorithm)
    group = RankGroup(
        functools.partial(AlgorithmRank, pickle_algorithm(algorithm), device),
        num_learners,
        device=device,
        threads=learner_threads,
        num_cpus=num_cpus,
        timeout_s=timeout_s,
        num_nodes=num_nodes,
        address=address,
    )
    parallel = wrap(algorithm, group, device)
    weakref.finalize(parallel, group.close)
    return parallel


def wrap(algorithm: Algorithm[Any, Any], group: RankGroup, device: str = "cpu") -> Any:
    """Returns an algorithm whose updates are computed by a group with a copy of it on every rank."""
    parallel: Any = object.__new__(_parallel_class(type(algorithm)))
    vars(parallel).update(vars(algorithm))
    parallel._group, parallel._device, parallel._pending = group, device, None
    parallel._state = AlgorithmState(parallel)
    parallel._on_ranks = copy.deepcopy(parallel._state.capture())
    for optimizer in parallel._state.optimizers:
        vars(optimizer)["_opt_called"] = (
            True  # by the ranks; a schedule of learning rates warns about an optimizer that has not stepped
        )
    return parallel


@dataclass(frozen=True)
class _Pending:
    """What an update starts with.

    Attributes:
        buffer: The buffer that the batch comes from.
        indices: Indices of its rows in the buffer.
        numbers: Numbers of the algorithm before Tianshou switches it to training mode.
    """

    buffer: ReplayBuffer
    indices: NDArray[np.int64]
    numbers: Numbers


class DataParallel:
    """First base class of what :func:`data_parallel` returns: ranks compute its updates.

    Tianshou's own ``update`` samples, steps learning-rate schedules and sets new priorities, in the driver.
    """

    _group: RankGroup
    _device: str
    _pending: _Pending | None
    _state: AlgorithmState
    _on_ranks: dict[str, Any]  # the state of the ranks

    @property
    def num_learners(self) -> int:
        """How many ranks compute an update."""
        return self._group.num_ranks

    @property
    def group(self) -> RankGroup:
        """The ranks: where they are, and their processes."""
        return self._group

    def close(self) -> None:
        """Ends the ranks; the algorithm can't be updated afterwards. May be called again."""
        self._group.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def plain(self) -> Any:
        """Returns the plain algorithm in its present state; it shares policy, nets and optimizers with this one."""
        base = type(self).__mro__[2]
        plain: Any = object.__new__(base)
        vars(plain).update(
            {name: value for name, value in vars(self).items() if name not in DataParallel.__annotations__}
        )
        return plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new, (type(self).__mro__[2],), vars(self.plain())

    def _preprocess_batch(self, batch: Any, buffer: ReplayBuffer, indices: NDArray[np.int64]) -> Any:
        self._pending = _Pending(buffer, indices, self._state.numbers())
        return batch

    def _update_with_batch(self, batch: Any, batch_size: int | None = None, repeat: int = 1) -> TrainingStats:
        algorithm: Any = self
        pending, self._pending = self._pending, None
        assert pending is not None
        seed = int(torch.randint(2**62, ())) if self._device == "cuda" else None
        generators = Generators.capture(seed)
        update: OnPolicyUpdate | OffPolicyUpdate
        ahead = None
        if isinstance(self, OnPolicyAlgorithm):
            is_last = np.isin(pending.indices, pending.buffer.last_index)
            update = OnPolicyUpdate(
                pending.numbers,
                generators,
                batch.rew,
                batch.terminated,
                batch.truncated,
                is_last,
                batch_size,
                repeat,
            )
        else:
            num_steps = getattr(algorithm, "n_step_return_horizon", None) or algorithm.n_step
            ahead = Ahead.of(pending.buffer, pending.indices, num_steps)
            update = OffPolicyUpdate(pending.numbers, generators, len(batch), hasattr(pending.buffer, "update_weight"))
        shards = cut_batch(batch, self.num_learners, ahead)
        if not self._state.is_at(self._on_ranks):  # weights or optimizers were changed between updates
            self._group.load_state_dict(self._state.capture())
            self._on_ranks = copy.deepcopy(self._state.capture())
        args: list[tuple[Any, Any]] = [(update, shard) for shard in shards]
        if isinstance(self, OnPolicyAlgorithm):  # others divide a single minibatch, which travels with the call
            whole = self._group.put(update)
            args = [(whole, self._group.put(shard)) for shard in shards]
        return self._take(batch, self._group.run("update", args, keep=True))

    def _take(self, batch: Any, replies: list[Any]) -> TrainingStats:
        """Loads what an update changed."""
        first = replies[0]
        self._on_ranks = self._group.state_dict()
        self._state.restore(self._on_ranks)
        self._state.set_numbers(first.changed)
        first.generators.restore(numpy_alone=isinstance(self, OnPolicyAlgorithm))
        if first.weight is not None:
            batch.weight = torch.from_numpy(np.concatenate([reply.weight for reply in replies]))
        stats: TrainingStats = first.stats
        return stats


def _new(kind: type[Any]) -> Any:
    return object.__new__(kind)


@functools.cache
def _parallel_class(base: type[Any]) -> type[Any]:
    return type(f"DataParallel{base.__name__}", (DataParallel, base), {"__doc__": f"{base.__name__} on several ranks."})


def pickle_algorithm(algorithm: Any) -> bytes:
    """Pickles an algorithm for the ranks, without schedules of learning rates: the driver steps these."""
    sent = copy.copy(algorithm)
    sent.lr_schedulers = []
    try:
        pickled: bytes = cloudpickle.dumps(sent)
    except Exception as error:
        raise ConfigError(
            "Ranks compute with copies of the algorithm.",
            expected="an algorithm that cloudpickle can pickle",
            got=f"{type(error).__name__}: {error}",
            remedy="Keep open files, environments, loggers and torch's parametrizations out of policy and nets.",
        ) from error
    return pickled


def _check_algorithm(algorithm: Any) -> None:
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(
            "An algorithm of Tianshou 2 is computed on several ranks.",
            expected="a tianshou.algorithm.Algorithm",
            got=f"{type(algorithm).__module__}.{type(algorithm).__qualname__}",
            remedy="Pass the algorithm, not its policy; a policy of Tianshou 1 is to be ported to an algorithm first.",
        )
    if isinstance(algorithm, DataParallel):
        raise ConfigError(
            "An algorithm is made data-parallel once.",
            expected="a plain algorithm",
            got=type(algorithm).__name__,
            remedy="Pass algorithm.plain() to make another of it.",
        )
    _check_class(type(algorithm))
    _check_parts(algorithm)


def _check_class(kind: type[Any]) -> None:
    base = next((each for each in kind.__mro__ if each in EQUAL), None)
    names = ", ".join(each.__name__ for each in EQUAL)
    if base is None:
        raise ConfigError(
            "Only algorithms for which N ranks were shown to equal one are computed on several.",
            expected=f"one of {names}",
            got=kind.__name__,
            remedy="Use the plain algorithm, which takes the same collectors.",
        )
    own = {name for each in kind.__mro__[: kind.__mro__.index(base)] for name in vars(each)}
    changed = sorted(
        name for name in own if name != "__init__" and callable(getattr(base, name, None)) and name not in vars(object)
    )
    if changed:
        raise ConfigError(
            "A subclass that changes methods of its algorithm was not shown to be the same on N ranks as on one.",
            expected=f"{base.__name__}, or a subclass that adds to it",
            got=f"{kind.__name__}, which changes {', '.join(changed)}",
            remedy="Use the plain algorithm, or bring the change into the policy or the nets.",
        )


def _check_parts(algorithm: Any) -> None:
    mixing = (torch.nn.modules.batchnorm._NormBase, torch.nn.modules.dropout._DropoutNd)
    for path, module in algorithm.named_modules():
        between = isinstance(module, torch.nn.RNNBase) and module.num_layers > 1  # dropout is between layers
        drops = (between or isinstance(module, torch.nn.MultiheadAttention)) and module.dropout > 0
        if drops or isinstance(module, mixing):
            raise ConfigError(
                "Nets treat rows one by one, or N ranks are not one.",
                expected="no batch normalisation and no dropout",
                got=f"{type(module).__name__}{f'(dropout={module.dropout})' if drops else ''} at {path}",
                remedy="Use LayerNorm, or leave it out.",
            )
    alpha = getattr(algorithm, "alpha", None)
    if alpha is not None and type(alpha) not in (AutoAlpha, FixedAlpha):
        raise ConfigError(
            "The entropy coefficient is updated by the mean over all rows.",
            expected="a number or an AutoAlpha",
            got=type(alpha).__name__,
            remedy="Pass one of these.",
        )
