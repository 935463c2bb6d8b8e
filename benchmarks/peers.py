"""Steps/s of rayvec beside the vector environments and collectors of other libraries, on the same cores.

    python benchmarks/peers.py --env-id CartPole-v1 HalfCheetah-v5 ale_py:ALE/Breakout-v5 --venvs VENVS
    python benchmarks/peers.py --hidden-sizes 64 64 --num-envs 128      with a policy network, in collectors
    python benchmarks/peers.py --step-s 0.01 --nodes 2 --num-envs 16 --workers 16      on simulated nodes
    python benchmarks/peers.py --quick

Actions are random and drawn beforehand, unless --hidden-sizes names a network. The upper bound is independent
processes, one for each worker. A peer that can put several environments into one process has as many as --workers, the
others one for each environment. Tianshou's RayVectorEnv has at most 16 real environments, since each takes seconds to
start. EnvPool brings its own environments, written in C++. Libraries that can't live beside rayvec have a virtual
environment of their own: ``benchmarks/make_peer_venvs.sh VENVS``.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

Advance = Callable[[], int]
Peer = Callable[[dict[str, Any]], Iterator[Advance]]
T = 128


def make(task: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    """Makes one environment."""
    if task["step_s"]:
        from rayvec.bench.emulated import EmulatedEnv

        return EmulatedEnv(task["step_s"])
    module, _, name = task["env_id"].rpartition(":")
    if module:  # some versions of Gymnasium fail when they import it a second time
        __import__(module)
    return gymnasium.make(name)


def stepping(env: Any, task: dict[str, Any], num_envs: int | None = None) -> Advance:
    """Returns what steps a vector environment with random actions."""
    space, count = make(task).action_space, num_envs or task["num_envs"]
    space.seed(0)
    batches = itertools.cycle([np.stack([space.sample() for _ in range(count)]) for _ in range(64)])

    def advance() -> int:
        env.step(next(batches))
        return count

    return advance


def rayvec(task: dict[str, Any], in_chunks: bool = False) -> Iterator[Advance]:
    """rayvec: `env.step`, or chunks of 128 steps with the policy in the workers, the next one prefetched."""
    from rayvec import Collector, Policy, RayVecEnv
    from rayvec.bench.ways import RandomActions
    from rayvec.policies.networks import ActorCritic

    where = {"num_nodes": task["nodes"], "workers_per_node": task["workers"] // max(1, task["nodes"])}
    with RayVecEnv([lambda: make(task)] * task["num_envs"], address=task["address"], **where) as env:
        env.reset(seed=0)
        policy: Any = RandomActions([np.asarray(env.action_space.sample()) for _ in range(64)])
        if task["hidden_sizes"]:
            spaces = env.single_observation_space, env.single_action_space
            policy = Policy(ActorCritic(*spaces, task["hidden_sizes"]))
        if in_chunks or task["hidden_sizes"]:
            inference: Any = "worker" if in_chunks else "driver"
            collector = Collector(env, policy, prefetch=in_chunks, inference=inference)
            steps = task["num_envs"] * (min(T, max(1, round(2 / task["step_s"]))) if task["step_s"] else T)
            yield lambda: int(collector.collect(n_step=steps).stats.n_collected_steps)
        else:
            yield stepping(env, task)


def upper_bound(task: dict[str, Any]) -> Iterator[Advance]:
    """Independent processes that step one environment each."""
    from rayvec.bench.upper_bound import UpperBound
    from rayvec.envs.factory import EnvFactory

    factory = EnvFactory.build([lambda: make(task)]).to_bytes()
    with contextlib.closing(UpperBound(factory, task["workers"])) as bound:
        yield lambda: round(0.25 * bound.measure(0.25))


def gymnasium_vector(task: dict[str, Any], kind: str) -> Iterator[Advance]:
    """Gymnasium's vector environments."""
    kwargs = {"context": "forkserver"} if kind == "AsyncVectorEnv" else {}
    with contextlib.closing(getattr(gymnasium.vector, kind)([lambda: make(task)] * task["num_envs"], **kwargs)) as env:
        env.reset(seed=0)
        yield stepping(env, task)


def tianshou(task: dict[str, Any], kind: str) -> Iterator[Advance]:
    """Tianshou's vector environments; they do not reset by themselves, so Gymnasium's wrapper begins new episodes."""
    import tianshou.env

    count = task["num_envs"]
    if kind == "RayVectorEnv":
        import ray

        ray.init(address=task["address"] or "local", log_to_driver=False, logging_level=40)
        count = count if task["step_s"] else min(count, 16)
    env = getattr(tianshou.env, kind)([lambda: gymnasium.wrappers.Autoreset(make(task))] * count)
    env.reset()
    yield stepping(env, task, count)
    env.close()


def tianshou_collector(task: dict[str, Any]) -> Iterator[Advance]:
    """Tianshou's Collector over SubprocVectorEnv, of at most 64 environments with discrete actions."""
    import tianshou.env
    import torch
    from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.discrete import DiscreteActor

    torch.set_num_threads(1)
    space, count = make(task).action_space, min(task["num_envs"], 64)
    if not isinstance(space, gymnasium.spaces.Discrete):
        raise LookupError("this peer has a policy for discrete actions alone")
    env = tianshou.env.SubprocVectorEnv([lambda: make(task)] * count)
    shape = make(task).observation_space.shape or ()
    body = Net(state_shape=shape, hidden_sizes=list(task["hidden_sizes"]), activation=torch.nn.Tanh)
    actor = DiscreteActor(preprocess_net=body, action_shape=int(space.n), softmax_output=False)
    policy = DiscreteActorPolicy(actor=actor, action_space=space)
    collector = Collector(policy, env, VectorReplayBuffer(2 * T * count, count))
    collector.reset()
    yield lambda: int(collector.collect(n_step=8 * count).n_collected_steps)
    env.close()


def stable_baselines3(task: dict[str, Any], kind: str = "") -> Iterator[Advance]:
    """Stable-Baselines3's SubprocVecEnv, or rayvec's vector environment for it."""
    if kind == "rayvec":
        from rayvec.stable_baselines3 import RayVecEnv

        env: Any = RayVecEnv([lambda: make(task)] * task["num_envs"], num_nodes=0, workers_per_node=task["workers"])
    else:
        from stable_baselines3.common.vec_env import SubprocVecEnv

        env = SubprocVecEnv([lambda: make(task)] * task["num_envs"], start_method="forkserver")
    env.reset()
    yield stepping(env, task)
    env.close()


def envpool(task: dict[str, Any]) -> Iterator[Advance]:
    """EnvPool's own environment of that name, which its threads step."""
    import envpool

    name = str(task["env_id"]).rpartition(":")[2].removeprefix("ALE/")
    if name not in envpool.list_all_envs():
        raise LookupError(f"EnvPool has no {name}")
    env = envpool.make(name, env_type="gymnasium", num_envs=task["num_envs"], num_threads=task["workers"])
    env.reset()
    yield stepping(env, task)


def pufferlib(task: dict[str, Any], backend: str) -> Iterator[Advance]:
    """PufferLib. Its workers never block, so they are stopped while others are measured."""
    import pufferlib.emulation
    import pufferlib.vector

    known = inspect.signature(pufferlib.emulation.GymnasiumPufferEnv).parameters

    def create(**given: Any) -> Any:
        named = {name: value for name, value in given.items() if name in known}  # version 2 added buf and seed
        return pufferlib.emulation.GymnasiumPufferEnv(env_creator=lambda: make(task), **named)

    workers = max(count for count in range(1, task["workers"] + 1) if task["num_envs"] % count == 0)
    kwargs = {} if backend == "Serial" else {"num_workers": workers}
    kind = getattr(pufferlib.vector, backend)
    env = pufferlib.vector.make(create, num_envs=task["num_envs"], backend=kind, **kwargs)
    env.reset(seed=0)
    step, processes = stepping(env, task), getattr(env, "processes", ())

    def signal_all(number: signal.Signals) -> None:
        for process in processes:
            os.kill(process.pid, number)

    def advance() -> int:
        signal_all(signal.SIGCONT)
        count = sum(step() for _ in range(200))
        signal_all(signal.SIGSTOP)
        return count

    yield advance
    signal_all(signal.SIGCONT)
    env.close()


def torchrl(task: dict[str, Any]) -> Iterator[Advance]:
    """TorchRL's ParallelEnv: one process for each environment."""
    import torch
    from torchrl.envs import GymWrapper, ParallelEnv

    torch.set_num_threads(1)
    env = ParallelEnv(task["num_envs"], lambda: GymWrapper(make(task)), mp_start_method="fork")
    state = env.reset()
    actions = itertools.cycle([env.rand_action()["action"] for _ in range(16)])

    def advance() -> int:
        nonlocal state
        state["action"] = next(actions)
        _, state = env.step_and_maybe_reset(state)
        return int(task["num_envs"])

    yield advance
    env.close()


def rllib(task: dict[str, Any]) -> Iterator[Advance]:
    """RLlib's env runner in this process, with the environments of one worker."""
    import torch
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
    from ray.tune.registry import register_env

    torch.set_num_threads(1)
    register_env("bench", lambda _: make(task))
    count, random = task["num_envs"] // task["workers"], not task["hidden_sizes"]
    model = DefaultModelConfig(fcnet_hiddens=list(task["hidden_sizes"] or [16]), fcnet_activation="tanh")
    config = PPOConfig().environment("bench").rl_module(model_config=model)
    config = config.env_runners(num_envs_per_env_runner=count, num_env_runners=0)
    runner: Any = SingleAgentEnvRunner(config=config, worker_index=0)
    yield lambda: sum(map(len, runner.sample(num_timesteps=16 * count, random_actions=random)))
    runner.stop()


PEERS: dict[str, tuple[Peer, dict[str, Any], str]] = {
    "rayvec, env.step": (rayvec, {}, ""),
    "rayvec, chunks": (rayvec, {"in_chunks": True}, ""),
    "upper bound": (upper_bound, {}, ""),
    "Gymnasium, SyncVectorEnv": (gymnasium_vector, {"kind": "SyncVectorEnv"}, ""),
    "Gymnasium, AsyncVectorEnv": (gymnasium_vector, {"kind": "AsyncVectorEnv"}, ""),
    "Tianshou, SubprocVectorEnv": (tianshou, {"kind": "SubprocVectorEnv"}, ""),
    "Tianshou, ShmemVectorEnv": (tianshou, {"kind": "ShmemVectorEnv"}, ""),
    "Tianshou, RayVectorEnv": (tianshou, {"kind": "RayVectorEnv"}, ""),
    "Stable-Baselines3": (stable_baselines3, {}, "stable-baselines3"),
    "Stable-Baselines3, rayvec": (stable_baselines3, {"kind": "rayvec"}, ""),
    "EnvPool": (envpool, {}, "envpool"),
    "PufferLib, Serial": (pufferlib, {"backend": "Serial"}, "pufferlib"),
    "PufferLib, Multiprocessing": (pufferlib, {"backend": "Multiprocessing"}, "pufferlib"),
    "TorchRL": (torchrl, {}, "torchrl"),
    "RLlib": (rllib, {}, "rllib"),
}
"""What makes a peer, its arguments, and its directory in --venvs."""
COLLECTORS: dict[str, tuple[Peer, dict[str, Any], str]] = {
    **{name: PEERS[name] for name in ("rayvec, env.step", "rayvec, chunks", "RLlib")},
    "Tianshou's Collector": (tianshou_collector, {}, ""),
}
"""Those that act by a policy network."""


def peer(task: dict[str, Any]) -> Iterator[Advance]:
    """Makes a peer by its name; see :mod:`peer_process`."""
    function, arguments, _ = (PEERS | COLLECTORS)[task["name"]]
    yield from function(task, **arguments)


def main(
    env_id: tuple[str, ...] = ("CartPole-v1",),
    num_envs: int = 64,
    workers: int = len(os.sched_getaffinity(0)),
    hidden_sizes: tuple[int, ...] = (),
    step_s: float = 0.0,
    nodes: int = 0,
    venvs: Path = Path("venvs"),
    only: tuple[str, ...] = (),
    repeats: int = 5,
    window: float = 1.0,
    quick: bool = False,
) -> None:
    """Measures and prints a table for each environment.

    Args:
        env_id: Gymnasium ids.
        num_envs: Environments.
        workers: Processes or threads of peers that put several environments into one.
        hidden_sizes: Hidden layers of a policy network; unset: random actions.
        step_s: Seconds that emulated environments sleep for a step; unset: those of --env-id.
        nodes: Simulated nodes for rayvec and Tianshou's RayVectorEnv; 0: this machine without Ray.
        venvs: Directory of the virtual environments.
        only: Which peers.
        repeats: Windows of each.
        window: Seconds of a window.
        quick: Two short windows of 16 environments, and no peer that starts Ray or lives elsewhere.
    """
    from measure import check_only, heading, measure_peers, simulated_cluster

    from rayvec.bench.terminal import ratio, show_table, spread

    known = COLLECTORS if hidden_sizes else PEERS
    check_only(only, known)
    names = [name for name in only or known if not quick or not (known[name][2] or "Ray" in name)]
    if quick:
        num_envs, repeats, window = min(num_envs, 16), 2, 0.3
    print(heading())
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(simulated_cluster(0, *[workers // nodes * len(names)] * nodes)) if nodes else None
        for name_of_env in env_id:
            task = {"env_id": name_of_env, "num_envs": num_envs, "workers": workers, "hidden_sizes": hidden_sizes}
            task |= {"step_s": step_s, "nodes": nodes, "address": cluster.address if cluster else None}
            tasks = {name: {**task, "name": name} for name in names}
            places = {name: venvs / known[name][2] for name in names if known[name][2] and venvs.exists()}
            found = measure_peers("peers:peer", tasks, places, {"OMP_NUM_THREADS": "1"}, window, repeats)
            rates = {name: [each.count / each.wall_s for each in windows] for name, windows in found.items()}
            base = rates[next(iter(rates))]
            per_cpu = {name: spread([w.count / max(w.cpu_s, 1e-3) for w in each]) for name, each in found.items()}
            rows = [
                [name, spread(rates[name]), ratio(rates[name], base), per_cpu[name]]
                if name in rates
                else [name, "not measured, see above", "", ""]
                for name in names
            ]
            header = ["", "steps/s", f"of {next(iter(rates))}", "steps per CPU-second"]
            show_table(f"{'emulated' if step_s else name_of_env}, {num_envs} environments", header, rows)


if __name__ == "__main__":
    import tyro

    tyro.cli(main, description=__doc__)
