"""Tianshou's SAC on HalfCheetah-v5, with environments, collecting and updates on a Ray cluster.

pip install 'gymnasium[mujoco]'
python examples/tianshou_sac_halfcheetah.py

docs/tianshou-scaling.md shows the five lines that differ from the same script for Tianshou alone. The settings are
those of Tianshou's script for MuJoCo: two hidden layers of 256 units, a batch of 256 and one update for each step.
"""

from typing import Any

import gymnasium
from tianshou.algorithm import SAC
from tianshou.algorithm.modelfree.sac import SACPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import VectorReplayBuffer
from tianshou.trainer import OffPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic

from rayvec.tianshou import Collector, RayVectorEnv, data_parallel


def make_env() -> gymnasium.Env[Any, Any]:
    """Returns one environment."""
    return gymnasium.make("HalfCheetah-v5")


def main(
    epoch_num_steps: int = 5000,
    num_epochs: int = 200,
    start_num_steps: int = 10_000,
    num_tests: int = 10,
    num_learners: int = 2,
) -> float:
    """Trains; returns the best mean return of test episodes."""
    envs = RayVectorEnv([make_env] * 8, preload=("torch", "tianshou"))
    test_envs = RayVectorEnv([make_env] * num_tests, preload=("torch", "tianshou"))
    obs_space, space = envs.observation_space[0], envs.action_space[0]

    def make_net(**kwargs: Any) -> Net:
        return Net(state_shape=obs_space.shape, hidden_sizes=[256, 256], **kwargs)

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
        alpha=0.2,
    )
    algorithm = data_parallel(algorithm, num_learners)
    collector = Collector(algorithm, envs, VectorReplayBuffer(1_000_000, 8), exploration_noise=True)
    collector.reset()
    collector.collect(n_step=start_num_steps, random=True)
    result = algorithm.run_training(
        OffPolicyTrainerParams(
            training_collector=collector,
            test_collector=Collector(algorithm, test_envs),
            max_epochs=num_epochs,
            epoch_num_steps=epoch_num_steps,
            collection_step_num_env_steps=8,
            test_step_num_episodes=num_tests,
            update_step_num_gradient_steps_per_sample=1.0,
            batch_size=256,
            test_in_training=False,
            show_progress=False,
        )
    )
    print(f"best mean return {result.best_reward:.1f} of {num_tests} episodes, after {result.timing.total_time:.0f} s")
    for each in (envs, test_envs):
        each.close()
    return float(result.best_reward)


if __name__ == "__main__":
    main()
