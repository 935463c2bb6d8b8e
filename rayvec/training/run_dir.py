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
import fcntl
import json
import os
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rayvec.config import TrainConfig
from rayvec.config.references import is_unnamed
from rayvec.errors import CheckpointError, ConfigError
from rayvec.training import checkpoint
from rayvec.training.atomic_files import installed_versions, local_path, written_whole


def free_run_dir(config: TrainConfig) -> Path:
    """Returns the directory of a run that is about to begin, named by the settings or by what the run is and when.

    Raises:
        ConfigError: There is something where the settings want it.
    """
    if config.run_dir is None:  # several runs may begin in one second, also on machines that share a disk
        env_name = re.sub(r"[^\w.-]+", "-", config.native or config.env_id).strip("-")
        began = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
        return Path("runs", f"{env_name}-{config.algorithm}-seed{config.seed}-{began}")
    run_dir = local_path(config.run_dir)
    if os.path.lexists(run_dir):
        is_run = (run_dir / "config.yaml").exists()
        advice = f"Resume that run ({resume_command(config, run_dir)}), or pass" if is_run else "Pass"
        raise ConfigError(f"The directory of the run can't be {run_dir}, which exists. {advice} another run_dir.")
    return run_dir


def begin_run_dir(run_dir: Path, config: TrainConfig, state: dict[str, Any]) -> None:
    """Makes the directory of a run with its settings and a first checkpoint: all of it, or nothing.

    A run that is killed at any time can be resumed if its directory exists.

    Raises:
        OSError: The directory can't be made, or another process has made it.
    """
    partial = run_dir.with_name(f".{secrets.token_hex(8)}.tmp")  # no part of a name that may be as long as one can be
    try:
        partial.mkdir(parents=True)
        save_config(partial, config)
        checkpoint.save(partial / "checkpoint.pt", state)
        partial.rename(run_dir)  # replaces an empty directory at most
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
    directory = os.open(run_dir, os.O_RDONLY)
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
    result = {**run, **values, "eval_returns": list(returns), "versions": installed_versions()}
    with written_whole(run_dir / "result.json") as file:
        file.write((json.dumps(result, indent=2, allow_nan=False, default=str) + "\n").encode())


def load_run(run_dir: Path) -> tuple[TrainConfig, dict[str, Any]]:
    """Returns the settings of a run and the state of its last checkpoint.

    Raises:
        ConfigError: `run_dir` is not the directory of a run.
        CheckpointError: There is no checkpoint, or it is damaged.
    """
    config, state = load_config(run_dir), checkpoint.load(run_dir / "checkpoint.pt")
    if missing := sorted({"weights", "learner", "collector", "progress"} - state.keys()):
        raise checkpoint.incomplete(f"no {', '.join(missing)}")
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
    with contextlib.suppress(CheckpointError):
        found: float | None = checkpoint.load(run_dir / "best.pt")["progress"]["best_return"]
        return found
    return None


def load_config(run_dir: Path) -> TrainConfig:
    """Returns the settings of a run.

    Raises:
        ConfigError: `run_dir` is not the directory of a run, or its settings can't be read.
    """
    path = local_path(run_dir) / "config.yaml"
    try:
        return TrainConfig.from_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} can't be read: {getattr(error, 'strerror', None) or error}. Pass the directory of a run, such as "
            "one below runs/; a checkpoint in it is named by checkpoint=, or --checkpoint."
        ) from None
    except ConfigError as error:
        error.args = (f"{path}: {error}",)
        raise


def load_result(run_dir: Path) -> dict[str, Any]:
    """Returns ``result.json``; nothing if the run has no result yet."""
    path = run_dir / "result.json"
    result: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    return result


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of a metrics file but those that are incomplete or damaged; nothing if it is absent."""
    for data in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):  # no JSON, or no UTF-8
            line = json.loads(data)
            if isinstance(line, dict) and isinstance(line.get("steps"), int):
                yield line


def resume_command(config: TrainConfig, run_dir: Path) -> str:
    """Returns how to resume a run: on the command line, or in Python where a part has no name."""
    names = {"env": config.env_id, "eval_env": config.eval_env, "network": getattr(config, "network", None)}
    unnamed = [f", {argument}=..." for argument, name in names.items() if name is not None and is_unnamed(name)]
    if unnamed:
        return f"rayvec.resume({str(run_dir)!r}{''.join(unnamed)})"
    plugins = "".join(f" --plugin {module}" for module in config.plugin)
    return f"rayvec train {config.algorithm}{plugins} --resume {shlex.quote(str(run_dir))}"
