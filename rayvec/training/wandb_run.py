"""Weights & Biases: a run of it copies what a run writes for TensorBoard."""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import Any

from rayvec.config import TrainConfig
from rayvec.errors import ConfigError
from rayvec.training.callbacks import RunContext

__all__ = ["WeightsAndBiases"]


class WeightsAndBiases:
    """Lets Weights & Biases copy what TensorBoard gets; it stands before `TensorBoard` in the list of callbacks.

    A run of it that is open already is used, and stays open. Otherwise a run begins in the project ``WANDB_PROJECT``,
    or else "rayvec", with its files beside the run's directory. A resumed run continues in the same one.

    Args:
        config: Settings of the run.

    Raises:
        ConfigError: The package is not installed.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._settings = config.to_plain()
        self._run: Any = None
        try:
            self._wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise ConfigError(
                f"track='wandb' needs the package wandb: {error}. Install it: pip install wandb. Or leave track out."
            ) from error

    def on_start(self, context: RunContext) -> None:
        """Begins or continues a run of Weights & Biases.

        Raises:
            ConfigError: The service can't be reached.
        """
        wandb, progress = self._wandb, context.progress
        if self._run is None and wandb.run is not None:
            with contextlib.suppress(ValueError):  # it copies already
                wandb.tensorboard.patch()
        elif self._run is None:
            try:
                self._run = wandb.init(
                    project=os.environ.get("WANDB_PROJECT", "rayvec"),
                    name=context.run_dir.name,
                    id=progress.tracker_run,
                    resume="allow",
                    dir=os.fspath(context.run_dir.parent),
                    config=self._settings,
                    sync_tensorboard=True,
                )
            except (wandb.errors.Error, OSError) as error:
                raise ConfigError(
                    f"Weights & Biases can't be reached: {' '.join(str(error).split())[:300]}. Run `wandb login`, "
                    "set WANDB_MODE=offline, or leave track out."
                ) from error
        if self._run is not None:
            progress.tracker_run = self._run.id

    def on_close(self, context: RunContext) -> None:
        """Ends the run that was begun; TensorBoard must be closed before."""
        if self._run is not None:
            self._run.finish(exit_code=int(context.error is not None))
