"""Callbacks see a run, end it, and an exception in one says how to resume; the built-in ones."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.training_kit import HERE, sac, tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import rayvec
from rayvec.cli import main
from rayvec.errors import ConfigError
from rayvec.training import checkpoint
from rayvec.training.run_dir import load_run, read_metrics

SLOW = pytest.mark.slow
EVALUATED = {"eval_interval_steps": 128, "eval_episodes": 3}


class Witness:
    """Notes what it is called with."""

    def __init__(self, stop_at: int | None = None, fail_in: str = "") -> None:
        self.seen: list[tuple[str, int]] = []
        self.stop_at, self.fail_in = stop_at, fail_in
        self.result: Any = None

    def _note(self, hook: str, context: rayvec.RunContext) -> None:
        self.seen.append((hook, context.progress.steps))
        if hook == self.fail_in:
            raise ZeroDivisionError("in the callback")

    def on_iteration(self, context: rayvec.RunContext) -> None:
        self._note("on_iteration", context)
        assert context.metrics["steps"] == context.progress.steps and context.run_dir.is_dir()
        if self.stop_at is not None and context.progress.steps >= self.stop_at:
            context.stop("enough")
            context.stop("more than enough")

    def on_evaluation(self, context: rayvec.RunContext) -> None:
        self._note("on_evaluation", context)
        assert context.evaluation is not None and len(context.evaluation.returns) in (3, 6)

    def on_checkpoint(self, context: rayvec.RunContext) -> None:
        self._note("on_checkpoint", context)
        assert load_run(context.run_dir)[1]["progress"]["steps"] == context.progress.steps

    def on_end(self, context: rayvec.RunContext) -> None:
        self._note("on_end", context)
        self.result = context.result


def steps_of(witness: Witness, hook: str) -> list[int]:
    return [steps for name, steps in witness.seen if name == hook]


def test_a_callback_sees_everything_in_order(tmp_path: Path) -> None:
    witness = Witness()
    settings = {**EVALUATED, "total_steps": 320, "checkpoint_interval_s": 1e9}
    result = rayvec.train(tiny(tmp_path / "a", **settings), callbacks=witness)  # in a list or not
    assert steps_of(witness, "on_iteration") == [64, 128, 192, 256, 320]
    assert steps_of(witness, "on_evaluation") == [128, 256, 320]
    assert steps_of(witness, "on_checkpoint") == [128, 256, 320], "with each evaluation, too"
    assert witness.seen[-1] == ("on_end", 320) and witness.result == result
    assert result.stop_reason is None


class Logs:
    """Logs numbers in each hook."""

    def on_iteration(self, context: rayvec.RunContext) -> None:
        context.log("iteration", context.progress.steps)
        context.log("array", np.float32(0.5))
        context.log("tensor", torch.tensor(0.25))

    def on_evaluation(self, context: rayvec.RunContext) -> None:
        context.log("evaluation", context.progress.steps)

    def on_checkpoint(self, context: rayvec.RunContext) -> None:
        context.log("checkpoint", context.progress.steps)


def test_what_callbacks_log_is_in_the_line_of_its_iteration(tmp_path: Path) -> None:
    settings = {"eval_interval_steps": 1024, "eval_episodes": 3, "checkpoint_interval_s": 1e9}
    rayvec.train(sac(tmp_path / "a", **settings), callbacks=[Logs()])
    lines = list(read_metrics(tmp_path / "a" / "metrics.jsonl"))
    logged = [[line.get(f"callback/{name}") for name in ("iteration", "evaluation", "checkpoint")] for line in lines]
    assert [line["steps"] for line in lines] == [1024, 2048, 2560]
    assert logged == [[1024, 1024, None], [2048, 2048, 1024], [2560, None, 2048]]
    assert [line["callback/array"] for line in lines] == [0.5] * 3
    assert [line["callback/tensor"] for line in lines] == [0.25] * 3
    events = EventAccumulator(str(tmp_path / "a")).Reload().Scalars("callback/evaluation")
    assert [(event.step, event.value) for event in events] == [(1024, 1024.0), (2048, 2048.0), (2560, 2560.0)]
    assert main(["plot", str(tmp_path / "a"), "--out", str(tmp_path / "a.png")]) == 0


RANKS = {**HERE, "learners": "decentralized", "num_learners": 2}


@pytest.mark.parametrize(
    "where",
    [HERE, pytest.param({**HERE, "workers_per_node": 2}, marks=SLOW), pytest.param(RANKS, marks=SLOW)],
    ids=["here", "workers", "ranks"],
)
def test_a_callback_ends_the_run_and_resuming_continues_it(tmp_path: Path, where: dict[str, Any]) -> None:
    witness = Witness(stop_at=128)
    result = rayvec.train(tiny(tmp_path / "a", **where), callbacks=[witness])
    assert 128 <= result.total_steps <= 192 and result.stop_reason == "enough"  # one more may have begun
    written = json.loads((result.run_dir / "result.json").read_text())
    assert written["stop_reason"] == "enough" and len(written["eval_returns"]) == 6
    assert load_run(result.run_dir)[1]["progress"]["steps"] == result.total_steps
    assert steps_of(witness, "on_end") == [result.total_steps]
    again = Witness()
    resumed = rayvec.resume(result.run_dir, callbacks=[again])
    assert resumed.total_steps == 640 and resumed.stop_reason is None and steps_of(again, "on_end") == [640]


@pytest.mark.parametrize("hook", ["on_iteration", pytest.param("on_checkpoint", marks=SLOW)])
def test_an_exception_in_a_callback_says_how_to_resume(tmp_path: Path, hook: str) -> None:
    config = tiny(tmp_path / "a b", total_steps=192, checkpoint_interval_s=0)
    with pytest.raises(ZeroDivisionError) as caught:
        rayvec.train(config, callbacks=[Witness(fail_in=hook)])
    notes = "\n".join(caught.value.__notes__)
    assert f"{hook} of the callback Witness" in notes
    assert shlex.split(notes)[-2:] == ["--resume", str(config.run_dir)]  # as a shell reads the command
    assert rayvec.resume(config.run_dir).total_steps == 192


@pytest.mark.parametrize("wrong", [object(), "on_iteration", 3, Witness, rayvec.BestModel])
def test_what_is_no_callback(tmp_path: Path, wrong: Any) -> None:
    for callbacks in ([wrong], wrong):
        with pytest.raises(ConfigError, match="on_iteration"):
            rayvec.train(tiny(tmp_path / "a"), callbacks=callbacks)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("settings", [pytest.param({}, marks=SLOW), EVALUATED], ids=["of training", "of evaluations"])
def test_stopping_at_a_return(tmp_path: Path, settings: dict[str, Any]) -> None:
    result = rayvec.train(
        tiny(tmp_path / "a", total_steps=6400, **settings), callbacks=[rayvec.StopAtReturn(9, num_episodes=5)]
    )
    assert result.total_steps < 1000 and "reached 9" in str(result.stop_reason)
    late = rayvec.train(tiny(tmp_path / "c", total_steps=64), callbacks=[rayvec.StopAtReturn(9)])
    assert late.stop_reason is None  # only the evaluation after training showed it
    high = rayvec.train(tiny(tmp_path / "b", total_steps=128, **settings), callbacks=[rayvec.StopAtReturn(501)])
    assert high.stop_reason is None


def test_the_best_weights_are_kept(tmp_path: Path) -> None:
    found: list[tuple[float, Any]] = []

    class Collects:
        def on_evaluation(self, context: rayvec.RunContext) -> None:
            found.append((context.evaluation.return_mean, context.weights))
            assert context.is_best == (context.evaluation.return_mean > max([0, *(mean for mean, _ in found[:-1])]))

    rayvec.train(tiny(tmp_path / "a", **EVALUATED), callbacks=[Collects()])
    best = checkpoint.load(tmp_path / "a" / "best.pt")
    mean, weights = max(found, key=lambda each: each[0])
    assert torch.equal(best["weights"], torch.from_numpy(weights)) and best["progress"]["best_return"] == mean


def test_checkpoints_are_kept_at_intervals(tmp_path: Path) -> None:
    settings = {"total_steps": 640, "checkpoint_interval_s": 1e9, "eval_episodes": 0}
    rayvec.train(tiny(tmp_path / "a", **settings), callbacks=[rayvec.CheckpointHistory(200)])
    paths = sorted((tmp_path / "a" / "checkpoints").iterdir())
    assert [int(path.stem) for path in paths] == [256, 448, 640]
    assert [checkpoint.load(path)["progress"]["steps"] for path in paths] == [256, 448, 640]
    rayvec.train(tiny(tmp_path / "b", **settings), callbacks=[Witness(stop_at=448)])
    (tmp_path / "b" / "checkpoints").mkdir()
    (tmp_path / "b" / "checkpoints" / "mine.pt").touch()
    rayvec.resume(tmp_path / "b", callbacks=[rayvec.CheckpointHistory(64, keep=2)])
    names = [path.name for path in sorted((tmp_path / "b" / "checkpoints").iterdir())]
    assert names == ["000000000576.pt", "000000000640.pt", "mine.pt"]
