"""Experience with the policy beside the environments: ours, beside what no framework at all could do better.

    python benchmarks/collecting.py --env-id CartPole-v1 --hidden 64 64 --repeats 7
    python benchmarks/collecting.py --env-id CartPole-v1 --hidden 256 256 --rllib-python VENVS/rllib/bin/python
    python benchmarks/collecting.py --env-id HalfCheetah-v5 --num-envs 16
    python benchmarks/collecting.py --env-id ale_py:ALE/Breakout-v5 --num-envs 8 --num-steps 32

The floor is independent processes, one for each of our workers, that step `--num-envs` environments each in a plain
loop and write [T, k] arrays: once with a policy and a value net in torch, as learners usually act, and once with the
policy net alone in NumPy, which is what our workers run. Nobody collects their arrays. Windows take turns. Steps per
CPU-second count the driver and every process that works for it. Atari has no net: actions come from the image.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from measure import heading, markdown, ratio, simulated_cluster, spread, tree

from rayvec.bench.harness.cpu import on_cpu_s

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Setting:
    """What all rows have in common.

    Attributes:
        env_id: Of the environments.
        hidden: Sizes of the nets' hidden layers.
        num_envs: Environments of each worker.
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


@dataclass
class Row:
    """Something that collects, and what was measured of it.

    Attributes:
        name: Of the row.
        run: Collects for about so many seconds; returns steps and seconds.
        pids: Processes that work for it.
        steps_per_s: One figure for each repeat.
        steps_per_cpu_s: Likewise.
    """

    name: str
    run: Callable[[float], tuple[int, float]]
    pids: list[int]
    steps_per_s: list[float] = field(default_factory=list)
    steps_per_cpu_s: list[float] = field(default_factory=list)

    def measure(self, seconds: float) -> None:
        """Collects for some seconds and notes what came of it."""
        cpu = sum(on_cpu_s(self.pids))
        steps, elapsed_s = self.run(seconds)
        self.steps_per_s.append(steps / elapsed_s)
        self.steps_per_cpu_s.append(steps / max(sum(on_cpu_s(self.pids)) - cpu, 1e-9))


def make_env(env_id: str) -> gymnasium.Env[Any, Any]:
    """One environment, Atari preprocessed: 84x84, four frames, a step of four."""
    if "ALE/" not in env_id:
        return gymnasium.make(env_id)
    env = gymnasium.wrappers.AtariPreprocessing(gymnasium.make(env_id, frameskip=1))
    return gymnasium.wrappers.FrameStackObservation(env, 4)


def of_pixels(obs: Any) -> Any:
    """A policy that costs nothing."""
    return obs[:, -1, 40, 40].astype(np.int64) % 4


# The floor: no framework.


def floor_process(setting: Setting, kind: str, seed: int, pipe: Any) -> None:
    """Collects whole chunks for as many seconds as it is told, again and again, until the pipe ends."""
    envs = [make_env(setting.env_id) for _ in range(setting.num_envs)]
    chunk = FloorLoop(setting, envs, kind, seed)
    chunk.take()
    pipe.send(os.getpid())
    with contextlib.suppress(EOFError):
        while True:
            seconds = pipe.recv()
            steps, begin = 0, time.perf_counter()
            while time.perf_counter() - begin < seconds:
                chunk.take()
                steps += setting.num_steps * setting.num_envs
            pipe.send((steps, time.perf_counter() - begin))


class FloorLoop:
    """Environments stepped in a plain loop, with autoreset, a net, and arrays [T, k] that are written once."""

    def __init__(self, setting: Setting, envs: list[Any], kind: str, seed: int) -> None:
        self._envs = envs
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


@contextlib.contextmanager
def floor(setting: Setting, kind: str) -> Iterator[Row]:
    """Independent processes, one for each worker; nobody collects what they write."""
    context = multiprocessing.get_context("spawn")
    pipes = []
    for worker in range(setting.workers):
        ours, theirs = context.Pipe()
        context.Process(target=floor_process, args=(setting, kind, 1000 * worker, theirs), daemon=True).start()
        theirs.close()
        pipes.append(ours)
    pids = [pipe.recv() for pipe in pipes]

    def run(seconds: float) -> tuple[int, float]:
        for pipe in pipes:
            pipe.send(seconds)
        answers = [pipe.recv() for pipe in pipes]
        mean_s = sum(elapsed_s for _, elapsed_s in answers) / len(answers)
        return sum(steps for steps, _ in answers), mean_s  # they end a chunk apart, and none waits for another

    net = (
        "no net"
        if setting.is_atari
        else {"torch": "policy and value nets in torch", "numpy": "policy net in NumPy"}[kind]
    )
    yield Row(f"independent processes, {net}", run, pids)
    for pipe in pipes:
        pipe.close()


# Ours and peers.


@contextlib.contextmanager
def ours(setting: Setting) -> Iterator[list[Row]]:
    """The Collector, inference in the workers of one local node: chunk by chunk, and with the next chunk prefetched."""
    from rayvec.collect.collector import Collector
    from rayvec.policies.networks import make_actor_critic
    from rayvec.policies.policy import Policy
    from rayvec.vector.ray_vec_env import RayVecEnv

    total = setting.num_envs * setting.workers
    n_step = setting.num_steps * total
    env_fns = [partial(make_env, setting.env_id)] * total
    with simulated_cluster(setting.workers + 1), RayVecEnv(env_fns, workers_per_node=setting.workers) as env:
        policy: Any = of_pixels
        if not setting.is_atari:
            policy = Policy(make_actor_critic(env.single_observation_space, env.single_action_space, setting.hidden))
        splits: dict[bool, list[dict[str, float]]] = {False: [], True: []}

        def collecting(prefetch: bool) -> Row:
            collector = Collector(env, policy, seed=0, prefetch=prefetch)

            def run(seconds: float) -> tuple[int, float]:
                batches, begin = [], time.perf_counter()
                while time.perf_counter() - begin < seconds:
                    batches.append(collector.collect(n_step=n_step).stats)
                if (last := collector.drain()) is not None:
                    batches.append(last.stats)
                splits[prefetch] += [stats.time_split_s for stats in batches]
                return sum(stats.n_collected_steps for stats in batches), time.perf_counter() - begin

            run(0.1)  # a reset, first weights and first frames
            splits[prefetch].clear()
            return Row(f"rayvec.Collector{', prefetching' if prefetch else ''}", run, tree(os.getpid()))

        yield [collecting(prefetch=False), collecting(prefetch=True)]
        for prefetch, found in splits.items():
            sums = {name: sum(split[name] for split in found) for name in found[0]}
            shares = ", ".join(f"{name} {part / sum(sums.values()):.1%}" for name, part in sums.items())
            print(f"prefetch={prefetch}: {shares}\n")


@contextlib.contextmanager
def of_tianshou(setting: Setting, num_envs: int) -> Iterator[Row]:
    """Tianshou's Collector over SubprocVectorEnv."""
    import tianshou.env
    import torch
    from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.discrete import DiscreteActor

    torch.set_num_threads(1)
    before = set(tree(os.getpid()))
    env = tianshou.env.SubprocVectorEnv([partial(make_env, setting.env_id)] * num_envs)
    single = make_env(setting.env_id)
    body = Net(state_shape=single.observation_space.shape, hidden_sizes=setting.hidden, activation=torch.nn.Tanh)
    actor = DiscreteActor(preprocess_net=body, action_shape=single.action_space.n, softmax_output=False)
    policy = DiscreteActorPolicy(actor=actor, action_space=single.action_space)
    collector = Collector(policy, env, VectorReplayBuffer(setting.num_steps * num_envs * 2, num_envs))
    collector.reset()
    pids = [os.getpid(), *sorted(set(tree(os.getpid())) - before)]

    def run(seconds: float) -> tuple[int, float]:
        steps, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            steps += collector.collect(n_step=8 * num_envs).n_collected_steps
        return steps, time.perf_counter() - begin

    yield Row(f"Tianshou Collector, SubprocVectorEnv, {num_envs} environments", run, pids)
    env.close()


@contextlib.contextmanager
def of_rllib(setting: Setting, python: str) -> Iterator[Row]:
    """RLlib's EnvRunner, one process, in its own virtual environment; see benchmarks/make_peer_venvs.sh."""
    command = [
        python,
        str(HERE / "rllib_env_runner.py"),
        setting.env_id,
        str(setting.num_envs),
        *map(str, setting.hidden),
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    while process.stdout.readline().strip() != "ready":
        if process.poll() is not None:
            raise SystemExit(f"{' '.join(command)} ended; make its environment with benchmarks/make_peer_venvs.sh")

    def run(seconds: float) -> tuple[int, float]:
        print(seconds, file=process.stdin, flush=True)
        steps, elapsed_s = json.loads(process.stdout.readline())
        return steps, elapsed_s

    yield Row(f"RLlib EnvRunner, {setting.num_envs} environments, one process", run, tree(process.pid))
    process.stdin.close()
    process.wait(30)


def main() -> None:
    """Measures all rows and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--hidden", type=int, nargs="*", default=[64, 64])
    parser.add_argument("--num-envs", type=int, default=64, help="of each worker")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--num-steps", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--tianshou-envs", type=int, default=64, help="a process each; 0 leaves the row out")
    parser.add_argument("--rllib-python", default="", help="of its own virtual environment; else RLlib is left out")
    args = parser.parse_args()
    setting = Setting(args.env_id, tuple(args.hidden), args.num_envs, args.workers, args.num_steps)
    is_discrete = isinstance(make_env(args.env_id).action_space, gymnasium.spaces.Discrete)
    print(heading(("gymnasium", "ray", "tianshou", "torch", "numpy")))
    with contextlib.ExitStack() as stack:
        rows = [
            stack.enter_context(floor(setting, kind))
            for kind in (("numpy",) if setting.is_atari else ("numpy", "torch"))
        ]
        if args.tianshou_envs and is_discrete and not setting.is_atari:
            rows.append(stack.enter_context(of_tianshou(setting, args.tianshou_envs)))
        has_rllib = Path(args.rllib_python).is_file() and not setting.is_atari
        if has_rllib:
            rows.append(stack.enter_context(of_rllib(setting, args.rllib_python)))
        plain, prefetching = stack.enter_context(ours(setting))
        rows += [plain, prefetching]
        for _ in range(args.repeats):
            for row in rows:
                row.measure(args.seconds)
        lines = [
            [
                row.name,
                spread(row.steps_per_s),
                ratio(plain.steps_per_s, row.steps_per_s),
                ratio(prefetching.steps_per_s, row.steps_per_s),
                spread(row.steps_per_cpu_s),
                ratio(plain.steps_per_cpu_s, row.steps_per_cpu_s),
            ]
            for row in rows
        ]
        if not has_rllib:
            lines.append(["RLlib EnvRunner", "not installed", "", "", "", ""])
    print(markdown(["", "steps/s", "rayvec / it", "prefetching / it", "steps per CPU-second", "rayvec / it"], lines))


if __name__ == "__main__":
    main()
