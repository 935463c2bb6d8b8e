"""``rayvec bench model``: costs that are fitted to rows of few nodes predict steps/s on more.

A call of T steps of n environments on k nodes takes ``T * step + late * step * sqrt(2 T ln n)``, the slowest of n, and
costs for each call, node, step and environment step (whose bytes travel).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rayvec.bench.results import Results, read_rows
from rayvec.bench.settings import Model
from rayvec.bench.terminal import number, show_table
from rayvec.errors import require

COSTS = ("call_s", "node_s", "env_step_s", "step_s", "late")
"""What is fitted: seconds for each call of the driver, for each node in a call, for each step of an environment, and
for each step of all environments; and the deviation of a step's duration as a share of its mean."""


def _features(row: dict[str, Any]) -> tuple[float, ...]:
    steps, cores = row["chunk_steps"], row["cores"]
    slowest = row["step_duration_s"] * math.sqrt(2 * steps * math.log(cores)) if cores > 1 else 0.0
    return 1.0, row["nodes"], cores * steps, steps, slowest


def fit(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns the costs, none below 0, that explain the rows of one way.

    Least squares of relative errors over every subset of the costs, since there are few.

    Args:
        rows: Rows of ``scaling.json``.
    """
    call_s = np.array([row["cores"] * row["chunk_steps"] / row["steps_per_s"] for row in rows])
    x = np.array([_features(row) for row in rows]) / call_s[:, None]
    y = 1.0 - np.array([row["chunk_steps"] * row["step_duration_s"] for row in rows]) / call_s
    best, least = np.zeros(len(COSTS)), math.inf
    for size in range(1, min(len(COSTS), len(rows)) + 1):
        for columns in map(list, itertools.combinations(range(len(COSTS)), size)):
            found = np.linalg.lstsq(x[:, columns], y, rcond=None)[0]
            error = float(np.square(x[:, columns] @ found - y).sum())
            if (found >= 0).all() and error < 0.999 * least:
                best, least = np.zeros(len(COSTS)), error
                best[columns] = found
    return dict(zip(COSTS, best.tolist(), strict=True))


def predict(costs: dict[str, float], row: dict[str, Any], latency_s: float = 0.0) -> float:
    """Returns the steps/s of a row.

    Args:
        costs: What `fit` has found.
        row: Has ``nodes``, ``cores``, ``chunk_steps`` and ``step_duration_s``.
        latency_s: One way between nodes, in addition to what was measured.
    """
    overhead_s = float(np.dot(list(costs.values()), _features(row))) + 2 * latency_s
    steps: int = row["cores"] * row["chunk_steps"]
    steps_per_s: float = steps / (row["chunk_steps"] * row["step_duration_s"] + overhead_s)
    return steps_per_s


def run(settings: Model) -> int:
    """Fits, predicts, prints both, and writes the files."""
    rows = read_rows(settings.scaling)
    few = [row for row in rows if row["nodes"] <= settings.fit_nodes]
    require(
        len({row["nodes"] for row in few}) >= 2,
        f"{settings.scaling} has no rows of two numbers of nodes up to {settings.fit_nodes}, to which costs are "
        "fitted. Measure them: rayvec bench scaling --nodes 1 2.",
    )
    results = Results("model", settings)
    with results.shown(_show):
        for way in dict.fromkeys(row["way"] for row in few):
            costs = fit([row for row in few if row["way"] == way])
            results.notes.append(f"{way}: " + ", ".join(f"{name} {value:.3g}" for name, value in costs.items()))
            results.rows += _predicted(settings, costs, [row for row in rows if row["way"] == way])
    return 0


def _predicted(settings: Model, costs: dict[str, float], rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    per_node = rows[0]["cores"] // rows[0]["nodes"]
    measured = {(row["nodes"], row["step_duration_s"]): row for row in rows}
    lengths = {row["step_duration_s"]: row["chunk_steps"] for row in rows}
    more = [nodes for nodes, _ in measured if nodes > settings.fit_nodes]
    for nodes, (step_s, length) in itertools.product(sorted({*settings.nodes, *more}), lengths.items()):
        row = {"nodes": nodes, "cores": nodes * per_node, "way": rows[0]["way"]}
        row |= {"chunk_steps": length, "step_duration_s": step_s, "ideal_steps_per_s": nodes * per_node / step_s}
        rate = predict(costs, row, 1e-6 * settings.network_latency_us)
        seen = measured.get((nodes, step_s), {}).get("steps_per_s")
        yield row | {
            "steps_per_s": rate,
            "efficiency": rate / row["ideal_steps_per_s"],
            "measured_steps_per_s": seen,
            "error": None if seen is None else rate / seen - 1,
        }


def _show(results: Results) -> None:
    show_table(
        f"Predicted from at most {results.settings.fit_nodes} nodes",
        ("nodes", "cores", "step duration, s", "way", "steps/s", "ideal", "efficiency", "measured", "error"),
        [
            (
                row["nodes"],
                row["cores"],
                f"{row['step_duration_s']:.3g}",
                row["way"],
                number(row["steps_per_s"]),
                number(row["ideal_steps_per_s"]),
                f"{100 * row['efficiency']:.1f}%",
                "" if row["error"] is None else number(row["measured_steps_per_s"]),
                "" if row["error"] is None else f"{100 * row['error']:+.0f}%",
            )
            for row in results.rows
        ],
    )
    print(*results.notes, sep="\n")
