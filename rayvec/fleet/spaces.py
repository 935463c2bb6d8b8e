"""What environments say of themselves when they have been made: spaces, metadata, sizes of native sub-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from rayvec.errors import ConfigError
from rayvec.fleet.commands import Autoreset


@dataclass(frozen=True, slots=True)
class PoolSpaces:
    """The spaces and metadata of some environments.

    Attributes:
        observation: Space of the first environment's observations.
        action: Space of the first environment's actions.
        metadata: Metadata of the first environment.
        render_mode: Render mode of the first environment.
        num_envs: How many environments there are.
        observations: The observation space of each environment, in order. Empty if all are equal.
        actions_differ: Index and action space of the first environment whose action space differs from `action`.
        sub_batches: Number of environments of each native sub-batch, in order. Empty for ordinary environments.
    """

    observation: Space[Any]
    action: Space[Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    render_mode: str | None = None
    num_envs: int = 1
    observations: tuple[Space[Any], ...] = ()
    actions_differ: tuple[int, Space[Any]] | None = None
    sub_batches: tuple[int, ...] = ()

    @property
    def unit_bounds(self) -> NDArray[np.int64] | None:
        """Bounds of the native sub-batches, ``int64 [sub-batches + 1]``, or None."""
        return np.cumsum([0, *self.sub_batches]) if self.sub_batches else None

    @property
    def native_mode(self) -> Autoreset | None:
        """The autoreset mode of native sub-batches, or None."""
        return Autoreset[self.metadata["autoreset_mode"].name] if self.sub_batches else None

    @classmethod
    def join(cls, parts: Sequence[PoolSpaces]) -> PoolSpaces:
        """Joins the spaces of consecutive environments."""
        first, sizes = parts[0], [part.num_envs for part in parts]
        for mode in (part.metadata.get("autoreset_mode") for part in parts if part.sub_batches):
            if mode != first.metadata.get("autoreset_mode"):
                raise ConfigError(
                    f"Native sub-batches have different autoreset modes: {first.metadata.get('autoreset_mode')} and "
                    f"{mode}. Make them with one autoreset_mode."
                )
        others = [(0, part.action) if part.action != first.action else part.actions_differ for part in parts]
        starts = accumulate(sizes, initial=0)
        differ = next(((start + each[0], each[1]) for start, each in zip(starts, others, strict=False) if each), None)
        same = all(part.observation == first.observation and not part.observations for part in parts)
        every = [space for part in parts for space in (part.observations or (part.observation,) * part.num_envs)]
        return cls(
            first.observation,
            first.action,
            first.metadata,
            first.render_mode,
            sum(sizes),
            () if same else tuple(every),
            differ,
            tuple(size for part in parts for size in part.sub_batches),
        )

    def check_native(self, num_envs: int | None, mode: AutoresetMode | None) -> None:
        """Checks what a caller demands of native sub-batches: their number of environments and autoreset mode.

        Raises:
            ConfigError: They have another.
        """
        if self.sub_batches and num_envs not in (None, self.num_envs):
            raise ConfigError(
                f"num_envs={num_envs} was passed, but the native sub-batches have {self.num_envs} environments "
                f"together ({list(self.sub_batches)[:8]}). With a list of callables, leave num_envs out. Otherwise let "
                "num_envs and workers_per_node give each worker as many rows as its vector environment can have (for "
                "games, a multiple of the number of agents); where that number is fixed, pass workers_per_node=1."
            )
        if self.sub_batches and mode not in (None, self.metadata["autoreset_mode"]):
            raise ConfigError(
                f"autoreset_mode={mode} was passed, but the native sub-batches, which reset by themselves, have "
                f"{self.metadata['autoreset_mode']}. Leave autoreset_mode out, or make the sub-batches with another; "
                "make_vec passes env_kwargs={'autoreset_mode': ...} to the vector entry point."
            )

    def misfit(self, space: Space[Any], *, same: bool = False) -> tuple[int, Space[Any]] | None:
        """Returns the first environment whose observations don't fit arrays of `space`, or None if all do.

        Args:
            space: The space.
            same: Whether they must have just this space.

        Returns:
            Its index and its observation space.
        """
        for index, each in enumerate(self.observations or (self.observation,)):
            if each != space and (same or not is_space_dtype_shape_equiv(each, space)):
                return index, each
        return None
