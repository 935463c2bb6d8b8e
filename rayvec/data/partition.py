"""Divides N things evenly among parts; the first parts may have one more."""

from __future__ import annotations

from itertools import accumulate

__all__ = ["even_bounds"]


def even_bounds(num_envs: int, num_parts: int, first: int = 0) -> tuple[int, ...]:
    """Returns the bounds of slices whose sizes differ by one at most.

    >>> even_bounds(7, 3)
    (0, 3, 5, 7)
    """
    small, larger = divmod(num_envs, num_parts)
    sizes = [small + (part < larger) for part in range(num_parts)]
    return tuple(accumulate(sizes, initial=first))
