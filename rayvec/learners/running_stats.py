"""Running means and variances of observations and returns, merged over ranks, to normalise with.

Statistics change between updates only. An update sees observations as the acting policy saw them, so that the
probabilities it recomputes are those that were recorded; the statistics of the batch go into the next weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayvec.data import Batch, Chunk
from rayvec.learners.ranks import Ranks, global_range

_EPSILON = 1e-8
_LEAST_SPREAD = 0.01
"""Returns whose standard deviation is a smaller share of their mean are scaled as if it were this share."""


class RunningMoments:
    """Mean and variance of all rows seen so far, in float64 (Chan, Golub and LeVeque, 1979, equations 2.1).

    Attributes:
        count: How many rows.
        mean: ``float64 [D]``.
        squares: Sums of squared deviations from the mean, ``float64 [D]``.
    """

    def __init__(self, size: int) -> None:
        self.count = 0
        self.mean = torch.zeros(size, dtype=torch.float64)
        self.squares = torch.zeros(size, dtype=torch.float64)

    def sums(self, rows: Tensor) -> Tensor:
        """Returns what `merge` needs of the rows ``[B, D]``, to be added up over ranks, ``float64 [1 + 2 D]``."""
        deviations = rows.cpu().double() - self.mean  # from a common point near the mean, so that sums stay small
        return torch.cat([deviations.new_tensor([len(rows)]), deviations.sum(0), deviations.square().sum(0)])

    def merge(self, sums: Tensor) -> None:
        """Adds all rows of which `sums` returned this together."""
        added, first, second = int(sums[0]), sums[1 : 1 + len(self.mean)], sums[1 + len(self.mean) :]
        delta, total = first / max(1, added), self.count + added
        self.squares += second - first * delta + delta.square() * (self.count * added / max(1, total))
        self.mean += delta * (added / max(1, total))
        self.count = total

    @property
    def scale(self) -> Tensor:
        """One over the standard deviation, ``float64 [D]``; 1 before there are rows."""
        if self.count == 0:
            return torch.ones_like(self.mean)
        return 1 / (self.squares.clamp(min=0) / self.count + _EPSILON).sqrt()

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the statistics."""
        return {"count": self.count, "mean": self.mean.clone(), "squares": self.squares.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state_dict`."""
        self.count = int(state["count"])
        self.mean.copy_(state["mean"])
        self.squares.copy_(state["squares"])


class ObsMoments:
    """The moments by which a module normalises its observations; it does nothing where the module does not.

    Args:
        module: Has `encoder`, `obs_mean` and `obs_scale`, which this sets.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._moments = RunningMoments(0 if module.obs_mean is None else len(module.obs_mean))

    def add(self, batch: Batch, ranks: Ranks) -> None:
        """Adds the observations of this rank's batch and those of all others."""
        if self._module.obs_mean is not None:
            rows = [self._module.encoder(chunk.obs)[chunk.valid] for chunk in batch.chunks]
            self._moments.merge(ranks.all_reduce_(self._moments.sums(torch.from_numpy(np.concatenate(rows)))))
            self.load_state_dict(self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the moments."""
        return self._moments.state_dict() if self._module.obs_mean is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state_dict`, and sets what the module normalises by; choices stay 0 and 1."""
        if state:
            self._moments.load_state_dict(state)
            measured = torch.from_numpy(self._module.encoder.measured)
            self._module.obs_mean.copy_(torch.where(measured, self._moments.mean, 0.0))
            self._module.obs_scale.copy_(torch.where(measured, self._moments.scale, 1.0))


def _occurrences(rows: NDArray[np.int64]) -> Iterator[NDArray[np.intp]]:
    """Yields the columns that are the first of their environment, then those that are the second, and so on.

    >>> [columns.tolist() for columns in _occurrences(np.array([0, 1, 2, 0, 2]))]
    [[0, 1, 2], [3, 4]]
    """
    order = np.argsort(rows, kind="stable")
    occurrence = np.empty_like(order)
    occurrence[order] = np.arange(len(rows)) - np.searchsorted(rows[order], rows[order])
    for number in range(1 + int(occurrence.max(initial=-1))):
        yield np.flatnonzero(occurrence == number)


class Rewards:
    """Scales and clips rewards, as the settings say, for a learner; logs and evaluations show those of the environment.

    They are scaled so that discounted returns have a standard deviation of about 1. The scale is at most 100 over the
    mean return: equal rewards of episodes of one step have no deviation.

    The return of an environment continues from batch to batch. It starts at 0 with every episode, also with one that
    replaces an episode that a fault cut between two batches. After a resume, where new episodes begin, the returns of
    the old ones fade as gamma^t.

    Args:
        config: Settings of an actor-critic.
    """

    def __init__(self, config: Any) -> None:
        self._gamma, self._clip, self._scales = config.gamma, config.clip_reward, config.normalize_reward
        self._moments = RunningMoments(1)
        self._returns = torch.zeros(0, dtype=torch.float64)

    def __call__(
        self,
        chunks: Sequence[Chunk],
        rew: NDArray[np.float64],
        done: NDArray[np.bool_],
        valid: NDArray[np.bool_],
        ranks: Ranks,
    ) -> NDArray[np.float64]:
        """Adds the rewards of this rank's environments to the statistics; returns them as they are to be learned from.

        Args:
            chunks: What follows each other in time. An environment may have several columns, in the order of time, or
                none; with several ranks it has one.
            rew: Their rewards, ``[T, N]``, finite.
            done: Where an episode ended, ``bool [T, N]``.
            valid: Where a step happened, ``bool [T, N]``.
            ranks: The ranks that have the other environments.
        """
        if self._scales:
            rew = rew * self._scale(chunks[0], rew, done, valid, ranks)
        return rew if self._clip is None else rew.clip(-self._clip, self._clip)

    def _scale(
        self,
        first: Chunk,
        rew: NDArray[np.float64],
        done: NDArray[np.bool_],
        valid: NDArray[np.bool_],
        ranks: Ranks,
    ) -> float:
        """Adds rewards to the statistics and returns their scale; `first` is the first chunk."""
        lost = np.zeros(first.num_envs, bool)
        lost[first.restarted_before] = True
        numbers, total = global_range(ranks, rew.shape[1])
        rows = np.arange(numbers.start, numbers.stop)
        if ranks.size == 1:
            rows, total = first.env_ids, 1 + int(first.env_ids.max(initial=-1))
        missing = max(0, total - len(self._returns))
        before = np.concatenate([self._returns.numpy(), np.zeros(missing)])
        shared = before.copy() if ranks.size == 1 else np.zeros_like(before)
        returns = np.zeros(rew.shape)
        num_steps = (len(rew) - valid[::-1].argmax(0)) * valid.any(0)  # after them nothing happened: the chunk was cut
        for columns in _occurrences(rows):
            running = np.where(lost[columns], 0.0, before[rows[columns]])
            for t in range(len(rew)):
                current = np.where(valid[t, columns], self._gamma * running + rew[t, columns], 0.0)
                returns[t, columns] = current
                running = np.where(t < num_steps[columns], np.where(done[t, columns], 0.0, current), running)
            before[rows[columns]] = shared[rows[columns]] = running
        own = self._moments.sums(torch.from_numpy(returns[valid])[:, None])
        sums = ranks.all_reduce_(torch.cat([own, torch.from_numpy(shared)]))  # one sum and not two
        self._moments.merge(sums[: len(own)])
        self._returns = sums[len(own) :].clone()
        largest = 1 / max(_LEAST_SPREAD * abs(float(self._moments.mean)), _EPSILON)
        return min(float(self._moments.scale), largest)

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the statistics; nothing where rewards are not scaled."""
        return {**self._moments.state_dict(), "returns": self._returns.clone()} if self._scales else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state_dict`."""
        if state:
            self._moments.load_state_dict(state)
            self._returns = state["returns"].clone()
