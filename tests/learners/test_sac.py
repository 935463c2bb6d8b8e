"""What SAC does besides the update: its replay, its ratio, its checkpoints, masks in acting, what it refuses."""

from __future__ import annotations

import io
import itertools
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.paper_kit import PaperSAC
from helpers.sac_kit import (
    BOX,
    DISCRETE,
    OBS,
    STATS,
    N,
    make_batch,
    make_chunk,
    make_config,
    make_learner,
    masked_chunk,
)
from helpers.thread_ranks import ThreadRanks, on_ranks
from helpers.training_kit import HERE
from torch import Tensor, nn

import rayvec
from rayvec.config.references import refer
from rayvec.data import Batch, tree_leaves
from rayvec.errors import ConfigError, LearnerError
from rayvec.learners.replay import ReplayBuffer
from rayvec.learners.sac import SACLearner
from rayvec.policies.noise import keyed_noise
from rayvec.policies.policy import Policy
from rayvec.training.agent import GreedyModule

SPACES = pytest.mark.parametrize("action_space", [BOX, DISCRETE], ids=["box", "discrete"])
MASKED = spaces.Dict({"numbers": OBS, "action_mask": spaces.MultiBinary(3)})


def networks(learner: Any) -> Tensor:
    return torch.cat([learner.state_dict()[name] for name in ("critic", "target", "actor")])


def test_step_sizes_follow_their_schedules_until_a_callback_sets_them() -> None:
    half = {name: lambda progress: 1e-3 * (progress > 0.5) for name in ("policy_lr", "q_lr")}
    learner = make_learner(total_steps=80, **half)
    weights = [networks(learner)]
    for seed in range(6):  # each has 16 steps; updates begin with the second
        learner.set_learning_rate(1e-3 if seed == 2 else None)
        learner.update(make_batch(seed=seed))
        weights.append(networks(learner))
    moved = [not torch.equal(before, after) for before, after in itertools.pairwise(weights)]
    assert moved == [False, False, True, True, True, True]  # the target follows the critics


@SPACES
@pytest.mark.parametrize("masked", [False, True])
def test_going_on_from_a_state_is_exact(action_space: spaces.Space[Any], masked: bool) -> None:
    if masked and action_space is BOX:
        pytest.skip("masks are of choices")
    space, make = (MASKED, masked_chunk) if masked else (OBS, make_chunk)
    batches = [Batch((make(action_space, seed, invalid=True),), STATS) for seed in range(5)]
    learner, other = (SACLearner(space, action_space, make_config(replay_size=40)) for _ in range(2))
    for batch in batches[:2]:
        learner.update(batch)
    file = io.BytesIO()
    torch.save(learner.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for batch in batches[2:]:
        assert learner.update(batch) == other.update(batch) != {}
    assert torch.equal(networks(learner), networks(other))


def test_without_a_replay_in_the_checkpoint_it_refills_first(caplog: pytest.LogCaptureFixture) -> None:
    learner = make_learner(checkpoint_replay=False)
    for seed in range(2):
        metrics = learner.update(make_batch(seed=seed))
    assert metrics["num_updates"] == 16
    other = make_learner(checkpoint_replay=False)
    with caplog.at_level(logging.WARNING):
        other.load_state_dict(learner.state_dict())
    assert "the replay refills" in caplog.text and "16 steps" in caplog.text
    assert other.update(make_batch(seed=2)) == {}  # 16 steps that refill
    assert other.update(make_batch(seed=3))["num_updates"] == 32


@SPACES
def test_a_gradient_that_is_not_finite_changes_nothing(action_space: spaces.Space[Any]) -> None:
    learner = make_learner(action_space)
    for seed in range(2):
        learner.update(make_batch(action_space, seed))
    before, chunk = networks(learner), make_chunk(action_space, 2)
    chunk.obs[:], chunk.last_obs[:], chunk.final_obs[:] = np.nan, np.nan, np.nan
    with pytest.raises(LearnerError, match=r"not finite.*critic_grad_norm': nan"):
        for _ in range(9):  # until a row of it is drawn first
            learner.update(Batch((chunk,), STATS))
    after = networks(learner)
    assert after.isfinite().all()
    assert (after - before).norm() < 0.5 * before.norm()


@SPACES
def test_observations_are_normalised_by_moments_of_all_ranks(action_space: spaces.Space[Any]) -> None:
    """Also of a rank without environments; and a state has the moments."""
    batches = [make_batch(action_space, seed) for seed in range(4)]

    def work(ranks: ThreadRanks) -> SACLearner:
        learner = make_learner(action_space, normalize_obs=True)
        learner.ranks = ranks
        start, stop = [(0, 2), (2, 2), (2, 4)][ranks.rank]
        for batch in batches:
            learner.update(Batch((batch.chunks[0].columns(start, stop),), STATS))
        return learner

    alone = make_learner(action_space, normalize_obs=True)
    for batch in batches:
        alone.update(batch)
    for each in on_ranks(3, work):
        torch.testing.assert_close(networks(each), networks(alone), atol=1e-12, rtol=0)
        np.testing.assert_allclose(each.weights(), alone.weights(), atol=1e-6)
    seen = np.concatenate([batch.chunks[0].obs.reshape(-1, 3) for batch in batches])
    np.testing.assert_allclose(alone.module.obs_mean, seen.mean(0, dtype=np.float64), atol=1e-9)
    np.testing.assert_allclose(alone.module.obs_scale, 1 / seen.std(0, dtype=np.float64), rtol=1e-6)
    again = make_learner(action_space, normalize_obs=True)
    again.load_state_dict(alone.state_dict())
    following = make_batch(action_space, 9)
    assert again.update(following) == alone.update(following)
    np.testing.assert_array_equal(again.weights(), alone.weights())
    policy = Policy(alone.module, deterministic=True)
    policy.load_weights(alone.weights())
    rows = following.chunks[0].obs[0]
    params = alone.module.action_parameters(alone.module.encode(rows)).detach().numpy().astype(np.float32)
    expected = alone.module.distribution.action(alone.module.distribution.mode(params)[0])
    np.testing.assert_allclose(policy.act(rows, np.zeros((N, 0)))[0], expected, atol=1e-5)


@pytest.mark.parametrize("random_start", [True, False])
def test_acting_and_random_starts_choose_what_is_allowed(random_start: bool) -> None:
    learner = SACLearner(MASKED, DISCRETE, make_config())
    chunk = masked_chunk(DISCRETE, 1, num_steps=64)
    policy = Policy(learner.module, random_start=random_start)
    there = Policy(learner.module, random_start=True, device="cuda")  # random actions do not call the module
    noise = keyed_noise(policy.noise, seed=0, env_ids=np.arange(N), first_step=0, num_steps=64)
    chosen = set()
    for t in range(64):
        obs = {key: part[t] for key, part in chunk.obs.items()}
        act, extras = policy.act(obs, noise[t])
        mask = obs["action_mask"][np.arange(N)]
        assert mask[np.arange(N), act - DISCRETE.start].all()
        chosen |= set(act.tolist())
        if random_start:
            np.testing.assert_allclose(np.exp(extras["logp"]), 1 / mask.sum(1), rtol=1e-5)
            np.testing.assert_array_equal(there.act(obs, noise[t])[0], act)
            continue
        params = learner.module.action_parameters(learner.module.encode(obs)).detach()
        logp = params.log_softmax(-1)[np.arange(N), act - DISCRETE.start]
        np.testing.assert_allclose(extras["logp"], logp, atol=1e-5)
    assert chosen == {1, 2, 3}


def copies_of(default: SACLearner, shape: Any, observation_space: Any, action_space: Any, config: Any) -> nn.Module:
    """Returns networks like the default ones of a learner, with its weights, that check the shape of what they see."""
    assert shape is None or observation_space.shape == shape
    paper = PaperSAC(default)

    class Critic(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, *inputs: Tensor) -> Tensor:
            value: Tensor = self.net(torch.cat(inputs, -1))
            return value

    module = nn.Module()
    module.actor = paper.actor.float()
    module.critics = nn.ModuleList(Critic(net.float()) for net in paper.critics)
    return module


@pytest.mark.parametrize(
    ("space", "key", "action_space"),
    [
        (OBS, "", BOX),
        (OBS, "", DISCRETE),
        (MASKED, "numbers", DISCRETE),
        (spaces.Dict({"observation": OBS, "action_mask": spaces.MultiBinary(3)}), "observation", DISCRETE),
    ],
    ids=["box", "discrete", "masked rows", "a masked Box"],
)
def test_your_own_networks_learn_what_the_default_ones_do(
    space: spaces.Space[Any], key: str, action_space: spaces.Space[Any]
) -> None:
    """They see rows of numbers, or a Box as it is."""
    masked = space is not OBS
    default = SACLearner(MASKED if masked else OBS, action_space, make_config(), dtype=torch.float64)
    network = refer(partial(copies_of, default, None if key == "numbers" else OBS.shape))
    own = SACLearner(space, action_space, make_config(network=network), dtype=torch.float64)
    np.testing.assert_array_equal(own.weights(), default.weights())

    def renamed(obs: Any) -> Any:
        return {"action_mask": obs["action_mask"], key: obs["numbers"]} if masked else obs

    for seed in range(3):
        chunk = (masked_chunk if masked else make_chunk)(action_space, seed, invalid=True)
        names = {name: renamed(getattr(chunk, name)) for name in ("obs", "last_obs", "final_obs")}
        metrics = own.update(Batch((replace(chunk, **names),), STATS))
        assert metrics == pytest.approx(default.update(Batch((chunk,), STATS)), rel=1e-9)
    np.testing.assert_allclose(own.weights(), default.weights(), atol=1e-12)
    again = SACLearner(space, action_space, make_config(network=network), dtype=torch.float64)
    again.load_state_dict(own.state_dict())
    assert torch.equal(networks(again), networks(own))
    obs = chunk.obs[0] if not masked else {name: part[0] for name, part in chunk.obs.items()}
    wanted = default.module.action_parameters(default.module.encode(obs)).detach().numpy()
    np.testing.assert_allclose(own.module.make_actor()(renamed(obs)), wanted, atol=1e-4)
    if action_space is DISCRETE:
        actions = GreedyModule(own.module.float(), space)(*map(torch.as_tensor, tree_leaves(renamed(obs))))
        np.testing.assert_array_equal(actions, wanted.argmax(-1) + DISCRETE.start)


@pytest.mark.parametrize(
    ("space", "remedy"),
    [
        (spaces.Box(-np.inf, np.inf, (2,), np.float32), "finite bounds"),
        (spaces.Box(0, 5, (2,), np.int64), "floating-point Box"),
        (spaces.Box(0, 5, (0,), np.float32), "at least one number"),
        (spaces.MultiDiscrete([2, 2]), r"gymnasium\.wrappers\.TransformAction"),
        (spaces.MultiBinary(2), r"gymnasium\.wrappers\.TransformAction"),
    ],
    ids=["unbounded", "integers", "empty", "multi-discrete", "multi-binary"],
)
def test_action_spaces_of_sac(space: spaces.Space[Any], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        make_learner(space, dtype=torch.float32)


def test_what_a_replay_refuses() -> None:
    with pytest.raises(ConfigError, match=r"capacity_steps is 0.*at least 1"):
        ReplayBuffer(0)
    replay, chunk = ReplayBuffer(8), make_chunk(BOX, 0, 8)
    replay.add(chunk)
    with pytest.raises(ConfigError, match=r"environments \[1, 2, 3, 4\].*\[0, 1, 2, 3\]"):
        replay.add(replace(chunk, env_ids=chunk.env_ids + 1))


@pytest.mark.slow
def test_it_learns_pendulum(tmp_path: Path) -> None:
    settings: Any = {"num_steps": 8, "learning_starts": 600, "batch_size": 128, "hidden_sizes": (64, 64), **HERE}
    config = rayvec.SACConfig(total_steps=4_000, eval_episodes=10, run_dir=tmp_path / "a", **settings)
    assert rayvec.train(config).eval_return_mean > -500  # random actions: about -1200
