"""The command line: ``rayvec train | eval | plot | bench | doctor``.

Options are the fields of the config classes. Input that can't work ends with one message on standard error and exit
code 2. A run that fails after it has begun ends with code 1 and a line that says how to resume it.

Ctrl-C ends a command with code 130. Before and after `main` (while Python starts, imports this module or exits), the
signal itself ends the process, which a shell shows as 130 too. What a command has printed by then is complete.

A command ends quietly with code 141 when what reads its output has ended, as ``head`` does.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import importlib
import io
import math
import os
import re
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

import rayvec
from rayvec.bench.settings import Model, Scaling
from rayvec.config import ADJUSTABLE, CONFIGS, TrainConfig, dataclass
from rayvec.config.command_line import OptionParser, read_options, row
from rayvec.config.presets import changed
from rayvec.config.references import import_plugins
from rayvec.config.schema import Count, Natural, Seed, suggested
from rayvec.config.settings_yaml import read_yaml
from rayvec.data.batch import metric_means
from rayvec.errors import ConfigError, LearnerError, NodeLostError, RayvecError, WorkerLostError, require
from rayvec.fleet.deferred_signals import uninterrupted
from rayvec.training.stop_signals import Interrupts, Terminated


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Play greedy episodes with the last checkpoint of a run; the first number printed is their mean return."""

    positional: ClassVar[str] = "run_dir"

    run_dir: Path
    """Directory of the run."""

    episodes: Count = 100
    """Episodes to play."""

    checkpoint: str = "checkpoint.pt"
    """File in the run's directory: the last checkpoint, best.pt, or one below checkpoints/."""

    video: Path | None = None
    """Also record the first of these episodes, as an .mp4 file; the environment needs render mode "rgb_array"."""

    render: Literal["human"] | None = None
    """Also show the first of these episodes on the screen; the environment needs render mode "human"."""

    seed: Seed | None = None
    """Seed of the episodes; unset: the run's own, which plays the episodes of the evaluation at its end."""

    address: str | None = None
    """Address of a running Ray cluster; unset: as in training."""

    num_nodes: Natural | None = None
    """Ray nodes to spread the environments over, 0 for this machine without Ray; unset: as in training."""

    workers_per_node: Natural | None = None
    """Worker processes on each node; unset: as in training."""

    def run(self) -> None:
        """Evaluates, and prints a line."""
        _import_torch()
        from rayvec.training.evaluation import evaluate_run

        for path in ([self.video] if self.video else []) + ([None] if self.render else []):
            from rayvec.training.evaluation import render_episode

            episode_return = render_episode(self.run_dir, path, seed=self.seed, checkpoint=self.checkpoint)
            where = f"in {path}" if path else "on the screen"
            print(f"rayvec: an episode with return {episode_return:.2f} {where}", file=sys.stderr)
        changes = {name: getattr(self, name) for name in ADJUSTABLE if getattr(self, name, None) is not None}
        evaluation = evaluate_run(
            self.run_dir, num_episodes=self.episodes, seed=self.seed, checkpoint=self.checkpoint, **changes
        )
        print(
            f"mean return {evaluation.return_mean:.2f}, standard deviation {evaluation.return_std:.2f}, "
            f"{self.episodes} episodes of {evaluation.lens.mean():.1f} steps on average",
            *(f"{name} {mean:.2f}" for name, mean in metric_means(evaluation.metrics).items()),
            sep=", ",
        )


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Draw the curves of several runs; runs that differ in their seed alone are one line with its spread."""

    positional: ClassVar[str] = "run_dirs"

    run_dirs: tuple[Path, ...]
    """Directories of runs."""

    out: Path = Path("curves.png")
    """The picture; the end of its name says its format, such as .png, .pdf or .svg."""

    def run(self) -> None:
        """Draws the picture and prints a line for each group of runs."""
        _import_torch()
        from rayvec.training.plots import plot_runs, read_runs

        groups = read_runs(self.run_dirs)
        plot_runs(groups, self.out)
        for group in groups:
            print(f"{group.env_id} {group}")
        print(f"the curves are in {self.out}")


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Check this machine and every node of a Ray cluster as a run would use them, and say what to do.

    Each line begins with ok, warning or error. The exit code is 1 if there is an error: a run would fail.
    """

    address: str | None = None
    """Address of a Ray cluster; unset: RAY_ADDRESS, or else a private cluster that is started to test Ray."""

    env_id: str | None = None
    """Environment to step on each node: says whether its steps compute or wait, and prints a command that trains."""

    json: bool = False
    """Print one JSON document instead of lines."""

    def run(self) -> int:
        """Prints a line for each finding; returns 1 if one is an error."""
        from rayvec.doctor.report import report

        return report(self.address, self.env_id, as_json=self.json)


_COMMANDS: dict[str, Any] = {
    "eval": Eval,
    "plot": Plot,
    "bench scaling": Scaling,
    "bench model": Model,
    "doctor": Doctor,
}
"""Commands besides ``train``, as classes of settings with a method that runs them, or a module of their name."""
_FILES = {
    "config": "YAML file of settings, such as config.yaml of a run. Options change them.",
    "resume": "Directory of a run to resume from its last checkpoint. It has its own settings.",
}
"""Options of ``train`` that are no settings."""


_NO_MEMORY = r"DefaultCPUAllocator|CUDA.{0,16} out of memory|CUBLAS_STATUS_ALLOC_FAILED"
"""What torch says if there is too little memory."""
_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
"""What the system answers if a disk is full, or a file must not or can't be written."""


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code: 0, 1 for a failure, 2 for input that can't work, 130 after Ctrl-C.

    It is 143 after SIGTERM, and 141 where the reader of the output has ended.

    Args:
        args: The arguments, without the program's name; unset: those of this process.
    """
    is_program, args = args is None, sys.argv[1:] if args is None else args
    if is_program and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # its encoding may lack a character, as that of stderr may
    try:
        return _exit_code(args)
    except BrokenPipeError:
        if not (unread := [each for each in (1, 2) if _is_unread(each)]):
            raise
        for descriptor in unread if is_program else ():  # Python writes what is left there when it exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        return 128 + signal.SIGPIPE
    finally:
        if is_program:
            atexit.register(_prepare_exit)


def _exit_code(args: Sequence[str]) -> int:
    """Runs a command, prints its error, and returns its exit code once all its output is written.

    Raises:
        BrokenPipeError: The reader of the output has ended.
    """
    try:
        with (
            Interrupts() as interrupts,  # ``train`` takes SIGTERM itself, to finish the iteration first
            contextlib.nullcontext() if "train" in args else interrupts.taking_sigterm(),
        ):
            try:
                return _run(args) or 0
            finally:
                print(end="", flush=True)
    except KeyboardInterrupt as interrupt:
        _print_error(str(interrupt) or "interrupted", interrupt)
        return 128 + (signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT)
    except Exception as error:
        if (text := _explanation(error)) is None:
            raise
        _print_error(text, error)
        return 1 if _is_failure(error) else 2


def _is_unread(descriptor: int) -> bool:
    """Whether a descriptor is a pipe whose reader has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _prepare_exit() -> None:
    """Makes Ctrl-C end the process without a traceback, and skips the last garbage collection.

    Python notes a KeyboardInterrupt that leaves source text in `exec`, and ends ``python -m`` by the signal, whatever
    the exit code is; the next such text clears the note.
    """
    exec("")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.freeze()


def _run(args: Sequence[str]) -> int | None:
    """Runs the command that the arguments name; returns its exit code."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # modules in the working directory can be named, too
    parser = OptionParser("rayvec")
    parser.add_argument("--plugin", action="append", default=[])
    found, words = parser.parse_known_args(args)
    import_plugins(found.plugin)
    if words[:1] == ["--version"]:
        print(f"rayvec {rayvec.__version__}")
        return None
    if words[:1] == ["train"]:
        return _train(words[1:], found.plugin)
    name = " ".join(words[: 2 if words[:1] == ["bench"] else 1])
    if name not in _COMMANDS:
        _list("rayvec", {"train": _train, **_COMMANDS}, name)
    settings = _COMMANDS[name](**read_options(name, _COMMANDS[name], words[len(name.split()) :]))
    module: Any = importlib.import_module(f"rayvec.{name.replace(' ', '.')}") if words[0] == "bench" else None
    code: int | None = module.run(settings) if module else settings.run()
    return code


def _list(prog: str, known: Mapping[str, Any], word: str) -> NoReturn:
    """Prints the names that may follow `prog`; refuses a `word` that is none of them."""
    near = suggested(word.removeprefix("bench").strip().lower(), [*known, "scaling", "model"])
    advice = f"Did you mean {near}?" if near else f"`{prog} --help` lists them."
    is_help = word.rpartition(" ")[2] in ("-h", "--help", "--help-all")
    require(is_help or word in ("", "bench"), f"{word!r} is no command of `{prog}`. {advice}")
    names = "\n".join(row(f"  {name}", (each.__doc__ or "").partition("\n")[0], 17) for name, each in known.items())
    text = f"usage: {prog} NAME [OPTIONS]\n\n{names}\n\n`{prog} NAME --help` lists the options."
    print(text, file=None if is_help else sys.stderr)
    raise SystemExit(0 if is_help else 2)


def _train(words: list[str], plugins: list[str]) -> int | None:
    """Train an agent, evaluate it, and keep everything in a run directory."""
    parser = OptionParser("rayvec train")
    for name in _FILES:
        parser.add_argument(f"--{name}", type=Path, default=None)
    found, words = parser.parse_known_args(words)
    algorithm = words.pop(0) if words and not words[0].startswith("-") else ""
    before = None if found.config is None else _read(found.config, algorithm)
    if found.resume is not None:
        _import_torch()
        from rayvec.training.run_dir import load_config

        require(before is None, "--config and --resume were passed together. A resumed run has its own settings.")
        before = load_config(found.resume)
    algorithm = algorithm or getattr(before, "algorithm", "")
    if algorithm not in CONFIGS:
        _list("rayvec train", CONFIGS, algorithm or "".join(words[:1]))
    base = before.to_plain() if before else {}
    given = read_options(f"train {algorithm}", CONFIGS[algorithm], words, base, _FILES)
    given |= {"plugin": plugins} if plugins else {}
    _import_torch()
    from rayvec.training.loop import resume, train

    if found.resume is None or before is None:
        result = train(changed(before, **given) if before else CONFIGS[algorithm](**given))
    else:
        require(
            algorithm == before.algorithm and "run_dir" not in given,
            f"A resumed run keeps its directory and its algorithm, {before.algorithm}. Leave others out. To start a "
            "new run with its weights, pass --init-from.",
        )
        wanted = replace(before, **given)  # which converts what the options say
        result = resume(found.resume, **{name: getattr(wanted, name) for name in given})
    mean = result.eval_return_mean
    print(
        f"greedy return {'none' if math.isnan(mean) else f'{mean:.2f}'} after {result.total_steps:,} steps "
        f"and {result.wall_s:.1f} s; everything is in {result.run_dir}"
    )
    return None


def _import_torch() -> None:
    """Imports torch, which aborts the process if an exception ends its import. Ctrl-C is handled afterwards."""
    with uninterrupted():
        importlib.import_module("torch")


def _read(config: Path, algorithm: str) -> TrainConfig:
    """Returns the settings of a file, which options change."""
    try:
        settings = read_yaml(config.expanduser().read_text(encoding="utf-8"))
        settings = {"algorithm": algorithm, **settings} if isinstance(settings, dict) and algorithm else settings
        found = TrainConfig.from_plain(settings)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{config} can't be read: {error}. Pass a file as config.yaml of a run is.") from None
    except ConfigError as error:
        raise ConfigError(f"{config}: {error}") from None
    require(
        algorithm in ("", found.algorithm),
        f"{config} has the settings of {found.algorithm}, and {algorithm} was passed. Leave the algorithm out.",
    )
    return found


def _print_error(text: str, error: BaseException) -> None:
    print("\n".join([f"rayvec: {text}", *getattr(error, "__notes__", [])]), file=sys.stderr)


def _explanation(error: Exception) -> str | None:
    """Returns a message, where there is one: of rayvec, of the disk or the memory of a run, or what its code raised.

    That is an environment, a wrapper or a network. Its message says where, and has the traceback there.
    """
    cause = error if isinstance(error, RayvecError) else error.__cause__
    if isinstance(error, MemoryError) or re.search(_NO_MEMORY, str(error)):
        what = " ".join(str(cause or error).split()) or "MemoryError"
        return f"Out of memory: {what}. Lower num_envs, num_steps, hidden_sizes or another size, or free memory."
    if isinstance(cause, RayvecError):
        return str(cause)
    if isinstance(error, OSError) and cause is None and (hasattr(error, "__notes__") or error.errno in _REFUSED):
        return f"{type(error).__name__}: {error}"
    return None


def _is_failure(error: Exception) -> bool:
    """Whether the input could have worked: a process was lost, or a run had begun, which notes how to resume it."""
    lost = isinstance(error, WorkerLostError | NodeLostError | LearnerError) and error.raised_in is None
    return lost or isinstance(error, OSError) or bool(getattr(error, "__notes__", ()))
