"""One small algorithm of each kind that can be data-parallel, and data to update it with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tianshou.algorithm import A2C, C51, DQN, NPG, PPO, SAC, TD3, RainbowDQN
from tianshou.algorithm.modelfree.c51 import C51Policy
from tianshou.algorithm.modelfree.ddpg import ContinuousDeterministicPolicy
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy, ProbabilisticActorPolicy
from tianshou.algorithm.modelfree.sac import AutoAlpha, SACPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory, LRSchedulerFactoryLinear, RMSpropOptimizerFactory
from tianshou.data import Batch, PrioritizedVectorReplayBuffer, ReplayBuffer, VectorReplayBuffer
from tianshou.utils.net.common import MLP, Net
from tianshou.utils.net.continuous import (
    ContinuousActorDeterministic,
    ContinuousActorProbabilistic,
    ContinuousCritic,
)
from tianshou.utils.net.discrete import (
    DiscreteActor,
    DiscreteCritic,
    NoisyLinear,
)
from torch.distributions import Independent, Normal

from rayvec.tianshou import IMPALA

OBS, ACTIONS = 5, 3
BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)
DISCRETE = spaces.Discrete(ACTIONS)


def optim(**kwargs: Any) -> Any:
    return AdamOptimizerFactory(lr=1e-3, **kwargs)


def body(**kwargs: Any) -> Net:
    return Net(state_shape=(OBS,), hidden_sizes=[16, 16], activation=torch.nn.Tanh, **kwargs)


def fixed_std(loc_scale: Any) -> Independent:
    return Independent(Normal(*loc_scale), 1)


def ppo(**kwargs: Any) -> PPO:
    actor = ContinuousActorProbabilistic(preprocess_net=body(), action_shape=BOX.shape, unbounded=True)
    policy = ProbabilisticActorPolicy(actor=actor, dist_fn=fixed_std, action_space=BOX, action_scaling=True)
    factory = optim().with_lr_scheduler_factory(LRSchedulerFactoryLinear(10, 100, 10))
    settings = {"max_grad_norm": 0.5, "vf_coef": 0.5, "ent_coef": 0.01, "max_batchsize": 32, **kwargs}
    return PPO(policy=policy, critic=ContinuousCritic(preprocess_net=body()), optim=factory, **settings)


def ppo_recomputing() -> PPO:
    return ppo(recompute_advantage=True, dual_clip=3.0, value_clip=True)


def npg() -> NPG:
    return NPG(**discrete_actor_critic(), optim=optim())


def a2c() -> A2C:
    return A2C(
        **discrete_actor_critic(),
        optim=RMSpropOptimizerFactory(lr=7e-4),
        max_grad_norm=0.5,
        max_batchsize=32,
    )


def discrete_actor_critic() -> dict[str, Any]:
    actor = DiscreteActor(preprocess_net=body(), action_shape=DISCRETE.n, softmax_output=False)
    policy = DiscreteActorPolicy(actor=actor, action_space=DISCRETE)
    return {"policy": policy, "critic": DiscreteCritic(preprocess_net=body())}


def impala() -> IMPALA:
    return IMPALA(**discrete_actor_critic(), optim=optim(), rho_bar=1.1, c_bar=0.9, vtrace_lambda=0.9, max_batchsize=32)


def impala_variant() -> IMPALA:
    settings = {"max_grad_norm": 0.5, "return_scaling": True, "ent_coef": 0.0}
    return IMPALA(**discrete_actor_critic(), optim=RMSpropOptimizerFactory(lr=7e-4), **settings)


def q_net(**kwargs: Any) -> Net:
    return body(action_shape=DISCRETE.n, **kwargs)


def dqn(**kwargs: Any) -> DQN:
    policy = DiscreteQLearningPolicy(model=q_net(), action_space=DISCRETE)
    return DQN(policy=policy, optim=optim(), n_step_return_horizon=3, target_update_freq=4, **kwargs)


def atoms(**kwargs: Any) -> C51Policy:
    net = q_net(num_atoms=11, softmax=True, **kwargs)
    return C51Policy(model=net, action_space=DISCRETE, num_atoms=11, v_min=-5.0, v_max=5.0)


def rainbow() -> RainbowDQN:
    noisy = {"linear_layer": NoisyLinear}
    policy = atoms(dueling_param=({"linear_layer": NoisyLinear, "hidden_sizes": [8]}, noisy))
    return RainbowDQN(policy=policy, optim=optim(), n_step_return_horizon=3, target_update_freq=4)


def q_function() -> ContinuousCritic:
    return ContinuousCritic(preprocess_net=body(action_shape=BOX.shape, concat=True))


def deterministic() -> ContinuousDeterministicPolicy:
    actor = ContinuousActorDeterministic(preprocess_net=body(), action_shape=BOX.shape, max_action=1.0)
    return ContinuousDeterministicPolicy(actor=actor, action_space=BOX)


def td3() -> TD3:
    return TD3(policy=deterministic(), policy_optim=optim(), critic=q_function(), critic_optim=optim())


def gaussian() -> ContinuousActorProbabilistic:
    return ContinuousActorProbabilistic(
        preprocess_net=body(), action_shape=BOX.shape, unbounded=True, conditioned_sigma=True
    )


def auto_alpha() -> AutoAlpha:
    return AutoAlpha(-2.0, 0.1, optim())


def sac() -> SAC[Any]:
    return SAC(
        policy=SACPolicy(actor=gaussian(), action_space=BOX),
        policy_optim=optim(),
        critic=q_function(),
        critic_optim=optim(),
        alpha=auto_alpha(),
        n_step_return_horizon=2,
    )


MAKERS: dict[str, Callable[[], Any]] = {
    maker.__name__: maker
    for maker in (
        ppo,
        ppo_recomputing,
        npg,
        a2c,
        impala,
        impala_variant,
        dqn,
        rainbow,
        td3,
        sac,
    )
}
"""Algorithms by name."""

ON_POLICY = (PPO, A2C, NPG, IMPALA)


def make_cartpole() -> Any:
    return gymnasium.make("CartPole-v1")


def cartpole_ppo() -> PPO:
    torch.manual_seed(0)
    space = gymnasium.make("CartPole-v1").action_space
    net = Net(state_shape=(4,), hidden_sizes=[16])
    actor = DiscreteActor(preprocess_net=net, action_shape=2, softmax_output=False)
    critic = DiscreteCritic(preprocess_net=Net(state_shape=(4,), hidden_sizes=[16]))
    return PPO(policy=DiscreteActorPolicy(actor=actor, action_space=space), critic=critic, optim=optim())


class AnyMLP(MLP):
    """Computes in the data type of its parameters, where Tianshou's always takes float32."""

    def forward(self, obs: Any) -> torch.Tensor:
        obs = torch.as_tensor(obs, dtype=next(self.parameters()).dtype)
        return self.model(obs.flatten(1) if self.flatten_input else obs)


def make(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """Returns an algorithm with weights that depend on `seed` alone."""
    torch.manual_seed(seed)
    algorithm = MAKERS[name]().to(dtype)
    for module in algorithm.modules():
        if type(module) is MLP:
            module.__class__ = AnyMLP
    return algorithm


def fill(
    algorithm: Any, dtype: torch.dtype = torch.float64, steps: int = 40, envs: int = 3, seed: int = 1
) -> ReplayBuffer:
    """Returns a buffer of random steps of several environments, the last episodes unfinished."""
    rng = np.random.default_rng(seed)
    kind = {torch.float64: np.float64, torch.float32: np.float32}[dtype]
    size = (steps + 10) * envs
    prioritized = isinstance(algorithm, DQN | C51)
    buffer: Any = (
        PrioritizedVectorReplayBuffer(size, envs, alpha=0.6, beta=0.4)
        if prioritized
        else VectorReplayBuffer(size, envs)
    )
    obs = rng.normal(size=(envs, OBS)).astype(kind)
    discrete = algorithm.policy.action_type == "discrete"
    for _ in range(steps):
        recorded = {"policy": Batch(logp=-rng.exponential(1.1, envs))} if isinstance(algorithm, IMPALA) else {}
        following = rng.normal(size=(envs, OBS)).astype(kind)
        ended = rng.random(envs) < 0.1
        terminated = ended & (rng.random(envs) < 0.5)
        buffer.add(
            Batch(
                obs=obs,
                act=rng.integers(0, ACTIONS, envs) if discrete else rng.uniform(-1, 1, (envs, 2)).astype(kind),
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


def updates(algorithm: Any, buffer: ReplayBuffer, count: int = 20, rows: int | None = None, seed: int = 2) -> list[Any]:
    """Updates `count` times, each with generators seeded anew; returns the statistics.

    On-policy `rows` are those of a minibatch, by default all; off-policy those that are sampled, by default 31.
    """
    algorithm.policy.is_within_training_step, stats = True, []
    for number in range(count):
        np.random.seed(seed + number)
        torch.manual_seed(seed + number)
        if isinstance(algorithm, ON_POLICY):
            stats.append(algorithm.update(buffer=buffer, batch_size=rows, repeat=2))
        else:
            stats.append(algorithm.update(buffer=buffer, sample_size=rows or 31))
    return stats
