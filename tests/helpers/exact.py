"""Environments and a policy whose every answer is an exact function of seed, observations and actions."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from rayvec.data import Tree, tree_leaves
from rayvec.policies.noise import NoiseSpec

Result = tuple[Any, float, bool, bool, dict[str, Any]]
Start = tuple[Any, dict[str, Any]]


def describe(value: Any) -> str:
    """Returns a text that tells apart any two actions that differ in a type, a data type, a shape or a value."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"array:{value.dtype.str}{value.shape}:{value.tobytes().hex()}"
    if isinstance(value, np.generic):
        return f"{value.dtype.str}:{value.tobytes().hex()}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key!r}={describe(value[key])}" for key in value) + "}"
    if isinstance(value, (tuple, list, np.ndarray)):
        return f"{type(value).__name__}(" + ",".join(map(describe, value)) + ")"
    return f"{type(value).__name__}:{value!r}"


class WordSpace(Space[Any]):
    """A space that Gymnasium does not know: dicts with a word and as many numbers as it has letters."""

    def __init__(self, letters: str = "abc") -> None:
        super().__init__(None, None)
        self.letters = letters

    def sample(self, mask: Any = None, probability: Any = None) -> dict[str, Any]:
        length = int(self.np_random.integers(1, 5))
        word = "".join(self.np_random.choice(list(self.letters), length))
        return {"word": str(word), "numbers": self.np_random.normal(size=length)}

    def contains(self, x: Any) -> bool:
        return isinstance(x, dict) and set(x["word"]) <= set(self.letters) and len(x["word"]) == len(x["numbers"])

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WordSpace) and self.letters == other.letters

    __hash__ = None  # type: ignore[assignment]


class SpaceEnv(gymnasium.Env[Any, Any]):
    """Returns samples of its spaces in short random episodes, and infos of many kinds.

    Every result depends on the seed and on every bit of every earlier action, as :func:`describe` has it.
    """

    metadata = {"render_modes": ["rgb_array"], "kind": "space"}  # noqa: RUF012

    def __init__(
        self,
        observation_space: Space[Any],
        action_space: Space[Any] | None = None,
        max_episode_steps: int = 4,
        infos: bool = True,
        render_mode: str | None = None,
    ) -> None:
        self.observation_space = deepcopy(observation_space)
        self.action_space = deepcopy(spaces.Discrete(2) if action_space is None else action_space)
        self.render_mode = render_mode
        self.factor = 1.0
        self._max_episode_steps = max_episode_steps
        self._infos = infos
        self._left = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self._left = int(self.np_random.integers(1, self._max_episode_steps + 1))
        info = self._info("reset") if self._infos else {}
        if options is not None:
            info["options"] = repr(sorted(options.items()))
        return self.observation_space.sample(), info

    def step(self, action: Any) -> Result:
        self._left -= 1
        told = describe(action)
        reward = self.factor * (sum(told.encode()) % 1009) / 7 + float(self.np_random.normal())
        terminated = self._left <= 0 and bool(self.np_random.random() < 0.6)
        truncated = self._left <= 0 and (not terminated or bool(self.np_random.random() < 0.3))
        info = self._info("step") | {"action": told} if self._infos else {}
        return self.observation_space.sample(), reward, terminated, truncated, info

    def render(self) -> Any:
        return np.full((2, 2, 3), self._left % 256, np.uint8)

    def scaled(self, x: float, *, by: float = 1.0) -> float:
        return x * by * self.factor

    def _info(self, where: str) -> dict[str, Any]:
        random = self.np_random
        kinds: dict[str, Any] = {
            f"{where}_int": int(random.integers(-5, 5)),
            "float": float(random.normal()),
            "bool": bool(random.random() < 0.5),
            "text": f"{where}é",
            "none": None,
            "big": [2**70],
            "vector": random.normal(size=3).astype(np.float32),
            "scalar": np.int16(random.integers(100)),
            "float32": np.float32(random.normal()),
            "npbool": np.bool_(random.random() < 0.5),
            "mask": random.random(2) < 0.5,
            "zero_d": np.array(random.normal()),
            "empty": np.zeros((0, 2), np.int8),
            "list": [1, "two", 3.0],
            "tuple": (1, (2,)),
            "bytes": b"\x00\xff",
            "set": frozenset({where}),
            "nested": {"n_int": int(random.integers(9)), "deeper": {"x": random.integers(0, 255, (2, 2), np.uint8)}},
        }
        return {key: value for key, value in kinds.items() if random.random() < 0.4}


class DriftEnv(gymnasium.Env[NDArray[np.float32], Any]):
    """A point that actions and noise push left or right; an episode ends beyond 1, or after 40 steps."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._state = np.zeros(2)
        self._t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        super().reset(seed=seed)
        self._state, self._t = self.np_random.uniform(-0.3, 0.3, 2), 0
        return self._state.astype(np.float32), {}

    def step(self, action: Any) -> Result:
        x, v = self._state
        v = 0.9 * v + 0.1 * (2 * int(action) - 1) + self.np_random.normal(0.0, 0.05)
        self._state, self._t = np.array([x + v, v]), self._t + 1
        gone = abs(self._state[0]) > 1.0
        return self._state.astype(np.float32), 1.0 - abs(x), bool(gone), not gone and self._t >= 40, {}


class TablePolicy:
    """A policy that is exact by construction: integer arithmetic and a table, the same in any batch.

    It sums the sixteenths of every number of an observation, finds the sum in a table of integer weights, and draws a
    Discrete action by these weights with one uniform number. It records ``logp`` and the ``state``.
    """

    noise = NoiseSpec("uniform", 1)
    _num_actions = 0

    def __init__(self, num_actions: int = 2, num_states: int = 64, seed: int = 0) -> None:
        table = np.random.default_rng(seed).integers(1, 9, (num_states, num_actions))
        self.load_weights(table.astype(np.float32).ravel(), num_actions)

    def load_weights(self, weights: NDArray[np.float32], num_actions: int | None = None) -> None:
        self._num_actions = num_actions or self._num_actions
        table = np.rint(weights).astype(np.int64).reshape(-1, self._num_actions)
        self._table = table
        self._bounds = np.cumsum(table, 1)
        self.logp_table = np.log(table / table.sum(1, keepdims=True)).astype(np.float32)

    def weights(self) -> NDArray[np.float32]:
        return self._table.astype(np.float32).ravel()

    def act(self, obs: Tree, noise: NDArray[np.float64]) -> tuple[Tree, dict[str, NDArray[Any]]]:
        state = np.zeros(len(noise), np.int64)
        for leaf in tree_leaves(obs):
            sixteenths = np.floor(np.asarray(leaf, np.float64) * 16).astype(np.int64)
            state += sixteenths.reshape(len(noise), -1).sum(1)
        state %= len(self._table)
        bounds = self._bounds[state]
        actions = (noise[:, :1] * bounds[:, -1:] >= bounds).sum(1)
        return actions, {"logp": self.logp_table[state, actions], "state": state}
