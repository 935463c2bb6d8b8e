"""A fleet divides commands among children, merges their answers, and replaces those that are lost."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers.fleet_kit import RESTART, Dies, Steps, fleet_of

from rayvec.errors import WorkerLostError
from rayvec.fleet.commands import Autoreset, Command, Op

EVERYONE = np.arange(4)


def reset(fleet: Any, seed: int = 5) -> None:
    fleet.run(Command(Op.RESET, np.arange(fleet.num_envs), rest=([seed + k for k in range(fleet.num_envs)], None)))


def step(fleet: Any, mode: Autoreset, rows: Any = EVERYONE) -> Any:
    return fleet.run(Command(Op.STEP, rows, np.zeros(len(rows), np.int64), mode))


class TestTickets:
    def test_groups_step_independently(self) -> None:
        fleet = fleet_of([Steps] * 4, 2)
        reset(fleet)
        halves = np.array([2, 0]), np.array([1, 3])
        tickets = [fleet.post(Command(Op.STEP, rows, np.zeros(2, np.int64))) for rows in halves]
        assert fleet.wait(tickets[1]) and fleet.arrays["obs"][[1, 3], 1].tolist() == [1, 1]
        assert 0 in fleet.wait_some(tickets) and fleet.arrays["obs"][:, 1].tolist() == [1, 1, 1, 1]

    def test_a_wait_that_times_out_takes_nothing(self) -> None:
        fleet = fleet_of([Steps] * 4, 2)
        reset(fleet)
        ticket = fleet.post(Command(Op.STEP, EVERYONE, np.zeros(4, np.int64)))
        waits, fleet.children[0].wait = fleet.children[0].wait, lambda timeout_s: None
        assert not fleet.wait(ticket, 0.01)
        fleet.children[0].wait = waits
        assert fleet.wait(ticket, 0.01)

    def test_calls_answer_in_the_order_of_the_command(self) -> None:
        fleet = fleet_of([partial(Steps, length) for length in (3, 4, 5, 6)], 2)
        rows = np.array([3, 0, 2])
        assert fleet.run(Command(Op.CALL, rows, rest=("length", (), {}))).value == [6, 3, 5]
        fleet.run(Command(Op.SET, rows, rest=("length", [30, 10, 20])))
        assert fleet.run(Command(Op.CALL, EVERYONE, rest=("length", (), {}))).value == [10, 4, 20, 30]


class TestLostChildren:
    @pytest.mark.parametrize("mode", [Autoreset.NEXT_STEP, Autoreset.SAME_STEP])
    def test_episodes_end_at_the_last_true_observation(self, mode: Autoreset) -> None:
        """The second environment of a child dies when the first has stepped already, and ended its episode."""
        fns = [Steps, Steps, partial(Steps, 3), partial(Steps, 4, (3,), Dies)]
        fleet = fleet_of(fns, 2, RESTART)
        reset(fleet)
        for _ in range(2):
            step(fleet, mode)
        last = fleet.arrays["obs"].copy()
        fns[3] = partial(Steps, 4)
        answer = step(fleet, mode)
        assert fleet.arrays["truncated"].tolist() == [False, False, True, True]
        assert answer.infos["env_restarted"].tolist() == [False, False, True, True]
        assert fleet.arrays["rew"].tolist() == [1.0, 1.0, 0.0, 0.0]
        shown = fleet.arrays["obs"] if mode == Autoreset.NEXT_STEP else answer.infos["final_obs"]
        assert [shown[row].tolist() for row in (2, 3)] == last[2:].tolist()
        if mode == Autoreset.NEXT_STEP:
            step(fleet, mode)
        assert fleet.arrays["obs"][2:, 1].tolist() == [0, 0]
        seeds = fleet.arrays["obs"][2:, 2]
        assert not set(seeds) & {7.0, 8.0} and len(set(seeds)) == 2
        where = "(environments 2 to 3), seeds [7, 8]"
        assert fleet.take_replaced() == {"worker": 1}
        assert answer.notes == ((f"restarted child 1 {where}: child 1 died.", range(2, 4)),)

    def test_pending_commands_are_posted_again(self) -> None:
        fleet = fleet_of([Steps] * 4, 2, RESTART)
        reset(fleet)
        tickets = [fleet.post(Command(Op.STEP, np.array([row]), np.zeros(1, np.int64))) for row in (2, 3)]
        fleet.children[1].is_dead = True
        for ticket in tickets:
            assert fleet.wait(ticket, 1.0)
        assert fleet.arrays["truncated"].tolist() == [False, False, True, True]

    def test_a_child_that_dies_for_ever_is_an_error(self) -> None:
        fns = [Steps, partial(Steps, 4, range(99), Dies)]
        fleet = fleet_of(fns, 2, RESTART)
        reset(fleet)
        rows = np.arange(2)
        with pytest.raises(WorkerLostError, match="child 1 was lost again and again"):
            for _ in range(40):
                step(fleet, Autoreset.NEXT_STEP, rows)
