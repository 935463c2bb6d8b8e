"""Does straggler mitigation pay, and does it cost learning? Decentralized ranks with environments of uneven speed.

    python benchmarks/stragglers.py ranks          8 ranks, heavy-tailed steps, one rank 5 times slower
    python benchmarks/stragglers.py environments   one rank with 16 environments, one of them 20 times slower
    python benchmarks/stragglers.py learning       CartPole with and without mitigation, 5 seeds

Environments sleep, so ranks share cores without disturbing each other. Iterations are timed by the runs themselves
(``metrics.jsonl``); the first two of each run are left out. Repeats are interleaved.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import tyro
from measure import interleaved

import rayvec
from rayvec.bench.harness.emulated import EmulatedEnv
from rayvec.bench.terminal import show_table, spread
from rayvec.training.learning_curve import episode_mean
from rayvec.training.loggers import read_metrics

_SLOW_PLACE, _SLOW_FACTOR, _MEDIAN_S = "RAYVEC_SLOW_PLACE", "RAYVEC_SLOW_FACTOR", "RAYVEC_MEDIAN_S"
_SIGMA = 1.5


class Sleeping(EmulatedEnv):
    """Episodes of 10 steps with normal rewards of mean 0.1; a step sleeps.

    The process that is the first to claim the place named by an environment variable is slow.

    Args:
        sigma: Of the logarithm of the time of a step.
    """

    def __init__(self, sigma: float = 0.0) -> None:
        median_s = float(os.environ[_MEDIAN_S]) * (float(os.environ[_SLOW_FACTOR]) if _is_slow() else 1.0)
        super().__init__(median_s * math.exp(0.5 * sigma**2), sigma=sigma)  # the mean of the lognormal distribution
        self._num_steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins an episode."""
        super().reset(seed=seed)
        self._num_steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Sleeps."""
        super().step(action)
        self._num_steps += 1
        reward = 0.1 + float(self.np_random.standard_normal())
        return np.zeros(4, np.float32), reward, self._num_steps == 10, False, {}


def _is_slow() -> bool:
    place = Path(os.environ[_SLOW_PLACE])
    try:
        place.mkdir()
        (place / str(os.getpid())).touch()
    except FileExistsError:
        return (place / str(os.getpid())).exists()
    return True


if "Sleeping-v0" not in gymnasium.registry:  # as a script, this module is imported twice
    gymnasium.register("Sleeping-v0", Sleeping)


def run(
    config_class: type[rayvec.TrainConfig], *, factor: float, median_s: float, iterations: int, **settings: Any
) -> list[dict[str, Any]]:
    """Returns the metrics of a run whose first process is `factor` times slower, without the first two iterations."""
    with tempfile.TemporaryDirectory() as directory:
        os.environ |= {_SLOW_PLACE: f"{directory}/slow", _SLOW_FACTOR: str(factor), _MEDIAN_S: str(median_s)}
        common: dict[str, Any] = {"env_id": "stragglers:Sleeping-v0", "eval_episodes": 0, "num_nodes": 0}
        config = config_class(**common, **settings, run_dir=Path(directory, "run"))
        config = replace(config, total_steps=iterations * config.steps_per_iteration)
        result = rayvec.train(config)
        return list(read_metrics(result.run_dir / "metrics.jsonl"))[2:]


def run_ranks(**settings: Any) -> list[dict[str, Any]]:
    """Returns the metrics of each iteration of decentralized ranks; see `run`."""
    return run(rayvec.PPOConfig, num_epochs=1, learners="decentralized", **settings)


def seconds(line: dict[str, Any]) -> float:
    """Returns the time of an iteration."""
    return sum(value for name, value in line.items() if name.count("/") == 1 and name.startswith("time_s/"))


def ranks(repeats: int) -> None:
    """Prints the time of an iteration, in proportion to that of 8 equally fast ranks."""
    common = {"num_envs": 16, "num_steps": 32, "minibatch_size": 512, "num_learners": 8, "workers_per_node": 0}
    common |= {"env_kwargs": {"sigma": _SIGMA}, "median_s": 0.001, "iterations": 12}
    ways = {
        "8 equal ranks, none is stopped": partial(run_ranks, **common, factor=1, sync_fraction=1.0),
        "one 5 x slower, none is stopped": partial(run_ranks, **common, factor=5, sync_fraction=1.0),
        "one 5 x slower, sync_fraction=0.6, min_share=0.25": partial(run_ranks, **common, factor=5, sync_fraction=0.6),
        "8 equal ranks, sync_fraction=0.6, min_share=0.25": partial(run_ranks, **common, factor=1, sync_fraction=0.6),
    }
    found = interleaved(ways, repeats)
    times = {name: [statistics.median(map(seconds, lines)) for lines in runs] for name, runs in found.items()}
    base = statistics.median(next(iter(times.values())))
    rows = []
    for name, runs in found.items():
        cut = statistics.mean(statistics.mean(line["ranks_cut"] for line in lines) for lines in runs)
        taken = np.mean([np.diff([line["steps"] for line in lines]).mean() / 512 for lines in runs])
        slower = f"{statistics.median(times[name]) / base:.2f}"
        rows.append([name, spread(times[name], ".3f"), slower, f"{cut:.1f}", f"{taken:.0%}"])
    show_table("Ranks", ["", "s of an iteration", "times the first", "ranks stopped", "steps taken"], rows)


def environments(repeats: int) -> None:
    """Prints the steps per second of 16 environments of which one is slow, and of 15 fast ones."""
    common = {"num_steps": 128, "num_learners": 1, "iterations": 8, "minibatch_size": 960, "median_s": 0.005}
    fast = {"num_envs": 15, "workers_per_node": 15, "factor": 1}
    slow = {"num_envs": 16, "workers_per_node": 16, "factor": 20}
    ways = {
        "15 fast ones alone": partial(run_ranks, **common, **fast),
        "16, one 20 x slower": partial(run_ranks, **common, **slow),
        "16, one 20 x slower, variable_lengths": partial(run_ranks, **common, **slow, variable_lengths=True),
    }
    found = interleaved(ways, repeats)
    rates = {
        name: [statistics.median(line["steps_per_s"] for line in lines) for lines in runs]
        for name, runs in found.items()
    }
    base = statistics.median(next(iter(rates.values())))
    rows = [[name, spread(values), f"{statistics.median(values) / base:.2f}"] for name, values in rates.items()]
    show_table("Environments", ["", "steps/s", "times the first"], rows)
    ended = [line for lines in found["16, one 20 x slower, variable_lengths"] for line in lines if line["episodes"]]
    count = sum(line["episodes"] for line in ended)
    mean = sum(episode_mean(line) * line["episodes"] for line in ended) / count
    error = np.sqrt(10 / count)
    print(
        f"mean return {mean:.3f} of {count} episodes; the truth is 1, {abs(mean - 1) / error:.1f} standard errors away"
    )


def learning(repeats: int) -> None:
    """Prints the mean return of all training episodes and the greedy return, with and without mitigation."""
    ways = {fraction: [learn(seed, fraction) for seed in range(1, repeats + 1)] for fraction in (0.5, 1.0)}
    for fraction, found in ways.items():
        for name, values in zip(("in training", "greedy"), zip(*found, strict=True), strict=True):
            error = statistics.stdev(values) / repeats**0.5
            print(f"{name}, sync_fraction {fraction}: {statistics.mean(values):.1f} ± {error:.1f} (standard error)")


def learn(seed: int, sync_fraction: float) -> tuple[float, float]:
    """Returns the mean return of the training episodes of a run, and the greedy return."""
    with tempfile.TemporaryDirectory() as directory:
        config = rayvec.PPOConfig(
            env_id="CartPole-v1",
            wrappers=("stragglers:Jitter",),
            total_steps=20_000,
            num_envs=16,
            num_nodes=0,
            workers_per_node=0,
            learners="decentralized",
            num_learners=4,
            sync_fraction=sync_fraction,
            seed=seed,
            eval_episodes=20,
            run_dir=Path(directory, "run"),
        )
        result = rayvec.train(config)
        lines = list(read_metrics(result.run_dir / "metrics.jsonl"))
    in_training = sum(line["return_sum"] for line in lines) / sum(line["episodes"] for line in lines)
    cut = sum(line["ranks_cut"] for line in lines) / len(lines)
    print(
        f"seed {seed}, sync_fraction {sync_fraction}: return {in_training:.1f} in training, "
        f"{result.eval_return_mean:.1f} greedy; ranks stopped in an iteration: {cut:.2f}"
    )
    return in_training, result.eval_return_mean


class Jitter(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Now and then, a step sleeps."""

    def step(self, action: Any) -> Any:
        """Sleeps once in fifty steps."""
        if np.random.random() < 0.02:
            time.sleep(0.01 * float(np.exp(_SIGMA * np.random.standard_normal())))
        return super().step(action)


def main(
    what: tyro.conf.Positional[Literal["ranks", "environments", "learning"]],
    repeats: int = 5,
) -> None:
    """Measures straggler mitigation.

    Args:
        what: What to measure.
        repeats: How often, or with how many seeds.
    """
    {"ranks": ranks, "environments": environments, "learning": learning}[what](repeats)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
