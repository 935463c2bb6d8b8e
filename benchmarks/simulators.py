"""Slow simulators: steps that wait, resets that take long, environment servers, processes with many threads.

Each part compares ways of running the same environments, measured in turns. Environments that sleep or compute are
stepped by rayvec as it is by default, and by vector environments that start a process for each. --quick takes one short
turn of each part.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import tyro
from gymnasium import spaces
from measure import heading, interleaved

import rayvec
from rayvec.bench.emulated import EmulatedEnv
from rayvec.bench.terminal import ratio, show_table, spread

STEP_S, EPISODE_STEPS, RESET_STEPS = 5e-3, 60, 50
SIMULATOR = (
    "import sys, numpy; a = numpy.ones((384, 384))\nfor line in sys.stdin: a @ a; print(line, end='', flush=True)"
)


class Echo(gymnasium.Env[Any, Any]):
    """Returns the action as its observation; a step may sleep, and a reset as long as 50 steps."""

    observation_space = action_space = spaces.Box(-1, 1, (64,), np.float64)

    def __init__(self, step_s: float = 0.0) -> None:
        self._step_s, self._steps = step_s, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins an episode."""
        time.sleep(RESET_STEPS * self._step_s)
        self._steps = 0
        return np.zeros(64), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Returns the action."""
        time.sleep(self._step_s)
        self._steps += 1
        return action, 0.0, False, bool(self._step_s) and self._steps == EPISODE_STEPS, {}


class Threaded(Echo):
    """Asks a process that multiplies matrices with as many threads as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self._process = subprocess.Popen([sys.executable, "-c", SIMULATOR], stdin=-1, stdout=-1, bufsize=0)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Waits for one product."""
        self._process.stdin.write(b"\n")
        self._process.stdout.readline()
        return super().step(action)

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate(b"")


def steps_per_s(env: Any, actions: Any, seconds: float) -> float:
    """Steps environments for so long."""
    count, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < seconds:
        env.step(actions)
        count += len(actions)
    return count / took


def waiting(step_s: float, busy: bool, num_envs: int, seconds: float) -> dict[str, Callable[[], float]]:
    """Returns what measures environments that take so long for a step, which begin anew in each turn."""
    from stable_baselines3.common.vec_env import SubprocVecEnv
    from tianshou.env import SubprocVectorEnv

    def measured(make: Callable[[Any], Any]) -> float:
        env = make([partial(EmulatedEnv, step_s, busy)] * num_envs)
        env.reset()
        steps_per_s(env, np.zeros(num_envs, np.int64), 0.0)
        found = steps_per_s(env, np.zeros(num_envs, np.int64), seconds)
        env.close()
        return found

    makers: dict[str, Callable[[Any], Any]] = {
        "rayvec": partial(rayvec.RayVecEnv, num_nodes=0),
        "Tianshou SubprocVectorEnv": SubprocVectorEnv,
        "Gymnasium AsyncVectorEnv": gymnasium.vector.AsyncVectorEnv,
        "SB3 SubprocVecEnv": partial(SubprocVecEnv, start_method="fork"),  # its default imports torch in each process
    }
    return {name: partial(measured, make) for name, make in makers.items()}


def answer(port: int) -> None:
    """Echoes 512 bytes over a plain socket."""
    with socket.create_connection(("127.0.0.1", port)) as there:
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := there.recv(512, socket.MSG_WAITALL):
            there.sendall(data)


@contextmanager
def plain_socket() -> Iterator[Callable[[float], float]]:
    """Yields what counts the round trips a second of 512 bytes."""
    process = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        echo = process.Process(target=answer, args=(listener.getsockname()[1],))
        echo.start()
        with listener.accept()[0] as here:
            here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def measure(seconds: float) -> float:
                count, began = 0, time.perf_counter()
                while (took := time.perf_counter() - began) < seconds:
                    here.sendall(bytes(512))
                    here.recv(512, socket.MSG_WAITALL)
                    count += 1
                return count / took

            yield measure
        echo.join()


def show(title: str, ways: Mapping[str, Callable[[], float]], unit: str, repeats: int) -> None:
    """Measures and prints a table, with each way over the first."""
    found = interleaved(ways, repeats)
    first = next(iter(found.values()))
    rows = [[name, spread(values, ",.0f"), ratio(values, first)] for name, values in found.items()]
    show_table(title, ["", unit, "over the first"], rows)


Tables = Iterator[tuple[str, str, dict[str, Callable[[], float]]]]
"""Title, unit and ways of each table."""


def opened(stack: ExitStack, seconds: float, env: Any, **settings: Any) -> Callable[[], float]:
    """Returns what measures environments that stay open."""
    made = stack.enter_context(rayvec.RayVecEnv(env, num_nodes=0, **settings))
    made.reset(seed=1)
    return partial(steps_per_s, made, np.zeros((made.num_envs, 64)), seconds)


def waits(stack: ExitStack, seconds: float) -> Tables:
    """Environments whose steps sleep or compute."""
    kinds = (1e-3, False), (5e-3, False), (2e-2, False), (1e-3, True)
    for (step_s, busy), num_envs in itertools.product(kinds, (4, 16, 64)):
        title = f"{num_envs} environments whose steps {'compute' if busy else 'sleep'} {1e3 * step_s:g} ms"
        yield title, "steps/s", waiting(step_s, busy, num_envs, seconds)


def resets(stack: ExitStack, seconds: float) -> Tables:
    """Resets that take long, without and with an environment to spare."""
    spares = {"0 spare": 0, "1 spare": 1}
    envs: Any = [partial(Echo, STEP_S)] * 4
    ways = {name: opened(stack, seconds, envs, workers_per_node=4, spare_envs=count) for name, count in spares.items()}
    title = f"Resets that take {RESET_STEPS} steps of {1e3 * STEP_S:g} ms, episodes of {EPISODE_STEPS}, 4 environments"
    yield title, "steps/s", ways


def servers(stack: ExitStack, seconds: float) -> Tables:
    """An environment server beside a worker and a plain socket."""
    command = [sys.executable, os.path.join(rayvec.__path__[0], "env_server.py"), "simulators:Echo"]
    made = rayvec.EnvServers(1, command=command)
    stack.callback(made.close)
    socket_trips = stack.enter_context(plain_socket())
    ways = {
        "plain socket": partial(socket_trips, seconds),
        "worker": opened(stack, seconds, [Echo], workers_per_node=1),
        "server, in this process": opened(stack, seconds, made, workers_per_node=0),
    }
    yield "Round trips of 64 floats", "round trips/s", ways


def threads(stack: ExitStack, seconds: float) -> Tables:
    """Simulators with threads of their own."""
    simulators = {"2 of 1 core": (2, 1), "1 of 2 cores": (1, 2), "2 without a word": (2, None)}
    ways = {
        name: opened(stack, seconds, [Threaded] * count, workers_per_node=count, cores_per_env=cores)
        for name, (count, cores) in simulators.items()
    }
    yield "Simulators with threads of their own", "steps/s", ways


PARTS: dict[str, Callable[[ExitStack, float], Tables]] = {
    "waits": waits,
    "resets": resets,
    "servers": servers,
    "threads": threads,
}


def main(parts: tuple[str, ...] = tuple(PARTS), repeats: int = 5, seconds: float = 3.0, quick: bool = False) -> None:
    """Measures each part and prints its tables.

    Args:
        parts: Which parts.
        repeats: Turns of each way.
        seconds: Of a turn.
        quick: One short turn of each part.
    """
    repeats, seconds = (1, 0.3) if quick else (repeats, seconds)
    paths = [os.path.dirname(__file__), os.path.dirname(rayvec.__path__[0]), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # where servers find what they import
    print(heading())
    for name in parts:
        with ExitStack() as stack:
            for title, unit, ways in PARTS[name](stack, seconds):
                show(title, ways, unit, repeats)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
