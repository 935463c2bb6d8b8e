"""Settings survive the way to YAML and back, and refuse what can't work in words that help; plugins; presets."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from helpers.training_kit import HERE, SMALL, options
from hypothesis import given, strategies as st

import rayvec
import rayvec.config
from rayvec import IMPALAConfig, PPOConfig, SACConfig, TrainConfig
from rayvec.cli import main
from rayvec.config import ADJUSTABLE, CONFIGS
from rayvec.config.presets import PRESETS
from rayvec.config.schema import docs_of, fields_of
from rayvec.errors import ConfigError
from rayvec.learners.ppo import PPOLearner
from rayvec.training.runs import register, with_own_parts

GRU = {"recurrent": "gru"}

numbers_as_text = st.from_regex(r"[-+0-9.:eE_xo]{1,6}", fullmatch=True)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), numbers_as_text)

ppo_configs = st.builds(
    PPOConfig,
    env_id=st.text(min_size=1),
    env_kwargs=st.dictionaries(st.text(), scalars | st.lists(scalars, max_size=2), max_size=3),
    total_steps=st.integers(1, 10**12),
    seed=st.integers(0, 2**32 - 1),
    run_dir=st.none() | st.text("abc/ .é", min_size=1).map(Path),
    num_nodes=st.none() | st.integers(0, 100),
    address=st.none() | st.text(),
    inference=st.sampled_from(["worker", "driver", "node"]),
    learning_rate=st.floats(1e-12, 1e3) | st.lists(st.floats(0, 1), min_size=2, max_size=3).map(tuple),
    learning_rate_schedule=st.sampled_from(["linear", "cosine", "constant"]),
    gamma=st.floats(0, 1),
    target_kl=st.none() | st.floats(1e-9, 10),
    hidden_sizes=st.lists(st.integers(1, 999), max_size=4).map(tuple),
)


@given(ppo_configs)
def test_round_trip_through_yaml(config: PPOConfig) -> None:
    assert TrainConfig.from_yaml(config.to_yaml()) == config


def test_yaml_explains_every_setting() -> None:
    text = PPOConfig().to_yaml()
    assert list(yaml.safe_load(text)) == ["algorithm", *fields_of(PPOConfig)]
    for doc in docs_of(PPOConfig).values():
        first_words = " ".join(doc.split()[:3])
        assert f"# {first_words}" in text


def test_every_setting_is_described() -> None:
    for cls in CONFIGS.values():
        docs = docs_of(cls)
        assert set(docs) == {each.name for each in dataclasses.fields(cls)} == set(fields_of(cls))
        assert all(doc.endswith(".") and "\n" not in doc for doc in docs.values())


@pytest.mark.parametrize(
    ("cls", "settings", "expected"),
    [
        (PPOConfig, {"num_envs": 0}, "greater than or equal to 1"),
        (PPOConfig, {"num_nodes": -1}, "greater than or equal to 0 or Input should be a valid tuple"),
        (PPOConfig, {"num_nodes": (2, 1)}, "1 <= min <= max"),
        (PPOConfig, {"num_nodes": (1, 17)}, "at most num_envs = 16"),
        (PPOConfig, {"gae_lambda": float("nan")}, "a finite number"),
        (PPOConfig, {"learning_rate": 0.0}, "greater than 0"),
        (PPOConfig, {"learning_rate": "fast"}, "a valid number"),
        (PPOConfig, {"hidden_sizes": "64"}, "tuple"),
        (PPOConfig, {"clip_value_loss": 2}, "a valid boolean"),
        (PPOConfig, {"compile": "maybe"}, "'auto' or Input should be a valid boolean"),
        (PPOConfig, {"env_id": ""}, "at least 1 item"),
        (PPOConfig, {"env_kwargs": {"map": [[1]]}}, "a valid boolean"),
        (PPOConfig, {"network": len}, "rayvec.train(config, env=..., network="),
        (PPOConfig, {"env_kwargs": {"config": {"lanes": 3}}}, "Pass objects to rayvec.train"),
        (PPOConfig, {"preset": "mujoko"}, "'classic', 'box2d', 'mujoco'"),
        (SACConfig, {"preset": "atari"}, "sac has the presets none, classic, box2d, mujoco"),
        (PPOConfig, {"lr": 1, "total_timesteps": 2}, "Did you mean learning_rate for lr and total_steps for total_"),
        (SACConfig, {"buffer_size": 3, "lr": 1}, "Did you mean replay_size for buffer_size and policy_lr for lr?"),
        (IMPALAConfig, {"clip_range": 1}, "no setting clip_range. Correct it, or leave it out."),
        (PPOConfig, {"num_envs": 4, "num_steps": 8, "minibatch_size": 33}, "at most num_envs * num_steps = 32"),
        (PPOConfig, {"minibatch_size": 1}, "minibatches of one step"),
        (PPOConfig, {"num_envs": 1, "num_steps": 7, "minibatch_size": 2}, "minibatches of one step"),
        (PPOConfig, {**GRU, "num_envs": 1, "num_steps": 33, "minibatch_size": 16}, "minibatches of one step"),
        (PPOConfig, {**GRU, "num_steps": 64, "sequence_length": 65}, "at most num_steps = 64"),
        (PPOConfig, {**GRU, "minibatch_size": 31, "num_learners": 2}, "at least sequence_length * num_learners = 32"),
        (PPOConfig, {"num_envs": 4, "num_learners": 5}, "at most num_envs = 4"),
        (PPOConfig, {"minibatch_size": 3, "num_learners": 4}, "at most minibatch_size = 3"),
        (PPOConfig, {"learners": "driver", "num_learners": 2}, "num_learners=2 was passed with learners='driver'"),
        (PPOConfig, {"eval_interval_steps": 10, "eval_episodes": 0}, "eval_episodes of at least 1"),
        (IMPALAConfig, {"learners": "decentralized", "prefetch": True}, "prefetch=True was passed with"),
        (IMPALAConfig, {"num_envs": 4, "num_minibatches": 5}, "at most num_envs = 4"),
        (SACConfig, {"batch_size": 3, "num_learners": 4}, "at most batch_size = 3"),
        (SACConfig, {"replay_size": 100, "batch_size": 101}, "at most replay_size = 100"),
        (SACConfig, {"total_steps": 16, "learning_starts": 16}, "below total_steps = 16"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(cls: Any, settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cls(**settings)
    assert any(name in str(caught.value) for name in settings)
    assert expected in str(caught.value)


def test_numbers_of_other_kinds_become_ours() -> None:
    config = PPOConfig(num_envs=np.int64(8), gamma=np.float32(0.5), learning_rate=1, hidden_sizes=[32], run_dir="x")
    assert PPOConfig(normalize_obs=np.True_).normalize_obs is True  # type: ignore[arg-type]
    assert type(config.num_envs) is int and type(config.gamma) is float and type(config.learning_rate) is float
    assert config.hidden_sizes == (32,) and config.run_dir == Path("x")


@pytest.mark.parametrize(
    ("number", "value"), [("1e-3", 1e-3), ("1.0e-3", 1e-3), ("5.", 5.0), (".5", 0.5), ("012", 12.0), ("1_000", 1000.0)]
)
def test_numbers_are_those_of_yaml_1_2(number: str, value: float) -> None:
    assert TrainConfig.from_yaml(f"algorithm: ppo\nlearning_rate: {number}").learning_rate == value


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("- a list", "the algorithm None"),
        ("algorithm: magic", "magic"),
        ("num_envs: 3", "None"),
        ("a: [", "while parsing"),
        ("algorithm: ppo\nlerning_rate: 1.0", "lerning_rate"),
        ("algorithm: [ppo]", r"\['ppo'\]"),
        ("algorithm: ppo\nplugin: 3", "plugin is 3"),
        ("algorithm: ppo\nplugin: os", "plugin is os"),
        ("algorithm: ppo\nnum_nodes: 1:4:9", "num_nodes is 1:4:9"),
        ("algorithm: ppo\ntotal_step: 1", "total_step. Did you mean total_steps"),
    ],
)
def test_other_files_are_refused(text: Any, got: str) -> None:
    with pytest.raises(ConfigError, match=got):
        TrainConfig.from_yaml(text)


@given(st.integers(0, 2**32 - 1), st.integers(0, 10**15), st.integers(0, 2**20 - 1))
def test_seeds_of_evaluation_and_training_never_meet(seed: int, steps: int, env_index: int) -> None:
    config = PPOConfig(seed=seed)
    assert 0 <= config.train_seed(steps) + env_index < 2**30
    assert 2**30 <= config.eval_seed() + env_index < 2**31


def test_own_settings_are_checked() -> None:
    @rayvec.config.dataclass(frozen=True, kw_only=True)
    class Mine(TrainConfig):
        width: int = 3

    assert "width" not in docs_of(Mine) and docs_of(Mine)["seed"] and "width: 3" in Mine().to_yaml()
    for wrong in ({"width": "wide"}, {"num_envs": 0}, {"num_learners": 99}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} is"):
            Mine(**wrong)  # type: ignore[arg-type]

    @rayvec.config.dataclass(frozen=True, kw_only=True)
    class Deep(TrainConfig):
        depth: int

    with pytest.raises(ConfigError, match=r"depth is missing\. Pass it: it has no default"):
        Deep()  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"rayvec\.config\.dataclass"):
        register(dataclasses.dataclass(frozen=True, kw_only=True)(type("Plain", (TrainConfig,), {})), PPOLearner)


def test_a_run_may_move_but_not_change() -> None:
    config = PPOConfig(num_nodes=2)
    assert config.adjusted(num_nodes=None, num_learners=3, gamma=config.gamma) == dataclasses.replace(
        config, num_nodes=None, num_learners=3
    )
    with pytest.raises(ConfigError, match=r"gamma is 0\.5, but 0\.98 in the run"):
        config.adjusted(num_nodes=1, gamma=0.5)
    with pytest.raises(ConfigError, match="replay_on_device is True, but 'no such setting'"):
        config.adjusted(replay_on_device=True)
    assert SACConfig().adjusted(replay_on_device=True) == SACConfig(replay_on_device=True)
    assert set(ADJUSTABLE) < {*fields_of(TrainConfig), *fields_of(SACConfig)}


def test_a_range_of_nodes_is_kept() -> None:
    config = PPOConfig(num_nodes=[1, 4])  # type: ignore[arg-type]
    assert TrainConfig.from_yaml("algorithm: ppo\nnum_nodes: 1:4") == config
    assert config.num_nodes == (1, 4) and TrainConfig.from_yaml(config.to_yaml()) == config
    assert config.adjusted(num_nodes=2).num_nodes == 2


PLUGIN = "helpers.plugin_algorithm"
TINY = [*options({**SMALL, **HERE}), "--total-steps=64", "--eval-episodes=2"]


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Forgets the algorithm, as a process that begins."""
    yield
    CONFIGS.pop("plugged", None)
    sys.modules.pop(PLUGIN, None)


@pytest.mark.parametrize(
    "line",
    [
        "--plugin {0} train plugged",
        pytest.param("train --plugin {0} plugged", marks=pytest.mark.slow),
        pytest.param("train plugged --plugin={0}", marks=pytest.mark.slow),
    ],
)
def test_it_may_stand_anywhere(tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "a"
    assert main([*line.format(PLUGIN).split(), *TINY, "--bonus=2", f"--run-dir={run_dir}"]) == 0
    assert "algorithm: plugged" in (run_dir / "config.yaml").read_text()
    CONFIGS.pop("plugged")
    sys.modules.pop(PLUGIN)
    assert main(["eval", str(run_dir), "--episodes=2"]) == 0  # which finds the plugin in the run's settings
    assert main(["train", "--plugin", PLUGIN, "plugged", "--resume", str(run_dir)]) == 0
    assert main(["train", "--plugin", PLUGIN, "plugged", *TINY, f"--run-dir={run_dir}"]) == 2
    assert f"rayvec train plugged --plugin {PLUGIN} --resume {run_dir}" in capsys.readouterr().err


def test_a_module_of_the_working_directory(tmp_path: Path) -> None:
    """In a process of its own, whose path does not name that directory."""
    (tmp_path / "mine.py").write_text(f"import {PLUGIN}\n")
    code = "import sys; sys.path = [p for p in sys.path if p]; from rayvec.cli import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", code, "train", "--plugin", "mine", "plugged", "--help"]
    paths = [path for path in sys.path if path]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": ":".join(paths)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "--bonus" in done.stdout, done.stderr


def test_one_that_can_not_be_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--plugin", "no_such_module", "plugged"]) == 2
    assert "The plugin 'no_such_module' can't be imported (ModuleNotFoundError" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="plugin 'no_such_module'"):
        TrainConfig.from_plain({"algorithm": "plugged", "plugin": ["no_such_module"]})
    with pytest.raises(ConfigError, match="plugin 'no_such_module'"):
        rayvec.train(rayvec.PPOConfig(plugin=("no_such_module",), run_dir=tmp_path / "a"))
    assert not (tmp_path / "a").exists()


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


def test_what_is_passed_counts_before_a_preset_and_an_environment_before_its_kind() -> None:
    assert PPOConfig(gamma=0.99).gamma == 0.99
    assert PPOConfig(env_id="Pendulum-v1").gamma == PRESETS["ppo"]["Pendulum"]["gamma"] == 0.9
    assert PPOConfig(env_id="Pendulum-v1", gamma=0.95).gamma == 0.95
    assert PPOConfig().preset == "classic" and PPOConfig().num_epochs == PRESETS["ppo"]["CartPole"]["num_epochs"] == 2
    assert PPOConfig(env_id="Maze-v0", preset="classic").gamma == 0.98
    assert not PPOConfig().normalize_reward and PPOConfig(recurrent="gru").normalize_reward
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
    for passed in (
        {},
        {"learning_rate": 1e-5, "num_envs": 16},
        {"preset": "none"},
        {"preset": "none", "learning_rate": 8e-3},
        {"preset": "none", "env_id": "HalfCheetah-v5", "num_envs": 8},
        {"preset": "mujoco", "env_id": "Maze-v1", "num_epochs": 4},
        {"env_id": "HalfCheetah-v5"},
    ):
        config = PPOConfig(**passed)  # type: ignore[arg-type]
        for each in (replace(config, seed=config.seed), TrainConfig.from_yaml(config.to_yaml())):
            ours, theirs = (with_own_parts(some, "Maze-v0") for some in (config, each))
            assert ours == theirs and ours.preset == passed.get("preset", "none")


def test_an_environment_that_is_passed_brings_its_own_preset() -> None:
    """`train(PPOConfig(), env=...)` has the settings of `PPOConfig(env_id=...)`, not those of the default CartPole."""
    given = PPOConfig(num_epochs=3)
    other = with_own_parts(given, "HalfCheetah-v5")
    assert other == PPOConfig(env_id="HalfCheetah-v5", num_epochs=3) and other.preset == "mujoco"
    own = with_own_parts(given, lambda: None)
    assert (own.preset, own.gamma, own.num_epochs) == ("none", 0.99, 3)
    assert with_own_parts(PPOConfig(preset="classic"), lambda: None).gamma == 0.98
    assert PPOConfig(env_id="my:Ant").preset == "none"
