"""Tianshou's algorithms on several ranks against one process, and what happens when a rank is lost."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from helpers import tianshou_algorithms as kit
from helpers.waiting import alive, wait_until
from tianshou.algorithm import PPO
from tianshou.algorithm.algorithm_base import Algorithm
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv

from rayvec.errors import ConfigError, LearnerError
from rayvec.tianshou import data_parallel

slow = partial(pytest.param, marks=pytest.mark.slow)


def parallel(algorithm: Any, num_ranks: int = 2) -> Any:
    return data_parallel(algorithm, num_ranks, num_nodes=0)


def plain(algorithm: Any) -> Any:
    return algorithm


def difference(one: Algorithm[Any, Any], other: Algorithm[Any, Any]) -> float:
    """Returns the largest difference between parameters, relative to each tensor's largest."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1e-3)) for a, b in pairs)


@pytest.mark.parametrize("num_ranks", [2, slow(3)])
@pytest.mark.parametrize("name", ["ppo", "impala", "dqn", *map(slow, ("ppo_clipped", "a2c", "impala_scaled", "td3"))])
def test_ranks_equal_one_process_where_steps_use_the_whole_batch(name: str, num_ranks: int) -> None:
    one = kit.make(name)
    buffers: list[Any] = [kit.fill(one), kit.fill(one)]
    expected = kit.updates(one, buffers[0], count=5)[-1]
    with parallel(kit.make(name), num_ranks) as other:
        stats = kit.updates(other, buffers[1], count=5)[-1]
    if name == "dqn":  # its priorities come back
        np.testing.assert_allclose(*(each.weight[np.arange(120)] for each in buffers), rtol=1e-6)
    assert difference(other, one) < 1e-6 < 1e-4 < difference(kit.make(name), one)
    assert type(stats) is type(expected) and stats.get_loss_stats_dict().keys() == expected.get_loss_stats_dict().keys()
    for mine, theirs in zip(*(each.state_dict()["_optimizers"] for each in (other, one)), strict=True):
        for a, b in zip(mine["state"].values(), theirs["state"].values(), strict=True):
            assert all(torch.allclose(torch.as_tensor(a[key]), torch.as_tensor(b[key]), atol=1e-6) for key in b)


def test_sac_equals_one_process_but_for_the_noise_of_its_actor() -> None:
    one = kit.make("sac")
    with parallel(kit.make("sac")) as other:
        buffer = kit.fill(other)
        kit.updates(other, buffer, count=1)
        kit.updates(one, kit.fill(one), count=1)
        assert difference(other.critic, one.critic) < 1e-9 and difference(other.critic_old, one.critic_old) < 1e-9
        assert 0 < difference(other.policy, one.policy) and 1e-4 < difference(other.policy, kit.make("sac").policy)
        kit.updates(other, buffer, count=3)
    with parallel(kit.make("sac")) as again:
        buffer = kit.fill(again)
        kit.updates(again, buffer, count=1)
        kit.updates(again, buffer, count=3)
    assert difference(other, again) == 0


@pytest.mark.parametrize(("name", "num_ranks", "rows"), [("ppo", 3, 31), slow("a2c", 2, 1), slow("impala", 2, 7)])
def test_with_minibatches_ranks_take_equally_many_steps(name: str, num_ranks: int, rows: int) -> None:
    """Also where a rank has no row of a minibatch: a rank with one step less would be waited for without end."""
    one, buffer = kit.make(name), kit.fill(kit.make(name), steps=11)
    with parallel(kit.make(name), num_ranks) as other:
        stats, expected = (kit.updates(each, buffer, count=1, rows=rows)[0] for each in (other, one))
        assert stats.gradient_steps == expected.gradient_steps
        assert 1e-5 < difference(other, kit.make(name)) and difference(other, one) < 1.0


@pytest.mark.parametrize("name", [slow("impala"), "td3"])
def test_fewer_rows_than_ranks(name: str) -> None:
    one = kit.make(name)
    with parallel(kit.make(name), 3) as other:
        for algorithm in (one, other):
            buffer = kit.fill(algorithm, steps=2, envs=1)
            kit.updates(algorithm, buffer, count=3, rows=2 if name == "td3" else None)
        assert difference(other, one) < 1e-6


class TestDriver:
    def test_shares_policy_nets_and_optimizers_and_gets_numbers_back(self) -> None:
        algorithm, one, scaled, one_scaled = (
            kit.make(name) for name in ("td3", "td3", "impala_scaled", "impala_scaled")
        )
        with parallel(algorithm) as other, parallel(scaled) as moments, parallel(kit.make("ppo")) as scheduled:
            assert isinstance(other, type(algorithm)) and other.policy is algorithm.policy
            for each in (other, one, moments, one_scaled, scheduled):
                kit.updates(each, kit.fill(each), count=5)
            assert difference(algorithm, other) == 0
            assert moments.ret_rms.count == one_scaled.ret_rms.count == 5 * 2 * 120
            assert moments.ret_rms.var == pytest.approx(one_scaled.ret_rms.var, rel=1e-9)
            assert scheduled.optim.state_dict()["param_groups"][0]["lr"] < 1e-3
            for copied in (copy.deepcopy(other), pickle.loads(pickle.dumps(other)), other.plain()):
                assert type(copied).__name__ == "TD3" and difference(copied, other) == 0
                assert vars(copied).keys() == vars(kit.make("td3")).keys()

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            slow("ppo", lambda algorithm: setattr(algorithm, "ent_coef", 0.5)),
            ("ppo", lambda algorithm: algorithm.load_state_dict(copy.deepcopy(kit.make("ppo", seed=8).state_dict()))),
            slow("ppo", lambda algorithm: algorithm.policy.actor.requires_grad_(False)),
            ("dqn", lambda algorithm: set_options(algorithm, lr=1e-2, betas=(0.5, 0.9))),
            slow("dqn", lambda algorithm: [each.data.mul_(0.5) for each in algorithm.policy.parameters()]),
        ],
    )
    def test_what_changes_here_reaches_the_ranks(self, name: str, change: Callable[[Any], Any]) -> None:
        results = []
        for make in (plain, parallel):
            algorithm = make(kit.make(name))
            buffer = kit.fill(algorithm)
            kit.updates(algorithm, buffer, count=2)
            change(algorithm)
            kit.updates(algorithm, buffer, count=2)
            results.append(algorithm)
        assert difference(*results) < 1e-6
        results[1].close()

    def test_tianshous_trainer_runs_it(self) -> None:
        algorithm = PPO(**kit.actor_critic(4, 2), optim=kit.adam())
        start = copy.deepcopy(algorithm)
        with parallel(algorithm) as other:
            cartpoles = DummyVectorEnv([partial(gymnasium.make, "CartPole-v1")] * 4)
            collector = Collector(other, cartpoles, VectorReplayBuffer(400, 4))
            assert kit.train(other, collector, max_epochs=2).update_step == 4
            assert difference(other, start) > 1e-4 and difference(other, algorithm) == 0


def set_options(algorithm: Any, **options: Any) -> None:
    state = algorithm.optim.state_dict()
    state["param_groups"][0].update(options)
    algorithm.optim.load_state_dict(state)


def held(name: str, **attributes: Any) -> Any:
    algorithm = kit.make(name)
    for attribute, value in attributes.items():
        setattr(algorithm, attribute, value)
    return algorithm


@pytest.mark.parametrize(
    ("make", "settings", "error"),
    [
        (lambda: kit.make("ppo").policy, {}, "not its policy"),
        (lambda: kit.make("npg"), {}, "its gradients by backward"),
        (lambda: kit.make("dqn"), {"num_learners": 0}, "num_learners"),
        (lambda: kit.make("dqn"), {"device": "tpu"}, "device"),
        (lambda: kit.make("ppo_recomputing"), {}, "recompute_advantage=True can't be computed"),
        (lambda: held("dqn", lock=threading.Lock()), {}, "get an algorithm by"),
        (lambda: parallel(kit.make("dqn"), 1), {}, "data-parallel already"),
    ],
)
def test_what_cannot_work_is_refused(make: Callable[[], Any], settings: dict[str, Any], error: str) -> None:
    with pytest.raises((ConfigError, TypeError), match=error):
        data_parallel(make(), **{"num_learners": 2, "num_nodes": 0, **settings})


class TestLostRanks:
    @pytest.mark.parametrize("where", [{"num_nodes": 0}, slow({"num_cpus": 0})])
    def test_the_weights_of_the_last_update_stay_and_the_next_one_has_new_ranks(
        self, ray_cluster: object, where: dict[str, Any]
    ) -> None:
        one, other = kit.make("td3"), data_parallel(kit.make("td3"), 2, **where)
        for algorithm in (one, other):
            kit.updates(algorithm, kit.fill(algorithm), count=3)
        pids = other.group.pids
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(LearnerError, match="is lost"):
            kit.updates(other, kit.fill(other), count=1)
        assert difference(other, one) < 1e-6
        for algorithm in (one, other):
            kit.updates(algorithm, kit.fill(algorithm), count=3)
        assert difference(other, one) < 1e-6 and not set(other.group.pids) & set(pids)
        pids = other.group.pids
        other.close()
        other.close()  # once more
        for pid in pids:
            wait_until(lambda pid=pid: not alive(pid), "the rank has ended")
        kit.updates(other, kit.fill(other), count=1)  # with new ranks
        other.close()

    def test_what_a_loss_raises_is_raised(self) -> None:
        with parallel(kit.make("dqn")) as other:
            buffer = kit.fill(other)
            other.huber_loss_delta = -1.0
            with pytest.raises(RuntimeError, match="non-positive values for delta") as caught:
                kit.updates(other, buffer, count=1)
            assert isinstance(caught.value.__cause__, LearnerError)
            other.huber_loss_delta = None
            kit.updates(other, buffer, count=1)

    def test_ranks_end_when_the_algorithm_is_collected(self) -> None:
        other = parallel(kit.make("dqn"), 1)
        kit.updates(other, kit.fill(other), count=1)
        pid = other.group.pids[0]
        del other
        gc.collect()
        wait_until(lambda: not alive(pid), "the rank has ended")
