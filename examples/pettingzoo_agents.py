"""PPO for several agents that share one policy: a PettingZoo parallel environment, its agents as rows.

python examples/pettingzoo_agents.py
"""

from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

import rayvec
from rayvec.wrappers import ParallelAgents

NUM_AGENTS, SIZE, MAX_STEPS = 3, 9, 30


class Harbour(ParallelEnv):
    """Three boats on a line of places look for the harbour; a boat that arrives leaves the game.

    A boat sees its own place, the harbour, and the mean place of the boats that are still at sea. Each step costs 0.1,
    and 0.2 more beside another boat. Arriving earns 1.
    """

    metadata = {"name": "harbour"}  # noqa: RUF012 (as PettingZoo declares it)

    def __init__(self) -> None:
        self.possible_agents = [f"boat_{i}" for i in range(NUM_AGENTS)]
        self.agents: list[str] = []
        self._rng = np.random.default_rng()

    def observation_space(self, agent: str) -> spaces.Box:
        """Places, as numbers from -1 to 1."""
        return spaces.Box(-1.0, 1.0, (3,), np.float32)

    def action_space(self, agent: str) -> spaces.Discrete:
        """Left, stay, right."""
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Places the harbour and the boats."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self.agents, self._steps = self.possible_agents[:], 0
        self._harbour = int(self._rng.integers(SIZE))
        self._places = {agent: int(self._rng.integers(SIZE)) for agent in self.agents}
        return self._seen(self.agents), {agent: {} for agent in self.agents}

    def _seen(self, agents: list[str]) -> dict[str, Any]:
        mean = np.mean(list(self._places.values()))
        rows = {agent: (self._places[agent], self._harbour, mean) for agent in agents}
        return {agent: np.array(row, np.float32) * (2 / (SIZE - 1)) - 1 for agent, row in rows.items()}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """Moves all boats at once."""
        moved = list(actions)
        self._steps += 1
        for agent, action in actions.items():
            self._places[agent] = int(np.clip(self._places[agent] + int(action) - 1, 0, SIZE - 1))
        at_sea = list(self._places.values())
        arrived = {agent: self._places[agent] == self._harbour for agent in moved}
        crowded = {agent: at_sea.count(self._places[agent]) > 1 for agent in moved}
        rewards = {agent: 1.0 if arrived[agent] else -0.1 - 0.2 * crowded[agent] for agent in moved}
        late = {agent: self._steps >= MAX_STEPS and not arrived[agent] for agent in moved}
        seen = self._seen(moved)
        self.agents = [agent for agent in moved if not (arrived[agent] or late[agent])]
        self._places = {agent: self._places[agent] for agent in self.agents}
        return seen, rewards, arrived, late, {agent: {} for agent in moved}


def harbours(num_envs: int) -> ParallelAgents:
    """Makes so many rows: a game for every three of them."""
    return ParallelAgents([Harbour() for _ in range(num_envs // NUM_AGENTS)])


def main(total_steps: int = 60_000) -> float:
    """Trains one policy for all boats; returns its mean return."""
    config = rayvec.PPOConfig(
        native=f"{__name__}:harbours",
        total_steps=total_steps,
        num_envs=24,
        workers_per_node=2,
        num_nodes=0,
        num_steps=50,
        eval_episodes=24,
        learning_rate=1e-3,
    )
    result = rayvec.train(config)
    print(f"mean return of a boat {result.eval_return_mean:.2f} in {config.eval_episodes} episodes")
    return result.eval_return_mean


if __name__ == "__main__":
    main()
