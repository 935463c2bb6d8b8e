"""Your own networks in learners: their buffers, frozen parameters, and what is refused (updates: test_papers)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import actor_critic_kit as kit, own_parts, sac_kit
from torch import nn

from rayvec import SACConfig
from rayvec.config.references import refer
from rayvec.errors import CheckpointError, ConfigError
from rayvec.learners.ppo import PPOLearner
from rayvec.learners.sac import SACLearner
from rayvec.policies.policy import Policy


def with_buffers(observation_space: Any, action_space: Any, config: Any) -> nn.Module:
    """Each part shifts what it sees by a buffer that is drawn."""
    if config.algorithm == "ppo":
        net: Any = own_parts.TwoHeads(observation_space, action_space)
        net.register_buffer("noise", torch.rand(3))
        net.register_buffer("is_on", torch.rand(3) > 0.5)
        return net  # type: ignore[no-any-return]
    net = own_parts.ActorAndCritics(observation_space, action_space)
    for part in (net.actor, *net.critics):
        part.register_buffer("noise", torch.rand(3))
    return net


@pytest.mark.parametrize("kind", ["ppo", "sac"])
def test_buffers_are_a_part_of_the_state_and_of_an_initial_network(kind: str) -> None:
    def make(seed: int) -> Any:
        settings: Any = {"network": refer(with_buffers), "seed": seed, "precision": "bf16" if seed == 2 else "float32"}
        if kind == "ppo":
            return PPOLearner(kit.OBS, kit.DISCRETE, kit.ppo_config(**settings))
        return SACLearner(sac_kit.OBS, sac_kit.BOX, sac_kit.make_config(**settings))

    first, second, third = map(make, (1, 2, 3))
    buffers = first.state_dict()["buffers"]
    assert len(buffers) == (2 if kind == "ppo" else 5)  # targets have their own
    second.load_state_dict(first.with_network(second.state_dict(), first.state_dict(), second.config))
    third.load_state_dict(second.state_dict())  # a run that is resumed
    for learner in (second, third):
        assert learner.state_dict()["buffers"].keys() == buffers.keys()
        assert all(torch.equal(each, buffers[name]) for name, each in learner.state_dict()["buffers"].items())
        np.testing.assert_array_equal(learner.weights(), first.weights())
    name = next(iter(buffers))
    before = third.weights()
    with pytest.raises(CheckpointError, match="its buffers differ"):
        third.load_state_dict({**second.state_dict(), "buffers": {**buffers, name: torch.zeros(1)}})
    np.testing.assert_array_equal(third.weights(), before)


def frozen(observation_space: Any, action_space: Any, config: Any) -> nn.Module:
    net = own_parts.TwoHeads(observation_space, action_space)
    net.body.requires_grad_(False)
    return net


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_frozen_parameters_stay(compile: bool) -> None:
    learner = PPOLearner(kit.OBS, kit.DISCRETE, kit.ppo_config(network=refer(frozen), compile=compile))
    before = [each.detach().clone() for each in learner.module.parameters()]
    learner.update(kit.make_batch(Policy(learner.module)))
    same = [torch.equal(old, new) for old, new in zip(before, learner.module.parameters(), strict=True)]
    assert same == [True, True, False, False, False, False]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (own_parts.two_heads, "modules body, policy, value.*actor.*critics"),
        (lambda o, a, c: own_parts.ActorAndCritics(o, spaces.Discrete(2)), r"shape \(3, 2\).*distribution.*\(3, 4\)"),
        (lambda o, a, c: _sharing(o, a), "4 parameters belong to several"),
    ],
)
def test_networks_of_sac_that_cannot_work(function: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        SACLearner(sac_kit.OBS, sac_kit.BOX, SACConfig(network=refer(function)))


def _sharing(observation_space: Any, action_space: Any) -> nn.Module:
    module = own_parts.ActorAndCritics(observation_space, action_space)
    module.critics = nn.ModuleList([*module.critics, module.critics[0]])
    return module
