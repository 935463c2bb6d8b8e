"""Whole episodes without favour: the mean length of episodes that last 1 or 100 steps by the toss of a coin.

    python benchmarks/episode_bias.py --episodes 10000 --num-envs 64 --per-call 200

The true mean is 50.5. A collector that keeps whichever episodes end first counts too many short ones. Ours gives every
environment its share beforehand; Tianshou's own scheme is shown beside it, over `DummyVectorEnv`, and by
`rayvec.tianshou.Collector`, which follows it unless `unbiased=True`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tyro
from measure import heading, markdown, simulated_cluster
from numpy.typing import NDArray

from rayvec.collect.collector import Collector
from rayvec.testing import CoinEnv
from rayvec.vector.ray_vec_env import RayVecEnv

SHORT, LONG = 1, 100
TRUE_MEAN, DEVIATION = (SHORT + LONG) / 2, (LONG - SHORT) / 2


def coin() -> CoinEnv:
    """An environment whose episodes last 1 or 100 steps."""
    return CoinEnv(SHORT, LONG)


def of_ours(num_envs: int) -> tuple[Callable[[int], NDArray[Any]], Callable[[], None]]:
    """Our Collector: returns what gives the lengths of so many episodes, and what ends it."""
    env = RayVecEnv([coin] * num_envs, workers_per_node=2)
    collector = Collector(env, lambda obs: np.zeros(len(obs), int), seed=0)
    return lambda count: collector.collect(n_episode=count).stats.lens, env.close


def of_tianshou(kind: str, num_envs: int) -> tuple[Callable[[int], NDArray[Any]], Callable[[], None]]:
    """Tianshou's Collector (``"own"``), or the one of ours that stands in its place."""
    import tianshou.data
    from tianshou.algorithm.algorithm_base import Policy
    from tianshou.data import Batch, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv

    from rayvec.tianshou import Collector, RayVectorEnv

    class Zero(Policy):
        """Always the same action."""

        def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
            return Batch(act=np.zeros(len(batch.obs), int))

    policy, buffer = Zero(action_space=CoinEnv.action_space), VectorReplayBuffer(200 * num_envs, num_envs)
    env: Any
    if kind == "own":
        env = DummyVectorEnv([coin] * num_envs)
        collector: Any = tianshou.data.Collector(policy, env, buffer)
    else:
        env = RayVectorEnv([coin] * num_envs, workers_per_node=2)
        collector = Collector(policy, env, buffer, unbiased=kind == "unbiased")
    env.seed(0)
    collector.reset()

    def lens(count: int) -> NDArray[Any]:
        collector.reset_buffer()
        return np.asarray(collector.collect(n_episode=count).lens)

    return lens, env.close


def main(episodes: int = 10_000, num_envs: int = 64, per_call: int = 200) -> None:
    """Measures all schemes and prints the table.

    Args:
        episodes: In all.
        num_envs: Environments.
        per_call: Episodes of one call of collect.
    """
    print(heading(("gymnasium", "ray", "tianshou", "numpy")))
    rows = []
    with simulated_cluster(6):
        schemes = {
            "rayvec.Collector": lambda: of_ours(num_envs),
            "rayvec.tianshou.Collector, unbiased=True": lambda: of_tianshou("unbiased", num_envs),
            "rayvec.tianshou.Collector, Tianshou's rule": lambda: of_tianshou("rule", num_envs),
            "tianshou.data.Collector, DummyVectorEnv": lambda: of_tianshou("own", num_envs),
        }
        for name, make in schemes.items():
            lens, close = make()
            found = np.concatenate([lens(per_call) for _ in range(-(-episodes // per_call))])
            close()
            error = DEVIATION / np.sqrt(len(found))
            off = (found.mean() - TRUE_MEAN) / error
            rows.append(
                [name, f"{len(found):,}", f"{found.mean():.2f}", f"{off:+.1f}", "yes" if abs(off) <= 3 else "no"]
            )
    print(f"True mean {TRUE_MEAN}, {num_envs} environments, {per_call} episodes a call.\n")
    print(markdown(["", "episodes", "mean length", "standard errors off", "within 3"], rows))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
