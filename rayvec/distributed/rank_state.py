"""A learner on several ranks: what all ranks share of its state, and what belongs to each, such as its replay."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rayvec.errors import ConfigError, counted
from rayvec.learners.base import KeepsRankLocalState, Learner
from rayvec.learners.ranks import Ranks

logger = logging.getLogger(__name__)


def give_ranks(learner: Learner, ranks: Ranks) -> None:
    """Lets a learner sum over ranks.

    Raises:
        ConfigError: It can't, and there are several.
    """
    if hasattr(learner, "ranks"):
        learner.ranks = ranks
    elif ranks.size > 1:
        raise ConfigError(
            f"{type(learner).__name__} can't learn on several ranks: it has no attribute `ranks`. Pass num_learners=1, "
            "or let the learner sum its gradients by self.ranks.all_reduce_, see rayvec.learners.ranks."
        )


def shared_state(learner: Learner) -> dict[str, Any]:
    """Returns what all ranks share of a learner's state."""
    return learner.shared_state() if isinstance(learner, KeepsRankLocalState) else learner.state_dict()


def rank_local_state(learner: Learner) -> dict[str, Any]:
    """Returns what belongs to this rank of a learner's state."""
    return learner.rank_local_state() if isinstance(learner, KeepsRankLocalState) else {}


def join_state(shared: dict[str, Any], rank_local: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the state of a learner on ranks, for a checkpoint.

    It is what one learner has, from which one can continue; the parts of several ranks are in the list ``rank_local``.
    """
    if len(rank_local) == 1:
        return {**shared, **rank_local[0]}
    return {**shared, "rank_local": list(rank_local)} if any(rank_local) else shared


def split_state(
    state: Mapping[str, Any], names: Collection[str], num_ranks: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns what all ranks share of a state that `join_state` returned, and what belongs to each.

    Rank-local parts go to as many ranks as they came from. For another number they are left out, with a warning.

    Args:
        state: The state.
        names: Of the rank-local parts.
        num_ranks: How many ranks continue from it.
    """
    shared = dict(state)
    rank_local = shared.pop("rank_local", None)
    own = {name: shared.pop(name) for name in names if name in shared}
    if rank_local is None and own:
        rank_local = [own]
    if rank_local is not None and len(rank_local) != num_ranks:
        names_of_parts, count = ", ".join(rank_local[0]), len(rank_local)
        logger.warning("the %s of %s does not fit %d, and refills", names_of_parts, counted(count, "rank"), num_ranks)
        rank_local = None
    return shared, rank_local or [{}] * num_ranks
