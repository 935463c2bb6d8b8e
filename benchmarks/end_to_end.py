"""From the start of the interpreter to an agent that is good enough: ours and other libraries, on the same cores.

    python benchmarks/end_to_end.py --venvs VENVS --json end_to_end.json
    python benchmarks/end_to_end.py --tasks pendulum --libraries rayvec CleanRL-style --seeds 1 2 3

The rule is the same for all (benchmarks/judge.py). A library trains in a process of its own with the settings that it
publishes for the environment (benchmarks/end_to_end_peers.py), on at most two cores, interleaved with the others. The
clock starts just before the process does: importing, starting Ray and compiling count. After every 2,000 environment
steps on CartPole-v1 and 1,000 on Pendulum-v1, or at the end of the first iteration beyond, the clock stands still while
the greedy policy plays 20 episodes, which are the same for all libraries of a seed. The first evaluation with a mean
return of at least 475, or -200, ends the run, and what the clock says then is the result. A run that needs longer than
``--limit-s`` has failed, and so has one that comes to the end of the steps that its settings give it.

Ours runs with its default settings, which start no Ray, with Gymnasium's NumPy CartPole as a native sub-batch in the
learner's process, and with a private Ray. torch has one thread in all of them, which is fastest for small nets.

Stable-Baselines3 lives in an environment of its own, made by ``benchmarks/make_peer_venvs.sh DIRECTORY
stable-baselines3`` and found by ``--venvs DIRECTORY``; if it is not installed, a line says so. ``--json``
keeps each run as soon as it is over; runs that are in the file already are not repeated.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from json import dumps, loads
from pathlib import Path
from typing import Any, Literal

import tyro
from judge import MARK, TASKS
from measure import heading

from rayvec.bench.terminal import show_table, spread

LIBRARIES = {
    "rayvec": "",
    "rayvec, native": "",
    "rayvec, with Ray": "",
    "CleanRL-style": "",
    "Stable-Baselines3": "stable-baselines3",
    "Tianshou": "",
}
"""Of each library, the virtual environment in ``--venvs`` that it lives in; "" is this one."""
GRACE_S = 60
"""How much longer than its limit a process may take, evaluations and its end included, before it is killed."""

Record = dict[str, Any]


def python_of(library: str, venvs: Path) -> Path | None:
    """Returns the interpreter that has a library; None where it is not installed."""
    python = venvs / LIBRARIES[library] / "bin" / "python" if LIBRARIES[library] else Path(sys.executable)
    return python if python.exists() else None


def learn(library: str, python: Path, task: str, seed: int, limit_s: float) -> Record:
    """Lets a library learn once.

    Returns:
        Its name, task and seed; ``reached_s`` and ``steps`` at which it reached the threshold, or None; what failed, if
        anything did; and all evaluations.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" or not LIBRARIES[library]}
    began_s = time.monotonic()
    command = [python, Path(__file__).with_name("end_to_end_peers.py"), library, task, seed, began_s, limit_s]
    with subprocess.Popen(
        list(map(str, command)), env={**env, "OMP_NUM_THREADS": "1"}, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2]),
    ) as process:  # fmt: skip
        error = ""
        try:
            output, errors = process.communicate(timeout=2 * limit_s + GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            error = "killed"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode and not error:
        error = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1][:200]
    evaluations = [loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]
    last = evaluations[-1] if evaluations else None
    reached = last is not None and last["return_mean"] >= TASKS[task].threshold and last["clock_s"] <= limit_s
    return {
        "library": library,
        "task": task,
        "seed": seed,
        "reached_s": last["clock_s"] if reached and last else None,
        "steps": last["steps"] if reached and last else None,
        "error": error,
        "evaluations": evaluations,
    }


def show(records: list[Record], task: str, libraries: Sequence[str], seeds: Sequence[int]) -> None:
    """Prints the table of a task: one line for each library, those that are not installed included."""
    mine = {(r["library"], r["seed"]): r for r in records if r["task"] == task}
    rows = []
    for name in libraries:
        runs = [mine[name, seed] for seed in seeds if (name, seed) in mine]
        if not runs:
            rows.append([name, "not installed", "", "", ""])
            continue
        done = [record for record in runs if record["reached_s"] is not None]
        ours = [mine.get(("rayvec", record["seed"]), {}).get("reached_s") for record in done]
        ratios = [record["reached_s"] / own for record, own in zip(done, ours, strict=True) if own]
        failed = next((f" ({record['error']})" for record in runs if record["error"]), "")
        times, steps = [record["reached_s"] for record in done], [record["steps"] for record in done]
        reached = f"{len(done)} of {len(runs)}{failed}"
        rows.append([name, reached, spread(times, ".1f"), spread(steps), spread(ratios, ".2f")])
    header = ["", "reached", "wall time, s", "steps", "time / rayvec, seed by seed"]
    show_table(f"{TASKS[task].env_id} to {TASKS[task].threshold:g}", header, rows)


def main(
    tasks: tuple[Literal["cartpole", "pendulum"], ...] = ("cartpole", "pendulum"),
    libraries: tuple[Literal[tuple(LIBRARIES)], ...] = tuple(LIBRARIES),  # type: ignore[valid-type]
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5),
    limit_s: float = 240.0,
    venvs: Path = Path("venvs"),
    json: Path | None = None,
    quick: bool = False,
) -> None:
    """Runs what is missing, interleaved, and prints a table for each task.

    Args:
        tasks: What is learned.
        libraries: Which libraries learn.
        seeds: Of the runs.
        limit_s: Of the clock, for each run.
        venvs: Where make_peer_venvs.sh made them.
        json: File to keep the runs in, and to resume.
        quick: One seed of PPO by rayvec and by the script in the way of CleanRL: less than a minute.
    """
    if quick:
        tasks, seeds, libraries = ("cartpole",), (1,), ("rayvec", "CleanRL-style")
    records: list[Record] = loads(json.read_text()) if json and json.exists() else []
    known = {(r["library"], r["task"], r["seed"]) for r in records}
    for task, seed, library in itertools.product(tasks, seeds, libraries):
        python = python_of(library, venvs)
        if python is None or (library, task, seed) in known:
            continue
        record = learn(library, python, task, seed, limit_s)
        records.append(record)
        result = f"{record['reached_s']} s {record['error']}"
        print(f"{library}, {task}, seed {seed}: {result}", file=sys.stderr)
        if json:
            json.write_text(dumps(records))
    print(heading())
    for task in tasks:
        show(records, task, libraries, seeds)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
