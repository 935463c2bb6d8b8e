"""Callbacks act on a run: environments, learning rate, the list of callbacks; numbers of infos reach them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.own_envs import Levels
from helpers.training_kit import HERE, StopsAt, tiny

import rayvec
from rayvec.cli import main
from rayvec.errors import ConfigError
from rayvec.training.default_callbacks import LearningCurve, ShowProgress
from rayvec.training.run_dir import load_run, read_metrics

SLOW = pytest.mark.slow
WORKERS = {"num_nodes": 0, "workers_per_node": 2}
RANKS = {**HERE, "learners": "decentralized", "num_learners": 2}
RAY = {"num_nodes": 1, "workers_per_node": 1}
TOPOLOGIES = [
    pytest.param(HERE, id="here"),
    pytest.param(WORKERS, id="workers"),
    pytest.param(RANKS, id="ranks"),
    pytest.param({**RAY, "learners": "shared", "num_learners": 2}, id="by reference", marks=SLOW),
]


class Curriculum:
    """Raises the level after each third iteration."""

    def __init__(self) -> None:
        self.indices: list[tuple[Any, ...]] = []

    def on_start(self, context: rayvec.RunContext) -> None:
        self._set(context)

    def on_iteration(self, context: rayvec.RunContext) -> None:
        self._set(context)

    def _set(self, context: rayvec.RunContext) -> None:
        self.indices.append(context.env.call("set_level", 1 + context.progress.iterations // 3))
        context.log("level", context.env.get_attr("level")[0])


@pytest.mark.parametrize("where", TOPOLOGIES)
def test_a_curriculum_and_the_share_of_successes(
    request: Any, tmp_path: Path, capsys: Any, where: dict[str, Any]
) -> None:
    if where.get("num_nodes"):
        request.getfixturevalue("ray_cluster")
    curriculum, total = Curriculum(), 64 * 9
    settings = {**where, "sync_fraction": 1.0, "total_steps": total, "eval_episodes": 4}
    run = rayvec.train(tiny(tmp_path / "a", **settings), env=Levels, callbacks=curriculum)
    assert all(indices == (0, 1, 2, 3) for indices in curriculum.indices), "in order, whatever holds them"
    lines = list(read_metrics(run.run_dir / "metrics.jsonl"))
    levels = [line["callback/level"] for line in lines]
    assert levels == [1, 1, 2, 2, 2, 3, 3, 3, 4]
    ahead = int(where is RANKS)  # they begin the next iteration while callbacks see this one
    means = [line["return_sum"] / line["episodes"] / 8 for line in lines]
    assert [round(mean) for mean in means] == [1] * (3 + ahead) + [2] * 3 + [3] * (3 - ahead)
    successes = load_run(run.run_dir)[1]["progress"]["recent_metrics"]["is_success"]
    assert len(successes) == 72 and sum(successes) == 8 * (6 + ahead)
    assert lines[-1]["episode/is_success"] == pytest.approx(sum(successes) / 72)
    capsys.readouterr()
    assert main(["eval", str(run.run_dir), "--episodes=4"]) == 0  # of new environments, whose level is 1
    assert capsys.readouterr().out.endswith("4 episodes of 8.0 steps on average, is_success 1.00\n")


class SetsRate:
    def __init__(self) -> None:
        self.learners: list[Any] = []

    def on_iteration(self, context: rayvec.RunContext) -> None:
        self.learners.append(context.learner)
        if context.progress.iterations == 2:
            context.set_learning_rate(np.float64(1e-5))
            with pytest.raises(ConfigError, match="finite number"):
                context.set_learning_rate(-1e-5)
        if context.progress.iterations == 6:
            context.set_learning_rate(None)


@pytest.mark.parametrize("where", [HERE, RANKS, pytest.param({**HERE, "num_learners": 2}, marks=SLOW)], ids=str)
def test_a_callback_sets_the_learning_rate(tmp_path: Path, where: dict[str, Any]) -> None:
    sets = SetsRate()
    rayvec.train(
        tiny(tmp_path / "a", **where, learning_rate=2.5e-4, learning_rate_schedule="constant"),
        callbacks=[sets, StopsAt(4)],
    )
    assert (sets.learners[0] is None) == (where is RANKS)
    rayvec.resume(tmp_path / "a", callbacks=sets)
    rates = [line["learner/learning_rate"] for line in read_metrics(tmp_path / "a" / "metrics.jsonl")]
    assert rates[:2] == [2.5e-4] * 2 and rates[3:6] == [1e-5] * 3 and rates[-2:] == [2.5e-4] * 2


def test_the_list_of_callbacks_may_be_thinned_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    def chosen(default: list[Any]) -> list[Any]:
        kept = [each for each in default if not isinstance(each, ShowProgress | LearningCurve)]
        hooks = ("on_start", "on_iteration", "on_log", "on_checkpoint", "on_end", "on_close")
        return [*kept, SimpleNamespace(**{hook: lambda context, hook=hook: seen.append(hook) for hook in hooks})]

    rayvec.train(tiny(tmp_path / "a", total_steps=64, eval_episodes=0), callbacks=chosen)
    assert seen == ["on_start", "on_iteration", "on_log", "on_checkpoint", "on_end", "on_close"]
    assert not (tmp_path / "a" / "learning_curve.png").exists() and "steps/s" not in capsys.readouterr().err


@pytest.mark.parametrize("uri", ["s3://bucket/runs/a", "gs://bucket/a"])
def test_paths_are_of_this_machine(tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run = rayvec.train(tiny(Path("~/runs/a"), total_steps=64, eval_episodes=0))
    assert run.run_dir == tmp_path / "runs" / "a" and rayvec.load("~/runs/a").config.total_steps == 64
    assert rayvec.resume("~/runs/a").total_steps == 64
    for refused in (lambda: rayvec.train(tiny(Path(uri))), lambda: rayvec.load(uri), lambda: rayvec.resume(uri)):
        with pytest.raises(ConfigError, match="is a URI"):
            refused()
