"""One rank of a data-parallel Tianshou algorithm: a copy of it that computes some rows of every batch.

The algorithm's own code runs, unchanged. Around it stand four things: a loss is scaled by the share of the rank's rows
in the batch and the gradients of all ranks are summed between backward and clip; ``split`` cuts the minibatches of the
whole batch and yields the rank's part of each; returns and advantages are computed of the values of all rows; and
what is drawn is drawn for all rows (see :mod:`rayvec.tianshou.learn.draws`). For losses that are means over rows the
sum is the gradient of the whole batch.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from tianshou.algorithm.algorithm_base import Algorithm, TrainingStats
from tianshou.data import Batch, SequenceSummaryStats, to_numpy, to_torch_as
from tianshou.utils.torch_utils import torch_train_mode
from torch import Tensor

from rayvec.errors import LearnerError
from rayvec.learners.ranks import ALONE, Ranks, gather_counts
from rayvec.tianshou.learn.algorithm_state import AlgorithmState
from rayvec.tianshou.learn.draws import Cut, SlicedDraws
from rayvec.tianshou.learn.impala import IMPALA
from rayvec.tianshou.learn.shards import (
    AheadView,
    Generators,
    OffPolicyUpdate,
    OnPolicyUpdate,
    Shard,
    WholeView,
    writable,
)

__all__ = ["AlgorithmRank", "Reply"]

_LAST_LOSSES = ("_last", "_last_actor_loss")
"""Where TD3 and REDQ remember the loss of the last step of the actor: a mean over the rank's rows."""


@dataclass(frozen=True)
class Reply:
    """What a rank answers to an update.

    Attributes:
        weight: New priorities of its rows, ``[n]``; None where nobody asked.
        changed: Numbers that the update changed; like what follows of rank 0 alone, since all have the same.
        generators: After the update.
        stats: Of the whole batch, as Tianshou gives them.
    """

    weight: NDArray[Any] | None
    changed: dict[tuple[str, str], Any] | None = None
    generators: Generators | None = None
    stats: TrainingStats | None = None


class AlgorithmRank:
    """A copy of an algorithm, in a process of its own: it patches Tianshou and seeds global generators.

    Args:
        pickled: The algorithm, by cloudpickle.
        device: Where it computes.
        ranks: The ranks that compute together.
    """

    def __init__(self, pickled: bytes, device: str = "cpu", ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
        self._algorithm: Any = cloudpickle.loads(pickled)
        self._device = torch.device(device)
        self._algorithm.to(self._device)
        self._state = AlgorithmState(self._algorithm)
        for optimizer in self._state.optimizers:
            optimizer.load_state_dict(optimizer.state_dict())  # moves what it keeps to where the parameters are
        self._draws = SlicedDraws()
        self._shares: list[float] = []
        self._shard = Shard(0, 0, Batch())
        self._whole_returns = self._whole_adv = np.zeros(0)
        self._normalizes = False
        self._average()

    def state_dict(self) -> dict[str, Any]:
        """Returns weights and states of optimizers; numbers come with every update."""
        return self._state.capture()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the state of another copy."""
        self._state.restore(state)

    def update(self, update: OnPolicyUpdate | OffPolicyUpdate, shard: Shard) -> Reply:
        """Computes this rank's part of an update, together with all others.

        Raises:
            LearnerError: Another rank is gone, or the algorithm draws what can't be cut or was not.
        """
        self._state.set_numbers(update.numbers)
        self._fuse()
        self._seed(update.generators)
        before = self._state.numbers()
        self._shard = Shard(shard.start, shard.stop, writable(shard.batch), shard.ahead)
        stats: Any
        weight: NDArray[Any] | None = None
        try:
            if isinstance(update, OnPolicyUpdate):
                stats = self._update_on_policy(update)
            else:
                stats, weight = self._update_off_policy(update)
            self._whole_losses(stats)
        finally:
            self._draws.cut = None
        if self._ranks.rank:
            return Reply(weight)
        changed = {place: value for place, value in self._state.numbers().items() if _differs(value, before.get(place))}
        generators = Generators(np.random.get_state(), torch.get_rng_state().numpy())
        return Reply(weight, changed, generators, stats)

    # Off-policy: one batch, one cut.

    def _update_off_policy(self, update: OffPolicyUpdate) -> tuple[Any, NDArray[Any] | None]:
        algorithm, batch = self._algorithm, self._shard.batch
        self._set_cut(update.total, np.arange(self._shard.start, self._shard.stop))
        with self._draws:
            batch = algorithm._preprocess_batch(batch, AheadView(self._shard), np.arange(len(batch)))
            with torch_train_mode(algorithm):
                stats = algorithm._update_with_batch(batch)
        self._check_draws()
        weight = to_numpy(batch.weight)[: self._shard.stop - self._shard.start] if update.with_weight else None
        return stats, weight

    # On-policy: a cut for every minibatch.

    def _update_on_policy(self, update: OnPolicyUpdate) -> Any:
        algorithm, moments = self._algorithm, self._algorithm.ret_rms
        algorithm.compute_episodic_return = self._episodic_returns(update)
        algorithm.compute_vtrace = self._vtrace(update)
        moments.update = lambda _: type(moments).update(moments, self._whole_returns)
        batch = self._sharded(update.total)
        self._shares = []
        normalizes = self._normalizes = getattr(algorithm, "advantage_normalization", False)
        try:
            mine = np.arange(self._shard.start, self._shard.stop)
            batch = algorithm._preprocess_batch(batch, WholeView(update), mine if len(mine) else np.zeros(1, np.int64))
            if normalizes:  # `split` does it, by the moments of the whole minibatch
                algorithm.advantage_normalization = False
            with torch_train_mode(algorithm), self._whole_sequences():
                stats = algorithm._update_with_batch(batch, update.batch_size, update.repeat)
        finally:
            if normalizes:
                algorithm.advantage_normalization = normalizes
            del algorithm.compute_episodic_return, algorithm.compute_vtrace, moments.update
        self._set_cut(update.total, mine)  # as for means over the whole batch
        return stats

    def _sharded(self, total: int) -> Batch:
        """Returns this rank's rows as a batch whose minibatches are those of the whole batch."""
        rank = self

        class Rows(Batch):
            def split(self, size: int, shuffle: bool = True, merge_last: bool = False) -> Iterator[Any]:
                if not shuffle:
                    return super().split(size, shuffle, merge_last)
                return rank._minibatches(self, total, size, merge_last)

        rows = Rows()
        rows.__dict__.update(self._shard.batch.__dict__)
        return rows

    def _minibatches(self, batch: Batch, total: int, size: int, merge_last: bool) -> Iterator[Batch]:
        """Yields this rank's part of the minibatches that Tianshou's ``Batch.split`` would cut from the whole batch."""
        start, stop = self._shard.start, self._shard.stop
        adv = to_torch_as(self._whole_adv, batch.adv)
        for part in Batch(row=np.arange(total)).split(size, merge_last=merge_last):
            mine = np.flatnonzero((part.row >= start) & (part.row < stop))
            self._set_cut(len(part.row), mine)
            self._shares.append(self._share)
            minibatch = batch[part.row[mine] - start if len(mine) else np.zeros(1, np.int64)]
            if self._normalizes:
                whole = adv[part.row]
                minibatch.adv = (minibatch.adv - whole.mean()) / (whole.std() + self._algorithm._eps)
            yield minibatch

    def _episodic_returns(self, update: OnPolicyUpdate) -> Any:
        """Returns ``compute_episodic_return`` for a shard, of the values of all ranks' rows."""
        whole = Batch(rew=update.rew, terminated=update.terminated, truncated=update.truncated)

        def compute(
            batch: Any, buffer: Any, indices: Any, v_s_: Any = None, v_s: Any = None, **factors: float
        ) -> tuple[NDArray[Any], NDArray[Any]]:
            v_s_, v_s = self._gather(v_s_, update.total), self._gather(v_s, update.total)
            everywhere = np.arange(update.total)
            return self._cut_returns(
                *Algorithm.compute_episodic_return(whole, buffer, everywhere, v_s_, v_s, **factors)
            )

        return compute

    def _vtrace(self, update: OnPolicyUpdate) -> Any:
        """Returns ``compute_vtrace`` for a shard, of the values and weights of all ranks' rows."""
        algorithm = self._algorithm
        whole = Batch(rew=update.rew, terminated=update.terminated, truncated=update.truncated, is_last=update.is_last)

        def compute(batch: Any, *values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
            gathered = [self._gather(each, update.total) for each in values]
            return self._cut_returns(*IMPALA.compute_vtrace(algorithm, whole, *gathered))

        return compute

    def _cut_returns(self, returns: NDArray[Any], adv: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Returns this rank's part of the returns and advantages of all rows, which it remembers."""
        self._whole_returns, self._whole_adv = returns, adv
        rows = slice(self._shard.start, self._shard.stop) if self._has_rows else slice(0, 1)
        return returns[rows], adv[rows]

    def _gather(self, values: NDArray[Any], total: int) -> NDArray[Any]:
        """Returns the values of all rows, from those of every rank's."""
        whole = torch.zeros(total, dtype=torch.from_numpy(values).dtype)
        if self._has_rows:
            whole[self._shard.start : self._shard.stop] = torch.from_numpy(values)
        return self._ranks.sum_(whole).numpy()

    @contextlib.contextmanager
    def _whole_sequences(self) -> Iterator[None]:
        """Lets the statistics of losses, one for each minibatch, be those of all ranks."""
        original = SequenceSummaryStats.__dict__["from_sequence"]
        plain = SequenceSummaryStats.from_sequence
        SequenceSummaryStats.from_sequence = lambda losses: plain(self._sum(losses, self._shares))  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            SequenceSummaryStats.from_sequence = original  # type: ignore[method-assign]

    # What the ranks have in common.

    @property
    def _has_rows(self) -> bool:
        return self._shard.stop > self._shard.start

    @property
    def _share(self) -> float:
        cut = self._draws.cut
        return 1.0 if cut is None else cut.share

    def _set_cut(self, total: int, mine: NDArray[np.int64]) -> None:
        share = len(mine) / total
        self._draws.cut = Cut(total, torch.from_numpy(mine if len(mine) else np.zeros(1, np.int64)), share)

    def _sum(self, values: Any, shares: Any) -> NDArray[np.float64]:
        """Returns means over all rows, from means over each rank's."""
        weighted = np.where(np.asarray(shares) > 0, np.asarray(values, np.float64) * shares, 0.0)
        return self._ranks.sum_(torch.from_numpy(weighted)).numpy()

    def _whole_losses(self, stats: Any) -> None:
        """Makes the losses in statistics, and those that the algorithm remembers, the means over all ranks' rows."""
        places = [(vars(stats), name) for name, value in vars(stats).items() if type(value) is float]
        places += [(vars(self._algorithm), name) for name in _LAST_LOSSES if name in vars(self._algorithm)]
        means = self._sum([holder[name] for holder, name in places], self._share)
        for (holder, name), mean in zip(places, means.tolist(), strict=True):
            holder[name] = mean

    def _seed(self, generators: Generators) -> None:
        np.random.set_state(generators.numpy)
        torch.set_rng_state(torch.from_numpy(generators.torch.copy()))
        if generators.cuda_seed is not None and torch.cuda.is_available():
            torch.cuda.manual_seed_all(generators.cuda_seed)

    def _check_draws(self) -> None:
        """Finds out that something was drawn for this rank's rows alone: ranks have drawn different amounts then.

        Raises:
            LearnerError: On all ranks, if their generators have parted.
        """
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        digests = gather_counts(self._ranks, zlib.crc32(torch.cat(states).numpy().tobytes()))
        if len(set(digests)) > 1:
            raise LearnerError(
                "What a net or a loss draws for every row is drawn for the whole batch and cut.",
                expected="the same state of torch's generators on all ranks after an update",
                got=f"{len(set(digests))} different states on {self._ranks.size} ranks",
                remedy="Draw [rows, ...] with at least two dimensions, or update with the plain algorithm",
            )

    # Gradients.

    def _average(self) -> None:
        """Makes every optimizer step with the gradient of the whole batch."""
        algorithm = self._algorithm
        wrapped = [optimizer._optim for optimizer in algorithm._optimizers]
        for optimizer in algorithm._optimizers:
            self._average_wrapped(optimizer)
        for raw in self._state.optimizers:
            if not any(raw is optimizer for optimizer in wrapped):
                raw.register_step_pre_hook(self._average_raw)

    def _average_wrapped(self, optimizer: Any) -> None:
        """Averages between the backward pass and clipping in Tianshou's ``Algorithm.Optimizer.step``."""
        clipped = _Listed(optimizer._module.parameters())
        parameters = _unique([*_stepped(optimizer._optim), *clipped.parameters()])
        optimizer._module = clipped
        step = optimizer.step

        def average() -> None:
            self._sum_gradients(parameters)

        def averaged(loss: Tensor, retain_graph: bool | None = None, create_graph: bool = False) -> None:
            with torch._C.DisableTorchFunction():  # nothing is drawn on the way, and looking at every call costs time
                step(_ScaledLoss(loss, self._share, average), retain_graph, create_graph)

        optimizer.step = averaged

    def _fuse(self) -> None:
        """Lets Adam step all parameters in one kernel, where nobody has chosen how: the same up to rounding.

        That kernel counts steps where the parameters are, the others on the CPU.
        """
        for optimizer in self._state.optimizers:
            for group in optimizer.param_groups if isinstance(optimizer, torch.optim.Adam) else ():
                free = group["fused"] is None and group["foreach"] is None
                if free and not group["differentiable"] and not group["capturable"]:
                    group["fused"] = True
                    for parameter in group["params"]:
                        if parameter in optimizer.state:
                            state = optimizer.state[parameter]
                            state["step"] = state["step"].to(parameter.device)

    def _average_raw(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Averages before a step that the algorithm takes without Tianshou's wrapper."""
        parameters = _stepped(optimizer)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(self._share)
        self._sum_gradients(parameters)

    def _sum_gradients(self, parameters: list[Tensor]) -> None:
        """Sums gradients over all ranks; none on any rank stays none."""
        if self._ranks.size == 1:
            return
        parts = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        present = torch.tensor([float(each.grad is not None) for each in parameters], device=parts[0].device)
        flat = torch.cat([*(part.reshape(-1) for part in parts), present])  # of the widest data type among them
        if self._share == 0:  # a borrowed row may not have a finite gradient
            flat[: -len(parts)] = 0
        flat = self._ranks.sum_(flat)
        sums = torch.split(flat, [*(part.numel() for part in parts), len(parts)])
        for parameter, total, anywhere in zip(parameters, sums[:-1], sums[-1].tolist(), strict=True):
            if anywhere:
                parameter.grad = total.view_as(parameter).to(parameter.dtype, copy=True)


class _Listed:
    """What Tianshou clips the gradients of: parameters that are looked up once."""

    def __init__(self, parameters: Iterator[Tensor]) -> None:
        self._parameters = list(parameters)

    def parameters(self) -> list[Tensor]:
        return self._parameters


class _ScaledLoss:
    """What Tianshou calls ``backward`` of: scales the loss, and averages once its gradient is there."""

    def __init__(self, loss: Tensor, share: float, average: Any) -> None:
        self._loss, self._share, self._average = loss, share, average

    def backward(self, **graph: Any) -> None:
        (self._loss * self._share).backward(**graph)  # type: ignore[no-untyped-call]
        self._average()


def _stepped(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]


def _unique(parameters: list[Tensor]) -> list[Tensor]:
    return list({id(each): each for each in parameters if each.requires_grad}.values())


def _differs(value: Any, before: Any) -> bool:
    return type(value) is not type(before) or bool(value != before)
