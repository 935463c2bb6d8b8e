"""Solve CartPole-v1 with IMPALA as an algorithm of Tianshou, in Tianshou's own trainer.

The environments step in worker processes while the algorithm updates, with the policy of one update ago.

python examples/tianshou_impala.py [STEPS [SEED [EPISODES [LEARNERS]]]]
"""

from functools import partial

import gymnasium
import numpy as np
import torch
import tyro
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory, LRSchedulerFactoryLinear
from tianshou.data import VectorReplayBuffer
from tianshou.trainer import OnPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic

from rayvec.tianshou import IMPALA, Collector, RayVectorEnv, data_parallel

NUM_ENVS = 16
COLLECT_STEPS = 32 * NUM_ENVS


def make_algorithm(env: gymnasium.Env, num_epochs: int, epoch_steps: int) -> IMPALA:
    """Returns an actor-critic with two nets of 64x64 units, whose learning rate falls to 0."""
    nets = [Net(state_shape=env.observation_space.shape, hidden_sizes=[64, 64], activation=torch.nn.Tanh) for _ in "ac"]
    actor = DiscreteActor(preprocess_net=nets[0], action_shape=env.action_space.n, softmax_output=False)
    policy = DiscreteActorPolicy(actor=actor, action_space=env.action_space, deterministic_eval=True)
    schedule = LRSchedulerFactoryLinear(num_epochs, epoch_steps, COLLECT_STEPS)
    return IMPALA(
        policy=policy,
        critic=DiscreteCritic(preprocess_net=nets[1]),
        optim=AdamOptimizerFactory(lr=1e-3, eps=1e-5).with_lr_scheduler_factory(schedule),
        vf_coef=0.25,
        max_grad_norm=0.5,
        return_scaling=True,
    )


def main(total_steps: int = 300_000, seed: int = 1, num_episodes: int = 100, num_learners: int = 0) -> float:
    """Trains; returns the mean return of that many greedy episodes at the end. Without learners it updates here."""
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    make_env = partial(gymnasium.make, "CartPole-v1")
    num_epochs = 10
    epoch_steps = total_steps // num_epochs
    algorithm = make_algorithm(make_env(), num_epochs, epoch_steps)
    if num_learners:
        algorithm = data_parallel(algorithm, num_learners)
    train_envs, test_envs = RayVectorEnv([make_env] * NUM_ENVS), RayVectorEnv([make_env] * NUM_ENVS)
    train_envs.seed(seed)
    test_envs.seed(2**30 + seed)
    training = Collector(algorithm, train_envs, VectorReplayBuffer(COLLECT_STEPS, NUM_ENVS), prefetch=True)
    testing = Collector(algorithm, test_envs, unbiased=True)
    algorithm.run_training(
        OnPolicyTrainerParams(
            training_collector=training,
            test_collector=testing,
            max_epochs=num_epochs,
            epoch_num_steps=epoch_steps,
            collection_step_num_env_steps=COLLECT_STEPS,
            test_step_num_episodes=NUM_ENVS,
            batch_size=128,
            update_step_num_repetitions=1,
            verbose=False,
        )
    )
    stats = training.collect(n_step=COLLECT_STEPS)
    print(f"the policy that acted was {stats.staleness} update behind")
    testing.reset()
    greedy = testing.collect(n_episode=num_episodes)
    print(f"mean return of {greedy.n_collected_episodes} greedy episodes: {greedy.returns.mean():.1f}")
    train_envs.close()
    test_envs.close()
    return float(greedy.returns.mean())


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.Positional,))
