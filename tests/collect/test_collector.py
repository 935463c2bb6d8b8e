"""The Collector: exact counts, honest episodes, weights by version."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from conftest import MakeVec
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from helpers.exact import DriftEnv, TablePolicy
from helpers.simple_policies import raises_at_ten, still
from helpers.testing import CoinEnv, CountingEnv, assert_identical, counting_errors

from rayvec.collect.collector import Collector
from rayvec.data import Batch
from rayvec.errors import ConfigError, EnvError
from rayvec.vector.ray_vec_env import RayVecEnv


@pytest.fixture(scope="module")
def counting(make_module_vec: MakeVec) -> RayVecEnv:
    return make_module_vec([CountingEnv] * 5, nodes=2)


def local(envs: Any, **kwargs: Any) -> RayVecEnv:
    """Environments that this process steps, for tests to which it makes no difference where they are."""
    return RayVecEnv(envs, num_nodes=0, workers_per_node=0, **kwargs)


def assert_consistent(batch: Batch) -> None:
    """Asserts what holds of every batch."""
    stats = batch.stats
    taken = sum(chunk.valid.size for chunk in batch.chunks)
    assert stats.n_collected_steps == sum(int(chunk.valid.sum()) for chunk in batch.chunks)
    assert stats.n_collected_steps + stats.n_surplus_steps == taken
    assert stats.n_collected_episodes == len(stats.returns) == len(stats.lens)
    assert stats.returns.dtype == np.float64 and stats.lens.dtype == np.int64
    assert set(stats.time_split_s) == {"environment", "inference", "waiting", "transport"}
    assert min(stats.time_split_s.values()) >= 0
    assert sum(stats.time_split_s.values()) == pytest.approx(stats.collect_time_s)
    assert stats.steps_per_s == pytest.approx(taken / stats.collect_time_s)


class TestSteps:
    @pytest.mark.parametrize("inference", ["worker", "driver", "node"])
    def test_every_environment_takes_the_same_number_rounded_up(self, counting: RayVecEnv, inference: Any) -> None:
        collector = Collector(counting, TablePolicy(), inference, seed=0)
        for n_step, num_steps in ((1, 1), (5, 1), (6, 2), (50, 10)):
            batch = collector.collect(n_step=n_step)
            assert_consistent(batch)
            assert [chunk.num_steps for chunk in batch.chunks] == [num_steps]
            assert batch.stats.n_collected_steps == 5 * num_steps and batch.stats.n_surplus_steps == 0

    def test_chunks_follow_each_other_and_episodes_are_carried_over(self, counting: RayVecEnv) -> None:
        collector = Collector(counting, TablePolicy(), seed=1)
        batches = [collector.collect(n_step=5 * steps) for steps in (3, 1, 11, 30)]
        chunks = [batch.chunks[0] for batch in batches]
        assert counting_errors(chunks) == []
        assert [chunk.first_step for chunk in chunks] == [0, 3, 4, 15]
        pieces = (
            np.concatenate([batch.stats.returns for batch in batches]),
            np.concatenate([batch.stats.lens for batch in batches]),
        )
        whole = Collector(counting, TablePolicy(), seed=1).collect(n_step=5 * 45)
        assert_identical(pieces, (whole.stats.returns, whole.stats.lens))

    def test_returns_and_lengths_are_gymnasiums(self) -> None:
        batch = Collector(local([DriftEnv] * 4), still, seed=3).collect(n_step=4 * 120)
        sync = RecordEpisodeStatistics(SyncVectorEnv([DriftEnv] * 4, autoreset_mode="SameStep"))
        sync.reset(seed=3)
        returns, lens = [], []
        for _ in range(120):
            episodes = sync.step(np.zeros(4, int))[4]
            if "final_info" in episodes or "episode" in episodes:
                over = episodes["_episode"]
                returns += episodes["episode"]["r"][over].tolist()
                lens += episodes["episode"]["l"][over].tolist()
        sync.close()
        assert len(lens) > 10
        assert batch.stats.lens.tolist() == lens
        assert batch.stats.returns == pytest.approx(returns)


class TestEpisodes:
    @pytest.mark.parametrize("inference", ["worker", "driver", "node"])
    @pytest.mark.parametrize("n_episode", [1, 5, 7, 23])
    def test_each_environment_has_its_quota(self, counting: RayVecEnv, n_episode: int, inference: Any) -> None:
        collector = Collector(counting, TablePolicy(), inference, seed=2)
        for _ in range(2):
            batch = collector.collect(n_episode=n_episode)
            assert_consistent(batch)
            stats = batch.stats
            assert stats.n_collected_episodes == n_episode
            assert stats.n_collected_steps == stats.lens.sum()
            assert counting_errors(batch.chunks) == []
            ends = sum((chunk.done & chunk.valid).sum(0) for chunk in batch.chunks)
            assert ends.tolist() == [n_episode // 5 + (n < n_episode % 5) for n in range(5)]

    def test_steps_continue_after_episodes_without_what_was_dropped(self, counting: RayVecEnv) -> None:
        """What lies in no batch is in no statistics: an episode is known by its steps in valid places."""
        collector = Collector(counting, TablePolicy(), seed=2)
        collector.collect(n_episode=3)
        batch = collector.collect(n_step=5 * 30)
        assert counting_errors(batch.chunks) == []
        assert_consistent(batch)

    def test_short_episodes_are_not_favoured(self) -> None:
        """Lengths of 1 or 40 by the toss of a coin: the mean is 20.5, in the first call as in all others."""
        collector = Collector(local([partial(CoinEnv, 1, 40)] * 20), still, seed=4)
        for _ in range(4):
            lens = collector.collect(n_episode=200).stats.lens
            assert len(lens) == 200
            standard_error = 19.5 / np.sqrt(200)
            assert abs(lens.mean() - 20.5) < 3 * standard_error
        collector.collect(n_step=20 * 7)
        assert abs(collector.collect(n_episode=200).stats.lens.mean() - 20.5) < 3 * standard_error


OTHER_USES: dict[str, Any] = {
    "reset": lambda env: env.reset(),
    "partial reset": lambda env: env.reset(options={"reset_mask": np.arange(5) == 2}),
    "step": lambda env: env.step(np.zeros(5, int)),
    "rollout": lambda env: env.rollout(still, 3),
    "rollout in the driver": lambda env: env.rollout(still, 3, "driver"),
    "steps": lambda env: Collector(env, still).collect(n_step=5 * 3),
    "episodes": lambda env: Collector(env, still).collect(n_episode=5),
}


@pytest.mark.parametrize("inference", ["worker", "driver", "node"])
@pytest.mark.parametrize("use", OTHER_USES)
def test_new_episodes_begin_after_other_uses(use: str, inference: Any) -> None:
    env = local([CountingEnv] * 5)
    collector = Collector(env, still, inference, seed=2)
    collector.collect(n_step=5 * 2)
    for count in ({"n_step": 5 * 30}, {"n_episode": 10}):
        OTHER_USES[use](env)
        episodes = collector.collect(**count)
        assert (episodes.chunks[0].obs[0, :, 2] == 0).all()
        assert_identical(*episodes_of(episodes))
    assert (collector.collect(n_step=5 * 4).chunks[0].obs[0] == episodes.chunks[-1].last_obs).all(), "and continue"


def episodes_of(batch: Batch) -> tuple[list[float], list[float]]:
    """Returns, by hand: what the batch says, and what its valid steps add up to, in the order of their ends."""
    sums = np.zeros(batch.chunks[0].num_envs)
    found: list[float] = []
    for chunk in batch.chunks:
        for t in range(chunk.num_steps):
            sums += np.where(chunk.valid[t], chunk.rew[t], 0.0)
            for n in np.flatnonzero(chunk.done[t] & chunk.valid[t]):
                found.append(float(sums[n]))
                sums[n] = 0.0
    return batch.stats.returns.tolist(), found


@pytest.mark.parametrize("inference", ["worker", "driver", "node"])
def test_every_step_is_taken_with_the_newest_version(counting: RayVecEnv, inference: Any) -> None:
    policies = [TablePolicy(seed=seed) for seed in range(4)]
    collector = Collector(counting, TablePolicy(seed=0), inference, seed=0)
    for version, policy in enumerate(policies):
        if version:
            assert collector.set_weights(policy.weights()) == version
        batch = collector.collect(n_step=100)
        chunk = batch.chunks[0]
        assert chunk.weights_version == version
        assert batch.stats.weights_versions == (version, version)
        assert_identical(chunk.extras["logp"], policy.logp_table[chunk.extras["state"], chunk.act])


def test_a_policy_in_the_driver_loads_weights_once_and_at_once(counting: RayVecEnv) -> None:
    loaded = []

    class Policy(TablePolicy):
        def load_weights(self, weights: Any, num_actions: int | None = None) -> None:
            super().load_weights(weights, num_actions)
            loaded.append(weights.tolist())

    policy, new = Policy(), TablePolicy(seed=1).weights()
    collector = Collector(counting, policy, "driver")
    with pytest.raises(ValueError, match="reshape"):
        collector.set_weights(np.ones(7, np.float32))
    assert collector.set_weights(new) == 1
    assert policy.weights().tolist() == new.tolist()
    assert collector.collect(n_step=5).stats.weights_versions == (1, 1)
    assert loaded[1:] == [new.tolist()]


def test_noise_and_counters_continue_with_new_episodes(counting: RayVecEnv) -> None:
    first = Collector(counting, TablePolicy(), seed=5)
    first.collect(n_step=50)
    first.set_weights(TablePolicy(seed=1).weights())
    state = first.state_dict()
    assert state["envs"] is None
    second = Collector(counting, TablePolicy(), seed=5)
    second.load_state_dict(state)
    assert second.state_dict() == state
    second.reset(seed=77)
    assert second.set_weights(TablePolicy(seed=1).weights()) == first.state_dict()["version"] + 1
    chunk = second.collect(n_step=20).chunks[0]
    assert chunk.first_step == 10
    assert chunk.obs[0].tolist() == [[77 + i, 0, 0, 0] for i in range(5)]


class TestInput:
    @pytest.mark.parametrize(
        "kwargs",
        [{}, {"n_step": 1, "n_episode": 1}, {"n_step": 0}, {"n_step": 1.5}, {"n_episode": -1}, {"n_episode": True}],
        ids=repr,
    )
    def test_counts(self, counting: RayVecEnv, kwargs: Any) -> None:
        with pytest.raises(ConfigError, match=r"n_step|n_episode"):
            Collector(counting, still).collect(**kwargs)

    @pytest.mark.parametrize("inference", ["worker", "driver"])
    def test_a_closed_collector(self, inference: Any) -> None:
        with local([CountingEnv]) as env:
            collector = Collector(env, TablePolicy(), inference)
            collector.set_weights(TablePolicy().weights())
            collector.close()
            for call in (
                partial(collector.collect, n_step=1),
                partial(collector.play, 1),
                partial(collector.set_weights, np.ones(128, np.float32)),
                collector.reset,
            ):
                with pytest.raises(ConfigError, match="after close"):
                    call()

    def test_other_environments(self) -> None:
        with pytest.raises(ConfigError, match=r"RecordEpisodeStatistics is not a rayvec.RayVecEnv.*wrappers=\[...\]"):
            Collector(RecordEpisodeStatistics(SyncVectorEnv([CountingEnv])), still)  # type: ignore[arg-type]


def test_a_policy_that_raises_in_a_worker_is_heard_with_its_traceback(make_vec: MakeVec) -> None:
    collector = Collector(make_vec([CountingEnv] * 2, nodes=2), raises_at_ten, seed=0, prefetch=True)
    with pytest.raises(LookupError, match="the policy gave up") as caught:
        for _ in range(3):
            collector.collect(n_step=2 * 8)
    cause = caught.value.__cause__
    assert isinstance(cause, EnvError) and "worker 0" in str(cause) and "in raises_at_ten" in str(cause)


@pytest.mark.parametrize("workers", [0, 2])
def test_episodes_that_are_too_long_are_cut_and_the_others_are_whole(workers: int) -> None:
    fns = [partial(CoinEnv, length, length) for length in (30, 100, 70)]
    with RayVecEnv(fns, num_nodes=0, workers_per_node=workers) as env:
        played = Collector(env, lambda obs: np.zeros(len(obs), int), seed=1).play(6, max_len=80)
    lens = {env_id: played.lens[played.env_ids == env_id].tolist() for env_id in range(3)}
    assert lens == {0: [30, 30], 1: [80, 80], 2: [70, 70]} and played.num_cut == 2
    assert played.returns.tolist() == played.lens.tolist()
