"""Access to Ray's object store, from which a learner's ranks fetch chunks."""

from __future__ import annotations

from typing import Any

from rayvec.errors import ConfigError

__all__ = ["check_object_store", "put_object"]


def check_object_store() -> None:
    """Checks that Ray is initialised, which chunks by reference require.

    Raises:
        ConfigError: Ray is not initialised, so there is no object store.
    """
    import ray  # imported here: programs without ranks save a third of a second

    if not ray.is_initialized():
        raise ConfigError(
            "by_reference=True leaves a chunk in Ray's object store.",
            expected="an initialised Ray, such as that of a LearnerGroup",
            got="environments on this machine without Ray, and no Ray",
            remedy="Leave by_reference out, or make the LearnerGroup first.",
        )


def put_object(value: Any) -> Any:
    """Puts a value into the object store and returns its reference."""
    import ray

    return ray.put(value)
