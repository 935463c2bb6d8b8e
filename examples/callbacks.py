"""Train PPO on CartPole-v1 until a greedy evaluation reaches a return, with callbacks.

python examples/callbacks.py
"""

import tyro

import rayvec


class Announces:
    """Prints each evaluation, and why the run ended."""

    def on_evaluation(self, context: rayvec.RunContext) -> None:
        """Prints the mean return of an evaluation, with a star if it is the best so far."""
        assert context.evaluation is not None
        star = " *" if context.is_best else ""
        print(f"{context.progress.steps:9,} steps: greedy return {context.evaluation.return_mean:.1f}{star}")

    def on_end(self, context: rayvec.RunContext) -> None:
        """Prints why the run ended."""
        print("ended:", context.stop_reason or "all steps are taken")


def main(total_steps: int = 100_000, interval_steps: int = 5_000) -> None:
    """Trains, stops early, keeps a history of checkpoints, and acts with the best weights."""
    config = rayvec.PPOConfig(
        env_id="CartPole-v1", total_steps=total_steps, eval_interval_steps=interval_steps, eval_episodes=20
    )
    history = rayvec.CheckpointHistory(2 * interval_steps, keep=3)
    result = rayvec.train(config, callbacks=[Announces(), rayvec.StopAtReturn(475), history])
    best = rayvec.load(result.run_dir, "best.pt")
    print("action of the best weights:", best.predict([0.0, 0.0, 0.05, 0.0]))


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.Positional,))
