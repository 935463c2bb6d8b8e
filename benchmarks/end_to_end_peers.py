"""One library learning one task in a process of its own, until the judge is satisfied.

    python benchmarks/end_to_end_peers.py LIBRARY TASK SEED BEGAN_S LIMIT_S

BEGAN_S is what ``time.monotonic()`` said when the process was started. Each function imports what it needs, so that
each library can live in an environment of its own. Settings are those that the projects publish for these very
environments: Stable-Baselines3's in rl-baselines3-zoo (``hyperparams/ppo.yml`` and ``sac.yml``), CleanRL's defaults,
Tianshou's in its ``test/discrete/test_ppo_discrete.py`` and ``test/continuous/test_sac_with_il.py``, and our own
defaults.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from judge import TASKS, Judge
from numpy.typing import NDArray


def rayvec_native(task: str, seed: int, judge: Judge) -> None:
    """The NumPy CartPole as one native sub-batch in this process: no worker is started.

    Steps cost next to nothing, so there are more of them for each update, and fewer updates.
    """
    if task != "cartpole":
        raise SystemExit(f"Gymnasium has no vectorized version of {TASKS[task].env_id}")
    make = "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv"
    settings = {"num_envs": 64, "num_steps": 32, "minibatch_size": 512, "num_epochs": 4, "learning_rate": 5e-3}
    rayvec(task, seed, judge, native=make, num_nodes=0, workers_per_node=0, **settings)


def rayvec(task: str, seed: int, judge: Judge, **settings: Any) -> None:
    """``rayvec.train`` as it is, logs and checkpoints included; the learner shows its weights after each update.

    While the judge looks, with the clock stopped, SAC's workers take the 16 steps that are prefetched.
    """
    import rayvec
    from rayvec.config import PPOConfig, SACConfig
    from rayvec.learners.ppo import PPOLearner
    from rayvec.learners.sac import SACLearner
    from rayvec.training.evaluation import greedy_policy
    from rayvec.training.runs import register

    config_class: Any = {"cartpole": PPOConfig, "pendulum": SACConfig}[task]
    learner_class: Any = {"cartpole": PPOLearner, "pendulum": SACLearner}[task]

    class Judged(learner_class):  # type: ignore[misc]
        steps = 0

        def update(self, batch: Any) -> dict[str, float]:
            metrics: dict[str, float] = super().update(batch)
            self.steps += batch.stats.n_collected_steps
            if metrics:
                judge(self.steps, self.greedy)
            return metrics

        def greedy(self, obs: NDArray[Any]) -> NDArray[Any]:
            if getattr(self, "shown", None) != self.steps:
                self.shown, self.policy = self.steps, greedy_policy(self.module, self.weights())
            return np.asarray(self.policy.act(obs, np.zeros((len(obs), 0)))[0])

    register(config_class, Judged)
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        env_id = TASKS[task].env_id
        rayvec.train(config_class(env_id=env_id, seed=seed, run_dir=run_dir, eval_episodes=0, **settings))


def cleanrl_style(task: str, seed: int, judge: Judge) -> None:
    """Single functions after CleanRL."""
    import cleanrl_style as scripts

    learn = scripts.ppo if task == "cartpole" else scripts.sac
    learn(TASKS[task].env_id, seed, judge)


def stable_baselines3(task: str, seed: int, judge: Judge) -> None:
    """Stable-Baselines3 with the settings of rl-baselines3-zoo."""
    from stable_baselines3 import PPO, SAC
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    class Show(BaseCallback):  # type: ignore[misc]
        def _on_rollout_start(self) -> None:
            judge(self.num_timesteps, lambda obs: np.asarray(model.predict(obs, deterministic=True)[0]))

        def _on_step(self) -> bool:
            return True

        def _on_training_end(self) -> None:
            self._on_rollout_start()

    model: Any
    if task == "cartpole":
        model = PPO(
            "MlpPolicy", make_vec_env("CartPole-v1", 8, seed=seed), n_steps=32, batch_size=256, gae_lambda=0.8,
            gamma=0.98, n_epochs=20, ent_coef=0.0, learning_rate=lambda left: left * 0.001,
            clip_range=lambda left: left * 0.2, seed=seed, device="cpu",
        )  # fmt: skip
        model.learn(100_000, callback=Show())
    else:
        env = make_vec_env("Pendulum-v1", 1, seed=seed)
        model = SAC("MlpPolicy", env, learning_rate=1e-3, seed=seed, device="cpu")
        model.learn(20_000, callback=Show())


def tianshou(task: str, seed: int, judge: Judge) -> None:
    """Tianshou's trainers over its own environments and collectors."""
    import gymnasium
    import torch
    from tianshou.algorithm.algorithm_base import policy_within_training_step
    from tianshou.data import Batch, Collector, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv
    from tianshou.trainer import OffPolicyTrainerParams, OnPolicyTrainerParams

    np.random.seed(seed)
    torch.manual_seed(seed)
    env_id, num_envs = TASKS[task].env_id, 20 if task == "cartpole" else 10
    envs = DummyVectorEnv([lambda: gymnasium.make(env_id)] * num_envs)
    envs.seed(seed)
    algorithm = tianshou_ppo(envs) if task == "cartpole" else tianshou_sac(envs)

    def greedy(obs: NDArray[Any]) -> NDArray[Any]:
        policy = algorithm.policy
        with torch.no_grad(), policy_within_training_step(policy, enabled=False):
            batch = policy(Batch(obs=obs, info=Batch()))
        return np.asarray(policy.map_action(batch.act.cpu().numpy()))

    collector = Collector(algorithm, envs, VectorReplayBuffer(20_000, num_envs), exploration_noise=task == "pendulum")
    common: dict[str, Any] = {
        "training_collector": collector,
        "max_epochs": 10,
        "training_fn": lambda epoch, steps: judge(steps, greedy),
        "show_progress": False,
    }
    params: Any = OnPolicyTrainerParams(
        **common, epoch_num_steps=50_000, collection_step_num_env_steps=2_000, batch_size=64,
        update_step_num_repetitions=10,
    ) if task == "cartpole" else OffPolicyTrainerParams(
        **common, epoch_num_steps=24_000, collection_step_num_env_steps=10, batch_size=128,
        update_step_num_gradient_steps_per_sample=0.1,
    )  # fmt: skip
    algorithm.run_training(params)
    judge(collector.collect_step, greedy)


def tianshou_ppo(envs: Any) -> Any:
    """Returns Tianshou's PPO for CartPole-v1."""
    import torch
    from tianshou.algorithm import PPO
    from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.utils.net.common import ActorCritic, Net
    from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic

    net = Net(state_shape=(4,), hidden_sizes=[64, 64])
    actor, critic = DiscreteActor(preprocess_net=net, action_shape=2), DiscreteCritic(preprocess_net=net)
    for module in ActorCritic(actor, critic).modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.orthogonal_(module.weight)
            torch.nn.init.zeros_(module.bias)
    policy = DiscreteActorPolicy(
        actor=actor, dist_fn=torch.distributions.Categorical, action_space=envs.action_space[0], deterministic_eval=True
    )
    return PPO(
        policy=policy, critic=critic, optim=AdamOptimizerFactory(lr=3e-4), gamma=0.99, gae_lambda=0.95, eps_clip=0.2,
        vf_coef=0.5, ent_coef=0.0, max_grad_norm=0.5, advantage_normalization=False, value_clip=False,
    )  # fmt: skip


def tianshou_sac(envs: Any) -> Any:
    """Returns Tianshou's SAC for Pendulum-v1."""
    from updates import tianshou_algorithm

    more = {"alpha_lr": 3e-4, "deterministic_eval": True}
    return tianshou_algorithm(3, envs.action_space[0], 128, 1e-3, 1e-3, n_step_return_horizon=3, **more)


LIBRARIES: dict[str, Callable[[str, int, Judge], None]] = {
    "rayvec": rayvec,
    "rayvec, native": rayvec_native,
    "rayvec, with Ray": partial(rayvec, num_nodes=1),
    "CleanRL-style": cleanrl_style,
    "Stable-Baselines3": stable_baselines3,
    "Tianshou": tianshou,
}


def main(library: str, task: str, seed: str, began_s: str, limit_s: str) -> None:
    """Learns, until the judge is satisfied or the time is over."""
    LIBRARIES[library](task, int(seed), Judge(TASKS[task], int(seed), float(began_s), float(limit_s)))


if __name__ == "__main__":
    if len(sys.argv) != 6 or sys.argv[1] not in LIBRARIES or sys.argv[2] not in TASKS:
        raise SystemExit(f"{__doc__}\nLIBRARY is one of {list(LIBRARIES)}, TASK one of {list(TASKS)}.")
    main(*sys.argv[1:])
