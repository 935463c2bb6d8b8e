"""One run with several seeds, side by side: each in a process and a directory of its own, with one summary."""

from __future__ import annotations

import os
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rayvec.config import TrainConfig
from rayvec.config.schema import field_names
from rayvec.errors import ConfigError, LearnerError
from rayvec.node.fork_server import end_with_parent
from rayvec.training.plots import plot_and_list, read_runs
from rayvec.training.run_dir import free_run_dir, load_config, load_result
from rayvec.training.runs import choose_engine
from rayvec.training.status import read_status
from rayvec.training.stop_signals import Interrupts

__all__ = ["train_seeds"]

_LOOK_S = 0.2
_PIPE_BYTES = 1 << 16  # as many as Linux keeps in a pipe
_END_S = 30.0
"""How long a run may take to end after a second Ctrl-C, before it is killed, in seconds."""
_MOST_LISTED = 8
"""With more seeds, the directory is named after the first seed and their number."""


def train_seeds(config: TrainConfig, seeds: Sequence[int], args: Sequence[str]) -> None:
    """Trains once with each seed, as many at a time as there are cores for, and prints one summary.

    The runs are in ``seedS`` in ``config.run_dir``, and their curves in ``curves.png``. A run that is there already is
    not repeated if it has finished, and resumed if it has not. If one fails, the others continue.

    Args:
        config: The settings; its seed does not count.
        seeds: The seeds.
        args: The command line that trains one run, without its seed and its directory.

    Raises:
        ConfigError: A seed is there twice, the directory is a file or holds a run with other settings, or no run could
            begin.
        LearnerError: A run failed.
        KeyboardInterrupt: Ctrl-C ended the runs.
    """
    if len(set(seeds)) < len(seeds):
        raise ConfigError(
            "Each seed is one run.",
            expected="different seeds",
            got=seeds,
            remedy="Remove the duplicate seeds.",
        )
    directory = config.run_dir or _free_directory(config, seeds)
    if directory.exists() and not directory.is_dir():
        raise ConfigError(
            "Runs with several seeds are in one directory.",
            expected="a directory, or a path where there is nothing yet",
            got=f"{directory}, which is a file",
            remedy="Pass another run_dir.",
        )
    runs = {seed: directory / f"seed{seed}" for seed in seeds}
    for seed, run_dir in runs.items():
        _check_same(replace(config, seed=seed), run_dir)
    at_once, workers = _divide_cores(config, len(seeds))
    commands = {
        seed: [*args, *workers, "--seed", str(seed), "--resume" if run_dir.exists() else "--run-dir", str(run_dir)]
        for seed, run_dir in runs.items()
        if not _has_ended(run_dir)
    }
    with Interrupts() as interrupts, interrupts.deferred("ending the runs"):
        codes = _run_all(commands, at_once, interrupts)
    failed = sorted(seed for seed, code in codes.items() if code)
    again = f"the same command with --run-dir {shlex.quote(str(directory))} continues what has not finished"
    if interrupts.requested:
        raise interrupts.stopped(f"stopped; {again}")
    finished = [run_dir for seed, run_dir in runs.items() if seed not in failed]
    if finished:
        _summarize(finished, directory / "curves.png")
    if failed:
        kind = ConfigError if set(codes.values()) == {2} else LearnerError
        raise kind(
            "The run of each seed must finish.",
            expected=f"{len(runs)} runs that finish",
            got=f"an error, printed above, with seed {', '.join(map(str, failed))}",
            remedy=f"Correct its cause; {again}.",
        )


def _has_ended(run_dir: Path) -> bool:
    """Whether a run has its result, and was not ended while its learning curve was drawn."""
    if not load_result(run_dir):
        return False
    try:
        return read_status(run_dir).state == "finished"
    except ConfigError:  # of an older version
        return True


def _free_directory(config: TrainConfig, seeds: Sequence[int]) -> Path:
    one = free_run_dir(config)
    before, _, after = one.name.rpartition(f"seed{config.seed}")
    listed = "-".join(map(str, seeds)) if len(seeds) <= _MOST_LISTED else f"{seeds[0]}-and-{len(seeds) - 1}-more"
    return one.with_name(f"{before}seeds{listed}{after}")


def _check_same(config: TrainConfig, run_dir: Path) -> None:
    """Raises a ConfigError if there is a run that learns something else."""
    if run_dir.exists():
        names = set(field_names(type(config))) - {"run_dir"}
        load_config(run_dir).adjusted(**{name: getattr(config, name) for name in names})


def _divide_cores(config: TrainConfig, num_runs: int) -> tuple[int, list[str]]:
    """Returns how many runs there are at a time, and options that divide the cores of this machine among them.

    Runs on Ray, on ranks or on a GPU follow one after another: each is made to use all that there is.
    """
    cores = len(os.sched_getaffinity(0))
    if choose_engine(config).num_nodes != 0 or config.num_learners > 1 or config.learner_device != "cpu":
        return 1, []
    if config.workers_per_node is not None:
        return max(1, min(num_runs, cores // max(1, config.workers_per_node))), []
    at_once = min(num_runs, cores)
    return at_once, ["--num-nodes", "0", "--workers-per-node", str(cores // at_once)]


def _run_all(commands: dict[int, list[str]], at_once: int, interrupts: Interrupts) -> dict[int, int]:
    """Runs commands, and prints their lines with the seed before them; returns the exit codes by seed.

    After Ctrl-C no other one begins, and those that run get it too.
    """
    waiting, codes, unfinished, is_signalled = list(commands), dict[int, int](), defaultdict[int, bytes](bytes), False
    with selectors.DefaultSelector() as selector, _ending() as running:
        while running or (waiting and not interrupts.requested):
            while waiting and len(running) < at_once and not interrupts.requested:
                seed = waiting.pop(0)
                running[seed] = _start(commands[seed])
                selector.register(running[seed].stdout, selectors.EVENT_READ, seed)
            if interrupts.requested and not is_signalled:
                is_signalled = True
                _signal(running.values(), signal.SIGINT)
            for key, _ in selector.select(_LOOK_S):
                data = _read(key.fd)
                unfinished[key.data] = _print_lines(key.data, unfinished[key.data] + data)
                if not data:
                    selector.unregister(key.fileobj)
            for seed, process in list(running.items()):
                if process.poll() is not None:  # what an environment has started may keep the output open
                    _print_lines(seed, unfinished[seed] + _read(process.stdout.fileno()) + b"\n")
                    if process.stdout in selector.get_map():
                        selector.unregister(process.stdout)
                    process.stdout.close()
                    codes[seed] = process.returncode
                    del running[seed]
    return codes


def _read(fd: int) -> bytes:
    """Returns what a pipe holds, without waiting."""
    with suppress(BlockingIOError):
        return os.read(fd, _PIPE_BYTES)
    return b""


def _print_lines(seed: int, output: bytes) -> bytes:
    """Prints the lines of what a run has written; returns what comes after the last one."""
    *lines, rest = output.split(b"\n")
    for line in filter(None, lines):
        print(f"seed {seed}: {line.decode(errors='replace')}", file=sys.stderr)
    return rest


def _start(args: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts a command of rayvec in a session of its own. The kernel sends it SIGTERM when this process exits."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "rayvec", *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
    )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    return process


@contextmanager
def _ending() -> Iterator[dict[int, Any]]:
    """Yields a dictionary of processes, and ends those that are left in it: after an error, or a second Ctrl-C."""
    running: dict[int, subprocess.Popen[bytes]] = {}
    try:
        yield running
    finally:
        _signal(running.values(), signal.SIGINT)
        deadline = time.monotonic() + _END_S
        for process in running.values():
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()


def _signal(processes: Any, signum: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signum)


def _summarize(run_dirs: Sequence[Path], picture: Path) -> None:
    """Prints the greedy returns of runs, and draws the curves of those in which episodes have ended."""
    for run_dir in run_dirs:
        result = load_result(run_dir)
        greedy = result.get("eval_return_mean")
        print(f"{run_dir}: greedy return {'none' if greedy is None else f'{greedy:.1f}'}")
    try:
        groups = read_runs(run_dirs)
    except ConfigError as error:
        print(f"There is no picture of the curves: {error}")
        return
    plot_and_list(groups, picture)
