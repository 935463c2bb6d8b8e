"""Checkpoints: one file of tensors and plain values that is either whole or not there.

A process that is killed while it writes leaves the old checkpoint or the new one. Checkpoints are read with
``weights_only=True``: nothing in a checkpoint is executed.
"""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rayvec.config import TrainConfig
from rayvec.config.algorithms import NetworkConfig
from rayvec.data.plain_bytes import from_bytes, to_bytes
from rayvec.env_server import space_message
from rayvec.errors import CheckpointError, ConfigError, RayvecError, require
from rayvec.policies.encoders import leaf_spaces
from rayvec.servers.server_env import space_of
from rayvec.training.atomic_files import written_whole
from rayvec.wrappers import MASK_KEY

FORMAT_VERSION = 5
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


def spaces_to_bytes(*described: spaces.Space[Any]) -> list[bytes] | None:
    """Returns what `spaces_from_bytes` makes equal spaces from; None if one is of another class than Gymnasium's."""
    try:
        return [to_bytes(space_message(space)) for space in described]
    except TypeError:
        return None


def spaces_from_bytes(data: Sequence[bytes] | None) -> list[spaces.Space[Any]]:
    """Returns the spaces that `spaces_to_bytes` described; none where it could not."""
    return [space_of(from_bytes(each)) for each in data or ()]


_WIDE, _UNBOUNDED = 100.0, 1e30
"""Bounds beyond the second mean that there is none."""


def warn_of_wide_ranges(observation_space: spaces.Space[Any], config: TrainConfig) -> None:
    """Warns where a Box has bounds beyond ±100 and nothing normalises what the default network reads."""
    if not isinstance(config, NetworkConfig) or config.network is not None or config.normalize_obs:
        return
    for path, leaf in leaf_spaces(observation_space):
        if isinstance(leaf, spaces.Box) and leaf.dtype != np.uint8:
            bounds = np.abs(np.stack([leaf.low, leaf.high]).astype(np.float64))
            wide = bounds[(bounds > _WIDE) & (bounds < _UNBOUNDED)]
            if wide.size:
                place = "".join(f"[{key!r}]" for key in path)
                warnings.warn(
                    f"Observations{place} range up to ±{wide.max():g}, and nothing normalises them. Networks learn "
                    f"badly from numbers beyond ±{_WIDE:g}. Pass normalize_obs=True, or scale them in the environment.",
                    UserWarning,
                    stacklevel=2,
                )


def check_kept_spaces(found: Sequence[spaces.Space[Any]], state: Mapping[str, Any]) -> None:
    """Raises a ConfigError where the environments have other spaces than the run whose state is given."""
    kept = spaces_from_bytes(state.get("spaces"))
    for name, ours, theirs in zip(("observations", "actions"), found, kept, strict=False):
        require(
            _parts_of(ours) == _parts_of(theirs),
            f"The environments have {name} of {ours}, and the run began with {theirs}. Use an environment with the "
            "same spaces, or start a new run.",
        )


def _parts_of(space: spaces.Space[Any]) -> list[Any]:
    """Returns what a network reads or chooses, in its order: not the mask, nor the bounds of numbers."""
    leaves = [(path, leaf) for path, leaf in leaf_spaces(space) if path != (MASK_KEY,)]
    is_beside_mask = {path[:1] for path, _ in leaves} == {("observation",)}  # as rayvec.wrappers.ActionMask has it
    sizes = [np.array(getattr(leaf, "nvec", getattr(leaf, "n", None))).tolist() for _, leaf in leaves]
    return [
        (path[1:] if is_beside_mask else path, type(leaf), leaf.shape, size)
        for (path, leaf), size in zip(leaves, sizes, strict=True)
    ]
