"""What adapters need of environments, wherever these are: the surface of a fleet of workers, or of nodes."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, Protocol

from gymnasium import Space

from rayvec.data.layouts import ArrayLayout
from rayvec.data.topology import Topology
from rayvec.envs.spaces import PoolSpaces
from rayvec.fleet.commands import Answer, Command

__all__ = ["Environments", "NotReady", "answer_of", "log_notes"]

logger = logging.getLogger(__name__)


class NotReady(TimeoutError):
    """A wait reached its timeout. A ``TimeoutError`` that an environment raises is never a `NotReady`."""


class Environments(Protocol):
    """All environments of a vector environment: a machine's workers, a cluster's nodes, or a slice of this process.

    Attributes:
        first_id: Global index of the first environment, by which chunks, noise and errors go.
        has_nodes: Whether its children are nodes. A policy can act in these, in place of their workers.
    """

    spaces: PoolSpaces
    num_envs: int
    first_id: int
    has_nodes: bool
    arrays: dict[str, Any]
    layout: ArrayLayout
    action_layout: ArrayLayout

    @property
    def parts(self) -> tuple[range, ...]:
        """The environments of each part that takes chunks by itself: a worker, or a node of a cluster."""

    @property
    def topology(self) -> Topology:
        """Which node holds which environments."""

    @property
    def transports(self) -> tuple[str, ...]:
        """How each node of the topology is reached: ``"shm"``, ``"tcp"``, or ``"local"``."""

    def allocate(self, observation: Space[Any], action: Space[Any]) -> None:
        """Allocates the arrays for these spaces."""

    def post(self, command: Command) -> Any:
        """Starts a command. Returns its ticket."""

    def wait(self, ticket: Any, timeout_s: float = math.inf) -> bool:
        """Waits until a command is answered, for up to `timeout_s`. Returns whether it is."""

    def wait_some(self, tickets: Sequence[Any], count: int = 1, timeout_s: float = math.inf) -> list[int]:
        """Waits until `count` of some commands are answered. Returns the indices of those that are."""

    def take(self, ticket: Any) -> Answer:
        """Returns the answer to a command."""

    def pids(self) -> dict[str, list[int]]:
        """Returns process ids by the node's name."""

    def take_replaced(self) -> dict[str, int]:
        """Returns how many workers and nodes were replaced since the last call, by kind."""

    def close(self, timeout_s: float | None = None) -> None:
        """Closes the environments, and kills what runs after `timeout_s` (10 s). Further calls do nothing."""


def answer_of(envs: Environments, ticket: Any) -> Answer:
    """Returns the answer to a command, and logs what was restarted.

    Raises:
        Exception: What an environment or a policy raised. Its ``__cause__`` is an ``EnvError``.
    """
    envs.wait(ticket)
    answer = envs.take(ticket)
    if answer.notes:
        log_notes(list(answer.notes))
    if answer.failure is not None:
        raise answer.failure.rebuild()
    return answer


def log_notes(notes: list[str]) -> None:
    """Logs what was restarted, and clears the list."""
    for note in notes:
        logger.warning(note)
    notes.clear()
