"""Decentralized training on a cluster: CartPole-v1 on two nodes of Ray, simulated on this machine.

python examples/cluster_cartpole.py

Each node has a rank that samples and learns. The output says where the ranks are, what crossed the network, and how
often a rank was stopped because the others had their steps. On a real cluster, pass its address instead.
"""

import json
import os
import tempfile

import ray
import tyro
from ray.cluster_utils import Cluster

import rayvec


def main(total_steps: int = 100_000, num_nodes: int = 2) -> None:
    """Starts the nodes, trains, and prints what happened."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as directory:
        os.environ["RAY_TMPDIR"] = directory  # so that no other Ray of this machine is disturbed
        os.environ["RAY_worker_niceness"] = "0"  # Ray would give its workers a low priority
        node = {"num_cpus": 1, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=node)
        for _ in range(num_nodes - 1):
            cluster.add_node(**node)
        ray.init(cluster.address)
        try:
            train(total_steps, num_nodes)
        finally:
            ray.shutdown()
            cluster.shutdown()


def train(total_steps: int, num_nodes: int) -> None:
    """Trains on the Ray that is initialised."""
    config = rayvec.PPOConfig(
        env_id="CartPole-v1",
        total_steps=total_steps,
        seed=1,
        learners="decentralized",
        num_learners=num_nodes,
        num_nodes=num_nodes,
        workers_per_node=1,
    )
    result = rayvec.train(config)
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    cut = sum(line["ranks_cut"] for line in lines)
    print(f"mean greedy return {result.eval_return_mean:.1f} after {result.total_steps:,} steps")
    print(f"ranks stopped early: {cut} times in {len(lines)} iterations")


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.Positional,))
