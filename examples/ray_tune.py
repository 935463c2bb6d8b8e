"""Search the settings of PPO with Ray Tune on all cores of a cluster; ASHA ends trials that learn slowly.

python examples/ray_tune.py

Needs `pip install "ray[tune]"`. Every trial is one process with one core, in which the environments step too.
"""

from pathlib import Path
from typing import Any

import tyro
from ray import tune
from ray.tune.schedulers import ASHAScheduler

import rayvec


class Reports:
    """Reports every greedy evaluation to Ray Tune, which may end the trial then."""

    def on_evaluation(self, context: rayvec.RunContext) -> None:
        """Reports the mean return of an evaluation."""
        assert context.evaluation is not None
        tune.report({"return_mean": context.evaluation.return_mean, "steps": context.progress.steps})


def train(settings: dict[str, Any]) -> None:
    """Trains with the settings of a trial, in the directory of that trial."""
    total_steps = settings.pop("total_steps")
    config = rayvec.PPOConfig(
        env_id="CartPole-v1",
        total_steps=total_steps,
        eval_interval_steps=max(1, total_steps // 8),
        eval_episodes=20,
        num_nodes=0,  # in the process of the trial, for which Ray Tune has claimed a core
        workers_per_node=0,
        run_dir=Path(tune.get_context().get_trial_dir()) / "run",
        **settings,
    )
    rayvec.train(config, callbacks=[Reports()])


def main(total_steps: int = 40_000, num_trials: int = 20) -> None:
    """Searches, and prints the best settings."""
    space = {
        "total_steps": total_steps,
        "learning_rate": tune.loguniform(1e-4, 1e-2),
        "gamma": tune.choice([0.95, 0.98, 0.99]),
    }
    asha = ASHAScheduler(time_attr="steps", max_t=total_steps, grace_period=max(1, total_steps // 4))
    tuner = tune.Tuner(
        tune.with_resources(train, {"cpu": 1}),
        param_space=space,
        run_config=tune.RunConfig(storage_path=str(Path("runs").resolve()), name="tune"),
        tune_config=tune.TuneConfig(metric="return_mean", mode="max", num_samples=num_trials, scheduler=asha),
    )
    best = tuner.fit().get_best_result()
    assert best.metrics is not None and best.config is not None
    print(f"best of {num_trials} trials: {best.metrics['return_mean']:.1f} with {best.config}, in {best.path}")


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.Positional,))
