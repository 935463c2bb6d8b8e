"""What a pool is requested to collect with a policy."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ChunkRequest"]


class ChunkRequest(NamedTuple):
    """A request for a chunk.

    Attributes:
        num_steps: The number of steps T.
        first_step: The number of steps that the environments took in earlier chunks.
        noise_seed: The seed of the policy's noise.
        by_reference: Whether the chunk stays in Ray's object store. The driver then receives only the summary.
    """

    num_steps: int
    first_step: int = 0
    noise_seed: int = 0
    by_reference: bool = False
