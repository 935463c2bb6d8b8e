"""The settings of a recurrent policy, which PPO and IMPALA share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from rayvec.config.base import Count
from rayvec.config.schema import Bounds
from rayvec.errors import ConfigError

if TYPE_CHECKING:
    from rayvec.config.impala import IMPALAConfig
    from rayvec.config.ppo import PPOConfig

__all__ = ["RecurrentSettings", "check_recurrent"]


@dataclass(frozen=True, kw_only=True)
class RecurrentSettings:
    """Memory between what reads observations and the heads of actor and critic."""

    recurrent: Literal["gru", "lstm"] | None = None
    """Recurrent cell that actor and critic share, for tasks in which one observation does not tell enough; unset: the
    policy has no memory."""

    recurrent_size: Count = 64
    """Units of the recurrent cell."""

    sequence_length: Count = 16
    """Steps through which gradients flow back in the recurrent cell: chunks are cut into sequences of this length, and
    a minibatch has whole sequences."""

    burn_in: Annotated[int, Bounds(0)] = 0
    """Steps before each sequence, without gradients, that bring its recorded hidden state up to the newest weights; the
    first sequence of a chunk has none."""


def check_recurrent(config: PPOConfig | IMPALAConfig) -> None:
    """Refuses settings of a recurrent policy that can't work."""
    if config.recurrent is None:
        return
    if config.network is not None:
        raise ConfigError(
            "recurrent gives the default network a memory.",
            expected="recurrent or network, not both",
            got=f"recurrent={config.recurrent!r}, network={config.network!r}",
            remedy="Leave one of them out.",
        )
    if config.compile is True:
        raise ConfigError(
            "The update of a recurrent policy can't be compiled.",
            expected="compile=False with recurrent",
            got=f"compile=True with recurrent={config.recurrent!r}",
            remedy="Leave compile out.",
        )
    if config.sequence_length > config.num_steps:
        raise ConfigError(
            "A sequence is part of what an environment does in one iteration.",
            expected=f"sequence_length at most num_steps = {config.num_steps}",
            got=config.sequence_length,
            remedy="Lower sequence_length, or raise num_steps.",
        )
    if config.burn_in >= config.sequence_length:
        raise ConfigError(
            "The steps of burn-in are the last ones of the sequence before.",
            expected=f"burn_in below sequence_length = {config.sequence_length}",
            got=config.burn_in,
            remedy="Lower burn_in, or raise sequence_length.",
        )
