"""Environments that this process steps, one after another: for debuggers, and where a step takes microseconds."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from typing import Any

from gymnasium import Space

from rayvec.data.layouts import ArrayLayout
from rayvec.data.topology import Topology
from rayvec.data.trees import copied, tree_map
from rayvec.envs.factory import EnvFactory
from rayvec.envs.failures import FAILURES, is_ctrl_c
from rayvec.envs.native_slices import NativeSlice
from rayvec.envs.slices import Slice, own_arrays
from rayvec.fleet.commands import Answer, Command, Op
from rayvec.fleet.restarts import EnvRules

__all__ = ["InProcess", "make_slice"]

logger = logging.getLogger(__name__)


def make_slice(factory: EnvFactory, first_id: int, where: str, rules: EnvRules) -> Slice:
    """Makes the slice of all environments of a factory; the arguments are those of :class:`Slice`."""
    kind = NativeSlice if factory.native else Slice
    return kind(factory, first_id, where, rules)


class InProcess:
    """A slice of this process in place of a fleet. A command is executed when it is posted.

    Environments get copies of actions, as where another process steps them. Arguments and results of calls are the
    objects themselves.

    Args:
        slice_: The slice.

    Attributes:
        spaces: The spaces and metadata of the environments.
    """

    transports = ("local",)
    has_nodes = False

    def __init__(self, slice_: Slice) -> None:
        self._slice, self.spaces, self.num_envs = slice_, slice_.spaces, slice_.num_envs
        self.first_id, self.parts = slice_.first_id, (range(self.num_envs),)
        self.arrays: dict[str, Any] = getattr(slice_, "arrays", {})

    def allocate(self, observation: Space[Any], action: Space[Any]) -> None:
        """Allocates the arrays for these spaces."""
        self.layout, self.action_layout = ArrayLayout.with_objects(observation), ArrayLayout.of_actions(action)
        self.arrays = own_arrays(self.layout, self.num_envs)
        self._slice.open(self.arrays)

    def post(self, command: Command) -> Answer:
        """Executes a command. Returns the answer, which serves as ticket."""
        if command.op == Op.STEP:
            command = Command(Op.STEP, command.rows, tree_map(copied, command.actions), command.mode)
        return self._slice.execute(command)

    def wait(self, ticket: Answer, timeout_s: float = math.inf) -> bool:
        """Returns True."""
        return True

    def wait_some(self, tickets: Sequence[Answer], count: int = 1, timeout_s: float = math.inf) -> list[int]:
        """Returns the indices of all commands."""
        return list(range(len(tickets)))

    def take(self, ticket: Answer) -> Answer:
        """Returns the answer."""
        return ticket

    @property
    def topology(self) -> Topology:
        """One node with one worker, this process."""
        return Topology.of_this_node((0, self.num_envs))

    def pids(self) -> dict[str, list[int]]:
        """Returns the id of this process, by node name."""
        return {node.name: [os.getpid()] for node in self.topology.nodes}

    def close(self, timeout_s: float | None = None) -> None:
        """Closes the environments. Further calls do nothing."""
        try:
            self._slice.close()
        except FAILURES as error:
            if is_ctrl_c(error):
                raise
            logger.exception("an environment did not close in order")
