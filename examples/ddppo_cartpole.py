"""DD-PPO: train CartPole-v1 on decentralized ranks, each of which samples and learns. No Ray is needed for it.

python examples/ddppo_cartpole.py

On a cluster, pass num_nodes: each rank is then an actor on one of the nodes.
"""

import json

import tyro

import rayvec


def main(total_steps: int = 100_000, num_learners: int = 2) -> None:
    """Trains, and prints the result and how often a rank was stopped because the others had their steps."""
    config = rayvec.PPOConfig(
        env_id="CartPole-v1",
        total_steps=total_steps,
        num_envs=16,
        seed=1,
        learners="decentralized",
        num_learners=num_learners,
        sync_fraction=0.6,
        min_share=0.25,
    )
    result = rayvec.train(config)
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    cut = sum(line["ranks_cut"] for line in lines)
    print(f"mean greedy return {result.eval_return_mean:.1f} after {result.total_steps:,} steps")
    print(f"ranks stopped early: {cut} times in {len(lines)} iterations of {num_learners} ranks")


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.Positional,))
