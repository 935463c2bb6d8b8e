"""Products of matrices by oneDNN and transposed, on any processor that has the operators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from rayvec.learners import products
from rayvec.learners.compiling import Compiled


@pytest.fixture(params=[True, False], ids=["oneDNN", "MKL"])
def uses_onednn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    if request.param and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch was built without oneDNN's operator")
    monkeypatch.setattr(products, "_onednn_is_faster", lambda: request.param)
    monkeypatch.setattr(products, "_LEAST", 1)
    calls = counted(monkeypatch)
    yield request.param
    assert bool(calls) == request.param


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that grows with every product by oneDNN."""
    calls: list[int] = []
    used = products._affine
    monkeypatch.setattr(products, "_affine", lambda *args: calls.append(1) or used(*args))
    return calls


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
    monkeypatch.setattr(products, "_onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "_affine", None)
    for rows, columns, dtype, device in [
        (256, 64, torch.float32, "cpu"),
        (256, 256, torch.float64, "cpu"),
        (256, 256, torch.float32, "meta"),
        (0, 256, torch.float32, "cpu"),
    ]:
        a = torch.zeros(2, rows, columns, dtype=dtype, device=device)
        b = torch.zeros(2, columns, columns, dtype=dtype, device=device)
        assert products.bmm(a, b).shape == (2, rows, columns)


def several_products(bias: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Computes a layer of one net and then one of two, and their gradients."""

    def loss(bias: Tensor, weights: Tensor) -> Tensor:
        hidden = torch.addmm(bias, rows, weights[0]).tanh()
        return torch.bmm(hidden.expand(2, -1, -1), weights).square().sum()

    return torch.func.grad(loss, argnums=(0, 1))(bias, weights)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch was built without oneDNN's operator")
    monkeypatch.setattr(products, "_onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "mkl_is_slow", lambda: True)
    return counted(monkeypatch)


def traced(*args: Tensor, function: Any = several_products, mode: str = "symbolic") -> Any:
    """Traces it, by default with sizes that may change, and changes its products, as the compiler does."""
    from rayvec.learners.compiled_products import FasterProducts  # imports the compiler

    graph = make_fx(function, tracing_mode=mode)(*args)
    FasterProducts()(graph.graph)
    graph.recompile()
    return graph


@pytest.mark.parametrize(
    "compiled", [traced, pytest.param(lambda *args: Compiled(several_products), id="compiled", marks=pytest.mark.slow)]
)
def test_compiled_graphs_multiply_large_matrices_by_onednn(compiled: Any, calls: list[int]) -> None:
    bias, weights = random(256), random(2, 256, 256) / 16
    inputs = [(bias, random(num_rows, 256), weights) for num_rows in (200, 137)]
    for _, rows, _ in inputs:
        torch._dynamo.maybe_mark_dynamic(rows, 0)
    function = compiled(*inputs[0])
    calls.clear()
    for each in inputs:  # by one graph: a layer, its weight's gradient, three products of two nets
        num_calls = len(calls)
        results = function(*each)
        assert len(calls) == num_calls + 8
        for result, expected in zip(results, several_products(*each), strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_compiled_graphs_leave_small_products_to_torch(calls: list[int]) -> None:
    inputs = random(64), random(256, 64), random(2, 64, 64)
    traced(*inputs, mode="fake")(*inputs)
    many = random(512, 128, 64), random(512, 64, 128)
    traced(*many, function=torch.bmm, mode="fake")(*many)
    assert not calls


@pytest.mark.parametrize(
    "bias",
    [random(256, 2)[:, 1], random(512)[::2], random(1).expand(256), random(1)],
    ids=["column", "every other", "expanded", "one"],
)
def test_a_bias_of_any_stride(bias: Tensor, calls: list[int]) -> None:
    inputs = bias, random(256, 256), random(256, 256)
    result = traced(*inputs, function=torch.addmm, mode="fake")(*inputs)
    torch.testing.assert_close(result, torch.addmm(*inputs), rtol=1e-4, atol=1e-4)
    assert calls


@pytest.fixture(params=[True, False], ids=["AMD", "other"])
def is_amd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(products, "mkl_is_slow", lambda: request.param)
    monkeypatch.setattr(products, "_onednn_is_faster", lambda: False)
    return bool(request.param)


@pytest.mark.parametrize("num_nets", [1, 3])
@pytest.mark.parametrize("is_transposed", [True, False])
@pytest.mark.parametrize("has_out", [True, False])
@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(64, 9, 7), (32, 9, 31), (64, 1, 7), (64, 9, 1), (31, 9, 7), (64, 9, 32)]
)
def test_products_with_few_columns(
    is_amd: bool, num_nets: int, is_transposed: bool, has_out: bool, rows: int, inner: int, columns: int
) -> None:
    a, b = random(num_nets, rows, inner), random(num_nets, inner, columns)
    if is_transposed:
        a, b = random(num_nets, inner, rows).mT, random(num_nets, columns, inner).mT
    out = torch.full((num_nets, rows, columns), float("nan")) if has_out else None
    result = products.bmm(a, b, out=out)
    assert out is None or result is out
    torch.testing.assert_close(result.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
    if inner > 1 and not has_out:
        assert result.is_contiguous() != (is_amd and (rows, columns) in [(64, 7), (32, 31)])


def gradients(rows: Tensor, narrow: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Computes products whose results and gradients have few columns, one right after another, by one net and two."""

    def loss(narrow: Tensor, weights: Tensor) -> Tensor:
        hidden = (rows @ narrow).expand(2, -1, -1)
        return torch.bmm(hidden, weights).square().sum()

    return torch.func.grad(loss, argnums=(0, 1))(narrow, weights)


def check_gradients(function: Any, num_rows: int) -> None:
    inputs = random(num_rows, 40), random(40, 7), random(2, 7, 33)
    torch._dynamo.maybe_mark_dynamic(inputs[0], 0)
    for result, expected in zip(function(*inputs), gradients(*inputs), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_compiled_graphs_transpose_products_with_few_columns(is_amd: bool) -> None:
    graph = traced(random(200, 40), random(40, 7), random(2, 7, 33), function=gradients, mode="fake")
    check_gradients(graph, 200)
    # what the pass adds has no shape yet
    shapes = [tuple(node.meta["val"].shape) for node in graph.graph.nodes if "mm" in str(node.target) and node.meta]
    wide = [(2, 200, 33), (2, 7, 33)]
    assert shapes == (wide if is_amd else [(200, 7), *wide, (2, 200, 7), (40, 7)])


@pytest.mark.slow
def test_one_compiled_graph_transposes_products_for_any_number_of_rows(
    is_amd: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    from rayvec.learners import compiled_products

    transposed: list[Any] = []
    used = compiled_products._transpose
    monkeypatch.setattr(compiled_products, "_transpose", lambda *args: (transposed.append(args), used(*args)))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    function = Compiled(gradients)
    check_gradients(function, 200)
    check_gradients(function, 137)
    assert len(transposed) == (3 if is_amd else 0)
    assert not any("uncompiled" in str(each.message) for each in recwarn)


def test_torchs_cache_keeps_graphs_of_other_processors_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from rayvec.learners.compiled_products import FasterProducts

    keys = set()
    for is_slow, is_faster in [(False, False), (True, False), (True, True)]:
        monkeypatch.setattr(products, "mkl_is_slow", lambda is_slow=is_slow: is_slow)
        monkeypatch.setattr(products, "_onednn_is_faster", lambda is_faster=is_faster: is_faster)
        keys.add(FasterProducts().uuid())
    assert len(keys) == 3
