"""Policies against torch: distributions against torch.distributions, NumPy's forward pass against the module's."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.spaces.utils import flatten
from gymnasium.vector.utils import batch_space, iterate
from numpy.typing import NDArray
from torch import nn

from rayvec.data import tree_leaves, tree_map
from rayvec.errors import ConfigError
from rayvec.policies.distributions import Categorical, Distribution, make_distribution
from rayvec.policies.encoders import leaf_spaces, make_encoder
from rayvec.policies.masks import masked
from rayvec.policies.networks import ActorCritic, flat_weights
from rayvec.policies.noise import keyed_noise
from rayvec.policies.policy import Policy

BOX = spaces.Box(-1, 1, (3,), np.float32)
ACTION_SPACES: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(4),
    "discrete from -2": spaces.Discrete(3, start=-2),
    "one choice": spaces.Discrete(1),
    "multi-discrete": spaces.MultiDiscrete([3, 2, 5]),
    "multi-discrete 2d": spaces.MultiDiscrete(np.array([[2, 2], [2, 2]]), start=np.array([[0, 1], [-1, 5]])),
    "multi-binary": spaces.MultiBinary(4),
    "multi-binary 2d": spaces.MultiBinary([2, 3]),
    "box": BOX,
    "box float64 2d": spaces.Box(np.array([[-1.0, 0.0]]), np.array([[0.5, np.inf]]), dtype=np.float64),
}
OBSERVATION_SPACES: dict[str, spaces.Space[Any]] = {
    "box": BOX,
    "scalar": spaces.Box(-1, 1, (), np.float32),
    "float64 2d": spaces.Box(-1, 1, (2, 3), np.float64),
    "bytes": spaces.Box(0, 255, (5,), np.uint8),
    "discrete": spaces.Discrete(4, start=-1),
    "multi-discrete": spaces.MultiDiscrete([3, 2]),
    "multi-binary": spaces.MultiBinary([2, 2]),
    "dict": spaces.Dict(b=spaces.Discrete(2), a=spaces.Tuple([BOX, spaces.Dict(c=spaces.MultiBinary(2))])),
}
EACH_ACTION_SPACE = pytest.mark.parametrize("space", ACTION_SPACES.values(), ids=ACTION_SPACES)
EACH_OBSERVATION_SPACE = pytest.mark.parametrize("space", OBSERVATION_SPACES.values(), ids=OBSERVATION_SPACES)


def draw_params(distribution: Distribution, count: int, scale: float = 1.0) -> NDArray[np.float32]:
    return (scale * np.random.default_rng(0).normal(size=(count, distribution.num_params))).astype(np.float32)


def draw_noise(distribution: Distribution, count: int) -> NDArray[np.float64]:
    noise: NDArray[np.float64] = keyed_noise(
        distribution.noise, seed=0, env_ids=np.arange(count), first_step=0, num_steps=1
    )[0]
    return noise


def reference(distribution: Distribution, params: torch.Tensor) -> list[torch.distributions.Distribution]:
    """The components one by one, in the words of torch."""
    if isinstance(distribution, Categorical):
        return [
            torch.distributions.Categorical(logits=params[:, stop - size : stop])
            for size, stop in zip(distribution.sizes, np.cumsum(distribution.sizes), strict=True)
        ]
    mean, log_std = params.chunk(2, -1)
    return [torch.distributions.Normal(*pair) for pair in zip(mean.unbind(-1), log_std.exp().unbind(-1), strict=True)]


def perturbed(module: nn.Module, scale: float = 0.3) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return module


@EACH_ACTION_SPACE
def test_logp_and_entropy_equal_those_of_torch_distributions(space: spaces.Space[Any]) -> None:
    distribution = make_distribution(space)
    params = draw_params(distribution, 200)
    sample, acting_logp = distribution.sample(params, draw_noise(distribution, 200))
    exact, drawn = torch.from_numpy(params).double(), torch.from_numpy(sample)
    components = reference(distribution, exact)
    expected_logp = sum(part.log_prob(drawn[:, c]) for c, part in enumerate(components))
    expected_entropy = sum(part.entropy() for part in components)

    logp, entropy = distribution.logp_entropy(exact, drawn)
    torch.testing.assert_close(logp, expected_logp, atol=1e-9, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-9, rtol=0)

    logp, entropy = distribution.logp_entropy(torch.from_numpy(params), drawn)
    tolerance = 1e-6 if isinstance(distribution, Categorical) else 1e-4  # a sample in float32 is one of the deviations
    torch.testing.assert_close(logp.double(), expected_logp, atol=tolerance, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=1e-6, rtol=1e-6)
    assert acting_logp.dtype == np.float32
    np.testing.assert_allclose(acting_logp, expected_logp, atol=tolerance, rtol=1e-6)


@EACH_ACTION_SPACE
@pytest.mark.parametrize("mode", [False, True], ids=["drawn", "most probable"])
def test_actions_are_valid_and_lead_back_to_the_samples(space: spaces.Space[Any], mode: bool) -> None:
    distribution = make_distribution(space)
    params = draw_params(distribution, 100, scale=2)
    sample, _ = distribution.mode(params) if mode else distribution.sample(params, draw_noise(distribution, 100))
    act = distribution.action(sample)
    assert act.dtype == space.dtype
    assert all(action in space for action in iterate(batch_space(space, 100), act))
    np.testing.assert_array_equal(distribution.recorded(act, distribution.extras(sample)), sample)
    steps_by_envs = distribution.recorded(
        act.reshape(20, 5, *space.shape),  # type: ignore[misc]
        {name: extra.reshape(20, 5, -1) for name, extra in distribution.extras(sample).items()},
    )
    np.testing.assert_array_equal(steps_by_envs.reshape(100, -1), sample)


@pytest.mark.parametrize("space", [ACTION_SPACES["multi-discrete"], ACTION_SPACES["discrete"]], ids=["unequal", "one"])
def test_choices_are_drawn_with_their_probabilities(space: spaces.Space[Any]) -> None:
    distribution = make_distribution(space)
    assert isinstance(distribution, Categorical)
    count = 20_000
    params = np.repeat(draw_params(distribution, 1), count, 0)
    sample, _ = distribution.sample(params, draw_noise(distribution, count))
    for c, component in enumerate(reference(distribution, torch.from_numpy(params[:1]).double())):
        expected = component.probs[0].numpy() * count  # type: ignore[attr-defined]
        counts = np.bincount(sample[:, c], minlength=len(expected))
        freedom = len(expected) - 1
        assert ((counts - expected) ** 2 / expected).sum() < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("u", [2.0**-53, 0.5, 1 - 2.0**-53])
def test_a_choice_of_probability_0_is_never_drawn(u: float) -> None:
    distribution = make_distribution(spaces.MultiDiscrete([4, 3]))
    params = np.array([[-1e4, 0.3, -1e4, -1e4, 0.1, -1e4, -1e4]], np.float32)
    sample, logp = distribution.sample(params, np.full((1, 2), u))
    np.testing.assert_array_equal(sample, [[1, 0]])
    assert logp == 0


@pytest.mark.parametrize("logit", [-2e9, -1e20])
def test_choices_stay_allowed_and_in_the_space_where_a_network_diverges(logit: float) -> None:
    """One with only such logits, of components of unequal sizes; with a mask, and without."""
    space = spaces.MultiDiscrete([3, 2])
    params, mask = np.full((1, 5), logit, np.float32), np.array([[0, 1, 0, 1, 0]])
    distribution = make_distribution(space)
    for deterministic in (True, False):
        draw = distribution.mode if deterministic else lambda rows: distribution.sample(rows, np.full((1, 2), 0.99))
        assert space.contains(distribution.action(draw(params)[0])[0])
        open_params = masked(params, mask != 0)
        assert distribution.action(draw(open_params)[0]).tolist() == [[1, 0]]
    logp, entropy = distribution.logp_entropy(torch.from_numpy(open_params), torch.tensor([[1, 0]]))
    assert logp.item() == entropy.item() == 0


@EACH_OBSERVATION_SPACE
def test_encoding_equals_gymnasiums_flatten(space: spaces.Space[Any]) -> None:
    batched = batch_space(space, 6)
    batched.seed(0)
    obs = batched.sample()
    encoder = make_encoder(space)
    rows = encoder(obs)
    assert rows.shape == (6, encoder.num_features) and rows.dtype == np.float32
    for row, one in zip(rows, iterate(batched, obs), strict=True):
        np.testing.assert_array_equal(row, np.asarray(flatten(space, one), np.float32))


IMAGES: dict[str, spaces.Space[Any]] = {
    "channels first": spaces.Box(0, 255, (4, 40, 36), np.uint8),
    "channels last": spaces.Box(0, 255, (36, 40, 3), np.uint8),
    "two images and numbers": spaces.Dict(
        far=spaces.Box(0, 255, (36, 36, 1), np.uint8),
        near=spaces.Tuple([spaces.Box(0, 255, (2, 36, 36), np.uint8), BOX]),
        which=spaces.Discrete(3),
    ),
}
EACH_IMAGE_SPACE = pytest.mark.parametrize("space", IMAGES.values(), ids=IMAGES)


def draw_obs(space: spaces.Space[Any], *lead: int) -> Any:
    count = math.prod(lead)
    batched = batch_space(space, count)
    batched.seed(0)
    return tree_map(lambda leaf: leaf.reshape(*lead, *leaf.shape[1:]), batched.sample())


@EACH_IMAGE_SPACE
def test_images_are_seen(space: spaces.Space[Any]) -> None:
    """Rows keep their leading axes, and acting is what the module computes."""
    module = perturbed(ActorCritic(space, spaces.Discrete(3), (16,)), 0.01)
    obs = draw_obs(space, 2, 3)
    rows = module.encode(obs)
    images = [leaf for leaf in tree_leaves(rows) if leaf.dtype == torch.uint8]
    assert len(images) == len(module.encoder.images) and all(leaf.shape[:2] == (2, 3) for leaf in images)
    params, value = module(rows)
    assert params.shape == (2, 3, 3) and value.shape == (2, 3)
    flat = module.encode(draw_obs(space, 6))
    torch.testing.assert_close(module.action_parameters(flat), params.reshape(6, 3), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(module.value(flat), value.reshape(6), atol=1e-5, rtol=1e-5)
    policy, noise = Policy(module), np.full((6, 1), 0.4)
    act, extras = policy.act(draw_obs(space, 6), noise)
    expected = params.reshape(6, 3).log_softmax(-1).detach().numpy()[np.arange(6), act]
    np.testing.assert_allclose(extras["logp"], expected, atol=1e-5)
    again = pickle.loads(cloudpickle.dumps(policy)).act(draw_obs(space, 6), noise)[1]["logp"]
    np.testing.assert_array_equal(again, extras["logp"])


def test_a_random_start_is_uniform_until_weights_come() -> None:
    module = perturbed(ActorCritic(BOX, spaces.Discrete(4, start=2), (16,)), 1.0)
    policy = Policy(module, random_start=True)
    obs, noise = np.ones((4000, 3), np.float32), draw_noise(module.distribution, 4000)
    act, extras = policy.act(obs, noise)
    assert np.bincount(act - 2).tolist() == pytest.approx([1000] * 4, abs=100)
    assert extras["logp"] == pytest.approx(-math.log(4))
    policy.load_weights(flat_weights(module))
    for ours, theirs in zip(policy.act(obs, noise), Policy(module).act(obs, noise), strict=True):
        np.testing.assert_equal(ours, theirs)


@EACH_ACTION_SPACE
def test_the_policy_computes_what_the_module_does(space: spaces.Space[Any]) -> None:
    module = perturbed(ActorCritic(BOX, space, (16, 16)))
    obs = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    act, extras = Policy(module).act(obs, draw_noise(module.distribution, 50))
    sample = torch.from_numpy(module.distribution.recorded(act, extras))
    with torch.no_grad():
        logp, _ = module.distribution.logp_entropy(module.action_parameters(module.encode(obs)), sample)
    np.testing.assert_allclose(extras["logp"], logp, atol=3e-6, rtol=1e-6)


def test_a_deterministic_policy_takes_the_most_probable_action_and_asks_for_no_noise() -> None:
    obs = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    for space in (spaces.Discrete(4), BOX):
        module = perturbed(ActorCritic(BOX, space))
        policy = Policy(module, deterministic=True)
        assert policy.noise.lanes == 0
        act, _ = policy.act(obs, np.zeros((20, 0)))
        outputs = module.actor(torch.from_numpy(obs)).detach()
        expected = outputs.argmax(-1) if space != BOX else outputs.clamp(-1, 1)
        np.testing.assert_allclose(act, expected, atol=1e-6)


class Mine(nn.Module):
    """A module that knows nothing of rayvec."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 4)
        self.linear = nn.Linear(3, 4, bias=False)
        self.dropout = nn.Dropout(0.5)

    def forward(self, obs: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.dropout(self.embedding(obs["kind"]) + self.linear(obs["where"]))  # type: ignore[no-any-return]


MY_OBS = {"kind": np.array([0, 2, 1]), "where": np.random.default_rng(0).normal(size=(3, 3))}


def both_policies() -> list[tuple[Policy, nn.Module, Any]]:
    module, mine = ActorCritic(BOX, spaces.Discrete(4), (8,)), Mine()
    obs = MY_OBS["where"].astype(np.float32)
    return [(Policy(module), module, obs), (Policy(mine, spaces.Discrete(4)), mine, MY_OBS)]


def test_any_module_acts() -> None:
    mine = Mine()
    noise = np.array([[0.1], [0.5], [0.9]])
    act, extras = Policy(mine, action_space=spaces.Discrete(4, start=3)).act(MY_OBS, noise)
    logits = mine.eval()({"kind": torch.tensor(MY_OBS["kind"]), "where": torch.tensor(MY_OBS["where"]).float()})
    probabilities = logits.detach().softmax(-1).numpy()
    np.testing.assert_array_equal(act, 3 + (probabilities.cumsum(-1) < noise).sum(-1))
    np.testing.assert_allclose(extras["logp"], np.log(probabilities[np.arange(3), act - 3]), atol=1e-6)


@pytest.mark.parametrize("which", [0, 1], ids=["numpy", "torch"])
def test_weights_are_copied_and_change_only_by_load_weights(which: int) -> None:
    policy, module, obs = both_policies()[which]
    noise = np.full((3, 1), 0.4)
    before = policy.act(obs, noise)[1]["logp"]
    perturbed(module)
    np.testing.assert_array_equal(policy.act(obs, noise)[1]["logp"], before)

    weights = flat_weights(module)
    read_only = weights.view()
    read_only.flags.writeable = False
    policy.load_weights(read_only)
    loaded = policy.act(obs, noise)[1]["logp"]
    np.testing.assert_array_equal(loaded, Policy(module, spaces.Discrete(4)).act(obs, noise)[1]["logp"])
    assert (loaded != before).any()

    weights[:] = 0
    np.testing.assert_array_equal(policy.act(obs, noise)[1]["logp"], loaded)
    with pytest.raises(ConfigError, match=r"shape \(3,\).*needs \(\d+,\)"):
        policy.load_weights(np.zeros(3, np.float32))


def test_an_mlp_acts_without_torch(tmp_path: Path) -> None:
    (tmp_path / "policy").write_bytes(pickle.dumps(Policy(ActorCritic(BOX, BOX))))
    script = (
        "import pickle, sys, numpy; policy = pickle.load(open(sys.argv[1], 'rb'));"
        "act, _ = policy.act(numpy.zeros((2, 3), numpy.float32), numpy.zeros((2, 3)));"
        "assert act.shape == (2, 3) and 'torch' not in sys.modules and 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "policy")], check=True)


def test_initial_weights_are_orthogonal_and_depend_on_the_seed_alone() -> None:
    state = torch.get_rng_state()
    module = ActorCritic(BOX, BOX, (32, 16), seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    for net, last_gain in ((module.actor, 0.01), (module.critic, 1.0)):
        layers = [layer for layer in net if isinstance(layer, nn.Linear)]
        assert [layer.out_features for layer in layers[:-1]] == [32, 16]
        for layer, gain in zip(layers, [math.sqrt(2), math.sqrt(2), last_gain], strict=True):
            weight = layer.weight.detach()
            gram = weight.T @ weight if len(weight) > weight.shape[1] else weight @ weight.T
            torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)), atol=1e-5, rtol=0)
            assert not layer.bias.any()
    again, other = (flat_weights(ActorCritic(BOX, BOX, (32, 16), seed=seed)) for seed in (3, 4))
    np.testing.assert_array_equal(flat_weights(module), again)
    assert (again != other).any()


HYBRID = spaces.Dict(
    gear=spaces.Discrete(3, start=1),
    lamps=spaces.MultiBinary(2),
    wheel=spaces.Box(-2, 2, (2,), np.float32),
    who=spaces.Tuple([spaces.MultiDiscrete([2, 4]), spaces.Box(0, 100, (1,), np.float64)]),
)


def test_a_product_is_its_parts() -> None:
    """Its probabilities are products, its actions are in the space, and its constants are the last parameters."""
    whole = make_distribution(HYBRID, scaled=True)
    parts = [make_distribution(leaf, scaled=True) for _, leaf in leaf_spaces(HYBRID)]
    assert (whole.num_params, whole.num_constants) == (3 + 4 + 4 + 6 + 2, 3)
    params = draw_params(whole, 200)
    sample, acting_logp = whole.sample(params, draw_noise(whole, 200))
    for action in iterate(batch_space(HYBRID, 200), whole.action(sample)):
        assert action in HYBRID
    outputs, constants = np.split(params, [16], axis=-1)
    expected_logp, expected_entropy = torch.zeros(200), torch.zeros(200)
    for part in parts:
        free = part.num_params - part.num_constants
        own = np.concatenate([outputs[:, :free], constants[:, : part.num_constants]], -1)
        outputs, constants = outputs[:, free:], constants[:, part.num_constants :]
        drawn = torch.from_numpy(sample[:, : part.noise.lanes])
        sample = sample[:, part.noise.lanes :]
        drawn = drawn.long() if isinstance(part, Categorical) else drawn
        logp, entropy = part.logp_entropy(torch.from_numpy(own), drawn)
        expected_logp, expected_entropy = expected_logp + logp, expected_entropy + entropy
    np.testing.assert_allclose(acting_logp, expected_logp, atol=1e-4)
    sample, _ = whole.sample(params, draw_noise(whole, 200))
    logp, entropy = whole.logp_entropy(torch.from_numpy(params), torch.from_numpy(sample))
    torch.testing.assert_close(logp, expected_logp, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=0)
    assert (whole.mode(params)[1] >= acting_logp).all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_mask_applies_to_the_discrete_parts_of_a_product(deterministic: bool) -> None:
    """Its numbers are those of "gear" and then those of "who"."""
    space = spaces.Dict(observation=BOX, action_mask=spaces.MultiBinary(9))
    module = perturbed(ActorCritic(space, HYBRID, (8,), masked=True))
    mask = np.tile(np.array([0, 1, 0, 1, 0, 0, 0, 1, 0], np.int8), (50, 1))
    obs = {"observation": np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32), "action_mask": mask}
    policy = Policy(module, deterministic=deterministic)
    act, extras = policy.act(obs, draw_noise(module.distribution, 50)[:, : policy.noise.lanes])
    assert (act["gear"] == 2).all() and (act["who"][0] == [0, 2]).all()
    assert len(np.unique(act["lamps"], axis=0)) > 1 or deterministic
    with torch.no_grad():
        params = module.action_parameters(module.encode(obs))
    logp, entropy = module.distribution.logp_entropy(params, torch.from_numpy(extras["raw_act"]))
    np.testing.assert_allclose(extras["logp"], logp, atol=2e-5)
    assert entropy.isfinite().all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scaled_actions_reach_their_finite_bounds(dtype: Any) -> None:
    space = spaces.Box(np.array([0, -1, 5, 100], dtype), np.array([100, 1, np.inf, 104], dtype), dtype=dtype)
    distribution = make_distribution(space, scaled=True)
    ends = np.array([[-1, -1, -1, -1], [0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 7, 2]], np.float32)
    assert distribution.action(ends).tolist() == [[0, -1, 5, 100], [50, 0, 5, 102], [100, 1, 5, 104], [100, 1, 7, 104]]
    assert make_distribution(space).action(ends).tolist()[2] == [1, 1, 5, 100]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ActorCritic(spaces.Dict(a=spaces.Text(3)), BOX), r"has the part .*images as uint8"),
        (lambda: ActorCritic(spaces.Box(0, 1, (84, 84, 3), np.float32), BOX), r"has the part .*images as uint8"),
        (lambda: make_encoder(spaces.Box(0, 255, (84, 84, 3), np.uint8)), "below 36 pixels.*use PPO"),
        (lambda: make_encoder(spaces.Dict(a=spaces.Box(-1, 1, (2, 0)))), "has no numbers"),
        (lambda: ActorCritic(BOX, spaces.Box(0, 9, (2,), np.int64)), "The action space is .*Discrete, MultiDiscrete"),
        (lambda: Policy(ActorCritic(BOX, BOX), random_start=True), "random_steps above 0, with a Gaussian"),
        (lambda: Policy(Mine()), r"Mine has no .*Pass action_space"),
    ],
)
def test_what_can_not_work_is_refused(make: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()
