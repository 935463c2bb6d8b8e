"""One class for each way to step environments, all with the same few methods.

Each imports its library when it is made, so that a library that is missing is missing for its own peer alone.
"""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rayvec.bench.hosted.emulated import EmulatedSpec

__all__ = ["ADAPTERS", "Adapter", "Task"]

_ACTION_BATCHES = 64
_TRIAL_S = 0.5


@dataclass(frozen=True)
class Task:
    """What to step, and how.

    Attributes:
        num_envs: In all.
        workers: Processes in all, where a peer can put several environments into one.
        nodes: Of the cluster, for those who know of nodes.
        workers_per_node: Likewise.
        env_id: Gymnasium's; None for emulated environments.
        emulated: Arguments of :class:`EmulatedSpec`.
        inference: Of ours: ``"driver"`` or ``"worker"``.
        chunk_steps: T of a chunk of ours.
        groups: Of ours.
        prefetch: Whether ours takes chunks as a prefetching collector does: the next one while this one is handed over.
        hidden_size: Units of two hidden layers of a net that ours evaluates; 0 for none.
        address: Of a Ray cluster.
    """

    num_envs: int
    workers: int = 1
    nodes: int | None = None
    workers_per_node: int | None = None
    env_id: str | None = None
    emulated: dict[str, Any] | None = None
    inference: str = "driver"
    chunk_steps: int = 1
    groups: int = 1
    prefetch: bool = False
    hidden_size: int = 0
    address: str | None = None

    def make(self) -> gymnasium.Env[Any, Any]:
        """Makes one environment."""
        if self.env_id is None:
            return EmulatedSpec(**(self.emulated or {}))()
        module, _, name = self.env_id.rpartition(":")
        if module:  # Gymnasium's own import goes wrong in some versions when it is repeated
            __import__(module)
        return gymnasium.make(name)

    def actions(self, space: Any) -> list[Any]:
        """Returns batches of random actions from a batched space."""
        space.seed(0)
        return [space.sample() for _ in range(_ACTION_BATCHES)]

    def single_actions(self, space: Any) -> list[Any]:
        """Returns batches of random actions from the space of one environment."""
        space.seed(0)
        return [np.stack([space.sample() for _ in range(self.num_envs)]) for _ in range(_ACTION_BATCHES)]

    def net(self, space: Any) -> tuple[NDArray[np.float32], ...]:
        """Returns the matrices of a net from observations to one number for each of two actions."""
        sizes = [int(np.prod(space.shape)), self.hidden_size, self.hidden_size, 2]
        rng = np.random.default_rng(0)
        return tuple(rng.normal(0, 0.1, pair).astype(np.float32) for pair in itertools.pairwise(sizes))


class Adapter(ABC):
    """Something that steps environments.

    Attributes:
        num_envs: How many.
        transport: How actions and observations travel.
        actions: Batches to take in turns.
    """

    num_envs: int
    transport: str
    actions: list[Any]
    _count = 0

    @abstractmethod
    def advance(self) -> int:
        """Takes some steps; returns how many in all."""

    def settle(self) -> None:
        """Waits for what has been begun ahead, which nobody counts."""
        return

    def set_step(self, step_s: float, chunk_steps: int) -> None:
        """Sets how long emulated environments take."""
        raise NotImplementedError

    def steps_ahead(self) -> list[int] | None:
        """Steps of each worker in a chunk, where the next chunk is begun while this one is handed over; else None."""
        return None

    def set_inference(self, inference: str) -> None:
        """Sets who chooses actions from now on, where there is a choice."""
        raise NotImplementedError

    def kinds_cpu_s(self) -> tuple[float, float]:
        """CPU time so far of what stands between the driver and the workers, and of the workers, where it is known."""
        return 0.0, 0.0

    def clocks(self) -> list[NDArray[np.float64]]:
        """When the steps of each worker began and ended."""
        raise NotImplementedError

    def call_inference_s(self) -> NDArray[np.float64] | None:
        """Seconds of inference of each worker in the last call; None where the workers choose no actions."""
        return None

    def packing_s(self) -> float:
        """Seconds of packing in each call, where that is known."""
        return 0.0

    @abstractmethod
    def close(self) -> None:
        """Ends it."""

    def next_actions(self) -> Any:
        """Returns the next batch."""
        self._count = (self._count + 1) % len(self.actions)
        return self.actions[self._count]


class GymnasiumVector(Adapter):
    """Gymnasium's own vector environments."""

    def __init__(self, task: Task, asynchronous: bool) -> None:
        self.num_envs = task.num_envs
        env_fns = [task.make] * task.num_envs
        self.env: Any = (
            gymnasium.vector.AsyncVectorEnv(env_fns, context="forkserver")
            if asynchronous
            else gymnasium.vector.SyncVectorEnv(env_fns)
        )
        self.env.reset(seed=0)
        self.transport = "pipe, shm" if asynchronous else "none"
        self.actions = task.actions(self.env.action_space)

    def advance(self) -> int:
        """Steps all."""
        self.env.step(self.next_actions())
        return self.num_envs

    def set_step(self, step_s: float, chunk_steps: int) -> None:
        """Sets how long emulated environments take."""
        self.env.set_attr("step_s", step_s)

    def clocks(self) -> list[NDArray[np.float64]]:
        """One worker for each environment, or one for all."""
        clocks = list(self.env.call("clock"))
        if self.transport == "none":
            joined = np.concatenate(clocks)
            return [joined[np.argsort(joined[:, 0])]]
        return clocks

    def close(self) -> None:
        """Ends it."""
        self.env.close()


class TianshouVector(Adapter):
    """Tianshou's; it does not reset by itself, so episodes begin anew through Gymnasium's wrapper."""

    def __init__(self, task: Task, kind: str) -> None:
        import tianshou.env

        if kind == "RayVectorEnv":
            import ray

            ray.init(address=task.address or "local", log_to_driver=False, logging_level=40)
        self.num_envs = task.num_envs
        make: Any = task.make if task.env_id is None else lambda: gymnasium.wrappers.Autoreset(task.make())
        self.env: Any = getattr(tianshou.env, kind)([make] * task.num_envs)
        self.env.seed(0)
        self.env.reset()
        self.transport = {"RayVectorEnv": "ray actors", "ShmemVectorEnv": "pipe, shm"}.get(kind, "pipe")
        self.actions = task.single_actions(task.make().action_space)

    def advance(self) -> int:
        """Steps all."""
        self.env.step(self.next_actions())
        return self.num_envs

    def set_step(self, step_s: float, chunk_steps: int) -> None:
        """Sets how long emulated environments take."""
        self.env.set_env_attr("step_s", step_s)

    def clocks(self) -> list[NDArray[np.float64]]:
        """One worker for each environment."""
        return list(self.env.get_env_attr("clock"))

    def close(self) -> None:
        """Ends it."""
        self.env.close()


def _step_alone(task: Task, pipe: Connection) -> None:
    """Steps some environments by themselves for as long as it is told; answers with counts and times."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    envs: list[Any] = [task.make() for _ in range(max(1, task.num_envs // task.workers))]
    for env in envs:
        env.reset(seed=0)
    actions = [0] if task.env_id is None else [envs[0].action_space.sample() for _ in range(_ACTION_BATCHES)]
    chosen = itertools.cycle(actions)
    while (told := pipe.recv()) is not None:
        seconds, step_s = told
        for env in envs:
            if step_s is not None:
                env.step_s = step_s
        begin, count, inside_s = time.monotonic(), 0, 0.0
        while time.monotonic() - begin < seconds:
            for env in envs:
                before = time.monotonic()
                _, _, terminated, truncated, _ = env.step(next(chosen))
                inside_s += time.monotonic() - before
                if terminated or truncated:
                    env.reset()
            count += len(envs)
        pipe.send((count, time.monotonic() - begin, inside_s))


class Floor:
    """Independent processes that step environments in the same loop, without any communication.

    Args:
        task: `workers` says how many processes.
    """

    transport = "none"

    def __init__(self, task: Task) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["rayvec.bench.hosted.adapters"])
        self._step_s: float | None = None
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for _ in range(task.workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_step_alone, args=(task, theirs), daemon=True)
            main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
            process.start()  # without importing our main module again, which in a Ray worker is all of Ray
            sys.modules["__main__"] = main
            self._pipes.append(ours)
            self._processes.append(process)
        self.measure(0.01)

    def set_step(self, step_s: float, chunk_steps: int) -> None:
        """Sets how long emulated environments take."""
        self._step_s = step_s

    def measure(self, seconds: float) -> tuple[int, float, float, float]:
        """Returns steps, seconds (mean of the processes), steps per second in all, and the share inside ``step``."""
        for pipe in self._pipes:
            pipe.send((seconds, self._step_s))
        counts, elapsed, inside = zip(*(pipe.recv() for pipe in self._pipes), strict=True)
        rate = sum(count / wall for count, wall in zip(counts, elapsed, strict=True))
        return sum(counts), float(np.mean(elapsed)), rate, sum(inside) / sum(elapsed)

    def close(self) -> None:
        """Ends them."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


class ClusterFloor:
    """The floor on the nodes of a Ray cluster: the independent processes of each are started by an actor there."""

    transport = "none"

    def __init__(self, task: Task) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray.init(address=task.address, log_to_driver=False, logging_level=40)
        found = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        if len(found) < (task.nodes or 1):
            raise ValueError(f"{task.nodes} nodes with cores are wanted, the cluster has {len(found)}")
        each = replace(task, num_envs=task.workers_per_node or 1, workers=task.workers_per_node or 1)
        actor: Any = ray.remote(num_cpus=0)(Floor)
        self._ray, self._step_s = ray, 0.0
        self._floors = [
            actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(each)
            for node_id in found[: task.nodes]
        ]

    def set_step(self, step_s: float, chunk_steps: int) -> None:
        """Sets how long emulated environments take."""
        self._ray.get([floor.set_step.remote(step_s, chunk_steps) for floor in self._floors])

    def measure(self, seconds: float) -> tuple[int, float, float, float]:
        """As of :class:`Floor`, over all nodes."""
        parts = self._ray.get([floor.measure.remote(seconds) for floor in self._floors])
        counts, elapsed, rates, inside = zip(*parts, strict=True)
        return sum(counts), float(np.mean(elapsed)), sum(rates), float(np.mean(inside))

    def close(self) -> None:
        """Ends them."""
        self._ray.get([floor.close.remote() for floor in self._floors])
        self._ray.shutdown()


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


def _stable_baselines3(task: Task) -> Foreign:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    env = SubprocVecEnv([task.make] * task.num_envs, start_method="forkserver")
    env.reset()
    return Foreign(task.num_envs, "pipe", env.step, task.single_actions(env.action_space), env.close)


def _envpool(task: Task) -> Foreign:
    import envpool

    name = str(task.env_id).rpartition(":")[2].removeprefix("ALE/")
    if name not in envpool.list_all_envs():
        raise LookupError(f"EnvPool has no {name}")
    env = envpool.make(name, env_type="gymnasium", num_envs=task.num_envs, num_threads=task.workers)
    env.reset()
    actions = task.single_actions(env.action_space)
    return Foreign(task.num_envs, "threads, C++ environment", env.step, actions, env.close)


def _pufferlib(task: Task) -> Foreign:
    import pufferlib.emulation
    import pufferlib.vector

    def make(buf: Any = None, seed: int = 0, **_: Any) -> Any:
        return pufferlib.emulation.GymnasiumPufferEnv(env_creator=task.make, buf=buf, seed=seed)

    def start(backend: Any, transport: str, **kwargs: Any) -> Foreign:
        env = pufferlib.vector.make(make, num_envs=task.num_envs, backend=backend, **kwargs)
        env.reset(seed=0)
        return Foreign(task.num_envs, transport, env.step, task.single_actions(env.single_action_space), env.close)

    # Its workers spin, which is best with cores to spare and worst without: it is measured as it does best here.
    serial = start(pufferlib.vector.Serial, "none")
    serial_steps_per_s = _tried_steps_per_s(serial)  # before anybody spins
    workers = max(count for count in range(1, task.workers + 1) if task.num_envs % count == 0)
    spinning = start(pufferlib.vector.Multiprocessing, "shm, busy waiting", num_workers=workers)
    better, other = spinning, serial
    if _tried_steps_per_s(spinning) < serial_steps_per_s:
        better, other = serial, spinning
    other.close()
    return better


def _tried_steps_per_s(adapter: Adapter) -> float:
    """Returns steps per second of a short trial."""
    adapter.advance()
    begin, steps = time.monotonic(), 0
    while time.monotonic() - begin < _TRIAL_S:
        steps += adapter.advance()
    return steps / (time.monotonic() - begin)


def _torchrl(task: Task) -> Foreign:
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


def _ours(task: Task) -> Adapter:
    from rayvec.bench.hosted.ours import Ours

    return Ours(task)


ADAPTERS: dict[str, Callable[[Task], Any]] = {
    "floor": Floor,
    "cluster-floor": ClusterFloor,
    "rayvec": _ours,
    "gymnasium-sync": lambda task: GymnasiumVector(task, asynchronous=False),
    "gymnasium-async": lambda task: GymnasiumVector(task, asynchronous=True),
    "tianshou-subproc": lambda task: TianshouVector(task, "SubprocVectorEnv"),
    "tianshou-shmem": lambda task: TianshouVector(task, "ShmemVectorEnv"),
    "tianshou-ray": lambda task: TianshouVector(task, "RayVectorEnv"),
    "stable-baselines3": _stable_baselines3,
    "envpool": _envpool,
    "pufferlib": _pufferlib,
    "torchrl": _torchrl,
    "rllib": Rllib,
}
"""What steps environments, by the name it has on the command line."""
