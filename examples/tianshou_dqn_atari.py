"""Tianshou's DQN on Atari Pong, with environments, collecting and updates on a Ray cluster.

pip install ale-py
python examples/tianshou_dqn_atari.py

docs/tianshou.md shows the five lines that differ from a script for Tianshou alone, with PPO.
Frames are grey and halved by leaving out every second line and column, which needs no OpenCV.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation, TransformObservation, TransformReward
from tianshou.algorithm import DQN
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import VectorReplayBuffer
from tianshou.env.atari.atari_network import DQNet, ScaledObsInputActionReprNet
from tianshou.trainer import OffPolicyTrainerParams

from rayvec.tianshou import Collector, RayVectorEnv, data_parallel


def make_env(clip: bool = True) -> gymnasium.Env[Any, Any]:
    """Returns Pong with observations ``uint8 [4, 105, 80]``, the last four frames."""
    env = gymnasium.make("ale_py:ALE/Pong-v5", obs_type="grayscale", frameskip=4)
    half = spaces.Box(0, 255, (105, 80), np.uint8)
    env = FrameStackObservation(TransformObservation(env, lambda frame: frame[::2, ::2], half), 4)
    return TransformReward(env, np.sign) if clip else env


def main(epoch_num_steps: int = 100_000, num_epochs: int = 100, num_tests: int = 10, num_learners: int = 2) -> float:
    """Trains; returns the best mean return of test episodes."""
    envs = RayVectorEnv([make_env] * 10)
    test_envs = RayVectorEnv([lambda: make_env(clip=False)] * num_tests)
    space = envs.action_space[0]

    net = ScaledObsInputActionReprNet(DQNet(c=4, h=105, w=80, action_shape=int(space.n)))
    policy = DiscreteQLearningPolicy(model=net, action_space=space, eps_training=1.0, eps_inference=0.005)
    algorithm: DQN[Any] = DQN(
        policy=policy,
        optim=AdamOptimizerFactory(lr=1e-4),
        gamma=0.99,
        n_step_return_horizon=3,
        target_update_freq=500,
    )
    algorithm = data_parallel(algorithm, num_learners)
    buffer = VectorReplayBuffer(100_000, 10, ignore_obs_next=True, save_only_last_obs=True, stack_num=4)
    collector = Collector(algorithm, envs, buffer, exploration_noise=True)
    collector.reset()
    collector.collect(n_step=min(1280, 10 * epoch_num_steps))

    def explore_less(epoch: int, env_step: int) -> None:
        policy.set_eps_training(max(0.05, 1.0 - env_step / 1e6 * 0.95))

    result = algorithm.run_training(
        OffPolicyTrainerParams(
            training_collector=collector,
            test_collector=Collector(algorithm, test_envs, exploration_noise=True),
            max_epochs=num_epochs,
            epoch_num_steps=epoch_num_steps,
            collection_step_num_env_steps=min(10, epoch_num_steps),
            test_step_num_episodes=num_tests,
            update_step_num_gradient_steps_per_sample=0.1,
            batch_size=32,
            training_fn=explore_less,
            stop_fn=lambda mean_return: mean_return >= 20.0,
            show_progress=False,
        )
    )
    print(f"best mean return {result.best_reward:.1f} of {num_tests} episodes, after {result.timing.total_time:.0f} s")
    for each in (envs, test_envs):
        each.close()
    return float(result.best_reward)


if __name__ == "__main__":
    main()
