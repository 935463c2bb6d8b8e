"""One small algorithm of each kind that can be data-parallel, and data to update it with."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tianshou.algorithm import A2C, C51, DDPG, DQN, FQF, IQN, PPO, QRDQN, REDQ, SAC, TD3, DiscreteSAC, RainbowDQN
from tianshou.algorithm.modelfree.c51 import C51Policy
from tianshou.algorithm.modelfree.ddpg import ContinuousDeterministicPolicy
from tianshou.algorithm.modelfree.discrete_sac import DiscreteSACPolicy
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.modelfree.fqf import FQFPolicy
from tianshou.algorithm.modelfree.iqn import IQNPolicy
from tianshou.algorithm.modelfree.qrdqn import QRDQNPolicy
from tianshou.algorithm.modelfree.redq import REDQPolicy
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy, ProbabilisticActorPolicy
from tianshou.algorithm.modelfree.sac import AutoAlpha, SACPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory, LRSchedulerFactoryLinear, RMSpropOptimizerFactory
from tianshou.data import Batch, PrioritizedVectorReplayBuffer, ReplayBuffer, VectorReplayBuffer
from tianshou.utils.net.common import MLP, EnsembleLinear, Net
from tianshou.utils.net.continuous import (
    ContinuousActorDeterministic,
    ContinuousActorProbabilistic,
    ContinuousCritic,
)
from tianshou.utils.net.discrete import (
    DiscreteActor,
    DiscreteCritic,
    FractionProposalNetwork,
    FullQuantileFunction,
    ImplicitQuantileNetwork,
    NoisyLinear,
)
from torch.distributions import Independent, Normal

from rayvec.tianshou import IMPALA

OBS, ACTIONS = 5, 3
ROWS_OF_FIRST = 11
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


def ppo_variant() -> PPO:
    return ppo(recompute_advantage=True, dual_clip=3.0, value_clip=True, return_scaling=True)


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


def dqn_huber() -> DQN:
    return dqn(huber_loss_delta=1.0, is_double=False)


def atoms(**kwargs: Any) -> C51Policy:
    net = q_net(num_atoms=11, softmax=True, **kwargs)
    return C51Policy(model=net, action_space=DISCRETE, num_atoms=11, v_min=-5.0, v_max=5.0)


def c51() -> C51:
    return C51(policy=atoms(), optim=optim(), target_update_freq=4)


def rainbow() -> RainbowDQN:
    noisy = {"linear_layer": NoisyLinear}
    policy = atoms(dueling_param=({"linear_layer": NoisyLinear, "hidden_sizes": [8]}, noisy))
    return RainbowDQN(policy=policy, optim=optim(), n_step_return_horizon=3, target_update_freq=4)


def qrdqn() -> QRDQN:
    policy = QRDQNPolicy(model=q_net(num_atoms=8), action_space=DISCRETE)
    return QRDQN(policy=policy, optim=optim(), num_quantiles=8, target_update_freq=4)


def iqn() -> IQN:
    net = ImplicitQuantileNetwork(preprocess_net=body(), action_shape=DISCRETE.n, num_cosines=4)
    policy = IQNPolicy(model=net, action_space=DISCRETE, sample_size=6, online_sample_size=4, target_sample_size=4)
    return IQN(policy=policy, optim=optim(), target_update_freq=4)


def fqf() -> FQF:
    net = FullQuantileFunction(preprocess_net=body(), action_shape=DISCRETE.n, num_cosines=4)
    fractions = FractionProposalNetwork(4, net.input_dim)
    policy = FQFPolicy(model=net, fraction_model=fractions, action_space=DISCRETE)
    factory = RMSpropOptimizerFactory(lr=1e-4)
    return FQF(
        policy=policy, optim=optim(), fraction_optim=factory, num_fractions=4, ent_coef=0.1, target_update_freq=4
    )


def q_function() -> ContinuousCritic:
    return ContinuousCritic(preprocess_net=body(action_shape=BOX.shape, concat=True))


def deterministic() -> ContinuousDeterministicPolicy:
    actor = ContinuousActorDeterministic(preprocess_net=body(), action_shape=BOX.shape, max_action=1.0)
    return ContinuousDeterministicPolicy(actor=actor, action_space=BOX)


def ddpg() -> DDPG:
    return DDPG(
        policy=deterministic(),
        policy_optim=optim(),
        critic=q_function(),
        critic_optim=optim(),
        n_step_return_horizon=2,
    )


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


def discrete_sac() -> DiscreteSAC:
    actor = DiscreteActor(preprocess_net=body(), action_shape=DISCRETE.n, softmax_output=False)
    return DiscreteSAC(
        policy=DiscreteSACPolicy(actor=actor, action_space=DISCRETE),
        policy_optim=optim(),
        critic=DiscreteCritic(preprocess_net=body(), last_size=ACTIONS),
        critic_optim=optim(),
        alpha=AutoAlpha(0.5, 0.1, optim()),
    )


def redq() -> REDQ:
    def linear(inputs: int, outputs: int) -> EnsembleLinear:
        return EnsembleLinear(4, inputs, outputs)

    critic = ContinuousCritic(
        preprocess_net=body(action_shape=BOX.shape, concat=True, linear_layer=linear),
        linear_layer=linear,
        flatten_input=False,
    )
    return REDQ(
        policy=REDQPolicy(actor=gaussian(), action_space=BOX),
        policy_optim=optim(),
        critic=critic,
        critic_optim=optim(),
        ensemble_size=4,
        subset_size=2,
        actor_delay=3,
        alpha=auto_alpha(),
    )


MAKERS: dict[str, Callable[[], Any]] = {
    maker.__name__: maker
    for maker in (
        ppo,
        ppo_variant,
        a2c,
        impala,
        impala_variant,
        dqn,
        dqn_huber,
        c51,
        rainbow,
        qrdqn,
        iqn,
        fqf,
        ddpg,
        td3,
        sac,
        discrete_sac,
        redq,
    )
}
"""Algorithms by name, at least one of each class that can be data-parallel."""

ON_POLICY = (PPO, A2C, IMPALA)


class Changed(PPO):
    """Computes something else."""

    def _update_with_batch(self, batch: Any, batch_size: Any, repeat: Any) -> Any:
        return super()._update_with_batch(batch, batch_size, 2 * repeat)


class Named(PPO):
    """Computes the same, and has a name."""

    label = "mine"

    def describe(self) -> str:
        return self.label


class Layers(torch.nn.Sequential):
    """A net as Tianshou calls it."""

    def forward(self, obs: Any, state: Any = None, info: Any = None) -> Any:
        return super().forward(torch.as_tensor(obs, dtype=torch.float32)), state


class Body(torch.nn.Module):
    """A body of an actor, as Tianshou calls it, that begins with a layer."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(layer, torch.nn.Linear(OBS, 16))

    def get_output_dim(self) -> int:
        return 16

    def forward(self, obs: Any, state: Any = None, info: Any = None) -> Any:
        return self.layers(torch.as_tensor(obs, dtype=torch.float32)), state


class Jitter(torch.nn.Module):
    """Draws for every row, in a way that can't be cut."""

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return obs + torch.randn_like(obs)


class Flicker(torch.nn.Module):
    """Draws one number for every row, which looks like a layer's own noise."""

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return obs * (1 + torch.randn(len(obs))[:, None])


class Dust(torch.nn.Module):
    """Draws for every row from a distribution that is not cut."""

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return obs + torch.empty(obs.shape).cauchy_()


class Running(torch.nn.Module):
    """Keeps the mean of the observations that it saw last, as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        self.mean = obs.mean()
        return obs


class Functional(torch.nn.Module):
    """Drops out by a function, which no look at the modules finds."""

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(obs, 0.5, self.training)


class Scatter(torch.nn.Module):
    """Adds noise that could be cut into rows."""

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return obs + torch.randn(obs.shape)


class OwnDraws(Normal):
    """A distribution with a way of its own to draw."""

    def sample(self, sample_shape: Any = ()) -> torch.Tensor:
        return self.loc + self.scale * torch.randn(self._extended_shape(sample_shape))


class Falls(torch.nn.Module):
    """Ends or stops the process, when it is one's turn, unless the file `mark` says that it was done before."""

    def __init__(self, mark: str, after: int, how: signal.Signals) -> None:
        super().__init__()
        self._mark, self._left, self._how = mark, [after], how

    def count(self) -> None:
        self._left[0] -= 1
        if self._left[0] <= 0:
            with contextlib.suppress(FileExistsError), open(self._mark, "x") as file:
                file.write(str(os.getpid()))
                file.flush()
                os.kill(os.getpid(), self._how)


def fall(module: Any, args: Any, output: torch.Tensor) -> None:
    """A hook that counts the passes through a net on the way to a loss."""
    if torch.is_grad_enabled():
        module.falls.count()


def make_cartpole() -> Any:
    return gymnasium.make("CartPole-v1")


def make_pendulum() -> Any:
    return gymnasium.make("Pendulum-v1")


def cartpole_ppo() -> PPO:
    torch.manual_seed(0)
    space = gymnasium.make("CartPole-v1").action_space
    net = Net(state_shape=(4,), hidden_sizes=[16])
    actor = DiscreteActor(preprocess_net=net, action_shape=2, softmax_output=False)
    critic = DiscreteCritic(preprocess_net=Net(state_shape=(4,), hidden_sizes=[16]))
    return PPO(policy=DiscreteActorPolicy(actor=actor, action_space=space), critic=critic, optim=optim())


def pendulum_sac() -> SAC[Any]:
    torch.manual_seed(0)
    space = gymnasium.make("Pendulum-v1").action_space
    net = Net(state_shape=(3,), hidden_sizes=[16])
    actor = ContinuousActorProbabilistic(preprocess_net=net, action_shape=(1,), unbounded=True, conditioned_sigma=True)
    critic = ContinuousCritic(preprocess_net=Net(state_shape=(3,), action_shape=(1,), hidden_sizes=[16], concat=True))
    return SAC(
        policy=SACPolicy(actor=actor, action_space=space),
        policy_optim=optim(),
        critic=critic,
        critic_optim=optim(),
        alpha=AutoAlpha(-1.0, 0.0, optim()),
    )


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


def updates(algorithm: Any, buffer: ReplayBuffer, count: int = 20, rows: int = 31, seed: int = 2) -> list[Any]:
    """Updates `count` times, from generators seeded with `seed`; returns the statistics."""
    np.random.seed(seed)
    torch.manual_seed(seed)
    algorithm.policy.is_within_training_step = True
    if isinstance(algorithm, ON_POLICY):
        return [algorithm.update(buffer=buffer, batch_size=rows, repeat=2) for _ in range(count)]
    return [algorithm.update(buffer=buffer, sample_size=rows) for _ in range(count)]
