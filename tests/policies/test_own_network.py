"""Your own network in the place of the default one, and the settings of the default one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from helpers import own_parts

from rayvec.config import IMPALAConfig, PPOConfig
from rayvec.config.references import refer
from rayvec.data import tree_map
from rayvec.errors import ConfigError
from rayvec.policies.distributions import make_distribution
from rayvec.policies.networks import ActorCritic, flat_weights
from rayvec.policies.own_network import OwnActorCritic, make_module
from rayvec.policies.policy import Policy
from rayvec.policies.recurrent import RecurrentActorCritic

BOX = spaces.Box(-1, 1, (3,), np.float32)


def draw(space: spaces.Space[Any], count: int) -> Any:
    batched = batch_space(space, count)
    batched.seed(0)
    return batched.sample()


def test_a_dict_observation_reaches_the_module_in_its_own_dtypes() -> None:
    space = spaces.Dict(far=BOX, sight=spaces.Box(0, 255, (2, 4, 4), np.uint8), which=spaces.Discrete(3, start=1))

    class Net(own_parts.TwoHeads):
        def forward(self, obs: Any) -> Any:
            assert {key: part.dtype for key, part in obs.items()} == {
                "far": torch.float32,
                "sight": torch.uint8,
                "which": torch.int64,
            }
            one = torch.nn.functional.one_hot(obs["which"] - 1, 3)
            return super().forward(torch.cat([obs["far"], obs["sight"].flatten(1), one], -1))

    config = IMPALAConfig(network=refer(lambda o, a, c: Net(o, a)))
    module = make_module(space, spaces.Discrete(2), config)
    obs = draw(space, 4)
    lead = tree_map(lambda leaf: leaf.reshape(2, 2, *leaf.shape[1:]), obs)
    assert module(module.encode(lead))[0].shape == (2, 2, 2)


def test_initial_weights_depend_on_the_seed_alone() -> None:
    def weights(seed: int) -> Any:
        config = PPOConfig(network=refer(own_parts.two_heads), seed=seed)
        return flat_weights(make_module(BOX, spaces.Discrete(2), config))

    torch.manual_seed(3)
    first, expected = weights(1), torch.random.get_rng_state()
    torch.rand(5)
    np.testing.assert_array_equal(first, weights(1))
    assert not np.array_equal(first, weights(2))
    torch.manual_seed(3)
    weights(1)
    assert torch.equal(torch.random.get_rng_state(), expected)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (own_parts.too_many_outputs, r"shape \(3, 7\) .*shape \(3, 2\)"),
        (lambda o, a, c: lambda obs: obs, "returned function.*torch.nn.Module"),
        (lambda o, a, c: torch.nn.Linear(3, 2), r"returned shape .*tuple \(parameters"),
    ],
)
def test_a_network_that_cannot_work_is_refused(function: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_module(BOX, spaces.Discrete(2), PPOConfig(network=refer(function)))


def test_floats_are_normalised_before_an_own_network_sees_them() -> None:
    parts = {"far": spaces.Box(-9, 9, (2, 2), np.float64), "which": spaces.Discrete(3)}
    space = spaces.Dict(observation=spaces.Dict(parts), action_mask=spaces.MultiBinary(2))
    found = {}

    class Net(own_parts.TwoHeads):
        def forward(self, obs: Any) -> Any:
            found.update(obs)
            return super().forward(obs["far"].flatten(1))

    config = PPOConfig(network=refer(lambda o, a, c: Net(o["far"], a)), normalize_obs=True)
    module = make_module(space, spaces.Discrete(2), config)
    assert module.obs_mean is not None and module.obs_scale is not None and len(module.obs_mean) == 4
    module.obs_mean.copy_(torch.arange(4))
    module.obs_scale.fill_(0.5)
    obs = draw(space, 3)
    obs["action_mask"][:] = 1
    expected = (obs["observation"]["far"] - np.arange(4).reshape(2, 2)) / 2
    params, _ = module(module.encode(obs))
    np.testing.assert_allclose(found["far"], expected, rtol=1e-5)
    assert found["which"].dtype == torch.int64
    np.testing.assert_allclose(module.make_actor()(obs), params.detach(), atol=1e-6)
    np.testing.assert_array_equal(module.encoder(obs), obs["observation"]["far"].reshape(3, 4))


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu", "gelu"])
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("shared_trunk", [False, True])
def test_the_actor_computes_what_the_default_network_computes(
    activation: Any, layer_norm: bool, shared_trunk: bool
) -> None:
    """Observations are normalised where layers are apart."""
    module = ActorCritic(
        BOX,
        spaces.Box(-1, 1, (2,), np.float32),
        (16, 8),
        activation=activation,
        layer_norm=layer_norm,
        shared_trunk=shared_trunk,
        normalize_obs=not shared_trunk,
        log_std_init=-0.5,
    )
    for buffer in module.buffers():
        buffer.copy_(torch.tensor([0.3, -0.2, 1.5]))
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator))
    obs = 3 * draw(BOX, 50)
    np.testing.assert_allclose(module.make_actor()(obs), module(module.encode(obs))[0].detach(), atol=2e-4)


@pytest.mark.parametrize("cnn", ["nature", "impala"])
@pytest.mark.parametrize("shape", [(32, 32, 3), (3, 32, 32), (10, 10, 1), (84, 84, 3), (4, 84, 84), (8, 9, 7)])
def test_images_of_any_size_are_read_by_a_cnn(cnn: Any, shape: tuple[int, ...]) -> None:
    space = spaces.Box(0, 255, shape, np.uint8)
    module = make_module(space, spaces.Discrete(2), PPOConfig(cnn=cnn))
    assert len(module.cnns) == 1
    obs = draw(space, 2)
    np.testing.assert_allclose(module.make_actor()(obs), module(module.encode(obs))[0].detach(), atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
@pytest.mark.parametrize("kind", ["numpy", "recurrent", "own"])
def test_numbers_far_from_0_keep_their_digits_where_they_are_normalised(dtype: Any, kind: str) -> None:
    """float32 has no digit left for what tells them apart."""
    low, offset = (-np.inf, 2.0**31) if dtype is np.float64 else (-(2**62), 2**50)
    space = spaces.Box(low, -low, (2,), dtype)
    obs = (offset + np.arange(8).reshape(4, 2)).astype(dtype)
    if kind == "recurrent":
        module: Any = RecurrentActorCritic(space, BOX, (8,), normalize_obs=True)
    elif kind == "own":
        space = spaces.Box(low, -low, (2,), np.float64)
        module = OwnActorCritic(own_parts.TwoHeads(space, BOX), space, make_distribution(BOX), normalize_obs=True)
        obs = obs.astype(np.float64)
    else:
        module = ActorCritic(space, BOX, (8,), normalize_obs=True)
    module.obs_mean.copy_(torch.tensor([offset + 3, offset + 4], dtype=torch.float64))
    module.obs_scale.fill_(0.5)
    expected = torch.from_numpy((np.arange(8).reshape(4, 2) - [3, 4]) * 0.5).float()
    torch.testing.assert_close(module.encode(obs), expected)
    policy = Policy(module, deterministic=True)
    policy.load_weights(flat_weights(module))
    with torch.no_grad():
        params = module.action_parameters(module.encode(obs))
    np.testing.assert_allclose(policy.act(obs, np.zeros((4, 0)))[1]["raw_act"], params[:, :3], atol=1e-5)
