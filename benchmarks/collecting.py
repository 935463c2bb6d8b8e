"""Experience with the policy beside the environments: rayvec, beside what plain loops and other libraries reach.

    python benchmarks/collecting.py
    python benchmarks/collecting.py --hidden-sizes 256 256 --peer-venv rllib=VENVS/rllib
    python benchmarks/collecting.py --env-id HalfCheetah-v5 --num-envs 32

This is ``rayvec bench compare`` with a policy net: its options are the same. The upper bound is independent processes,
one for each of rayvec's workers, that step their share of the environments in a plain loop with a policy and a value
net in torch, as learners usually act, and write [T, k] arrays, which are not collected. `rayvec-worker` is the
Collector with the next chunk prefetched. Tianshou's Collector steps at most 64 environments by SubprocVectorEnv,
RLlib's EnvRunner its environments in one process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from rayvec.bench.harness.task import Adapter, Task
from rayvec.bench.harness.upper_bound import Counted, UpperBound


def collecting(task: Task) -> Callable[[tuple[float, float | None]], Counted]:
    """Returns what collects whole chunks for as many seconds as a request says, with autoreset and two nets."""
    import torch

    torch.set_num_threads(1)
    seed, count, length = os.getpid(), task.num_envs // task.workers, task.chunk_steps
    envs = [task.make() for _ in range(count)]
    now = np.stack([env.reset(seed=seed + i)[0] for i, env in enumerate(envs)])
    space: Any = envs[0].action_space
    discrete = isinstance(space, gymnasium.spaces.Discrete)

    def net(outs: int) -> Any:
        layers: list[Any] = []
        for a, b in zip((now[0].size, *task.hidden_sizes), (*task.hidden_sizes, outs), strict=True):
            layers += [torch.nn.Linear(a, b), torch.nn.Tanh()]
        return torch.nn.Sequential(*layers[:-1])

    policy, critic = net(int(space.n) if discrete else int(np.prod(space.shape))), net(1)
    obs, rew, done = np.zeros((length, *now.shape), now.dtype), np.zeros((length, count)), np.zeros((2, length, count))
    logp, value = np.zeros((2, length, count), np.float32)
    taken = np.zeros((length, count, *space.shape), space.dtype)

    def act(t: int) -> Any:
        x = torch.from_numpy(now).float()
        out = policy(x)
        value[t] = critic(x)[:, 0].numpy()
        if discrete:
            act = (out - torch.empty_like(out).exponential_().log()).argmax(-1)
            logp[t] = out.log_softmax(-1).gather(-1, act[:, None])[:, 0].numpy()
            return act.numpy()
        noise = torch.randn_like(out)
        logp[t] = (-0.5 * noise**2 - 0.918938533).sum(-1).numpy()
        return np.clip((out + noise).numpy(), space.low, space.high)

    def collect(request: tuple[float, float | None]) -> Counted:
        steps, begin = 0, time.monotonic()
        while time.monotonic() - begin < request[0]:
            for t in range(length):
                obs[t] = now
                with torch.no_grad():
                    taken[t] = act(t)
                for i, env in enumerate(envs):
                    now[i], rew[t, i], terminated, truncated, _ = env.step(taken[t, i])
                    if terminated or truncated:
                        done[:, t, i] = terminated, truncated
                        now[i] = env.reset()[0]
            steps += length * count
        elapsed_s = time.monotonic() - begin
        return steps, elapsed_s, elapsed_s

    return collect


class Processes(UpperBound):
    """Independent processes with policy and value nets in torch."""

    make = staticmethod(collecting)


class TianshouCollector(Adapter):
    """Tianshou's Collector over SubprocVectorEnv, of at most 64 environments."""

    transport = "pipe"

    def __init__(self, task: Task) -> None:
        import tianshou.env
        import torch
        from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
        from tianshou.data import Collector, VectorReplayBuffer
        from tianshou.utils.net.common import Net
        from tianshou.utils.net.discrete import DiscreteActor

        torch.set_num_threads(1)
        single: Any = task.make()
        if not isinstance(single.action_space, gymnasium.spaces.Discrete):
            raise LookupError("this adapter has a policy for discrete actions alone")
        self.num_envs = min(task.num_envs, 64)
        self._env = tianshou.env.SubprocVectorEnv([task.make] * self.num_envs)
        hidden = list(task.hidden_sizes)
        body = Net(state_shape=single.observation_space.shape, hidden_sizes=hidden, activation=torch.nn.Tanh)
        actor = DiscreteActor(preprocess_net=body, action_shape=single.action_space.n, softmax_output=False)
        policy = DiscreteActorPolicy(actor=actor, action_space=single.action_space)
        buffer = VectorReplayBuffer(2 * task.chunk_steps * self.num_envs, self.num_envs)
        self._collector = Collector(policy, self._env, buffer)
        self._collector.reset()

    def advance(self) -> int:
        """Takes eight steps of each environment."""
        return int(self._collector.collect(n_step=8 * self.num_envs).n_collected_steps)

    def close(self) -> None:
        """Ends it."""
        self._env.close()


class RLlib(Adapter):
    """RLlib's EnvRunner in this process, with the environments of one worker."""

    def __init__(self, task: Task) -> None:
        import torch
        from ray.rllib.algorithms.ppo import PPOConfig
        from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
        from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

        torch.set_num_threads(1)
        self.num_envs = task.num_envs // task.workers
        model = DefaultModelConfig(fcnet_hiddens=list(task.hidden_sizes), fcnet_activation="tanh")
        config = PPOConfig().environment(task.env_id).rl_module(model_config=model)
        config = config.env_runners(num_envs_per_env_runner=self.num_envs, num_env_runners=0)
        self._runner: Any = SingleAgentEnvRunner(config=config, worker_index=0)

    def advance(self) -> int:
        """Takes sixteen steps of each environment."""
        found = self._runner.sample(num_timesteps=16 * self.num_envs, random_actions=False)
        return sum(len(episode) for episode in found)

    def close(self) -> None:
        """Ends it."""
        self._runner.stop()


rllib = RLlib

if __name__ == "__main__":
    import tyro
    from measure import heading, run_command

    from rayvec.bench import compare
    from rayvec.bench.settings import Compare

    default = Compare(
        num_envs=(128,),
        hidden_sizes=(64, 64),
        peer=("collecting:Processes", "collecting:TianshouCollector", "collecting:rllib"),
        reference="collecting:Processes",
        repeats=7,
        window=2.0,
    )
    settings = tyro.cli(Compare, default=default, description=__doc__)
    print(heading())
    run_command(compare.run, settings)
