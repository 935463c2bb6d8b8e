"""A rank object that loads one algorithm after another, so that many tests share the same ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayvec.learners.ranks import ALONE, Ranks
from rayvec.tianshou.learn.algorithm_rank import AlgorithmRank


class Unsummed:
    """Ranks that tell each other counts, but no gradients: each keeps what it has."""

    def __init__(self, ranks: Ranks) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self._ranks = ranks

    def sum_(self, tensor: Any) -> Any:
        return tensor if tensor.is_floating_point() else self._ranks.sum_(tensor)


class Twins:
    """Rank 0 of two, as it sees them: the other one has no rows, and the same counts."""

    rank, size = 0, 2

    def sum_(self, tensor: Any) -> Any:
        return tensor if tensor.is_floating_point() else tensor + tensor.flip(0)


class Stage:
    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._on: AlgorithmRank | None = None

    def begin(self, pickled: bytes, averages: bool) -> None:
        self._on = AlgorithmRank(pickled, "cpu", self._ranks if averages else Unsummed(self._ranks))

    def update(self, *args: Any) -> Any:
        assert self._on is not None
        return self._on.update(*args)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._on is None else self._on.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._on is not None:
            self._on.load_state_dict(state)


class OneRank:
    """A group of one rank, in this very process."""

    num_ranks = 1

    def __init__(self, pickled: bytes, ranks: Ranks = ALONE) -> None:
        self._rank = AlgorithmRank(pickled, ranks=ranks)
        self.state_dict = self._rank.state_dict
        self.load_state_dict = self._rank.load_state_dict

    def put(self, value: Any) -> Any:
        return value

    def run(self, name: str, arguments: list[tuple[Any, Any]], *, keep: bool) -> list[Any]:
        return [getattr(self._rank, name)(*arguments[0])]
