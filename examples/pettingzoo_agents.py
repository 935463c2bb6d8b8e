"""PPO for several agents that share one policy: a PettingZoo parallel environment, its agents as rows.

pip install pettingzoo
python examples/pettingzoo_agents.py
"""

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from pettingzoo import ParallelEnv

import rayvec

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


class Agents(VectorEnv):
    """The agents of one PettingZoo parallel environment as rows of a vector environment, a native sub-batch of rayvec.

    All agents begin a game together. One that ends early keeps its row until the game is over: its last observation,
    reward 0, and the same `terminated` and `truncated` at each step. The step after the last agent has ended begins a
    new game. Chunks mark the steps of a row whose episode had ended as not `valid`.
    """

    def __init__(self, game: ParallelEnv) -> None:
        self.game, agent = game, game.possible_agents[0]
        self.num_envs = len(game.possible_agents)
        self.single_observation_space, self.single_action_space = (
            game.observation_space(agent),
            game.action_space(agent),
        )
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {**game.metadata, "autoreset_mode": AutoresetMode.NEXT_STEP}
        self.obs: dict[str, Any] = {}
        self.terminated, self.truncated = np.zeros((2, self.num_envs), bool)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins a game."""
        self.obs, _ = self.game.reset(seed=seed, options=options)
        self.terminated[:] = self.truncated[:] = False
        return self.batched(), {}

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Steps the game, or begins a new one where the last step has ended it."""
        rewards, ended = np.zeros(self.num_envs), self.terminated | self.truncated
        if ended.all():
            obs, infos = self.reset()
            return obs, rewards, self.terminated.copy(), self.truncated.copy(), infos
        live = {agent: row for row, agent in enumerate(self.game.possible_agents) if not ended[row]}
        obs, reward, terminated, truncated, _ = self.game.step({agent: actions[row] for agent, row in live.items()})
        for agent, row in live.items():
            self.obs[agent], rewards[row] = obs[agent], reward[agent]
            self.terminated[row], self.truncated[row] = terminated[agent], truncated[agent]
        return self.batched(), rewards, self.terminated.copy(), self.truncated.copy(), {}

    def batched(self) -> Any:
        """Returns the last observation of each agent."""
        space, obs = self.single_observation_space, [self.obs[agent] for agent in self.game.possible_agents]
        return concatenate(space, obs, create_empty_array(space, len(obs)))


def harbour(num_envs: int) -> Agents:
    """Makes the game of one worker, whose boats are its rows."""
    assert num_envs == NUM_AGENTS
    return Agents(Harbour())


def main(total_steps: int = 60_000) -> float:
    """Trains one policy for all boats; returns its mean return."""
    config = rayvec.PPOConfig(
        native=f"{__name__}:harbour",
        total_steps=total_steps,
        num_envs=2 * NUM_AGENTS,
        workers_per_node=2,
        num_nodes=0,
        num_steps=200,
        eval_episodes=24,
        learning_rate=1e-3,
    )
    result = rayvec.train(config)
    print(f"mean return of a boat {result.eval_return_mean:.2f} in {config.eval_episodes} episodes")
    return result.eval_return_mean


if __name__ == "__main__":
    main()
