"""The directory of a run: where a run keeps everything that it writes.

runs/<name>/
├── config.yaml            the settings, commented
├── metrics.jsonl          a line for each iteration, or for 1,000 steps of SAC
├── events.out.tfevents.*  the same for TensorBoard
├── checkpoint.pt          the state that a resumed run continues from
├── best.pt                with eval_interval_steps: the weights of the best evaluation
├── checkpoints/           with rayvec.CheckpointHistory: older checkpoints
├── learning_curve.png     return against steps
└── result.json            totals, and the greedy evaluation
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rayvec.config import TrainConfig
from rayvec.errors import CheckpointError, ConfigError
from rayvec.training import checkpoint
from rayvec.training.atomic_files import local_path, written_whole
from rayvec.training.own_env_and_network import resume_command
from rayvec.training.run_state import Progress, check_state
from rayvec.training.versions import installed_versions

__all__ = [
    "begin_run_dir",
    "best_return",
    "free_run_dir",
    "load_checkpoint",
    "load_config",
    "load_result",
    "load_run",
    "locked",
    "save_best",
    "save_checkpoint",
    "save_config",
    "save_result",
]


def free_run_dir(config: TrainConfig) -> Path:
    """Returns the directory of a run that is about to begin, named by the settings or by what the run is and when.

    Raises:
        ConfigError: There is something where the settings want it.
    """
    env_name = re.sub(r"[^\w.-]+", "-", config.native or config.env_id).strip("-")
    if config.run_dir is None:  # several runs may begin in one second, also on machines that share a disk
        began = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
        run_dir = Path("runs", f"{env_name}-{config.algorithm}-seed{config.seed}-{began}")
    else:
        run_dir = local_path(config.run_dir)
        if os.path.lexists(run_dir):
            raise _taken(run_dir, config)
    try:
        os.path.abspath(run_dir).encode()
    except UnicodeEncodeError as error:  # TensorBoard could not write there
        raise ConfigError(
            f"The path {os.fsencode(error.object)!r} of the run's directory is no UTF-8, read as "
            f"{sys.getfilesystemencoding()}. Pass another run_dir, or set PYTHONUTF8=1."
        ) from None
    return run_dir


def _taken(run_dir: Path, config: TrainConfig) -> ConfigError:
    is_run = (run_dir / "config.yaml").exists()
    return ConfigError(
        f"The directory of the run can't be {run_dir}, which exists. "
        + (
            f"Resume that run ({resume_command(config, run_dir)}), or pass another run_dir."
            if is_run
            else "Pass another run_dir."
        )
    )


def begin_run_dir(run_dir: Path, config: TrainConfig, state: dict[str, Any]) -> None:
    """Makes the directory of a run with its settings and a first checkpoint: all of it, or nothing.

    A run that is killed at any time can be resumed if its directory exists.

    Raises:
        ConfigError: The directory can't be made, or another process has made it.
    """
    partial = run_dir.with_name(f".{secrets.token_hex(8)}.tmp")  # no part of a name that may be as long as one can be
    try:
        partial.mkdir(parents=True)
        save_config(partial, config)
        save_checkpoint(partial, state)
        partial.rename(run_dir)  # replaces an empty directory at most
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR) and run_dir.exists():
            raise _taken(run_dir, config) from error
        raise ConfigError(
            f"The directory {run_dir} can't be made: {error.strerror}. Pass another run_dir, on a disk with free "
            "space that you may write to."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def save_config(run_dir: Path, config: TrainConfig) -> None:
    """Writes, or replaces, ``config.yaml``."""
    with written_whole(run_dir / "config.yaml") as file:
        file.write(config.to_yaml().encode())


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keeps other processes from training in the same directory; the lock ends with the process, however that ends.

    Raises:
        ConfigError: Another process trains there.
    """
    try:
        directory = os.open(run_dir, os.O_RDONLY)
    except OSError:
        yield  # load_run says what is wrong with it
        return
    try:
        with contextlib.suppress(OSError):  # some file systems have no locks: then another process goes unnoticed
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"Another process trains in {run_dir}. Wait until it has ended, or stop it with Ctrl-C; then "
                    "resume."
                ) from None
        yield
    finally:
        os.close(directory)


def save_checkpoint(run_dir: Path, state: dict[str, Any]) -> None:
    """Replaces the checkpoint of a run; see `rayvec.training.checkpoint.save`."""
    checkpoint.save(run_dir / "checkpoint.pt", state)


def save_best(run_dir: Path, weights: NDArray[np.float32], progress: Progress) -> None:
    """Replaces ``best.pt``: acting weights, and how far the run had come with them."""
    checkpoint.save(run_dir / "best.pt", {"weights": torch.from_numpy(weights), "progress": asdict(progress)})


def save_result(run_dir: Path, config: TrainConfig, totals: Mapping[str, Any], returns: Sequence[float]) -> None:
    """Writes ``result.json``.

    Args:
        run_dir: Directory of the run.
        config: Its settings.
        totals: What to write, by name; NaN becomes null.
        returns: Return of each episode of the greedy evaluation.
    """
    run = {"algorithm": config.algorithm, "env_id": config.env_id, "seed": config.seed}
    values = {name: None if value != value else value for name, value in totals.items()}
    text = json.dumps(
        {**run, **values, "eval_returns": list(returns), "versions": installed_versions()},
        indent=2,
        allow_nan=False,
        default=str,
    )
    with written_whole(run_dir / "result.json") as file:
        file.write((text + "\n").encode())


def load_run(run_dir: Path) -> tuple[TrainConfig, dict[str, Any]]:
    """Returns the settings of a run and the state of its last checkpoint.

    Raises:
        ConfigError: `run_dir` is not the directory of a run.
        CheckpointError: There is no checkpoint, or it is damaged.
    """
    config, state = load_config(run_dir), checkpoint.load(run_dir / "checkpoint.pt")
    check_state(state)
    return config, state


def load_checkpoint(run_dir: Path, name: str) -> dict[str, Any]:
    """Returns the state in a checkpoint of a run, with the spaces, which ``best.pt`` leaves to ``checkpoint.pt``.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged.
    """
    state = checkpoint.load(run_dir / name)
    if not state.get("spaces"):
        state["spaces"] = checkpoint.load(run_dir / "checkpoint.pt").get("spaces")
    return state


def best_return(run_dir: Path) -> float | None:
    """Returns the mean return of the evaluation whose weights ``best.pt`` holds; None without one."""
    progress: Any = None
    with contextlib.suppress(CheckpointError):
        progress = checkpoint.load(run_dir / "best.pt").get("progress")
    found = progress.get("best_return") if isinstance(progress, Mapping) else None
    return float(found) if isinstance(found, int | float) else None


def load_config(run_dir: Path) -> TrainConfig:
    """Returns the settings of a run.

    Raises:
        ConfigError: `run_dir` is not the directory of a run, or its settings can't be read.
    """
    path = local_path(run_dir) / "config.yaml"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} can't be read: {error.strerror if isinstance(error, OSError) else error}. "
            + (
                "Ask its owner for permission to read it."
                if isinstance(error, PermissionError)
                else _directory_advice(run_dir)
            )
        ) from None
    try:
        return TrainConfig.from_yaml(text)
    except ConfigError as error:
        error.args = (f"{path}: {error}",)
        raise


def load_result(run_dir: Path) -> dict[str, Any]:
    """Returns ``result.json``; nothing if the run has no result yet.

    Raises:
        ConfigError: The file is damaged.
    """
    path = run_dir / "result.json"
    try:
        result = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        result = error
    if not isinstance(result, dict):
        raise ConfigError(f"{path} can't be read: {result}. Restore the file from a copy, or remove it.")
    return result


def _directory_advice(path: Path) -> str:
    """Returns sentences that say what to pass in place of a path that is not the directory of a run."""
    run_dir = next((each for each in path.parents if (each / "config.yaml").exists()), None)
    if run_dir is not None:
        name, is_other = path.relative_to(run_dir).as_posix(), path.suffix == ".pt" and path.name != "checkpoint.pt"
        option = f" For this checkpoint add --checkpoint {name}, or checkpoint={name!r} in Python." if is_other else ""
        return f"Pass the directory of the run, {str(run_dir)!r}.{option}"
    return "Pass the directory of a run, such as one below runs/."
