"""Libraries with an interface of their own, each in a virtual environment of its own if need be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rayvec.bench.harness.task import Adapter, Task

__all__ = ["Foreign", "Rllib", "envpool", "stable_baselines3", "torchrl"]


class Foreign(Adapter):
    """A vector environment of a library with an interface of its own."""

    def __init__(self, num_envs: int, transport: str, step: Callable[[Any], Any], actions: list[Any], close: Any):
        self.num_envs, self.transport, self.actions = num_envs, transport, actions
        self._step, self._close = step, close

    def advance(self) -> int:
        """Steps all."""
        self._step(self.next_actions())
        return self.num_envs

    def close(self) -> None:
        """Ends it."""
        self._close()


def stable_baselines3(task: Task) -> Foreign:
    """Makes Stable-Baselines3's ``SubprocVecEnv``: one process for each environment."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    env = SubprocVecEnv([task.make] * task.num_envs, start_method="forkserver")
    env.reset()
    return Foreign(task.num_envs, "pipe", env.step, task.single_actions(env.action_space), env.close)


def envpool(task: Task) -> Foreign:
    """Makes EnvPool's own environment of that name, which its threads step.

    Raises:
        LookupError: It has none.
    """
    import envpool

    name = str(task.env_id).rpartition(":")[2].removeprefix("ALE/")
    if name not in envpool.list_all_envs():
        raise LookupError(f"EnvPool has no {name}")
    env = envpool.make(name, env_type="gymnasium", num_envs=task.num_envs, num_threads=task.workers)
    env.reset()
    actions = task.single_actions(env.action_space)
    return Foreign(task.num_envs, "threads, C++ environment", env.step, actions, env.close)


def torchrl(task: Task) -> Foreign:
    """Makes TorchRL's ``ParallelEnv``: one process for each environment."""
    import torch
    from torchrl.envs import GymWrapper, ParallelEnv

    torch.set_num_threads(1)
    env = ParallelEnv(task.num_envs, lambda: GymWrapper(task.make()), mp_start_method="fork")
    state = env.reset()

    def step(action: Any) -> None:
        nonlocal state
        state["action"] = action
        _, state = env.step_and_maybe_reset(state)

    return Foreign(task.num_envs, "shm, pipe", step, [env.rand_action()["action"] for _ in range(16)], env.close)


class Rllib(Adapter):
    """RLlib's env runners, as many as there are cores, with random actions."""

    transport = "ray, whole episodes"

    def __init__(self, task: Task) -> None:
        import ray
        from ray.rllib.algorithms.ppo import PPOConfig
        from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
        from ray.tune.registry import register_env

        ray.init("local", num_cpus=task.workers + 1, include_dashboard=False, log_to_driver=False, logging_level=40)
        register_env("bench", lambda _: task.make())
        self._each = max(1, task.num_envs // task.workers)
        config = (
            PPOConfig()
            .environment("bench")
            .env_runners(num_envs_per_env_runner=self._each, rollout_fragment_length=128)
            .rl_module(model_config={"conv_filters": [[16, 8, 4], [32, 4, 2]]})  # which random actions never ask
        )
        runner: Any = ray.remote(num_cpus=1)(SingleAgentEnvRunner)
        self._runners = [runner.remote(config=config, worker_index=k + 1) for k in range(task.workers)]
        self.num_envs, self.actions, self._ray = self._each * task.workers, [None], ray

    def advance(self) -> int:
        """Lets every runner take 128 steps of its environments."""
        steps = 128 * self._each
        refs = [runner.sample.remote(num_timesteps=steps, random_actions=True) for runner in self._runners]
        return sum(len(episode) for episodes in self._ray.get(refs) for episode in episodes)

    def close(self) -> None:
        """Ends it."""
        self._ray.shutdown()
