"""One rank of a data-parallel Tianshou algorithm: a copy of it that computes some rows of every batch.

The algorithm's own code runs, within :func:`patched_tianshou`, which lists everything that is different:

- a loss is scaled by the rank's share of the batch, and gradients are summed between backward pass and clipping;
- ``Batch.split`` cuts the minibatches of the whole batch and yields the rank's part of each;
- returns and advantages are computed from the values of all rows;
- what is drawn is drawn for all rows (see :mod:`rayvec.tianshou.learn.random_draws`).

For losses that are means over rows, the sum is the gradient of the whole batch.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from tianshou.algorithm.algorithm_base import Algorithm, TrainingStats
from tianshou.data import Batch, SequenceSummaryStats, to_numpy, to_torch_as
from tianshou.utils import RunningMeanStd
from tianshou.utils.torch_utils import torch_train_mode
from torch import Tensor

from rayvec.errors import LearnerError
from rayvec.learners.ranks import ALONE, Ranks, gather_counts
from rayvec.tianshou.learn.algorithm_state import AlgorithmState, equal, load_algorithm, stepped
from rayvec.tianshou.learn.impala import IMPALA
from rayvec.tianshou.learn.random_draws import Cut, NoDraws, SlicedDraws
from rayvec.tianshou.learn.shards import (
    AheadView,
    Generators,
    OffPolicyUpdate,
    OnPolicyUpdate,
    Shard,
    WholeView,
    writable,
)

__all__ = ["AlgorithmRank", "Reply", "patched_tianshou"]

_LAST_LOSSES = ("_last", "_last_actor_loss")
"""Where TD3 and REDQ keep the loss of the actor's last step: a mean over the rank's rows."""
_split = Batch.split
_from_sequence = SequenceSummaryStats.from_sequence


@contextlib.contextmanager
def patched_tianshou(rank: AlgorithmRank, update: OnPolicyUpdate | OffPolicyUpdate) -> Iterator[None]:
    """Lets the algorithm of a rank compute its rows as a part of the whole batch; undoes every patch afterwards.

    Some patches hold for the whole process, so nothing else may use Tianshou in it meanwhile.
    """
    algorithm: Any = rank.algorithm

    def split(batch: Batch, size: int, shuffle: bool = True, merge_last: bool = False) -> Iterator[Any]:
        if not shuffle:
            return _split(batch, size, shuffle, merge_last)
        return rank.minibatches(batch, update.total, size, merge_last)

    patches: list[tuple[Any, str, Any]] = []
    for optimizer, step, clipped in rank.summed_steps:
        patches += [(optimizer, "step", step), (optimizer, "_module", clipped)]
    if isinstance(update, OnPolicyUpdate):
        patches += [
            (algorithm, "compute_episodic_return", partial(rank.compute_episodic_return, update)),
            (algorithm, "compute_vtrace", partial(rank.compute_vtrace, update)),
            (algorithm.ret_rms, "update", rank.update_moments),
            (algorithm, "advantage_normalization", False),  # done in `minibatches`, by the moments of all rows
            (Batch, "split", split),
            (SequenceSummaryStats, "from_sequence", rank.summarize),
        ]
    with contextlib.ExitStack() as stack:
        for holder, name, value in patches:
            stack.enter_context(mock.patch.object(holder, name, value, create=True))
        if isinstance(update, OffPolicyUpdate):
            stack.enter_context(rank.draws)
        elif not (rank.has_updated or rank.is_alone):
            stack.enter_context(NoDraws())
        yield


@dataclass(frozen=True)
class Reply:
    """What a rank answers to an update.

    Attributes:
        weight: New priorities of its rows, ``[n]``; None for a buffer without priorities.
        changed: Numbers that the update changed. Like the attributes below, rank 0 alone sends them: all have the same.
        generators: State of the generators after the update.
        stats: Statistics of the whole batch, as Tianshou gives them.
    """

    weight: NDArray[Any] | None
    changed: dict[tuple[str, str], Any] | None = None
    generators: Generators | None = None
    stats: TrainingStats | None = None


class AlgorithmRank:
    """A copy of an algorithm, in a process of its own: it patches Tianshou and seeds global generators.

    Args:
        pickled: The algorithm, pickled by cloudpickle.
        device: Where it computes.
        ranks: The ranks that compute together.

    Attributes:
        algorithm: The copy.
        draws: Cuts what is drawn.
        summed_steps: For each optimizer that Tianshou wraps: the optimizer, a ``step`` that sums gradients over all
            ranks, and what it clips the gradients of.
        has_updated: Whether an update has succeeded. Only the first on-policy update checks for random draws, because
            the check is slow.
        is_alone: Whether there is no other rank. Then nothing can differ between ranks.
    """

    def __init__(self, pickled: bytes, device: str = "cpu", ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
        self._device = torch.device(device)
        self.algorithm: Any = load_algorithm(pickled, self._device)
        self.algorithm.to(self._device)
        self._state = AlgorithmState(self.algorithm)
        for optimizer in self._state.optimizers:
            optimizer.load_state_dict(optimizer.state_dict())  # moves its state to where the parameters are
        self.draws = SlicedDraws()
        self.summed_steps = [self._summed_step(optimizer) for optimizer in self.algorithm._optimizers]
        wrapped = [optimizer._optim for optimizer in self.algorithm._optimizers]
        for raw in self._state.optimizers:
            if not any(raw is optimizer for optimizer in wrapped):
                raw.register_step_pre_hook(self._sum_before_step)
        self._shares: list[float] = []
        self._shard = Shard(0, 0, Batch())
        self._whole_returns = self._whole_adv = np.zeros(0)
        self._normalizes = self.has_updated = False
        self.is_alone = ranks.size == 1

    def state_dict(self) -> dict[str, Any]:
        """Returns weights and states of optimizers; numbers come with every update."""
        return self._state.capture()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the state of another copy."""
        self._state.restore(state)

    def update(self, update: OnPolicyUpdate | OffPolicyUpdate, shard: Shard) -> Reply:
        """Computes this rank's part of an update, together with all others.

        Raises:
            LearnerError: Another rank is gone, the algorithm draws random numbers that can't be split by sample, or its
                nets change their buffers.
        """
        algorithm = self.algorithm
        self._state.set_numbers(update.numbers)
        self._fuse()
        update.generators.restore()
        before = self._state.numbers()
        buffers = {self._buffer_digest()} if isinstance(update, OnPolicyUpdate) else set()
        batch: Any = writable(shard.batch)
        self._shard = Shard(shard.start, shard.stop, batch, shard.ahead)
        self._shares = []
        self._normalizes = getattr(algorithm, "advantage_normalization", False)
        mine = np.arange(shard.start, shard.stop)
        weight: NDArray[Any] | None = None
        try:
            self._set_cut(update.total, mine)
            with patched_tianshou(self, update):
                view: Any
                how: tuple[Any, ...] = ()
                if isinstance(update, OnPolicyUpdate):
                    view, indices = WholeView(update), mine if len(mine) else np.zeros(1, np.int64)
                    how = update.batch_size, update.repeat
                else:
                    view, indices = AheadView(self._shard), np.arange(len(batch))
                batch = algorithm._preprocess_batch(batch, view, indices)
                with torch_train_mode(algorithm):
                    stats: Any = algorithm._update_with_batch(batch, *how)
            if isinstance(update, OffPolicyUpdate):
                self._check_draws()
                weight = to_numpy(batch.weight)[: len(mine)] if update.with_weight else None
            self._check_buffers(buffers)
            self._set_cut(update.total, mine)  # the minibatches of an on-policy update had others
            self._whole_losses(stats)
        finally:
            self.draws.cut = None
        self.has_updated = True
        if self._ranks.rank:
            return Reply(weight)
        changed = {
            place: value for place, value in self._state.numbers().items() if not equal(value, before.get(place))
        }
        return Reply(weight, changed, Generators.capture(), stats)

    # What takes the place of Tianshou's own; see `patched_tianshou`.

    def minibatches(self, batch: Batch, total: int, size: int, merge_last: bool) -> Iterator[Batch]:
        """Yields this rank's part of the minibatches that Tianshou's ``Batch.split`` would cut from the whole batch."""
        start, stop = self._shard.start, self._shard.stop
        adv = to_torch_as(self._whole_adv, batch.adv)
        for part in _split(Batch(row=np.arange(total)), size, merge_last=merge_last):
            mine = np.flatnonzero((part.row >= start) & (part.row < stop))
            self._set_cut(len(part.row), mine)
            self._shares.append(self._share)
            minibatch = batch[part.row[mine] - start if len(mine) else np.zeros(1, np.int64)]
            if self._normalizes:
                whole = adv[part.row]
                minibatch.adv = (minibatch.adv - whole.mean()) / (whole.std() + self.algorithm._eps)
            yield minibatch

    def compute_episodic_return(
        self, update: OnPolicyUpdate, batch: Any, buffer: Any, indices: Any, v_s_: Any, v_s: Any, **factors: float
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Returns this rank's returns and advantages, from the values of all ranks' rows."""
        v_s_, v_s = self._gather(v_s_, update.total), self._gather(v_s, update.total)
        everywhere = np.arange(update.total)
        return self._cut_returns(
            *Algorithm.compute_episodic_return(update.rows(), buffer, everywhere, v_s_, v_s, **factors)
        )

    def compute_vtrace(
        self, update: OnPolicyUpdate, batch: Any, *values: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Returns this rank's targets and advantages, from the values and weights of all ranks' rows."""
        gathered = [self._gather(each, update.total) for each in values]
        return self._cut_returns(*IMPALA.compute_vtrace(self.algorithm, update.rows(), *gathered))

    def update_moments(self, returns: Any) -> None:
        """Updates the running moments with the returns of all rows instead of this rank's."""
        RunningMeanStd.update(self.algorithm.ret_rms, self._whole_returns)

    def summarize(self, losses: Any) -> SequenceSummaryStats | None:
        """Summarizes losses, one for each minibatch, of all ranks."""
        return _from_sequence(self._sum(losses, self._shares))

    def _cut_returns(self, returns: NDArray[Any], adv: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Returns this rank's part of the returns and advantages of all rows, and keeps the whole."""
        self._whole_returns, self._whole_adv = returns, adv
        rows = slice(self._shard.start, self._shard.stop) if self._has_rows else slice(0, 1)
        return returns[rows], adv[rows]

    def _gather(self, values: NDArray[Any], total: int) -> NDArray[Any]:
        """Returns the values of all rows, from those of every rank's."""
        whole = torch.zeros(total, dtype=torch.from_numpy(values).dtype)
        if self._has_rows:
            whole[self._shard.start : self._shard.stop] = torch.from_numpy(values)
        return self._ranks.sum_(whole).numpy()

    # What the ranks have in common.

    @property
    def _has_rows(self) -> bool:
        return self._shard.stop > self._shard.start

    @property
    def _share(self) -> float:
        cut = self.draws.cut
        return 1.0 if cut is None else cut.share

    def _set_cut(self, total: int, mine: NDArray[np.int64]) -> None:
        share = len(mine) / total
        self.draws.cut = Cut(total, torch.from_numpy(mine if len(mine) else np.zeros(1, np.int64)), share)

    def _sum(self, values: Any, shares: Any) -> NDArray[np.float64]:
        """Returns means over all rows, from means over each rank's."""
        weighted = np.where(np.asarray(shares) > 0, np.asarray(values, np.float64) * shares, 0.0)
        return self._ranks.sum_(torch.from_numpy(weighted)).numpy()

    def _whole_losses(self, stats: Any) -> None:
        """Replaces losses, in statistics and in the algorithm's memory of the last ones, by means over all ranks."""
        places = [(vars(stats), name) for name, value in vars(stats).items() if type(value) is float]
        places += [(vars(self.algorithm), name) for name in _LAST_LOSSES if name in vars(self.algorithm)]
        means = self._sum([holder[name] for holder, name in places], self._share)
        for (holder, name), mean in zip(places, means.tolist(), strict=True):
            holder[name] = mean

    def _check_draws(self) -> None:
        """Checks that all ranks have drawn the same amount, as they do where every draw is for the whole batch.

        Raises:
            LearnerError: On all ranks, if their generators differ.
        """
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        digests = gather_counts(self._ranks, zlib.crc32(torch.cat(states).numpy().tobytes()))
        if len(set(digests)) > 1:
            raise LearnerError(
                "Ranks draw for all rows of a batch and keep their own; a draw of this update could not be cut.",
                expected="the same state of torch's generators on all ranks after an update",
                got=f"{len(set(digests))} different states on {self._ranks.size} ranks",
                remedy="Draw [rows, ...] with at least two dimensions, or update with the plain algorithm.",
            )

    def _buffer_digest(self) -> int:
        """Returns a checksum of all buffers of the nets; 0 without buffers or other ranks."""
        digest = 0
        for buffer in () if self.is_alone else self.algorithm.buffers():
            flat = buffer.detach().cpu().contiguous().reshape(-1)
            digest = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), digest)
        return digest

    def _check_buffers(self, before: set[int]) -> None:
        """Checks that the buffers of all ranks have the same checksum.

        On-policy it must be that of `before`, because ranks run nets less often than one rank would.

        Raises:
            LearnerError: On all ranks, if one has other buffers.
        """
        if self.is_alone or next(self.algorithm.buffers(), None) is None:
            return
        if len(before.union(gather_counts(self._ranks, self._buffer_digest()))) > 1:
            raise LearnerError(
                "Each rank runs the networks on its own samples, so buffers that a forward pass changes would differ "
                "from those of a single rank.",
                expected="buffers that do not change (on-policy), or change equally on all ranks (off-policy)",
                got="other buffers after the update",
                remedy="Leave running statistics and spectral norms out, or update with the plain algorithm.",
            )

    # Gradients.

    def _summed_step(self, optimizer: Any) -> tuple[Any, Callable[..., None], Any]:
        """Sums between the backward pass and clipping in Tianshou's ``Algorithm.Optimizer.step``."""
        clipped = list(optimizer._module.parameters())  # looked up once
        both = {id(each): each for each in [*stepped(optimizer._optim), *clipped]}
        step = optimizer.step

        def summed(loss: Any, retain_graph: bool | None = None, create_graph: bool = False) -> None:
            def backward(**graph: Any) -> None:
                (loss * self._share).backward(**graph)
                self._sum_gradients([each for each in both.values() if each.requires_grad])

            with torch._C.DisableTorchFunction():  # nothing is drawn here, and looking at every call costs time
                step(SimpleNamespace(backward=backward), retain_graph, create_graph)

        return optimizer, summed, SimpleNamespace(parameters=lambda: clipped)

    def _fuse(self) -> None:
        """Lets Adam step all parameters in one kernel, unless the user chose how it steps: the same up to rounding.

        That kernel counts steps where the parameters are; the other kernels count them on the CPU.
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

    def _sum_before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Sums before a step that the algorithm takes without Tianshou's wrapper."""
        parameters = [each for each in stepped(optimizer) if each.requires_grad]
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(self._share)
        self._sum_gradients(parameters)

    def _sum_gradients(self, parameters: list[Tensor]) -> None:
        """Sums gradients over all ranks; a parameter without a gradient on any rank keeps none."""
        if self._ranks.size == 1 or not parameters:
            return
        parts = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        present = torch.tensor([float(each.grad is not None) for each in parameters], device=parts[0].device)
        flat = torch.cat([*(part.reshape(-1) for part in parts), present])  # of the widest data type among them
        if self._share == 0:  # the gradient of the row without a share may not be finite
            flat[: -len(parts)] = 0
        flat = self._ranks.sum_(flat)
        sums = torch.split(flat, [*(part.numel() for part in parts), len(parts)])
        for parameter, total, anywhere in zip(parameters, sums[:-1], sums[-1].tolist(), strict=True):
            if anywhere:
                parameter.grad = total.view_as(parameter).to(parameter.dtype, copy=True)
