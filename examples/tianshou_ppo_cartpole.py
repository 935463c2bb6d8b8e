"""Tianshou's PPO on CartPole-v1, with environments, collecting and updates on a Ray cluster.

python examples/tianshou_ppo_cartpole.py

docs/tianshou.md shows the five lines that differ from the same script for Tianshou alone.
"""

import gymnasium
from tianshou.algorithm import PPO
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import VectorReplayBuffer
from tianshou.trainer import OnPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic

from rayvec.tianshou import Collector, RayVectorEnv, data_parallel


def main(epoch_num_steps: int = 50_000, threshold: float = 195.0, num_learners: int = 2) -> float:
    """Trains until the mean return of test episodes reaches a threshold; returns the best."""
    envs = RayVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 20)
    test_envs = RayVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 10)
    space = envs.action_space[0]

    net = Net(state_shape=(4,), hidden_sizes=[64, 64])
    policy = DiscreteActorPolicy(
        actor=DiscreteActor(preprocess_net=net, action_shape=2, softmax_output=False),
        action_space=space,
        deterministic_eval=True,
    )
    algorithm = PPO(
        policy=policy,
        critic=DiscreteCritic(preprocess_net=net),
        optim=AdamOptimizerFactory(lr=3e-4),
        gamma=0.99,
        gae_lambda=0.95,
        eps_clip=0.2,
        vf_coef=0.5,
        ent_coef=0.0,
        max_grad_norm=0.5,
    )
    algorithm = data_parallel(algorithm, num_learners)
    result = algorithm.run_training(
        OnPolicyTrainerParams(
            training_collector=Collector(algorithm, envs, VectorReplayBuffer(20_000, 20)),
            test_collector=Collector(algorithm, test_envs),
            max_epochs=10,
            epoch_num_steps=epoch_num_steps,
            collection_step_num_env_steps=min(2000, epoch_num_steps),
            test_step_num_episodes=10,
            update_step_num_repetitions=10,
            batch_size=64,
            stop_fn=lambda mean_return: mean_return >= threshold,
            test_in_training=True,
            show_progress=False,
        )
    )
    print(f"best mean return {result.best_reward:.1f} of 10 episodes, after {result.timing.total_time:.0f} s")
    for each in (envs, test_envs):
        each.close()
    return float(result.best_reward)


if __name__ == "__main__":
    main()
