"""Step a simulator that runs under another Python, with packages of its own.

python -m venv other && other/bin/pip install "numpy<2" "gymnasium==0.29.1"
python examples/servers/other_python.py other/bin/python CartPole-v1
"""

import sys

import rayvec
import rayvec.env_server


def main(python: str, env: str = "CartPole-v1", num_envs: int = 4, num_steps: int = 200) -> None:
    """Steps environments that another Python makes."""
    command = [python, rayvec.env_server.__file__, env]
    with rayvec.EnvServers(num_envs, command=command) as servers, rayvec.RayVecEnv(servers, num_nodes=0) as envs:
        envs.reset(seed=0)
        envs.action_space.seed(0)
        episodes = 0
        for _ in range(num_steps):
            _, _, terminated, truncated, _ = envs.step(envs.action_space.sample())
            episodes += int((terminated | truncated).sum())
    print(f"{num_steps} steps of {num_envs} environments in servers, {episodes} episodes")


if __name__ == "__main__":
    main(*sys.argv[1:])
