"""Tianshou's policies as policies of a rollout: same actions, state bit for bit, memory of one episode."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from contextlib import closing
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import pytest
import tianshou.data
import torch
from gymnasium import spaces
from helpers import tianshou_algorithms as kit
from helpers.exact import DriftEnv
from helpers.tianshou_kit import Exact
from tianshou.algorithm.algorithm_base import Policy
from tianshou.algorithm.modelfree.ddpg import ContinuousDeterministicPolicy
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.data import Batch, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.exploration import GaussianNoise
from tianshou.utils.net.common import Recurrent
from tianshou.utils.net.continuous import ContinuousActorDeterministic

import rayvec.tianshou
from rayvec.tianshou import RayVectorEnv
from rayvec.tianshou.policies import TianshouPolicy, policy_entry

BOX, DISCRETE = spaces.Box(-2.0, 3.0, (3,), np.float32), spaces.Discrete(2)
NO_NOISE = np.full((4, 1), 0.5)


def make_policy(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "dqn":
        return DiscreteQLearningPolicy(model=kit.body(2, action_shape=2), action_space=DISCRETE, eps_inference=0.0)
    if kind == "recurrent":
        model = Recurrent(layer_num=1, state_shape=(2,), action_shape=2, hidden_layer_size=8)
        return DiscreteQLearningPolicy(model=model, action_space=DISCRETE)
    if kind == "actor":
        return kit.actor_critic(2, 2)["policy"]
    if kind == "gauss":
        return kit.gaussian(num_obs=2, deterministic_eval=True)["policy"]
    actor = ContinuousActorDeterministic(preprocess_net=kit.body(2), action_shape=3)
    return ContinuousDeterministicPolicy(
        actor=actor, action_space=BOX, exploration_noise=GaussianNoise(sigma=0.1), action_scaling=True
    )


@pytest.mark.parametrize("kind", ["dqn", "recurrent", "gauss", "ddpg"])
def test_actions_and_what_is_stored_are_those_of_tianshous_collector(kind: str) -> None:
    policy = make_policy(kind)
    env = DummyVectorEnv([lambda: DriftEnv()] * 4)
    tianshous = tianshou.data.Collector(policy, env, VectorReplayBuffer(400, 4))
    acting = pickle.loads(pickle.dumps(TianshouPolicy(policy)))
    rng, hidden = np.random.default_rng(0), None
    for t in range(4):
        obs = rng.normal(size=(4, 2)).astype(np.float32)
        expected = tianshous._compute_action_policy_hidden(False, np.arange(4), obs, np.array([{}] * 4, object), hidden)
        hidden = expected.hidden_state
        actions, extras = acting.act(obs, NO_NOISE)
        np.testing.assert_array_equal(actions, expected.act_normalized)
        np.testing.assert_array_equal(extras.get("act", actions), expected.act)
        entry = policy_entry({name: value[None] for name, value in extras.items()})
        assert set(entry.keys()) == set(expected.policy_entry.keys())
        if hidden is not None:
            assert torch.equal(entry.hidden_state.hidden[0], expected.policy_entry.hidden_state.hidden)
            if t == 1:
                acting.begin_episodes(np.array([2]))
                tianshous._reset_hidden_state_based_on_type(np.array([2]), hidden)


@pytest.mark.parametrize("kind", ["dqn", "ddpg", "exact"])
def test_weights_travel_bit_for_bit(kind: str) -> None:
    policy = Exact() if kind == "exact" else make_policy(kind)
    acting = TianshouPolicy(policy, exploration_noise=True)
    copy = pickle.loads(pickle.dumps(acting))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 1e-30)
    if kind == "dqn":
        next(policy.children()).bfloat16()  # a type that NumPy lacks
        copy.load_weights(acting.weights())  # the tensors are others now
        assert next(copy.policy.parameters()).dtype == torch.bfloat16
    vector = acting.weights()
    assert vector.dtype == np.float32 and vector.ndim == 1
    copy.load_weights(vector)
    for mine, theirs in zip(copy.policy.state_dict().values(), policy.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    assert not copy.policy.training and policy.training


def test_classes_of_a_module_that_is_registered_for_it_travel_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("only_here")
    module.Mine = type("Mine", (Exact,), {"__module__": "only_here"})
    monkeypatch.setitem(sys.modules, "only_here", module)
    cloudpickle.register_pickle_by_value(module)
    try:
        data = pickle.dumps(TianshouPolicy(module.Mine()))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    monkeypatch.delitem(sys.modules, "only_here")
    assert type(pickle.loads(data).policy).__name__ == "Mine"


@pytest.mark.parametrize("workers_per_node", [0, 2])
def test_a_table_that_has_changed_acts_in_the_workers(workers_per_node: int) -> None:
    class Tabular(Policy):
        def __init__(self) -> None:
            super().__init__(action_space=DriftEnv.action_space)
            self.table = np.zeros(4, int)

        def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
            return Batch(act=self.table[: len(batch.obs)].copy())

    settings: Any = {"workers_per_node": workers_per_node, "preload": ("helpers.tianshou_kit",)}
    with closing(RayVectorEnv([DriftEnv] * 4, num_nodes=0, **settings)) as env:
        policy = Tabular()
        collector = rayvec.tianshou.Collector(policy, env, VectorReplayBuffer(400, 4))
        collector.reset()
        for act in (0, 1, 0):
            policy.table[:] = act
            collector.collect(n_step=12)
            assert (collector.buffer.act[collector.buffer.sample_indices(0)][-3:] == act).all()


def test_draws_depend_on_the_seed_in_a_worker_and_on_global_generators_in_the_driver() -> None:
    def draws(sent: bytes, seed: float) -> Any:
        policy = pickle.loads(sent)
        return [policy.act(np.zeros((4, 2), np.float32), np.full((4, 1), seed))[0].tolist() for _ in range(3)]

    noisy = cloudpickle.dumps(TianshouPolicy(make_policy("ddpg"), exploration_noise=True))
    here = []
    for _ in range(2):
        np.random.seed(1)
        here.append(draws(noisy, 0.5))
    assert here[0] == here[1] and torch.initial_seed() == 0
    code = "import sys, cloudpickle; draws, calls = cloudpickle.load(sys.stdin.buffer); "
    code += "print([draws(*call) for call in calls])"
    given = cloudpickle.dumps((draws, [(noisy, seed) for seed in (0.3, 0.3, 0.7)]))
    done = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, check=True)
    one, same, other = ast.literal_eval(done.stdout.decode())
    assert one == same != other and one[0] != one[1]


def test_in_this_process_a_collector_draws_from_the_generators_that_tianshous_draws_from() -> None:
    policy = make_policy("dqn")
    policy.set_eps_inference(0.5)
    drawn = []
    for make_collector, env in (
        (rayvec.tianshou.Collector, RayVectorEnv([DriftEnv] * 3, num_nodes=0, workers_per_node=0)),
        (tianshou.data.Collector, DummyVectorEnv([DriftEnv] * 3)),
    ):
        with closing(env):
            collector: Any = make_collector(policy, env, VectorReplayBuffer(60, 3), exploration_noise=True)
            env.seed(1)
            collector.reset()
            np.random.seed(2)
            collector.collect(n_step=30)
            drawn.append((collector.buffer.act.tolist(), np.random.random()))
    assert drawn[0] == drawn[1]
