"""Train PPO on CartPole-v1, then list the files of the run.

python examples/train_cartpole.py
"""

import tyro

import rayvec


def main(total_steps: int = 50_000) -> None:
    """Trains with the default settings, and prints the result."""
    config = rayvec.PPOConfig(env_id="CartPole-v1", total_steps=total_steps, seed=1)
    result = rayvec.train(config)
    print(f"mean greedy return {result.eval_return_mean:.1f} after {result.total_steps:,} steps")
    print("files:", *sorted(path.name for path in result.run_dir.iterdir()))


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.Positional,))
