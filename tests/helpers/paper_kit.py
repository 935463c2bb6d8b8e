"""Learners as their papers tell them, slow and obvious: torch.distributions, autograd, and an Adam for each tensor."""

from __future__ import annotations

import copy
import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from helpers.recurrent_kit import StepByStep
from rayvec.data import Chunk
from rayvec.learners.ranks import stratified_shuffle
from rayvec.learners.returns import gae
from rayvec.policies.distributions import Categorical
from rayvec.policies.recurrent import RecurrentActorCritic

Place = tuple[int, int]


class PaperActorCritic:
    """What PPO and IMPALA share, on the valid steps of one chunk at a time.

    Args:
        learner: Whose network and settings it begins with.
    """

    def __init__(self, learner: Any) -> None:
        self.module, self.config = copy.deepcopy(learner.module), learner.config
        self.optimizer = torch.optim.Adam(
            self.module.parameters(), lr=self.config.learning_rate, eps=1e-5, foreach=False
        )
        self.num_updates = self.num_steps = 0

    def outputs(self, chunk: Chunk) -> tuple[Tensor, Tensor, NDArray[np.float32]]:
        """Returns parameters ``[T, N, P]`` and values ``[T, N]`` with a graph, and the values after each step."""
        if isinstance(self.module, RecurrentActorCritic):
            params, values, next_value = StepByStep(self.module).unroll(chunk)
            return torch.stack([*map(torch.stack, params)]), torch.stack([*map(torch.stack, values)]), next_value
        params, value = self.module(self.module.encode(chunk.obs))
        with torch.no_grad():
            next_value = self.module(self.module.encode(chunk.next_obs()))[1].numpy()
        return params, value, next_value

    def logp_entropy(self, params: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities of the recorded actions, and entropies, ``[T, N]`` each."""
        distribution = self.module.distribution
        sample = torch.from_numpy(np.nan_to_num(distribution.recorded(chunk.act, chunk.extras)))
        if not isinstance(distribution, Categorical):
            mean, log_std = params.chunk(2, -1)
            normal = torch.distributions.Independent(torch.distributions.Normal(mean, log_std.exp()), 1)
            return normal.log_prob(sample), normal.entropy()
        choices = [torch.distributions.Categorical(logits=part) for part in params.split(list(distribution.sizes), -1)]
        logp = sum(each.log_prob(chosen) for each, chosen in zip(choices, sample.unbind(-1), strict=True))
        return logp, sum(each.entropy() for each in choices)  # type: ignore[return-value]

    def begin(self) -> np.random.Generator:
        left = 1 - self.num_steps / self.config.total_steps
        self.optimizer.param_groups[0]["lr"] = self.config.learning_rate * left
        return np.random.default_rng([self.config.seed, self.num_updates])

    def step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.module.parameters(), self.config.max_grad_norm)
        self.optimizer.step()

    def end(self, chunk: Chunk) -> None:
        self.num_updates += 1
        self.num_steps += int(chunk.valid.sum())


class PaperPPO(PaperActorCritic):
    """Schulman et al. (2017), with the details of Huang et al. (2022)."""

    def groups(self, chunk: Chunk) -> list[list[Place]]:
        """Returns what is shuffled: steps, or for a recurrent network sequences of steps."""
        length = self.module.sequence_length if isinstance(self.module, RecurrentActorCritic) else 1
        starts = range(0, chunk.num_steps, length)
        groups = [
            [(t, n) for t in range(start, min(start + length, chunk.num_steps)) if chunk.valid[t, n]]
            for n in range(chunk.num_envs)
            for start in starts
        ]
        return groups if length > 1 else [group for group in groups if group]

    def update(self, chunk: Chunk) -> None:
        config, generator, valid = self.config, self.begin(), chunk.valid
        with torch.no_grad():
            _, old_value, next_value = self.outputs(chunk)
        ends = chunk.terminated, chunk.truncated
        advantage, target = gae(
            chunk.rew, old_value.numpy(), next_value, *ends, gamma=config.gamma, lam=config.gae_lambda, valid=valid
        )
        groups = self.groups(chunk)
        count = max(1, round(int(valid.sum()) / config.minibatch_size))
        for _ in range(config.num_epochs):
            for numbers in stratified_shuffle(len(groups), count, generator):
                places = [place for number in numbers for place in groups[number]]
                at = tuple(torch.tensor(places).T)
                params, value, _ = self.outputs(chunk)
                logp, entropy = (each[at] for each in self.logp_entropy(params, chunk))
                ratio = torch.exp(logp - torch.from_numpy(chunk.extras["logp"])[at])
                gain = torch.from_numpy(advantage)[at]
                if config.normalize_advantage:
                    gain = (gain - gain.mean()) / (gain.std(correction=0) + 1e-8)
                clipped = torch.clip(ratio, 1 - config.clip_coef, 1 + config.clip_coef)
                error = (value[at] - torch.from_numpy(target)[at]) ** 2
                if config.clip_value_loss:
                    before = old_value[at]
                    near = torch.clip(value[at], before - config.clip_coef, before + config.clip_coef)
                    error = torch.max(error, (near - torch.from_numpy(target)[at]) ** 2)
                loss = -torch.min(ratio * gain, clipped * gain) + 0.5 * config.value_coef * error
                self.step((loss - config.entropy_coef * entropy).mean())
        self.end(chunk)


class PaperIMPALA(PaperActorCritic):
    """Espeholt et al. (2018)."""

    def update(self, chunk: Chunk) -> None:
        config = self.config
        for columns in stratified_shuffle(chunk.num_envs, config.num_minibatches, self.begin()):
            params, value, next_value = self.outputs(chunk)
            logp, entropy = self.logp_entropy(params, chunk)
            log_ratio = np.where(chunk.valid, logp.detach().numpy() - chunk.extras["logp"], 0)
            ends = chunk.terminated, chunk.truncated, chunk.valid
            factors = config.gamma, config.vtrace_lambda, config.rho_bar, config.c_bar
            old = value.detach().numpy()
            target, advantage = map(
                torch.from_numpy, vtrace_by_definition(chunk.rew, old, next_value, log_ratio, *ends, *factors)
            )
            loss = -logp * advantage.float() + 0.5 * config.value_coef * (value - target.float()) ** 2
            loss = loss - config.entropy_coef * entropy
            self.step(loss[:, columns][torch.from_numpy(chunk.valid[:, columns])].mean())
        self.end(chunk)


class PaperSAC:
    """Haarnoja et al. (2018) and Christodoulou (2019), from lists of transitions; observations may end with a mask.

    Args:
        learner: Whose networks, in float64, and settings it begins with.
        num_features: Of what the networks read of an observation.
    """

    def __init__(self, learner: Any, num_features: int = 3) -> None:
        self.config, self.distribution = learner.config, learner.module.distribution
        self.is_discrete, self.num_features = isinstance(self.distribution, Categorical), num_features
        state, outputs = learner.state_dict(), self.distribution.num_params
        self.num_act = outputs if self.is_discrete else outputs // 2
        hidden = self.config.hidden_sizes
        self.actor = mlp(num_features, *hidden, outputs)
        nn.utils.vector_to_parameters(state["actor"][:-1].clone(), self.actor.parameters())
        inputs, values = (num_features, outputs) if self.is_discrete else (num_features + self.num_act, 1)
        self.critics = [mlp(inputs, *hidden, values) for _ in range(self.config.num_critics)]
        copy_side_by_side(state["critic"], self.critics)
        self.targets = copy.deepcopy(self.critics)
        self.log_alpha = state["actor"][-1].clone().requires_grad_()
        critic_params = [parameter for critic in self.critics for parameter in critic.parameters()]
        self.critic_optimizer = torch.optim.Adam(critic_params, lr=self.config.q_lr)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=self.config.policy_lr)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=self.config.q_lr)
        self.replay: list[list[tuple[Any, ...]]] = [[] for _ in range(self.config.num_envs)]
        self.num_steps = self.num_updates = 0

    def update(self, chunk: Chunk) -> list[dict[str, float]]:
        """Stores a chunk, and makes the updates that are owed; returns the metrics of each."""
        rows, capacity = self.rows(chunk.obs), -(-self.config.replay_size // self.config.num_envs)
        next_rows, act = self.rows(chunk.next_obs()), self.distribution.recorded(chunk.act, chunk.extras)
        for t, n in np.argwhere(chunk.valid):
            step = rows[t, n], act[t, n], np.float32(chunk.rew[t, n]), next_rows[t, n], chunk.terminated[t, n]
            self.replay[n] = [*self.replay[n], step][-capacity:]
        self.num_steps += int(chunk.valid.sum())
        owed = math.floor(
            Fraction(str(self.config.update_to_data)) * max(0, self.num_steps - self.config.learning_starts)
        )
        return [self.learn() for _ in range(owed - self.num_updates)]

    def rows(self, obs: Any) -> NDArray[Any]:
        if not isinstance(obs, dict):
            return np.asarray(obs)
        mask = obs["action_mask"]
        (numbers,) = (part for key, part in obs.items() if key != "action_mask")
        return np.concatenate([numbers, mask.astype(np.float32)], -1)

    def learn(self) -> dict[str, float]:
        config, size, num_envs = self.config, self.config.batch_size, self.config.num_envs
        generator = np.random.Generator(np.random.Philox(key=[config.seed, self.num_updates]))
        acts = self.num_updates % config.policy_interval == 0
        place, age = generator.random((2, size))
        shape = (1 + config.policy_interval * acts, size, 0 if self.is_discrete else self.num_act)
        noise = torch.from_numpy(generator.standard_normal(shape, np.float32)).double()
        envs = [int((j + place[j]) * num_envs / size) for j in range(size)]
        drawn = [self.replay[n][int(age[j] * len(self.replay[n]))] for j, n in enumerate(envs)]
        obs, act, rew, next_obs, terminated = (
            torch.tensor(np.array(part)).double() for part in zip(*drawn, strict=True)
        )
        with torch.no_grad():
            value, _ = self.value(self.targets, next_obs, noise[0])
            target = rew + config.gamma * torch.where(terminated > 0, 0.0, value)
        q = [self.q(critic, obs, act) for critic in self.critics]
        critic_loss: Any = sum(0.5 * (each - target).square().mean() for each in q)
        step(self.critic_optimizer, critic_loss)
        metrics = {"critic_loss": float(critic_loss.detach()), "q_mean": float(torch.stack(q).detach().mean())}
        for each in noise[1:]:
            value, logp = self.value(self.critics, obs, each)
            step(self.actor_optimizer, -value.mean())
            surplus = -logp.detach().mean() - self.target_entropy(obs)
            if config.autotune:
                step(self.alpha_optimizer, self.log_alpha.exp() * surplus)
            alpha = float(self.log_alpha.exp().detach())
            means = [-float(part.detach().mean()) for part in (value, logp)]
            metrics |= {"actor_loss": means[0], "entropy": means[1], "alpha": alpha}
        for slow, fast in zip(self.targets, self.critics, strict=True):
            for old, new in zip(slow.parameters(), fast.parameters(), strict=True):
                old.data.copy_((1 - config.tau) * old.data + config.tau * new.data)
        self.num_updates += 1
        return metrics

    def allowed(self, obs: Tensor) -> Tensor:
        mask = obs[:, self.num_features :] > 0
        return torch.stack([row if row.any() else ~row for row in mask])

    def value(self, critics: list[nn.Sequential], obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the soft value of each row, and the expected log-probability."""
        numbers, alpha = obs[:, : self.num_features], self.log_alpha.exp().detach()
        if self.is_discrete:
            logits = self.actor(numbers)
            if obs.shape[1] > self.num_features:
                logits = torch.where(self.allowed(obs), logits, -1e9)
            chances = torch.distributions.Categorical(logits=logits)
            q = torch.stack([critic(numbers) for critic in critics]).amin(0)
            return (chances.probs * q).sum(-1) + alpha * chances.entropy(), -chances.entropy()
        mean, raw = self.actor(numbers).chunk(2, -1)
        normal = torch.distributions.Normal(mean, (-5 + 3.5 * (raw.tanh() + 1)).exp())
        x = mean + normal.scale * noise
        act = x.tanh()
        logp = (normal.log_prob(x) - (1 - act.square()).log()).sum(-1)
        return torch.stack([self.q(critic, obs, act) for critic in critics]).amin(0) - alpha * logp, logp

    def q(self, critic: nn.Sequential, obs: Tensor, act: Tensor) -> Tensor:
        numbers = obs[:, : self.num_features]
        if self.is_discrete:
            return critic(numbers).gather(1, act.long()).squeeze(1)  # type: ignore[no-any-return]
        return critic(torch.cat([numbers, act], 1)).squeeze(1)  # type: ignore[no-any-return]

    def target_entropy(self, obs: Tensor) -> float:
        config = self.config
        if config.target_entropy is not None:
            return float(config.target_entropy)
        if not self.is_discrete:
            return -float(self.num_act)
        masked = obs.shape[1] > self.num_features
        counts = self.allowed(obs).sum(1) if masked else torch.tensor([self.num_act])
        return float(0.5 * counts.double().log().mean())

    def networks(self) -> dict[str, Tensor]:
        """Returns the parameters in the form of a learner's state."""
        actor = nn.utils.parameters_to_vector(self.actor.parameters()).detach()
        return {
            "actor": torch.cat([actor, self.log_alpha.detach().reshape(1)]),
            "critic": side_by_side(self.critics),
            "target": side_by_side(self.targets),
        }


def step(optimizer: torch.optim.Optimizer, loss: Any) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for ins, outs in itertools.pairwise(sizes):
        layers += [nn.Linear(ins, outs, dtype=torch.float64), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def side_by_side(nets: list[nn.Sequential]) -> Tensor:
    """Returns the parameters of equal nets as one vector: each weight and bias of all nets, ``[E, ...]``, in turn."""
    groups = zip(*(net.parameters() for net in nets), strict=True)
    return torch.cat([torch.stack(group).detach().reshape(-1) for group in groups])


def copy_side_by_side(flat: Tensor, nets: list[nn.Sequential]) -> None:
    start = 0
    for group in zip(*(net.parameters() for net in nets), strict=True):
        for parameter in group:
            parameter.data.copy_(flat[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()


Array = NDArray[Any]


def vtrace_by_definition(
    rew: Array,
    value: Array,
    next_value: Array,
    log_ratio: Array,
    terminated: Array,
    truncated: Array,
    valid: Array,
    gamma: float,
    lam: float,
    rho_bar: float,
    c_bar: float,
) -> tuple[Array, Array]:
    """Equation 1 of Espeholt et al. (2018) with remark 2, and the advantage of section 4.2, in double precision."""
    num_steps, num_envs = rew.shape
    ratio = np.exp(log_ratio.astype(float))
    rho, c = np.minimum(rho_bar, ratio), lam * np.minimum(c_bar, ratio)
    target, advantage = value.astype(float), np.zeros(rew.shape)
    for n in range(num_envs):
        bootstraps = [0.0 if terminated[t, n] else float(next_value[t, n]) for t in range(num_steps)]
        for s in range(num_steps):
            for t in range(s, num_steps):
                if not valid[t, n]:
                    break
                td_error = rho[t, n] * (float(rew[t, n]) + gamma * bootstraps[t] - float(value[t, n]))
                target[s, n] += gamma ** (t - s) * np.prod(c[s:t, n]) * td_error
                if terminated[t, n] or truncated[t, n]:
                    break
        for s in range(num_steps):
            if valid[s, n]:
                last = s == num_steps - 1 or terminated[s, n] or truncated[s, n] or not valid[s + 1, n]
                following = bootstraps[s] if last else target[s + 1, n]
                advantage[s, n] = rho[s, n] * (float(rew[s, n]) + gamma * following - float(value[s, n]))
    return target, advantage
