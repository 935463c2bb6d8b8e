"""Soft actor-critic (Haarnoja et al., 2018, arXiv:1812.05905), and its discrete variant (arXiv:1910.07207).

What one minibatch does is in :mod:`rayvec.learners.sac_math`; this module says which minibatches there are. See
``docs/sac.md`` for every detail and metric.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from rayvec.data import Batch, Chunk
from rayvec.errors import CheckpointError, ConfigError, LearnerError
from rayvec.learners.base import keep_freed_memory, torch_device
from rayvec.learners.compiling import Compiled, CUDAGraph
from rayvec.learners.ranks import ALONE, Ranks, check_minibatch, gather_counts
from rayvec.learners.replay import ReplayBuffer
from rayvec.learners.sac_math import AdamState, MLPLayout, Nets, Rows, SACMath, corrections
from rayvec.policies.actors import MLPActor
from rayvec.policies.distributions import Distribution, make_distribution, make_tanh_gaussian
from rayvec.policies.encoders import Encoder, make_encoder

if TYPE_CHECKING:
    from rayvec.config import SACConfig

__all__ = ["SACActor", "SACLearner"]

_METRICS = ("critic_loss", "q_mean", "actor_loss", "entropy", "critic_grad_norm", "actor_grad_norm", "alpha")
_OF_CRITICS = ("critic_loss", "q_mean", "critic_grad_norm")
_NUM_GLOBAL = 3  # the last three are the same on every rank
_ROWS_AHEAD = 8192  # minibatches that are drawn together have at most so many rows
_COUNTERS = ("num_updates", "num_steps", "num_filled", "num_credited")
_log = logging.getLogger(__name__)


class _Minibatch(NamedTuple):
    """What an update reads.

    Attributes:
        rows: b of them.
        noise: Standard normal, for the critics' targets and then for each step of the actor, ``[1 + k, b, C]``.
        correction: Adam's, of the critics and then of each step of the actor, ``[1 + k, 2]``.
    """

    rows: Rows
    noise: Tensor
    correction: Tensor


class SACActor(nn.Module):
    """An MLP with ReLU that puts out the parameters of a distribution; it acts without torch.

    Args:
        encoder: From observations to rows of D numbers.
        distribution: Of actions.
        layout: Where its layers lie in a flat vector.
        flat: That vector, which the layers become views of.
    """

    def __init__(self, encoder: Encoder, distribution: Distribution, layout: MLPLayout, flat: Tensor) -> None:
        super().__init__()
        self.encoder, self.distribution = encoder, distribution
        self._layout = layout
        modules: list[nn.Module] = []
        for weight, bias in layout.layers(flat[: layout.num_params]):
            layer = nn.Linear(weight.shape[2], weight.shape[1], device="meta")
            layer.weight = nn.Parameter(weight[0], requires_grad=False)
            layer.bias = nn.Parameter(bias[0], requires_grad=False)
            modules += [layer, nn.ReLU()]
        self.net = nn.Sequential(*modules[:-1])

    def forward(self, rows: Tensor) -> Tensor:
        """Returns the distribution's parameters ``[B, P]`` for encoded observations ``[B, D]``."""
        params: Tensor = self.net(rows)
        return params

    def weights(self) -> NDArray[np.float32]:
        """Returns a copy of the parameters, flat."""
        flat = torch.cat([parameter.detach().view(-1) for parameter in self.net.parameters()])
        return flat.float().cpu().numpy()

    def make_actor(self) -> MLPActor:
        """Returns the actor with the present weights, free of torch."""
        layers, start = [], 0
        for ins, outs in pairwise(self._layout.sizes):
            layers.append((start, start + outs * ins, outs, ins))
            start += outs * (ins + 1)
        actor = MLPActor(self.encoder, self.distribution, tuple(layers), start, slice(0), activation="relu")
        actor.load_weights(self.weights())
        return actor


class SACLearner:
    """Improves an actor and an ensemble of critics by soft actor-critic, from a replay of all steps.

    A Box is acted on by a squashed normal distribution, a Discrete by its own variant of the algorithm. Each call of
    `update` stores the steps of a batch and then makes as many gradient updates as are owed: over the whole run
    ``floor(update_to_data * steps since learning_starts)``.

    A minibatch of B rows is drawn environment by environment: of N environments row j belongs to environment
    ``floor((j + v) * N / B)`` with v uniform in [0, 1), and its step is uniform among those of that environment. Every
    environment is drawn equally often, which for equally many steps of each is uniform sampling with less variance.
    A rank holds the replay of its own environments, and knows from this rule which rows are its own: always
    equally many, so that compiled graphs keep their shapes. At most one row at either end may turn out to be its
    neighbour's; it then has weight 0. All random numbers come from (seed, number of the update), for the whole
    minibatch: N ranks do what one does.

    Args:
        observation_space: Of one environment; without images.
        action_space: Of one environment: a bounded floating-point Box, or a Discrete.
        config: Settings.
        dtype: Of parameters and their arithmetic.

    Attributes:
        module: The actor.
        ranks: Who computes each update together; each rank gets the chunks of its own environments.

    Raises:
        ConfigError: There is no soft actor-critic for these spaces, or no GPU that torch can use.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        config: SACConfig,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        keep_freed_memory()
        self.config = config
        self.ranks: Ranks = ALONE
        self._dtype, self._device = dtype, torch_device(config.learner_device)
        encoder, distribution = make_encoder(observation_space), _distribution(action_space)
        self._math = _math(encoder.num_features, distribution, action_space, config)
        self._nets = _initial(self._math, config, dtype, self._device)
        self.module = SACActor(encoder, distribution, self._math.actor, self._nets.actor.param)
        self._num_act = self._math.actor.sizes[-1] // (1 if self._math.is_discrete else 2)
        self._replay = self._empty_replay()
        self._rate = Fraction(str(config.update_to_data))
        self._num_updates = 0
        self._num_steps = 0
        self._num_filled = 0
        self._num_credited = 0
        self._bounds = (0, 0, 0)
        self._sizes = np.zeros(0, np.int64)
        self._graphs = _graphs(self._math, config)
        self._parts = _Parts(self._math, config)

    def update(self, batch: Batch) -> dict[str, float]:
        """Stores the steps of a batch, and makes the updates that are owed.

        Returns:
            Means over these updates, none if there were none: ``critic_loss`` (sum over the critics), ``q_mean``,
            ``actor_loss``, ``entropy`` (nats), ``alpha``, ``critic_grad_norm``, ``actor_grad_norm``; and
            ``num_updates`` so far and ``replay_steps``, the transitions in the replay of all ranks.

        Raises:
            LearnerError: A reward is not finite, and nothing of the batch was stored; or a gradient is not finite, and
                the weights are those before the failed step.
        """
        check_minibatch(self.ranks, self.config.batch_size)
        self._store(batch)
        owed = math.floor(self._rate * self._num_credited) - self._num_updates
        stats: list[Tensor] = []
        while self._sizes.any() and len(stats) < owed:
            count = min(owed - len(stats), max(1, _ROWS_AHEAD // self.config.batch_size))
            stats += [self._step(minibatch) for minibatch in self._minibatches(count)]
        return self._metrics(stats) if stats else {}

    def _store(self, batch: Batch) -> None:
        """Puts the steps of a batch into the replay, and lets all ranks know how many there are now.

        A reward that is not finite is refused before anything changes: it would lie in the replay, and so in every
        checkpoint, until an update happens to draw it.
        """
        known = self._replay.env_ids
        is_foreign = known is not None and any(not np.array_equal(known, chunk.env_ids) for chunk in batch.chunks)
        count = sum(int(chunk.valid.sum()) for chunk in batch.chunks)
        bad = _bad_reward(batch.chunks)
        news = torch.tensor([count, is_foreign, bad is not None], dtype=torch.int64, device=self._device)
        num_steps, num_foreign, num_bad = self.ranks.sum_(news).tolist()
        if num_bad:
            self._refuse(bad)
        if num_foreign:
            self._refill("it holds steps of other environments than this rank's")
        for chunk in batch.chunks:
            self._replay.add(chunk)
        before, after = self._num_filled, self._num_filled + num_steps
        self._num_credited += max(0, after - max(before, self.config.learning_starts))
        self._num_filled = after
        self._num_steps += num_steps

        counts = gather_counts(self.ranks, len(self._replay.sizes))
        first = sum(counts[: self.ranks.rank])
        self._bounds = (first, first + len(self._replay.sizes), sum(counts))
        sizes = torch.zeros(sum(counts), dtype=torch.int64, device=self._device)
        sizes[first : self._bounds[1]] = torch.from_numpy(self._replay.sizes)
        self._sizes = self.ranks.sum_(sizes).cpu().numpy()

    def _refuse(self, bad: tuple[int, int, float] | None) -> NoReturn:
        """Raises the same on all ranks for a reward that this one, or another, found."""
        found = torch.zeros(self.ranks.size, 4, dtype=torch.float64, device=self._device)
        if bad is not None:
            found[self.ranks.rank] = torch.tensor([1, *bad], dtype=torch.float64)
        _, env_id, step, reward = next(row for row in self.ranks.sum_(found).tolist() if row[0])
        raise LearnerError(
            "A replay holds finite rewards, or updates would fail at some later time.",
            expected="rewards that are finite in float32",
            got=f"{reward} from environment {env_id:.0f} at step {step:.0f} of the batch",
            remedy="Mend the environment's reward, or wrap it in one that replaces such rewards",
        )

    def _step(self, minibatch: _Minibatch) -> Tensor:
        """Makes one update; returns its metrics, ``[7]``, 0 for what is about the actor where it did not touch that."""
        has_actor = len(minibatch.correction) > 1
        compute = self._graphs[has_actor] if self.ranks is ALONE else self._on_ranks
        stats = compute(self._nets, *minibatch)
        self._num_updates += 1
        return stats

    def _minibatches(self, count: int) -> list[_Minibatch]:
        """Draws this rank's part of the next minibatches.

        Several at a time: right after an update, whose nets have taken the places of everything else in the caches,
        drawing one took three times as long as right after another.
        """
        size, (first, stop, num_envs) = self.config.batch_size, self._bounds
        begin = first * size // num_envs
        end = -(-stop * size // num_envs) if stop > first else begin
        numbers = range(self._num_updates, self._num_updates + count)
        steps = [self._adam_steps(number) for number in numbers]
        draws, noises = zip(*(self._draw(*each) for each in zip(numbers, map(len, steps), strict=True)), strict=True)
        place, age = np.stack(draws, 1)
        columns = ((np.arange(size) + place) * num_envs / size).astype(np.int64).clip(max=num_envs - 1)
        counts = self._sizes[columns]
        weight = (counts > 0) / np.count_nonzero(counts, 1).clip(min=1)[:, None]
        ages = (age * counts).astype(np.int64)
        rows = self._rows(*(each[:, begin:end].reshape(-1) for each in (columns - first, ages, weight)))
        apart = (column.view(count, end - begin, *column.shape[1:]).unbind() for column in rows)
        return [
            _Minibatch(
                Rows(*each),
                torch.from_numpy(noise[:, begin:end]).to(self._device, self._dtype),
                torch.tensor([*map(corrections, taken)], dtype=self._dtype, device=self._device),
            )
            for *each, noise, taken in zip(*apart, noises, steps, strict=True)
        ]

    def _adam_steps(self, number: int) -> list[int]:
        """Returns which steps an update takes, from 1: one of the critics, and at every k-th update k of the actor."""
        interval = self.config.policy_interval
        return [number + 1, *(range(number + 1, number + 1 + interval) if number % interval == 0 else ())]

    def _draw(self, number: int, num_steps: int) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
        """Draws for all rows of an update where they lie, uniform ``[2, B]``, and their noise ``[num_steps, B, C]``."""
        generator = np.random.Generator(np.random.Philox(key=[self.config.seed, number]))
        uniform = generator.random((2, self.config.batch_size))
        shape = (num_steps, self.config.batch_size, 0 if self._math.is_discrete else self._num_act)
        return uniform, generator.standard_normal(shape, np.float32)

    def _rows(self, columns: NDArray[np.int64], ages: NDArray[np.int64], weight: NDArray[np.float64]) -> Rows:
        """Fetches rows; of columns that are not this rank's, and of those without steps, zeros of weight 0."""
        num_columns, num_features = len(self._replay.sizes), self._math.actor.sizes[0]
        if not len(columns):
            shapes = ((0, num_features), (0, self._num_act), (0,), (0, num_features), (0,), (0,))
            return Rows(*(torch.zeros(shape, device=self._device, dtype=self._dtype) for shape in shapes))
        padding = (columns < 0) | (columns >= num_columns) | (weight == 0)
        columns = columns.clip(0, num_columns - 1)
        found = self._replay.sample(np.minimum(ages, np.maximum(self._replay.sizes[columns] - 1, 0)), columns)
        act = np.eye(self._num_act, dtype=np.float32)[found.act[:, 0]] if self._math.is_discrete else found.act
        terminated = found.terminated.astype(np.float32)
        arrays = (found.obs, act, found.rew, found.next_obs, terminated, np.where(padding, 0, weight))
        if padding.any():
            for array in arrays:
                array[padding] = 0
        return Rows(*(torch.from_numpy(array).to(self._device, self._dtype) for array in arrays))

    def _on_ranks(self, nets: Nets, rows: Rows, noise: Tensor, correction: Tensor) -> Tensor:
        """Makes an update whose gradients are summed over all ranks."""
        sum_, parts = self.ranks.sum_, self._parts if len(rows.weight) else self._math
        grad, critic_stats = parts.critic_gradient(nets, rows, noise[0])
        critic_norm = parts.critic_step(nets, sum_(grad), correction[0])
        if len(correction) == 1:
            return _without_actor(critic_stats, critic_norm)
        for k in range(1, len(correction)):
            grad, actor_stats = parts.actor_gradient(nets, rows, noise[k])
            actor_norm = parts.actor_step(nets, sum_(grad), correction[k])
        return torch.cat([critic_stats, actor_stats, critic_norm, actor_norm])

    def _metrics(self, updates: list[Tensor]) -> dict[str, float]:
        """Returns means over updates, each over those that touched what it is about."""
        stats = torch.stack(updates)
        stats[:, -_NUM_GLOBAL:] /= self.ranks.size
        stats = self.ranks.sum_(stats).cpu()
        if not self._nets.healthy.item():
            bad = next((row for row in stats if not row.isfinite().all()), stats[-1])
            raise LearnerError(
                f"A loss and its gradient are finite numbers (one of the {len(stats)} updates up to number "
                f"{self._num_updates}).",
                expected="finite numbers",
                got=dict(zip(_METRICS, bad.tolist(), strict=True)),
                remedy="Look for NaN in observations and rewards, and lower policy_lr or q_lr",
            )
        touched = (stats[:, -1:] > 0).sum(0).clamp(min=1)  # alpha is positive where the actor took a step
        counts = torch.where(torch.tensor([name in _OF_CRITICS for name in _METRICS]), len(stats), touched)
        means = dict(zip(_METRICS, (stats.sum(0) / counts).tolist(), strict=True))
        if not (stats[:, -1] > 0).any():
            means = {name: value for name, value in means.items() if name in _OF_CRITICS}
        return {**means, "num_updates": self._num_updates, "replay_steps": int(self._sizes.sum())}

    def weights(self) -> NDArray[np.float32]:
        """Returns a copy of the actor's parameters, flat: what ``Policy.load_weights`` takes."""
        return self.module.weights()

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of what the next update depends on: tensors and plain values only.

        There is no random state: random numbers are drawn from (seed, number of the update). The replay, which is
        this rank's, is part of it unless ``config.checkpoint_replay`` is off.
        """
        return {**self.shared_state(), **self.own_state()}

    def shared_state(self) -> dict[str, Any]:
        """Returns what is the same on all ranks: everything but the replay."""
        return {
            "critic": torch.stack(self._nets.critic).cpu(),
            "target": self._nets.target.cpu().clone(),
            "actor": torch.stack(self._nets.actor).cpu(),
            **{name: getattr(self, f"_{name}") for name in _COUNTERS},
        }

    def own_state(self) -> dict[str, Any]:
        """Returns this rank's replay, or None in its place if ``config.checkpoint_replay`` is off."""
        return {"replay": self._replay.state_dict() if self.config.checkpoint_replay else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the learner was that `state` was taken from: exactly, if the replay is part of it.

        A state without a replay, such as `shared_state`, or with that of other environments, lets the replay refill:
        `learning_starts` more steps are collected before updates go on.

        Raises:
            CheckpointError: `state` is not that of a SAC learner, or of other nets.
        """
        shapes = {name: tuple(getattr(state.get(name), "shape", ())) for name in ("critic", "target", "actor")}
        critic, actor = self._nets.critic.param.numel(), self._nets.actor.param.numel()
        expected = {"critic": (3, critic), "target": (critic,), "actor": (3, actor)}
        if shapes != expected or not state.keys() >= set(_COUNTERS):
            raise CheckpointError(
                "A learner continues from the state of one with the same nets.",
                expected=f"{[*expected, *_COUNTERS]}, of shapes {expected}",
                got=f"{sorted(state)}, of shapes {shapes}",
                remedy="Use the configuration that the checkpoint was written with",
            )
        for name, target in (("critic", self._nets.critic), ("actor", self._nets.actor)):
            for part, saved in zip(target, state[name], strict=True):
                part.copy_(saved)
        self._nets.target.copy_(state["target"])
        self._nets.healthy.fill_(1)
        for name in _COUNTERS:
            setattr(self, f"_{name}", int(state[name]))
        self._replay = self._empty_replay()
        if state.get("replay") is not None:
            self._replay.load_state_dict(state["replay"])
        elif self._num_filled:
            self._refill("the state that this goes on from does not hold it")

    def _refill(self, reason: str) -> None:
        """Begins the replay anew, and with it the wait for `learning_starts`."""
        _log.warning("the replay refills, since %s: updates go on after %d steps", reason, self.config.learning_starts)
        self._replay = self._empty_replay()
        self._num_filled = 0

    def _empty_replay(self) -> ReplayBuffer:
        capacity_steps = -(-self.config.replay_size // self.config.num_envs)
        recorded = functools.partial(self.module.distribution.recorded, extras={})
        return ReplayBuffer(capacity_steps, self.module.encoder, recorded)


def _bad_reward(chunks: Sequence[Chunk]) -> tuple[int, int, float] | None:
    """Returns the first reward that a replay can't hold as environment, step and reward; None if there is none."""
    for number, chunk in enumerate(chunks):
        with np.errstate(over="ignore"):  # what is too large is to be found, not to be warned of
            bad = chunk.valid & ~np.isfinite(np.asarray(chunk.rew, np.float32))
        if bad.any():
            t, n = np.argwhere(bad)[0]
            before = sum(len(each.valid) for each in chunks[:number])
            return int(chunk.env_ids[n]), before + int(t), float(chunk.rew[t, n])
    return None


def _distribution(space: spaces.Space[Any]) -> Distribution:
    match space:
        case spaces.Discrete():
            return make_distribution(space)
        case spaces.Box():
            return make_tanh_gaussian(space)
    raise ConfigError(
        "Soft actor-critic acts on numbers between bounds, or chooses one of a few actions.",
        expected="a bounded floating-point Box, or a Discrete action space",
        got=space,
        remedy="Flatten the action space with a Gymnasium wrapper, or use PPO",
    )


def _math(num_features: int, distribution: Distribution, space: spaces.Space[Any], config: SACConfig) -> SACMath:
    """Returns the mathematics for a space.

    The usual entropy to aim at is -C for C components of a Box, and for n choices `target_entropy_scale` times the
    largest that they can have.
    """
    is_discrete = isinstance(space, spaces.Discrete)
    num_actions = distribution.num_params if is_discrete else distribution.num_params // 2
    usual = config.target_entropy_scale * math.log(num_actions) if is_discrete else -float(num_actions)
    inputs, outputs = (num_features, num_actions) if is_discrete else (num_features + num_actions, 1)
    return SACMath(
        critic=MLPLayout(config.num_critics, (inputs, *config.hidden_sizes, outputs)),
        actor=MLPLayout(1, (num_features, *config.hidden_sizes, distribution.num_params)),
        is_discrete=is_discrete,
        gamma=config.gamma,
        tau=config.tau,
        target_entropy=usual if config.target_entropy is None else config.target_entropy,
        autotune=config.autotune,
        policy_lr=config.policy_lr,
        q_lr=config.q_lr,
        alpha_lr=config.q_lr if config.alpha_lr is None else config.alpha_lr,
    )


def _initial(sac: SACMath, config: SACConfig, dtype: torch.dtype, device: torch.device) -> Nets:
    """Returns nets whose weights and biases are uniform within ``1 / sqrt(inputs)``, as those of ``nn.Linear``."""
    generator = torch.Generator().manual_seed(config.seed)

    def draw(layout: MLPLayout) -> Tensor:
        flat = torch.empty(layout.num_params)
        for weight, bias in layout.layers(flat):
            bound = 1 / math.sqrt(weight.shape[2])
            weight.uniform_(-bound, bound, generator=generator)
            bias.uniform_(-bound, bound, generator=generator)
        return flat

    def adam(param: Tensor) -> AdamState:
        param = param.to(device, dtype)
        return AdamState(param, torch.zeros_like(param), torch.zeros_like(param))

    actor = torch.cat([draw(sac.actor), torch.tensor([math.log(config.alpha)])])
    critic = adam(draw(sac.critic))
    return Nets(critic, critic.param.clone(), adam(actor), torch.ones(1, device=device, dtype=dtype))


class _Parts:
    """The parts of an update between which gradients are summed over ranks, each as fast as it gets.

    Args:
        sac: The mathematics.
        config: Settings.
    """

    def __init__(self, sac: SACMath, config: SACConfig) -> None:
        wrap: Callable[[Any], Any] = _compiled if config.compile else lambda function: function
        self.critic_gradient = wrap(sac.critic_gradient)
        self.critic_step = wrap(sac.critic_step)
        self.actor_gradient = wrap(sac.actor_gradient)
        self.actor_step = wrap(sac.actor_step)


def _compiled(function: Callable[..., Any]) -> Compiled:
    """Returns a part of an update compiled.

    Unrolled, a sum over the components of an action would be one loop over rows without vector instructions, with the
    exponentials and logarithms of all components in it.
    """
    return Compiled(function, unroll_reductions_threshold=1)


def _graphs(sac: SACMath, config: SACConfig) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Returns whole updates, each one graph: of the critics alone, and of critics and actor."""

    def critics(nets: Nets, rows: Rows, noise: Tensor, correction: Tensor) -> Tensor:
        grad, stats = sac.critic_gradient(nets, rows, noise[0])
        return _without_actor(stats, sac.critic_step(nets, grad, correction[0]))

    def critics_and_actor(nets: Nets, rows: Rows, noise: Tensor, correction: Tensor) -> Tensor:
        grad, critic_stats = sac.critic_gradient(nets, rows, noise[0])
        critic_norm = sac.critic_step(nets, grad, correction[0])
        for k in range(1, 1 + config.policy_interval):
            grad, actor_stats = sac.actor_gradient(nets, rows, noise[k])
            actor_norm = sac.actor_step(nets, grad, correction[k])
        return torch.cat([critic_stats, actor_stats, critic_norm, actor_norm])

    def fast(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        function = _compiled(function) if config.compile else function
        return CUDAGraph(function) if config.compile and config.learner_device == "cuda" else function

    return fast(critics), fast(critics_and_actor)


def _without_actor(stats: Tensor, norm: Tensor) -> Tensor:
    """Returns the metrics of an update of the critics alone, 0 for what is about the actor."""
    zeros = torch.zeros_like(stats)
    return torch.cat([stats, zeros, norm, zeros])
