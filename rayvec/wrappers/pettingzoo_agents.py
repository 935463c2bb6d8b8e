"""The agents of PettingZoo parallel environments as rows of a vector environment."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from numpy.typing import NDArray

from rayvec.errors import ConfigError, EnvError

__all__ = ["ParallelAgents"]


class ParallelAgents(VectorEnv[Any, Any, Any]):
    """The agents of PettingZoo parallel environments as the rows of a vector environment.

    A policy that acts on the rows is shared by all agents. The vector environment is a native sub-batch of
    :class:`rayvec.RayVecEnv`: ``RayVecEnv([lambda: ParallelAgents(make_game())] * 8, native=True)``.

    All agents begin a game together. An agent that ends before the others keeps its row until the game is over: its
    last observation, reward 0, and its `terminated` and `truncated` again at each step. The step after the last agent
    has ended begins a new game (autoreset mode ``NEXT_STEP``). So a row whose episode had ended before a step makes no
    transition in it. Chunks mark these steps as not `valid`, and collectors do not count them.

    Args:
        games: A PettingZoo ``ParallelEnv``, or a list of such with equally many agents. Rows stand game by game, in the
            order of `possible_agents`.

    Raises:
        ConfigError: No parallel environment, agents whose spaces differ, or games of different sizes.
    """

    def __init__(self, games: Any) -> None:
        self._games: Sequence[Any] = tuple(games) if isinstance(games, list | tuple) else (games,)
        if not self._games:
            raise ConfigError(
                "ParallelAgents makes the agents of games the rows of a vector environment.",
                expected="one game or more",
                got=repr(games),
                remedy="Pass make_game(), or [make_game() for _ in range(n)]. In a run, let num_envs be large enough "
                "that each worker has the rows of a game, or lower workers_per_node.",
            )
        for game in self._games:
            _check_parallel(game)
        if len({id(game) for game in self._games}) < len(self._games):
            raise ConfigError(
                "Each game is an environment of its own.",
                expected=f"{len(self._games)} games",
                got=f"the same one several times, {len({id(game) for game in self._games})} in all",
                remedy="Pass [make_game() for _ in range(n)] instead of [make_game()] * n.",
            )
        if len({len(game.possible_agents) for game in self._games}) > 1:
            raise ConfigError(
                "The games of a vector environment have equally many agents.",
                expected="games with equally many agents",
                got=[len(game.possible_agents) for game in self._games],
                remedy="Make a sub-batch for each kind of game.",
            )
        self._num_agents = len(self._games[0].possible_agents)
        self.num_envs = len(self._games) * self._num_agents
        self.single_observation_space = self._same_space("observation_space")
        self.single_action_space = self._same_space("action_space")
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.render_mode = getattr(self._games[0], "render_mode", None)
        given = getattr(self._games[0], "metadata", None) or {}
        self.metadata = {**given, "autoreset_mode": AutoresetMode.NEXT_STEP}
        self._obs: list[Any] = [None] * self.num_envs
        self._terminated = np.zeros(self.num_envs, bool)
        self._truncated = np.zeros(self.num_envs, bool)

    def _same_space(self, name: str) -> spaces.Space[Any]:
        found = [(agent, getattr(game, name)(agent)) for game in self._games for agent in game.possible_agents]
        space: spaces.Space[Any] = found[0][1]
        for agent, other in found:
            if other != space:
                raise ConfigError(
                    "Agents that share a policy have the same spaces.",
                    expected=f"{name} {space}, as of {found[0][0]}",
                    got=f"{other} of {agent}",
                    remedy="Pad observations and actions by a wrapper, such as SuperSuit's.",
                )
        return space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins games, all of them or those that ``options["reset_mask"]`` names.

        Args:
            seed: Of the first game; a later one adds the index of its first row.
            options: Passed to each game, without the mask.

        Raises:
            ConfigError: A mask that names some agents of a game.
        """
        options = None if options is None else dict(options)
        mask = None if options is None else options.pop("reset_mask", None)
        chosen = np.ones((len(self._games), self._num_agents), bool) if mask is None else self._by_game(mask)
        infos: dict[str, Any] = {}
        for game in np.flatnonzero(chosen.all(axis=1)).tolist():
            first = game * self._num_agents
            infos = self._begin(game, None if seed is None else seed + first, options or None, infos)
        return self._batched(), infos

    def _by_game(self, mask: Any) -> NDArray[np.bool_]:
        chosen = np.asarray(mask, bool).reshape(len(self._games), self._num_agents)
        if (chosen.any(axis=1) != chosen.all(axis=1)).any():
            raise ConfigError(
                "All agents of a game begin it together.",
                expected="a reset_mask that is the same for all agents of a game",
                got=f"{np.asarray(mask).tolist()} with {self._num_agents} agents in each game",
                remedy="Leave the mask out: the step after a game's end begins the next one. A rayvec.Collector takes "
                "on_bad_obs='raise' or 'keep'.",
            )
        return chosen

    def step(
        self, actions: Any
    ) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Steps every game, or begins a new one where the last step has ended it."""
        rewards, infos = np.zeros(self.num_envs), dict[str, Any]()
        of_rows = list(iterate(self.action_space, actions))
        for game in range(len(self._games)):
            rows = self._rows(game)
            if all(self._terminated[row] or self._truncated[row] for row in rows):
                infos = self._begin(game, None, None, infos)
            else:
                infos = self._play(game, of_rows, rewards, infos)
        return self._batched(), rewards, self._terminated.copy(), self._truncated.copy(), infos

    def _rows(self, game: int) -> range:
        return range(game * self._num_agents, (game + 1) * self._num_agents)

    def _begin(
        self, game: int, seed: int | None, options: dict[str, Any] | None, infos: dict[str, Any]
    ) -> dict[str, Any]:
        env = self._games[game]
        obs, of_agents = _by_agent(env.reset(seed=seed, options=options), "observations", "infos")
        for agent, row in zip(env.possible_agents, self._rows(game), strict=True):
            self._obs[row] = deepcopy(_of_agent(agent, obs, "observation"))
            self._terminated[row] = self._truncated[row] = False
            infos = self._add_info(infos, dict(of_agents.get(agent) or {}), row)
        return infos

    def _play(
        self, game: int, actions: Sequence[Any], rewards: NDArray[np.float64], infos: dict[str, Any]
    ) -> dict[str, Any]:
        env = self._games[game]
        rows = zip(env.possible_agents, self._rows(game), strict=True)
        live = [(agent, row) for agent, row in rows if not (self._terminated[row] or self._truncated[row])]
        results = env.step({agent: actions[row] for agent, row in live})
        names = "observations", "rewards", "terminated", "truncated", "infos"
        obs, reward, terminated, truncated, of_agents = _by_agent(results, *names)
        for agent, row in live:
            self._obs[row] = deepcopy(_of_agent(agent, obs, "observation"))
            rewards[row] = _number(agent, _of_agent(agent, reward, "reward"))
            self._terminated[row] = _of_agent(agent, terminated, "terminated")
            self._truncated[row] = _of_agent(agent, truncated, "truncated")
            if agent not in env.agents and not (self._terminated[row] or self._truncated[row]):
                raise _wrong_agent(f"terminated or truncated of {agent!r}, which leaves", "neither")
            infos = self._add_info(infos, dict(of_agents.get(agent) or {}), row)
        return infos

    def _batched(self) -> Any:
        try:
            return self._joined(self._obs)
        except _NOT_OF_SPACE as error:
            raise EnvError(
                "Agents that share a policy observe elements of one space.",
                expected=f"an element of {self.single_observation_space}",
                got=next(filter(None, map(self._wrong_observation, range(self.num_envs)))),
                remedy="Correct the environment, or its observation_space.",
            ) from error

    def _joined(self, observations: Sequence[Any]) -> Any:
        out: Any = create_empty_array(self.single_observation_space, len(observations))
        return concatenate(self.single_observation_space, observations, out)

    def _wrong_observation(self, row: int) -> str | None:
        """Returns whose observation can't be an element of the space, and which it is; None if it can."""
        with contextlib.suppress(*_NOT_OF_SPACE):
            self._joined([self._obs[row]])
            return None
        agent = self._games[row // self._num_agents].possible_agents[row % self._num_agents]
        return f"{self._obs[row]!r:.80} of {agent!r}"

    def render(self) -> tuple[Any, ...]:
        """Returns what the game of each row renders."""
        return tuple(frame for game in self._games for frame in [game.render()] * self._num_agents)

    def close_extras(self, **kwargs: Any) -> None:
        """Closes the games."""
        for game in self._games:
            game.close()


_NOT_OF_SPACE = ValueError, TypeError, KeyError, IndexError, AttributeError
"""What Gymnasium raises where it writes an observation that its space does not have."""


def _check_parallel(game: Any) -> None:
    if not hasattr(game, "possible_agents") or hasattr(game, "agent_iter") or not game.possible_agents:
        turns = ", whose agents act in turn" if hasattr(game, "agent_iter") else ""
        raise ConfigError(
            "ParallelAgents takes environments whose agents act at the same time.",
            expected="a PettingZoo ParallelEnv with possible_agents",
            got=f"{type(game).__module__}.{type(game).__qualname__}{turns}",
            remedy="Use the module's parallel_env() if it has one. Otherwise convert it with aec_to_parallel of "
            "pettingzoo.utils.conversions, or, if it is a game of turns, with turn_based_aec_to_parallel.",
        )


def _of_agent(agent: Any, values: Mapping[Any, Any], what: str) -> Any:
    if agent not in values:
        raise _wrong_agent(f"the {what} of {agent!r}", f"those of {list(values)}")
    return values[agent]


def _by_agent(results: Any, *names: str) -> Any:
    """Returns what a reset or a step returned, if it is a dict by agent for each of the names."""
    if isinstance(results, tuple) and len(results) == len(names) and all(isinstance(part, Mapping) for part in results):
        return results
    parts = results if isinstance(results, tuple) else [results]
    raise EnvError(
        "A parallel environment returns dicts with a value for each agent.",
        expected=f"{len(names)} dicts: {', '.join(names)}",
        got=", ".join(type(part).__name__ for part in parts),
        remedy="Correct the environment. Older versions of PettingZoo had another API.",
    )


def _number(agent: Any, reward: Any) -> float:
    """Returns a reward as a number, or raises an EnvError."""
    with contextlib.suppress(TypeError, ValueError):
        if np.ndim(reward) == 0:
            return float(reward)
    raise EnvError(
        "The reward of an agent's step is one number.",
        expected=f"a number for {agent!r}",
        got=f"{reward!r:.80}",
        remedy="Let the environment return float(reward).",
    )


def _wrong_agent(expected: str, got: str) -> EnvError:
    return EnvError(
        "A parallel environment begins with all its agents, and answers each until it ends.",
        expected=expected,
        got=got,
        remedy="Correct the environment, or keep agents that come later as agents that wait.",
    )
