"""Whole chunks into a VectorReplayBuffer against Tianshou's ``add`` of the same steps.

    python benchmarks/bulk_insert.py [--rounds 15]

The two of each pair alternate in one process. Printed are medians and the spread of the middle half.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tyro
from tianshou.data import Batch, PrioritizedVectorReplayBuffer, VectorReplayBuffer

from rayvec.data import Chunk, ChunkInfo, ChunkInfos
from rayvec.tianshou.collect.buffers import add_chunk

Infos = Callable[[int, bool], dict[str, Any]]


def make_chunk(steps: int, envs: int, shape: tuple[int, ...], dtype: Any, infos: Infos, length: int = 40) -> Chunk:
    """Returns a chunk of episodes of about `length` steps, of random observations."""
    rng = np.random.default_rng(0)

    def make_obs(*lead: int) -> Any:
        return (255 * rng.random((*lead, *shape), np.float32)).astype(dtype)

    terminated = rng.random((steps, envs)) < 1 / length
    index = np.argwhere(terminated)
    said = [(t, n, infos(t, bool(terminated[t, n]))) for t in range(steps) for n in range(envs)]
    return Chunk(
        env_ids=np.arange(envs),
        obs=make_obs(steps, envs),
        act=rng.integers(0, 2, (steps, envs)),
        rew=np.ones((steps, envs)),
        terminated=terminated,
        truncated=np.zeros((steps, envs), bool),
        valid=np.ones((steps, envs), bool),
        last_obs=make_obs(envs),
        final_index=index,
        final_obs=make_obs(len(index)),
        infos=ChunkInfos.of(ChunkInfo(*item) for item in said if item[2]),
    )


def add_in_order(buffer: Any, chunk: Chunk) -> None:
    """Adds a chunk as Tianshou's Collector adds the answers of a vector environment."""
    infos = {(item.t, item.n): item.info for item in chunk.infos}
    following, done = chunk.next_obs(), chunk.done
    ids = np.arange(chunk.num_envs)
    for t in range(chunk.num_steps):
        buffer.add(
            Batch(
                obs=chunk.obs[t],
                act=chunk.act[t],
                policy=Batch(),
                obs_next=following[t],
                rew=chunk.rew[t],
                terminated=chunk.terminated[t],
                truncated=chunk.truncated[t],
                done=done[t],
                info=np.array([{**infos.get((t, n), {}), "env_id": n} for n in range(chunk.num_envs)], object),
            ),
            buffer_ids=ids,
        )


def episode_info(t: int, done: bool) -> dict[str, Any]:
    """What RecordEpisodeStatistics says."""
    return {"episode": {"r": 40.0, "l": 40, "t": 0.5}} if done else {}


def dense_info(t: int, done: bool) -> dict[str, Any]:
    """What HalfCheetah says."""
    return {"x_position": 0.1 * t, "x_velocity": 0.5, "reward_forward": 0.25, "reward_ctrl": -0.125}


def measure(function: Callable[[], Any], rounds: int, other: Callable[[], Any]) -> tuple[list[float], list[float]]:
    """Runs two functions alternately; returns the seconds of each."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for place, run in enumerate((function, other)):
            begin = time.perf_counter()
            run()
            times[place].append(time.perf_counter() - begin)
    return times


def main(rounds: int = 15) -> None:
    """Prints one line for each case."""
    no_info: Infos = lambda t, done: {}  # noqa: E731
    vector: Callable[..., Any] = VectorReplayBuffer
    prioritized: Callable[..., Any] = lambda size, n: PrioritizedVectorReplayBuffer(size, n, alpha=0.6, beta=0.4)  # noqa: E731
    cases: list[tuple[str, tuple[Any, ...], Infos, int, Callable[..., Any]]] = [
        ("CartPole [128, 64], env_id", (128, 64, (4,), np.float32), no_info, rounds, vector),
        ("CartPole [128, 64], episode infos", (128, 64, (4,), np.float32), episode_info, rounds, vector),
        ("CartPole [128, 64], prioritized", (128, 64, (4,), np.float32), episode_info, rounds, prioritized),
        ("HalfCheetah [128, 64], 4 infos a step", (128, 64, (17,), np.float64), dense_info, rounds, vector),
        ("images [32, 16] of 4x84x84", (32, 16, (4, 84, 84), np.uint8), no_info, rounds, vector),
    ]
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {rounds} rounds")
    print(f"{'case':40} {'add, ms':>18} {'add_chunk, ms':>18} {'ratio':>7}")
    for name, shape, infos, count, make in cases:
        chunk = make_chunk(*shape, infos)
        size = 2 * chunk.num_steps * chunk.num_envs
        one, other = make(size, chunk.num_envs), make(size, chunk.num_envs)
        add_in_order(one, chunk)
        add_chunk(other, chunk)
        slow, fast = measure(lambda: add_in_order(one, chunk), count, lambda: add_chunk(other, chunk))  # noqa: B023
        texts = []
        for times in (slow, fast):
            low, middle, high = np.percentile(times, (25, 50, 75)) * 1e3
            texts.append(f"{middle:.2f} ({low:.1f}-{high:.1f})")
        print(f"{name:40} {texts[0]:>18} {texts[1]:>18} {np.median(slow) / np.median(fast):7.1f}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
