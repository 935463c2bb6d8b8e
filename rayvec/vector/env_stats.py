"""What has become of each environment: how long its steps take, how often it was restarted, and where it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class EnvStats(NamedTuple):
    """Figures of one environment; those of a native sub-batch stand for each of its environments.

    Attributes:
        num_steps: Steps since its worker started; a step that only resets is none.
        step_ms: Mean duration of a step.
        longest_step_ms: Duration of the longest.
        num_resets: Resets since its worker started.
        reset_ms: Mean duration of a reset.
        longest_reset_ms: Duration of the longest.
        num_restarts: How often it was restarted after a failure.
        last_error: What the log said of the last restart; "" without one.
        node: The node that holds it.
        worker: The index of its worker on that node.
    """

    num_steps: int
    step_ms: float
    longest_step_ms: float
    num_resets: int
    reset_ms: float
    longest_reset_ms: float
    num_restarts: int
    last_error: str
    node: str
    worker: int


def summary(stats: Sequence[EnvStats]) -> str:
    """Returns a sentence about the slowest environment, and about the one that was restarted most, if any was."""
    slowest = max(range(len(stats)), key=lambda env: stats[env].step_ms)
    restarted = max(range(len(stats)), key=lambda env: stats[env].num_restarts)
    text = (
        f"The slowest environment is {slowest} (node {stats[slowest].node}, worker {stats[slowest].worker}): a step "
        f"takes {stats[slowest].step_ms:.3g} ms, the longest {stats[slowest].longest_step_ms:.3g} ms."
    )
    if not stats[restarted].num_restarts:
        return text
    times = stats[restarted].num_restarts
    return f"{text} Environment {restarted} was restarted most ({times} times): {stats[restarted].last_error}"
