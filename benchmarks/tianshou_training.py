"""The whole training loop of Tianshou's PPO on HalfCheetah-v5: Tianshou's parts against rayvec's, on the same cores.

    python benchmarks/tianshou_training.py [--rounds 5] [--iterations 4] [--envs 16] [--workers 2] [--learners 0 2]

Every side runs Tianshou's unmodified OnPolicyTrainer with the settings of its MuJoCo script for PPO (2048 steps an
iteration, 10 passes, minibatches of 64), without normalised observations. Sides take turns, round by round. Printed are
medians over rounds with the smallest and largest, and the ratio to Tianshou's side round by round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import torch
from measure import heading, markdown, ratio, simulated_cluster, spread
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

STEPS = 2048


@dataclass
class Side:
    """One way to train, and what it took.

    Attributes:
        name: For a person.
        algorithm: That the trainer runs.
        collector: That fills the buffer.
        seconds: By phase, of every round: ``collect``, ``update`` and ``loop``.
    """

    name: str
    algorithm: Any
    collector: Any
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"collect": [], "update": [], "loop": []})

    def __post_init__(self) -> None:
        self._now = {"collect": 0.0, "update": 0.0}
        self.collector.collect = self._timed("collect", self.collector.collect)
        self.algorithm.update = self._timed("update", self.algorithm.update)
        self.collector.reset()

    def _timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            result = function(*args, **kwargs)
            self._now[phase] += time.perf_counter() - began_s
            return result

        return timed

    def run(self, iterations: int, keep: bool = True) -> None:
        """Trains for some iterations."""
        self._now.update(collect=0.0, update=0.0)
        began_s = time.perf_counter()
        self.algorithm.run_training(
            OnPolicyTrainerParams(
                training_collector=self.collector,
                test_collector=None,
                max_epochs=1,
                epoch_num_steps=iterations * STEPS,
                collection_step_num_env_steps=STEPS,
                update_step_num_repetitions=10,
                batch_size=64,
                show_progress=False,
                verbose=False,
            )
        )
        if keep:
            for phase, seconds in {**self._now, "loop": time.perf_counter() - began_s}.items():
                self.seconds[phase].append(seconds)


def make_env() -> Any:
    """Returns one environment."""
    return gymnasium.make("HalfCheetah-v5")


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


def make_buffer(num_envs: int) -> VectorReplayBuffer:
    """Returns a buffer with room for an iteration."""
    return VectorReplayBuffer(2 * STEPS, num_envs)


def make_tianshou(num_envs: int) -> Side:
    """Returns Tianshou's own parts."""
    algorithm = make_ppo()
    collector = Collector(algorithm, SubprocVectorEnv([make_env] * num_envs), make_buffer(num_envs))
    return Side("Tianshou", algorithm, collector)


def make_rayvec(num_envs: int, workers: int, num_learners: int) -> Side:
    """Returns ours; without learners the algorithm is Tianshou's plain one."""
    algorithm: Any = make_ppo()
    if num_learners:
        algorithm = rayvec.tianshou.data_parallel(algorithm, num_learners, num_cpus=0)
    envs = rayvec.tianshou.RayVectorEnv(
        [make_env] * num_envs, num_nodes=1, workers_per_node=workers, preload=("torch", "tianshou")
    )
    name = f"rayvec, {num_learners} learners" if num_learners else "rayvec, plain update"
    return Side(name, algorithm, rayvec.tianshou.Collector(algorithm, envs, make_buffer(num_envs)))


def table(sides: list[Side], iterations: int) -> str:
    """Returns what was measured, as a Markdown table."""
    steps = iterations * STEPS
    rows = []
    for side in sides:
        row = [side.name]
        for phase in ("collect", "update", "loop"):
            rates = [steps / seconds for seconds in side.seconds[phase]]
            row += [spread(rates), ratio(rates, [steps / seconds for seconds in sides[0].seconds[phase]])]
        rows.append(row)
    header = ["side"]
    for phase in ("collecting", "updating", "whole loop"):
        header += [f"{phase}, steps/s", "of Tianshou's"]
    return markdown(header, rows)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--learners", type=int, nargs="+", default=[0, 2])
    options = parser.parse_args()
    sides = [make_tianshou(options.envs)]  # it forks, which is better done before Ray's threads are there
    with simulated_cluster(4):
        sides += [make_rayvec(options.envs, options.workers, count) for count in options.learners]
        for side in sides:
            side.run(1, keep=False)
        for _ in range(options.rounds):
            for side in sides:
                side.run(options.iterations)
        print(heading(("tianshou", "gymnasium", "mujoco", "ray", "torch")))
        print(table(sides, options.iterations))
        for side in sides:
            side.collector.close()
            if hasattr(side.algorithm, "group"):
                side.algorithm.close()


if __name__ == "__main__":
    main()
