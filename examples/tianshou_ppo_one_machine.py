"""Tianshou's PPO on CartPole-v1 on one machine, without Ray: environments and policy in one process per core.

python examples/tianshou_ppo_one_machine.py

docs/tianshou.md shows the four lines that differ from the same script for Tianshou alone.
"""

import gymnasium
from tianshou.algorithm import PPO
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import VectorReplayBuffer
from tianshou.trainer import OnPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic

from rayvec.tianshou import Collector, RayVectorEnv


def main(epoch_num_steps: int = 50_000, threshold: float = 195.0) -> float:
    """Trains until the mean return of test episodes reaches a threshold; returns the best."""
    make_env = [lambda: gymnasium.make("CartPole-v1")]
    envs = RayVectorEnv(make_env * 16, num_nodes=0)
    test_envs = RayVectorEnv(make_env * 10, num_nodes=0, workers_per_node=0)
    net = Net(state_shape=(4,), hidden_sizes=[64, 64])
    policy = DiscreteActorPolicy(
        actor=DiscreteActor(preprocess_net=net, action_shape=2, softmax_output=False),
        action_space=envs.action_space[0],
        deterministic_eval=True,
    )
    algorithm = PPO(
        policy=policy,
        critic=DiscreteCritic(preprocess_net=net),
        optim=AdamOptimizerFactory(lr=1e-3),
        gae_lambda=0.95,
        max_grad_norm=0.5,
        ent_coef=0.0,
    )
    result = algorithm.run_training(
        OnPolicyTrainerParams(
            training_collector=Collector(algorithm, envs, VectorReplayBuffer(20_000, 16)),
            test_collector=Collector(algorithm, test_envs),
            max_epochs=10,
            epoch_num_steps=epoch_num_steps,
            collection_step_num_env_steps=min(2048, epoch_num_steps),
            test_step_num_episodes=10,
            update_step_num_repetitions=10,
            batch_size=256,
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
