"""Evaluation during training does not affect training, and is the same wherever it is played."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from helpers.testing import PlainEnv
from helpers.training_kit import HERE, StopsAt, tiny

import rayvec
from rayvec import PPOConfig
from rayvec.cli import main
from rayvec.data import EpisodeStats
from rayvec.errors import ConfigError
from rayvec.training.evaluation import eval_limits, eval_metrics, evaluate_run
from rayvec.training.run_dir import load_run, read_metrics
from rayvec.wrappers import StaggeredStart

SLOW = pytest.mark.slow
EVALUATED = {"eval_interval_steps": 128, "eval_episodes": 3}
WORKERS = {**HERE, "workers_per_node": 2}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ppo": (rayvec.PPOConfig, {"num_steps": 16, "minibatch_size": 32, "normalize_obs": True}),
    "impala": (rayvec.IMPALAConfig, {"num_steps": 16, "num_minibatches": 2, "prefetch": True}),
    "sac": (rayvec.SACConfig, {"num_steps": 8, "learning_starts": 100, "batch_size": 16}),
}
COMMON = {"num_envs": 4, "total_steps": 384, "seed": 5}


def evaluations(run_dir: Path) -> dict[int, float]:
    lines = read_metrics(run_dir / "metrics.jsonl")
    return {line["steps"]: line["eval/return_mean"] for line in lines if "eval/return_mean" in line}


@pytest.mark.parametrize(
    ("name", "where"),
    [("ppo", HERE), pytest.param("impala", WORKERS, marks=SLOW), pytest.param("sac", HERE, marks=SLOW)],
)
def test_what_is_learned_is_the_same(tmp_path: Path, name: str, where: dict[str, Any]) -> None:
    kind, settings = KINDS[name]
    plain = rayvec.train(kind(run_dir=tmp_path / "plain", **COMMON, **settings, **where, eval_episodes=3))
    evaluated = rayvec.train(kind(run_dir=tmp_path / "evaluated", **COMMON, **settings, **where, **EVALUATED))
    weights = [load_run(run.run_dir)[1]["weights"] for run in (plain, evaluated)]
    assert torch.equal(*weights) and plain.eval_return_mean == evaluated.eval_return_mean
    assert list(evaluations(evaluated.run_dir)) == [128, 256]


def test_a_resumed_run_evaluates_at_the_same_steps(tmp_path: Path) -> None:
    rayvec.train(tiny(tmp_path / "a", **EVALUATED), callbacks=[StopsAt(3)])
    rayvec.resume(tmp_path / "a")
    assert list(evaluations(tmp_path / "a")) == [128, 256, 384, 512]


def test_how_many_episodes_an_evaluation_has_and_how_long_they_are() -> None:
    env, found = gymnasium.make("CartPole-v1"), {}
    for limit in (None, -1, 1000, 70_000):
        found[limit] = eval_limits(PPOConfig(total_steps=200_000, env_kwargs={"max_episode_steps": limit}), env)
    assert found == {None: (100, 10_000), -1: (100, 10_000), 1000: (50, 10_000), 70_000: (1, 70_000)}
    longer = PPOConfig(total_steps=10**6, env_kwargs={"max_episode_steps": 1000}, eval_max_episode_steps=10)
    assert eval_limits(longer, env) == (100, 10)
    assert eval_limits(longer, Counts())[0] == 100


def test_limits_are_those_of_the_evaluations_environment(tmp_path: Path) -> None:
    limits = {"env_kwargs": {"max_episode_steps": 10}, "eval_env_kwargs": {"max_episode_steps": 20_000}}
    run = rayvec.train(tiny(tmp_path / "a", **EVALUATED, **limits, total_steps=256))
    assert len(json.loads((run.run_dir / "result.json").read_text())["eval_returns"]) == 50_000 // 20_000


def test_a_metric_of_your_own_does_not_replace_the_return() -> None:
    one = np.ones(1, np.int64)
    found = eval_metrics(EpisodeStats(one, np.ones(1), one, {"return_mean": np.full(1, 5.0)}))
    assert found["eval/return_mean"] == 1.0


def test_an_evaluation_is_not_staggered() -> None:
    env = StaggeredStart(gymnasium.make("Pendulum-v1"))
    for seed, short in ((PPOConfig().eval_seed(), False), (None, False), (5, True)):
        env.reset(seed=seed)
        length = 1
        while not env.step(env.action_space.sample())[3]:
            length += 1
        assert (length < 200) == short
    env.close()


class Counts(PlainEnv):
    """Episodes of some steps, 0 for no end, each with the reward 1, or with that of the action."""

    def __init__(self, length: int = 10, by_action: bool = False) -> None:
        self.length, self.by_action = length, by_action

    def step(self, action: int) -> Any:
        obs, reward, *ends = super().step(action)
        return obs, float(action) if self.by_action else reward, *ends


def endless() -> Counts:
    return Counts(0)


@pytest.mark.parametrize("where", [{}, pytest.param({"learners": "decentralized", "num_learners": 2}, marks=SLOW)])
def test_episodes_without_an_end_are_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, where: dict[str, Any]
) -> None:
    run = rayvec.train(tiny(tmp_path / "a", **EVALUATED, **where, eval_max_episode_steps=200), env=endless)
    assert run.eval_return_mean == 200.0 and list(evaluations(run.run_dir)) == [128, 256, 384, 512]
    assert caplog.text.count("3 of 3 episodes of an evaluation were cut: they did not end within 200 steps") == 1
    assert list(read_metrics(run.run_dir / "metrics.jsonl"))[1]["eval/episodes_cut"] == 3
    found = evaluate_run(tmp_path / "a", num_episodes=6, env=endless)
    assert found.num_cut == 6 and found.lens.tolist() == [200] * 6


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"eval_env_kwargs": {"length": 5}}, [5.0] * 3),
        ({"eval_env": f"{__name__}:endless", "eval_max_episode_steps": 7}, [7.0] * 3),
        ({"eval_max_episode_steps": 4}, [4.0] * 3),
    ],
    ids=str,
)
def test_evaluations_in_an_environment_of_their_own(
    tmp_path: Path, settings: dict[str, Any], expected: list[float]
) -> None:
    run = rayvec.train(tiny(tmp_path / "a", **EVALUATED, **settings, total_steps=256), env=Counts)
    assert list(evaluations(run.run_dir).values()) == expected[:1] and run.eval_return_mean == expected[0]
    assert evaluate_run(run.run_dir, num_episodes=3, env=Counts).returns.tolist() == expected
    assert load_run(run.run_dir)[1]["progress"]["recent_lens"][:3] == [10] * 3


@pytest.mark.parametrize("where", [{}, pytest.param({"learners": "decentralized", "num_learners": 2}, marks=SLOW)])
def test_sampled_evaluations_are_the_same_wherever_they_are_played(tmp_path: Path, where: dict[str, Any]) -> None:
    """A policy that has learned nothing draws both actions."""
    settings = {**where, "eval_deterministic": False, "total_steps": 64, "learning_rate": 1e-9, "eval_episodes": 8}
    run = rayvec.train(tiny(tmp_path / "a", **settings), env=lambda: Counts(100, by_action=True))
    assert 30 < run.eval_return_mean < 70
    again = evaluate_run(run.run_dir, num_episodes=8, env=lambda: Counts(100, by_action=True))
    assert again.return_mean == run.eval_return_mean
    greedy = {"env": lambda: Counts(100, by_action=True), "eval_deterministic": True}
    assert evaluate_run(run.run_dir, num_episodes=8, **greedy).return_mean in (0.0, 100.0)


def test_evaluations_beside_a_list_of_environments_need_one_of_their_own(tmp_path: Path) -> None:
    fns = [lambda length=length: Counts(length) for length in (10, 11, 12, 13)]
    with pytest.raises(ConfigError, match="eval_env="):
        rayvec.train(tiny(tmp_path / "a", **EVALUATED), env=fns)
    run = rayvec.train(tiny(tmp_path / "b", **EVALUATED, total_steps=192), env=fns, eval_env=lambda: Counts(5))
    assert run.eval_return_mean == 5.0 and list(evaluations(run.run_dir).values()) == [5.0]
    with pytest.raises(ConfigError, match="eval_env"):
        rayvec.resume(run.run_dir, env=fns, total_steps=256)
    assert rayvec.resume(run.run_dir, env=fns, eval_env=lambda: Counts(6), total_steps=256).eval_return_mean == 6.0


def test_statistics_of_wrappers_are_warned_about_and_do_not_count(tmp_path: Path) -> None:
    def make() -> Any:
        return gymnasium.wrappers.NormalizeReward(
            gymnasium.wrappers.NormalizeObservation(gymnasium.make("Pendulum-v1"))
        )

    settings = {"eval_episodes": 4, "total_steps": 1024, "num_steps": 256, "minibatch_size": 256, "learning_rate": 0.01}
    with pytest.warns(UserWarning, match="running statistics") as warned:
        run = rayvec.train(tiny(tmp_path / "a", **settings), env=make)
        again = evaluate_run(run.run_dir, num_episodes=4, env=make)
    assert {"normalize_obs", "normalize_reward"} == {
        word.partition("=")[0] for each in warned for word in str(each.message).split() if word.endswith("=True")
    }
    assert again.return_mean == run.eval_return_mean


pytestmark = pytest.mark.filterwarnings(  # of imageio
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
ALLOWED = ("helpers.wrap:Pictured", "helpers.wrap:AllAllowed", "rayvec.wrappers:ActionMask")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"wrappers": ALLOWED, "step_timeout_s": 60, "workers_per_node": 1},
        pytest.param({"recurrent": "gru", "recurrent_size": 8}, marks=pytest.mark.slow),
    ],
    ids=["plain", "mask in infos", "memory"],
)
def test_a_video_shows_the_first_episode_of_the_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    import imageio.v2 as imageio

    settings = {"wrappers": ALLOWED[:1], **changes, "total_steps": 64, "eval_episodes": 1}
    rayvec.train(tiny(tmp_path / "a", **settings))
    (episode_return,) = json.loads((tmp_path / "a" / "result.json").read_text())["eval_returns"]
    path = tmp_path / "out.MP4"
    for wrong in (tmp_path / "none" / "out.mp4", tmp_path / "out.avi"):
        assert main(["eval", str(tmp_path / "a"), "--episodes", "1", "--video", str(wrong)]) == 2
    assert main(["eval", str(tmp_path / "a"), "--episodes", "1", "--video", str(path)]) == 0
    shown = capsys.readouterr()
    assert f"return {episode_return:.2f} in {path}" in shown.err and shown.out.startswith("mean return")
    with imageio.get_reader(path) as reader:
        frames = [frame for frame in reader]
    assert len(frames) == int(episode_return) + 1 and frames[0].shape == (34, 48, 3)
    assert len({int(frame.mean()) for frame in frames}) > 3
