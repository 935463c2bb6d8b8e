"""Room in Ray's object store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rayvec.errors import ConfigError

__all__ = ["room_for"]


@contextlib.contextmanager
def room_for(what: str) -> Iterator[None]:
    """Puts something into the object store, or gets it from there, in the block; `what` names it.

    Raises:
        ConfigError: The store is full, and so is the disk to which it moves what has no room.
    """
    import ray

    try:
        yield
    except (ray.exceptions.OutOfDiskError, ray.exceptions.ObjectStoreFullError) as error:
        raise ConfigError(
            f"Ray's object store, and the disk of its temporary directory, have no room for {what}. Free that disk, "
            "start Ray with a larger --object-store-memory, or lower num_steps or num_envs."
        ) from error
