"""Load a trained agent, play an episode with it, and export it.

python examples/load_agent.py
"""

from pathlib import Path

import gymnasium
import tyro

import rayvec


def main(total_steps: int = 50_000) -> None:
    """Trains an agent, or loads the one that an earlier call has trained, and plays an episode."""
    run_dir = Path("runs/load_agent")
    if not run_dir.exists():
        rayvec.train(rayvec.PPOConfig(env_id="CartPole-v1", total_steps=total_steps, run_dir=run_dir))
    agent = rayvec.load(run_dir)
    env = gymnasium.make("CartPole-v1")
    obs, _ = env.reset(seed=0)
    total, ended = 0.0, False
    while not ended:
        obs, reward, terminated, truncated, _ = env.step(agent.predict(obs))
        total, ended = total + float(reward), terminated or truncated
    env.close()
    print(f"return {total:.1f}; exported to {agent.export(run_dir / 'policy.pt')}")


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.Positional,))
