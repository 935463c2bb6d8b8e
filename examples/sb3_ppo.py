"""Stable-Baselines3's PPO on CartPole-v1, with environments on every node of a Ray cluster.

python examples/sb3_ppo.py

`docs/stable-baselines3.md` shows the line that differs from the same script with SubprocVecEnv.
"""

from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from rayvec.stable_baselines3 import RayVecEnv as SubprocVecEnv


def main(total_steps: int = 100_000, episodes: int = 20) -> float:
    """Trains, evaluates greedily, and returns the mean return."""
    env = make_vec_env("CartPole-v1", n_envs=8, seed=0, vec_env_cls=SubprocVecEnv)
    model = PPO("MlpPolicy", env, n_steps=128, batch_size=256, learning_rate=1e-3, seed=0, device="cpu")
    model.learn(total_steps)
    mean, _ = evaluate_policy(model, env, n_eval_episodes=episodes)
    print(f"mean return {mean:.1f} of {episodes} episodes after {total_steps} steps")
    env.close()
    return float(mean)


if __name__ == "__main__":
    main()
