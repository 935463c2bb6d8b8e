"""The flat gradient and its optimizer against the same work done tensor by tensor; graphs, and what has none."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from helpers.actor_critic_kit import BOX, OBS, make_batch, ppo_config
from torch import Tensor, nn

from rayvec.errors import ConfigError
from rayvec.learners.compiling import Compiled
from rayvec.learners.gradient import Gradient
from rayvec.learners.optimizer import Adam
from rayvec.learners.ppo import PPOLearner
from rayvec.policies.policy import Policy

ROWS = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def loss(net: Any, weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    each = net(rows).square().sum(-1)
    return each @ weight, each.detach().sum().reshape(1)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_flat_vector_learns_as_tensors_do(compiled: bool, frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = torch.compile
    monkeypatch.setattr("torch.compile", lambda function, **_: compile_(function, backend="eager", fullgraph=True))
    net = make_net()
    net[0].requires_grad_(not frozen)
    reference = copy.deepcopy(net)
    gradient, weight = Gradient(net, loss, compiled), torch.tensor([0.5, 1.0, 0.0, 2.0], dtype=torch.float64)
    optimizer, theirs = Adam(gradient.flat, 1e-8), torch.optim.Adam(reference.parameters(), lr=0.01, foreach=False)
    for k in range(20):
        if k == 10:  # another one continues from its state
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = Adam(gradient.flat, 1e-8)
            optimizer.load_state_dict(state)
        statistics = gradient(weight, ROWS)
        theirs.zero_grad()
        expected = loss(reference, weight, ROWS)
        torch.autograd.backward(expected[0])
        torch.testing.assert_close(statistics, expected[1])
        grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in reference.parameters()]
        torch.testing.assert_close(gradient.grad, torch.cat([each.reshape(-1) for each in grads]))
        optimizer.step(gradient.grad, gradient.grad.norm(), 0.01)
        theirs.step()
    for ours, other in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, other, atol=1e-12, rtol=0)
    assert not gradient(weight[:0], ROWS[:0]).any() and not gradient.grad.any()  # a rank without rows


def test_a_step_in_a_graph_is_the_fused_one_and_a_gradient_that_is_not_finite_stops_both() -> None:
    generator = torch.Generator().manual_seed(1)
    fused = Adam(torch.randn(7, generator=generator, dtype=torch.float64), 1e-5)
    tensors, failed = tuple(each.clone() for each in fused.tensors), fused.failed.clone()
    for k in range(6):
        grad = torch.randn(7, generator=generator, dtype=torch.float64)
        grad[0] = torch.nan if k == 4 else grad[0]
        norm = grad.norm().reshape(1)
        fused.step(grad, norm[0], 0.1)
        tensors, failed = fused.stepped(tensors, failed, grad, norm, torch.tensor([0.1]))
        for ours, other in zip((*tensors, failed), (*fused.tensors, fused.failed), strict=True):
            torch.testing.assert_close(ours, other)
        if k == 3:
            before = fused.tensors[0].clone()
    assert torch.equal(fused.tensors[0], before) and fused.failed == 1 and fused.tensors[-1] == 4


def test_parameters_of_two_kinds_or_none_are_refused() -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).double())
    with pytest.raises(ConfigError, match=r"are \['torch.float32 on cpu', 'torch.float64 on cpu'\]"):
        Gradient(net, loss)
    with pytest.raises(ConfigError, match=r"parameters are \[\]"):
        Gradient(nn.Tanh(), loss)


def test_what_fills_a_minibatch_up_is_not_too_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of twenty narrow Gaussians the density at 0 is beyond float32: rows of zeros would bring infinity times 0."""
    monkeypatch.setattr("torch.compile", lambda function, **_: function)
    act: Any = BOX.__class__(-1, 1, (20,), np.float32)
    for size in (31, 64):  # minibatches of 33 and 31 steps in a loop, and one of them all
        learner = PPOLearner(OBS, act, ppo_config(compile=True, log_std_init=-6.0, minibatch_size=size))
        before = learner.weights()
        metrics = learner.update(make_batch(Policy(learner.module), invalid=True))
        assert np.isfinite([*metrics.values()]).all()
        assert (learner.weights() != before).any() and np.isfinite(learner.weights()).all()


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")  # once in a process
def test_without_a_compiler_it_says_what_to_install() -> None:
    from torch._inductor import config as inductor

    function = Compiled(lambda state, rows: 2 * state * rows)
    with (
        torch.compiler.config.patch(force_disable_caches=True),  # monkeypatch could undo neither of the two
        inductor.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.warns(RuntimeWarning, match=r"uncompiled.*Install a C\+\+ compiler") as warned,
    ):
        for _ in range(2):
            assert function(torch.ones(7), torch.ones(7)).tolist() == [2.0] * 7
    assert [each.category for each in warned].count(RuntimeWarning) == 1
