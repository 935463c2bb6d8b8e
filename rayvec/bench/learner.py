"""``rayvec bench learner``: samples/s of updates over ranks, beside threads and plain DDP."""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Sequence
from typing import Any

from rayvec.bench.measured_processes import NOT_INSTALLED, marked_environment, peer_process
from rayvec.bench.results import Results
from rayvec.bench.settings import LEARNER_STEPS, LearnerBench, check_any
from rayvec.bench.simulate import reachable
from rayvec.bench.terminal import show_table, spread, ticking
from rayvec.config.schema import check, plain
from rayvec.errors import ConfigError, RayvecError

__all__ = ["run", "show"]

_TASK = "rayvec.bench.harness.learners:LearnerTask"
_SAME = ("num_envs", "num_steps", "hidden_sizes", "obs_size", "images", "compile", "device", "address")
"""Settings that are fields of a task too."""
_KEY = ("algorithm", "way", "minibatch_size")


def run(settings: LearnerBench) -> int:
    """Measures, prints the table, and writes the files; returns 1 if no row could be measured."""
    check(settings)
    check_any(settings, "num_learners", "algorithm", "way", "hidden_sizes")
    algorithms = settings.algorithm or (("ppo", "impala") if settings.images else ("ppo", "sac", "impala"))
    _check_batch(settings, algorithms)
    if settings.address is not None:
        reachable(settings.address)
    if settings.device == "cuda":
        from rayvec.learners.base import torch_device  # which imports torch, for seconds

        torch_device("cuda")
    results = Results.of("learner", settings)
    counts = sorted(set(settings.num_learners))
    cells = [
        cell
        for algorithm in algorithms
        for cell in itertools.product([algorithm], settings.way, _minibatch_sizes(settings, algorithm), counts)
    ]
    with results.shown(show), ticking(len(cells)) as tick:
        for algorithm, way, minibatch_size, count in cells:
            tick(f"{algorithm}, {way}, {count}", 0.0)
            row = {"algorithm": algorithm, "way": way, "minibatch_size": minibatch_size, "num_learners": count}
            results.add({**row, "scaling": settings.scaling, **_measured(settings, row)})
            tick("", 1.0)
    return int(all("failed" in row for row in results.rows))


def _minibatch_sizes(settings: LearnerBench, algorithm: str) -> tuple[int, ...]:
    if settings.minibatch_size is not None:
        return settings.minibatch_size
    of_batch = (settings.num_steps or LEARNER_STEPS[algorithm]) * settings.num_envs
    return (1024 if algorithm == "sac" else min(1024, of_batch),)


def _check_batch(settings: LearnerBench, algorithms: Sequence[str]) -> None:
    """Refuses what the batch of an algorithm can't be.

    Raises:
        ConfigError: SAC would learn from images, or the parts of a batch can't have so many rows.
    """
    if settings.images and "sac" in algorithms:
        raise ConfigError(
            "`rayvec bench learner` measures SAC without images.",
            expected="--algorithm ppo, impala or both with --images",
            got=f"--algorithm {' '.join(algorithms)}",
            remedy="Leave sac or --images out.",
        )
    for algorithm in algorithms:
        steps = settings.num_steps or LEARNER_STEPS[algorithm]
        least, most = steps if algorithm == "impala" else 1, steps * settings.num_envs
        wrong = [size for size in _minibatch_sizes(settings, algorithm) if not least <= size <= most]
        if algorithm != "sac" and wrong:  # SAC's minibatches are drawn from the replay buffer
            raise ConfigError(
                "PPO's minibatches are no larger than the batch; IMPALA's contain whole environments.",
                expected=f"--minibatch-size from {least} to num_envs * num_steps = {most:,} for {algorithm}",
                got=", ".join(map(str, wrong)),
                remedy="Pass another --minibatch-size, or more --num-envs.",
            )


def _measured(settings: LearnerBench, row: dict[str, Any]) -> dict[str, Any]:
    """Returns what a row was measured to take, or why it failed."""
    values = plain(settings)
    task = {name: value for name, value in row.items() if name != "way"} | {name: values[name] for name in _SAME}
    task["weak"] = settings.scaling == "weak"
    try:
        with peer_process(row["way"], marked_environment(), task, task_type=_TASK) as (process, started):
            if "missing" in started:
                return {"failed": f"{NOT_INSTALLED}: {started['missing']}"}
            found = process.do("update", seconds=settings.window)
    except RayvecError as error:
        return {"failed": str(error)}
    times = found["times_s"]
    return {
        "samples_per_s": found["samples"] / sum(times),
        "update_ms": 1e3 * statistics.median(times),
        "update_ms_all": [1e3 * each for each in times],
        "start_s": started["start_s"],
        "cores": len(os.sched_getaffinity(0)),
    }


def show(results: Results) -> None:
    """Prints the table."""
    done = [row for row in results.rows if "samples_per_s" in row]
    one = {tuple(row[name] for name in _KEY): row["samples_per_s"] for row in done if row["num_learners"] == 1}
    lines = []
    for row in results.rows:
        key = tuple(row[name] for name in _KEY)
        cells = [*map(str, key), str(row["num_learners"])]
        if "failed" in row:
            lines.append((*cells, "failed, see below", "", "", ""))
            continue
        speedup = row["samples_per_s"] / one[key] if key in one else None
        row["efficiency"] = speedup / row["num_learners"] if speedup else None
        gain = (f"{speedup:.2f}", f"{row['efficiency']:.0%}") if speedup else ("", "")
        lines.append((*cells, f"{row['samples_per_s']:,.0f}", spread(row["update_ms_all"], ".1f"), *gain))
    show_table(
        f"{results.rows[0]['scaling']} scaling",
        ("algorithm", "by", "minibatch", "ranks or threads", "samples/s", "update, ms", "times one", "efficiency"),
        lines,
    )
    cores = max((row["cores"] for row in done), default=0)
    if cores and max(row["num_learners"] for row in results.rows) > cores:
        print(f"More ranks than this machine has cores ({cores}) share them: no gain can be expected there.")
    for row in results.rows:
        if "failed" in row:
            problem = row["failed"].removeprefix(f"{row['way']}: ")
            print(f"{row['algorithm']} by {row['way']}, {row['num_learners']}: {problem}")
