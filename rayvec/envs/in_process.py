"""Environments that this process steps itself: a slice that takes the place of a fleet."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import Space

from rayvec.data.topology import Topology
from rayvec.data.trees import ArrayLayout
from rayvec.envs.slices import Slice
from rayvec.fleet.commands import STEPPING, Answer, Command, Op
from rayvec.fleet.restarts import own_arrays


class InProcess:
    """Executes commands at once. An answer serves as its own ticket.

    A worker has one for the policies that act in it, and a driver with ``workers_per_node=0`` in place of a fleet.

    Args:
        envs: The environments.

    Attributes:
        arrays: As of :class:`~rayvec.fleet.fleet.Fleet`, like the next three.
        parts: All environments.
        num_stepped: How many commands have stepped environments; a reset is none.
        was_reset: Which environments were reset since a policy has seen them, ``bool [num_envs]``.
        topology: One node with one worker, this process.
    """

    transports = ("local",)
    has_nodes = False

    def __init__(self, envs: Slice) -> None:
        self._envs, self.spaces, self.num_envs, self.first_id = envs, envs.spaces, envs.num_envs, envs.first_id
        self.num_stepped, self.was_reset = 0, np.zeros(self.num_envs, bool)
        self.parts, self.topology = (range(self.num_envs),), Topology.of_this_node((0, self.num_envs))

    def allocate(self, observation: Space[Any], action: Space[Any]) -> None:
        """Allocates the arrays for these spaces in this process."""
        self.layout = ArrayLayout.of(observation)
        self.open(own_arrays(self.layout, self.num_envs), ArrayLayout.of_actions(action))

    def open(self, arrays: dict[str, Any], action_layout: ArrayLayout) -> None:
        """Attaches the arrays into which the environments write."""
        self.arrays, self.action_layout = arrays, action_layout
        self._envs.open(arrays)

    def post(self, command: Command) -> Answer:
        """Executes a command. Returns its answer."""
        if command.op == Op.RESET:
            self.was_reset[command.rows] = True
        elif command.op in STEPPING:
            self.num_stepped += 1
        return self._envs.execute(command)

    def wait(self, ticket: Answer, timeout_s: float = math.inf) -> bool:
        """Returns True: the command is executed."""
        return True

    def wait_some(self, tickets: Sequence[Answer], count: int = 1, timeout_s: float = math.inf) -> list[int]:
        """Returns the indices of all commands."""
        return list(range(len(tickets)))

    def take(self, ticket: Answer) -> Answer:
        """Returns the answer."""
        return ticket

    def pids(self) -> dict[str, list[int]]:
        """Returns the id of this process, by the name of the node."""
        return {self.topology.nodes[0].name: [os.getpid()]}

    def close(self, timeout_s: float | None = None) -> None:
        """Closes the environments."""
        self._envs.close()
