"""The form in which ranks exchange states."""

from __future__ import annotations

import torch

from rayvec.distributed.rank import pack, unpack


def test_tensors_of_any_kind_arrive() -> None:
    """None shares memory with what was packed."""
    state = {
        "large": torch.randn(200, 200),
        "small": [torch.arange(5), torch.tensor(3.0), torch.randn(3, 4).T, torch.tensor([True, False])],
        "of no array of NumPy": (torch.randn(7).bfloat16(), torch.empty(0, 3)),
        "double": torch.randn(2, dtype=torch.float64),
        "plain": {"step": 3, "none": None},
    }
    again = unpack(pack(state))
    assert again["plain"] == state["plain"]
    pairs = [(again[name], state[name]) for name in ("large", "double")]
    for name in ("small", "of no array of NumPy"):
        assert type(again[name]) is type(state[name])
        pairs += zip(again[name], state[name], strict=True)
    for mine, theirs in pairs:  # each is writable, and alone
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        assert torch.equal(mine, theirs)
        mine.copy_(~mine if mine.dtype == torch.bool else mine + 1)
        assert not mine.numel() or not torch.equal(mine, theirs)
