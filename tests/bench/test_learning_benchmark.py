"""What the learning benchmark computes from runs."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("learning")


def test_the_interquartile_mean_counts_parts_of_values(learning: Any) -> None:
    assert learning.interquartile_mean(np.array([9.0, 1, 2, 3, -50, 4, 80, 2])) == (2 + 2 + 3 + 4) / 4
    assert learning.interquartile_mean(np.array([5.0, 1, 2, 3, 4])) == pytest.approx((0.75 * 2 + 3 + 0.75 * 4) / 2.5)
    assert learning.interquartile_mean(np.array([7.0])) == 7


def test_a_table_and_a_picture_of_runs(learning: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = []
    for seed in (1, 2):
        run_dir = tmp_path / f"seed{seed}"
        run_dir.mkdir()
        lines = [
            {
                "steps": 10 * k,
                "episodes": k % 2,
                "return_mean": float(seed * k) if k % 2 else None,
                "return_sum": seed * k,
            }
            for k in range(1, 41)
        ]
        (run_dir / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        learning.keep(learning.Outcome(seed, run_dir, 3.5, 400, np.array([seed, seed + 2.0])))
        outcomes.append(learning.run([], seed, 100, None, tmp_path))  # finished: it is not trained again
    learning.show({"rayvec": outcomes, "none": []})
    text = " ".join(capsys.readouterr().out.split())
    assert "| rayvec | 1 | 3.5 | 400 | 2.0 | 1.0 | 1 |" in text
    assert "rayvec: mean over seeds 2.5, standard error 0.5, interquartile mean 2.5" in text and "none:" not in text
    grid = np.array([0.0, 200, 400])
    at = learning.curve(outcomes[1].run_dir, grid)
    assert np.isnan(at[0]) or at[0] == 2.0
    assert at[1:] == pytest.approx([40, 78])
    learning.draw({"rayvec": outcomes}, tmp_path / "curve.png", "title")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
