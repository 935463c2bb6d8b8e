"""A parallel environment whose agents leave at different times, written for the interface of PettingZoo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from rayvec.wrappers import ParallelAgents


class Leavers:
    """Agent i ends after so many steps: the even ones terminated, the odd ones truncated.

    Observations are the seed of the game and the number of steps; the reward of a step is that number.

    Args:
        lengths: Of each agent's episode.
        odd: Something wrong: another space of one agent, ``"observation"`` or ``"action"``; ``"late"``: an agent that
            is not there at the start; ``"gone"``: one that leaves without an end; ``"silent"``: one without a reward.
    """

    def __init__(self, lengths: Sequence[int], odd: str = "") -> None:
        self.possible_agents = [f"agent_{i}" for i in range(len(lengths))]
        self.agents: list[str] = []
        self._lengths = dict(zip(self.possible_agents, lengths, strict=True))
        self.metadata = {"name": "leavers"}
        self._odd, self._seed, self._began, self._steps = odd, 0, 0, 0

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        size = 3 if self._odd == "observation" and agent == self.possible_agents[-1] else 2
        return spaces.Box(-np.inf, np.inf, (size,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3 if self._odd == "action" and agent == self.possible_agents[-1] else 2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = self.possible_agents[: -1 if self._odd == "late" else None]
        self._seed, self._steps, self._began = self._seed if seed is None else seed, 0, self._began + 1
        return self._shown(self.agents), {agent: {"began": self._began} for agent in self.agents}

    def _shown(self, agents: Sequence[str]) -> dict[str, Any]:
        return {agent: np.array([self._seed, self._steps], np.float32) for agent in agents}

    def step(self, actions: dict[str, Any]) -> Any:
        assert list(actions) == self.agents and all(int(action) in (0, 1) for action in actions.values())
        acted, self._steps = self.agents, self._steps + 1
        ends = {agent: self._steps == self._lengths[agent] for agent in acted}
        terminated = {agent: ends[agent] and self.possible_agents.index(agent) % 2 == 0 for agent in acted}
        truncated = {agent: ends[agent] and not terminated[agent] for agent in acted}
        rewards = {agent: float(self._steps) for agent in acted}
        self.agents = [agent for agent in acted if not ends[agent]]
        if self._odd == "gone":
            self.agents = self.agents[:-1]
        if self._odd == "silent":
            rewards.popitem()
        return self._shown(acted), rewards, terminated, truncated, {agent: {"step": self._steps} for agent in acted}

    def render(self) -> None:
        """Shows nothing."""

    def close(self) -> None:
        """Closes nothing."""


def game_rows(lengths: Sequence[Sequence[int]]) -> ParallelAgents:
    """Makes the rows of some games."""
    return ParallelAgents([Leavers(each) for each in lengths])


def leavers(num_envs: int) -> ParallelAgents:
    """Makes so many rows of games of three agents."""
    return game_rows([(3, 5, 8)] * (num_envs // 3))
