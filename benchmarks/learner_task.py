"""A learner and a batch of random data that it updates on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

import rayvec
from rayvec.config import CONFIGS
from rayvec.learners.impala import IMPALALearner
from rayvec.learners.ppo import PPOLearner
from rayvec.learners.sac import SACLearner

LEARNERS: dict[str, Any] = {"ppo": PPOLearner, "sac": SACLearner, "impala": IMPALALearner}


@dataclass(frozen=True)
class LearnerTask:
    """What to update, and on how much.

    Attributes:
        algorithm: ``"ppo"``, ``"sac"`` or ``"impala"``.
        num_envs: Columns of the batch.
        num_steps: Steps of each.
        minibatch_size: Rows of a minibatch.
        hidden_sizes: Of the nets.
        obs_size: Numbers in an observation.
        act_size: Numbers in an action; 0 for one of two.
        images: Whether observations are four frames of 84x84 pixels instead.
        compile: Whether gradients are compiled.
        device: ``"cpu"`` or ``"cuda"``.
    """

    algorithm: str
    num_envs: int = 16
    num_steps: int = 64
    minibatch_size: int = 1024
    hidden_sizes: tuple[int, ...] = (64, 64)
    obs_size: int = 17
    act_size: int = 0
    images: bool = False
    compile: bool = False
    device: str = "cpu"

    @property
    def rows(self) -> int:
        """Steps of the batch."""
        return self.num_envs * self.num_steps

    @property
    def samples(self) -> int:
        """Rows of minibatches in an update of the batch."""
        if self.algorithm == "sac":
            return self.rows * self.minibatch_size
        return self.rows * int(getattr(self.config(), "num_epochs", 1))

    def config(self) -> Any:
        """Returns the settings of the algorithm."""
        size = min(self.minibatch_size, self.rows)
        own: dict[str, dict[str, Any]] = {
            "ppo": {
                "minibatch_size": size,
                "num_epochs": 8,
                "shared_trunk": self.images,
                "normalize_reward": False,
            },
            "sac": {"batch_size": self.minibatch_size, "learning_starts": 1, "replay_size": 100_000},
            "impala": {
                "num_minibatches": max(1, min(self.num_envs, self.rows // size)),
                "shared_trunk": self.images,
            },
        }
        return CONFIGS[self.algorithm](
            num_envs=self.num_envs,
            num_steps=self.num_steps,
            hidden_sizes=tuple(self.hidden_sizes),
            learner_device=self.device,  # type: ignore[arg-type]
            compile=self.compile,
            **own[self.algorithm],
        )

    def learner(self, **changes: Any) -> Any:
        """Returns the learner, some of whose settings may be changed."""
        env = Noise(self)
        config = replace(self.config(), **changes)
        return LEARNERS[self.algorithm](env.observation_space, env.action_space, config)

    def batch(self, learner: Any) -> rayvec.Batch:
        """Returns a batch of random observations and rewards, with the learner's own actions."""
        makers = [lambda: Noise(self)] * self.num_envs
        with rayvec.RayVecEnv(makers, num_nodes=0, workers_per_node=0) as env:
            return rayvec.Collector(env, rayvec.Policy(learner.module)).collect(n_step=self.rows)


class Noise(gymnasium.Env[Any, Any]):
    """An environment of random observations and rewards, whose episodes never end.

    Args:
        task: Says what observations and actions are.
    """

    def __init__(self, task: LearnerTask) -> None:
        frames, numbers = spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Box(-np.inf, np.inf, (task.obs_size,))
        self.observation_space = frames if task.images else numbers
        self.action_space = spaces.Box(-1, 1, (task.act_size,)) if task.act_size else spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins the episode."""
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Draws the next observation and reward."""
        return self.observation_space.sample(), float(self.np_random.standard_normal()), False, False, {}
