"""The whole training loop of Tianshou's PPO on HalfCheetah-v5: Tianshou's parts against rayvec's, on the same cores.

    python benchmarks/tianshou_training.py [--rounds 5] [--iterations 8] [--learners 0 2] [--quick]

Every side runs Tianshou's unmodified OnPolicyTrainer with the settings of its MuJoCo script for PPO (2048 steps an
iteration, 10 passes, minibatches of 64, ten test episodes before and after), without normalised observations. Sides
alternate, round by round. Tianshou's side comes with each of `--peer-threads`; ratios are to the quickest of them.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import torch
import tyro
from measure import heading, interleaved, simulated_cluster
from tianshou.algorithm import PPO
from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import SubprocVectorEnv
from tianshou.trainer import OnPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic
from torch.distributions import Independent, Normal

import rayvec.tianshou
from rayvec.bench.terminal import ratio, show_table, spread
from rayvec.tianshou.learn.data_parallel import DataParallel

STEPS = 2048


@dataclass
class Side:
    """One way to train.

    Attributes:
        name: For a person.
        algorithm: That the trainer runs.
        collector: That fills the buffer.
        test_collector: That takes whole episodes.
        threads: How many torch may use in this process.
    """

    name: str
    algorithm: Any
    collector: Any
    test_collector: Any
    threads: int

    def run(self, iterations: int) -> float:
        """Trains for some iterations; returns the steps/s of the whole loop."""
        torch.set_num_threads(self.threads)
        self.collector.reset()
        began_s = time.perf_counter()
        self.algorithm.run_training(
            OnPolicyTrainerParams(
                training_collector=self.collector,
                test_collector=self.test_collector,
                max_epochs=1,
                epoch_num_steps=iterations * STEPS,
                collection_step_num_env_steps=STEPS,
                test_step_num_episodes=self.test_collector.env_num,
                update_step_num_repetitions=10,
                batch_size=64,
                show_progress=False,
                verbose=False,
            )
        )
        return iterations * STEPS / (time.perf_counter() - began_s)

    def close(self) -> None:
        """Ends what runs for it."""
        self.collector.close()
        self.test_collector.close()
        if isinstance(self.algorithm, DataParallel):
            self.algorithm.close()


make_env = partial(gymnasium.make, "HalfCheetah-v5")


def normal(parameters: tuple[torch.Tensor, torch.Tensor]) -> Independent:
    """Returns the distribution of actions."""
    return Independent(Normal(*parameters), 1)


def make_ppo() -> PPO:
    """Returns PPO as Tianshou's MuJoCo script makes it."""
    torch.manual_seed(0)
    env = make_env()
    shape = {"state_shape": env.observation_space.shape, "hidden_sizes": [64, 64], "activation": torch.nn.Tanh}
    actor = ContinuousActorProbabilistic(
        preprocess_net=Net(**shape), action_shape=env.action_space.shape, unbounded=True
    )
    return PPO(
        policy=ProbabilisticActorPolicy(
            actor=actor, dist_fn=normal, action_space=env.action_space, action_scaling=True, action_bound_method="clip"
        ),
        critic=ContinuousCritic(preprocess_net=Net(**shape)),
        optim=AdamOptimizerFactory(lr=3e-4),
        gamma=0.99,
        gae_lambda=0.95,
        max_grad_norm=0.5,
        vf_coef=0.25,
        ent_coef=0.0,
        eps_clip=0.2,
        advantage_normalization=False,
        recompute_advantage=True,
        return_scaling=True,
    )


def make_tianshou(num_envs: int, tests: int, threads: int) -> Side:
    """Returns Tianshou's own parts."""
    algorithm = make_ppo()
    training, testing = (SubprocVectorEnv([make_env] * count) for count in (num_envs, tests))
    collector = Collector(algorithm, training, VectorReplayBuffer(2 * STEPS, num_envs))
    return Side(f"Tianshou, torch threads {threads}", algorithm, collector, Collector(algorithm, testing), threads)


def make_rayvec(num_envs: int, tests: int, workers: int, num_learners: int) -> Side:
    """Returns ours; without learners the algorithm is Tianshou's plain one."""
    algorithm: Any = make_ppo()
    if num_learners:
        algorithm = rayvec.tianshou.data_parallel(algorithm, num_learners, num_cpus=0)
    training, testing = (
        rayvec.tianshou.RayVectorEnv([make_env] * count, num_nodes=1, workers_per_node=workers)
        for count in (num_envs, tests)
    )
    collector = rayvec.tianshou.Collector(algorithm, training, VectorReplayBuffer(2 * STEPS, num_envs))
    name = f"rayvec, {num_learners} learners" if num_learners else "rayvec, Tianshou's update"
    return Side(name, algorithm, collector, rayvec.tianshou.Collector(algorithm, testing), 1)


def main(
    rounds: int = 5,
    iterations: int = 8,
    envs: int = 16,
    tests: int = 10,
    workers: int = 2,
    learners: tuple[int, ...] = (0, 2),
    peer_threads: tuple[int, ...] = (1, 2),
    quick: bool = False,
) -> None:
    """Measures and prints; with --quick one short round of two sides: less than a minute."""
    if quick:
        rounds, iterations, envs, tests, learners, peer_threads = 1, 1, 4, 1, (0,), (1,)
    # Tianshou's side forks, which is better done before Ray's threads are there
    sides = [make_tianshou(envs, tests, threads) for threads in peer_threads]
    with simulated_cluster(4):
        sides += [make_rayvec(envs, tests, workers, count) for count in learners]
        for side in sides[: 0 if quick else len(sides)]:
            side.run(1)
        found = interleaved({side.name: partial(side.run, iterations) for side in sides}, rounds)
        print(heading())
        best = max((side.name for side in sides[: len(peer_threads)]), key=lambda name: statistics.median(found[name]))
        rows = [[name, spread(rates), ratio(rates, found[best])] for name, rates in found.items()]
        show_table("Tianshou's PPO on HalfCheetah-v5", ["", "steps/s", f"over {best}"], rows)
        for side in sides:
            side.close()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
