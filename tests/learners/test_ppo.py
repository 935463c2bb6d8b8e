"""PPO against a slow reference in the words of torch.distributions, autograd and per-tensor Adam."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from thread_ranks import ThreadRanks, on_ranks
from torch import Tensor, nn

from rayvec.config import PPOConfig
from rayvec.errors import CheckpointError, ConfigError, LearnerError
from rayvec.learners.base import Learner
from rayvec.learners.compiling import Compiled
from rayvec.learners.ppo import PPOLearner
from rayvec.nets import ActorCritic, make_actor_critic
from rayvec.noise import keyed_noise
from rayvec.policies import Policy
from rayvec.returns import gae
from rayvec.types import Batch, Chunk, CollectStats, tree_map

OBS = spaces.Box(-np.inf, np.inf, (3,), np.float32)
DISCRETE, BOX = spaces.Discrete(3, start=1), spaces.Box(-1, 1, (2,), np.float32)
SPACES = pytest.mark.parametrize("action_space", [DISCRETE, BOX], ids=["discrete", "box"])
FAR = spaces.Box(-np.inf, np.inf, (3,), np.float32)
SIGHT = spaces.Box(0, 255, (2, 36, 36), np.uint8)
MIXED = spaces.Dict(sight=SIGHT, touch=FAR)
T, N = 16, 4
STATS = CollectStats(np.zeros(0), np.zeros(0, np.int64), T * N, 0, 0, 1.0, 1.0, {}, (0, 0))


def make_config(**settings: Any) -> PPOConfig:
    usual = {"total_steps": 10 * T * N, "num_envs": N, "num_steps": T, "minibatch_size": 16, "num_epochs": 3}
    return PPOConfig(**{"hidden_sizes": (8,), "learning_rate": 0.01, **usual, **settings})


def draw_obs(space: spaces.Space[Any], rng: np.random.Generator, *lead: int) -> Any:
    """Random observations, tree of ``[*lead, *obs_shape]``."""
    if isinstance(space, spaces.Dict):
        return {key: draw_obs(part, rng, *lead) for key, part in space.items()}
    assert isinstance(space, spaces.Box)
    if space.dtype == np.uint8:
        return rng.integers(0, 256, (*lead, *space.shape), np.uint8)
    mean, spread = (2, 3) if space is FAR else (0, 1)
    return rng.normal(mean, spread, (*lead, *space.shape)).astype(np.float32)


def make_chunk(
    policy: Policy, seed: int, *, num_steps: int = T, invalid: bool = False, space: spaces.Space[Any] = OBS
) -> Chunk:
    """Random observations and rewards, the policy's own actions, and episodes that end in both ways."""
    rng = np.random.default_rng(seed)
    obs = draw_obs(space, rng, num_steps + 1, N)
    noise = keyed_noise(policy.noise, seed=seed, env_ids=np.arange(N), first_step=0, num_steps=num_steps)
    steps = [policy.act(tree_map(lambda leaf: leaf[t], obs), noise[t]) for t in range(num_steps)]  # noqa: B023
    terminated, truncated = rng.random((2, num_steps, N)) < 0.15
    valid = np.ones((num_steps, N), bool)
    if invalid:
        valid = rng.random((num_steps, N)) > 0.3
        terminated, truncated = terminated & valid, truncated & valid
    final_index = np.argwhere(terminated | truncated)
    return Chunk(
        env_ids=np.arange(N),
        obs=tree_map(lambda leaf: leaf[:-1], obs),
        act=np.stack([act for act, _ in steps]),
        rew=rng.normal(size=(num_steps, N)),
        terminated=terminated,
        truncated=truncated,
        valid=valid,
        last_obs=tree_map(lambda leaf: leaf[-1], obs),
        final_index=final_index,
        final_obs=draw_obs(space, rng, len(final_index)),
        extras={name: np.stack([extras[name] for _, extras in steps]) for name in steps[0][1]},
    )


def make_batch(policy: Policy, seed: int = 0, **kwargs: Any) -> Batch:
    return Batch((make_chunk(policy, seed, **kwargs),), STATS)


def perturb(module: nn.Module, scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def distribution_of(module: ActorCritic, obs: Tensor) -> torch.distributions.Distribution:
    if module.log_std is None:
        return torch.distributions.Categorical(logits=module.actor(obs))
    normal = torch.distributions.Normal(module.actor(obs), module.log_std.exp())
    return torch.distributions.Independent(normal, 1)


class Reference:
    """PPO as the paper and the blog post tell it, step by step, on the valid steps of one chunk."""

    def __init__(self, module: ActorCritic, config: PPOConfig) -> None:
        self.module, self.config = copy.deepcopy(module), config
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=config.learning_rate, eps=1e-5, foreach=False)
        self.num_updates = self.num_steps = 0

    def rows(self, chunk: Chunk) -> dict[str, Tensor]:
        obs, next_obs = torch.from_numpy(chunk.obs), torch.from_numpy(chunk.next_obs())
        with torch.no_grad():
            value, next_value = self.module.critic(obs)[..., 0], self.module.critic(next_obs)[..., 0]
        advantage, target = gae(
            chunk.rew,
            value.numpy(),
            next_value.numpy(),
            chunk.terminated,
            chunk.truncated,
            gamma=self.config.gamma,
            lam=self.config.gae_lambda,
            valid=chunk.valid,
        )
        act = chunk.extras["raw_act"] if "raw_act" in chunk.extras else chunk.act - DISCRETE.start
        columns = {"obs": chunk.obs, "act": act, "logp": chunk.extras["logp"], "value": value.numpy()}
        columns |= {"advantage": advantage, "target": target}
        by_env = {name: column.swapaxes(0, 1)[chunk.valid.T] for name, column in columns.items()}
        return {name: torch.from_numpy(column) for name, column in by_env.items()}

    def loss(self, rows: dict[str, Tensor]) -> Tensor:
        config = self.config
        distribution = distribution_of(self.module, rows["obs"])
        ratio = torch.exp(distribution.log_prob(rows["act"]) - rows["logp"])
        advantage: Tensor = rows["advantage"]
        if config.normalize_advantage:
            advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
        surrogate = torch.min(
            ratio * advantage, torch.clip(ratio, 1 - config.clip_coef, 1 + config.clip_coef) * advantage
        )
        value = self.module.critic(rows["obs"])[:, 0]
        error = (value - rows["target"]) ** 2
        if config.clip_value_loss:
            near = torch.clip(value, rows["value"] - config.clip_coef, rows["value"] + config.clip_coef)
            error = torch.max(error, (near - rows["target"]) ** 2)
        entropy = distribution.entropy().mean()
        loss: Tensor = -surrogate.mean() + config.value_coef * 0.5 * error.mean() - config.entropy_coef * entropy
        return loss

    def update(self, chunk: Chunk) -> None:
        rows, config = self.rows(chunk), self.config
        count = len(rows["logp"])
        left = 1 - self.num_steps / config.total_steps
        self.optimizer.param_groups[0]["lr"] = config.learning_rate * left
        generator = np.random.default_rng([config.seed, self.num_updates])
        for _ in range(config.num_epochs):
            permutation = torch.from_numpy(generator.permutation(count))
            for index in permutation.tensor_split(round(count / config.minibatch_size)):
                self.optimizer.zero_grad()
                torch.autograd.backward(self.loss({name: column[index] for name, column in rows.items()}))
                nn.utils.clip_grad_norm_(self.module.parameters(), config.max_grad_norm)
                self.optimizer.step()
        self.num_updates += 1
        self.num_steps += count


def flat_gradient(module: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.reshape(-1) for parameter in module.parameters() if parameter.grad is not None])


@SPACES
@pytest.mark.parametrize("clip_value_loss", [False, True])
@pytest.mark.parametrize("normalize_advantage", [False, True])
def test_gradient_equals_the_reference(
    action_space: spaces.Space[Any], clip_value_loss: bool, normalize_advantage: bool
) -> None:
    config = make_config(
        minibatch_size=T * N,
        clip_value_loss=clip_value_loss,
        normalize_advantage=normalize_advantage,
        entropy_coef=0.1,
        clip_coef=0.1,
    )
    learner = PPOLearner(OBS, action_space, config)
    batch = make_batch(Policy(learner.module))
    rows = learner._rows(batch)
    perturb(learner.module, 0.2)  # so that ratios leave 1 and some are clipped
    reference = Reference(learner.module, config)
    columns = dict(zip(("obs", "act", "logp", "value", "advantage", "target"), vars_of(rows), strict=True))
    if action_space is DISCRETE:
        columns["act"] = columns["act"][:, 0]
    torch.autograd.backward(reference.loss(columns))
    [(minibatch, count)] = learner._minibatches(rows, 0, len(rows), np.random.default_rng(0))
    stats = learner._gradients(minibatch, count)
    assert 0.1 < float(stats[4]) < 0.9
    torch.testing.assert_close(flat_gradient(learner.module), flat_gradient(reference.module), atol=2e-6, rtol=2e-5)


def vars_of(rows: Any) -> list[Tensor]:
    return [getattr(rows, name) for name in rows.__slots__]


@SPACES
@pytest.mark.parametrize("invalid", [False, True], ids=["all valid", "some invalid"])
def test_updates_equal_the_reference(action_space: spaces.Space[Any], invalid: bool) -> None:
    config = make_config(entropy_coef=0.01)
    learner = PPOLearner(OBS, action_space, config)
    reference = Reference(learner.module, config)
    policy = Policy(learner.module)
    start = learner.weights()
    for seed in range(3):
        batch = make_batch(policy, seed, invalid=invalid)
        if invalid:
            for column in (batch.chunks[0].rew, batch.chunks[0].extras["logp"]):
                column[~batch.chunks[0].valid] = np.nan
        learner.update(batch)
        reference.update(batch.chunks[0])
        policy.load_weights(learner.weights())
    for ours, theirs in zip(learner.module.parameters(), reference.module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    assert np.abs(learner.weights() - start).max() > 0.05


def test_two_chunks_equal_one_of_both_lengths() -> None:
    """Advantages run on from one chunk into the next."""
    learner = PPOLearner(OBS, DISCRETE, make_config())
    whole = make_chunk(Policy(learner.module), 0)
    half = T // 2
    in_first = whole.final_index[:, 0] < half
    parts = []
    for part, finals in ((slice(0, half), in_first), (slice(half, T), ~in_first)):
        parts.append(
            Chunk(
                env_ids=whole.env_ids,
                **{
                    name: getattr(whole, name)[part]
                    for name in ("obs", "act", "rew", "terminated", "truncated", "valid")
                },
                last_obs=whole.obs[half] if part.start == 0 else whole.last_obs,
                final_index=whole.final_index[finals] - np.array([part.start, 0]),
                final_obs=whole.final_obs[finals],
                extras={"logp": whole.extras["logp"][part]},
            )
        )
    joined, expected = learner._rows(Batch(tuple(parts), STATS)), learner._rows(Batch((whole,), STATS))
    for ours, theirs in zip(vars_of(joined), vars_of(expected), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


@SPACES
def test_a_loaded_learner_goes_on_bit_for_bit(action_space: spaces.Space[Any]) -> None:
    learner: Learner = PPOLearner(OBS, action_space, make_config(seed=3))
    policy = Policy(learner.module)
    for seed in range(2):
        learner.update(make_batch(policy, seed))
    file = io.BytesIO()
    torch.save(learner.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)

    other = PPOLearner(OBS, action_space, make_config(seed=3))
    perturb(other.module, 1.0)
    other.load_state_dict(state)
    for seed in range(2, 5):
        batch = make_batch(policy, seed)
        assert learner.update(batch) == other.update(batch)
        np.testing.assert_array_equal(learner.weights(), other.weights())


def test_state_and_weights_are_copies() -> None:
    learner = PPOLearner(OBS, DISCRETE, make_config())
    batch = make_batch(Policy(learner.module))
    learner.update(batch)
    state, weights = learner.state_dict(), learner.weights()
    before = copy.deepcopy(state)
    learner.update(batch)
    assert (weights != learner.weights()).any()
    assert torch.equal(state["parameters"], before["parameters"])
    assert torch.equal(state["optimizer"]["exp_avg"], before["optimizer"]["exp_avg"])
    learner.load_state_dict(state)
    learner.update(batch)
    assert torch.equal(state["parameters"], before["parameters"])


@pytest.mark.parametrize(
    "change", [{"parameters": torch.zeros(3)}, {"unknown": 1}], ids=["another net", "another kind of learner"]
)
def test_a_foreign_state_is_refused(change: dict[str, Any]) -> None:
    learner = PPOLearner(OBS, DISCRETE, make_config())
    before = learner.weights()
    with pytest.raises(CheckpointError, match=r"Expected: .*parameters.* Got: .* Remedy"):
        learner.load_state_dict(learner.state_dict() | change)
    np.testing.assert_array_equal(learner.weights(), before)


def test_a_loss_that_is_not_finite_is_an_error_and_leaves_the_weights() -> None:
    learner = PPOLearner(OBS, DISCRETE, make_config(minibatch_size=T * N))
    batch = make_batch(Policy(learner.module))
    batch.chunks[0].rew[3, 1] = np.nan
    before = learner.weights()
    with pytest.raises(LearnerError, match=r"value_loss.: nan"):
        learner.update(batch)
    np.testing.assert_array_equal(learner.weights(), before)


def test_a_chunk_without_logp_is_refused() -> None:
    learner = PPOLearner(OBS, DISCRETE, make_config())
    batch = make_batch(Policy(learner.module))
    del batch.chunks[0].extras["logp"]
    with pytest.raises(LearnerError, match=r"Collect with rayvec\.Policy"):
        learner.update(batch)


def test_a_batch_without_a_valid_step_changes_nothing() -> None:
    learner = PPOLearner(OBS, DISCRETE, make_config())
    batch = make_batch(Policy(learner.module))
    batch.chunks[0].valid[:] = False
    before = learner.weights()
    assert all(np.isfinite(value) for value in learner.update(batch).values())
    np.testing.assert_array_equal(learner.weights(), before)


def test_the_learning_rate_falls_to_0_with_the_steps_seen() -> None:
    learner = PPOLearner(OBS, DISCRETE, make_config(total_steps=3 * T * N, learning_rate=0.3))
    batch = make_batch(Policy(learner.module))
    rates = [learner.update(batch)["learning_rate"] for _ in range(4)]
    assert rates == pytest.approx([0.3, 0.2, 0.1, 0.0])
    before = learner.weights()
    learner.update(batch)
    np.testing.assert_array_equal(learner.weights(), before)
    constant = PPOLearner(OBS, DISCRETE, make_config(total_steps=1, anneal_lr=False, learning_rate=0.3))
    assert [constant.update(batch)["learning_rate"] for _ in range(2)] == [0.3, 0.3]


def test_a_target_kl_ends_the_epochs() -> None:
    def learned(**settings: Any) -> np.ndarray[Any, Any]:
        learner = PPOLearner(OBS, DISCRETE, make_config(**settings))
        learner.update(make_batch(Policy(learner.module)))
        return learner.weights()

    np.testing.assert_array_equal(learned(target_kl=1e-9), learned(num_epochs=1))
    np.testing.assert_array_equal(learned(target_kl=1e9), learned())
    assert (learned(num_epochs=1) != learned()).any()


def test_metrics_say_what_they_are() -> None:
    learner = PPOLearner(OBS, DISCRETE, make_config(num_epochs=1, minibatch_size=T * N, learning_rate=1e-9))
    batch = make_batch(Policy(learner.module))
    rows = learner._rows(batch)
    metrics = learner.update(batch)
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["clip_fraction"] == 0
    assert metrics["entropy"] == pytest.approx(np.log(3), abs=1e-3)
    assert metrics["policy_loss"] == pytest.approx(0, abs=1e-5)  # normalised advantages, all ratios 1
    assert metrics["value_loss"] == pytest.approx(0.5 * float((rows.value - rows.target).square().mean()), rel=1e-5)
    error = (rows.target - rows.value).numpy()
    assert metrics["explained_variance"] == pytest.approx(1 - error.var() / rows.target.numpy().var(), rel=1e-4)


def test_a_module_of_ones_own_is_trained_in_place() -> None:
    module = make_actor_critic(OBS, DISCRETE, (5, 4), seed=9)
    learner = PPOLearner(OBS, DISCRETE, make_config(), module=module)
    assert learner.module is module
    before = [parameter.detach().clone() for parameter in module.parameters()]
    learner.update(make_batch(Policy(module)))
    assert all((old != new).any() for old, new in zip(before, module.parameters(), strict=True))


NORMALIZED = {"normalize_obs": True, "normalize_reward": True, "clip_reward": 0.5}


@pytest.mark.parametrize("space", [SIGHT, MIXED], ids=["image", "image and numbers"])
def test_images_are_learned_from(space: spaces.Space[Any]) -> None:
    """Rows hold the bytes themselves, values are those of each observation, and the actor's net learns."""
    learner = PPOLearner(space, DISCRETE, make_config(num_epochs=1, normalize_obs=True))
    batch = make_batch(Policy(learner.module), space=space, invalid=True)
    chunk = batch.chunks[0]
    rows = learner._rows(batch)
    images = rows.obs if space is SIGHT else rows.obs[1]
    sight = chunk.obs if space is SIGHT else chunk.obs["sight"]
    assert images.dtype == torch.uint8
    np.testing.assert_array_equal(images, sight.swapaxes(0, 1)[chunk.valid.T])
    with torch.no_grad():
        torch.testing.assert_close(rows.value, learner.module.value(rows.obs), atol=1e-6, rtol=1e-5)
    before = [parameter.detach().clone() for parameter in learner.module.parameters()]
    learner.update(batch)
    assert all((old != new).any() for old, new in zip(before, learner.module.parameters(), strict=True))


def test_values_of_many_images_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = PPOLearner(SIGHT, DISCRETE, make_config())
    batch = make_batch(Policy(learner.module), space=SIGHT)
    whole = learner._rows(batch)
    monkeypatch.setattr("rayvec.learners.ppo._ROWS_AT_ONCE", 7)
    for ours, theirs in zip(vars_of(learner._rows(batch)), vars_of(whole), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("space", [FAR, SIGHT, MIXED], ids=["numbers", "image", "both"])
@pytest.mark.parametrize("shared_trunk", [False, True])
def test_the_first_minibatch_has_the_probabilities_that_were_recorded(
    space: spaces.Space[Any], shared_trunk: bool
) -> None:
    """What normalises observations is what the policy acted with, in every update."""
    config = make_config(num_epochs=1, minibatch_size=T * N, shared_trunk=shared_trunk, **NORMALIZED)
    learner = PPOLearner(space, DISCRETE, config)
    policy = Policy(learner.module)
    for seed in range(3):
        metrics = learner.update(make_batch(policy, seed, space=space))
        assert abs(metrics["approx_kl"]) < 1e-6 and metrics["clip_fraction"] == 0
        policy.load_weights(learner.weights())


def test_observations_are_normalised_by_all_that_was_seen_before() -> None:
    learner = PPOLearner(MIXED, DISCRETE, make_config(normalize_obs=True))
    policy = Policy(learner.module)
    seen = []
    for seed in range(3):
        batch = make_batch(policy, seed, space=MIXED, invalid=True)
        chunk = batch.chunks[0]
        numbers = learner._rows(batch).obs[0].numpy()
        raw = chunk.obs["touch"].swapaxes(0, 1)[chunk.valid.T]
        if seen:
            before = np.concatenate(seen).astype(np.float64)
            raw = (raw - before.mean(0)) / before.std(0)
        np.testing.assert_allclose(numbers, raw.clip(-10, 10), atol=1e-5)
        seen.append(chunk.obs["touch"][chunk.valid])
        learner.update(batch)


def test_rewards_are_scaled_by_the_spread_of_discounted_returns() -> None:
    learner = PPOLearner(OBS, DISCRETE, make_config(normalize_reward=True, gamma=0.9))
    plain = PPOLearner(OBS, DISCRETE, make_config(gamma=0.9))
    policy = Policy(learner.module)
    running, returns = np.zeros(N), []
    for seed in range(3):
        batch = make_batch(policy, seed, invalid=True)
        chunk = batch.chunks[0]
        for t in range(T):
            for n in range(N):
                if not chunk.valid[t, n]:
                    running[n] = 0
                    continue
                running[n] = 0.9 * running[n] + chunk.rew[t, n]
                returns.append(running[n])
                running[n] *= not chunk.done[t, n]
        scaled = copy.deepcopy(batch)
        scaled.chunks[0].rew[:] /= np.std(returns)
        torch.testing.assert_close(learner._rows(batch).advantage, plain._rows(scaled).advantage, atol=1e-5, rtol=1e-5)


def test_rewards_are_clipped() -> None:
    learner = PPOLearner(OBS, DISCRETE, make_config(clip_reward=0.5))
    batch = make_batch(Policy(learner.module))
    rows = learner._rows(batch)
    assert np.abs(batch.chunks[0].rew).max() > 1
    batch.chunks[0].rew.clip(-0.5, 0.5, out=batch.chunks[0].rew)
    torch.testing.assert_close(rows.advantage, learner._rows(batch).advantage)


@pytest.mark.parametrize("space", [FAR, MIXED], ids=["numbers", "both"])
def test_a_loaded_learner_normalises_on_bit_for_bit(space: spaces.Space[Any]) -> None:
    learner = PPOLearner(space, BOX, make_config(**NORMALIZED))
    policy = Policy(learner.module)
    for seed in range(2):
        learner.update(make_batch(policy, seed, space=space))
    file = io.BytesIO()
    torch.save(learner.state_dict(), file)
    file.seek(0)
    other = PPOLearner(space, BOX, make_config(**NORMALIZED, seed=9))
    other.load_state_dict(torch.load(file, weights_only=True))
    other.config = learner.config
    np.testing.assert_array_equal(learner.weights(), other.weights())
    policy.load_weights(learner.weights())
    for seed in range(2, 4):
        batch = make_batch(policy, seed, space=space)
        assert learner.update(batch) == other.update(batch)
        np.testing.assert_array_equal(learner.weights(), other.weights())
    with pytest.raises(CheckpointError, match=r"obs_moments, return_scale\. Got: .*Remedy"):
        learner.load_state_dict(PPOLearner(space, BOX, make_config()).state_dict())


def test_statistics_are_those_of_all_ranks() -> None:
    settings = {**NORMALIZED, "clip_reward": None}
    policy = Policy(PPOLearner(FAR, BOX, make_config(**settings)).module)
    batches = [make_batch(policy, seed, space=FAR, invalid=True) for seed in range(4)]

    def learn(bounds: list[int]) -> list[Any]:
        def work(ranks: ThreadRanks) -> Any:
            learner = PPOLearner(FAR, BOX, make_config(**settings))
            learner.ranks = ranks
            start, stop = bounds[ranks.rank : ranks.rank + 2]
            for batch in batches:
                learner.update(Batch(tuple(chunk.columns(start, stop) for chunk in batch.chunks), STATS))
            return learner.weights(), learner.state_dict()

        return on_ranks(len(bounds) - 1, work)

    ((expected, state),) = learn([0, N])
    for bounds in ([0, 1, N], [0, 0, 3, N]):
        ranks = learn(bounds)
        for weights, statistics in ranks:
            np.testing.assert_array_equal(weights, ranks[0][0])
            np.testing.assert_allclose(weights, expected, atol=1e-5)
            for name in ("mean", "squares"):
                torch.testing.assert_close(statistics["obs_moments"][name], state["obs_moments"][name])
            torch.testing.assert_close(statistics["return_scale"]["returns"], state["return_scale"]["returns"])


def test_a_gpu_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match=r"learner_device.*Got: none.*Remedy"):
        PPOLearner(OBS, DISCRETE, make_config(learner_device="cuda"))


def learn_both_ways(action_space: spaces.Space[Any]) -> tuple[Any, Any]:
    """Two updates of batches with gaps, so that minibatches differ in size; eager, then compiled."""
    results = []
    for compiled in (False, True):
        learner = PPOLearner(OBS, action_space, make_config(compile=compiled))
        policy = Policy(learner.module)
        metrics = [learner.update(make_batch(policy, seed, invalid=True)) for seed in range(2)]
        results.append((learner.weights(), metrics))
    return results[0], results[1]


@SPACES
def test_compiled_updates_equal_eager_ones(action_space: spaces.Space[Any]) -> None:
    (weights, metrics), (others, other_metrics) = learn_both_ways(action_space)
    np.testing.assert_allclose(others, weights, atol=2e-5)
    for ours, theirs in zip(other_metrics, metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)


def test_without_a_compiler_updates_are_eager_and_say_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> Any:
        def call(*args: object) -> None:
            raise RuntimeError("no compiler")

        return call

    monkeypatch.setattr("torch.compile", refuse)
    with pytest.warns(RuntimeWarning, match="run uncompiled.*no compiler") as warned:
        (weights, _), (others, _) = learn_both_ways(DISCRETE)
    assert len(warned) == 1
    np.testing.assert_allclose(others, weights, atol=2e-5)


def test_a_rank_without_rows_has_no_compiled_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayvec.learners.ppo_graph.Compiled", lambda function: function)
    learner = PPOLearner(OBS, DISCRETE, make_config(compile=True))
    rows = learner._rows(make_batch(Policy(learner.module)))
    shares = learner._gradients(rows[torch.zeros(0, dtype=torch.int64)], 16)
    assert not shares.any() and not learner._flat.grad.any()
    learner._gradients(rows, 16)
    assert learner._flat.grad.any()


def test_no_trace_goes_into_the_episode_of_an_environment_made_anew() -> None:
    """Between two chunks, where no step says that the episode ended; the value there is bootstrapped all the same."""
    learner = PPOLearner(OBS, DISCRETE, make_config(gamma=0.9, gae_lambda=0.8))
    policy = Policy(learner.module)
    whole = [make_chunk(policy, seed) for seed in range(2)]
    none = {"terminated": np.zeros((T, N), bool), "truncated": np.zeros((T, N), bool)}
    first, second = (
        replace(chunk, **none, final_index=np.zeros((0, 2), np.int64), final_obs=chunk.final_obs[:0]) for chunk in whole
    )
    anew = replace(second, restarts=np.array([[-1, 1], [3, 2]]))

    def advantages(*chunks: Chunk) -> Tensor:
        rows = [len(chunk.rew) for chunk in chunks]
        return learner._rows(Batch(chunks, STATS)).advantage.reshape(N, sum(rows))

    alone, through, cut = advantages(first), advantages(first, second), advantages(first, anew)
    torch.testing.assert_close(cut[1, :T], alone[1])
    others = [0, 2, 3]
    torch.testing.assert_close(cut[others], through[others], atol=0, rtol=0)
    torch.testing.assert_close(cut[:, T:], through[:, T:], atol=0, rtol=0)
    assert (through[1, T - 1] - alone[1, -1]).abs() > 1e-3
    torch.testing.assert_close(advantages(anew)[1], advantages(second)[1])  # what was before is not in this batch


def test_no_trace_comes_out_of_steps_beyond_the_quota() -> None:
    """In batches of episodes everything after the last counted step of an environment is not valid."""
    learner = PPOLearner(OBS, DISCRETE, make_config())
    chunk = make_chunk(Policy(learner.module), 0)
    valid = np.ones((T, N), bool)
    valid[5:, 1], valid[0:, 2] = False, False
    rows = learner._rows(Batch((replace(chunk, valid=valid),), STATS))
    surplus = replace(chunk, valid=valid, rew=np.where(valid, chunk.rew, 1e6))
    same = learner._rows(Batch((surplus,), STATS))
    assert len(same) == valid.sum()
    assert torch.equal(same.advantage, rows.advantage) and torch.equal(same.target, rows.target)


def test_every_learner_has_graphs_of_its_own(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    """torch allows eight for each piece of code; none of ten learners is refused its own, or becomes eager."""
    compile_, graphs = torch.compile, []

    def count(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr("torch.compile", lambda function, *, options, **rest: compile_(function, backend=count, **rest))
    for seed in range(10):
        learner = PPOLearner(OBS, DISCRETE, make_config(compile=True, num_epochs=1, seed=seed))
        learner.update(make_batch(Policy(learner.module)))
    assert len(graphs) == 10 and not [warning for warning in recwarn if "uncompiled" in str(warning.message)]


def test_a_graph_too_many_is_computed_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after calls that were compiled; the warning does not blame a C++ compiler."""
    compile_ = torch.compile
    monkeypatch.setattr(
        "torch.compile", lambda function, *, options, **rest: compile_(function, backend="eager", **rest)
    )

    def add(into: Tensor, what: Tensor) -> Tensor:
        into.add_(what)
        return 2 * into

    function = Compiled(add)
    with pytest.warns(RuntimeWarning, match="run uncompiled.*pass compile=False") as warned:
        for size in range(1, 13):
            total = torch.zeros(size)
            assert function(total, torch.ones(size)).tolist() == [2.0] * size
            assert total.tolist() == [1.0] * size
    assert len(warned) == 1 and "compiler" not in str(warned[0].message)
