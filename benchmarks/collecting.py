"""Experience with the policy beside the environments: rayvec, beside what plain loops without a framework reach.

    python benchmarks/collecting.py --env-id CartPole-v1 --hidden 64 64 --repeats 7
    python benchmarks/collecting.py --env-id CartPole-v1 --hidden 256 256 --rllib-python VENVS/rllib/bin/python
    python benchmarks/collecting.py --env-id HalfCheetah-v5 --num-envs 16
    python benchmarks/collecting.py --env-id ale_py:ALE/Breakout-v5 --num-envs 8 --num-steps 32

The floor is independent processes, one for each of rayvec's workers, that step `--num-envs` environments each in a
plain loop and write [T, k] arrays: once with a policy and a value net in torch, as learners usually act, and once with
the policy net alone in NumPy, which is what rayvec's workers run. Their arrays are not collected. Windows alternate.
Steps per CPU-second count the driver and every process that works for it. Atari has no net: actions come from the
image.

Each row is an adapter of the harness (rayvec/bench/harness) in a process of its own.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from rayvec.bench.harness.floors import Floor
from rayvec.bench.harness.task import Adapter


@dataclass(frozen=True)
class Setting:
    """What all rows have in common.

    Attributes:
        env_id: Of the environments.
        hidden: Sizes of the nets' hidden layers.
        num_envs: Environments of all workers.
        workers: Worker processes.
        num_steps: T, steps of a chunk.
    """

    env_id: str
    hidden: tuple[int, ...]
    num_envs: int
    workers: int
    num_steps: int

    @property
    def is_atari(self) -> bool:
        """Whether observations are images, preprocessed as usual."""
        return "ALE/" in self.env_id

    def make(self) -> gymnasium.Env[Any, Any]:
        """One environment, Atari preprocessed: 84x84, four frames, a step of four."""
        if not self.is_atari:
            return gymnasium.make(self.env_id)
        env = gymnasium.wrappers.AtariPreprocessing(gymnasium.make(self.env_id, frameskip=1))
        return gymnasium.wrappers.FrameStackObservation(env, 4)


def of_pixels(obs: Any) -> Any:
    """A policy that costs nothing."""
    return obs[:, -1, 40, 40].astype(np.int64) % 4


class FloorLoop:
    """Environments stepped in a plain loop, with autoreset, a net, and arrays [T, k] that are written once."""

    def __init__(self, setting: Setting, kind: str) -> None:
        seed = os.getpid()
        self._envs = envs = [setting.make() for _ in range(setting.num_envs // setting.workers)]
        self._shape = lead = (setting.num_steps, len(envs))
        space, actions = envs[0].observation_space, envs[0].action_space
        self._now = np.stack([env.reset(seed=seed + i)[0] for i, env in enumerate(envs)])
        self._discrete = isinstance(actions, gymnasium.spaces.Discrete)
        self._bounds = None if self._discrete else (actions.low, actions.high)
        self.obs = np.zeros((*lead, *space.shape), space.dtype)
        self.act = np.zeros((*lead, *actions.shape), actions.dtype)
        self.rew, self.done = np.zeros(lead), np.zeros((2, *lead), bool)
        self.logp, self.value = np.zeros(lead, np.float32), np.zeros(lead, np.float32)
        self._rng = np.random.default_rng(seed)
        outs = int(actions.n) if self._discrete else int(np.prod(actions.shape))
        sizes = (int(np.prod(space.shape)), *setting.hidden, outs)
        if setting.is_atari:
            self._act = lambda t, obs: (of_pixels(obs), 0.0)
        elif kind == "numpy":
            self._layers = [
                (self._rng.standard_normal((a, b)).astype(np.float32) / a**0.5, np.zeros(b, np.float32))
                for a, b in pairwise(sizes)
            ]
            self._act = self._act_numpy
        else:
            self._prepare_torch(sizes)
            self._act = self._act_torch

    def _prepare_torch(self, sizes: tuple[int, ...]) -> None:
        import torch

        torch.set_num_threads(1)
        self._torch = torch

        def net(outs: int) -> Any:
            layers: list[Any] = []
            for a, b in zip(sizes[:-1], (*sizes[1:-1], outs), strict=True):
                layers += [torch.nn.Linear(a, b), torch.nn.Tanh()]
            return torch.nn.Sequential(*layers[:-1])

        self._policy, self._critic = net(sizes[-1]), net(1)
        self._log_std = torch.zeros(sizes[-1])

    def _act_torch(self, t: int, obs: Any) -> tuple[Any, Any]:
        torch = self._torch
        with torch.no_grad():
            x = torch.from_numpy(obs).float()
            out = self._policy(x)
            self.value[t] = self._critic(x)[:, 0].numpy()
            if self._discrete:
                gumbel = -torch.empty_like(out).exponential_().log()
                act = (out + gumbel).argmax(-1)
                return act.numpy(), out.log_softmax(-1).gather(-1, act[:, None])[:, 0].numpy()
            noise = torch.randn_like(out)
            act = out + self._log_std.exp() * noise
            logp = (-0.5 * noise**2 - self._log_std).sum(-1) - 0.918938533 * out.shape[-1]
            return act.numpy(), logp.numpy()

    def _act_numpy(self, t: int, obs: Any) -> tuple[Any, Any]:
        rows = obs.astype(np.float32, copy=False)
        for weight, bias in self._layers[:-1]:
            rows = rows @ weight
            rows += bias
            np.tanh(rows, rows)
        weight, bias = self._layers[-1]
        out = rows @ weight + bias
        if not self._discrete:
            noise = self._rng.standard_normal(out.shape, np.float32)
            return out + noise, -0.5 * (noise * noise).sum(-1) - 0.918938533 * out.shape[-1]
        out -= out.max(-1, keepdims=True)
        cumulated = np.exp(out).cumsum(-1)
        act = (self._rng.random((len(out), 1)) * cumulated[:, -1:] > cumulated).sum(-1)
        return act, out[np.arange(len(act)), act] - np.log(cumulated[:, -1])

    def take(self) -> None:
        """Takes T steps."""
        now, envs = self._now, self._envs
        for t in range(self._shape[0]):
            self.obs[t] = now
            act, self.logp[t] = self._act(t, now)
            if self._bounds is not None:
                act = np.clip(act, *self._bounds)
            self.act[t] = act
            for i, env in enumerate(envs):
                obs, self.rew[t, i], terminated, truncated, _ = env.step(act[i])
                if terminated or truncated:
                    self.done[:, t, i] = terminated, truncated
                    obs, _ = env.reset()
                now[i] = obs


def serve(kind: str, setting: Setting, pipe: Connection) -> None:
    """Collects whole chunks for as many seconds as each request says."""
    loop = FloorLoop(setting, kind)
    loop.take()
    steps_each = setting.num_steps * setting.num_envs // setting.workers
    while (request := pipe.recv()) is not None:
        steps, begin = 0, time.monotonic()
        while time.monotonic() - begin < request[0]:
            loop.take()
            steps += steps_each
        elapsed_s = time.monotonic() - begin
        pipe.send((steps, elapsed_s, elapsed_s))


class NumpyFloor(Floor):
    """Independent processes with the policy net in NumPy."""

    serve = partial(serve, "numpy")


class TorchFloor(Floor):
    """Independent processes with policy and value nets in torch."""

    serve = partial(serve, "torch")


class RayvecCollector(Adapter):
    """The Collector, inference in the workers of one local node, chunk by chunk."""

    prefetch = False

    def __init__(self, setting: Setting) -> None:
        from rayvec.collect.collector import Collector
        from rayvec.policies.networks import make_actor_critic
        from rayvec.policies.policy import Policy
        from rayvec.vector.ray_vec_env import RayVecEnv

        workers = setting.workers
        self.env = RayVecEnv([setting.make] * setting.num_envs, num_nodes=1, workers_per_node=workers)
        policy: Any = of_pixels
        if not setting.is_atari:
            spaces = self.env.single_observation_space, self.env.single_action_space
            policy = Policy(make_actor_critic(*spaces, setting.hidden))
        self._collector = Collector(self.env, policy, seed=0, prefetch=self.prefetch)
        self._n_step, self._spent_s = setting.num_steps * setting.num_envs, dict[str, float]()
        self.advance()
        self.settle()

    def advance(self) -> int:
        """Collects one chunk."""
        stats = self._collector.collect(n_step=self._n_step).stats
        for name, seconds in stats.time_split_s.items():
            self._spent_s[name] = self._spent_s.get(name, 0.0) + seconds
        return stats.n_collected_steps

    def settle(self) -> None:
        """Waits for the pending chunk."""
        self._collector.drain()

    def own_split(self) -> dict[str, float]:
        """Where the time went so far, by the Collector's own account."""
        return {name: seconds / sum(self._spent_s.values()) for name, seconds in self._spent_s.items()}

    def close(self) -> None:
        """Ends it."""
        self.env.close()


class RayvecPrefetching(RayvecCollector):
    """The same with the next chunk prefetched."""

    prefetch = True


class TianshouCollector(Adapter):
    """Tianshou's Collector over SubprocVectorEnv."""

    def __init__(self, setting: Setting) -> None:
        import tianshou.env
        import torch
        from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
        from tianshou.data import Collector, VectorReplayBuffer
        from tianshou.utils.net.common import Net
        from tianshou.utils.net.discrete import DiscreteActor

        torch.set_num_threads(1)
        num_envs = setting.num_envs
        self._env = tianshou.env.SubprocVectorEnv([setting.make] * num_envs)
        single: Any = setting.make()
        body = Net(state_shape=single.observation_space.shape, hidden_sizes=setting.hidden, activation=torch.nn.Tanh)
        actor = DiscreteActor(preprocess_net=body, action_shape=single.action_space.n, softmax_output=False)
        policy = DiscreteActorPolicy(actor=actor, action_space=single.action_space)
        self._collector = Collector(policy, self._env, VectorReplayBuffer(setting.num_steps * num_envs * 2, num_envs))
        self._collector.reset()
        self._n_step = 8 * num_envs

    def advance(self) -> int:
        """Takes eight steps of each environment."""
        return int(self._collector.collect(n_step=self._n_step).n_collected_steps)

    def close(self) -> None:
        """Ends it."""
        self._env.close()


class RllibRunner(Adapter):
    """RLlib's EnvRunner, in this process."""

    def __init__(self, setting: Setting) -> None:
        import torch
        from ray.rllib.algorithms.ppo import PPOConfig
        from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
        from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

        torch.set_num_threads(1)
        config = (
            PPOConfig()
            .environment(setting.env_id)
            .env_runners(num_envs_per_env_runner=setting.num_envs, num_env_runners=0, rollout_fragment_length=128)
            .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=list(setting.hidden), fcnet_activation="tanh"))
        )
        self._runner: Any = SingleAgentEnvRunner(config=config, worker_index=0)
        self._steps = 16 * setting.num_envs

    def advance(self) -> int:
        """Takes sixteen steps of each environment."""
        return sum(len(episode) for episode in self._runner.sample(num_timesteps=self._steps, random_actions=False))

    def close(self) -> None:
        """Ends it."""
        self._runner.stop()


def main(
    env_id: str = "CartPole-v1",
    hidden: tuple[int, ...] = (64, 64),
    num_envs: int = 64,
    workers: int = 2,
    num_steps: int = 128,
    repeats: int = 7,
    seconds: float = 2.0,
    tianshou_envs: int = 64,
    rllib_python: Path | None = None,
) -> None:
    """Measures all rows and prints the table.

    Args:
        env_id: Of the environments.
        hidden: Units of the nets' hidden layers.
        num_envs: Environments of each worker.
        workers: Worker processes.
        num_steps: Steps of a chunk.
        repeats: Windows of each row.
        seconds: Of a window.
        tianshou_envs: Processes of Tianshou; 0 leaves the row out.
        rllib_python: Interpreter of a virtual environment with RLlib; unset leaves the row out.
    """
    from measure import heading, markdown, ratio, share_modules, spread

    from rayvec.bench.peers import marked_environment, peer_process

    setting = Setting(env_id, hidden, num_envs * workers, workers, num_steps)
    one = Setting(env_id, hidden, num_envs, 1, num_steps)
    few = Setting(env_id, hidden, tianshou_envs, 1, num_steps)
    rows: dict[str, tuple[str, Setting]] = {"independent processes, policy in NumPy": ("NumpyFloor", setting)}
    if not setting.is_atari:
        rows["independent processes, policy and value nets in torch"] = ("TorchFloor", setting)
        if tianshou_envs and isinstance(setting.make().action_space, gymnasium.spaces.Discrete):
            rows[f"Tianshou Collector, SubprocVectorEnv, {tianshou_envs} environments"] = ("TianshouCollector", few)
        if rllib_python is not None:
            rows[f"RLlib EnvRunner, {num_envs} environments, one process"] = ("RllibRunner", one)
    ours = "rayvec.Collector", "rayvec.Collector, prefetching"
    rows |= {ours[0]: ("RayvecCollector", setting), ours[1]: ("RayvecPrefetching", setting)}
    share_modules()
    rates: dict[str, list[float]] = {name: [] for name in rows}
    per_cpu: dict[str, list[float]] = {name: [] for name in rows}
    print(heading(("gymnasium", "ray", "tianshou", "torch", "numpy")))
    with ExitStack() as stack:
        processes = {}
        for name, (adapter, its) in rows.items():
            python = str(rllib_python) if adapter == "RllibRunner" else sys.executable
            start = peer_process(
                f"collecting:{adapter}", marked_environment(), asdict(its), python, "collecting:Setting"
            )
            processes[name], started = stack.enter_context(start)
            if "missing" in started:
                raise SystemExit(f"{name}: {started['missing']}; see benchmarks/make_peer_venvs.sh")
        for _ in range(repeats):
            for name, process in processes.items():
                found = process.do("measure", seconds=seconds, with_split=False)
                rates[name].append(found["steps_per_s"])
                per_cpu[name].append(found["steps"] / max(found["cpu_s"], 0.01))
                if name in ours:
                    print(name, ", ".join(f"{state} {share:.1%}" for state, share in found["split"].items()))
    lines = [
        [
            name,
            spread(rates[name]),
            *(ratio(rates[our], rates[name]) for our in ours),
            spread(per_cpu[name]),
            ratio(per_cpu[ours[0]], per_cpu[name]),
        ]
        for name in rows
    ]
    print(markdown(["", "steps/s", "rayvec / it", "prefetching / it", "steps per CPU-second", "rayvec / it"], lines))


if __name__ == "__main__":
    import tyro

    tyro.cli(main, description=__doc__)
