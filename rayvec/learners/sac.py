"""Soft actor-critic (Haarnoja et al., 2018, arXiv:1812.05905), and its discrete variant (arXiv:1910.07207).

B is a number of rows, E of critics, C of numbers that describe an action: components of a Box, or the choices of a
Discrete. See ``docs/algorithms.md`` for every detail and metric.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from rayvec.data import Batch
from rayvec.errors import LearnerError
from rayvec.learners.base import TorchLearner, scheduled
from rayvec.learners.gradient import Gradient, flat_parameters
from rayvec.learners.onednn import fast_products
from rayvec.learners.optimizer import Adam
from rayvec.learners.ranks import global_range
from rayvec.learners.replay import ReplayBuffer
from rayvec.learners.running_stats import ObsMoments
from rayvec.learners.sac_networks import SACActor, make_networks
from rayvec.policies.distributions import Categorical
from rayvec.policies.networks import to_device
from rayvec.policies.precision import in_precision

if TYPE_CHECKING:
    from rayvec.config import SACConfig

_METRICS = ("critic_loss", "q_mean", "critic_grad_norm", "actor_loss", "entropy", "actor_grad_norm", "alpha")
"""The first three of each update, the others of updates that took a step of the actor."""
_ROWS_AHEAD = 8192  # minibatches that are drawn together have at most so many rows
_ENTROPY_SHARE = 0.5
"""Target entropy of Discrete actions by default, as a share of the largest possible entropy."""
_OPTIONS: dict[str, Any] = {"unroll_reductions_threshold": 1}
"""Unrolled, a sum over the components of an action would be one loop over rows without vector instructions, with the
exponentials and logarithms of all components in it."""
_log = logging.getLogger(__name__)

Minibatch = tuple[Tensor, ...]
"""What this rank has of a minibatch: the share of each row in a mean over the rows of all ranks ``[B]``, observations
``[B, ...]``, actions ``[B, C]`` (of a Box scaled to [-1, 1], of a Discrete one-hot), rewards ``[B]``, the true
observations after the steps, and 1 where there is nothing to bootstrap from ``[B]``."""


class _Policy(nn.Module):
    """The actor, and the logarithm of the temperature alpha: what one step of the optimizer changes."""

    def __init__(self, actor: nn.Module, alpha: float) -> None:
        super().__init__()
        self.actor = actor
        self.log_alpha = nn.ParameterList([torch.tensor([math.log(alpha)])])

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the distribution's parameters ``[B, P]``, and alpha, ``[1]``."""
        return self.actor.action_parameters(rows), self.log_alpha[0].exp()  # type: ignore[operator]


class SACLearner(TorchLearner):
    """Improves an actor, its `module`, and an ensemble of critics by soft actor-critic, from a replay of all steps.

    A Box is acted on by a squashed normal distribution, a Discrete by its own variant of the algorithm. Each call of
    `update` stores the steps of a batch and then makes as many gradient updates as are owed: over the whole run
    ``floor(update_to_data * steps since learning_starts)``.

    A minibatch of B rows is drawn environment by environment: of N environments row j belongs to environment
    ``floor((j + v) * N / B)`` with v uniform in [0, 1), and its step is uniform among those of that environment. Every
    environment is drawn equally often, which for equally many steps of each is uniform sampling with less variance.
    A rank holds the replay of its own environments, and by this rule always fetches the same number of rows, so that
    compiled graphs keep their shapes. The first and the last of them may belong to another rank; such a row has
    weight 0. All random numbers come from (seed, number of the update), for the whole
    minibatch: N ranks compute what one does.

    Args:
        observation_space: Of one environment. The default networks read small images flattened, and refuse others.
        action_space: Of one environment: a bounded floating-point Box, or a Discrete.
        config: Settings.
        dtype: Of parameters and their arithmetic.
        device: Where to train, in place of ``config.learner_device``.

    Raises:
        ConfigError: There is no soft actor-critic for these spaces, or no GPU that torch can use.
    """

    module: SACActor
    _counters = ("num_updates", "num_filled", "num_credited")

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        config: SACConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | None = None,
    ) -> None:
        super().__init__(config, device)
        self._dtype = dtype
        self.module, critics = make_networks(observation_space, action_space, config)
        self._distribution: Any = self.module.distribution
        self._is_discrete = isinstance(self._distribution, Categorical)
        self._num_act = self._distribution.num_params // (1 if self._is_discrete else 2)

        def place(module: nn.Module) -> nn.Module:
            return (module.double() if dtype == torch.float64 else module).to(self._device)

        policy, critics = place(_Policy(self.module, config.alpha)), place(critics)
        targets = copy.deepcopy(critics).requires_grad_(False)
        # its names do not depend on the precision, which wraps modules
        self._with_buffers = nn.ModuleDict({"actor": self.module, "critics": critics, "targets": targets})
        buffers = {id(each): each for each in critics.buffers()}
        # the critics again, in the same memory: through these, no gradient flows to the weights
        without_grad = copy.deepcopy(critics, buffers).requires_grad_(False)
        self._policy, self._critics, self._targets, self._critics_without_grad = (
            in_precision(each, config.precision, self._device) for each in (policy, critics, targets, without_grad)
        )
        self._target_flat = flat_parameters(self._targets.parameters())
        vector_to_parameters(self._target_flat, self._targets.parameters())
        compiled = config.compile is True
        self._critic_gradient = Gradient(self._critics, self._critic_loss, compiled, **_OPTIONS)
        vector_to_parameters(self._critic_gradient.flat, self._critics_without_grad.parameters())
        self._policy_gradient = Gradient(self._policy, self._policy_loss, compiled, **_OPTIONS)
        parts = {"critic": self._critic_gradient.flat, "actor": self._policy_gradient.flat[:-1]}
        parts["alpha"] = self._policy_gradient.flat[-1:]
        self._failed = torch.zeros(1, device=self._device)
        self._adam = {name: Adam(flat, 1e-8, self._failed) for name, flat in parts.items()}

        self._obs_moments = ObsMoments(self.module)
        self._replay = self._empty_replay()
        self._rate = Fraction(str(config.update_to_data))
        self._num_updates = self._num_filled = self._num_credited = 0
        self._local_envs, self._sizes = range(0), np.zeros(0, np.int64)

    def update(self, batch: Batch) -> dict[str, float]:
        """Stores the steps of a batch, and makes the updates that are owed.

        Returns:
            Means over these updates, none if there were none: ``critic_loss`` (sum over the critics), ``q_mean``,
            ``actor_loss``, ``entropy`` (nats), ``alpha``, ``critic_grad_norm``, ``actor_grad_norm``; and
            ``num_updates`` so far and ``replay_steps``, the transitions in the replay of all ranks.

        Raises:
            LearnerError: A gradient is not finite. The weights are those before the failed step.
        """
        self._failed.zero_()
        self._store(batch)
        first, config = self._num_updates, self.config
        progress = min(1.0, (config.learning_starts + first / config.update_to_data) / config.total_steps)
        manual, names = self._manual_learning_rate, ("policy_lr", "q_lr")
        self._rates = {name: scheduled(config, name, progress) if manual is None else manual for name in names}
        owed = math.floor(self._rate * self._num_credited) - first if self._sizes.any() else 0
        stats: list[Tensor] = []
        num_rows, num_parameters = config.batch_size // self.ranks.size, len(self._policy_gradient.flat)
        with fast_products(num_rows, num_parameters, config.network is not None):
            while len(stats) < owed:
                count = min(owed - len(stats), max(1, _ROWS_AHEAD // config.batch_size))
                stats += [self._step(*each) for each in self._minibatches(count)]
        return self._metrics(first, stats) if stats else {}

    def _step(self, minibatch: Minibatch, noise: Tensor) -> Tensor:
        """Takes a step of the critics, and at every k-th update k of the actor.

        Args:
            minibatch: This rank's part.
            noise: Standard normal, for the targets and then for each step of the actor, ``[1 + k, B, C]``.

        Returns:
            This rank's part of `_METRICS`, ``[7]``; 0 for those of an actor that took no step.
        """
        config, (weight, obs, *_) = self.config, minibatch
        stats = self._critic_gradient(*minibatch, noise[0])
        norm = self._all_reduce_norm(self._critic_gradient)
        self._adam["critic"].step(self._critic_gradient.grad, norm, self._rates["q_lr"])
        self._target_flat.lerp_(self._critic_gradient.flat, config.tau * (1 - self._failed).to(self._dtype))
        of_critics, of_actor = torch.cat([stats, norm.reshape(1) / self.ranks.size]), stats.new_zeros(4)
        for each in noise[1:]:
            stats = self._policy_gradient(weight, obs, each)
            norm = self._all_reduce_norm(self._policy_gradient)
            self._adam["actor"].step(self._policy_gradient.grad[:-1], norm, self._rates["policy_lr"])
            self._adam["alpha"].step(self._policy_gradient.grad[-1:], norm, self._rates["q_lr"])
            alpha = self._policy_gradient.flat[-1:].exp()
            of_actor = torch.cat([stats, norm.reshape(1) / self.ranks.size, alpha / self.ranks.size])
        self._num_updates += 1
        return torch.cat([of_critics, of_actor])

    def _all_reduce_norm(self, gradient: Gradient) -> Tensor:
        """Adds up the gradients of all ranks in place; returns the norm."""
        return torch.linalg.vector_norm(self.ranks.all_reduce_(gradient.grad))  # type: ignore[no-any-return]

    def _critic_loss(
        self,
        critics: Callable[..., Tensor],
        weight: Tensor,
        obs: Tensor,
        act: Tensor,
        rew: Tensor,
        next_obs: Tensor,
        terminated: Tensor,
        noise: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Returns this rank's part of the critics' loss (arXiv:1812.05905, equation 5), and of the first two metrics.

        Arguments after the first are those of a `Minibatch`, and standard normal noise ``[B, C]``, which a Discrete
        does not read.
        """
        with torch.no_grad():
            next_q, logp, alpha = self._min_q_and_logp(self._targets, self._policy, next_obs, noise)
            target = rew + self.config.gamma * (1 - terminated) * (next_q - alpha * logp)
        q = self._q(critics, obs, act)
        loss = 0.5 * ((q - target).square() @ weight).sum()
        return loss, torch.stack([loss, q.mean(0) @ weight]).detach()

    def _policy_loss(
        self, policy: Callable[..., Any], weight: Tensor, obs: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns this rank's part of the losses of actor and temperature, and of the metrics of the actor.

        The actor minimises the expected ``alpha * log pi - min Q`` (arXiv:1812.05905, equation 9; arXiv:1910.07207,
        equation 12), the temperature ``alpha * (entropy - target_entropy)`` (equation 18; 11).
        """
        q, logp, alpha = self._min_q_and_logp(self._critics_without_grad, policy, obs, noise)
        actor_loss = (alpha.detach() * logp - q) @ weight
        entropy = -(logp @ weight)
        surplus = entropy.detach() - self._target_entropy(obs, weight)
        alpha_loss = (alpha * surplus).sum() if self.config.autotune else 0.0
        return actor_loss + alpha_loss, torch.stack([actor_loss, entropy]).detach()

    def _min_q_and_logp(
        self, critics: Callable[..., Tensor], policy: Callable[..., Any], obs: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the smallest Q and the log-probability of actions of the policy, ``[B]`` each, and alpha, ``[1]``.

        Of a Box they are those of a sample (arXiv:1812.05905, equation 3), of a Discrete expectations
        (arXiv:1910.07207, equation 10). The target and the actor's loss are linear in both.
        """
        params, alpha = policy(obs)
        if self._is_discrete:
            logp = params.log_softmax(-1)
            q = self._q(critics, obs).amin(0)
            return (logp.exp() * q).sum(-1), (logp.exp() * logp).sum(-1), alpha
        act, logp = self._distribution.rsample(params, noise)
        return self._q(critics, obs, act).amin(0), logp, alpha

    def _q(self, critics: Callable[..., Tensor], obs: Tensor, act: Tensor | None = None) -> Tensor:
        """Returns the values of an action ``[E, B]``, or of all choices ``[E, B, C]``."""
        numbers, _ = self.module.split(obs)
        values = critics(numbers) if self._is_discrete or act is None else critics(numbers, act)
        values = values.to(self._dtype)  # your own critics may compute in another dtype
        if act is None:
            return values
        return (values * act).sum(-1) if self._is_discrete else values.squeeze(-1)

    def _target_entropy(self, obs: Tensor, weight: Tensor) -> Tensor:
        """Returns this rank's share of the entropy to which the temperature is adjusted, in nats.

        By default that is -C for C components of a Box, and for choices a part of the largest entropy that the allowed
        ones can have.
        """
        config, (_, allowed) = self.config, self.module.split(obs)
        if config.target_entropy is not None or not self._is_discrete:
            return weight.sum() * (-float(self._num_act) if config.target_entropy is None else config.target_entropy)
        if allowed is None:
            return weight.sum() * _ENTROPY_SHARE * math.log(self._num_act)
        return _ENTROPY_SHARE * allowed.sum(-1).to(weight).log() @ weight

    def _store(self, batch: Batch) -> None:
        """Stores the steps of a batch in the replay, and sums up the number of steps over all ranks."""
        count = torch.tensor(sum(int(chunk.valid.sum()) for chunk in batch.chunks), device=self._device)
        num_steps = int(self.ranks.all_reduce_(count))
        for chunk in batch.chunks:
            self._replay.add(chunk)
        self.measure(batch)
        before, after = self._num_filled, self._num_filled + num_steps
        self._num_credited += max(0, after - max(before, self.config.learning_starts))
        self._num_filled = after
        self._local_envs, total = global_range(self.ranks, len(self._replay.sizes))
        sizes = torch.zeros(total, dtype=torch.int64, device=self._device)
        sizes[self._local_envs.start : self._local_envs.stop] = torch.from_numpy(self._replay.sizes)
        self._sizes = self.ranks.all_reduce_(sizes).cpu().numpy()

    def _minibatches(self, count: int) -> list[tuple[Minibatch, Tensor]]:
        """Draws this rank's part of the next minibatches, and the noise of each.

        Several at a time: right after an update, whose networks have replaced everything else in the caches, drawing
        one took three times as long as right after another.
        """
        config, num_envs, local_envs = self.config, len(self._sizes), self._local_envs
        size = config.batch_size
        begin = local_envs.start * size // num_envs
        local_rows = slice(begin, -(-local_envs.stop * size // num_envs) if local_envs else begin)
        drawn = [self._draw(number) for number in range(self._num_updates, self._num_updates + count)]
        env_uniform, age_uniform = np.stack([uniform for uniform, _ in drawn], 1)
        environments = ((np.arange(size) + env_uniform) * num_envs / size).astype(np.int64).clip(max=num_envs - 1)
        counts = self._sizes[environments]
        weight = (counts > 0) / np.count_nonzero(counts, 1).clip(min=1)[:, None]
        weight[(environments < local_envs.start) | (environments >= local_envs.stop)] = 0
        fields = self._replay.sample(
            (age_uniform * counts)[:, local_rows].astype(np.int64), environments[:, local_rows] - local_envs.start
        )
        if self._is_discrete:
            eye = torch.eye(self._num_act, device=fields["act"].device)
            fields["act"] = eye[fields["act"][..., 0]]
        columns = [to_device(fields[name], self._device) for name in ("obs", "act", "rew", "next_obs", "terminated")]
        columns = [each if each.is_floating_point() else each.to(self._dtype) for each in columns]
        weights = to_device(np.ascontiguousarray(weight[:, local_rows]), self._device, self._dtype)
        noise = to_device(np.concatenate([each[:, local_rows] for _, each in drawn]), self._device, self._dtype)
        minibatches = zip(weights, *columns, strict=True)
        return list(zip(minibatches, torch.split(noise, [len(each) for _, each in drawn]), strict=True))

    def _draw(self, number: int) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
        """Draws for all rows of an update where they lie, uniform ``[2, B]``, and their noise ``[1 + k, B, C]``."""
        config = self.config
        generator = np.random.Generator(np.random.Philox(key=[config.seed, number]))
        uniform = generator.random((2, config.batch_size))
        num_steps = 1 + config.policy_interval * (number % config.policy_interval == 0)
        shape = (num_steps, config.batch_size, 0 if self._is_discrete else self._num_act)
        return uniform, generator.standard_normal(shape, np.float32)

    def _metrics(self, first: int, stats: Sequence[Tensor]) -> dict[str, float]:
        """Returns means over updates, of which `first` is the number of the first."""
        rows = self.ranks.all_reduce_(torch.stack(list(stats))).cpu()
        if self._failed.item():
            bad = next((row for row in rows if not row.isfinite().all()), rows[-1])
            raise LearnerError(
                f"A loss or its gradient is not finite (one of the {len(rows)} updates up to number "
                f"{self._num_updates}): {dict(zip(_METRICS, bad.tolist(), strict=True))}. Look for NaN, and for "
                "numbers beyond float32, in observations, or lower policy_lr or q_lr."
            )
        metrics = dict(zip(_METRICS, rows.mean(0).tolist(), strict=True))
        num_steps = sum(number % self.config.policy_interval == 0 for number in range(first, first + len(rows)))
        for name in _METRICS[3:]:
            metrics[name] *= len(rows) / max(1, num_steps)
        means = {name: metrics[name] for name in (_METRICS if num_steps else _METRICS[:3])}
        return {**means, "num_updates": self._num_updates, "replay_steps": int(self._sizes.sum())}

    def _state(self) -> dict[str, Any]:
        """Returns what is the same on all ranks: everything but the replay."""
        return {
            **super()._state(),
            "critic": self._critic_gradient.flat,
            "target": self._target_flat,
            "actor": self._policy_gradient.flat,  # the temperature last
            "optimizers": {name: adam.state_dict() for name, adam in self._adam.items()},
            "buffers": dict(self._with_buffers.named_buffers()),
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of what the next update depends on: tensors and plain values only.

        The replay, which is this rank's, is part of it unless ``config.checkpoint_replay`` is off.
        """
        return {**self.shared_state(), **self.rank_local_state()}

    def shared_state(self) -> dict[str, Any]:
        """Returns what is the same on all ranks: everything but the replay."""
        return super().state_dict()

    def rank_local_state(self) -> dict[str, Any]:
        """Returns this rank's replay, or None in its place if ``config.checkpoint_replay`` is off."""
        return {"replay": self._replay.state_dict() if self.config.checkpoint_replay else None}

    @staticmethod
    def with_network(own: dict[str, Any], other: Mapping[str, Any], config: SACConfig) -> dict[str, Any]:
        """Returns the state `own` with the networks of the state `other`; with `autotune` its temperature, too."""
        networks = {name: other[name] for name in ("critic", "target", "actor", "buffers", "obs_moments")}
        if not config.autotune:
            networks["actor"] = torch.cat([other["actor"][:-1], own["actor"][-1:]])
        return {**own, **networks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where the learner was when `state` was taken: exactly, if the replay is part of it.

        With a state without a replay, such as `shared_state`, the replay refills: updates resume after
        `learning_starts` more steps.

        Raises:
            CheckpointError: `state` is not that of a SAC learner, or of other networks.
        """
        super().load_state_dict(state)
        self._replay = self._empty_replay()
        if state.get("replay") is not None:
            self._replay.load_state_dict(state["replay"])
        elif self._num_filled:
            steps = self.config.learning_starts
            _log.warning("the state has no replay, so the replay refills: updates resume after %d steps", steps)
            self._num_filled = 0

    def _empty_replay(self) -> ReplayBuffer:
        capacity_steps = -(-self.config.replay_size // self.config.num_envs)
        recorded = functools.partial(self._distribution.recorded, extras={})
        device = self._device if self.config.replay_on_device else torch.device("cpu")
        return ReplayBuffer(capacity_steps, self.module.rows, recorded, device)
