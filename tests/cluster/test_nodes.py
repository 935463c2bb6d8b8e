"""A fleet of nodes: chunks, and what happens when nodes and their workers fail."""

from __future__ import annotations

import os
import pickle
import signal
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import pytest
from helpers.fleet_kit import RESTART, Steps, reset, step
from helpers.node_kit import FAR, OWN, cluster_of

from rayvec.data import ChunkRequest
from rayvec.fleet.commands import Autoreset, Command, Op
from rayvec.policies.noise import NO_NOISE
from rayvec.rollout.policy_host import ChunkOrder


class Slow(Steps):
    """Steps that wait for a file."""

    def __init__(self, path: str) -> None:
        super().__init__(99)
        self.path = path

    def step(self, action: Any) -> Any:
        while action and not os.path.exists(self.path):
            pass
        return super().step(action)


class TestTickets:
    def test_environments_of_a_node_answer_in_any_order(self, tmp_path: Any) -> None:
        path = str(tmp_path / "go")
        with cluster_of([partial(Slow, path)] * 4, (FAR,), 4) as fleet:
            reset(fleet)
            first = fleet.post(Command(Op.STEP, np.array([2]), np.ones(1, np.int64)))
            for row in (3, 0, 3):
                fleet.run(Command(Op.STEP, np.array([row]), np.zeros(1, np.int64)))
            assert not fleet.wait(first, 0.0) and fleet.arrays["obs"][:, 1].tolist() == [1, 0, 0, 2]
            (tmp_path / "go").touch()
            assert fleet.wait(first) and fleet.arrays["obs"][:, 1].tolist() == [1, 0, 1, 2]


class Moves:
    """A policy whose weight is its action."""

    noise = NO_NOISE

    def __init__(self) -> None:
        self.action = 0

    def act(self, obs: Any, noise: Any) -> Any:
        return np.full(len(obs), self.action), {}

    def load_weights(self, weights: Any) -> None:
        self.action = int(weights[0])


class TestChunks:
    @pytest.mark.parametrize("on_node", [False, True])
    def test_two_chunks_with_weights_of_their_own(self, on_node: bool) -> None:
        with cluster_of([partial(Steps, 3)] * 4, (OWN, FAR), 2) as fleet:
            reset(fleet)
            rows = np.arange(4)
            fleet.run(Command(Op.LOAD, rows, rest=(7, cloudpickle.dumps(Moves()), on_node, 0)))
            orders = [
                ChunkOrder(7, ChunkRequest(5, 5 * k), k, np.array([k], np.float32) if k else None) for k in (0, 1, 1)
            ]
            tickets = [fleet.post(Command(Op.ROLLOUT, rows, rest=order)) for order in orders[:2]]
            for k, order in enumerate([*orders[2:], None, None]):
                assert fleet.wait(tickets[k])
                chunk = fleet.take(tickets[k]).value.chunk
                assert (chunk.act == orders[k].version).all() and chunk.env_ids.tolist() == [0, 1, 2, 3]
                assert chunk.weights_version == orders[k].version
                assert chunk.truncated.sum(0).tolist() == ([1] * 4 if k == 0 else [2] * 4)
                if order is not None:
                    tickets.append(fleet.post(Command(Op.ROLLOUT, rows, rest=order)))


class TestFaults:
    @pytest.mark.parametrize("mode", [Autoreset.NEXT_STEP, Autoreset.SAME_STEP])
    def test_a_node_that_is_killed_is_replaced(self, mode: Autoreset) -> None:
        with cluster_of([Steps] * 4, (OWN, FAR), policy=RESTART) as fleet:
            reset(fleet)
            for _ in range(2):
                step(fleet, mode)
            last = fleet.arrays["obs"].copy()
            pid, *_ = fleet.pids()[fleet.topology.nodes[1].name]
            os.kill(pid, signal.SIGKILL)
            answer = step(fleet, mode)
            assert fleet.arrays["truncated"].tolist() == [False, False, True, True]
            assert answer.infos["env_restarted"].tolist() == [False, False, True, True]
            shown = fleet.arrays["obs"] if mode == Autoreset.NEXT_STEP else answer.infos["final_obs"]
            assert [shown[row].tolist() for row in (2, 3)] == last[2:].tolist()
            if mode == Autoreset.NEXT_STEP:
                step(fleet, mode)
            seeds = fleet.arrays["obs"][2:, 2]
            assert not set(seeds) & {7.0, 8.0} and len(set(seeds)) == 2
            assert fleet.take_replaced() == {"node": 1}

    def test_what_a_node_can_not_unpickle(self) -> None:
        with cluster_of([Steps] * 2, (FAR,)) as fleet, pytest.raises(ModuleNotFoundError, match="nowhere"):
            fleet.run(Command(Op.RESET, np.arange(2), rest=([None, None], {"x": _Unknown()})))


class _Unknown:
    def __reduce__(self) -> Any:
        return pickle.loads, (b"cnowhere\nthing\n.",)
