"""PPO learners and batches for tests on several ranks: importable by the ranks' own processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from rank_objects import fall
from torch import Tensor

from rayvec.config import PPOConfig
from rayvec.learners.ppo import PPOLearner
from rayvec.nets import ActorCritic, make_actor_critic
from rayvec.noise import keyed_noise
from rayvec.policies import Policy
from rayvec.types import Batch, Chunk, CollectStats

OBS = spaces.Box(-np.inf, np.inf, (3,), np.float32)
DISCRETE, BOX = spaces.Discrete(3, start=1), spaces.Box(-1, 1, (2,), np.float32)
T, N = 8, 7
STATS = CollectStats(np.zeros(0), np.zeros(0, np.int64), T * N, 0, 0, 1.0, 1.0, {}, (0, 0))


class DoubleActorCritic(ActorCritic):
    """An actor-critic that computes in float64."""

    def encode(self, obs: Any) -> Tensor:
        return torch.from_numpy(self.encoder(obs))


def make_learner(
    action_space: spaces.Space[Any],
    dtype: torch.dtype = torch.float32,
    kind: type[PPOLearner] = PPOLearner,
    **settings: Any,
) -> PPOLearner:
    usual = {"num_envs": N, "num_steps": T, "minibatch_size": 16, "num_epochs": 2, "learning_rate": 1e-3}
    config = PPOConfig(**{"total_steps": 40 * T * N, "entropy_coef": 0.01, "seed": 5, **usual, **settings})
    module = make_actor_critic(OBS, action_space, (16, 16), seed=1)
    if dtype == torch.float64:
        encoder = module.encoder
        module.double().__class__ = DoubleActorCritic
        module.encoder = lambda obs: encoder(obs).astype(np.float64)  # type: ignore[assignment]
    return kind(OBS, action_space, config, module=module)


class FallingLearner(PPOLearner):
    """A learner whose process falls in the third step of the second update, on one rank, once."""

    mark: Path
    who: int
    how: str

    def _step(self, stats: Tensor) -> Tensor:
        self._steps_taken = getattr(self, "_steps_taken", 0) + 1
        if self._num_updates == 1 and self.ranks.rank == self.who and self._steps_taken > 10 and not self.mark.exists():
            self.mark.touch()
            fall(self.how)
        return super()._step(stats)


def make_falling_learner(mark: Path, who: int, how: str) -> FallingLearner:
    learner = make_learner(DISCRETE, kind=FallingLearner)
    assert isinstance(learner, FallingLearner)
    learner.mark, learner.who, learner.how = mark, who, how
    return learner


def make_lonely() -> Any:
    """Returns a learner that knows nothing of ranks."""

    class Lonely:
        def weights(self) -> np.ndarray[Any, Any]:
            return np.ones(3, np.float32)

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            pass

    return Lonely()


def make_batches(action_space: spaces.Space[Any], count: int, num_envs: int = N) -> list[Batch]:
    """Batches of two chunks each, with episodes that end in both ways and steps that did not happen."""
    policy = Policy(make_actor_critic(OBS, action_space, (16, 16), seed=1))
    chunks = [make_chunk(policy, seed, num_envs) for seed in range(2 * count)]
    return [Batch(tuple(chunks[first : first + 2]), STATS) for first in range(0, 2 * count, 2)]


def make_chunk(policy: Policy, seed: int, num_envs: int) -> Chunk:
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(T + 1, num_envs, 3)).astype(np.float32)
    noise = keyed_noise(policy.noise, seed=seed, env_ids=np.arange(num_envs), first_step=0, num_steps=T)
    steps = [policy.act(obs[t], noise[t]) for t in range(T)]
    valid = rng.random((T, num_envs)) > 0.1
    terminated, truncated = (rng.random((2, T, num_envs)) < 0.15) & valid
    final_index = np.argwhere(terminated | truncated)
    return Chunk(
        env_ids=np.arange(num_envs),
        obs=obs[:-1],
        act=np.stack([act for act, _ in steps]),
        rew=rng.normal(size=(T, num_envs)),
        terminated=terminated,
        truncated=truncated,
        valid=valid,
        last_obs=obs[-1],
        final_index=final_index,
        final_obs=rng.normal(size=(len(final_index), 3)).astype(np.float32),
        extras={name: np.stack([extras[name] for _, extras in steps]) for name in steps[0][1]},
    )


def distance(ours: Any, theirs: Any) -> float:
    """Returns the Euclidean distance between two vectors over the length of the second."""
    return float(np.linalg.norm(np.asarray(ours) - np.asarray(theirs)) / np.linalg.norm(theirs))
