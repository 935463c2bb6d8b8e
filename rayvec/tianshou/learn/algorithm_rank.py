"""One rank of a data-parallel Tianshou algorithm: a copy of it that learns from some rows of every batch.

The algorithm's own code runs. Two things join it to the other ranks, and neither changes Tianshou:

- After each backward pass, hooks of torch replace the gradients by their sum over all ranks, each weighted by the
  rank's share of the minibatch. For losses that are means over rows this is the gradient of the whole minibatch.
- The batch is a subclass of Tianshou's, whose ``split`` makes equally many minibatches on all ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from tianshou.algorithm.algorithm_base import Algorithm
from tianshou.algorithm.modelfree.sac import FixedAlpha
from tianshou.data import Batch
from tianshou.utils import RunningMeanStd
from torch import Tensor, nn
from torch.autograd import Variable

from rayvec.distributed.rank import pack, unpack
from rayvec.learners.ranks import Ranks, global_moments, global_range

_PLAIN = (bool, int, float, type(None), np.generic)
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}


@dataclass(frozen=True)
class Shard:
    """The rows of one rank: a contiguous part of a batch of `total` rows.

    Attributes:
        start: First of them in the batch.
        stop: The one after the last; equal to `start` on a rank without rows, which takes its steps with share 0.
        total: Rows of the batch on all ranks.
        batch: The rows, at least one.
    """

    start: int
    stop: int
    total: int
    batch: Batch


class AlgorithmRank:
    """A copy of an algorithm.

    Args:
        pickled: The algorithm, pickled by cloudpickle.
        device: Where it computes.
        ranks: The ranks that learn together.
    """

    def __init__(self, pickled: bytes, device: str, ranks: Ranks) -> None:
        self._ranks, self._device = ranks, device
        self._algorithm: Any = pickle.loads(pickled).to(device)
        self._state = AlgorithmState(self._algorithm)
        self._gradients = _GradientSum(list(self._algorithm.parameters()), ranks)

    def update(self, state: Any, seed: int, how: dict[str, Any], shard: Shard) -> tuple[Any, ...]:
        """Learns from this rank's rows, together with all others.

        Args:
            state: Of the driver's algorithm.
            seed: Of the generators that the algorithm draws from; each rank adds its number.
            how: What Tianshou passes to ``_update_with_batch``.
            shard: The rows.

        Returns:
            New priorities of the rows, if there are some; and on rank 0 its statistics and state.
        """
        algorithm, count = self._algorithm, shard.stop - shard.start
        self._state.write(state)
        torch.manual_seed(seed + self._ranks.rank)
        np.random.seed((seed + self._ranks.rank) % 2**32)
        self._gradients.share = count / shard.total
        if hasattr(algorithm, "ranks"):
            algorithm.ranks, algorithm.own_rows = self._ranks, slice(0, count)
        normalizes = getattr(algorithm, "advantage_normalization", False)
        if normalizes:
            algorithm.advantage_normalization = False  # `_minibatch` does it, by the moments of all rows
        batch = _rank_batch(shard, self._device, partial(self._minibatch, normalizes))
        stats = algorithm._update_with_batch(batch, **how)
        if normalizes:
            algorithm.advantage_normalization = True
        weight = torch.as_tensor(batch.weight)[:count].detach().cpu() if "weight" in batch.get_keys() else None
        return (weight,) if self._ranks.rank else (weight, stats, self._state.read())

    def _minibatch(self, normalizes: bool, share: float, minibatch: Any) -> None:
        """Notes this rank's share of a minibatch, and normalises advantages by the moments of all ranks' rows."""
        self._gradients.share = share
        if normalizes:
            count = len(minibatch.adv) if share else 0
            _, total = global_range(self._ranks, count)
            mean, var = global_moments(self._ranks, minibatch.adv[None], [count])
            std = (var * total / (total - 1)).sqrt() + self._algorithm._eps
            minibatch.adv = ((minibatch.adv - mean) / std).to(minibatch.adv.dtype)


class _GradientSum:
    """Replaces gradients by their sum over all ranks, once for each backward pass.

    Args:
        parameters: Of the algorithm.
        ranks: The ranks.

    Attributes:
        share: This rank's share of the rows of the next backward pass.
    """

    def __init__(self, parameters: list[Tensor], ranks: Ranks) -> None:
        self.share = 1.0
        self._parameters, self._ranks = parameters, ranks
        self._arrived: set[int] = set()
        for parameter in parameters:
            needs_grad = parameter.requires_grad
            parameter.requires_grad_(True)  # a hook needs it, and a frozen parameter may be learned later
            parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
            parameter.requires_grad_(needs_grad)

    def _accumulated(self, parameter: Tensor) -> None:
        if not self._arrived:  # torch calls it once the backward pass is done, as for its own DistributedDataParallel
            Variable._execution_engine.queue_callback(self._sum)
        self._arrived.add(id(parameter))

    @torch.no_grad()
    def _sum(self) -> None:
        arrived, self._arrived = self._arrived, set()
        gradients = [each.grad for each in self._parameters if id(each) in arrived and each.grad is not None]
        flat = torch.cat([each.reshape(-1) for each in gradients])
        flat = flat * self.share if self.share else torch.zeros_like(flat)  # a row without a share may not be finite
        parts = torch.split(self._ranks.all_reduce_(flat), [each.numel() for each in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _rank_batch(shard: Shard, device: str, prepare: Callable[[float, Any], None]) -> Any:
    """Returns the rows of a rank as a batch that makes equally many minibatches on all ranks.

    A minibatch has the same part of the rows of each rank, which shuffles its own. Where it has none of this rank's,
    the rank gets its first row with share 0.

    Args:
        shard: The rows.
        device: For tensors.
        prepare: Called with this rank's share of each minibatch, and the minibatch.
    """

    class RankBatch(Batch):
        """Rows of a batch that several ranks learn from."""

        def split(self, size: int, shuffle: bool = True, merge_last: bool = False) -> Iterator[Any]:
            """Yields minibatches, this rank's part of each."""
            if not shuffle:
                yield from super().split(size, shuffle, merge_last)
                return
            total = shard.total
            size = total if size == -1 else min(size, total)
            num_steps = total // size if merge_last else -(-total // size)
            rows = np.random.permutation(shard.stop - shard.start)
            step_of_row = (shard.start + np.arange(len(rows))) % num_steps
            for step in range(num_steps):
                mine = rows[step_of_row == step]
                minibatch = self[mine if len(mine) else np.zeros(1, np.int64)]
                prepare(len(mine) / len(range(step, total, num_steps)), minibatch)
                yield minibatch

    def own(value: Any) -> Any:  # arrays that come from Ray can't be written
        if isinstance(value, Tensor):
            return value.to(device)
        return value.copy() if isinstance(value, np.ndarray) else value

    return RankBatch(shard.batch.apply_values_transform(own))


class AlgorithmState:
    """The state of an algorithm whose structure does not change: what an update reads and changes, but for the batch.

    Tianshou's ``state_dict`` leaves out optimizers that it does not wrap (the one of a learned entropy coefficient) and
    counters (gradient steps, target updates, running moments). Ranks need these to stay identical.

    Args:
        algorithm: The algorithm; `write` changes it in place.

    Attributes:
        optimizers: All torch optimizers, also those that a part of the algorithm steps directly.
    """

    def __init__(self, algorithm: Algorithm[Any, Any]) -> None:
        self._tensors = [*algorithm.parameters(), *algorithm.buffers()]
        holders = [vars(module) for module in algorithm.modules()]
        values = [value for holder in holders for value in holder.values()]
        wrapped = [each._optim for holder in holders for each in holder.get("_optimizers", ())]
        direct = [value for value in values if isinstance(value, torch.optim.Optimizer)]
        self.optimizers: list[torch.optim.Optimizer] = list(dict.fromkeys(wrapped + direct))
        self._holders = holders + [vars(value) for value in values if isinstance(value, RunningMeanStd | FixedAlpha)]

    def read(self) -> dict[str, Any]:
        """Returns the parameters of all modules, lagged networks included, buffers, optimizers, and plain numbers."""
        own = [optimizer.state_dict() for optimizer in self.optimizers]
        return {
            "packed": pack([[tensor.detach() for tensor in self._tensors], [each["state"] for each in own]]),
            "groups": [each["param_groups"] for each in own],
            "needs_grad": [tensor.requires_grad for tensor in self._tensors],
            "numbers": [
                {name: value for name, value in holder.items() if isinstance(value, _PLAIN) and name not in _OF_TORCH}
                for holder in self._holders
            ],
        }

    @torch.no_grad()
    def write(self, state: dict[str, Any]) -> None:
        """Sets what `read` returned for another copy; parameters and buffers stay the same objects."""
        tensors, states = unpack(state["packed"])
        for mine, theirs, needs_grad in zip(self._tensors, tensors, state["needs_grad"], strict=True):
            mine.copy_(theirs)
            mine.requires_grad_(needs_grad)
        for optimizer, own, groups in zip(self.optimizers, states, state["groups"], strict=True):
            optimizer.load_state_dict({"state": own, "param_groups": groups})
        for holder, numbers in zip(self._holders, state["numbers"], strict=True):
            holder.update(numbers)
