"""Wrappers: for the command line (``--wrappers rayvec.wrappers:atari``), for starts, for masks, for several agents."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TimeLimit
from numpy.typing import NDArray

from rayvec.errors import ConfigError, EnvError, message

__all__ = ["MASK_KEY", "ActionMask", "FireToServe", "ParallelAgents", "StaggeredStart", "atari", "num_choices"]

Env = gymnasium.Env[Any, Any]

MASK_KEY = "action_mask"
"""Under which key an info or a Dict observation says which actions are allowed."""


class FireToServe(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Presses FIRE when a game waits for it: after a reset, and after each lost life.

    Without it, a greedy agent that never presses FIRE would wait for ever. The rewards of these steps count.

    Args:
        env: An Atari game that has a FIRE button.
    """

    _FIRE = 1

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self._lives = 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begins an episode and presses FIRE; if that ends the game, begins another episode."""
        obs, info = self.env.reset(**kwargs)
        obs, _, terminated, truncated, info = self.env.step(self._FIRE)
        if terminated or truncated:
            obs, info = self.env.reset()
        self._lives = info.get("lives", 0)
        return obs, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Takes a step; if it cost a life but did not end the game, presses FIRE in a second step."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        lost_life = info.get("lives", 0) < self._lives
        if lost_life and not (terminated or truncated):
            obs, earned, terminated, truncated, info = self.env.step(self._FIRE)
            reward = float(reward) + float(earned)
        self._lives = info.get("lives", 0)
        return obs, float(reward), terminated, truncated, info


def atari(env: Env) -> Env:
    """Applies the usual Atari preprocessing: ``uint8 (4, 84, 84)``, four grey frames, each the maximum of two.

    Each action is repeated for four frames. An episode begins with up to 30 no-op frames and ends with the game, not
    with a life (Machado et al., "Revisiting the Arcade Learning Environment", 2018). In games with a FIRE button,
    `FireToServe` presses it. Rewards are not clipped; the learner can do that.

    Args:
        env: A game of ``ale_py`` made with ``frameskip=1``.

    Raises:
        ConfigError: The game skips frames itself, or OpenCV is not installed.
    """
    if getattr(env.unwrapped, "_frameskip", 1) != 1:
        raise ConfigError(
            "Only this wrapper skips frames.",
            expected="a game made with frameskip=1",
            got=f"frameskip={env.unwrapped._frameskip}",  # type: ignore[attr-defined]
            remedy="Pass env_kwargs={'frameskip': 1} (--env-kwargs frameskip 1 on the command line).",
        )
    try:
        env = AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84)
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(
            "OpenCV resizes the frames of Atari.",
            expected="opencv-python-headless",
            got=str(error),
            remedy="Install rayvec[atari].",
        ) from error
    get_meanings = getattr(env.unwrapped, "get_action_meanings", None)
    if get_meanings is not None and get_meanings()[1:2] == ["FIRE"]:
        env = FireToServe(env)
    return FrameStackObservation(env, 4)


def _time_limit(env: Env) -> int:
    """Returns the steps after which an environment truncates an episode.

    Raises:
        ConfigError: It has no time limit.
    """
    layer = env
    while isinstance(layer, gymnasium.Wrapper):
        if isinstance(layer, TimeLimit):
            return layer._max_episode_steps
        layer = layer.env
    if layer.spec is not None and layer.spec.max_episode_steps is not None:
        return layer.spec.max_episode_steps
    raise ConfigError(
        "stagger_starts spreads the ends of the first episodes over the time limit of the environment.",
        expected="an environment with a time limit (max_episode_steps)",
        got=f"{layer.spec.id if layer.spec else layer}, which has none",
        remedy="Leave stagger_starts out, or wrap the environment in gymnasium.wrappers.TimeLimit; for an id, pass "
        "env_kwargs={'max_episode_steps': 1000}.",
    )


class StaggeredStart(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Truncates the first episode after a number of steps that is drawn from its seed.

    Environments that all truncate after the same number of steps then do so at different times. The number is uniform
    between 1 and the time limit of the environment. Only a reset with a seed below 2^30, as training gives, is
    followed by such an episode; evaluations have larger seeds.

    Args:
        env: An environment with a time limit.

    Raises:
        ConfigError: The environment has no time limit.
    """

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self._time_limit = _time_limit(env)
        self._num_left = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins an episode, which is short if a seed of training is given."""
        self._num_left = 0
        if seed is not None and seed < 2**30:
            self._num_left = int(np.random.default_rng([seed, 1]).integers(1, self._time_limit, endpoint=True))
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Takes a step; truncates the episode if it was the last of a short one."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._num_left -= 1
        return obs, reward, terminated, truncated or (self._num_left == 0 and not terminated), info


class ActionMask(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Makes the action mask of infos a part of the observation, where PPO, IMPALA and SAC read it.

    Observations become ``{"observation": obs, "action_mask": mask}``. The mask has a number for each choice of the next
    action, ``int8 [P]``, 0 where it is not allowed. It is all 1 where an info has no ``"action_mask"``. An environment
    whose observation is a Dict with that key keeps its observations. Every mask is checked.

    :func:`rayvec.train` applies this wrapper itself where the first info has a mask.

    Args:
        env: An environment with a Discrete or MultiDiscrete action space.

    Raises:
        ConfigError: The action space is another one.
        ValueError: A step or reset gave a mask that allows nothing, of another size, or of something else than numbers.
    """

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self._sizes = num_choices(env.action_space)
        if not self._sizes:
            raise ConfigError(
                "A mask says which of the choices of an action are allowed.",
                expected="a Discrete or MultiDiscrete action space",
                got=env.action_space,
                remedy="Leave the wrapper out.",
            )
        space = env.observation_space
        self._is_in_obs = isinstance(space, spaces.Dict) and MASK_KEY in space.spaces
        if not self._is_in_obs:
            mask = spaces.MultiBinary(sum(self._sizes))
            self.observation_space = spaces.Dict({"observation": space, MASK_KEY: mask})
        self._num_steps = 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begins an episode."""
        obs, info = self.env.reset(**kwargs)
        self._num_steps = 0
        return self._with_mask(obs, info), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Takes a step. The mask of an episode's last observation may allow nothing."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._num_steps += 1
        return self._with_mask(obs, info, is_last=terminated or truncated), reward, terminated, truncated, info

    def _with_mask(self, obs: Any, info: dict[str, Any], *, is_last: bool = False) -> Any:
        given = obs[MASK_KEY] if self._is_in_obs else info.get(MASK_KEY)
        mask = np.ones(sum(self._sizes), np.int8) if given is None else self._flat(given)
        firsts = np.cumsum((0, *self._sizes[:-1]))
        if not is_last and not np.logical_or.reduceat(mask != 0, firsts).all():
            raise ValueError(
                message(
                    "An action mask allows at least one choice of each component of an action.",
                    expected=f"a number other than 0 among each of {list(self._sizes)} choices",
                    got=f"{mask.tolist()} after {self._num_steps} steps of the episode",
                    remedy="Correct the environment's mask, or end the episode where no action is left.",
                )
            )
        return obs if self._is_in_obs else {"observation": obs, MASK_KEY: mask}

    def _flat(self, given: Any) -> NDArray[np.int8]:
        if isinstance(given, np.ndarray) and given.dtype.hasobject:
            given = given.ravel().tolist()  # numbers, or arrays of numbers
        parts = given if isinstance(given, tuple | list) else (given,)
        mask = np.concatenate([np.ravel(part) for part in parts])
        if mask.dtype.kind not in "biuf" or (mask.dtype.kind == "f" and np.isnan(mask).any()):
            raise ValueError(
                message(
                    "An action mask is made of numbers.",
                    expected="numbers or bools, 0 where a choice is not allowed",
                    got=f"{mask.tolist()} after {self._num_steps} steps of the episode",
                    remedy="Correct the environment's mask, or pass action_masks=False.",
                )
            )
        given_sizes = [np.size(part) for part in parts]
        ends, allowed_ends = set(np.cumsum(given_sizes)), set(np.cumsum(self._sizes))
        if mask.shape != (sum(self._sizes),) or not (ends <= allowed_ends or allowed_ends <= ends):
            raise ValueError(
                message(
                    "An action mask has one number for each choice of an action.",
                    expected=f"{' + '.join(map(str, self._sizes))} numbers for {self.env.action_space}",
                    got=f"{' + '.join(map(str, given_sizes))} after {self._num_steps} steps of the episode",
                    remedy="Correct the environment's mask, or pass action_masks=False.",
                )
            )
        allowed: NDArray[np.int8] = (mask != 0).astype(np.int8)
        return allowed


def num_choices(action_space: spaces.Space[Any]) -> tuple[int, ...]:
    """Returns the number of choices of each component of a Discrete or MultiDiscrete; nothing for other spaces."""
    match action_space:
        case spaces.Discrete(n=n):
            return (int(n),)
        case spaces.MultiDiscrete(nvec=nvec):
            return tuple(int(n) for n in nvec.flat)
    return ()


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
                remedy="Pass make_game(), or [make_game() for _ in range(n)].",
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
        out: Any = create_empty_array(self.single_observation_space, self.num_envs)
        try:
            return concatenate(self.single_observation_space, self._obs, out)
        except (ValueError, TypeError, KeyError) as error:
            wrong = next((obs for obs in self._obs if obs not in self.single_observation_space), self._obs[0])
            raise EnvError(
                "Agents that share a policy observe elements of one space.",
                expected=f"an element of {self.single_observation_space}",
                got=f"{wrong!r:.80}",
                remedy="Correct the environment, or its observation_space.",
            ) from error

    def render(self) -> tuple[Any, ...]:
        """Returns what the game of each row renders."""
        return tuple(frame for game in self._games for frame in [game.render()] * self._num_agents)

    def close_extras(self, **kwargs: Any) -> None:
        """Closes the games."""
        for game in self._games:
            game.close()


def _check_parallel(game: Any) -> None:
    if not hasattr(game, "possible_agents") or hasattr(game, "agent_iter") or not game.possible_agents:
        turns = ", whose agents act in turn" if hasattr(game, "agent_iter") else ""
        raise ConfigError(
            "ParallelAgents takes environments whose agents act at the same time.",
            expected="a PettingZoo ParallelEnv with possible_agents",
            got=f"{type(game).__module__}.{type(game).__qualname__}{turns}",
            remedy="Convert it by pettingzoo.utils.conversions.aec_to_parallel, or use the module's parallel_env().",
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
