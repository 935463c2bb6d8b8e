"""tanh MLPs that are evaluated together equal their modules."""

from __future__ import annotations

import itertools

import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rayvec.policies import tanh_mlps
from rayvec.policies.networks import make_actor_critic


def nets(num_hidden: int) -> list[nn.Sequential]:
    made = []
    for outs in (3, 1):
        sizes = [5, *[7] * num_hidden, outs]
        layers = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
        made.append(nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())][:-1]))
    return made


@pytest.mark.parametrize("num_hidden", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [0, 1, 9])
@pytest.mark.parametrize("needs_rows", [True, False])
def test_outputs_and_gradients_are_those_of_the_modules(num_hidden: int, num_rows: int, needs_rows: bool) -> None:
    torch.manual_seed(0)
    both = nets(num_hidden)
    rows = torch.randn(num_rows, 5, requires_grad=needs_rows)
    leaves = [param for net in both for param in net.parameters()] + [rows] * needs_rows
    factors = torch.randn(num_rows, 3), torch.randn(num_rows, 1)

    def gradients(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        loss = sum((output * factor).sum() for output, factor in zip(outputs, factors, strict=True))
        return torch.autograd.grad(loss, leaves)  # type: ignore[arg-type]

    outputs, expected = tanh_mlps.evaluate(both, rows), tuple(net(rows) for net in both)
    for ours, theirs in zip((*outputs, *gradients(outputs)), (*expected, *gradients(expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)
    with torch.no_grad():
        for ours, theirs in zip(tanh_mlps.evaluate(both, rows[None]), expected, strict=True):
            torch.testing.assert_close(ours[0], theirs, rtol=1e-5, atol=2e-6)


def test_there_is_no_second_derivative() -> None:
    (net, _), rows = nets(2), torch.randn(4, 5, requires_grad=True)
    (output,) = tanh_mlps.evaluate([net], rows)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(output.sum(), rows, create_graph=True)


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    used = tanh_mlps.evaluate
    monkeypatch.setattr("rayvec.policies.networks.evaluate", lambda *args: calls.append(1) or used(*args))
    return calls


BOX, DISCRETE = spaces.Box(-1, 1, (5,)), spaces.Discrete(3)


def test_an_actor_critic_evaluates_its_networks_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, module, rows = count_calls(monkeypatch), make_actor_critic(BOX, DISCRETE), torch.randn(4, 5)
    params, value = module(rows)
    (params.sum() + value.sum()).backward()
    assert len(calls) == 1 and all(param.grad is not None for param in module.parameters())
    with torch.no_grad():
        torch.testing.assert_close(module.actor(rows), params)
        torch.testing.assert_close(module.critic(rows).squeeze(-1), module.value(rows[None])[0])
    torch.testing.assert_close(module.action_parameters(rows), params)
    assert len(calls) == 3


@pytest.mark.parametrize(
    "settings",
    [{"activation": "relu"}, {"layer_norm": True}, {"hidden_sizes": ()}],
    ids=["ReLU", "layer norm", "linear"],
)
def test_other_networks_are_left_to_torch(monkeypatch: pytest.MonkeyPatch, settings: dict[str, object]) -> None:
    calls, module = count_calls(monkeypatch), make_actor_critic(BOX, DISCRETE, **settings)
    module(torch.randn(4, 5))
    assert not calls


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_graphs_sequences_and_other_numbers_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, module, rows = count_calls(monkeypatch), make_actor_critic(BOX, DISCRETE), torch.randn(4, 5)
    parameters = {name: param.detach() for name, param in module.named_parameters()}
    torch.func.grad(lambda own: torch.func.functional_call(module, own, rows)[1].sum())(parameters)
    module(rows[None])  # with a graph
    traced = torch.jit.trace(module, rows, check_trace=False)  # type: ignore[no-untyped-call]
    assert "aten::tanh" in str(traced.inlined_graph)
    with torch.autocast("cpu", torch.bfloat16):
        module(rows)
    module.to(torch.float64)(rows.double())
    module.to("meta")(torch.empty(4, 5, device="meta"))
    assert not calls
