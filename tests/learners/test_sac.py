"""SAC against a slow reference in the words of torch.distributions, autograd and one Adam for each tensor."""

from __future__ import annotations

import copy
import io
import itertools
import logging
import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.sac_kit import BOX, DISCRETE, STATS, N, make_batch, make_chunk, make_config, make_learner
from helpers.thread_ranks import Apart, ThreadRanks, on_ranks
from torch import Tensor, nn

from rayvec.data import Batch
from rayvec.errors import CheckpointError, ConfigError, LearnerError
from rayvec.learners import products, replay
from rayvec.learners.base import Learner
from rayvec.learners.compiling import Compiled
from rayvec.learners.sac import SACLearner
from rayvec.learners.sac_math import Minibatch, MLPLayout, forward
from rayvec.policies.noise import keyed_noise
from rayvec.policies.policy import Policy

SPACES = pytest.mark.parametrize("action_space", [BOX, DISCRETE], ids=["box", "discrete"])
INTERVALS = pytest.mark.parametrize("policy_interval", [1, 2])


class Reference:
    """The update as the papers write it: nets of nn.Linear, losses by autograd, optimizers of torch."""

    def __init__(self, learner: SACLearner) -> None:
        self.config, self.math = learner.config, learner._math
        self.actor = net_of(self.math.actor, learner._nets.actor.param, 0)
        self.critics = [net_of(self.math.critic, learner._nets.critic.param, e) for e in range(2)]
        self.targets = copy.deepcopy(self.critics)
        self.log_alpha = learner._nets.actor.param[-1].clone().requires_grad_()
        critic_params = [p for critic in self.critics for p in critic.parameters()]
        self.critic_optimizer = torch.optim.Adam(critic_params, lr=self.config.q_lr)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=self.config.policy_lr)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=self.config.q_lr)

    def update(self, rows: Minibatch, noise: Tensor) -> dict[str, float]:
        """One update; as many steps of the actor as there is noise left."""
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            if self.math.is_discrete:
                chances = torch.distributions.Categorical(logits=self.actor(rows.next_obs))
                q = torch.minimum(*[target(rows.next_obs) for target in self.targets])
                value = (chances.probs * q).sum(-1) + alpha * chances.entropy()
            else:
                act, logp = self.act(rows.next_obs, noise[0])
                value = torch.minimum(*[self.q(target, rows.next_obs, act) for target in self.targets]) - alpha * logp
            target = rows.rew + self.config.gamma * torch.where(rows.terminated > 0, 0.0, value)
        q = [self.q(critic, rows.obs, rows.act) for critic in self.critics]
        critic_loss = sum(0.5 * (each - target).square().mean() for each in q)
        self.critic_optimizer.zero_grad()
        torch.autograd.backward(critic_loss)
        self.critic_optimizer.step()
        metrics = {"critic_loss": critic_loss.item(), "q_mean": torch.stack(q).mean().item()}
        for eps in noise[1:]:
            metrics |= self.actor_step(rows, eps)
        for target_net, critic in zip(self.targets, self.critics, strict=True):
            for slow, fast in zip(target_net.parameters(), critic.parameters(), strict=True):
                slow.data.copy_((1 - self.config.tau) * slow.data + self.config.tau * fast.data)
        return metrics

    def actor_step(self, rows: Minibatch, noise: Tensor) -> dict[str, float]:
        alpha = self.log_alpha.exp().detach()
        if self.math.is_discrete:
            chances = torch.distributions.Categorical(logits=self.actor(rows.obs))
            q = torch.minimum(*[critic(rows.obs).detach() for critic in self.critics])
            logp = -chances.entropy()
            loss = (alpha * logp - (chances.probs * q).sum(-1)).mean()
        else:
            act, logp = self.act(rows.obs, noise)
            loss = (alpha * logp - torch.minimum(*[self.q(critic, rows.obs, act) for critic in self.critics])).mean()
        self.actor_optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.actor_optimizer.step()
        alpha_loss = -(self.log_alpha.exp() * (logp.detach() + self.math.target_entropy)).mean()
        self.alpha_optimizer.zero_grad()
        torch.autograd.backward(alpha_loss)
        if self.config.autotune:
            self.alpha_optimizer.step()
        return {"actor_loss": loss.item(), "entropy": -logp.mean().item(), "alpha": self.log_alpha.exp().item()}

    def act(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = self.actor(obs).chunk(2, -1)
        normal = torch.distributions.Normal(mean, (-5 + 3.5 * (raw.tanh() + 1)).exp())
        x = mean + normal.scale * noise
        act = x.tanh()
        return act, (normal.log_prob(x) - (1 - act.square()).log()).sum(-1)

    def q(self, critic: nn.Module, obs: Tensor, act: Tensor) -> Tensor:
        if self.math.is_discrete:
            values: Tensor = critic(obs)
            return values.gather(1, act.argmax(1, keepdim=True)).squeeze(1)
        return critic(torch.cat([obs, act], 1)).squeeze(1)  # type: ignore[no-any-return]


def net_of(layout: MLPLayout, flat: Tensor, which: int) -> nn.Sequential:
    modules: list[nn.Module] = []
    for weight, bias in layout.layers(flat[: layout.num_params]):
        layer = nn.Linear(weight.shape[2], weight.shape[1], dtype=flat.dtype)
        layer.weight.data.copy_(weight[which])
        layer.bias.data.copy_(bias[which])
        modules += [layer, nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def assert_nets_equal(learner: SACLearner, reference: Reference, tolerance: float) -> None:
    nets = learner._nets
    pairs = [(learner._math.actor, nets.actor.param, 0, reference.actor)]
    for e in range(2):
        pairs.append((learner._math.critic, nets.critic.param, e, reference.critics[e]))
        pairs.append((learner._math.critic, nets.target, e, reference.targets[e]))
    for layout, flat, which, net in pairs:
        for ours, theirs in zip(net_of(layout, flat, which).parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(ours.data, theirs.data, atol=tolerance, rtol=0)
    torch.testing.assert_close(nets.actor.param[-1], reference.log_alpha.data, atol=tolerance, rtol=0)


def spy_on_minibatches(learner: SACLearner) -> list[tuple[Minibatch, Tensor]]:
    drawn: list[tuple[Minibatch, Tensor]] = []
    draw = learner._minibatches

    def spy(count: int) -> Any:
        minibatches = draw(count)
        drawn.extend((each.minibatch, each.noise) for each in minibatches)
        return minibatches

    learner._minibatches = spy  # type: ignore[method-assign]
    return drawn


@SPACES
@INTERVALS
@pytest.mark.parametrize("autotune", [True, False], ids=["tuned", "fixed"])
def test_updates_equal_those_of_the_papers(
    action_space: spaces.Space[Any], policy_interval: int, autotune: bool
) -> None:
    learner = make_learner(action_space, policy_interval=policy_interval, autotune=autotune, alpha=0.3)
    reference, drawn = Reference(learner), spy_on_minibatches(learner)
    expected: list[dict[str, float]] = []
    for seed in range(4):
        metrics = learner.update(make_batch(action_space, seed))
        expected = [reference.update(*each) for each in drawn]
        drawn.clear()
        assert len(expected) == (16 if seed else 0)
        assert_nets_equal(learner, reference, 1e-10)
    for name in ("critic_loss", "q_mean", "actor_loss", "entropy", "alpha"):
        values = [each[name] for each in expected if name in each]
        assert metrics[name] == pytest.approx(np.mean(values), rel=1e-9), name
    assert metrics["num_updates"] == 48 and metrics["replay_steps"] == 64


def test_it_is_a_learner() -> None:
    learner: Learner = make_learner()
    assert learner.update(make_batch()) == {}
    np.testing.assert_array_equal(
        Policy(learner.module).act(np.ones((2, 3), np.float32), np.zeros((2, 2)))[0].shape, (2, 2)
    )


@SPACES
def test_the_actor_acts_in_numpy_as_in_torch(action_space: spaces.Space[Any]) -> None:
    learner = make_learner(action_space, dtype=torch.float32)
    rows = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    policy = Policy(learner.module)
    learner.update(make_batch(action_space))
    learner.update(make_batch(action_space, 1))
    policy.load_weights(learner.weights())
    np.testing.assert_allclose(policy._actor(rows), learner.module(torch.from_numpy(rows)), atol=1e-6)
    noise = keyed_noise(policy.noise, seed=0, env_ids=np.arange(20), first_step=0, num_steps=1)[0]
    actions, _ = policy.act(rows, noise)
    assert all(action_space.contains(action) for action in actions)


@SPACES
def test_the_actor_that_was_moved_acts_with_its_own_weights(action_space: spaces.Space[Any]) -> None:
    module, before = make_learner(action_space).module.to(torch.float32), make_learner(action_space).weights()
    for parameter in module.parameters():
        parameter.add_(1)
    np.testing.assert_array_equal(module.weights(), before + 1)


@SPACES
@pytest.mark.parametrize("ratio", [pytest.param(1.0, marks=pytest.mark.slow), 0.3, 2.5])
def test_the_ratio_of_updates_is_exact(action_space: spaces.Space[Any], ratio: float) -> None:
    learner = make_learner(action_space, update_to_data=ratio, batch_size=4)
    num_steps = 0
    for seed in range(12):
        batch = make_batch(action_space, seed, invalid=True)
        num_steps += int(batch.chunks[0].valid.sum())
        before = learner._num_updates
        metrics = learner.update(batch)
        owed = int(Fraction(str(ratio)) * max(0, num_steps - 16))
        assert learner._num_updates == owed
        assert bool(metrics) == (owed > before)


def test_every_environment_is_drawn_equally_often_and_every_step_too() -> None:
    learner = make_learner(batch_size=10, learning_starts=0, update_to_data=0.001)
    learner.update(make_batch(num_steps=5))
    counts = np.zeros((5, N))
    places = {tuple(obs): (t, n) for t, row in enumerate(learner._replay.obs[:5].numpy()) for n, obs in enumerate(row)}
    for number in range(2000):
        learner._num_updates = number
        for obs in learner._minibatches(1)[0].minibatch.obs.float().numpy():
            counts[places[tuple(obs)]] += 1
    assert counts.sum() == 20_000
    assert (abs(counts - 1000) < 5 * np.sqrt(1000)).all()


def test_it_makes_no_difference_how_many_minibatches_are_drawn_at_once() -> None:
    learner = make_learner(policy_interval=2, batch_size=5)
    learner.update(make_batch())
    together = learner._minibatches(4)
    for each in together:
        [alone] = learner._minibatches(1)
        for ours, theirs in zip((*each.minibatch, *each[1:]), (*alone.minibatch, *alone[1:]), strict=True):
            torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
        learner._num_updates += 1
    assert [len(each.noise) for each in together] == [3, 1, 3, 1]


def test_environments_are_drawn_alike_where_there_are_more_than_rows() -> None:
    learner = make_learner(batch_size=3, learning_starts=0, update_to_data=0.001)
    learner.update(make_batch(num_steps=1))
    counts = np.zeros(N)
    places = {tuple(obs): n for n, obs in enumerate(learner._replay.obs[0].numpy())}
    for number in range(2000):
        learner._num_updates = number
        for obs in learner._minibatches(1)[0].minibatch.obs.float().numpy():
            counts[places[tuple(obs)]] += 1
    assert (abs(counts - 1500) < 5 * np.sqrt(1500)).all()


def shard(batch: Batch, bounds: tuple[int, int]) -> Batch:
    first, stop = bounds
    return Batch(tuple(chunk.columns(first, stop) for chunk in batch.chunks), batch.stats)


@pytest.mark.parametrize("num_rows", [0, 1, 7])
@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)], ids=["nets", "rows", "both"])
@pytest.mark.parametrize(
    ("dtype", "tolerance", "by_onednn"),
    [(torch.float32, 1e-5, False), (torch.float32, 1e-5, True), (torch.float64, 1e-12, False)],
    ids=["float32", "float32 by oneDNN", "float64"],
)
def test_uncompiled_nets_have_the_gradients_of_autograd(
    num_rows: int,
    needs: tuple[bool, bool],
    dtype: torch.dtype,
    tolerance: float,
    by_onednn: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "_onednn_is_faster", lambda: by_onednn)
    monkeypatch.setattr(products, "_LEAST", 1)
    layout, generator = MLPLayout(2, (5, 8, 8, 3)), torch.Generator().manual_seed(1)
    tensors = [torch.randn(shape, generator=generator, dtype=dtype) for shape in ((layout.num_params,), (num_rows, 5))]
    weights = torch.randn(2, num_rows, 3, generator=generator, dtype=dtype)
    results = []
    for outputs in (layout.outputs, lambda flat, rows: forward(layout.layers(flat), rows)):
        flat, rows = (tensor.clone().requires_grad_(need) for tensor, need in zip(tensors, needs, strict=True))
        values = outputs(flat, rows)
        (values * weights).sum().backward()
        results.append([values.detach(), *(each.grad for each in (flat, rows) if each.requires_grad)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


SPLITS = {1: [(0, 4)], 2: [(0, 2), (2, 4)], 3: [(0, 1), (1, 1), (1, 4)], 4: [(0, 1), (1, 2), (2, 3), (3, 4)]}


def parameters(learner: SACLearner) -> list[Tensor]:
    nets = learner._nets
    return [nets.critic.param, nets.target, nets.actor.param]


def train_on_ranks(split: list[tuple[int, int]], action_space: Any, kind: Any = ThreadRanks, **settings: Any) -> Any:
    batches = [make_batch(action_space, seed, invalid=True) for seed in range(4)]

    def work(ranks: ThreadRanks) -> tuple[SACLearner, list[dict[str, float]]]:
        learner = make_learner(action_space, **settings)
        if ranks.size > 1:
            learner.ranks = ranks
        return learner, [learner.update(shard(batch, split[ranks.rank])) for batch in batches]

    return on_ranks(len(split), work, kind)


@SPACES
@INTERVALS
@pytest.mark.parametrize("num_ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
@pytest.mark.parametrize("batch_size", [12, 7], ids=["divisible", "cut"])
def test_several_ranks_do_what_one_does(
    action_space: spaces.Space[Any], num_ranks: int, batch_size: int, policy_interval: int
) -> None:
    settings = {"batch_size": batch_size, "policy_interval": policy_interval}
    [(one, expected)] = train_on_ranks(SPLITS[1], action_space, **settings)
    assert one._num_updates >= 20
    several = train_on_ranks(SPLITS[num_ranks], action_space, **settings)
    for learner, metrics in several:
        for ours, theirs in zip(parameters(learner), parameters(one), strict=True):
            assert ((ours - theirs).norm() / theirs.norm()).item() < 1e-12
        for ours, theirs in zip(parameters(learner), parameters(several[0][0]), strict=True):
            assert torch.equal(ours, theirs)
        for got, want in zip(metrics, expected, strict=True):
            assert got == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("by_onednn", [False, True], ids=["MKL", "one rank by oneDNN"])
def test_several_ranks_do_what_one_does_in_float32(by_onednn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1e-6 by the norm of the weights, which is what is promised; also if only whole minibatches are large."""
    monkeypatch.setattr(products, "_onednn_is_faster", lambda: by_onednn)
    monkeypatch.setattr(products, "_LEAST", 401)
    [(one, _)] = train_on_ranks(SPLITS[1], BOX, dtype=torch.float32)
    for learner, _ in train_on_ranks(SPLITS[2], BOX, dtype=torch.float32):
        for ours, theirs in zip(parameters(learner), parameters(one), strict=True):
            assert (ours - theirs).norm() < 1e-6 * theirs.norm()


def test_ranks_that_do_not_sum_part_ways() -> None:
    [(one, _)] = train_on_ranks(SPLITS[1], BOX)
    (apart, _), _ = train_on_ranks(SPLITS[2], BOX, Apart)
    assert (apart._nets.critic.param - one._nets.critic.param).norm() > 1e-3


@pytest.mark.parametrize(
    ("action_space", "policy_interval"),
    [(DISCRETE, 1), (BOX, 2)],
    ids=["discrete", "box"],
)
@pytest.mark.slow
def test_compiled_equals_eager(action_space: spaces.Space[Any], policy_interval: int) -> None:
    eager = make_learner(action_space, policy_interval=policy_interval)
    compiled = make_learner(action_space, policy_interval=policy_interval, compile=True)
    for seed in range(3):
        expected = eager.update(make_batch(action_space, seed))
        assert compiled.update(make_batch(action_space, seed)) == pytest.approx(expected, rel=1e-9)
    assert eager._num_updates == 32
    for ours, theirs in zip(compiled._nets.actor, eager._nets.actor, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=0)
    torch.testing.assert_close(compiled._nets.target, eager._nets.target, atol=1e-11, rtol=0)


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")  # once in a process
def test_without_a_compiler_it_runs_eagerly_and_says_so_once() -> None:
    from torch._inductor import config as inductor

    def add(into: Tensor, what: Tensor) -> Tensor:
        into.add_(what)
        return 2 * into

    function = Compiled(add)
    total = torch.zeros(7)
    with (
        torch.compiler.config.patch(force_disable_caches=True),  # monkeypatch could undo neither of the two
        inductor.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.warns(RuntimeWarning, match=r"uncompiled.*Install a C\+\+ compiler") as warned,
    ):
        assert function(total, torch.ones(7)).tolist() == [2.0] * 7
        assert function(total, torch.ones(7)).tolist() == [4.0] * 7
    assert [each.category for each in warned].count(RuntimeWarning) == 1


def test_a_torch_that_lacks_an_option_runs_uncompiled() -> None:
    function = Compiled(lambda tensor: -tensor, no_such_option=True)
    with pytest.warns(RuntimeWarning, match="uncompiled.*no_such_option"):
        assert function(torch.ones(2)).tolist() == [-1.0, -1.0]


@SPACES
def test_going_on_from_a_state_is_exact(action_space: spaces.Space[Any]) -> None:
    learner = make_learner(action_space, policy_interval=2, dtype=torch.float32)
    for seed in range(2):
        learner.update(make_batch(action_space, seed))
    file = io.BytesIO()
    torch.save(learner.state_dict(), file)
    file.seek(0)
    other = make_learner(action_space, policy_interval=2, seed=3, dtype=torch.float32)
    other.load_state_dict(torch.load(file, weights_only=True))
    for seed in range(2, 5):
        assert learner.update(make_batch(action_space, seed)) == other.update(make_batch(action_space, seed))
    np.testing.assert_array_equal(learner.weights(), other.weights())
    assert learner._num_updates == 64


def test_without_a_replay_in_the_checkpoint_it_refills_first(caplog: pytest.LogCaptureFixture) -> None:
    learner = make_learner(checkpoint_replay=False)
    for seed in range(2):
        learner.update(make_batch(seed=seed))
    assert learner._num_updates == 16
    other = make_learner(checkpoint_replay=False)
    with caplog.at_level(logging.WARNING):
        other.load_state_dict(learner.state_dict())
    assert "the replay refills" in caplog.text and "16 steps" in caplog.text
    assert other.update(make_batch(seed=2)) == {}  # 16 steps that refill
    assert other.update(make_batch(seed=3))["num_updates"] == 32


def test_a_replay_of_other_environments_is_not_mixed_with_ours(caplog: pytest.LogCaptureFixture) -> None:
    learner = make_learner()
    for seed in range(2):
        learner.update(make_batch(seed=seed))
    strangers = tuple(replace(chunk, env_ids=chunk.env_ids + 1) for chunk in make_batch(seed=2).chunks)
    with caplog.at_level(logging.WARNING):
        assert learner.update(Batch(strangers, STATS)) == {}
    assert "other environments" in caplog.text and len(learner._replay) == 16


@pytest.mark.parametrize("call", ["update", "load_state_dict"])
def test_a_replay_that_an_error_left_incomplete_refills(
    call: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out half way: between the observations and the rewards of the same steps."""
    learner = make_learner()
    for seed in range(2):
        learner.update(make_batch(seed=seed))
    argument = {"update": make_batch(seed=2), "load_state_dict": learner.state_dict()}[call]
    name = {"update": "upload", "load_state_dict": "_zeros"}[call]
    used, count = getattr(replay, name), itertools.count(1)

    def runs_out(*args: Any) -> Any:
        if next(count) == 4:
            raise torch.OutOfMemoryError("no memory")
        return used(*args)

    monkeypatch.setattr(replay, name, runs_out)
    with caplog.at_level(logging.WARNING), pytest.raises(LearnerError, match=r"Got: no memory.*replay_on_device=False"):
        getattr(learner, call)(argument)
    monkeypatch.undo()
    assert "the replay refills" in caplog.text and len(learner._replay) == 0
    assert learner.update(make_batch(seed=2)) == {}  # 16 steps that refill
    assert learner.update(make_batch(seed=3))["num_updates"] == 32


def test_the_state_of_another_net_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"shapes.*Remedy"):
        make_learner(hidden_sizes=(4,)).load_state_dict(make_learner().state_dict())
    with pytest.raises(CheckpointError, match="Remedy"):
        make_learner().load_state_dict({})


@SPACES
def test_a_reward_that_is_nan_stops_before_it_reaches_the_weights(action_space: spaces.Space[Any]) -> None:
    learner = make_learner(action_space)
    for seed in range(2):
        learner.update(make_batch(action_space, seed))
    before = [part.clone() for part in (*learner._nets.critic, *learner._nets.actor, learner._nets.target)]
    chunk = make_chunk(action_space, 2)
    learner._replay.rew[:] = np.nan  # whichever row is drawn
    with pytest.raises(LearnerError, match=r"finite.*critic_grad_norm': nan.*Remedy"):
        learner.update(Batch((chunk,), STATS))
    for ours, theirs in zip((*learner._nets.critic, *learner._nets.actor, learner._nets.target), before, strict=True):
        assert torch.equal(ours, theirs)


@SPACES
@pytest.mark.parametrize("reward", [np.nan, -np.inf, 1e39], ids=["nan", "infinite", "infinite in float32"])
def test_a_reward_that_is_not_finite_is_refused_before_it_is_stored(
    action_space: spaces.Space[Any], reward: float
) -> None:
    """Or it would lie in every checkpoint until an update draws it, which may be never."""
    learner = make_learner(action_space)
    learner.update(make_batch(action_space, 0))
    before = learner.weights()
    chunks = [make_chunk(action_space, seed) for seed in (1, 2)]
    chunks[1].rew[3, 2] = reward
    with pytest.raises(
        LearnerError, match=rf"Got: {re.escape(str(reward))} from environment 2 at step 7 of the batch.*Remedy"
    ):
        learner.update(Batch(tuple(chunks), STATS))
    np.testing.assert_array_equal(learner.weights(), before)
    assert len(learner._replay) == 16
    chunks[1].valid[3, 2] = False
    assert learner.update(Batch(tuple(chunks), STATS))["replay_steps"] == 16 + 31


def test_a_reward_that_is_not_finite_is_refused_on_all_ranks() -> None:
    chunk = make_chunk(BOX, 0)
    chunk.rew[1, 3] = np.inf

    def work(ranks: ThreadRanks) -> tuple[str, int]:
        learner = make_learner()
        learner.ranks = ranks
        with pytest.raises(LearnerError) as caught:
            learner.update(Batch((chunk.columns(2 * ranks.rank, 2 * ranks.rank + 2),), STATS))
        return str(caught.value), len(learner._replay)

    (first, *others) = on_ranks(2, work)
    assert "Got: inf from environment 3 at step 1" in first[0] and first[1] == 0
    assert others == [first]


@pytest.mark.parametrize(
    ("space", "remedy"),
    [
        (spaces.Box(-np.inf, np.inf, (2,), np.float32), "Bound the actions"),
        (spaces.Box(0, 5, (2,), np.int64), "floating-point dtype"),
        (spaces.Box(0, 5, (0,), np.float32), "at least one number"),
        (spaces.MultiDiscrete([2, 2]), r"gymnasium\.wrappers\.TransformAction"),
        (spaces.MultiBinary(2), r"gymnasium\.wrappers\.TransformAction"),
    ],
    ids=["unbounded", "integers", "empty", "multi-discrete", "multi-binary"],
)
def test_other_action_spaces_are_refused(space: spaces.Space[Any], remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"Remedy: .*{remedy}"):
        make_learner(space)


def test_a_gpu_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match=r"learner_device.*Got: none.*Remedy"):
        make_learner(learner_device="cuda")


def test_settings_that_can_not_work_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch_size at most replay_size = 100.*Got: 101"):
        make_config(replay_size=100, batch_size=101)
    with pytest.raises(ConfigError, match=r"learning_starts below total_steps = 16"):
        make_config(total_steps=16)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "captured"])
@SPACES
def test_cuda_equals_cpu(action_space: spaces.Space[Any], compiled: bool) -> None:
    cpu = make_learner(action_space, dtype=torch.float32)
    gpu = make_learner(action_space, dtype=torch.float32, learner_device="cuda", compile=compiled)
    for seed in range(4):
        expected = cpu.update(make_batch(action_space, seed))
        assert gpu.update(make_batch(action_space, seed)) == pytest.approx(expected, rel=1e-3)
    np.testing.assert_allclose(gpu.weights(), cpu.weights(), atol=1e-3)


def test_a_state_of_an_earlier_version_is_loaded() -> None:
    """It counted steps once more."""
    learner = make_learner(DISCRETE)
    learner.load_state_dict({**learner.state_dict(), "num_steps": 64})
    assert "num_steps" not in learner.state_dict()
