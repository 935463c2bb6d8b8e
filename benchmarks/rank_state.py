"""How long a group of ranks waits for the state that it keeps for restarts: 18 million parameters, no time in between.

    python benchmarks/rank_state.py --updates 30

Two ranks of this machine without Ray learn with PPO. The last line is the share of the updates' time that they waited.
"""

from __future__ import annotations

import time
from functools import partial

import tyro
from measure import check_repeats, heading

from rayvec import Collector, LearnerGroup, Policy, PPOConfig, RayVecEnv
from rayvec.learners.ppo import PPOLearner

CONFIG = PPOConfig(
    num_envs=8,
    num_steps=32,
    minibatch_size=128,
    num_epochs=1,
    hidden_sizes=(2995, 2995),
    anneal_lr=False,
    compile=False,
)


def main(updates: int = 30) -> None:
    """Learns from one batch again and again, and prints how long the group waited for its state.

    Args:
        updates: How many updates.
    """
    check_repeats(updates, "--updates")
    print(heading())
    with RayVecEnv("CartPole-v1", CONFIG.num_envs, num_nodes=0, workers_per_node=0) as env:
        make = partial(PPOLearner, env.single_observation_space, env.single_action_space, CONFIG)
        learner = make()
        batch = Collector(env, Policy(learner.module), seed=1).collect(n_step=CONFIG.num_envs * CONFIG.num_steps)
    with LearnerGroup(make, 2, num_nodes=0) as group:
        waits_s: list[float] = []
        finish = group.group._finish_checkpoint

        def timed_finish() -> None:
            began_s, is_pending = time.monotonic(), group.group._pending_checkpoint is not None
            finish()
            if is_pending:
                waits_s.append(time.monotonic() - began_s)

        group.update(batch)
        group.group._finish_checkpoint = timed_finish  # type: ignore[method-assign]
        began_s = time.monotonic()
        for _ in range(updates):
            group.update(batch)
        all_s = time.monotonic() - began_s
    num_parameters = sum(parameter.numel() for parameter in learner.module.parameters())
    print(f"{num_parameters:,} parameters, {1e3 * all_s / updates:,.0f} ms an update")
    print(f"{len(waits_s)} states kept, {sum(waits_s):.2f} s waited: {sum(waits_s) / all_s:.1%} of the time")


if __name__ == "__main__":
    tyro.cli(main)
