"""RLlib's EnvRunner, driven by `collecting.py` from another virtual environment: seconds in, steps and seconds out.

DIRECTORY/bin/python benchmarks/rllib_env_runner.py CartPole-v1 64 256 256
"""

from __future__ import annotations

import argparse
import json
import sys
import time


def main() -> None:
    """Samples for as many seconds as each line of standard input says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env_id")
    parser.add_argument("num_envs", type=int)
    parser.add_argument("hidden", type=int, nargs="*", help="units of each hidden layer")
    options = parser.parse_args()
    import torch
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

    torch.set_num_threads(1)
    env_id, num_envs, hidden = options.env_id, options.num_envs, options.hidden
    config = (
        PPOConfig()
        .environment(env_id)
        .env_runners(num_envs_per_env_runner=num_envs, num_env_runners=0, rollout_fragment_length=128)
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=hidden, fcnet_activation="tanh"))
    )
    runner = SingleAgentEnvRunner(config=config, worker_index=0)
    runner.sample(num_timesteps=16 * num_envs, random_actions=False)
    print("ready", flush=True)
    for line in sys.stdin:
        steps, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < float(line):
            steps += sum(len(episode) for episode in runner.sample(num_timesteps=16 * num_envs, random_actions=False))
        print(json.dumps([steps, time.perf_counter() - begin]), flush=True)


if __name__ == "__main__":
    main()
