"""Access to Ray's object store, from which a learner's ranks fetch chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rayvec.data import Chunk, ChunkRef, Rollout, RolloutTimes
from rayvec.data.join_chunks import summarize
from rayvec.errors import ConfigError

__all__ = ["as_rollout", "check_object_store", "room_for"]


def check_object_store() -> None:
    """Checks that Ray is initialised, which chunks by reference require.

    Raises:
        ConfigError: Ray is not initialised, so there is no object store.
    """
    import ray  # imported here: programs without ranks save a third of a second

    if not ray.is_initialized():
        raise ConfigError(
            "by_reference=True needs Ray's object store, and Ray is not initialised. Leave it out, or make the "
            "LearnerGroup first."
        )


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


def as_rollout(
    chunk: Chunk, by_reference: bool, times: tuple[RolloutTimes, ...], waited_s: float, num_padded: int = 0
) -> Rollout:
    """Returns a chunk as the result of a rollout. By reference, it puts the chunk into the object store."""
    summary = summarize(chunk)
    if not by_reference:
        return Rollout(summary, chunk, (), times, waited_s, num_padded)
    import ray

    with room_for("a chunk"):
        ref = ChunkRef(summary.env_ids, summary.num_steps, ray.put(chunk))
    return Rollout(summary, None, (ref,), times, waited_s, num_padded)
