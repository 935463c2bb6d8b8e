"""Weights & Biases: a run of it copies what a run writes for TensorBoard."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rayvec.config import TrainConfig
from rayvec.errors import ConfigError

__all__ = ["import_wandb", "wandb_run"]


@contextlib.contextmanager
def wandb_run(config: TrainConfig, run_dir: Path, run_id: str | None) -> Iterator[str | None]:
    """Lets Weights & Biases copy what TensorBoard gets within the block; yields the id of its run.

    A run of it that is open already is used, and stays open. Otherwise a run begins in the project ``WANDB_PROJECT``,
    or else "rayvec", with its files beside the run's directory.

    Args:
        config: Settings of the run; without `track` nothing happens.
        run_dir: Its directory, which need not exist.
        run_id: What this function yielded before, for a run that is resumed.

    Raises:
        ConfigError: Weights & Biases can't be reached.
    """
    if config.track is None:
        yield run_id
        return
    wandb = import_wandb()
    if wandb.run is not None:
        with contextlib.suppress(ValueError):  # it copies already
            wandb.tensorboard.patch()
        yield run_id
        return
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "rayvec"),
            name=run_dir.name,
            id=run_id,
            resume="allow",
            dir=os.fspath(run_dir.parent),
            config=config.to_plain(),
            sync_tensorboard=True,
        )
    except (wandb.errors.Error, OSError) as error:
        raise ConfigError(
            f"Weights & Biases can't be reached: {' '.join(str(error).split())[:300]}. Run `wandb login`, set "
            "WANDB_MODE=offline, or leave track out."
        ) from error
    with run:
        yield run.id


def import_wandb() -> Any:
    """Returns the package.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise ConfigError(
            f"track='wandb' needs the package wandb: {error}. Install it: pip install wandb. Or leave track out."
        ) from error
