"""Recurrent PPO and IMPALA against a network that is unrolled one step at a time, with torch's own cells."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.actor_critic_kit import DISCRETE, OBS, STATS, N, T, impala_config, make_batch, make_chunk, ppo_config

from rayvec.data import Batch, Chunk
from rayvec.data.chunk import join_chunks
from rayvec.errors import ConfigError, LearnerError
from rayvec.learners.impala import IMPALALearner
from rayvec.learners.ppo import PPOLearner
from rayvec.policies.policy import Policy


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
    return [make_chunk(policy, seed, **kwargs) for seed in range(count)]


@pytest.mark.parametrize(("length", "taken"), [(5, 10), (5, 7), (8, 8), (8, 3)])
@pytest.mark.parametrize("make", [make_ppo, make_impala], ids=["ppo", "impala"])
def test_environments_that_took_fewer_steps_learn_as_if_alone(make: Any, length: int, taken: int) -> None:
    """What is padded changes no number: the state is that after the last step that was taken."""
    usual = {"num_steps": 2 * T, "minibatch_size": 2 * T * N, "num_epochs": 1, "normalize_advantage": False}
    settings = usual if make is make_ppo else {"num_minibatches": 1}
    settings |= {"sequence_length": length, "max_grad_norm": 1e9}
    policy = Policy(make(**settings).module)
    long, short = (make_chunk(policy, seed, num_steps=steps) for seed, steps in ((0, T), (1, taken)))
    short = replace(short, env_ids=short.env_ids + N)

    def gradient(chunk: Chunk) -> Any:  # Adam's first moment after one step, of a sum over steps
        learner = make(**settings)
        learner.update(Batch((chunk,), STATS))
        return learner.state_dict()["optimizer"]["exp_avg"] * int(chunk.valid.sum())

    joined, alone = gradient(join_chunks([long, short])), gradient(long) + gradient(short)
    torch.testing.assert_close(joined, alone, atol=1e-5 * float(alone.abs().max()), rtol=1e-4)


def test_chunks_without_states_are_refused() -> None:
    learner = make_ppo()
    chunk = recorded(learner)[0]
    for states in (chunk.states[:1], chunk.states[..., :3], np.zeros((0, 0, 0), np.float32)):
        with pytest.raises(LearnerError, match=r"states \[4, 4, 6\].* collect with rayvec.Policy"):
            learner.update(Batch((replace(chunk, states=states),), STATS))


def test_a_network_that_the_settings_do_not_name_is_refused() -> None:
    module = make_ppo().module
    with pytest.raises(ConfigError, match="RecurrentActorCritic, which does not fit recurrent=None"):
        PPOLearner(OBS, DISCRETE, ppo_config(), module=module)
    with pytest.raises(ConfigError, match="ActorCritic, which does not fit recurrent='gru'"):
        PPOLearner(OBS, DISCRETE, ppo_config(recurrent="gru"), module=PPOLearner(OBS, DISCRETE, ppo_config()).module)
    with pytest.raises(LearnerError, match="hidden states"):
        make_impala().update(make_batch(Policy(PPOLearner(OBS, DISCRETE, ppo_config()).module)))
