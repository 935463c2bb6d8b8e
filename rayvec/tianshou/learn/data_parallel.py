"""Tianshou's algorithms on several learner ranks, as algorithms that Tianshou's trainers run."""

from __future__ import annotations

import copy
import functools
import weakref
from itertools import pairwise
from typing import Any, Literal

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from tianshou.algorithm.algorithm_base import (
    Algorithm,
    OfflineAlgorithm,
    OffPolicyAlgorithm,
    OnPolicyAlgorithm,
    TrainingStats,
)
from tianshou.algorithm.modelfree.ppo import PPO
from tianshou.data import ReplayBuffer

from rayvec.data.topology import even_bounds
from rayvec.distributed.rank import pack, unpack
from rayvec.distributed.rank_group import RankGroup, open_host
from rayvec.errors import ConfigError, LearnerError, check_count
from rayvec.tianshou.learn.algorithm_rank import AlgorithmRank, Shard
from rayvec.tianshou.learn.algorithm_state import AlgorithmState, equal

__all__ = ["DataParallel", "data_parallel"]


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
    use it like `algorithm`. In its ``update`` this process samples the batch and computes what the algorithm adds to it
    (returns, advantages, targets). Every rank then learns from a contiguous part of the rows. The gradients of all
    ranks are summed before they are clipped, and every rank takes the same step. Afterwards the policy, the nets, the
    states of optimizers and the lagged networks of this process are those of the ranks.

    Where a step uses the whole batch, N ranks do what plain Tianshou does, up to rounding and to noise that the
    algorithm draws in the step. With minibatches each rank shuffles its own rows, as PyTorch's DistributedDataParallel
    does. The losses in the statistics are those of rank 0's rows, and batch normalisation normalises by a rank's own.

    Numbers that you change between updates (a learning rate, the momenta of a schedule, a coefficient) reach the
    ranks with the next update; so do weights, states of optimizers and which parameters require a gradient, however
    they are changed. The structure must not change. A copy or a pickle of the returned algorithm is a plain one.

    A rank that is lost in an update raises a `LearnerError`. The algorithm then has the weights of the last completed
    update, from which the next update continues with new ranks.

    Args:
        algorithm: An on-policy, off-policy or offline algorithm that gets its gradients by ``backward()`` of losses
            that are means over rows. (NPG and TRPO do not; their first update raises.) PPO, A2C, SAC, TD3, DQN and
            :class:`~rayvec.tianshou.IMPALA` are tested.
        num_learners: Number of ranks. With fewer rows than ranks, some have no work.
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
    """
    check_count("num_learners", num_learners)
    if isinstance(algorithm, DataParallel):
        raise ConfigError("The algorithm is data-parallel already. Pass algorithm.plain() to make another of it.")
    if not isinstance(algorithm, OnPolicyAlgorithm | OffPolicyAlgorithm | OfflineAlgorithm):
        raise ConfigError(
            f"{type(algorithm).__qualname__} can't be computed on several ranks. Pass an on-policy, off-policy or "
            "offline algorithm of Tianshou 2, and not its policy."
        )
    if isinstance(algorithm, PPO) and algorithm.recompute_adv and algorithm.return_scaling:
        raise ConfigError(
            "recompute_advantage=True with return_scaling=True can't be computed on several ranks: each rank would "
            "scale returns by its own samples. Switch off one of them."
        )
    host = functools.partial(
        open_host,
        device=device,
        num_cpus=learner_threads if num_cpus is None else num_cpus,
        num_nodes=num_nodes,
        address=address,
    )
    parallel: Any = object.__new__(_parallel_class(type(algorithm)))
    vars(parallel).update(vars(algorithm))
    parallel._ranks = _Ranks(host, num_learners, device, learner_threads, timeout_s)
    parallel._state = AlgorithmState(parallel)
    parallel._is_last = np.zeros(0, bool)
    for optimizer in parallel._state.optimizers:
        optimizer._opt_called = True  # by the ranks; a schedule of learning rates warns if no optimizer has stepped
    parallel._ranks.start(parallel)
    weakref.finalize(parallel, parallel._ranks.close)
    return parallel


class _Ranks:
    """The ranks of an algorithm, and the weights and states of optimizers that they hold."""

    def __init__(self, make_host: Any, num_ranks: int, device: str, threads: int, timeout_s: float) -> None:
        self.num_ranks = num_ranks
        self.group: RankGroup | None = None
        self.held: Any = None
        self._make_host, self._device = make_host, device
        self._how: dict[str, Any] = {"device": device, "threads": threads, "timeout_s": timeout_s}
        self._is_closed = False

    def start(self, algorithm: DataParallel) -> RankGroup:
        """Returns the ranks; starts them with the algorithm as it is, unless they run."""
        if self._is_closed:
            raise LearnerError("The ranks were closed. Call data_parallel(algorithm.plain()) for new ones.")
        if self.group is None or self.group.has_ended:
            make = functools.partial(AlgorithmRank, _pickled(algorithm.plain()), self._device)
            self.group, self.held = RankGroup(make, self.num_ranks, self._make_host(), **self._how), None
        return self.group

    def close(self) -> None:
        """Ends the ranks."""
        self._is_closed = True
        if self.group is not None:
            self.group.close(terminate=True)


class DataParallel:
    """First base class of what :func:`data_parallel` returns: ranks compute its updates.

    Tianshou's own ``update`` samples, steps learning-rate schedules and sets new priorities, in the driver.
    """

    _ranks: _Ranks
    _state: AlgorithmState
    _is_last: NDArray[np.bool_]  # where an environment's steps in the buffer end

    @property
    def num_learners(self) -> int:
        """How many ranks compute an update."""
        return self._ranks.num_ranks

    @property
    def group(self) -> RankGroup:
        """The ranks: where they are, and their processes. It starts new ones if a rank was lost."""
        return self._ranks.start(self)

    def close(self) -> None:
        """Ends the ranks; the algorithm can't be updated afterwards. May be called again."""
        self._ranks.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def plain(self) -> Any:
        """Returns the plain algorithm in its present state; it shares policy, nets and optimizers with this one."""
        plain: Any = object.__new__(type(self).__mro__[2])
        vars(plain).update(
            {name: each for name, each in vars(self).items() if name not in DataParallel.__annotations__}
        )
        return plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new, (type(self).__mro__[2],), vars(self.plain())

    def _preprocess_batch(self, batch: Any, buffer: ReplayBuffer, indices: NDArray[np.int64]) -> Any:
        self._is_last = np.isin(indices, buffer.last_index)
        return super()._preprocess_batch(batch, buffer, indices)  # type: ignore[misc]

    def _update_with_batch(self, batch: Any, batch_size: int | None = None, repeat: int = 1) -> TrainingStats:
        how = {"batch_size": batch_size, "repeat": repeat} if isinstance(self, OnPolicyAlgorithm) else {}
        ranks, state = self._ranks, self._state
        group, tensors = ranks.start(self), state.tensors()
        is_held = ranks.held is not None and equal(tensors, ranks.held)
        seed = int(torch.randint(2**62, ()))
        known = group.put(None if is_held else pack(tensors)), state.numbers(), seed, how
        replies = group.run("update", [(*known, group.put(shard)) for shard in self._shards(batch)])
        _, stats, numbers, packed = replies[0]
        ranks.held = unpack(packed)
        state.restore(unpack(packed))
        state.set_numbers(numbers)
        if replies[0][0] is not None:
            batch.weight = torch.cat([reply[0] for reply in replies])
        result: TrainingStats = stats
        return result

    def _shards(self, batch: Any) -> list[Shard]:
        """Cuts a batch into one shard for each rank.

        They differ by one row at most. Where ranks compute advantages again, they hold whole episodes, or what was
        collected of them.
        """
        total = len(batch)
        bounds = np.array(even_bounds(total, self.num_learners))
        if getattr(self, "recompute_adv", False):
            batch.truncated = batch.truncated | (self._is_last & ~batch.terminated)
            ends = np.append(0, np.flatnonzero(batch.terminated | batch.truncated) + 1)
            bounds = ends[np.abs(ends - bounds[:, None]).argmin(1)]
        return [
            Shard(start, stop, total, batch[start:stop] if stop > start else batch[:1])
            for start, stop in pairwise(bounds.tolist())
        ]


def _new(kind: type[Any]) -> Any:
    return object.__new__(kind)


@functools.cache
def _parallel_class(base: type[Any]) -> type[Any]:
    return type(f"DataParallel{base.__name__}", (DataParallel, base), {"__doc__": f"{base.__name__} on several ranks."})


def _pickled(algorithm: Any) -> bytes:
    """Pickles an algorithm for the ranks, without the buffer, and without schedules, which the driver steps."""
    sent = copy.copy(algorithm)
    sent.lr_schedulers = []
    for name in ("_buffer", "_indices"):
        vars(sent).pop(name, None)
    if any(parameter.is_cuda for parameter in sent.parameters()):  # else only a process with a GPU could read it
        sent = copy.deepcopy(sent).cpu()
    try:
        pickled: bytes = cloudpickle.dumps(sent)
    except Exception as error:
        raise ConfigError(
            f"The algorithm can't be pickled for the ranks ({type(error).__name__}: {error}). Keep open files, "
            "environments, loggers and torch's parametrizations out of policy and nets."
        ) from error
    return pickled
