"""IMPALA as an algorithm of Tianshou: an actor-critic that learns from steps of an older policy, by V-trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tianshou.algorithm.algorithm_base import OnPolicyAlgorithm
from tianshou.algorithm.modelfree.a2c import A2CTrainingStats
from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
from tianshou.algorithm.optim import OptimizerFactory
from tianshou.data import ReplayBuffer, SequenceSummaryStats, to_numpy, to_torch_as
from tianshou.utils import RunningMeanStd
from tianshou.utils.net.common import ActorCritic
from tianshou.utils.net.continuous import ContinuousCritic
from tianshou.utils.net.discrete import DiscreteCritic

from rayvec.learners.ranks import ALONE, Ranks, gather_values
from rayvec.learners.returns import num_rounds, vtrace_of_rows
from rayvec.tianshou.policies import joint_logp, record_logp


@dataclass(kw_only=True)
class IMPALATrainingStats(A2CTrainingStats):
    """Statistics of one update of IMPALA.

    Attributes:
        importance_weight: Mean importance weight before the update: the policy's probability of an action over that
            of the policy that acted. It is 1 where the policy has not changed since.
        rho_clip_fraction: Fraction of these weights above `rho_bar`, 0 to 1.
    """

    importance_weight: float
    rho_clip_fraction: float


class IMPALA(OnPolicyAlgorithm[ProbabilisticActorPolicy]):
    """Importance-weighted actor-learner architecture (Espeholt et al., 2018), arXiv:1802.01561.

    An actor-critic whose V-trace targets are correct also for steps that an older policy has taken. It runs in
    Tianshou's on-policy trainer, with a buffer that is emptied after each update, and with
    ``rayvec.tianshou.Collector(..., prefetch=True)``, which collects while the algorithm updates.

    From its construction on, the policy records the log-probability of each action that it draws, and every
    collector, Tianshou's own included, puts it into the buffer as ``policy.logp``. Steps of a buffer without it are
    treated as steps of the policy as it is when the update begins, as in PPO. Do not mix steps that were taken at
    random with recorded ones.

    Attributes:
        ranks: The ranks that learn together, where :func:`~rayvec.tianshou.data_parallel` computes the updates.
        own_rows: The rows of the batch that are this rank's.
    """

    ranks: Ranks = ALONE
    own_rows = slice(None)

    def __init__(
        self,
        *,
        policy: ProbabilisticActorPolicy,
        critic: torch.nn.Module | ContinuousCritic | DiscreteCritic,
        optim: OptimizerFactory,
        rho_bar: float = 1.0,
        c_bar: float = 1.0,
        vtrace_lambda: float = 1.0,
        vf_coef: float = 0.5,
        ent_coef: float = 0.01,
        max_grad_norm: float | None = None,
        max_batchsize: int = 256,
        gamma: float = 0.99,
        return_scaling: bool = False,
    ) -> None:
        """Makes the optimizer, and lets the policy record log-probabilities.

        Args:
            policy: the policy containing the actor network.
            critic: the critic network. (s -> V(s))
            optim: the optimizer factory, for actor and critic together.
            rho_bar: where importance weights of TD errors and of the policy gradient are cut off. The values
                converge to those of a policy between the one that acted (towards 0) and the one that learns (towards
                infinity); 1 is the paper's choice.
            c_bar: where importance weights of the traces are cut off, which bounds their variance; at most `rho_bar`
                in the paper, whose choice is 1.
            vtrace_lambda: factor of the traces in [0, 1]: 1 sums up to the end of what was collected, 0 takes one step.
            vf_coef: coefficient that weights the value loss relative to the actor loss.
            ent_coef: coefficient that weights the entropy bonus relative to the actor loss.
            max_grad_norm: the maximum L2 norm threshold for gradient clipping; None disables it.
            max_batchsize: the maximum number of samples whose values and log-probabilities are computed at once.
            gamma: the discount factor in [0, 1] for future rewards.
            return_scaling: whether the critic learns, and the policy's gradient is measured, in units of the running
                standard deviation of the targets, which need not be known then. (In Tianshou's A2C only the critic's
                targets are scaled.)
        """
        super().__init__(policy=policy)
        assert min(rho_bar, c_bar) > 0.0, f"rho_bar and c_bar should be positive but got: {rho_bar}, {c_bar}"
        for name, value in {"vtrace_lambda": vtrace_lambda, "gamma": gamma}.items():
            assert 0.0 <= value <= 1.0, f"{name} should be in [0, 1] but got: {value}"
        record_logp(policy)
        self.critic = critic
        self.optim = self._create_optimizer(ActorCritic(policy.actor, critic), optim, max_grad_norm=max_grad_norm)
        self.rho_bar = rho_bar
        self.c_bar = c_bar
        self.vtrace_lambda = vtrace_lambda
        self.vf_coef = vf_coef
        self.ent_coef = ent_coef
        self.max_grad_norm = max_grad_norm
        self.max_batchsize = max_batchsize
        self.gamma = gamma
        self.return_scaling = return_scaling
        self.ret_rms = RunningMeanStd()

    def _preprocess_batch(self, batch: Any, buffer: ReplayBuffer, indices: NDArray[np.int64]) -> Any:
        """Adds the log-probabilities of the policy that acted, and where the steps of an environment end."""
        like = next(self.critic.parameters())
        batch.act = to_torch_as(batch.act, like)
        recorded: Any = batch.policy.get("logp", None)
        batch.logp_old = self._evaluate(batch)[0] if recorded is None else to_torch_as(recorded, like).flatten()
        batch.is_last = np.isin(indices, buffer.last_index)
        return batch

    def _evaluate(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns log-probabilities of the actions, and values of observations before and after, ``[B]`` each."""
        parts = []
        with torch.no_grad():
            for minibatch in batch.split(self.max_batchsize, shuffle=False, merge_last=True):
                logp = joint_logp(self.policy(minibatch).dist, minibatch.act)
                parts.append((logp, self.critic(minibatch.obs).flatten(), self.critic(minibatch.obs_next).flatten()))
        logp, v_s, v_s_ = (torch.cat(part) for part in zip(*parts, strict=True))
        return logp, v_s, v_s_

    def _add_targets(self, batch: Any) -> torch.Tensor:
        """Adds V-trace targets and advantages by the present policy and critic; returns importance weights."""
        logp, batch.v_s, v_s_ = self._evaluate(batch)
        scale = np.sqrt(self.ret_rms.var + np.finfo(np.float32).eps) if self.return_scaling else 1.0
        log_ratio = logp - batch.logp_old
        known = (to_numpy(each) for each in (batch.v_s * scale, v_s_ * scale, log_ratio))
        returns, advantages = self.compute_vtrace(batch, *known)
        batch.returns = to_torch_as(returns / scale, batch.v_s)
        batch.adv = to_torch_as(advantages / scale, batch.v_s)
        if self.return_scaling:
            self.ret_rms.update(gather_values(self.ranks, returns[self.own_rows]))
        weights: torch.Tensor = log_ratio.exp()
        return weights

    def compute_vtrace(
        self, batch: Any, value: NDArray[Any], next_value: NDArray[Any], log_ratio: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Returns the V-trace target and the advantage of each step of a batch, ``[B]``.

        Targets do not cross the end of an episode, nor the end of what was collected: the value of the observation
        after it bootstraps them, unless the episode terminated.

        Args:
            batch: Steps of one environment after another, with rewards, ends of episodes and ``is_last``.
            value: Of the observations, ``[B]``, in units of rewards.
            next_value: Of the observations after each step, ``[B]``.
            log_ratio: Log-probability of each action, less that by which it was chosen, ``[B]``.
        """
        ended = batch.terminated | batch.truncated | batch.is_last
        longest = int(np.diff(np.flatnonzero(np.append(ended[:-1], True)), prepend=-1).max())
        discount = np.where(batch.terminated, 0.0, self.gamma)
        rows = (batch.rew, value, next_value, log_ratio, discount, ~ended)
        found = vtrace_of_rows(
            *(torch.from_numpy(np.asarray(each, value.dtype)) for each in rows),
            decay=self.gamma * self.vtrace_lambda,
            rho_bar=self.rho_bar,
            c_bar=self.c_bar,
            rounds=num_rounds(longest),
        )
        returns, advantages = (each.numpy() for each in found)
        return returns, advantages

    def _update_with_batch(self, batch: Any, batch_size: int | None, repeat: int) -> IMPALATrainingStats:
        """Passes `repeat` times over the batch, with new targets for each pass; None makes a pass one step."""
        losses, actor_losses, vf_losses, ent_losses, weights = [], [], [], [], []
        split_batch_size = batch_size or -1
        for _ in range(repeat):
            weights.append(self._add_targets(batch))
            for minibatch in batch.split(split_batch_size, merge_last=True):
                # calculate loss for actor
                dist = self.policy(minibatch).dist
                actor_loss = -(joint_logp(dist, minibatch.act) * minibatch.adv).mean()
                # calculate loss for critic
                value = self.critic(minibatch.obs).flatten()
                vf_loss = F.mse_loss(minibatch.returns, value)
                # calculate regularization and overall loss
                ent_loss = dist.entropy().mean()
                loss = actor_loss + self.vf_coef * vf_loss - self.ent_coef * ent_loss
                self.optim.step(loss)
                actor_losses.append(actor_loss.item())
                vf_losses.append(vf_loss.item())
                ent_losses.append(ent_loss.item())
                losses.append(loss.item())

        return IMPALATrainingStats(
            loss=SequenceSummaryStats.from_sequence(losses),
            actor_loss=SequenceSummaryStats.from_sequence(actor_losses),
            vf_loss=SequenceSummaryStats.from_sequence(vf_losses),
            ent_loss=SequenceSummaryStats.from_sequence(ent_losses),
            gradient_steps=len(losses),
            importance_weight=float(weights[0].mean()),
            rho_clip_fraction=float((weights[0] > self.rho_bar).double().mean()),
        )
