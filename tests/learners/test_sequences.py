"""Recurrent PPO and IMPALA against a network that is unrolled one step at a time, with torch's own cells."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.actor_critic_kit import (
    BOX,
    DISCRETE,
    MASKED,
    MIXED,
    OBS,
    STATS,
    N,
    T,
    flat_gradient,
    impala_config,
    make_batch,
    perturb,
    ppo_config,
)
from helpers.recurrent_kit import StepByStep, act_randomly
from helpers.vtrace import vtrace_by_definition
from torch import Tensor

from rayvec.config import IMPALAConfig, PPOConfig
from rayvec.data import Batch, Chunk, tree_map
from rayvec.data.join_chunks import join_chunks, pad_chunk
from rayvec.errors import ConfigError, LearnerError
from rayvec.learners.impala import IMPALALearner, Minibatch, _fields
from rayvec.learners.minibatches import stratified_shuffle
from rayvec.learners.ppo import PPOLearner
from rayvec.learners.returns import gae
from rayvec.learners.sequences import happened_by_sequence
from rayvec.policies.policy import Policy
from rayvec.policies.recurrent import RecurrentActorCritic

CELLS = pytest.mark.parametrize("kind", ["gru", "lstm"])
SPACES = pytest.mark.parametrize(
    ("space", "action_space"),
    [(OBS, DISCRETE), (MASKED, DISCRETE), pytest.param(OBS, BOX, marks=pytest.mark.slow)],
    ids=["discrete", "masked", "box"],
)
SHAPES = pytest.mark.parametrize(
    ("length", "burn_in"),
    [(5, 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((5, 0), (16, 0), (1, 0)))],
    ids=str,
)
FAULTS = pytest.mark.parametrize("faults", [pytest.param(False, marks=pytest.mark.slow), True], ids=["none", "faults"])


def make_ppo(action_space: spaces.Space[Any] = DISCRETE, obs: spaces.Space[Any] = OBS, **settings: Any) -> PPOLearner:
    usual = {"recurrent": "gru", "recurrent_size": 6, "sequence_length": 5, "minibatch_size": 20}
    return PPOLearner(obs, action_space, ppo_config(**{**usual, **settings}))


def make_impala(
    action_space: spaces.Space[Any] = DISCRETE, obs: spaces.Space[Any] = OBS, **settings: Any
) -> IMPALALearner:
    usual = {"recurrent": "gru", "recurrent_size": 6, "sequence_length": 5}
    return IMPALALearner(obs, action_space, impala_config(**{**usual, **settings}))


def recorded(learner: PPOLearner | IMPALALearner, count: int = 1, **kwargs: Any) -> list[Chunk]:
    """Chunks that follow each other: the first one begins all episodes, and the others don't."""
    policy = Policy(learner.module)
    return [act_randomly(policy, seed, **kwargs) for seed in range(count)]


def reference_of(learner: PPOLearner | IMPALALearner) -> StepByStep:
    assert isinstance(learner.module, RecurrentActorCritic)
    return StepByStep(learner.module)


def numbers_of(chunk: Chunk) -> Any:
    """Returns the part of the observations that is no mask."""
    return chunk.obs["touch"] if isinstance(chunk.obs, dict) else chunk.obs


def samples_of(learner: PPOLearner | IMPALALearner, chunk: Chunk) -> Any:
    return torch.from_numpy(learner.module.distribution.recorded(chunk.act, chunk.extras))


@CELLS
@SPACES
def test_the_policy_records_what_the_network_computes(
    kind: str, space: spaces.Space[Any], action_space: spaces.Space[Any]
) -> None:
    """In NumPy as in torch: log-probabilities, and states before each sequence, through episodes and chunks."""
    learner = make_ppo(action_space, space, recurrent=kind, burn_in=2)
    perturb(learner.module, 0.3)
    reference, state = reference_of(learner), torch.zeros(N, learner.module.cell.state_size)  # type: ignore[union-attr]
    for chunk in recorded(learner, 2, faults=True, space=space):
        starts = [0, 3, 8, 13]
        for t in range(T):
            if t in starts:
                torch.testing.assert_close(torch.from_numpy(chunk.states[starts.index(t)]), state, atol=1e-6, rtol=1e-5)
            for n in range(N):
                params, _, following = reference.step(tree_map(lambda leaf: leaf[t, n], chunk.obs), state[n])  # noqa: B023
                sample = samples_of(learner, chunk)[t, n]
                logp, _ = learner.module.distribution.logp_entropy(params[None], sample[None])
                assert float(chunk.extras["logp"][t, n]) == pytest.approx(logp.item(), abs=2e-6)
                begins = chunk.done[t, n] or not chunk.valid[t, n]
                state[n] = torch.zeros_like(following) if begins else following.detach()
        assert len(chunk.states) == len(starts)


@CELLS
@SPACES
@SHAPES
@FAULTS
def test_ppo_equals_the_reference(
    kind: str, space: spaces.Space[Any], action_space: spaces.Space[Any], length: int, burn_in: int, faults: bool
) -> None:
    """Values, advantages and the gradient of a whole batch of two chunks, with weights other than those that acted."""
    settings = {"entropy_coef": 0.1, "clip_coef": 0.1, "clip_value_loss": False, "normalize_advantage": True}
    learner = make_ppo(
        action_space,
        space,
        recurrent=kind,
        sequence_length=length,
        burn_in=burn_in,
        num_steps=2 * T,
        minibatch_size=2 * T * N,
        **settings,
    )
    config, distribution = learner.config, learner.module.distribution
    chunks = recorded(learner, 2, faults=faults, space=space)
    for chunk in chunks:
        for column in (chunk.rew, numbers_of(chunk), chunk.extras["logp"]):
            column[~chunk.valid] = np.nan
    perturb(learner.module, 0.2)
    samples = learner._samples(Batch(tuple(chunks), STATS))
    total = len(samples.logp)
    [[minibatch], *_], _ = learner._draw(
        samples, [chunk.valid for chunk in chunks], range(total), total, np.random.default_rng(0)
    )
    learner._gradients(tuple(samples), *minibatch.rows)
    got = flat_gradient(learner.module)

    unrolled = [reference_of(learner).unroll(chunk) for chunk in chunks]
    valid = np.concatenate([chunk.valid for chunk in chunks])
    happened = [(t, n) for n in range(N) for t in range(2 * T) if valid[t, n]]
    all_params, all_values = ([row for each in unrolled for row in each[part]] for part in range(2))
    value = np.array([[each.item() for each in row] for row in all_values], np.float32)
    next_value = np.concatenate([following for _, _, following in unrolled])
    ends = (np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in ("terminated", "truncated"))
    rew = np.concatenate([chunk.rew for chunk in chunks])
    advantage, target = gae(rew, value, next_value, *ends, gamma=config.gamma, lam=config.gae_lambda, valid=valid)

    def rows(array: Any) -> Tensor:
        return torch.stack([torch.as_tensor(array[t][n]) for t, n in happened])

    torch.testing.assert_close(samples.value, rows(value), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(samples.target, rows(target), atol=1e-5, rtol=1e-5)
    drawn = np.concatenate([samples_of(learner, chunk) for chunk in chunks])
    logp, entropy = distribution.logp_entropy(rows(all_params), rows(drawn))
    ratio = (logp - rows(np.concatenate([chunk.extras["logp"] for chunk in chunks]))).exp()
    scaled = (rows(advantage) - rows(advantage).mean()) / (rows(advantage).std(correction=0) + 1e-8)
    surrogate = torch.min(ratio * scaled, ratio.clip(0.9, 1.1) * scaled)
    error = (rows(all_values) - rows(target)) ** 2
    learner._flat.zero_grad()
    torch.autograd.backward(-surrogate.mean() + config.value_coef * 0.5 * error.mean() - 0.1 * entropy.mean())
    torch.testing.assert_close(got, flat_gradient(learner.module), atol=5e-6, rtol=5e-5)
    assert got.abs().max() > 0.01


@CELLS
@SPACES
@SHAPES
@FAULTS
def test_impala_equals_the_reference(
    kind: str, space: spaces.Space[Any], action_space: spaces.Space[Any], length: int, burn_in: int, faults: bool
) -> None:
    settings = {"sequence_length": length, "burn_in": burn_in, "num_minibatches": 1}
    learner = make_impala(action_space, space, recurrent=kind, **settings)
    config, distribution = learner.config, learner.module.distribution
    chunk = recorded(learner, 2, faults=faults, space=space)[1]
    numbers_of(chunk)[~chunk.valid] = np.nan
    perturb(learner.module, 0.2)
    [minibatch] = learner._minibatches(chunk.valid, np.random.default_rng(0))
    trajectories = learner._trajectories(chunk)
    learner._gradients(_fields(trajectories), *learner._rows(trajectories, minibatch))
    got = flat_gradient(learner.module)

    params, values, next_value = reference_of(learner).unroll(chunk)
    flat = torch.stack([each for row in params for each in row])
    logp, entropy = distribution.logp_entropy(flat, samples_of(learner, chunk).flatten(0, 1))
    logp, entropy = logp.view(T, N), entropy.view(T, N)
    value = torch.stack([torch.stack(row) for row in values])
    log_ratio = (logp.detach() - torch.from_numpy(chunk.extras["logp"])).numpy()
    log_ratio[~chunk.valid] = 0
    target, advantage = vtrace_by_definition(
        chunk.rew, value.detach().numpy(), next_value, log_ratio, chunk.terminated, chunk.truncated, chunk.valid,
        config.gamma, config.vtrace_lambda, config.rho_bar, config.c_bar,
    )  # fmt: skip
    loss = -torch.tensor(advantage) * logp + 0.5 * config.value_coef * (value - torch.tensor(target)) ** 2
    learner._flat.zero_grad()
    torch.autograd.backward((loss - config.entropy_coef * entropy)[torch.from_numpy(chunk.valid)].mean())
    torch.testing.assert_close(got, flat_gradient(learner.module), atol=5e-6, rtol=5e-5)
    assert got.abs().max() > 0.01


def test_a_minibatch_has_whole_sequences_and_an_epoch_has_each_once() -> None:
    learner = make_ppo(minibatch_size=12)
    chunks = recorded(learner, 2, faults=True)
    samples = learner._samples(Batch(tuple(chunks), STATS))
    total, valid = len(samples.logp), [chunk.valid for chunk in chunks]
    happened = happened_by_sequence(valid, 5)
    lengths = happened.sum(1).tolist()
    starts = np.cumsum([0, *lengths])
    whole = {tuple(samples.logp[a:b].tolist()): number for number, (a, b) in enumerate(pairwise(starts))}
    seen: list[int] = []
    generator = np.random.default_rng(3)
    [minibatches, *_], _ = learner._draw(samples, valid, range(total), total, generator)
    assert len(minibatches) == round(total / 12)
    for minibatch in minibatches:
        numbers, slots = (each.numpy() for each in minibatch.sequences)
        assert minibatch.size == len(minibatch.at) == int(happened[numbers].sum())
        np.testing.assert_array_equal(slots, np.flatnonzero(happened[numbers]))
        parts = np.split(samples.logp[minibatch.at].numpy(), happened[numbers].sum(1).cumsum()[:-1])
        own = [whole[tuple(each.tolist())] for each in parts if len(each)]
        assert own == [number for number in numbers if lengths[number]]
        seen += own
    assert sorted(seen) == [number for number, length in enumerate(lengths) if length]
    expected = stratified_shuffle(len(lengths), len(minibatches), np.random.default_rng(3))
    assert [len(numbers) for numbers in expected] == [len(each.sequences[0]) for each in minibatches]


@pytest.mark.parametrize("make", [make_ppo, make_impala], ids=["ppo", "impala"])
@pytest.mark.parametrize(("length", "burn_in", "taken"), [(5, 0, 10), (5, 3, 10), (5, 3, 7), (8, 0, 8), (8, 2, 3)])
def test_environments_that_took_fewer_steps_learn_as_if_alone(make: Any, length: int, burn_in: int, taken: int) -> None:
    """What is padded changes no number: the state is that after the last step that was taken."""
    learner = make(sequence_length=length, burn_in=burn_in, num_minibatches=1) if make is make_impala else make(
        sequence_length=length, burn_in=burn_in
    )  # fmt: skip
    long, short = (act_randomly(Policy(learner.module), seed, num_steps=steps) for seed, steps in ((0, T), (1, taken)))

    def learned(chunk: Chunk) -> Any:
        if make is make_ppo:
            samples = learner._samples(Batch((chunk,), STATS))
            return samples.value, samples.advantage
        everyone = Minibatch(np.arange(chunk.num_envs), int(chunk.valid.sum()))
        trajectories = learner._trajectories(chunk)
        rows = learner._rows(trajectories, everyone)
        with patch.object(learner, "_loss", lambda outputs, next_value, *_: (*outputs, next_value)):
            params, value, next_value = learner._loss_of_rows(learner._network, _fields(trajectories), *rows)
        return params.detach(), value.detach(), next_value

    joined, alone = learned(join_chunks([long, short])), [learned(chunk) for chunk in (long, short)]
    for got, *expected in zip(joined, *alone, strict=True):
        torch.testing.assert_close(got, torch.cat(expected), atol=1e-6, rtol=1e-5)
    assert pad_chunk(short, T).states.shape == short.states.shape


@pytest.mark.parametrize(
    ("make", "kind", "space"),
    [
        (make_ppo, "gru", MASKED),
        pytest.param(make_impala, "lstm", OBS, marks=pytest.mark.slow),
        pytest.param(make_ppo, "lstm", MIXED, marks=pytest.mark.slow),
        pytest.param(make_impala, "gru", MASKED, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("backend", ["traced", pytest.param("compiled", marks=pytest.mark.slow)])
def test_compiled_updates_equal_eager_ones(
    make: Any, kind: str, space: spaces.Space[Any], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph serves minibatches of all sizes and chunks of all lengths."""
    compile_, graphs = torch.compile, []

    def count(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    if backend == "traced":
        monkeypatch.setattr(torch, "compile", lambda function, *, options, **rest: compile_(function, backend=count))
    settings: dict[str, Any] = {"recurrent": kind, "burn_in": 2, "num_steps": 2 * T}
    if make is make_impala:
        settings["rho_bar"] = 1.1  # whether weights of 1 are above 1 is a matter of rounding
    learners = [make(DISCRETE, space, compile=compiled, **settings) for compiled in (False, True)]
    for seed in range(3):
        chunk = act_randomly(Policy(learners[0].module), seed, faults=seed > 0, space=space, num_steps=T + seed)
        expected, got = (learner.update(Batch((chunk,), STATS)) for learner in learners)
        assert got == pytest.approx(expected, rel=1e-3, abs=1e-4)
    np.testing.assert_allclose(*(learner.weights() for learner in learners), atol=5e-5)
    assert len(graphs) == (backend == "traced")


@pytest.mark.parametrize("make", [make_ppo, make_impala], ids=["ppo", "impala"])
def test_another_start_of_a_sequence_is_another_gradient(make: Any) -> None:
    """The recorded state matters; the gradient does not flow through it into other sequences."""
    learner = make()
    chunk = recorded(learner, 2)[1]
    before = learner.state_dict()
    weights = []
    for states in (chunk.states, np.zeros_like(chunk.states)):
        learner.load_state_dict(before)
        learner.update(Batch((replace(chunk, states=states),), STATS))
        weights.append(learner.weights())
    assert np.abs(weights[0] - weights[1]).max() > 1e-6


def test_images_and_numbers_are_remembered() -> None:
    learner = make_ppo(obs=MIXED, recurrent="lstm", num_epochs=1, normalize_obs=True)
    chunks = recorded(learner, 2, space=MIXED, faults=True, num_steps=6)
    reference = reference_of(learner)
    params, values, _ = reference.unroll(chunks[1])
    samples = learner._samples(Batch((chunks[1],), STATS))
    valid = chunks[1].valid
    value = torch.stack([values[t][n] for n in range(N) for t in range(6) if valid[t, n]]).detach()
    torch.testing.assert_close(samples.value, value, atol=1e-5, rtol=1e-5)
    t, n = np.argwhere(valid)[-1]
    logp, _ = learner.module.distribution.logp_entropy(params[t][n][None], samples_of(learner, chunks[1])[t, n][None])
    assert float(chunks[1].extras["logp"][t, n]) == pytest.approx(logp.item(), abs=1e-5)
    before = [parameter.detach().clone() for parameter in learner.module.parameters()]
    learner.update(Batch(tuple(chunks), STATS))
    assert all((old != new).any() for old, new in zip(before, learner.module.parameters(), strict=True))


def test_chunks_without_states_are_refused() -> None:
    learner = make_ppo()
    chunk = recorded(learner)[0]
    for states in (chunk.states[:1], chunk.states[..., :3], np.zeros((0, 0, 0), np.float32)):
        with pytest.raises(LearnerError, match=r"states \[4, 4, 6\].*Remedy: Collect with rayvec.Policy"):
            learner.update(Batch((replace(chunk, states=states),), STATS))


def test_a_network_that_the_settings_do_not_name_is_refused() -> None:
    module = make_ppo().module
    with pytest.raises(ConfigError, match=r"fits recurrent=None. Got: RecurrentActorCritic"):
        PPOLearner(OBS, DISCRETE, ppo_config(), module=module)
    with pytest.raises(ConfigError, match=r"fits recurrent='gru'. Got: ActorCritic"):
        PPOLearner(OBS, DISCRETE, ppo_config(recurrent="gru"), module=PPOLearner(OBS, DISCRETE, ppo_config()).module)
    with pytest.raises(LearnerError, match="hidden states"):
        make_impala().update(make_batch(Policy(PPOLearner(OBS, DISCRETE, ppo_config()).module)))


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        (PPOConfig, {"num_steps": 64, "sequence_length": 65}, "sequence_length at most num_steps = 64"),
        (IMPALAConfig, {"num_steps": 32, "sequence_length": 33}, "sequence_length at most num_steps = 32"),
        (IMPALAConfig, {"burn_in": 16}, "burn_in below sequence_length = 16"),
        (PPOConfig, {"minibatch_size": 15}, "minibatch_size at least .* = 16"),
        (PPOConfig, {"minibatch_size": 31, "num_learners": 2}, "minibatch_size at least .* = 32"),
        (PPOConfig, {"recurrent": "rnn"}, "'gru' | 'lstm' | None"),
        (PPOConfig, {"recurrent_size": 0}, "at least 1"),
        (IMPALAConfig, {"burn_in": -1}, "at least 0"),
    ],
    ids=str,
)
def test_settings_that_can_not_work(kind: Any, settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        kind(**{"recurrent": "gru", **settings})


def test_the_settings_are_unused_without_memory() -> None:
    assert PPOConfig(sequence_length=999, burn_in=999, compile=True).recurrent is None
