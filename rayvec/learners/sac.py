"""Soft actor-critic (Haarnoja et al., 2018, arXiv:1812.05905), and its discrete variant (arXiv:1910.07207).

What one minibatch does is in :mod:`rayvec.learners.sac_math`; this module says which minibatches there are. See
``docs/algorithms.md`` for every detail and metric.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from rayvec.data import Batch, Chunk
from rayvec.errors import CheckpointError, LearnerError
from rayvec.learners.base import buffers_of, check_buffers, explains_memory, load_buffers, torch_device
from rayvec.learners.minibatches import check_minibatch
from rayvec.learners.ranks import ALONE, Ranks, first_bad_reward, global_range
from rayvec.learners.replay import ReplayBuffer
from rayvec.learners.sac_math import Minibatch, corrections
from rayvec.learners.sac_networks import (
    InBF16,
    action_form,
    default_networks,
    initial_nets,
    make_math,
    make_sac_distribution,
)
from rayvec.learners.sac_own_network import own_networks
from rayvec.learners.sac_update import SACUpdate, UpdateInputs
from rayvec.policies.networks import to_device, upload
from rayvec.policies.precision import prepare
from rayvec.pools.shared_memory import keep_freed_memory

if TYPE_CHECKING:
    from rayvec.config import SACConfig

__all__ = ["SACLearner"]

_METRICS = ("critic_loss", "q_mean", "actor_loss", "entropy", "critic_grad_norm", "actor_grad_norm", "alpha")
_OF_CRITICS = ("critic_loss", "q_mean", "critic_grad_norm")
_NUM_GLOBAL = 3  # the last three are the same on every rank
_ROWS_AHEAD = 8192  # minibatches that are drawn together have at most so many rows
_COUNTERS = ("num_updates", "num_filled", "num_credited")
_log = logging.getLogger(__name__)


class _RowPlan(NamedTuple):
    """Where the rows of K minibatches lie that belong to this rank, b in each.

    Attributes:
        environments: Whose step each row is, among those of this rank, ``int64 [K, b]``. At either end a row may
            belong to another rank.
        ages: Which of the environment's steps, 0 for the oldest, ``int64 [K, b]``.
        weight: Share of each row in a mean over all rows of all ranks, ``[K, b]``.
        noises: For each minibatch ``[1 + k, b, C]``.
        adam_steps: For each minibatch the numbers of the steps that the critics' and the actor's optimizer take.
    """

    environments: NDArray[np.int64]
    ages: NDArray[np.int64]
    weight: NDArray[np.float64]
    noises: list[NDArray[np.float32]]
    adam_steps: list[list[int]]


class SACLearner:
    """Improves an actor and an ensemble of critics by soft actor-critic, from a replay of all steps.

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

    Attributes:
        module: The actor.
        ranks: The ranks that compute each update together; each rank gets the chunks of its own environments.

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
        device: str | None = None,
    ) -> None:
        keep_freed_memory(512 << 20)
        self.config = config
        self.ranks: Ranks = ALONE
        self._dtype, self._device = dtype, torch_device(device or config.learner_device)
        distribution = make_sac_distribution(action_space)
        make = default_networks if config.network is None else own_networks
        networks = make(observation_space, action_space, distribution, config, self._device)
        prepare(config.precision, self._device)
        layouts = (networks.critic, networks.actor)
        if config.precision == "bf16":
            layouts = (InBF16(networks.critic), InBF16(networks.actor))
        self._math = make_math(*layouts, distribution, config, is_masked=networks.is_masked)
        self._nets = initial_nets(*networks.initial, config, dtype, self._device)
        self.module = networks.attach(self._nets.actor.param)
        self._obs_shape = networks.obs_shape
        self._own_module = networks.module
        _, self._num_act = action_form(distribution)
        self._replay = self._empty_replay()
        self._rate = Fraction(str(config.update_to_data))
        self._num_updates = 0
        self._num_filled = 0
        self._num_credited = 0
        self._own_environments = range(0)
        self._sizes = np.zeros(0, np.int64)
        self._update = SACUpdate(self._math, config, self._device)

    @explains_memory("Lower batch_size or replay_size, set replay_on_device=False")
    def update(self, batch: Batch) -> dict[str, float]:
        """Stores the steps of a batch, and makes the updates that are owed.

        Returns:
            Means over these updates, none if there were none: ``critic_loss`` (sum over the critics), ``q_mean``,
            ``actor_loss``, ``entropy`` (nats), ``alpha``, ``critic_grad_norm``, ``actor_grad_norm``; and
            ``num_updates`` so far and ``replay_steps``, the transitions in the replay of all ranks.

        Raises:
            LearnerError: A reward is not finite, and nothing of the batch was stored; or a gradient is not finite, and
                the weights are those before the failed step; or memory has run out. If that happens while the batch is
                stored, the replay refills.
        """
        check_minibatch(self.ranks, self.config.batch_size)
        self._store(batch)
        owed = math.floor(self._rate * self._num_credited) - self._num_updates
        stats: list[Tensor] = []
        while self._sizes.any() and len(stats) < owed:
            count = min(owed - len(stats), max(1, _ROWS_AHEAD // self.config.batch_size))
            stats += [self._step(inputs) for inputs in self._minibatches(count)]
        return self._metrics(stats) if stats else {}

    def _store(self, batch: Batch) -> None:
        """Stores the steps of a batch in the replay, and sums up the number of steps over all ranks.

        A reward that is not finite raises before anything changes: it would lie in the replay, and so in every
        checkpoint, until an update happens to draw it.
        """
        known = self._replay.env_ids
        is_foreign = known is not None and any(not np.array_equal(known, chunk.env_ids) for chunk in batch.chunks)
        count = sum(int(chunk.valid.sum()) for chunk in batch.chunks)
        bad = _bad_reward(batch.chunks)
        news = torch.tensor([count, is_foreign, bad is not None], dtype=torch.int64, device=self._device)
        num_steps, num_foreign, num_bad = self.ranks.sum_(news).tolist()
        if num_bad:
            raise LearnerError(
                "A replay holds finite rewards, or updates would fail at some later time.",
                expected="rewards that are finite in float32",
                got=first_bad_reward(self.ranks, bad),
                remedy="Correct the environment's reward, or wrap it in one that replaces such rewards",
            )
        if num_foreign:
            self._refill("it holds steps of other environments than this rank's")
        with self._changing_replay():
            for chunk in batch.chunks:
                self._replay.add(chunk)
        before, after = self._num_filled, self._num_filled + num_steps
        self._num_credited += max(0, after - max(before, self.config.learning_starts))
        self._num_filled = after

        own, total = global_range(self.ranks, len(self._replay.sizes))
        self._own_environments = own
        sizes = torch.zeros(total, dtype=torch.int64, device=self._device)
        sizes[own.start : own.stop] = torch.from_numpy(self._replay.sizes)
        self._sizes = self.ranks.sum_(sizes).cpu().numpy()

    def _step(self, inputs: UpdateInputs) -> Tensor:
        """Makes one update; returns its metrics, ``[7]``."""
        stats = self._update(self._nets, inputs, self.ranks)
        self._num_updates += 1
        return stats

    def _minibatches(self, count: int) -> list[UpdateInputs]:
        """Draws this rank's part of the next minibatches.

        Several at a time: right after an update, whose nets have replaced everything else in the caches, drawing one
        took three times as long as right after another.
        """
        plan = self._plan_rows(count)
        return self._split_updates(plan, self._fetch_rows(plan))

    def _plan_rows(self, count: int) -> _RowPlan:
        """Draws which rows the next minibatches have."""
        size, num_envs, here = self.config.batch_size, len(self._sizes), self._own_environments
        begin = here.start * size // num_envs
        end = -(-here.stop * size // num_envs) if here else begin
        numbers = range(self._num_updates, self._num_updates + count)
        adam_steps = [self._adam_steps(number) for number in numbers]
        draws, noises = zip(
            *(self._draw(*each) for each in zip(numbers, map(len, adam_steps), strict=True)), strict=True
        )
        place, age = np.stack(draws, 1)
        environments = ((np.arange(size) + place) * num_envs / size).astype(np.int64).clip(max=num_envs - 1)
        counts = self._sizes[environments]
        weight = (counts > 0) / np.count_nonzero(counts, 1).clip(min=1)[:, None]
        own = slice(begin, end)
        return _RowPlan(
            environments[:, own] - here.start,
            (age * counts).astype(np.int64)[:, own],
            weight[:, own],
            [noise[:, own] for noise in noises],
            adam_steps,
        )

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

    def _fetch_rows(self, plan: _RowPlan) -> Minibatch:
        """Returns the rows of all minibatches; zeros of weight 0 for those of other ranks or without steps."""
        environments, ages, weight = plan.environments.ravel(), plan.ages.ravel(), plan.weight.flatten()
        num_envs, obs_shape = len(self._replay.sizes), (0, *self._obs_shape)
        if not len(environments):
            shapes = (obs_shape, (0, self._num_act), (0,), obs_shape, (0,), (0,))
            return Minibatch(*(torch.zeros(shape, device=self._device, dtype=self._dtype) for shape in shapes))
        padding = (environments < 0) | (environments >= num_envs) | (weight == 0)
        environments = environments.clip(0, num_envs - 1)
        last = np.maximum(self._replay.sizes[environments] - 1, 0)
        found = self._replay.sample(np.minimum(ages, last), environments)
        parts = (found.obs, found.act, found.rew, found.next_obs, found.terminated)
        obs, act, *others = (to_device(part, self._device) for part in parts)
        if self._math.is_discrete:
            act = torch.eye(self._num_act, device=self._device).index_select(0, act[:, 0])
        weights = upload(weight, self._device, self._dtype)
        rows = Minibatch(*(part.to(self._dtype) for part in (obs, act, *others, weights)))
        if padding.any():
            places = upload(np.flatnonzero(padding), self._device)
            for part in rows:
                part.index_fill_(0, places, 0)
        return rows

    def _split_updates(self, plan: _RowPlan, rows: Minibatch) -> list[UpdateInputs]:
        """Returns what each update reads of the rows of all."""
        count, num_rows = plan.weight.shape
        minibatches = zip(*(part.view(count, num_rows, *part.shape[1:]).unbind() for part in rows), strict=True)
        numbers = np.array([corrections(step) for steps in plan.adam_steps for step in steps])
        lengths = [len(steps) for steps in plan.adam_steps]
        noise, correction = (
            torch.split(upload(array, self._device, self._dtype), lengths)
            for array in (np.concatenate(plan.noises), numbers)
        )
        return [
            UpdateInputs(Minibatch(*minibatch), *others)
            for minibatch, *others in zip(minibatches, noise, correction, strict=True)
        ]

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
                remedy="Look for NaN, and for numbers beyond float32, in observations, and lower policy_lr or q_lr",
            )
        touched = (stats[:, -1:] > 0).sum(0).clamp(min=1)  # alpha is positive where the actor took a step
        counts = torch.where(torch.tensor([name in _OF_CRITICS for name in _METRICS]), len(stats), touched)
        means = dict(zip(_METRICS, (stats.sum(0) / counts).tolist(), strict=True))
        if not (stats[:, -1] > 0).any():
            means = {name: value for name, value in means.items() if name in _OF_CRITICS}
        return {**means, "num_updates": self._num_updates, "replay_steps": int(self._sizes.sum())}

    def weights(self) -> NDArray[np.float32]:
        """Returns a copy of the actor's parameters, flat: what ``Policy.load_weights`` takes."""
        weights: NDArray[np.float32] = self.module.weights()
        return weights

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of what the next update depends on: tensors and plain values only.

        There is no random state: random numbers are drawn from (seed, number of the update). The replay, which is
        this rank's, is part of it unless ``config.checkpoint_replay`` is off.
        """
        return {**self.shared_state(), **self.rank_local_state()}

    def shared_state(self) -> dict[str, Any]:
        """Returns what is the same on all ranks: everything but the replay."""
        return {
            "critic": torch.stack(self._nets.critic).cpu(),
            "target": self._nets.target.cpu().clone(),
            "actor": torch.stack(self._nets.actor).cpu(),
            "buffers": {name: buffer.cpu() for name, buffer in buffers_of(self._own_module).items()},
            **{name: getattr(self, f"_{name}") for name in _COUNTERS},
        }

    def rank_local_state(self) -> dict[str, Any]:
        """Returns this rank's replay, or None in its place if ``config.checkpoint_replay`` is off."""
        return {"replay": self._replay.state_dict() if self.config.checkpoint_replay else None}

    @staticmethod
    def with_network(own: dict[str, Any], other: Mapping[str, Any], config: SACConfig) -> dict[str, Any]:
        """Returns the state `own` with the nets of the state `other`, whose moments in Adam are left out.

        With `autotune` the temperature is that of `other` too.
        """
        nets = {name: torch.zeros_like(other[name]) for name in ("critic", "actor")}
        for name, net in nets.items():
            net[0] = other[name][0]
        if not config.autotune:
            nets["actor"][0, -1] = own["actor"][0, -1]
        return {**own, **nets, "target": other["target"], "buffers": other.get("buffers", own["buffers"])}

    @explains_memory("Resume with replay_on_device=False, or where more memory is free")
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where the learner was when `state` was taken: exactly, if the replay is part of it.

        With a state without a replay, such as `shared_state`, or with that of other environments, the replay refills:
        updates resume after `learning_starts` more steps.

        Raises:
            CheckpointError: `state` is not that of a SAC learner, or of other nets.
            LearnerError: Memory for the replay has run out. The learner then continues as from a state without one.
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
        check_buffers(self._own_module, state)
        for name, target in (("critic", self._nets.critic), ("actor", self._nets.actor)):
            for part, saved in zip(target, state[name], strict=True):
                part.copy_(saved)
        self._nets.target.copy_(state["target"])
        load_buffers(self._own_module, state)
        self._nets.healthy.fill_(1)
        for name in _COUNTERS:
            setattr(self, f"_{name}", int(state[name]))
        self._replay = self._empty_replay()
        if state.get("replay") is not None:
            with self._changing_replay():
                self._replay.load_state_dict(state["replay"])
        elif self._num_filled:
            self._refill("the state that was loaded does not contain it")

    @contextlib.contextmanager
    def _changing_replay(self) -> Iterator[None]:
        """Lets the replay refill where an error has emptied it."""
        try:
            yield
        except BaseException:
            if self._num_filled and not len(self._replay):
                self._refill("an error has interrupted a change of it")
            raise

    def _refill(self, reason: str) -> None:
        """Empties the replay, and waits for `learning_starts` steps again."""
        _log.warning("the replay refills, since %s: updates resume after %d steps", reason, self.config.learning_starts)
        self._replay = self._empty_replay()
        self._num_filled = 0

    def _empty_replay(self) -> ReplayBuffer:
        capacity_steps = -(-self.config.replay_size // self.config.num_envs)
        recorded = functools.partial(self.module.distribution.recorded, extras={})
        device = self._device if self.config.replay_on_device else torch.device("cpu")
        return ReplayBuffer(capacity_steps, self.module.rows, recorded, device)


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
