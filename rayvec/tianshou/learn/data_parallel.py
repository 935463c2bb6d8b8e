"""Tianshou's algorithms on several learner ranks, as algorithms that Tianshou's trainers run."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from tianshou.algorithm.algorithm_base import (
    Algorithm,
    OfflineAlgorithm,
    OffPolicyAlgorithm,
    OnPolicyAlgorithm,
    TrainingStats,
)
from tianshou.algorithm.modelfree.npg import NPG
from tianshou.algorithm.modelfree.ppo import PPO

from rayvec.data.topology import even_bounds
from rayvec.distributed.rank_group import RankGroup, open_host
from rayvec.envs.pickled_parts import pickled_for_workers
from rayvec.errors import check_count, require
from rayvec.tianshou.learn.algorithm_rank import AlgorithmRank, AlgorithmState, Shard


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
            that are means over rows. (NPG and TRPO do not.) PPO, A2C, SAC, TD3, DQN and
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
    require(
        not isinstance(algorithm, DataParallel),
        "The algorithm is data-parallel already. Pass algorithm.plain() to make another of it.",
    )
    is_known = isinstance(algorithm, OnPolicyAlgorithm | OffPolicyAlgorithm | OfflineAlgorithm)
    require(
        is_known and not isinstance(algorithm, NPG),
        f"{type(algorithm).__qualname__} can't be computed on several ranks. Pass an on-policy, off-policy or "
        "offline algorithm of Tianshou 2 that gets its gradients by backward(), and not its policy.",
    )
    require(
        not isinstance(algorithm, PPO) or not algorithm.recompute_adv,
        "recompute_advantage=True can't be computed on several ranks, which have no buffer. Leave it out.",
    )
    num_cpus = learner_threads if num_cpus is None else num_cpus

    def open_ranks(plain: Any) -> RankGroup:
        make = functools.partial(AlgorithmRank, _pickled(plain), device)
        host = open_host(device=device, num_cpus=num_cpus, num_nodes=num_nodes, address=address)
        return RankGroup(make, num_learners, host, device=device, threads=learner_threads, timeout_s=timeout_s)

    parallel: Any = object.__new__(_parallel_class(type(algorithm)))
    vars(parallel).update(vars(algorithm), num_learners=num_learners, _open_ranks=open_ranks, _group=None)
    parallel._state = AlgorithmState(parallel)
    for optimizer in parallel._state.optimizers:
        optimizer._opt_called = True  # by the ranks; a schedule of learning rates warns if no optimizer has stepped
    assert parallel.group  # starts the ranks
    return parallel


class DataParallel:
    """First base class of what :func:`data_parallel` returns: ranks compute its updates.

    Tianshou's own ``update`` samples, steps learning-rate schedules and sets new priorities, in the driver.

    Attributes:
        num_learners: How many ranks compute an update.
    """

    num_learners: int
    _open_ranks: Callable[[Any], RankGroup]
    _group: RankGroup | None
    _state: AlgorithmState

    @property
    def group(self) -> RankGroup:
        """The ranks: where they are, and their processes. It starts new ones if they have ended."""
        if self._group is None or self._group.has_ended:
            self._group = self._open_ranks(self.plain())
            weakref.finalize(self, self._group.close, terminate=True)
        return self._group

    def close(self) -> None:
        """Ends the ranks; another update starts new ones. May be called again."""
        if self._group is not None:
            self._group.close(terminate=True)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def plain(self) -> Any:
        """Returns the plain algorithm in its present state; it shares policy, nets and optimizers with this one."""
        plain: Any = object.__new__(type(self).__mro__[2])
        own = ("num_learners", "_open_ranks", "_group", "_state")
        vars(plain).update({name: each for name, each in vars(self).items() if name not in own})
        return plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.plain()
        return object.__new__, (type(plain),), vars(plain)

    def _update_with_batch(self, batch: Any, batch_size: int | None = None, repeat: int = 1) -> TrainingStats:
        how = {"batch_size": batch_size, "repeat": repeat} if isinstance(self, OnPolicyAlgorithm) else {}
        group = self.group
        known = group.put(self._state.read()), int(torch.randint(2**62, ())), how
        replies = group.run("update", [(*known, group.put(shard)) for shard in self._shards(batch)])
        weight, stats, state = replies[0]
        self._state.write(state)
        if weight is not None:
            batch.weight = torch.cat([reply[0] for reply in replies])
        result: TrainingStats = stats
        return result

    def _shards(self, batch: Any) -> list[Shard]:
        """Cuts a batch into one shard for each rank.

        They differ by one row at most. Of IMPALA, whose passes compute new targets, ranks hold whole episodes, or what
        was collected of them.
        """
        total = len(batch)
        bounds = np.array(even_bounds(total, self.num_learners))
        if "is_last" in batch.get_keys():
            ends = np.append(0, np.flatnonzero(batch.terminated | batch.truncated | batch.is_last) + 1)
            bounds = ends[np.abs(ends - bounds[:, None]).argmin(1)]
        return [
            Shard(start, stop, total, batch[start:stop] if stop > start else batch[:1])
            for start, stop in pairwise(bounds.tolist())
        ]


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
    remedy = "Keep open files, environments, loggers and torch's parametrizations out of policy and nets."
    return pickled_for_workers(sent, "an algorithm", remedy)
