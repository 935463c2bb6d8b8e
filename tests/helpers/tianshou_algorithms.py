"""Small algorithms of Tianshou, data to update them with, and Tianshou's trainer in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tianshou.algorithm import A2C, DQN, NPG, PPO, SAC, TD3
from tianshou.algorithm.modelfree.ddpg import ContinuousDeterministicPolicy
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy, ProbabilisticActorPolicy
from tianshou.algorithm.modelfree.sac import AutoAlpha, SACPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory, LRSchedulerFactoryLinear, RMSpropOptimizerFactory
from tianshou.data import Batch, PrioritizedVectorReplayBuffer, ReplayBuffer, VectorReplayBuffer
from tianshou.trainer import OnPolicyTrainerParams
from tianshou.utils.net.common import MLP, Net
from tianshou.utils.net.continuous import ContinuousActorDeterministic, ContinuousActorProbabilistic, ContinuousCritic
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic
from torch.distributions import Independent, Normal

from rayvec.tianshou import IMPALA

OBS, ACTIONS = 5, 3
BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)
RMSPROP = RMSpropOptimizerFactory(lr=7e-4)


def adam(lr: float = 1e-3) -> AdamOptimizerFactory:
    return AdamOptimizerFactory(lr=lr)


def body(num_obs: int = OBS, **kwargs: Any) -> Net:
    return Net(state_shape=(num_obs,), hidden_sizes=[16, 16], activation=torch.nn.Tanh, **kwargs)


def actor_critic(num_obs: int = OBS, num_actions: int = ACTIONS) -> dict[str, Any]:
    """Returns a policy and a critic for discrete actions."""
    actor = DiscreteActor(preprocess_net=body(num_obs), action_shape=num_actions, softmax_output=False)
    policy = DiscreteActorPolicy(actor=actor, action_space=spaces.Discrete(num_actions))
    return {"policy": policy, "critic": DiscreteCritic(preprocess_net=body(num_obs))}


def gaussian(dist_fn: Any = None, num_obs: int = OBS, **kwargs: Any) -> dict[str, Any]:
    """Returns a policy and a critic for continuous actions."""
    actor = ContinuousActorProbabilistic(preprocess_net=body(num_obs), action_shape=BOX.shape, unbounded=True)
    policy = ProbabilisticActorPolicy(actor=actor, dist_fn=dist_fn or joint, action_space=BOX, **kwargs)
    return {"policy": policy, "critic": ContinuousCritic(preprocess_net=body(num_obs))}


def joint(loc_scale: Any) -> Independent:
    return Independent(Normal(*loc_scale), 1)


def q_function() -> ContinuousCritic:
    return ContinuousCritic(preprocess_net=body(action_shape=BOX.shape, concat=True))


def ppo(**kwargs: Any) -> PPO:
    factory = adam().with_lr_scheduler_factory(LRSchedulerFactoryLinear(10, 100, 10))
    settings = {"max_grad_norm": 0.5, "vf_coef": 0.5, "ent_coef": 0.01, "max_batchsize": 32, **kwargs}
    return PPO(**gaussian(action_scaling=True), optim=factory, **settings)


def dqn(num_obs: int = OBS, num_actions: int = ACTIONS) -> DQN:
    model = body(num_obs, action_shape=num_actions)
    policy = DiscreteQLearningPolicy(model=model, action_space=spaces.Discrete(num_actions))
    return DQN(policy=policy, optim=adam(), n_step_return_horizon=3, target_update_freq=4)


def td3() -> TD3:
    actor = ContinuousActorDeterministic(preprocess_net=body(), action_shape=BOX.shape, max_action=1.0)
    policy = ContinuousDeterministicPolicy(actor=actor, action_space=BOX)
    return TD3(policy=policy, policy_optim=adam(), critic=q_function(), critic_optim=adam())


def sac() -> SAC[Any]:
    actor = ContinuousActorProbabilistic(
        preprocess_net=body(), action_shape=BOX.shape, unbounded=True, conditioned_sigma=True
    )
    parts = {"policy": SACPolicy(actor=actor, action_space=BOX), "critic": q_function()}
    alpha = AutoAlpha(-2.0, 0.1, adam())
    return SAC(**parts, policy_optim=adam(), critic_optim=adam(), alpha=alpha, n_step_return_horizon=2)


MAKERS: dict[str, Callable[[], Any]] = {
    "ppo": ppo,
    "ppo_clipped": lambda: ppo(dual_clip=3.0, value_clip=True),
    "ppo_recomputing": lambda: ppo(recompute_advantage=True),
    "npg": lambda: NPG(**actor_critic(), optim=adam()),
    "a2c": lambda: A2C(**actor_critic(), optim=RMSPROP, max_grad_norm=0.5, max_batchsize=32),
    "impala": lambda: IMPALA(
        **actor_critic(), optim=adam(), rho_bar=1.1, c_bar=0.9, vtrace_lambda=0.9, max_batchsize=32
    ),
    "impala_scaled": lambda: IMPALA(
        **actor_critic(), optim=RMSPROP, max_grad_norm=0.5, return_scaling=True, ent_coef=0.0
    ),
    "dqn": dqn,
    "td3": td3,
    "sac": sac,
}
"""Algorithms by name."""


class AnyMLP(MLP):
    """Computes in the data type of its parameters, where Tianshou's always takes float32."""

    def forward(self, obs: Any) -> torch.Tensor:
        obs = torch.as_tensor(obs, dtype=next(self.parameters()).dtype)
        return self.model(obs.flatten(1) if self.flatten_input else obs)


def make(name: str, seed: int = 0) -> Any:
    """Returns an algorithm in float64 with weights that depend on `seed` alone."""
    torch.manual_seed(seed)
    algorithm = MAKERS[name]().to(torch.float64)
    for module in algorithm.modules():
        if type(module) is MLP:
            module.__class__ = AnyMLP
    return algorithm


def fill(algorithm: Any, steps: int = 40, envs: int = 3) -> ReplayBuffer:
    """Returns a buffer of random steps of several environments, the last episodes unfinished."""
    rng = np.random.default_rng(1)
    size = (steps + 10) * envs
    prioritized = isinstance(algorithm, DQN)
    buffer: Any = (
        PrioritizedVectorReplayBuffer(size, envs, alpha=0.6, beta=0.4)
        if prioritized
        else VectorReplayBuffer(size, envs)
    )
    obs = rng.normal(size=(envs, OBS))
    discrete = algorithm.policy.action_type == "discrete"
    for _ in range(steps):
        recorded = {"policy": Batch(logp=-rng.exponential(1.1, envs))} if isinstance(algorithm, IMPALA) else {}
        following = rng.normal(size=(envs, OBS))
        ended = rng.random(envs) < 0.1
        terminated = ended & (rng.random(envs) < 0.5)
        buffer.add(
            Batch(
                obs=obs,
                act=rng.integers(0, ACTIONS, envs) if discrete else rng.uniform(-1, 1, (envs, 2)),
                rew=rng.normal(size=envs),
                terminated=terminated,
                truncated=ended & ~terminated,
                done=ended,
                obs_next=following,
                info=Batch(env_id=np.arange(envs)),
                **recorded,
            ),
            buffer_ids=np.arange(envs),
        )
        obs = following
    return buffer


def updates(algorithm: Any, buffer: ReplayBuffer, count: int, rows: int | None = None) -> list[Any]:
    """Updates `count` times, each with generators seeded anew; returns the statistics.

    On-policy `rows` are those of a minibatch, by default all; off-policy those that are sampled, by default 31.
    """
    algorithm.policy.is_within_training_step, stats = True, []
    for number in range(count):
        np.random.seed(2 + number)
        torch.manual_seed(2 + number)
        if isinstance(algorithm, PPO | A2C | NPG | IMPALA):
            stats.append(algorithm.update(buffer=buffer, batch_size=rows, repeat=2))
        else:
            stats.append(algorithm.update(buffer=buffer, sample_size=rows or 31))
    return stats


def train(algorithm: Any, collector: Any, test_collector: Any = None, **changes: Any) -> Any:
    """Runs Tianshou's trainer for 200 steps, 100 for each update."""
    settings: dict[str, Any] = {
        **{"training_collector": collector, "test_collector": test_collector, "test_step_num_episodes": 5},
        **{"max_epochs": 1, "epoch_num_steps": 200, "collection_step_num_env_steps": 100},
        **{"batch_size": 32, "update_step_num_repetitions": 1, "verbose": False, "show_progress": False},
    }
    return algorithm.run_training(OnPolicyTrainerParams(**{**settings, **changes}))
