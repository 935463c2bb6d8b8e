"""Runs with an environment and a network of the user's own: trained, resumed and evaluated, wherever they run."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import ReshapeObservation
from helpers import own_envs, own_parts
from helpers.own_envs import Line, make_line
from helpers.own_parts import TwoHeads, two_heads
from helpers.training_kit import HERE, SMALL, sac, tiny

import rayvec
from rayvec import IMPALAConfig, PPOConfig, TrainConfig
from rayvec.config import dataclass
from rayvec.errors import CheckpointError, ConfigError
from rayvec.training.evaluation import evaluate_run
from rayvec.training.run_dir import load_run

LOCAL_LINE = lambda: Line(4)  # noqa: E731


def local_heads(observation_space: Any, action_space: Any, config: Any) -> torch.nn.Module:
    """Can't be imported by a name once it has been wrapped in a lambda."""
    return TwoHeads(observation_space, action_space, units=6)


LOCAL_HEADS = lambda *args: local_heads(*args)  # noqa: E731


def weights_of(run_dir: Path) -> torch.Tensor:
    weights: torch.Tensor = load_run(run_dir)[1]["weights"]
    return weights


@pytest.mark.parametrize(
    ("env", "name"),
    [
        (Line, "helpers.own_envs:Line"),
        (make_line, "helpers.own_envs:make_line"),
        pytest.param("helpers.own_envs:Line", "helpers.own_envs:Line", marks=pytest.mark.slow),
        (gymnasium.spec("CartPole-v1"), "CartPole-v1"),
    ],
)
def test_an_environment_that_has_a_name_is_found_again(tmp_path: Path, env: Any, name: str) -> None:
    result = rayvec.train(tiny(tmp_path / "a", total_steps=64), env=env)
    config, _ = load_run(result.run_dir)
    assert config.env_id == name
    assert rayvec.resume(result.run_dir).eval_return_mean == result.eval_return_mean
    assert evaluate_run(str(result.run_dir), num_episodes=6).return_mean == result.eval_return_mean


def test_what_has_no_name_is_passed_again(tmp_path: Path) -> None:
    run_dir = tmp_path / "a"
    result = rayvec.train(tiny(run_dir, total_steps=64), env=LOCAL_LINE, network=LOCAL_HEADS)
    for passed, missing in (({}, "network="), ({"env": LOCAL_LINE}, "network="), ({"network": LOCAL_HEADS}, "env=")):
        with pytest.raises(ConfigError, match=f"passed in Python.*{missing}"):
            rayvec.resume(run_dir, **passed)
        with pytest.raises(ConfigError, match=f"passed in Python.*{missing}"):
            evaluate_run(run_dir, **passed)
    again = rayvec.resume(run_dir, env=LOCAL_LINE, network=LOCAL_HEADS)
    assert again.eval_return_mean == result.eval_return_mean
    evaluation = evaluate_run(run_dir, num_episodes=6, env=LOCAL_LINE, network=LOCAL_HEADS)
    assert evaluation.return_mean == result.eval_return_mean and set(evaluation.lens) == {4}
    with pytest.raises(CheckpointError, match="parameters"):
        rayvec.resume(run_dir, env=LOCAL_LINE, network=two_heads)


@pytest.mark.parametrize(
    "where",
    [
        {"workers_per_node": 2},
        {"workers_per_node": 2, "inference": "node"},
        pytest.param({"workers_per_node": 2, "inference": "driver"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", [PPOConfig, IMPALAConfig])
def test_it_is_trained_alike_wherever_it_runs(tmp_path: Path, kind: type[TrainConfig], where: dict[str, Any]) -> None:
    """Where workers act, the next chunk of IMPALA is taken ahead, also in this process."""
    usual: dict[str, Any] = {**SMALL, **HERE, "total_steps": 256, "eval_episodes": 4}
    if kind is IMPALAConfig:
        usual = {"num_envs": 4, "num_steps": 16, "num_minibatches": 2, **HERE, "total_steps": 256}
        usual |= {"prefetch": "inference" not in where}
    results = []
    for name, changes in (("here", {}), ("there", where)):
        config = kind(**{**usual, **changes, "run_dir": tmp_path / name})
        results.append(rayvec.train(config, env=LOCAL_LINE, network=LOCAL_HEADS).eval_return_mean)
    torch.testing.assert_close(weights_of(tmp_path / "there"), weights_of(tmp_path / "here"), atol=1e-6, rtol=0)
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("network", "settings", "text"),
    [
        (own_parts.too_many_outputs, {}, "shape"),
        ("two_heads", {}, "function or class"),
        (lambda *args: two_heads(*args).double(), {}, "torch.float64"),
        (own_parts.frozen_in_float16, {}, r"torch.float16.*module.float\(\)"),
        (lambda *args: two_heads(*args).requires_grad_(False), {}, "at least one parameter"),
        (own_parts.with_spectral_norm, {"num_learners": 2, "inference": "driver"}, "(?s)by pickling.*learners="),
    ],
)
def test_a_network_that_cannot_work_is_refused_before_the_run_begins(
    tmp_path: Path, network: Any, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises((ConfigError, TypeError), match=text):
        rayvec.train(tiny(tmp_path / "a", **settings), env=Line, network=network)
    assert not list(tmp_path.iterdir())


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


in_bfloat16 = partial(torch.autocast, "cpu", torch.bfloat16)


@pytest.mark.parametrize("config", [tiny(Path()), sac(Path(), learning_starts=512)], ids=["ppo", "sac"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, in_bfloat16, in_float64])
def test_modes_of_torch_in_the_script_change_nothing(tmp_path: Path, config: Any, mode: Any) -> None:
    config = replace(config, total_steps=1024, eval_episodes=1)
    rayvec.train(replace(config, run_dir=tmp_path / "usual"))
    with mode():
        dtype = torch.get_default_dtype()
        rayvec.train(replace(config, run_dir=tmp_path / "a"))
        rayvec.load(tmp_path / "a").predict(np.zeros(4))
        assert torch.get_default_dtype() == dtype
    assert torch.equal(weights_of(tmp_path / "a"), weights_of(tmp_path / "usual"))


def test_of_trainings_that_overlap_the_last_one_restores_the_default_dtype(tmp_path: Path) -> None:
    """The first one ends, by an error, while the other one trains."""
    began, goes_on, dtypes = threading.Event(), threading.Event(), []

    def waits(context: rayvec.RunContext) -> None:
        began.set()
        goes_on.wait(60)
        dtypes.append(torch.get_default_dtype())

    def fails(context: rayvec.RunContext) -> None:
        other.start()
        began.wait(60)
        raise RuntimeError

    run = partial(rayvec.train, tiny(tmp_path / "other"), callbacks=[SimpleNamespace(on_start=waits)])
    other = threading.Thread(target=run)
    with in_float64():
        with pytest.raises(RuntimeError):
            rayvec.train(tiny(tmp_path / "a"), callbacks=[SimpleNamespace(on_start=fails)])
        goes_on.set()
        other.join()
        assert [*dtypes, torch.get_default_dtype()] == [torch.float32, torch.float64]


@dataclass(frozen=True, kw_only=True)
class NotRegistered(PPOConfig):
    pass


@pytest.mark.parametrize("config", ["CartPole-v1", None, PPOConfig, TrainConfig(), NotRegistered()])
def test_what_is_no_settings_of_a_learner_and_no_environment(config: Any) -> None:
    with pytest.raises(ConfigError, match="must be an object of PPOConfig"):
        rayvec.train(config)
    for env in (["CartPole-v1"], 7):
        with pytest.raises(ConfigError, match="env is"):
            rayvec.train(PPOConfig(), env=env)


def test_a_run_whose_environment_has_changed(tmp_path: Path) -> None:
    rayvec.train(tiny(tmp_path / "a", total_steps=128, eval_interval_steps=64, eval_episodes=2), env=LOCAL_LINE)
    env = lambda: ReshapeObservation(Line(), (2, 1))  # noqa: E731
    for refused in (
        lambda: rayvec.resume(tmp_path / "a", env=env),
        lambda: rayvec.resume(tmp_path / "a", env=env, num_learners=2, learners="decentralized"),
        lambda: evaluate_run(tmp_path / "a", env=env),
        lambda: evaluate_run(tmp_path / "a", checkpoint="best.pt", env=env),
    ):
        with pytest.raises(ConfigError, match=r"began with.*\(2,\).*same spaces"):
            refused()


@pytest.mark.parametrize(
    ("high", "settings", "warned"),
    [(500, {}, True), (500, {"normalize_obs": True}, False), (100, {}, False), (np.inf, {}, False)],
)
def test_a_wide_range_is_warned_of(tmp_path: Path, high: float, settings: dict[str, Any], warned: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = tiny(tmp_path / "a", total_steps=64, eval_episodes=0, **settings)
        rayvec.train(config, env=lambda: own_envs.Line(high=high))
    assert ["±500" in str(each.message) for each in caught] == ([True] if warned else [])
