"""Actor and critic that are evaluated side by side equal their modules, and other networks are left to torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gymnasium import spaces
from helpers.actor_critic_kit import DISCRETE, OBS, SPACES, flat_gradient, impala_config, make_batch, ppo_config
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from rayvec.learners.actor_critic import ActorCriticLearner
from rayvec.learners.base import FlatParameters
from rayvec.learners.impala import IMPALALearner
from rayvec.learners.paired_mlps import PairedMLPs, paired_mlps
from rayvec.learners.ppo import PPOLearner
from rayvec.policies.networks import ActorCritic, make_actor_critic
from rayvec.policies.policy import Policy


def make(action_space: spaces.Space[Any] = DISCRETE, sizes: tuple[int, ...] = (8, 8), **settings: Any) -> ActorCritic:
    module = make_actor_critic(OBS, action_space, sizes, **settings)
    assert type(module) is ActorCritic
    return module


@pytest.mark.parametrize("sizes", [(), (8,), (8, 8), (40, 6, 3)], ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 9, 70])
@SPACES
def test_outputs_and_gradients_are_those_of_the_module(
    action_space: spaces.Space[Any], num_rows: int, sizes: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    module = make(action_space, sizes)
    flat, rows = FlatParameters(module), torch.randn(num_rows, *OBS.shape)
    factors = torch.randn(num_rows, module.distribution.num_params), torch.randn(num_rows)

    def outputs_and_gradient(network: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        flat.zero_grad()
        outputs = network(rows)
        loss = sum((output * factor).sum() for output, factor in zip(outputs, factors, strict=True))
        torch.autograd.backward(loss)  # type: ignore[arg-type]
        if isinstance(network, PairedMLPs):
            network.backward()
        return (*(output.detach() for output in outputs), flat.grad.clone())

    expected, paired = outputs_and_gradient(module), paired_mlps(module, flat)
    assert paired is not None
    for _ in range(2):
        for ours, theirs in zip(outputs_and_gradient(paired), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    in_time = torch.stack([rows, -rows])
    torch.testing.assert_close(paired.value(in_time), module.value(in_time), rtol=1e-5, atol=1e-5)


class Squared(nn.Tanh):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).square()


def double(module: nn.Module) -> None:
    module.double()


def replace(module: Any, k: int, layer: nn.Module) -> None:
    module.actor[k] = layer


def watch(module: Any, register: str) -> None:
    getattr(module.critic[2], register)(lambda *_: None)


def override(part: nn.Module) -> None:
    part.forward = part.forward  # type: ignore[method-assign]


def repeat(module: Any, *layers: int) -> None:
    module.actor.extend(module.actor[k] for k in layers)


def swap(module: Any) -> None:
    module.actor[0], module.critic[0] = module.critic[0], module.actor[0]


def move_actor(module: Any) -> None:
    actor = module.actor
    del module.actor
    module.actor = actor


def share(module: Any) -> None:
    module.critic[2] = module.actor[2]


def add_parameter(module: nn.Module) -> None:
    module.register_parameter("temperature", nn.Parameter(torch.ones(1)))


class Buffered(nn.Parameter):
    pass


Change = Callable[[Any], object]

BEFORE: dict[str, Change] = {
    "another activation": lambda module: replace(module, 1, nn.ReLU()),
    "an activation that extends tanh": lambda module: replace(module, 1, Squared()),
    "a layer without bias": lambda module: replace(module, 2, nn.Linear(8, 8, bias=False)),
    "a spectral norm": lambda module: spectral_norm(module.actor[0]),
    "hidden layers of two sizes": lambda module: setattr(
        module, "critic", nn.Sequential(nn.Linear(OBS.shape[0], 5), nn.Tanh(), nn.Linear(5, 1))
    ),
    "one more layer": lambda module: module.actor.append(nn.Identity()),
    "a tanh at the end": lambda module: repeat(module, 1),
    "a layer that comes twice": lambda module: repeat(module, 1, 4),
    "layers that are shared": lambda module: setattr(module, "trunk", nn.Sequential(nn.Tanh())),
    "another kind of trunk": lambda module: setattr(module, "trunk", type("Trunk", (nn.Sequential,), {})()),
    "an actor after the critic": move_actor,
    "a critic without parameters": lambda module: setattr(module, "critic", nn.Tanh()),
    "a bias of one number": lambda module: setattr(module.critic[2], "bias", nn.Parameter(torch.zeros(1))),
    "a layer that both share": share,
    "one more parameter": add_parameter,
    "float64": double,
    "bfloat16": lambda module: module.compute_in("bf16"),
}
"""What differs from the default network when a learner gets it."""

LATER: dict[str, Change] = {
    "a hook of a layer": lambda module: watch(module, "register_forward_hook"),
    "a hook before a layer": lambda module: watch(module, "register_forward_pre_hook"),
    "a hook of a layer's gradient": lambda module: watch(module, "register_full_backward_hook"),
    "a hook before a layer's gradient": lambda module: watch(module, "register_full_backward_pre_hook"),
    "a hook of the module": lambda module: module.register_forward_hook(lambda *_: None),
    "a hook of the actor": lambda module: module.actor.register_forward_hook(lambda *_: None),
    "a hook of a parameter": lambda module: module.actor[0].weight.register_hook(lambda grad: grad),
    "a hook after a parameter's gradient": lambda module: module.critic[0].bias.register_post_accumulate_grad_hook(
        lambda _: None
    ),
    "a hook of the trunk": lambda module: module.trunk.register_forward_pre_hook(lambda *_: None),
    "another forward": override,
    "another value": lambda module: setattr(module, "value", module.value),
    "a compiled module": lambda module: module.compile(),
    "another kind of parameter": lambda module: setattr(module.actor[0].weight, "__class__", Buffered),
    "a weight that is another's": lambda module: setattr(module.critic[0].weight, "data", module.actor[0].weight.data),
    "no gradients": lambda module: module.zero_grad(),
    "layers that are swapped": swap,
    "a tanh at the end": lambda module: repeat(module, 1),
    "another forward of the critic": lambda module: override(module.critic),
    "another forward of a layer": lambda module: override(module.actor[1]),
    "a frozen layer": lambda module: module.actor[0].requires_grad_(False),
    "another layer": lambda module: replace(module, 0, nn.Linear(OBS.shape[0], 8)),
    "parameters elsewhere": double,
}
"""What a user may do to the network of a learner."""


@pytest.mark.parametrize("change", BEFORE.values(), ids=BEFORE)
def test_another_network_is_left_to_torch(change: Change) -> None:
    module = make()
    change(module)
    flat, before = FlatParameters(module), copy.deepcopy(module.state_dict())
    assert paired_mlps(module, flat) is None
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # as torch's compiler is imported
@pytest.mark.parametrize("change", LATER.values(), ids=LATER)
def test_a_network_that_was_changed_is_left_to_torch(change: Change) -> None:
    module = make()
    flat = FlatParameters(module)
    assert paired_mlps(module, flat) is not None
    change(module)
    assert paired_mlps(module, flat) is None


@pytest.mark.parametrize(
    "settings",
    [{"activation": "relu"}, {"layer_norm": True}, {"shared_trunk": True}],
    ids=["ReLU", "layer norm", "shared layers"],
)
def test_other_settings_are_left_to_torch(settings: dict[str, Any]) -> None:
    module = make(**settings)
    assert paired_mlps(module, FlatParameters(module)) is None


def test_modes_of_torch_are_respected() -> None:
    module = make()
    flat = FlatParameters(module)
    with torch.autocast("cpu", torch.bfloat16):
        assert paired_mlps(module, flat) is None
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert paired_mlps(module, flat) is None
    finally:
        hook.remove()
    assert paired_mlps(module, flat) is not None


class Penalised(PPOLearner):
    """Trains the actor alone, with a penalty on all weights."""

    def _loss(self, outputs: tuple[Tensor, Tensor], *rest: Tensor) -> tuple[Tensor, Tensor]:
        params, value = outputs
        loss, stats = super()._loss((params, value.detach()), *rest)
        return loss + sum(leaf.square().sum() for leaf in self.module.parameters()), stats


@pytest.mark.parametrize(
    ("kind", "config"),
    [(Penalised, ppo_config()), (PPOLearner, ppo_config()), (IMPALALearner, impala_config())],
    ids=["a loss of one's own", "PPO", "IMPALA"],
)
@SPACES
def test_updates_equal_those_by_torchs_modules(
    kind: type[ActorCriticLearner], config: Any, action_space: spaces.Space[Any]
) -> None:
    """A hook that does nothing makes a learner evaluate its module."""
    learner, watched = (kind(OBS, action_space, config) for _ in range(2))
    calls: list[int] = []
    watched.module.actor.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[union-attr]
    policy = Policy(learner.module)
    for seed in range(2):
        batch = make_batch(policy, seed=seed)
        metrics, expected = learner.update(batch), watched.update(batch)  # type: ignore[attr-defined]
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)
        torch.testing.assert_close(learner._flat.data, watched._flat.data, rtol=1e-4, atol=1e-5)
    assert learner._paired is not None and watched._paired is None and calls
    assert flat_gradient(learner.module).abs().sum() > 0
