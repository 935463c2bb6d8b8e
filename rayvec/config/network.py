"""The settings of networks: your own, or what the default network consists of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from rayvec.config.base import TrainConfig
from rayvec.config.schema import Bounds

__all__ = ["ActorCriticConfig", "NetworkConfig"]


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(TrainConfig):
    """Settings of an algorithm that trains your own network, too."""

    network: str | None = None
    """Function of (observation space, action space, settings) that returns the network to train, as "module:function";
    unset: the default network."""

    action_masks: bool = True
    """Choose only among the actions that the environment allows: where infos or a Dict observation have an
    "action_mask" for a Discrete or MultiDiscrete action space."""


@dataclass(frozen=True, kw_only=True)
class ActorCriticConfig(NetworkConfig):
    """Settings of an algorithm whose network has a policy and a value."""

    activation: Literal["tanh", "relu", "elu", "gelu"] = "tanh"
    """Function after each hidden layer of the default network; convolutional layers always have ReLU."""

    layer_norm: bool = False
    """Normalise each hidden layer of the default network (LayerNorm) before its activation."""

    cnn: Literal["nature", "impala"] = "nature"
    """How the default network reads images: "nature" (three convolutions; three small ones below 36 pixels), or
    "impala" (residual blocks)."""

    log_std_init: Annotated[float, Bounds(-20, 5)] = 0.0
    """Logarithm of the standard deviation of Box actions at the start."""
