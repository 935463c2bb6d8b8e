"""Action masks: PPO on Taxi, which says in each info which actions change anything, with masks and without.

python examples/action_masks.py

After 150,528 steps (seed 1), the mean greedy return was 5.2 with masks. Without masks it was -200: the agent never
brought a passenger to the goal.
"""

import tyro

import rayvec


def main(total_steps: int = 150_000) -> None:
    """Trains twice and prints both returns."""
    for action_masks in (True, False):
        config = rayvec.PPOConfig(
            env_id="Taxi-v4",
            total_steps=total_steps,
            wrappers=("rayvec.wrappers:ActionMask",) if action_masks else (),
            action_masks=action_masks,
            num_envs=16,
            num_steps=64,
            num_epochs=8,
            minibatch_size=256,
            learning_rate=2.5e-3,
            gamma=0.99,
            gae_lambda=0.9,
            entropy_coef=0.02,
            eval_episodes=20,
            seed=1,
        )
        result = rayvec.train(config)
        how = "with" if action_masks else "without"
        print(f"{how} masks: mean greedy return {result.eval_return_mean:.1f} in {result.run_dir}")


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.Positional,))
