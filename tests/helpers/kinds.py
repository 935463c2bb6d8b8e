"""Spaces of every kind, and ways to hold two pools or two vector environments against each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from helpers.exact import SpaceEnv, WordSpace
from helpers.testing import assert_identical

ARRAY_SPACES: dict[str, spaces.Space[Any]] = {
    "box32": spaces.Box(-1.0, 1.0, (3,), np.float32),
    "box64": spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
    "image": spaces.Box(0, 255, (8, 6, 3), np.uint8),
    "zero_d": spaces.Box(-1.0, 1.0, (), np.float32),
    "no_numbers": spaces.Box(-1.0, 1.0, (0,), np.float32),
    "int8": spaces.Box(-5, 5, (2,), np.int8),
    "discrete": spaces.Discrete(5, start=-2),
    "multidiscrete": spaces.MultiDiscrete([3, 4]),
    "multidiscrete_2d": spaces.MultiDiscrete([[2, 3], [4, 5]]),
    "multibinary": spaces.MultiBinary((2, 3)),
    "dict": spaces.Dict({"b": spaces.Discrete(3), "a": spaces.Box(-1.0, 1.0, (2,), np.float64)}),
    "tuple": spaces.Tuple((spaces.Discrete(3, start=1), spaces.MultiBinary(4))),
    "nested": spaces.Dict(
        {
            "z": spaces.Tuple((spaces.Box(0, 9, (1, 2), np.int16), spaces.Dict({"x": spaces.Discrete(2)}))),
            "y": spaces.Dict({"image": spaces.Box(0, 255, (3, 3), np.uint8), "zero_d": spaces.Box(0.0, 1.0, ())}),
        }
    ),
}
OBJECT_SPACES: dict[str, spaces.Space[Any]] = {
    "text": spaces.Text(5),
    "graph": spaces.Graph(spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(3)),
    "sequence": spaces.Sequence(spaces.Box(0.0, 1.0, (2,), np.float32)),
    "stacked": spaces.Sequence(spaces.Discrete(4), stack=True),
    "oneof": spaces.OneOf((spaces.Discrete(3), spaces.Box(0.0, 1.0, (2,), np.float64))),
    "custom": WordSpace(),
    "dict_of_text": spaces.Dict({"mission": spaces.Text(4), "image": spaces.Box(0, 255, (2, 2), np.uint8)}),
    "tuple_of_objects": spaces.Tuple((spaces.Text(3), spaces.Discrete(2), WordSpace("xy"))),
}
ALL_SPACES = ARRAY_SPACES | OBJECT_SPACES
MODES = list(AutoresetMode)


def env_fns(
    count: int, observation: spaces.Space[Any], action: spaces.Space[Any] | None = None, **kwargs: Any
) -> list[Callable[[], gymnasium.Env[Any, Any]]]:
    """Returns `count` ways to make a :class:`SpaceEnv`."""
    return [partial(SpaceEnv, observation, action, **kwargs)] * count


def in_lockstep(
    ours: VectorEnv[Any, Any, Any],
    theirs: SyncVectorEnv,
    num_steps: int,
    seed: Any = 3,
    options: dict[str, Any] | None = None,
) -> int:
    """Steps two vector environments alike and asserts that they answer the same; returns how many episodes ended."""
    for name in ("observation_space", "action_space", "single_observation_space", "single_action_space", "metadata"):
        assert getattr(ours, name) == getattr(theirs, name), name
    mode = theirs.metadata["autoreset_mode"]
    assert_identical(ours.reset(seed=seed, options=deepcopy(options)), theirs.reset(seed=seed, options=options))
    theirs.action_space.seed(11)
    ended = 0
    for t in range(num_steps):
        actions = theirs.action_space.sample()
        expected = theirs.step(actions)
        assert_identical(ours.step(actions), expected, f"step {t}")
        done = expected[2] | expected[3]
        ended += int(done.sum())
        if mode is AutoresetMode.DISABLED and done.any():
            results = [env.reset(options={"reset_mask": done.copy(), "level": 1}) for env in (ours, theirs)]
            assert_identical(*results, f"reset after step {t}")
    return ended


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """Runs what might wait for ever, in a thread, and fails if it does."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, f"not done within {seconds} s"
    value, error = outcome[0]
    if error is not None:
        raise error
    return value
