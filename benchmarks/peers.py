"""`rayvec bench compare` and `rayvec bench scaling` beside the vector environments of other libraries.

    python benchmarks/peers.py compare --env-id CartPole-v1 HalfCheetah-v5 --peer-venv rllib=VENVS/rllib
    python benchmarks/peers.py scaling --nodes 1 2 4

The options are those of the commands in the package, with more peers by default. Each function and class below is
an adapter of the harness (rayvec/bench/harness); a process of its own makes it, with its library's own interpreter.
"""

from __future__ import annotations

import inspect
import os
import signal
from functools import partial
from typing import Annotated, Any

import gymnasium

from rayvec.bench.harness.task import Adapter, Task
from rayvec.bench.harness.vectors import VectorAdapter

_RAY = {"log_to_driver": False, "logging_level": 40}


class TianshouVector(VectorAdapter):
    """Tianshou's; it does not reset by itself, so Gymnasium's wrapper begins new episodes."""

    def __init__(self, task: Task, kind: str, transport: str) -> None:
        import tianshou.env

        make: Any = task.make if task.env_id is None else lambda: gymnasium.wrappers.Autoreset(task.make())
        super().__init__(getattr(tianshou.env, kind)([make] * task.num_envs), task.num_envs, transport, task.actions())
        self.env.seed(0)
        self.env.reset()

    def set_step(self, step_s: float, chunk_steps: int, inference: str | None) -> None:
        """Sets how long emulated environments take."""
        self.env.set_env_attr("step_s", step_s)


tianshou_subproc = partial(TianshouVector, kind="SubprocVectorEnv", transport="pipe")
tianshou_shmem = partial(TianshouVector, kind="ShmemVectorEnv", transport="pipe, shm")


def tianshou_ray(task: Task) -> TianshouVector:
    """Makes Tianshou's ``RayVectorEnv``, of at most 16 real environments: each takes seconds to start."""
    import ray

    ray.init(address=task.address or "local", **_RAY)
    few = task if task.env_id is None else Task(**{**vars(task), "num_envs": min(task.num_envs, 16)})
    found = TianshouVector(few, "RayVectorEnv", "ray actors")
    found.spans_nodes = True
    return found


def stable_baselines3(task: Task) -> VectorAdapter:
    """Makes Stable-Baselines3's ``SubprocVecEnv``: one process for each environment."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    env = SubprocVecEnv([task.make] * task.num_envs, start_method="forkserver")
    env.reset()
    return VectorAdapter(env, task.num_envs, "pipe", task.actions())


def rayvec_stable_baselines3(task: Task) -> VectorAdapter:
    """Makes rayvec's vector environment for Stable-Baselines3, without Ray."""
    from rayvec.stable_baselines3 import RayVecEnv

    env = RayVecEnv([task.make] * task.num_envs, num_nodes=0, workers_per_node=task.workers)
    env.reset()
    return VectorAdapter(env, task.num_envs, "shm", task.actions())


def envpool(task: Task) -> VectorAdapter:
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
    return VectorAdapter(env, task.num_envs, "threads, C++ environment", task.actions())


class Spinning(VectorAdapter):
    """PufferLib, whose worker processes never block: they are stopped between their turns."""

    def wake(self) -> None:
        """Resumes the workers."""
        self._signal(signal.SIGCONT)

    def rest(self) -> None:
        """Stops the workers."""
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Ends it; a stopped process would not receive the request."""
        self.wake()
        super().close()

    def _signal(self, number: signal.Signals) -> None:
        for process in getattr(self.env, "processes", ()):
            os.kill(process.pid, number)


def _pufferlib(task: Task, backend: str, transport: str) -> Spinning:
    import pufferlib.emulation
    import pufferlib.vector

    known = inspect.signature(pufferlib.emulation.GymnasiumPufferEnv).parameters

    def make(**given: Any) -> Any:
        named = {name: value for name, value in given.items() if name in known}  # version 2 added buf and seed
        return pufferlib.emulation.GymnasiumPufferEnv(env_creator=task.make, **named)

    workers = max(count for count in range(1, task.workers + 1) if task.num_envs % count == 0)
    kwargs = {} if backend == "Serial" else {"num_workers": workers}
    kind = getattr(pufferlib.vector, backend)
    env = pufferlib.vector.make(make, num_envs=task.num_envs, backend=kind, **kwargs)
    env.reset(seed=0)
    return Spinning(env, task.num_envs, transport, task.actions())


pufferlib_serial = partial(_pufferlib, backend="Serial", transport="none")
"""Best without cores to spare."""
pufferlib = partial(_pufferlib, backend="Multiprocessing", transport="shm, busy waiting")
"""Best with cores to spare."""


def pufferlib_ray(task: Task) -> Spinning:
    """Makes PufferLib's Ray backend."""
    import ray

    ray.init("local", num_cpus=task.workers, include_dashboard=False, **_RAY)
    return _pufferlib(task, "Ray", "ray")


class TorchRL(VectorAdapter):
    """TorchRL's ``ParallelEnv``: one process for each environment."""

    def __init__(self, env: Any, num_envs: int) -> None:
        super().__init__(env, num_envs, "shm, pipe", [env.rand_action()["action"] for _ in range(16)])
        self._state = env.reset()

    def advance(self) -> int:
        """Steps all."""
        self._state["action"] = self.next_actions()
        _, self._state = self.env.step_and_maybe_reset(self._state)
        return self.num_envs


def torchrl(task: Task) -> TorchRL:
    """Makes TorchRL's ``ParallelEnv``."""
    import torch
    from torchrl.envs import GymWrapper, ParallelEnv

    torch.set_num_threads(1)
    env = ParallelEnv(task.num_envs, lambda: GymWrapper(task.make()), mp_start_method="fork")
    env.reset()
    return TorchRL(env, task.num_envs)


class Rllib(Adapter):
    """RLlib's env runners, one per core, with random actions."""

    transport = "ray, whole episodes"

    def __init__(self, task: Task) -> None:
        import ray
        from ray.rllib.algorithms.ppo import PPOConfig
        from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
        from ray.tune.registry import register_env

        ray.init("local", num_cpus=task.workers + 1, include_dashboard=False, **_RAY)
        register_env("bench", lambda _: task.make())
        self._each = max(1, task.num_envs // task.workers)
        config = (
            PPOConfig()
            .environment("bench")
            .env_runners(num_envs_per_env_runner=self._each, rollout_fragment_length=128)
            .rl_module(model_config={"conv_filters": [[16, 8, 4], [32, 4, 2]]})  # which random actions never evaluate
        )
        runner: Any = ray.remote(num_cpus=1)(SingleAgentEnvRunner)
        self._runners = [runner.remote(config=config, worker_index=k + 1) for k in range(task.workers)]
        self.num_envs, self._ray = self._each * task.workers, ray

    def advance(self) -> int:
        """Lets every runner take 128 steps of its environments."""
        steps = 128 * self._each
        refs = [runner.sample.remote(num_timesteps=steps, random_actions=True) for runner in self._runners]
        return sum(len(episode) for episodes in self._ray.get(refs) for episode in episodes)

    def close(self) -> None:
        """Ends it."""
        self._ray.shutdown()


rllib = Rllib

NAMES = (
    *("tianshou_subproc", "tianshou_shmem", "tianshou_ray"),
    *("stable_baselines3", "rayvec_stable_baselines3", "envpool"),
    *("pufferlib_serial", "pufferlib", "torchrl", "rllib"),
)


def main() -> None:
    """Runs a command of the package with these peers."""
    import tyro
    from measure import run_command

    from rayvec.bench import compare, scaling
    from rayvec.bench.settings import Compare, Scaling

    peers = (*Compare().peer, *(f"peers:{name}" for name in NAMES))
    compared, scaled = Compare(peer=peers), Scaling(peer=("peers:tianshou_ray", "peers:tianshou_subproc"))
    commands = (
        Annotated[Compare, tyro.conf.subcommand("compare", default=compared)]
        | Annotated[Scaling, tyro.conf.subcommand("scaling", default=scaled)]
    )
    options = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
    settings: Any = tyro.cli(commands, description=__doc__, config=options)  # type: ignore[arg-type]
    run_command(compare.run if isinstance(settings, Compare) else scaling.run, settings)


if __name__ == "__main__":
    main()
