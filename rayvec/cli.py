"""The command line: ``rayvec train | eval | plot | bench | doctor``.

Options are the fields of the config classes, read by tyro. Input that can't work ends with one message on standard
error and exit code 2. A run that fails after it has begun ends with code 1 and a line that says how to resume it.

Ctrl-C ends a command with code 130. Before and after `main` (while Python starts, imports this module or exits), the
signal itself ends the process, which a shell shows as 130 too. What a command has printed by then is complete.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import io
import math
import os
import select
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

import rayvec
from rayvec.bench.settings import Model, Scaling
from rayvec.config import ADJUSTABLE, CONFIGS, TrainConfig
from rayvec.config.command_line import check_options, subcommands, with_values
from rayvec.config.plugins import import_plugins, split_plugins
from rayvec.config.schema import Bounds, check, field_names
from rayvec.errors import ConfigError, LearnerError, NodeLostError, RayvecError, WorkerLostError
from rayvec.training.stop_signals import Interrupts, Terminated

__all__ = ["main"]

if TYPE_CHECKING:
    _Settings = TrainConfig
else:
    _Settings = subcommands()


@dataclass(frozen=True)
class Train:
    """Train an agent, evaluate it greedily, and keep everything in a run directory."""

    settings: _Settings

    def run(self, args: Sequence[str]) -> None:
        """Trains, or resumes a run; `args` are the arguments of the command line."""
        cls, mentioned = CONFIGS[self.settings.algorithm], _mentioned(args)
        values = {name: getattr(self.settings, name) for name in field_names(cls) if name in mentioned}
        run_dir: Path | None = self.settings.resume  # type: ignore[attr-defined]
        if run_dir is None:
            config = cls(**values)
            from rayvec.training.loop import train

            result = train(config)
        else:
            if "run_dir" in mentioned:
                raise ConfigError(
                    f"--resume and --run-dir {values['run_dir']} were passed together. A resumed run stays in its "
                    "directory: leave --run-dir out. To start a new run with the weights of this one, pass "
                    "--init-from."
                )
            from rayvec.training.loop import resume

            result = resume(run_dir, algorithm=self.settings.algorithm, **values)
        mean = result.eval_return_mean
        print(
            f"greedy return {'none' if math.isnan(mean) else f'{mean:.2f}'} after {result.total_steps:,} steps "
            f"and {result.wall_s:.1f} s; everything is in {result.run_dir}"
        )


@dataclass(frozen=True)
class Eval:
    """Play greedy episodes with the last checkpoint of a run; the first number printed is their mean return."""

    run_dir: tyro.conf.Positional[Path]
    """Directory of the run."""

    episodes: Annotated[int, Bounds(1)] = 100
    """Episodes to play."""

    checkpoint: str = "checkpoint.pt"
    """File in the run's directory: the last checkpoint, best.pt, or one below checkpoints/."""

    video: Path | None = None
    """Also record the first of these episodes, as an .mp4 file; the environment needs render mode "rgb_array"."""

    render: Literal["human"] | None = None
    """Also show the first of these episodes on the screen; the environment needs render mode "human"."""

    seed: Annotated[int, Bounds(0, 2**32 - 1)] | None = None
    """Seed of the episodes; not given: the run's own, which plays the episodes of the evaluation at its end."""

    address: str | None = None
    """Address of a running Ray cluster; not given: as in training."""

    num_nodes: Annotated[int, Bounds(0)] | None = None
    """Ray nodes to spread the environments over, 0 for this machine without Ray; not given: as in training."""

    workers_per_node: Annotated[int, Bounds(0)] | None = None
    """Worker processes on each node; not given: as in training."""

    def run(self, args: Sequence[str]) -> None:
        """Evaluates; `args` are the arguments of the command line."""
        check(self)
        mentioned = _mentioned(args)
        from rayvec.training.evaluation import evaluate_run

        for path in ([self.video] if self.video else []) + ([None] if self.render else []):
            from rayvec.training.rendering import render_episode

            episode_return = render_episode(self.run_dir, path, seed=self.seed, checkpoint=self.checkpoint)
            where = f"in {path}" if path else "on the screen"
            print(f"rayvec: an episode with return {episode_return:.2f} {where}", file=sys.stderr)
        changes = {name: getattr(self, name) for name in ADJUSTABLE if name in mentioned}
        evaluation = evaluate_run(
            self.run_dir, num_episodes=self.episodes, seed=self.seed, checkpoint=self.checkpoint, **changes
        )
        print(
            f"mean return {evaluation.return_mean:.2f}, standard deviation {evaluation.return_std:.2f}, "
            f"{self.episodes} episodes of {evaluation.lens.mean():.1f} steps on average"
        )


@dataclass(frozen=True)
class Plot:
    """Draw the curves of several runs; runs that differ in their seed alone are one line with its spread."""

    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """Directories of runs."""

    out: Path = Path("curves.png")
    """The picture; the end of its name says its format, such as .png, .pdf or .svg."""

    def run(self) -> None:
        """Draws the picture and prints a line for each group of runs."""
        from rayvec.training.plots import plot_and_list, read_runs

        plot_and_list(read_runs(self.run_dirs), self.out)


@dataclass(frozen=True)
class Bench:
    """Measure how steps/s scale over nodes, and predict the throughput of more nodes."""

    command: Annotated[Scaling, tyro.conf.subcommand("scaling")] | Annotated[Model, tyro.conf.subcommand("model")]

    def run(self) -> int:
        """Runs the benchmark; returns 1 if nothing could be measured."""
        from rayvec.bench import model, scaling

        if isinstance(self.command, Scaling):
            return scaling.run(self.command)
        return model.run(self.command)


@dataclass(frozen=True)
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


Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Eval, tyro.conf.subcommand("eval")]
    | Annotated[Plot, tyro.conf.subcommand("plot")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
)


_DESCRIPTION = "Train, evaluate and measure. `rayvec --version` prints the version."
_BROKEN_PIPE = 128 + 13
"""The exit code that a shell gives a command that SIGPIPE ended."""
_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS)
"""What the system answers if a disk is full, or a file must not be written."""


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code: 0, 1 for a failure, 2 for input that can't work, 130 after Ctrl-C.

    It is 143 after SIGTERM, and 141, without a message, if the reader of its output has ended.

    Args:
        args: The arguments, without the program's name; unset: those of this process.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # help texts have characters that a locale's encoding may lack
    is_program, args = args is None, sys.argv[1:] if args is None else args
    options = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
    try:
        with Interrupts() as interrupts:
            if args[:1] == ["--version"]:
                print(f"rayvec {rayvec.__version__}", flush=True)
                return 0
            args = with_values(_load_plugins(args))
            check_options(args)
            command: Train | Eval | Plot | Bench | Doctor = tyro.cli(
                Command, prog="rayvec", description=_DESCRIPTION, args=args, config=options
            )
            is_training = isinstance(command, Train)  # it takes SIGTERM itself, to finish the iteration first
            with contextlib.nullcontext() if is_training else interrupts.taking_sigterm():
                code = command.run(args) if isinstance(command, Train | Eval) else command.run()
            print(end="", flush=True)
            return code or 0
    except KeyboardInterrupt as interrupt:
        _print_error(str(interrupt) or "interrupted", interrupt)
        return 128 + (signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT)
    except SystemExit as end:
        if hasattr(end, "__notes__"):  # a run had begun
            _print_error(f"sys.exit({end.code!r}) was called in the run", end)
        raise
    except Exception as error:
        is_reader_gone = isinstance(error, BrokenPipeError) and _is_reader_gone()
        _drop_unwritable_output()
        if text := _explanation(error):
            _print_error(text, error)
        elif is_reader_gone:  # such as that of `rayvec eval RUN_DIR | head -1`
            return _BROKEN_PIPE
        else:
            raise
        return 1 if _is_failure(error) else 2
    finally:
        if is_program:
            atexit.register(_prepare_exit)


def _prepare_exit() -> None:
    """Makes Ctrl-C end the process without a traceback, and skips the last garbage collection."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.freeze()


def _is_reader_gone() -> bool:
    """Whether standard output is a pipe whose reader has ended."""
    output = select.poll()
    with contextlib.suppress(OSError):
        output.register(sys.stdout, 0)
        return any(event & select.POLLERR for _, event in output.poll(0))
    return False


def _drop_unwritable_output() -> None:
    """Drops printed text that can't be written, which Python would report once more at exit."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _load_plugins(args: Sequence[str]) -> Sequence[str]:
    """Imports the plugins of a command line, whose algorithms become subcommands; returns the other arguments.

    For ``train``, the last of these name the plugins, which the run's settings keep. Modules in the working directory
    can be named, too.
    """
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    plugins, others = split_plugins(args)
    import_plugins(plugins)
    globals()["_Settings"] = subcommands()
    return [*others, "--plugin", *plugins] if plugins and others[:1] == ["train"] else others


def _print_error(text: str, error: BaseException) -> None:
    print("\n".join([f"rayvec: {text}", *getattr(error, "__notes__", [])]), file=sys.stderr)


def _mentioned(args: Sequence[str]) -> frozenset[str]:
    """Returns the names of the fields that command-line arguments set."""
    names = (arg.partition("=")[0].removeprefix("--").replace("-", "_") for arg in args if arg.startswith("--"))
    return frozenset(name.removeprefix("no_") for name in names)


def _explanation(error: Exception) -> str | None:
    """Returns a message, where there is one: of rayvec, of the disk or the memory of a run, or what its code raised.

    That is an environment, a wrapper or a network. Its message says where, and has the traceback there.
    """
    cause = error if isinstance(error, RayvecError) else error.__cause__
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):  # the text of torch
        what = " ".join(str(cause or error).split()) or "MemoryError"
        return f"Out of memory: {what}. Lower num_envs, num_steps, hidden_sizes or another size, or free memory."
    if isinstance(cause, RayvecError):
        is_whole = cause.raised_in is None or " Remedy: " not in str(error)
        return str(cause) if is_whole else f"{error} Raised in {cause.raised_in}."
    if isinstance(error, OSError) and cause is None and (hasattr(error, "__notes__") or error.errno in _REFUSED):
        return f"{type(error).__name__}: {error}"
    return None


def _is_failure(error: Exception) -> bool:
    """Whether the input could have worked: a process was lost, or a run had begun, which notes how to resume it."""
    lost = isinstance(error, WorkerLostError | NodeLostError | LearnerError) and error.raised_in is None
    return lost or isinstance(error, OSError) or bool(getattr(error, "__notes__", ()))
