"""SAC with action masks against sums over the allowed choices of each row, one by one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.sac_kit import DISCRETE, OBS, STATS, N, make_chunk, make_config
from helpers.thread_ranks import ThreadRanks, on_ranks
from rayvec.learners.sac_math import Minibatch, forward
from torch import Tensor, nn

from rayvec.config.references import refer
from rayvec.data import Batch, Chunk, tree_leaves
from rayvec.errors import ConfigError
from rayvec.learners.sac import SACLearner
from rayvec.policies.noise import keyed_noise
from rayvec.policies.policy import Policy
from rayvec.training.export import GreedyModule

C = 3
SPACE = spaces.Dict(numbers=OBS, action_mask=spaces.MultiBinary(C))


def make_learner(**settings: Any) -> SACLearner:
    return SACLearner(SPACE, DISCRETE, make_config(**settings), dtype=torch.float64)


def masked_chunk(seed: int, **kwargs: Any) -> Chunk:
    """A chunk whose actions are allowed; masks of last observations of episodes may allow nothing."""
    chunk, rng = make_chunk(DISCRETE, seed, **kwargs), np.random.default_rng(seed)

    def with_mask(numbers: Any, act: Any = None) -> dict[str, Any]:
        mask = rng.integers(0, 2, (*numbers.shape[:-1], C)).astype(np.int8)
        if act is not None:
            np.put_along_axis(mask, np.asarray(act)[..., None] - DISCRETE.start, 1, -1)
        return {"numbers": numbers, "action_mask": mask}

    last = with_mask(chunk.last_obs, np.full(N, DISCRETE.start))
    return replace(chunk, obs=with_mask(chunk.obs, chunk.act), last_obs=last, final_obs=with_mask(chunk.final_obs))


def make_batch(seed: int) -> Batch:
    return Batch((masked_chunk(seed, invalid=True),), STATS)


def value_of(logits: Tensor, q: Tensor, mask: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, int]:
    """Returns the soft value and the entropy of one row, ``logits [C]``, and how many choices it has."""
    allowed = mask.nonzero().flatten() if (mask > 0).any() else torch.arange(C)
    logp = logits[allowed] - logits[allowed].logsumexp(0)
    value, entropy = torch.zeros((), dtype=q.dtype), torch.zeros((), dtype=q.dtype)
    for each, choice in zip(logp, allowed, strict=True):
        value = value + each.exp() * (q[choice] - alpha * each)
        entropy = entropy - each.exp() * each
    return value, entropy, len(allowed)


@pytest.mark.parametrize("target_entropy", [None, 0.2], ids=["a share", "a number"])
def test_losses_are_sums_over_allowed_choices(target_entropy: float | None) -> None:
    learner = make_learner(alpha=0.3, target_entropy=target_entropy)
    for seed in range(3):
        learner.update(make_batch(seed))
    math, nets, config = learner._math, learner._nets, learner.config
    rows: Minibatch = learner._minibatches(1)[0].minibatch
    assert rows.obs.shape == (12, 3 + C) and (rows.next_obs[:, 3:].sum(1) < C).any()
    param = nets.actor.param.clone().requires_grad_()
    critic = nets.critic.param.clone().requires_grad_()

    def both(flat: Tensor, of_actor: Tensor, obs: Tensor) -> tuple[Tensor, Tensor]:
        logits = forward(math.actor.layers(of_actor[:-1]), obs[:, :3])[0]  # type: ignore[attr-defined]
        return logits, forward(math.critic.layers(flat), obs[:, :3])  # type: ignore[attr-defined]

    alpha = param[-1].detach().exp()
    logits, q = both(nets.target, nets.actor.param, rows.next_obs)
    after = [value_of(logits[row], q[:, row].amin(0), rows.next_obs[row, 3:], alpha)[0] for row in range(12)]
    target = rows.rew + config.gamma * (1 - rows.terminated) * torch.stack(after)
    taken = both(critic, param, rows.obs)[1].gather(2, rows.act.argmax(1)[None, :, None].expand(2, -1, 1)).squeeze(2)
    (expected,) = torch.autograd.grad(0.5 * (taken - target.detach()).square().mean(1).sum(), critic)
    got, _ = math.critic_gradient(nets, rows, torch.zeros(12, 0))
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-9)

    logits, q = both(nets.critic.param, param, rows.obs)
    found = [value_of(logits[row], q[:, row].amin(0), rows.obs[row, 3:], alpha) for row in range(12)]
    values, entropies = (torch.stack([each[k] for each in found]) for k in (0, 1))  # type: ignore[misc]
    largest = torch.tensor([float(np.log(each[2])) for each in found], dtype=torch.float64)
    wanted = (
        config.target_entropy_scale * largest if target_entropy is None else torch.full_like(largest, target_entropy)
    )
    loss = -values.mean() + (param[-1].exp() * (entropies.detach() - wanted)).mean()
    (expected,) = torch.autograd.grad(loss, param)
    got, stats = math.actor_gradient(nets, rows, torch.zeros(12, 0))
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-9)
    assert float(stats[1]) == pytest.approx(entropies.mean().item())


def test_where_everything_is_allowed_it_is_sac_without_masks() -> None:
    plain, masked = SACLearner(OBS, DISCRETE, make_config(), dtype=torch.float64), make_learner()
    np.testing.assert_array_equal(masked.weights(), plain.weights())
    for seed in range(3):
        chunk = make_chunk(DISCRETE, seed)

        def free(numbers: Any) -> Any:
            return {"numbers": numbers, "action_mask": np.ones((*numbers.shape[:-1], C), np.int8)}

        parts = {name: free(getattr(chunk, name)) for name in ("obs", "last_obs", "final_obs")}
        results = [plain.update(Batch((chunk,), STATS)), masked.update(Batch((replace(chunk, **parts),), STATS))]
        assert results[1] == pytest.approx(results[0], rel=1e-9)
    np.testing.assert_allclose(masked.weights(), plain.weights(), atol=1e-12)


def test_the_replay_keeps_the_mask_after_each_step() -> None:
    learner, chunk = make_learner(), masked_chunk(5)
    learner.update(Batch((chunk,), STATS))
    following = chunk.next_obs()["action_mask"]
    for t, n in np.ndindex(chunk.valid.shape):
        found = learner._replay.sample(np.array([t]), np.array([n]))
        np.testing.assert_array_equal(found.obs[0, 3:], chunk.obs["action_mask"][t, n])
        np.testing.assert_array_equal(found.next_obs[0, 3:], following[t, n])


def test_several_ranks_do_what_one_does_and_a_state_is_exact() -> None:
    def work(ranks: ThreadRanks) -> tuple[SACLearner, list[dict[str, float]]]:
        learner = make_learner(batch_size=7)
        if ranks.size > 1:
            learner.ranks = ranks
        first, stop = {1: [(0, 4)], 2: [(0, 1), (1, 4)]}[ranks.size][ranks.rank]
        batches = [make_batch(seed) for seed in range(4)]
        shards = [Batch((batch.chunks[0].columns(first, stop),), STATS) for batch in batches]
        metrics = [learner.update(shard) for shard in shards[:3]]
        if ranks.size == 1:
            state, learner = learner.state_dict(), make_learner(batch_size=7)
            learner.load_state_dict(state)
        return learner, [*metrics, learner.update(shards[3])]

    [(one, expected)] = on_ranks(1, work)
    for learner, metrics in on_ranks(2, work):
        np.testing.assert_allclose(learner.weights(), one.weights(), atol=1e-12)
        assert all(got == pytest.approx(want, rel=1e-9) for got, want in zip(metrics, expected, strict=True))


def test_acting_and_random_starts_choose_what_is_allowed() -> None:
    learner, chunk = make_learner(), masked_chunk(1, num_steps=64)
    for random_start in (True, False):
        policy = Policy(learner.module, random_start=random_start)
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
            else:
                with torch.no_grad():
                    params = learner.module.action_parameters(learner.module.encode(obs))
                logp = params.log_softmax(-1)[np.arange(N), act - DISCRETE.start]
                np.testing.assert_allclose(extras["logp"], logp, atol=1e-5)
        assert chosen == {1, 2, 3}


def test_a_random_start_for_a_gpu_chooses_what_is_allowed() -> None:
    """Random actions do not call the module, so the policy does not move to the device yet."""
    learner, chunk = make_learner(), masked_chunk(1, num_steps=64)
    here, there = (Policy(learner.module, random_start=True, device=device) for device in ("cpu", "cuda"))
    noise = keyed_noise(here.noise, seed=0, env_ids=np.arange(N), first_step=0, num_steps=64)
    for t in range(64):
        obs = {key: part[t] for key, part in chunk.obs.items()}
        for ours, theirs in zip(here.act(obs, noise[t]), there.act(obs, noise[t]), strict=True):
            np.testing.assert_equal(ours, theirs)
    with pytest.raises(ConfigError, match="allows no choice"):
        there.act({**obs, "action_mask": 0 * obs["action_mask"]}, noise[0])


@pytest.mark.parametrize("key", ["numbers", "observation"])
def test_your_own_networks_learn_what_the_default_ones_do(key: str) -> None:
    """They see rows of numbers, or the Box under "observation" as it is."""
    space = spaces.Dict({key: OBS, "action_mask": spaces.MultiBinary(C)})
    default = make_learner()
    shape = None if key == "numbers" else OBS.shape
    network = refer(partial(copies_of, default, shape))
    own = SACLearner(space, DISCRETE, make_config(network=network), dtype=torch.float64)
    np.testing.assert_array_equal(own.weights(), default.weights())
    for seed in range(3):
        batch = make_batch(seed)
        (chunk,) = batch.chunks
        names = {name: renamed(getattr(chunk, name), key) for name in ("obs", "last_obs", "final_obs")}
        metrics = own.update(Batch((replace(chunk, **names),), STATS))
        assert metrics == pytest.approx(default.update(batch), rel=1e-9)
    np.testing.assert_allclose(own.weights(), default.weights(), atol=1e-12)
    obs = {name: part[0] for name, part in masked_chunk(1).obs.items()}
    wanted = default.module.make_actor()(obs)
    np.testing.assert_allclose(own.module.make_actor()(renamed(obs, key)), wanted, atol=1e-4)
    actions = GreedyModule(own.module.float(), space)(*map(torch.as_tensor, tree_leaves(renamed(obs, key))))
    np.testing.assert_array_equal(actions, wanted.argmax(-1) + DISCRETE.start)


def renamed(obs: Any, key: str) -> dict[str, Any]:
    return {"action_mask": obs["action_mask"], key: obs["numbers"]}


def copies_of(default: SACLearner, shape: Any, observation_space: Any, action_space: Any, config: Any) -> nn.Module:
    """Returns networks like the default ones of a learner, with its weights, that check the shape of what they see."""
    assert shape is None or observation_space.shape == shape

    def mlp(layers: Any, which: int) -> nn.Sequential:
        modules: list[nn.Module] = []
        for weight, bias in layers:
            layer = nn.Linear(weight.shape[2], weight.shape[1])
            layer.weight.data.copy_(weight[which])
            layer.bias.data.copy_(bias[which])
            modules += [layer, nn.ReLU()]
        return nn.Sequential(*modules[:-1])

    math: Any = default._math
    module = nn.Module()
    module.actor = mlp(math.actor.layers(default._nets.actor.param[:-1]), 0)
    critics = list(math.critic.layers(default._nets.critic.param))
    module.critics = nn.ModuleList(mlp(critics, which) for which in range(config.num_critics))
    return module
