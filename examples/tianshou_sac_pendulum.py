"""Tianshou's SAC on Pendulum-v1, with environments, collecting and updates on a Ray cluster.

python examples/tianshou_sac_pendulum.py

docs/tianshou.md shows the five lines that differ from a script for Tianshou alone, with PPO.
"""

from typing import Any

import gymnasium
from tianshou.algorithm import SAC
from tianshou.algorithm.modelfree.sac import AutoAlpha, SACPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import VectorReplayBuffer
from tianshou.trainer import OffPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic

from rayvec.tianshou import Collector, RayVectorEnv, data_parallel


def main(epoch_num_steps: int = 24_000, threshold: float = -250.0, num_learners: int = 2) -> float:
    """Trains until the mean return of test episodes reaches a threshold; returns the best."""
    envs = RayVectorEnv([lambda: gymnasium.make("Pendulum-v1")] * 10)
    test_envs = RayVectorEnv([lambda: gymnasium.make("Pendulum-v1")] * 10)
    space = envs.action_space[0]

    def make_net(**kwargs: Any) -> Net:
        return Net(state_shape=(3,), hidden_sizes=[128, 128], **kwargs)

    def make_critic() -> ContinuousCritic:
        return ContinuousCritic(preprocess_net=make_net(action_shape=space.shape, concat=True))

    actor = ContinuousActorProbabilistic(
        preprocess_net=make_net(), action_shape=space.shape, unbounded=True, conditioned_sigma=True
    )
    algorithm: SAC[Any] = SAC(
        policy=SACPolicy(actor=actor, action_space=space),
        policy_optim=AdamOptimizerFactory(lr=1e-3),
        critic=make_critic(),
        critic_optim=AdamOptimizerFactory(lr=1e-3),
        critic2=make_critic(),
        critic2_optim=AdamOptimizerFactory(lr=1e-3),
        tau=0.005,
        gamma=0.99,
        alpha=AutoAlpha(-1.0, 0.0, AdamOptimizerFactory(lr=3e-4)),
    )
    algorithm = data_parallel(algorithm, num_learners)
    collector = Collector(algorithm, envs, VectorReplayBuffer(20_000, 10), exploration_noise=True)
    collector.reset()
    collector.collect(n_step=min(5000, epoch_num_steps), random=True)
    result = algorithm.run_training(
        OffPolicyTrainerParams(
            training_collector=collector,
            test_collector=Collector(algorithm, test_envs),
            max_epochs=5,
            epoch_num_steps=epoch_num_steps,
            collection_step_num_env_steps=10,
            test_step_num_episodes=10,
            update_step_num_gradient_steps_per_sample=0.1,
            batch_size=128,
            stop_fn=lambda mean_return: mean_return >= threshold,
            show_progress=False,
        )
    )
    print(f"best mean return {result.best_reward:.1f} of 10 episodes, after {result.timing.total_time:.0f} s")
    for each in (envs, test_envs):
        each.close()
    return float(result.best_reward)


if __name__ == "__main__":
    main()
