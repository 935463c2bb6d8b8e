"""One update of soft actor-critic, compiled: as one graph on a single rank, in parts where ranks sum gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rayvec.learners.compiling import Compiled, CUDAGraph, GraphPool, can_capture
from rayvec.learners.ranks import ALONE, Ranks
from rayvec.learners.sac_math import Minibatch, Nets, SACMath

if TYPE_CHECKING:
    from rayvec.config import SACConfig

__all__ = ["SACUpdate", "UpdateInputs"]


class UpdateInputs(NamedTuple):
    """What an update reads.

    Attributes:
        minibatch: B transitions.
        noise: Standard normal, for the critics' targets and then for each step of the actor, ``[1 + k, B, C]``.
        correction: What :func:`~rayvec.learners.sac_math.corrections` returns, for the critics' step and then for each
            step of the actor, ``[1 + k, 3]``. Where k is 0, the update leaves the actor as it is.
    """

    minibatch: Minibatch
    noise: Tensor
    correction: Tensor


class _Parts(NamedTuple):
    """The parts of an update; gradients are summed between them."""

    critic_gradient: Callable[..., Any]
    critic_step: Callable[..., Any]
    actor_gradient: Callable[..., Any]
    actor_step: Callable[..., Any]


class SACUpdate:
    """Changes nets by one minibatch.

    Args:
        sac: The formulas.
        config: Says whether updates are compiled, and captured on a GPU.
        device: Where the nets are.
    """

    def __init__(self, sac: SACMath, config: SACConfig, device: torch.device) -> None:
        is_compiled = config.compile is True  # "auto" is decided by rayvec.train
        eager = _Parts(sac.critic_gradient, sac.critic_step, sac.actor_gradient, sac.actor_step)
        self._eager = eager
        self._parts = _Parts(*map(_compiled, eager)) if is_compiled else eager

        def whole(nets: Nets, *inputs: Any) -> Tensor:
            return _update(eager, ALONE.sum_, nets, *inputs)

        pool = GraphPool()

        def fast() -> Callable[..., Tensor]:
            graph = _compiled(whole) if is_compiled else whole
            return CUDAGraph(graph, pool) if is_compiled and can_capture(device) else graph

        self._graphs = {has_actor: fast() for has_actor in (False, True)}

    def __call__(self, nets: Nets, inputs: UpdateInputs, ranks: Ranks) -> Tensor:
        """Returns the metrics of an update, ``[7]``, 0 for those of the actor where the update leaves it as it is."""
        if ranks.size == 1:
            return self._graphs[len(inputs.correction) > 1](nets, *inputs)
        parts = self._parts if len(inputs.noise[0]) else self._eager  # an empty minibatch has no graph
        return _update(parts, ranks.sum_, nets, *inputs)


def _update(
    parts: _Parts,
    sum_: Callable[[Tensor], Tensor],
    nets: Nets,
    minibatch: Minibatch,
    noise: Tensor,
    correction: Tensor,
) -> Tensor:
    grad, critic_stats = parts.critic_gradient(nets, minibatch, noise[0])
    critic_norm = parts.critic_step(nets, sum_(grad), correction[0])
    actor_stats, actor_norm = torch.zeros_like(critic_stats), torch.zeros_like(critic_stats)
    for k in range(1, len(correction)):
        grad, actor_stats = parts.actor_gradient(nets, minibatch, noise[k])
        actor_norm = parts.actor_step(nets, sum_(grad), correction[k])
    return torch.cat([critic_stats, actor_stats, critic_norm, actor_norm])


def _compiled(function: Callable[..., Any]) -> Compiled:
    """Returns a part of an update compiled.

    Unrolled, a sum over the components of an action would be one loop over rows without vector instructions, with the
    exponentials and logarithms of all components in it.
    """
    return Compiled(function, unroll_reductions_threshold=1)
