"""Search the settings of PPO with Optuna, which ends trials that learn more slowly than the others.

python examples/optuna_search.py

Needs `pip install optuna`. The study is in ``optuna.db``: a second call adds trials to it.
"""

import optuna
import tyro

import rayvec


class Pruning:
    """Reports every greedy evaluation to a trial of Optuna, and stops the run that Optuna gives up."""

    def __init__(self, trial: optuna.Trial) -> None:
        self._trial = trial

    def on_evaluation(self, context: rayvec.RunContext) -> None:
        """Reports the mean return of an evaluation."""
        assert context.evaluation is not None
        if context.stop_reason is None:  # else this is the evaluation after training
            self._trial.report(context.evaluation.return_mean, context.progress.steps)
            if self._trial.should_prune():
                context.stop("pruned")


def objective(trial: optuna.Trial, total_steps: int) -> float:
    """Trains with the settings of a trial; returns the greedy return."""
    config = rayvec.PPOConfig(
        env_id="CartPole-v1",
        total_steps=total_steps,
        learning_rate=trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
        gamma=trial.suggest_categorical("gamma", [0.95, 0.98, 0.99]),
        eval_interval_steps=max(1, total_steps // 8),
        eval_episodes=20,
        run_dir=f"runs/optuna/trial{trial.number}",
    )
    result = rayvec.train(config, callbacks=[Pruning(trial)])
    if result.stop_reason == "pruned":
        raise optuna.TrialPruned
    return result.eval_return_mean


def main(total_steps: int = 40_000, num_trials: int = 20) -> None:
    """Searches, and prints the best settings."""
    study = optuna.create_study(
        study_name="cartpole",
        storage="sqlite:///optuna.db",
        load_if_exists=True,
        direction="maximize",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
    )
    study.optimize(lambda trial: objective(trial, total_steps), n_trials=num_trials)
    pruned = study.get_trials(states=[optuna.trial.TrialState.PRUNED])
    print(f"best of {len(study.trials)} trials ({len(pruned)} pruned): {study.best_value:.1f} with {study.best_params}")


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.Positional,))
