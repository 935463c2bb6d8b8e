"""Flat buffers against the same work done tensor by tensor."""

from __future__ import annotations

import copy
import ctypes
import subprocess
import sys

import pytest
import torch
from torch import nn

from rayvec.errors import ConfigError
from rayvec.learners.adam import Adam
from rayvec.learners.base import FlatParameters


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def loss_of(net: nn.Module) -> torch.Tensor:
    inputs = torch.linspace(-1, 1, 12).reshape(4, 3).to(next(net.parameters()))
    return net(inputs).square().sum()  # type: ignore[no-any-return]


def test_values_stay_and_live_in_one_buffer() -> None:
    net = make_net()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    flat = FlatParameters(net)
    assert torch.equal(flat.data, torch.cat([tensor.reshape(-1) for tensor in before]))
    flat.data.mul_(2)
    for parameter, old in zip(net.parameters(), before, strict=True):
        assert parameter.is_leaf and torch.equal(parameter, 2 * old)


def test_gradients_accumulate_in_the_flat_buffer() -> None:
    net, reference = make_net(), make_net()
    flat = FlatParameters(net)
    for count in (1, 2):
        torch.autograd.backward(loss_of(net))
        torch.autograd.backward(loss_of(reference))
        expected = torch.cat([parameter.grad.reshape(-1) for parameter in reference.parameters()])  # type: ignore[union-attr]
        assert torch.equal(flat.grad, expected), count
    flat.zero_grad()
    assert not flat.grad.any()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in net.parameters())


@pytest.mark.parametrize("max_norm", [0.1, 1e6], ids=["clipped", "left alone"])
def test_clipping_equals_torchs(max_norm: float) -> None:
    net, reference = make_net(), make_net()
    flat = FlatParameters(net)
    torch.autograd.backward(loss_of(net))
    torch.autograd.backward(loss_of(reference))
    norm = flat.clip_grad_norm(max_norm)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), max_norm))
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_one_fused_adam_equals_adam_for_each_tensor() -> None:
    net = make_net().double()
    reference = copy.deepcopy(net)
    flat = FlatParameters(net)
    optimizer = Adam(flat.param, lr=0.01, eps=1e-8)
    reference_optimizer = torch.optim.Adam(reference.parameters(), lr=0.01, foreach=False)
    for k in range(20):
        if k == 10:  # another one goes on from its state
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = Adam(flat.param, lr=1.0, eps=1e-8)
            optimizer.load_state_dict(state)
        flat.zero_grad()
        torch.autograd.backward(loss_of(net))
        optimizer.step()
        reference_optimizer.zero_grad()
        torch.autograd.backward(loss_of(reference))
        reference_optimizer.step()
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


def test_mixed_dtypes_are_refused() -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).double())
    with pytest.raises(ConfigError, match=r"Got: \['torch.float32 on cpu', 'torch.float64 on cpu'\]"):
        FlatParameters(net)
    with pytest.raises(ConfigError, match=r"Got: \[\]"):
        FlatParameters(nn.Tanh())


@pytest.mark.slow
def test_a_learner_that_compiles_nothing_loads_nothing_that_it_does_not_need() -> None:
    code = (
        "import sys, gymnasium, rayvec.training.loop\n"
        "from rayvec.config import PPOConfig\n"
        "from rayvec.training.runs import LEARNERS\n"
        "env = gymnasium.make('CartPole-v1')\n"
        "LEARNERS[PPOConfig](env.observation_space, env.action_space, PPOConfig())._optimizer.step()\n"
        "print(*{'torch._dynamo', 'sympy', 'matplotlib'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"\n"


def faults_of_blocks(before: str) -> int:
    """Returns how often pages fault in while blocks of 48 MiB, more than glibc keeps by itself, are made and freed."""
    code = (
        "import resource, torch\n"
        "from rayvec.pools.shared_memory import keep_freed_memory\n"
        f"{before}\n"
        "def faults():\n"
        "    blocks = [torch.ones(12 << 20) for _ in range(3)]\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "counts = [faults() for _ in range(9)]\n"
        "print(counts[-1] - counts[-5])"
    )
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library is not glibc")
def test_freed_memory_is_kept() -> None:
    assert faults_of_blocks("keep_freed_memory(512 << 20)") < 0.1 * faults_of_blocks("")
