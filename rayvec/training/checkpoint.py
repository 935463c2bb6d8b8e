"""Checkpoints: one file of tensors and plain values that is either whole or not there.

A checkpoint is written beside its final place, flushed to the disk and then renamed over its
predecessor, so that a process killed at any moment leaves the old one or the new one. It is read with
``weights_only=True``: nothing in a checkpoint is executed.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch

from rayvec.errors import CheckpointError

__all__ = ["FORMAT_VERSION", "load", "save"]

FORMAT_VERSION = 2
_KIND = "rayvec checkpoint"


def save(path: Path, state: dict[str, Any]) -> None:
    """Writes `state` to `path`, in place of what is there.

    Args:
        path: Where to; a file beside it with ``.tmp`` added to its name is used on the way.
        state: Dicts with string keys, lists, tuples, tensors, strings, bytes, numbers, booleans and None.

    Raises:
        CheckpointError: `state` holds something else.
        OSError: The disk is full, or the directory can't be written.
    """
    _refuse_objects(state, "state")
    partial = path.with_name(path.name + ".tmp")
    with partial.open("wb") as file:
        torch.save({"kind": _KIND, "format": FORMAT_VERSION, "state": state}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    _sync_directory(path.parent)


def load(path: Path) -> dict[str, Any]:
    """Returns the state that `save` wrote to `path`, its tensors on the CPU.

    Raises:
        CheckpointError: There is no file, it is truncated or damaged, it is no checkpoint of rayvec, or one
            of a later format.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch's own reader does not look at the check sums
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"wrong check sum in {damaged}")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(
            "A checkpoint is a file that a run has written.",
            expected=f"a file {path}",
            got="none",
            remedy="Check the path, or train the run anew.",
        ) from None
    except PermissionError as error:
        raise CheckpointError(
            "A checkpoint is a file that a run has written.",
            expected=f"a file {path} that this user may read",
            got=error.strerror,
            remedy="Ask its owner for permission to read it.",
        ) from None
    except Exception as error:  # torch raises half a dozen unrelated types for damaged files
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise _foreign(path, f"a file that is truncated, damaged or of another program ({reason})") from error
    if not isinstance(content, dict) or content.get("kind") != _KIND or not isinstance(content.get("state"), dict):
        raise _foreign(path, "a file of tensors from another program")
    if content.get("format") != FORMAT_VERSION:
        raise CheckpointError(
            "A checkpoint has a format version.",
            expected=f"version {FORMAT_VERSION} in {path}",
            got=f"version {content.get('format')}",
            remedy="Use the version of rayvec that wrote it.",
        )
    state: dict[str, Any] = content["state"]
    return state


def _foreign(path: Path, got: str) -> CheckpointError:
    return CheckpointError(
        "A checkpoint is read only if it is whole.",
        expected=f"a complete checkpoint of rayvec in {path}",
        got=got,
        remedy="Restore the file from a copy, or train the run anew.",
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
            "A checkpoint holds tensors and plain values only.",
            expected=f"a tensor, str, bytes, number, bool, None, list, tuple or dict at {place}",
            got=type(value).__qualname__,
            remedy="Convert it, for example an array by torch.from_numpy.",
        )


def _sync_directory(directory: Path) -> None:
    """Makes a rename in `directory` survive a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
