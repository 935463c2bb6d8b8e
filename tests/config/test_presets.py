"""Presets: which one applies, what counts before it, and where it is written down."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from rayvec import IMPALAConfig, PPOConfig, SACConfig, TrainConfig
from rayvec.config import CONFIGS, dataclass
from rayvec.config.presets import PRESETS
from rayvec.errors import ConfigError
from rayvec.training.runs import with_own_parts

CLEANRL = {
    "num_steps": 128,
    "learning_rate": 2.5e-4,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "num_epochs": 4,
    "minibatch_size": 256,
    "clip_coef": 0.2,
    "clip_value_loss": True,
    "entropy_coef": 0.01,
    "value_coef": 0.5,
    "max_grad_norm": 0.5,
    "learning_rate_schedule": "linear",
    "normalize_advantage": True,
}


@pytest.mark.parametrize(
    ("kind", "env_id", "preset"),
    [
        (PPOConfig, "Acrobot-v1", "classic"),
        (PPOConfig, "LunarLander-v3", "box2d"),
        (PPOConfig, "HalfCheetah-v5", "mujoco"),
        (PPOConfig, "gymnasium.envs.mujoco:Hopper-v4", "mujoco"),
        (PPOConfig, "ale_py:ALE/Breakout-v5", "atari"),
        (SACConfig, "ale_py:ALE/Breakout-v5", "none"),
        (IMPALAConfig, "LunarLander-v3", "box2d"),
        (PPOConfig, "MyCartPole-v1", "none"),
        (PPOConfig, "Acrobot", "classic"),
        (PPOConfig, "module:Class", "none"),
        (PPOConfig, "module:CartPole", "none"),
    ],
)
def test_the_preset_of_an_environment_applies_by_itself(kind: Any, env_id: str, preset: str) -> None:
    config = kind(env_id=env_id)
    assert config.preset == preset
    for name, value in PRESETS[kind.algorithm].get(preset, {}).items():
        assert getattr(config, name) == value


def test_settings_for_atari_are_those_of_cleanrl() -> None:
    config = PPOConfig(env_id="ale_py:ALE/Breakout-v5", clip_coef=0.2)
    assert {name: getattr(config, name) for name in CLEANRL} == CLEANRL


def test_what_is_passed_counts_before_a_preset_and_an_environment_before_its_kind() -> None:
    assert PPOConfig(gamma=0.99).gamma == 0.99
    assert PPOConfig(env_id="Pendulum-v1").gamma == PRESETS["ppo"]["Pendulum"]["gamma"] == 0.9
    assert PPOConfig(env_id="Pendulum-v1", gamma=0.95).gamma == 0.95
    assert PPOConfig().preset == "classic" and PPOConfig().num_epochs == PRESETS["ppo"]["CartPole"]["num_epochs"] == 2
    assert PPOConfig(env_id="Maze-v0", preset="classic").gamma == 0.98
    assert PPOConfig(env_id="Pendulum-v1", preset="mujoco").gamma == 0.99
    assert PPOConfig(env_id="Pendulum").gamma == 0.9  # Gymnasium takes the newest version
    for name in ("m:CartPole", "mujoco-v0"):  # names in the table of presets
        assert PPOConfig(env_id=name).learning_rate == PPOConfig(preset="none").learning_rate


@pytest.mark.parametrize("kind", [PPOConfig, SACConfig, IMPALAConfig])
def test_every_preset_is_valid_and_goes_through_yaml_pickle_and_replace(kind: Any) -> None:
    for preset in ("none", *(name for name in PRESETS[kind.algorithm] if name.islower())):
        config = kind(env_id="Maze-v0", preset=preset)
        assert TrainConfig.from_yaml(config.to_yaml()) == config == pickle.loads(pickle.dumps(config))
        assert replace(config, seed=2, env_id="CartPole-v1") == replace(config, env_id="CartPole-v1", seed=2)
        assert replace(config, env_id="CartPole-v1").preset == preset


def test_a_copy_of_settings_leaves_the_preset_with_its_environment_too() -> None:
    for given in (
        {},
        {"learning_rate": 1e-5, "num_envs": 16},
        {"preset": "none"},
        {"preset": "none", "learning_rate": 8e-3},
        {"preset": "none", "env_id": "HalfCheetah-v5", "num_envs": 8},
        {"preset": "mujoco", "env_id": "Maze-v1", "num_epochs": 4},
        {"env_id": "HalfCheetah-v5"},
    ):
        config = PPOConfig(**given)  # type: ignore[arg-type]
        for each in (replace(config, seed=config.seed), TrainConfig.from_yaml(config.to_yaml())):
            ours, theirs = (with_own_parts(some, "Maze-v0") for some in (config, each))
            assert ours == theirs and ours.preset == given.get("preset", "none")


def test_an_algorithm_of_ones_own_has_no_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Own(TrainConfig):
        algorithm: ClassVar[str] = "own"

    monkeypatch.setitem(CONFIGS, "own", Own)
    assert Own().preset == "none"
    with pytest.raises(ConfigError, match=r"preset is classic\. own has the presets none\."):
        Own(preset="classic")


def test_an_environment_that_is_passed_brings_its_own_preset() -> None:
    """`train(PPOConfig(), env=...)` has the settings of `PPOConfig(env_id=...)`, not those of the default CartPole."""
    given = PPOConfig(num_epochs=3)
    other = with_own_parts(given, "HalfCheetah-v5")
    assert other == PPOConfig(env_id="HalfCheetah-v5", num_epochs=3) and other.preset == "mujoco"
    own = with_own_parts(given, lambda: None)
    assert (own.preset, own.gamma, own.num_epochs) == ("none", 0.99, 3)
    assert with_own_parts(PPOConfig(preset="classic"), lambda: None).gamma == 0.98
    assert PPOConfig(env_id="my:Ant").preset == "none"
