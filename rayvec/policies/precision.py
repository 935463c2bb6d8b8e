"""In which precision networks compute while they learn: weights, outputs, losses and optimizers stay in float32."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from rayvec.data import tree_map


class _InBfloat16(nn.Module):
    """Calls a network whose products of matrices and convolutions are then computed in bfloat16.

    Nothing is kept between two calls, so that a graph that is captured reads the current weights.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Any) -> Any:
        """Returns the outputs of the network, those in bfloat16 as float32."""
        device = next(self.parameters()).device
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            outputs = self.network(*inputs)
        return tree_map(lambda leaf: leaf.float() if leaf.dtype == torch.bfloat16 else leaf, outputs)


def in_precision(network: nn.Module, precision: Literal["float32", "tf32", "bf16"], device: torch.device) -> nn.Module:
    """Returns a network that computes in a precision on a device, with the parameters of `network`.

    On a GPU this function also switches TF32, NVIDIA's format, on or off for the whole process: the last call decides.
    So "float32" is float32 in convolutions, too, for which torch's own default is TF32. Elsewhere "tf32" is float32.
    """
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    return _InBfloat16(network) if precision == "bf16" else network
