"""An agent acts as the run's policy does, without Ray, and so do the files that it is exported to."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from helpers import own_parts
from helpers.training_kit import tiny

import rayvec
from rayvec.config.references import refer
from rayvec.errors import CheckpointError, ConfigError
from rayvec.training.agent import Agent
from rayvec.training.checkpoint import spaces_from_bytes, spaces_to_bytes
from rayvec.training.environments import make_env
from rayvec.training.evaluation import greedy_policy
from rayvec.training.run_dir import load_run
from rayvec.training.runs import LEARNERS, network_of

HAS_DTYPE = "dtype" in inspect.signature(spaces.Discrete).parameters  # newer versions of Gymnasium
VECTOR = spaces.Box(-3, 3, (5,))
IMAGE = spaces.Box(0, 255, (40, 36, 3), np.uint8)
FEW, TORQUES = spaces.Discrete(3, start=2), spaces.Box(np.array([-2, -1], np.float32), np.array([2, 4], np.float32))
MANY = spaces.MultiDiscrete([2, 4, 3])
BOTH = spaces.Dict({"camera": IMAGE, "joints": spaces.Box(-1, 1, (2, 2), np.float64), "gear": spaces.Discrete(3)})
MASKED = spaces.Dict({"observation": VECTOR, "action_mask": spaces.MultiBinary(9)})
KINDS: list[tuple[Any, Any, Any, dict[str, Any]]] = [
    (rayvec.PPOConfig, VECTOR, FEW, {"normalize_obs": True}),
    (rayvec.PPOConfig, VECTOR, TORQUES, {"shared_trunk": True}),
    (rayvec.PPOConfig, IMAGE, FEW, {}),
    (rayvec.PPOConfig, BOTH, MANY, {"normalize_obs": True}),
    (rayvec.IMPALAConfig, VECTOR, spaces.MultiBinary(3), {}),
    (rayvec.SACConfig, VECTOR, TORQUES, {}),
    (rayvec.PPOConfig, spaces.Box(0, 255, (9,), np.uint8), FEW, {"activation": "gelu", "layer_norm": True}),
    (rayvec.SACConfig, spaces.Tuple((spaces.Discrete(4, start=-1), VECTOR)), FEW, {}),
    (rayvec.PPOConfig, VECTOR, FEW, {"network": refer(own_parts.two_heads)}),
    (rayvec.PPOConfig, MASKED, MANY, {}),
    (rayvec.SACConfig, VECTOR, TORQUES, {"network": refer(own_parts.actor_and_critics)}),
    (rayvec.IMPALAConfig, spaces.Box(-(2**40), 2**40, (2,), np.int64), TORQUES, {"normalize_obs": True}),
]


every_kind = pytest.mark.parametrize(
    ("kind", "observation_space", "action_space", "settings"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (i not in (0, 6, 7))) for i, case in enumerate(KINDS)],
)


def make_agent(kind: Any, observation_space: Any, action_space: Any, settings: dict[str, Any]) -> Agent:
    """Returns an agent with weights whose every part matters."""
    config = kind(seed=3, **settings)
    weights = LEARNERS[kind](observation_space, action_space, config).weights()
    weights = weights + np.random.default_rng(3).normal(0, 0.05, weights.shape).astype(np.float32)
    return Agent(config, observation_space, action_space, weights)


def batch_of(space: Any, count: int) -> Any:
    space.seed(5)
    batch = gymnasium.vector.utils.concatenate(
        space, [space.sample() for _ in range(count)], gymnasium.vector.utils.create_empty_array(space, count)
    )
    if space is MASKED:
        batch["action_mask"][:, [0, 2, 6]] = 1  # at least the first choice of each component
    return batch


def leaves_of(batch: Any) -> dict[str, np.ndarray]:
    if not isinstance(batch, dict | tuple):
        return {"obs": batch}
    items = batch.items() if isinstance(batch, dict) else enumerate(batch)
    return {str(key): part for key, part in items}


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_onnx_of_a_policy_with_memory_takes_and_returns_its_state(cell: Any, tmp_path: Path) -> None:
    import onnxruntime

    agent = make_agent(rayvec.PPOConfig, VECTOR, FEW, {"recurrent": cell, "recurrent_size": 8, "normalize_obs": True})
    session = onnxruntime.InferenceSession(agent.export(tmp_path / "policy.onnx"))
    obs = batch_of(VECTOR, 5)
    _, state = agent.predict(obs)
    given = np.zeros_like(state)
    for step in range(3):
        actions, given = session.run(["action", "next_state"], {"obs": obs + step, "state": given})
        expected, state = agent.predict(obs + step, None if step == 0 else state)
        np.testing.assert_array_equal(actions, expected)
        np.testing.assert_allclose(given, state, atol=1e-5)


def test_an_agent_chooses_several_parts(tmp_path: Path) -> None:
    parts = spaces.Dict(gear=FEW, torques=TORQUES, flags=spaces.Tuple([spaces.MultiBinary(2)]))
    agent = make_agent(rayvec.PPOConfig, VECTOR, parts, {})
    obs = batch_of(VECTOR, 3)
    for deterministic in (True, False):
        several = agent.predict(obs, deterministic=deterministic)
        assert several["torques"].shape == (3, 2) and several["flags"][0].shape == (3, 2)
        assert agent.predict(obs[0], deterministic=deterministic) in parts
    with pytest.raises(ConfigError, match="actions are one array"):
        agent.export(tmp_path / "policy.onnx")


@every_kind
def test_onnx_acts_as_the_agent(
    kind: Any, observation_space: Any, action_space: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    import onnxruntime

    agent = make_agent(kind, observation_space, action_space, settings)
    session = onnxruntime.InferenceSession(agent.export(tmp_path / "policy.onnx"))
    for count in (1, 7):
        batch = batch_of(observation_space, count)
        inputs = leaves_of(batch)
        assert [each.name for each in session.get_inputs()] == list(inputs)
        (actions,), expected = session.run(["action"], inputs), agent.predict(batch)
        np.testing.assert_allclose(actions, expected, atol=1e-5, rtol=0)
        assert actions.dtype == expected.dtype


@every_kind
def test_one_observation_gets_the_action_of_its_row(
    kind: Any, observation_space: Any, action_space: Any, settings: dict[str, Any]
) -> None:
    agent = make_agent(kind, observation_space, action_space, settings)
    several = batch_of(observation_space, 3)
    single = next(
        iter(gymnasium.vector.utils.iterate(gymnasium.vector.utils.batch_space(observation_space, 3), several))
    )
    assert action_space.contains(agent.predict(single))
    np.testing.assert_allclose(agent.predict(single), agent.predict(several)[0], atol=1e-5)
    drawn = [agent.predict(single, deterministic=False) for _ in range(30)]
    assert all(action_space.contains(each) for each in drawn) and len({str(each) for each in drawn}) > 1
    again = make_agent(kind, observation_space, action_space, settings)
    assert str([again.predict(single, deterministic=False) for _ in range(30)]) == str(drawn)


WITHOUT_RAY = """
import sys
import gymnasium
import rayvec
agent = rayvec.load(sys.argv[1])
env = gymnasium.make("CartPole-v1")
obs, _ = env.reset(seed=1)
for _ in range(6):
    obs, _, is_done, _, _ = env.step(agent.predict(obs))
    assert not is_done
assert "ray" not in sys.modules
"""


def test_a_loaded_agent_is_the_policy_that_was_evaluated(tmp_path: Path) -> None:
    """It plays without Ray, in a process of its own."""
    settings = {"normalize_obs": True, "eval_interval_steps": 128, "total_steps": 320}
    config = tiny(tmp_path / "a", **settings)
    rayvec.train(config, callbacks=[rayvec.CheckpointHistory(128)])
    agent = rayvec.load(tmp_path / "a")
    obs = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    with make_env(config) as env:
        module = network_of(config, env.single_observation_space, env.single_action_space)
    policy = greedy_policy(module, load_run(tmp_path / "a")[1]["weights"].numpy())
    np.testing.assert_array_equal(agent.predict(obs), policy.act(obs, np.zeros((50, 0)))[0])
    np.testing.assert_array_equal(agent.predict(obs.tolist()), agent.predict(obs))
    assert agent.observation_space == gymnasium.make("CartPole-v1").observation_space
    for name in ("best.pt", "checkpoints/000000000256.pt"):
        assert rayvec.load(tmp_path / "a", name).predict(obs).shape == (50,)
    subprocess.run([sys.executable, "-c", WITHOUT_RAY, str(tmp_path / "a")], check=True)


def test_what_cannot_be_loaded_or_acted_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        rayvec.load(tmp_path)
    rayvec.train(tiny(tmp_path / "a", total_steps=64, eval_episodes=0))
    with pytest.raises(CheckpointError, match=r"best\.pt"):
        rayvec.load(tmp_path / "a", "best.pt")
    agent = rayvec.load(tmp_path / "a")
    for wrong in (np.zeros(3), np.zeros((2, 3)), np.zeros((2, 2, 4)), "left", ["a"] * 4, None, {"obs": np.zeros(4)}):
        with pytest.raises(ConfigError, match="one more dimension"):
            agent.predict(wrong)
    chooser = make_agent(rayvec.PPOConfig, spaces.Tuple((FEW, VECTOR)), FEW, {})
    small = make_agent(rayvec.PPOConfig, spaces.Box(0, 255, (2,), np.uint8), FEW, {})
    bits = make_agent(rayvec.PPOConfig, spaces.MultiBinary(2), FEW, {})
    for actor, numbers in (
        (agent, [0, 0, 0, math.nan]),
        (agent, np.full((2, 4), np.inf)),
        (chooser, (FEW.start + FEW.n, np.zeros(VECTOR.shape))),
        (chooser, (FEW.start - 1, np.zeros(VECTOR.shape))),
        (small, [300, 0]),
        (small, np.array([255, -1])),
        (bits, [0, 2]),
    ):
        with pytest.raises(ConfigError, match=r"a number that no observation has\. Pass numbers of .* from .* to"):
            actor.predict(numbers)
    counter = make_agent(rayvec.PPOConfig, FEW, FEW, {})
    for actor, kind in ((counter, 3.7), (counter, "3"), (agent, ["1"] * 4), (counter, 2**70)):
        with pytest.raises(ConfigError, match="not of a kind"):
            actor.predict(kind)
    with pytest.raises(ConfigError, match=r"\.onnx"):
        agent.export(tmp_path / "policy.h5")


@pytest.mark.parametrize(
    "space",
    [
        *(VECTOR, IMAGE, FEW, TORQUES, MANY, BOTH, spaces.MultiBinary((2, 3)), spaces.Tuple((FEW, BOTH))),
        spaces.Box(0, np.iinfo(np.uint64).max, (2,), np.uint64),  # beyond int64
        pytest.param(spaces.Discrete(3, dtype=np.int32) if HAS_DTYPE else FEW, id="Discrete of int32"),
        spaces.Dict(z=FEW, a=spaces.Dict(y=VECTOR, b=spaces.MultiBinary(3))),  # not in the order of the alphabet
    ],
    ids=lambda space: type(space).__name__,
)
def test_spaces_survive_a_checkpoint(space: Any) -> None:
    [again] = spaces_from_bytes(spaces_to_bytes(space))
    assert again == space and again.dtype == space.dtype
    assert str(again) == str(space)  # networks read the parts in this order, which == does not compare
    assert spaces_to_bytes(spaces.Tuple((space, spaces.Sequence(space)))) is None
