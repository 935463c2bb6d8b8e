"""A learner of every kind for every kind of space, and batches for it: what tests of devices have in common.

It needs torch, NumPy and Gymnasium alone, like ``tests/gpu``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import spaces

from helpers.actor_critic_kit import draw_obs, make_batch
from rayvec.config import IMPALAConfig, PPOConfig, SACConfig
from rayvec.data import Batch
from rayvec.learners.impala import IMPALALearner
from rayvec.learners.ppo import PPOLearner
from rayvec.learners.sac import SACLearner
from rayvec.policies.noise import keyed_noise
from rayvec.policies.policy import Policy

T, N = 8, 4

_NUMBERS = spaces.Box(-np.inf, np.inf, (3,), np.float32)
_IMAGES = spaces.Box(0, 255, (12, 12, 3), np.uint8)
_DICT = spaces.Dict(sight=_IMAGES, touch=_NUMBERS, key=spaces.Discrete(3))
_TUPLE = spaces.Tuple((spaces.Discrete(4), spaces.MultiBinary(3), spaces.MultiDiscrete([2, 3]), _NUMBERS))
_MASKED = spaces.Dict(observation=_NUMBERS, action_mask=spaces.MultiBinary(8))
_OBS = {"numbers": _NUMBERS, "images": _IMAGES, "dict": _DICT, "tuple": _TUPLE, "masked": _MASKED}
_ACT = {
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "discrete": spaces.Discrete(3, start=1),
    "multidiscrete": spaces.MultiDiscrete([3, 5]),
    "multibinary": spaces.MultiBinary(3),
}
_LEARNERS: dict[str, Any] = {"ppo": PPOLearner, "impala": IMPALALearner, "sac": SACLearner}
_CONFIGS: dict[str, Any] = {"ppo": PPOConfig, "impala": IMPALAConfig, "sac": SACConfig}
_USUAL: dict[str, dict[str, Any]] = {
    "ppo": {"num_steps": T, "minibatch_size": 16, "num_epochs": 2, "learning_rate": 1e-3},
    "impala": {"num_steps": T, "num_minibatches": 2, "learning_rate": 1e-3},
    "sac": {"num_steps": T, "learning_starts": 8, "batch_size": 12, "replay_size": 400, "update_to_data": 0.1},
}


@dataclass(frozen=True)
class Case:
    """A learner's spaces and settings."""

    algorithm: str
    obs: str
    act: str
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.algorithm, self.obs, self.act, *map(str, self.settings.values())])

    def observations(self) -> tuple[Any, Callable[[Policy], Any]]:
        """Returns observations of some environments, and the noise with which a policy acts on them."""
        obs = draw_obs(_OBS[self.obs], np.random.default_rng(0), N)
        return obs, lambda policy: keyed_noise(policy.noise, seed=0, env_ids=np.arange(N), first_step=0, num_steps=1)[0]

    def learner(self, device: str, **settings: Any) -> Any:
        """Returns the learner on a device, with more settings."""
        usual = {"total_steps": 40 * T * N, "num_envs": N, "hidden_sizes": (8, 8), "seed": 3}
        config = _CONFIGS[self.algorithm](**{**usual, **_USUAL[self.algorithm], **self.settings, **settings})
        return _LEARNERS[self.algorithm](_OBS[self.obs], _ACT[self.act], config, device=device)

    def rounding(self, device: str, precision: str) -> tuple[float, float]:
        """Returns how far an actor-critic's first gradient in a precision is from that in float32, as a share of it.

        The second number is how far it is in float32 where the weights alone have been rounded to bfloat16.
        """
        steps = {"ppo": {"minibatch_size": T * N, "num_epochs": 1}, "impala": {"num_minibatches": 1}}[self.algorithm]

        def gradient(rounded: bool = False, **settings: Any) -> Any:
            learner = self.learner(device, **steps, max_grad_norm=1e9, **settings)
            if rounded:
                state = learner.state_dict()
                learner.load_state_dict({**state, "parameters": state["parameters"].bfloat16().float()})
            learner.update(self.batches(1)[0])
            return learner.state_dict()["optimizer"]["exp_avg"].cpu()

        exact = gradient()
        shares = [(each - exact).norm() / exact.norm() for each in (gradient(precision=precision), gradient(True))]
        return float(shares[0]), float(shares[1])

    def batches(self, count: int, num_steps: int = T) -> list[Batch]:
        """Returns batches of random observations and rewards, with actions of the policy and steps that failed."""
        policy = Policy(self.learner("cpu").module)
        sizes = {"num_steps": num_steps, "num_envs": N}
        return [make_batch(policy, seed, invalid=True, space=_OBS[self.obs], **sizes) for seed in range(count)]


def _cases() -> list[Case]:
    actor_critic = [
        *(("numbers", act, {}) for act in _ACT),
        ("images", "discrete", {}),
        ("dict", "box", {"cnn": "impala"}),
        ("tuple", "multibinary", {"layer_norm": True}),
        ("masked", "multidiscrete", {}),
        ("numbers", "discrete", {"recurrent": "gru", "sequence_length": 4}),
        ("dict", "box", {"recurrent": "lstm", "sequence_length": 4}),
    ]
    make: Callable[[str], list[Case]] = lambda name: [Case(name, *each) for each in actor_critic]  # noqa: E731
    statistics = {"normalize_obs": True, "normalize_reward": True, "target_kl": 1.0}
    return [
        *make("ppo"),
        Case("ppo", "tuple", "multidiscrete", statistics),
        *make("impala"),
        *(Case("sac", obs, act) for obs in ("numbers", "tuple") for act in ("box", "discrete")),
        Case("sac", "numbers", "box", {"replay_on_device": True}),
        Case("sac", "tuple", "discrete", {"replay_on_device": True}),
    ]


CASES = _cases()
"""Every learner with every kind of space."""
