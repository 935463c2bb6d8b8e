"""Products of matrices by oneDNN, on any processor that has its operator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rayvec.learners import products


@pytest.fixture(params=[True, False], ids=["oneDNN", "MKL"])
def uses_onednn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    if request.param and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch was built without oneDNN's operator")
    monkeypatch.setattr(products, "_is_faster", lambda: request.param)
    monkeypatch.setattr(products, "_MOST_BY_MKL", 0)
    calls: list[int] = []
    used = products._onednn
    monkeypatch.setattr(products, "_onednn", lambda *args: calls.append(1) or used(*args))
    yield request.param
    assert bool(calls) == request.param


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("num_nets", [1, 3])
@pytest.mark.parametrize("relu", [True, False])
def test_linear_layers(uses_onednn: bool, num_nets: int, relu: bool) -> None:
    rows, weight, bias = random(num_nets, 9, 5), random(num_nets, 7, 5), random(num_nets, 7)
    outputs = products.linear(rows, weight, bias, relu=relu)
    expected = rows.double() @ weight.double().mT + bias.double().unsqueeze(1)
    torch.testing.assert_close(outputs.double(), expected.relu() if relu else expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_nets", [1, 3])
@pytest.mark.parametrize("is_transposed", [True, False])
@pytest.mark.parametrize("has_out", [True, False])
def test_products(uses_onednn: bool, num_nets: int, is_transposed: bool, has_out: bool) -> None:
    a, b = random(num_nets, 9, 5), random(num_nets, 5, 7)
    if is_transposed:
        a, b = random(num_nets, 5, 9).mT, random(num_nets, 7, 5).mT
    out = random(num_nets, 9, 7) if has_out else None
    result = products.bmm(a, b, out=out)
    assert out is None or result is out
    torch.testing.assert_close(result.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


def test_what_onednn_can_not_do_or_would_not_speed_up_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_is_faster", lambda: True)
    monkeypatch.setattr(products, "_onednn", None)
    for rows, columns, dtype, device in [
        (256, 64, torch.float32, "cpu"),
        (256, 256, torch.float64, "cpu"),
        (256, 256, torch.float32, "meta"),
        (0, 256, torch.float32, "cpu"),
    ]:
        a = torch.zeros(2, rows, columns, dtype=dtype, device=device)
        b = torch.zeros(2, columns, columns, dtype=dtype, device=device)
        assert products.bmm(a, b).shape == (2, rows, columns)
