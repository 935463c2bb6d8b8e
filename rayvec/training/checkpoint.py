"""Checkpoints: one file of tensors and plain values that is either whole or not there.

A process that is killed while it writes leaves the old checkpoint or the new one. Checkpoints are read with
``weights_only=True``: nothing in a checkpoint is executed.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rayvec.errors import CheckpointError, ConfigError, RayvecError
from rayvec.training.atomic_files import written_whole

__all__ = ["FORMAT_VERSION", "acting_weights", "incomplete", "load", "restore", "save"]

FORMAT_VERSION = 2
_KIND = "rayvec checkpoint"


def save(path: Path, state: dict[str, Any]) -> None:
    """Writes `state` to `path` and replaces what is there; see :func:`rayvec.training.atomic_files.written_whole`.

    Args:
        path: The file.
        state: Dicts with string keys, lists, tuples, tensors, strings, bytes, numbers, booleans and None.

    Raises:
        CheckpointError: `state` holds something else.
        ConfigError: The file can't be made.
        OSError: The disk is full.
    """
    _refuse_objects(state, "state")
    with written_whole(path) as file:
        try:
            torch.save({"kind": _KIND, "format": FORMAT_VERSION, "state": state}, file)
        except RuntimeError as error:  # after a failed write, torch fails to close its archive
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def load(path: Path) -> dict[str, Any]:
    """Returns the state that `save` wrote to `path`, its tensors on the CPU.

    Raises:
        CheckpointError: The file is missing, unreadable, truncated, damaged, not a checkpoint of rayvec, or of
            another format version.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch's own reader does not look at the check sums
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"wrong check sum in {damaged}")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"There is no checkpoint {path}. Check the path, or start a new run.") from None
    except Exception as error:  # torch raises half a dozen unrelated types for damaged files
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise _foreign(path, f"a file that is truncated, damaged or from another program ({reason})") from error
    if not isinstance(content, dict) or content.get("kind") != _KIND or not isinstance(content.get("state"), dict):
        raise _foreign(path, "a file of tensors from another program")
    if content.get("format") != FORMAT_VERSION:
        raise CheckpointError(
            f"The checkpoint {path} has format version {content.get('format')}. This version of rayvec reads "
            f"version {FORMAT_VERSION}: use the one that wrote it."
        )
    state: dict[str, Any] = content["state"]
    return state


def acting_weights(state: Mapping[str, Any]) -> NDArray[np.float32]:
    """Returns the acting weights of a checkpoint, ``float32 [P]``.

    Raises:
        CheckpointError: It has none.
    """
    weights = state.get("weights")
    if not isinstance(weights, torch.Tensor):
        raise incomplete("no weights")
    return weights.numpy()


def restore(part: Any, state: Any) -> None:
    """Lets a learner or collector continue from a state.

    Raises:
        CheckpointError: The state is that of another one.
    """
    try:
        part.load_state_dict(state)
    except Exception as error:
        if isinstance(error, RayvecError | torch.OutOfMemoryError) and not isinstance(error, ConfigError):
            raise
        raise incomplete(f"{type(part).__name__}: {type(error).__name__}: {error}") from error


def incomplete(problem: str) -> CheckpointError:
    """Returns the error of a checkpoint that is whole, but not the state of this run."""
    return CheckpointError(
        f"The checkpoint is not the whole state of this run ({problem}). Use the version of rayvec and the "
        "config.yaml that it was written with, or start a new run."
    )


def _foreign(path: Path, got: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is no undamaged checkpoint: it is {got}. Restore the file from a copy or from checkpoints/, or start "
        "a new run."
    )


def _refuse_objects(value: object, place: str) -> None:
    """Raises a CheckpointError that names the first thing in `value` that is neither a tensor nor plain."""
    if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
        for key, item in value.items():
            _refuse_objects(item, f"{place}[{key!r}]")
    elif isinstance(value, list | tuple) and type(value) in (list, tuple):
        for index, item in enumerate(value):
            _refuse_objects(item, f"{place}[{index}]")
    elif value is not None and type(value) not in (bool, int, float, str, bytes, torch.Tensor):
        raise CheckpointError(
            f"{place} is a {type(value).__qualname__}. A checkpoint holds tensors and plain values only: convert "
            "it, for example an array by torch.from_numpy."
        )
