"""Decentralized ranks grow and shrink between iterations, as nodes join and leave."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.elastic import Nodes, without_cores_elsewhere
from helpers.training_kit import SMALL

import rayvec
from rayvec.distributed import rank_placement
from rayvec.errors import ConfigError
from rayvec.training.run_dir import read_metrics

ELASTIC = {**SMALL, "learners": "decentralized", "num_learners": 2, "num_nodes": (1, 2), "workers_per_node": 1}


@pytest.mark.usefixtures("ray_cluster")
def test_too_few_nodes_for_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_placement, "_WAIT_S", 0.1)
    settings = {**ELASTIC, "num_nodes": (3, 4), "num_learners": 4, "run_dir": tmp_path / "a"}
    with pytest.raises(ConfigError, match=r"3 nodes with 1 core in 0\.1 s"):
        rayvec.train(rayvec.PPOConfig(**settings))
    assert not (tmp_path / "a").exists()


@pytest.fixture
def nodes(ray_cluster: Any) -> Iterator[Nodes]:
    made = Nodes(ray_cluster)
    with without_cores_elsewhere():
        yield made
        made.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_grow_and_shrink(
    tmp_path: Path, nodes: Nodes, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """No step is taken twice or left out when a node joins, or announces that it leaves."""
    said = ""

    def ranks() -> list[int]:
        nonlocal said
        said += capsys.readouterr().err
        return [int(count) for count in re.findall(r": (\d+) ranks?\n", said)]

    class Watch:
        joined: str | None = None
        left = False

        def on_iteration(self, context: rayvec.RunContext) -> None:
            if self.joined is None:
                self.joined = nodes.join()
            elif not self.left and ranks()[-1:] == [2]:
                nodes.announce(self.joined)
                self.left = True
            elif self.left and ranks()[-1:] == [1]:
                context.stop("all was seen")

    settings = {**ELASTIC, "total_steps": 192_000, "eval_episodes": 0, "checkpoint_interval_s": 1000}
    with caplog.at_level(logging.WARNING):
        rayvec.train(rayvec.PPOConfig(**settings, run_dir=tmp_path / "a", env_id="CartPole-v1"), callbacks=[Watch()])
    assert ranks() == [1, 2, 1]
    assert caplog.text.count("ranks are placed again") == 2 and "restarting all ranks" not in caplog.text
    steps = [line["steps"] for line in read_metrics(tmp_path / "a" / "metrics.jsonl")]
    assert steps == list(range(64, 64 * len(steps) + 1, 64))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_node_that_is_killed_costs_its_ranks(tmp_path: Path, nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    """The others continue from the last state that was kept, and each step counts once."""
    first, killed = nodes.join(), threading.Event()

    class Watch:
        def on_iteration(self, context: rayvec.RunContext) -> None:
            if context.progress.steps >= 640 and not killed.is_set():
                nodes.kill(first)
                killed.set()

    settings = {**ELASTIC, "total_steps": 6400, "eval_episodes": 0, "checkpoint_interval_s": 0.5}
    with caplog.at_level(logging.WARNING):
        result = rayvec.train(rayvec.PPOConfig(**settings, run_dir=tmp_path / "a"), callbacks=[Watch()])
    assert result.total_steps == 6400 and "restarting all ranks" in caplog.text
    steps = [line["steps"] for line in read_metrics(tmp_path / "a" / "metrics.jsonl")]
    assert steps == list(range(64, 6401, 64))
