"""Simulators that don't fit a Python worker: resets that take long, environment servers, processes with many threads.

Each part compares ways of running the same environments, measured in turns. --quick takes one short turn.
"""

from __future__ import annotations

import argparse
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
from gymnasium import spaces
from measure import heading, interleaved, share_modules

import rayvec
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
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(b"\n")
        self._process.stdout.readline()
        return super().step(action)

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate(b"")


def steps_per_s(env: Any, seconds: float) -> float:
    """Steps environments for so long."""
    actions, count, began = np.zeros((env.num_envs, 64)), 0, time.perf_counter()
    while (took := time.perf_counter() - began) < seconds:
        env.step(actions)
        count += env.num_envs
    return count / took


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


def show(title: str, ways: Mapping[str, Callable[[float], float]], unit: str, repeats: int, seconds: float) -> None:
    """Measures and prints a table, with each way over the first."""
    found = interleaved({name: partial(measure, seconds) for name, measure in ways.items()}, repeats)
    first = next(iter(found.values()))
    rows = [[name, spread(values, ",.0f"), ratio(values, first)] for name, values in found.items()]
    show_table(title, ["", unit, "over the first"], rows)


def main() -> None:
    """Measures each part and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    repeats, seconds = (1, 0.3) if args.quick else (args.repeats, args.seconds)
    share_modules()
    os.environ["PYTHONPATH"] += os.pathsep + os.path.dirname(rayvec.__path__[0])
    print(heading())
    with ExitStack() as stack:

        def opened(env: Any, **settings: Any) -> Callable[[float], float]:
            made = stack.enter_context(rayvec.RayVecEnv(env, num_nodes=0, **settings))
            made.reset(seed=1)
            return partial(steps_per_s, made)

        slow = {
            f"{spare} spare": opened([partial(Echo, STEP_S)] * 4, workers_per_node=4, spare_envs=spare)
            for spare in (0, 1)
        }
        title = (
            f"Resets that take {RESET_STEPS} steps of {1e3 * STEP_S:g} ms, episodes of {EPISODE_STEPS}, 4 environments"
        )
        show(title, slow, "steps/s", repeats, seconds)
        command = [sys.executable, os.path.join(rayvec.__path__[0], "env_server.py"), "simulators:Echo"]
        servers = rayvec.EnvServers(1, command=command)
        stack.callback(servers.close)
        trips = {"plain socket": stack.enter_context(plain_socket()), "worker": opened([Echo], workers_per_node=1)}
        trips["server, in this process"] = opened(servers, workers_per_node=0)
        show("Round trips of 64 floats", trips, "round trips/s", repeats, seconds)
        simulators = {"2 of 1 core": (2, 1), "1 of 2 cores": (1, 2), "2 without a word": (2, None)}
        threads = {
            name: opened([Threaded] * count, workers_per_node=count, cores_per_env=cores)
            for name, (count, cores) in simulators.items()
        }
        show("Simulators with threads of their own", threads, "steps/s", repeats, seconds)


if __name__ == "__main__":
    main()
