"""Step environments in worker processes through Gymnasium's vector API.

python examples/vector_env.py
"""

import numpy as np

import rayvec


def push_towards_the_fall(obs: np.ndarray) -> np.ndarray:
    """Pushes each cart to the side to which its pole falls."""
    return (obs[:, 2] + obs[:, 3] > 0).astype(np.int64)


def main(num_steps: int = 500) -> None:
    """Plays with a hand-written policy and counts episodes."""
    with rayvec.RayVecEnv("CartPole-v1", num_envs=8) as env:
        obs, _ = env.reset(seed=0)
        episodes = 0
        for _ in range(num_steps):
            obs, _, terminated, truncated, _ = env.step(push_towards_the_fall(obs))
            episodes += int((terminated | truncated).sum())
    print(f"{num_steps} steps of {env.num_envs} environments, {episodes} episodes")


if __name__ == "__main__":
    main()
