"""Random numbers of a whole batch, cut into the rows of a rank.

A loss that draws noise for every row is the same on N ranks as on one only if the noise of a row does not depend on
the rank that computes it. So all ranks have generators in the same state, draw for the whole batch, and keep their
rows.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rayvec.errors import LearnerError

__all__ = ["Cut", "NoDraws", "SlicedDraws"]


@dataclass(frozen=True)
class Cut:
    """Which rows of a batch one rank computes.

    Attributes:
        total: Rows of the batch on all ranks.
        mine: Positions of this rank's rows in the batch, ``[n]`` int64, in the batch's order. Never empty: a rank
            without a row computes one, with a share of 0.
        share: Rows of this rank over `total`: the weight of a mean over its rows in the mean over all.
    """

    total: int
    mine: Tensor
    share: float


class SlicedDraws(TorchFunctionMode):
    """While it is entered, draws with one row for each of this rank's rows are cut from draws for the whole batch.

    `torch.normal`, `torch.randn`, `torch.rand`, `torch.multinomial` and filling by `normal_`, `uniform_` and
    `exponential_` are cut, with the bits that one rank would have drawn. A draw whose first dimension is not the number
    of rows (the noise of a layer, for example) stays as it is: every rank draws the same. A draw of one dimension is
    never cut, since it may be a layer's, nor one whose rows are a later dimension. Where ranks have different numbers
    of rows, their generators differ after such a draw.

    Attributes:
        cut: The rows of the batch that is being computed; None: nothing is cut.

    Raises:
        LearnerError: A net or a loss draws for every row in a way that can't be cut, as dropout does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cut: Cut | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.cut is not None:
            if func in _CUTS:
                return _CUTS[func](self.cut, *args, **kwargs)
            if func in _UNCUT and _draws(func, args, kwargs):
                raise _refusal(func)
        return func(*args, **kwargs)


class NoDraws(TorchFunctionMode):
    """While it is entered, only distributions may draw: ``sample`` and ``rsample`` of what has a ``log_prob``.

    An on-policy update of Tianshou draws actions that it does not use. Whatever else draws would draw other numbers on
    each rank.

    Raises:
        LearnerError: Something else draws, a net with dropout for example.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (func in _CUTS or (func in _UNCUT and _draws(func, args, kwargs))) and not _is_in_distribution():
            raise LearnerError(
                "In an on-policy update on several ranks, only torch distributions may draw random numbers: other "
                "draws would differ between ranks.",
                expected="nets and losses without dropout and noise",
                got=f"{getattr(func, '__name__', func)}",
                remedy="Leave the noise out, or update with the plain algorithm.",
            )
        return func(*args, **kwargs)


def _is_in_distribution() -> bool:
    """Whether ``sample`` or ``rsample`` of a distribution is running."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("sample", "rsample") and code.co_argcount:
            if hasattr(frame.f_locals.get(code.co_varnames[0]), "log_prob"):
                return True
        frame = frame.f_back
    return False


def _draws(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call of a function of `_UNCUT` draws: dropout does not with a probability of 0 or outside training."""
    signature = _UNCUT[function]
    if signature is None:
        return True
    call = signature.bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    return bool(given.get("p", given.get("dropout_p", 1.0)) and given.get("training", given.get("train", True)))


def _is_by_row(cut: Cut, shape: torch.Size) -> bool:
    return len(shape) > 1 and shape[0] == len(cut.mine)


def _draw(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns `function`, which takes a size, cut."""

    def draw(cut: Cut, *args: Any, **kwargs: Any) -> Tensor:
        size = kwargs.pop("size", args[0] if len(args) == 1 else args)
        shape = torch.Size([size] if isinstance(size, int) else size)
        if not _is_by_row(cut, shape):
            return function(shape, **kwargs)
        return function((cut.total, *shape[1:]), **kwargs)[cut.mine]

    return draw


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns `function`, which fills a tensor, cut."""

    def fill(cut: Cut, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not _is_by_row(cut, tensor.shape):
            return function(tensor, *args, **kwargs)
        whole = torch.empty((cut.total, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
        return tensor.copy_(function(whole, *args, **kwargs)[cut.mine])

    return fill


def _normal(cut: Cut, *args: Any, **kwargs: Any) -> Tensor:
    mean, std = (
        kwargs.get(name, args[place] if len(args) > place else None) for place, name in ((0, "mean"), (1, "std"))
    )
    shape = mean.shape if isinstance(mean, Tensor) else std.shape if isinstance(std, Tensor) else torch.Size()
    if not _is_by_row(cut, shape) or not isinstance(mean, Tensor) or not isinstance(std, Tensor):
        return torch.normal(*args, **kwargs)
    whole = torch.empty((cut.total, *shape[1:]), dtype=mean.dtype, device=mean.device).normal_()
    return whole[cut.mine].mul_(std).add_(mean)


def _multinomial(cut: Cut, weights: Tensor, num_samples: int, replacement: bool = False, **kwargs: Any) -> Tensor:
    if not _is_by_row(cut, weights.shape):
        return torch.multinomial(weights, num_samples, replacement, **kwargs)
    if num_samples != 1:
        raise _refusal(torch.multinomial)
    race = torch.empty((cut.total, *weights.shape[1:]), dtype=weights.dtype, device=weights.device).exponential_(1)
    return (weights / race[cut.mine]).argmax(-1, keepdim=True)  # the first of exponential clocks, as torch does it


def _refusal(function: Any) -> LearnerError:
    return LearnerError(
        "Ranks draw for all rows of a batch and keep their own; this draw can't be cut into rows.",
        expected="torch.normal, randn, rand, normal_, uniform_, exponential_, or multinomial with one sample",
        got=f"{getattr(function, '__name__', function)}",
        remedy="Draw with one of these, leave the noise out, or update with the plain algorithm.",
    )


_CUTS: dict[Any, Callable[..., Tensor]] = {
    torch.normal: _normal,
    torch.randn: _draw(torch.randn),
    torch.rand: _draw(torch.rand),
    torch.multinomial: _multinomial,
    Tensor.multinomial: _multinomial,
    **{function: _in_place(function) for function in (Tensor.normal_, Tensor.uniform_, Tensor.exponential_)},
}
_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu)
_UNCUT: dict[Any, inspect.Signature | None] = {
    **dict.fromkeys(
        (
            torch.bernoulli,
            torch.binomial,
            torch.poisson,
            torch.randint,
            torch.randperm,
            torch.rand_like,
            torch.randn_like,
            torch.randint_like,
            F.gumbel_softmax,
            Tensor.bernoulli,
            Tensor.bernoulli_,
            Tensor.random_,
            Tensor.cauchy_,
            Tensor.geometric_,
            Tensor.log_normal_,
        )
    ),
    **{function: inspect.signature(function) for function in _DROPOUTS},
    **dict.fromkeys((torch.dropout, torch.alpha_dropout), inspect.signature(lambda input, p, train: None)),
    F.scaled_dot_product_attention: inspect.signature(
        lambda query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **others: None
    ),
}
"""Draws that can't be cut; with a signature, those that draw only in training and with a probability."""
