"""rayvec's Collector for Tianshou against Tianshou's own over ``DummyVectorEnv``."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import tianshou.data
import torch
from gymnasium import spaces
from helpers import tianshou_algorithms as kit
from helpers.exact import DriftEnv
from helpers.testing import FaultyEnv
from helpers.tianshou_buffers import assert_same_buffer
from helpers.tianshou_kit import Agents, Exact, Pointed, Remembers
from tianshou.algorithm import PPO
from tianshou.algorithm.algorithm_base import Policy
from tianshou.data import (
    Batch,
    CachedReplayBuffer,
    CollectStats,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    VectorReplayBuffer,
)
from tianshou.env import DummyVectorEnv

from rayvec.errors import ConfigError
from rayvec.tianshou import Collector, RayVectorEnv

ENVS: dict[str, Callable[[], Any]] = {"drift": DriftEnv, "pointed": Pointed, "agents": Agents}


@pytest.fixture(scope="module")
def venvs(ray_cluster: object) -> Iterator[dict[str, RayVectorEnv]]:
    """Five environments of each kind, on two nodes, on two workers without Ray, or in this process."""
    settings = {"preload": ("helpers.tianshou_kit",), "on_env_error": "restart"}
    made = {
        name: RayVectorEnv([ENVS[name]] * 5, num_nodes=nodes, workers_per_node=workers, **settings)
        for name, nodes, workers in (("drift", 2, 1), ("pointed", 0, 2), ("agents", 0, 0))
    }
    yield made
    for venv in made.values():
        with suppress(Exception):
            venv.close()


def pair(
    venvs: dict[str, RayVectorEnv],
    name: str = "drift",
    make_policy: Callable[[], Any] = Exact,
    make_buffer: Callable[[], Any] = lambda: VectorReplayBuffer(200, 5),
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Returns rayvec's and Tianshou's collector, reset with the same seeds."""
    ours, theirs = venvs[name], DummyVectorEnv([ENVS[name]] * 5)
    mine = Collector(make_policy(), ours, make_buffer(), **kwargs)
    other = tianshou.data.Collector(make_policy(), theirs, make_buffer(), **kwargs)
    for venv, collector in ((ours, mine), (theirs, other)):
        venv.seed([11, 22, 33, 44, 55])
        collector.reset()
    return mine, other


def assert_same_stats(got: Any, expected: Any) -> None:
    for name in ("n_collected_steps", "n_collected_episodes"):
        assert getattr(got, name) == getattr(expected, name), name
    for name in ("returns", "lens", "pred_dist_std_array"):
        mine, theirs = getattr(got, name), getattr(expected, name)
        assert (mine is None) == (theirs is None), name
        if theirs is not None:
            np.testing.assert_array_equal(mine, theirs, err_msg=name)
            assert mine.dtype == theirs.dtype
    assert got.returns_stat == expected.returns_stat and got.lens_stat == expected.lens_stat


def assert_same(mine: Any, other: Any) -> None:
    assert_same_buffer(mine.buffer, other.buffer)
    assert (mine.collect_step, mine.collect_episode) == (other.collect_step, other.collect_episode)


def collect_both(mine: Any, other: Any, **kwargs: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # counts that are no multiples
        assert_same_stats(mine.collect(**kwargs), other.collect(**kwargs))
    assert_same(mine, other)


def box_policy() -> Exact:
    return Exact(Pointed.action_space, action_scaling=True, action_bound_method="clip")


FILLED: dict[str, dict[str, Any]] = {
    "drift": {},
    "pointed": {"make_policy": box_policy, "make_buffer": lambda: VectorReplayBuffer(500, 5)},
    "pointed, noise": {
        **{"make_policy": box_policy, "exploration_noise": True},
        "make_buffer": lambda: VectorReplayBuffer(500, 5),
    },
    "agents": {},
    "prioritized": {"make_buffer": lambda: PrioritizedVectorReplayBuffer(220, 5, alpha=0.6, beta=0.4)},
    "cached": {"make_buffer": lambda: CachedReplayBuffer(ReplayBuffer(60), 5, 40)},
    "stacked": {"make_buffer": lambda: VectorReplayBuffer(264, 6, ignore_obs_next=True, stack_num=2)},
}


class TestSteps:
    @pytest.mark.parametrize("name", FILLED)
    def test_fills_the_same_buffer(self, venvs: dict[str, RayVectorEnv], name: str) -> None:
        kind = name.split(",")[0]
        mine, other = pair(venvs, kind if kind in ENVS else "drift", **FILLED[name])
        for n_step in (5, 52, 1, 300):
            collect_both(mine, other, n_step=n_step)

    def test_hidden_state_is_reset_with_every_episode(self, venvs: dict[str, RayVectorEnv]) -> None:
        mine, other = pair(venvs, "drift", Remembers)
        for n_step in (15, 100):
            collect_both(mine, other, n_step=n_step)
        for collector in (mine, other):
            collector.reset_buffer()  # before the reset, which marks where it cuts episodes that are stored
            collector.reset()
        collect_both(mine, other, n_step=30)
        assert isinstance(mine.buffer.policy.hidden_state.hidden, torch.Tensor)

    def test_chunks_and_single_steps_take_turns(self, venvs: dict[str, RayVectorEnv]) -> None:
        """Each turn begins new episodes."""
        collector = Collector(Exact(), venvs["drift"], VectorReplayBuffer(1000, 5))
        collector.reset()
        for hook in (None, lambda acts, batch: None, None):
            collector.set_on_step_hook(hook)
            assert collector.collect(n_step=35).n_collected_steps == 35
        assert_joins_no_episodes(collector.buffer)


def assert_joins_no_episodes(buffer: Any) -> None:
    """Asserts that the transition that `next` finds after another one begins where that one ended."""
    rows = buffer.sample_indices(0)
    following = buffer.next(rows)
    inner = following != rows
    assert inner.sum() > 40
    np.testing.assert_array_equal(buffer.obs[following[inner]], buffer.obs_next[rows[inner]])
    assert not (buffer.terminated & buffer.truncated)[rows].any()


class TestEpisodes:
    @pytest.mark.parametrize("n_episode", [1, 17])
    def test_follows_tianshous_schedule(self, venvs: dict[str, RayVectorEnv], n_episode: int) -> None:
        mine, other = pair(venvs, "drift", make_buffer=lambda: VectorReplayBuffer(1000, 5))
        collect_both(mine, other, n_episode=n_episode)

    @pytest.mark.parametrize("inference", ["worker", "driver"])
    def test_no_transition_joins_two_episodes_where_environments_are_reset(
        self, venvs: dict[str, RayVectorEnv], inference: Any
    ) -> None:
        """Tianshou's own Collector leaves the last transition before a reset open, and `next` crosses it."""
        mine = Collector(Exact(), venvs["drift"], VectorReplayBuffer(1000, 5), inference=inference)
        mine.reset()
        mine.collect(n_step=15)
        cut = int((mine.buffer.unfinished_index() >= 600).sum())  # of the last two environments
        with pytest.warns(UserWarning, match="n_episode=3"):
            mine.collect(n_episode=3)  # the last two environments take no part, and all are reset
        mine.collect(n_step=20)
        cut += len(mine.buffer.unfinished_index())
        mine.reset(reset_buffer=False, reset_stats=False)
        mine.collect(n_step=25)
        assert_joins_no_episodes(mine.buffer)
        ended = mine.buffer.done[mine.buffer.sample_indices(0)].sum()
        assert cut > 1 and mine.collect_episode == ended - cut, "cut episodes are not counted"

    def test_episode_hook_sees_and_changes_the_same(self, venvs: dict[str, RayVectorEnv]) -> None:
        mine, other = pair(venvs, "drift", make_buffer=lambda: VectorReplayBuffer(260, 5))
        seen: dict[int, list[Any]] = {}
        for collector in (mine, other):
            log = seen.setdefault(id(collector), [])

            def hook(episode: Any, log: list[Any] = log) -> dict[str, Any]:
                log.append((len(episode), episode.rew.tolist(), episode.obs[0].tolist()))
                return {"togo": np.cumsum(episode.rew[::-1])[::-1].copy()}

            collector.set_on_episode_done_hook(hook)
            collector.raise_on_nan_in_buffer = False
        collect_both(mine, other, n_episode=9)
        assert seen[id(mine)] == seen[id(other)]

    def test_unbiased_episodes_are_shared_out_beforehand(self, venvs: dict[str, RayVectorEnv]) -> None:
        mine = Collector(Exact(), venvs["drift"], VectorReplayBuffer(5000, 5), unbiased=True)
        mine.reset()
        for _ in range(2):  # both begin new episodes
            mine.reset_buffer()
            stats = mine.collect(n_episode=12)
            assert stats.n_collected_episodes == 12
            ends = mine.buffer[:].info.env_id[mine.buffer[:].done]
            assert np.bincount(ends).tolist() == [3, 3, 2, 2, 2]
            assert stats.n_collected_steps == len(mine.buffer) == stats.lens.sum()
            mine.collect(n_step=15)
        assert_joins_no_episodes(mine.buffer)


class TestAgents:
    """Rewards of several agents."""

    def test_episodes_have_a_return_for_each(self, venvs: dict[str, RayVectorEnv]) -> None:
        mine, other = pair(venvs, "agents", make_buffer=lambda: VectorReplayBuffer(1000, 5))
        collect_both(mine, other, n_episode=9)
        assert mine.collect(n_episode=6).returns.shape == (6, 3)

    def test_a_failed_step_leaves_no_reward(self, venvs: dict[str, RayVectorEnv]) -> None:
        env = venvs["agents"]
        collector = Collector(Exact(), env, VectorReplayBuffer(500, 5))
        collector.reset()
        env.set_env_attr("raise_at", 3, 0)
        stats = collector.collect(n_step=100)
        buffer = collector.buffer
        assert stats.n_collected_steps == len(buffer) == 99 and buffer.rew.shape == (500, 3)
        first = buffer[buffer.sample_indices(0)]
        first = first[first.info.env_id == 0]
        assert first.rew[:3, 2].tolist() == [1, 2, 1]  # the third step failed, and the episode before it was cut
        assert first.truncated[:3].tolist() == [False, True, False]


def test_step_hook_changes_what_is_stored(venvs: dict[str, RayVectorEnv]) -> None:
    def hook(acts: Any, batch: Any) -> None:
        batch.rew = batch.rew * 2

    mine, other = pair(venvs, on_step_hook=hook)
    collect_both(mine, other, n_step=40)


def test_random_actions_come_from_the_space(venvs: dict[str, RayVectorEnv]) -> None:
    mine = Collector(box_policy(), venvs["pointed"], VectorReplayBuffer(500, 5))
    venvs["pointed"].seed(1)
    mine.reset()
    stats = mine.collect(n_step=400, random=True)
    assert stats.n_collected_steps == 400 and len(mine.buffer) == 400
    mapped, did = mine.policy.map_action(mine.buffer.act[:400]), mine.buffer.info.pushed[:400]
    np.testing.assert_allclose(mapped, did, atol=1e-6)
    assert did.min() < -1.9 and did.max() > 1.9 and abs(did.mean()) < 0.2
    assert mine.collect(n_episode=6, random=True).n_collected_episodes == 6


def test_the_policy_of_an_off_policy_algorithm_acts_in_the_driver(venvs: dict[str, RayVectorEnv]) -> None:
    algorithm: Any = kit.dqn(2, 2)
    algorithm.policy.held = threading.Lock()  # no worker can get it
    collector = Collector(algorithm, venvs["drift"], VectorReplayBuffer(500, 5))
    collector.reset()
    assert collector.collect(n_step=10).n_collected_steps == 10
    for settings in ({"inference": "worker"}, {"unbiased": True}, {"prefetch": True}):
        other = Collector(algorithm, venvs["drift"], VectorReplayBuffer(500, 5), **settings)
        other.reset()
        with pytest.raises(TypeError, match="inference='driver'"):
            other.collect(n_step=10)


def test_a_policy_that_cannot_be_pickled_acts_in_the_driver_alone(venvs: dict[str, RayVectorEnv]) -> None:
    def make() -> Exact:
        policy = Exact()
        policy.held = threading.Lock()  # type: ignore[assignment]
        return policy

    collector = Collector(make(), venvs["drift"])
    collector.reset()
    with pytest.raises(TypeError, match="inference='driver'"):
        collector.collect(n_step=30)
    other = Collector(make(), venvs["drift"], inference="driver")
    other.reset()
    assert other.collect(n_step=30).n_collected_steps == 30


@pytest.mark.parametrize("first", [12, 4])
def test_a_failing_environment_leaves_no_lie_in_the_buffer(first: int) -> None:
    """Environment 1 fails in every seventh step: in the middle of a chunk, or in the first of its steps."""
    fns = [partial(FaultyEnv, "kill", "step", 10**9), partial(FaultyEnv, "raise", "step", 6)]
    settings: Any = {"on_env_error": "restart", "preload": ("helpers.tianshou_kit",)}
    with closing(RayVectorEnv(fns, num_nodes=0, workers_per_node=2, **settings)) as env:
        collector: Any = Collector(Exact(), env, VectorReplayBuffer(100, 2))
        env.seed([100, 200])  # episodes of many steps
        collector.reset()
        stats = [collector.collect(n_step=n_step) for n_step in (first, 24)]
    assert all(type(each) is CollectStats for each in stats)
    rows = collector.buffer[:]
    steps = rows.obs_next[:, 2:] - rows.obs[:, 2:]
    assert (steps == 1).all()  # every transition is one step of one episode
    failing = rows.info.env_id == 1
    assert np.flatnonzero(rows.done[failing]).tolist() == [5, 11]
    assert np.flatnonzero(rows.truncated[failing]).tolist() == [5, 11]
    assert not rows.done[~failing].any()
    assert sum(each.n_collected_episodes for each in stats) == collector.collect_episode == 0
    assert sum(each.n_collected_steps for each in stats) == collector.collect_step == len(collector.buffer)
    assert len(collector.buffer) == first + 24 - 2
    assert not sum(len(each.returns) + len(each.lens) for each in stats)


def test_the_unmodified_on_policy_trainer_runs(venvs: dict[str, RayVectorEnv]) -> None:
    parts = kit.actor_critic(2, 2)
    algorithm: Any = PPO(**parts, optim=kit.adam())
    training = Collector(algorithm, venvs["drift"], VectorReplayBuffer(500, 5))
    kit.train(algorithm, training, Collector(algorithm, venvs["drift"]))
    assert training.collect_step == 200
    training.reset()
    stats = training.collect(n_step=50)
    assert stats.pred_dist_std_array.shape == (50, 1)
    torch_std = parts["policy"](Batch(obs=training.buffer.obs[:1], info=Batch())).dist.probs
    assert stats.pred_dist_std_array[0, 0] == pytest.approx(torch_std.prod().sqrt().item(), abs=1e-6)


def test_what_cannot_work_is_refused(venvs: dict[str, RayVectorEnv]) -> None:
    drift, ours = venvs["drift"], r"Pass rayvec\.tianshou\.RayVectorEnv"
    for policy, env, settings, words in (
        (Exact(), drift, {"inference": "moon"}, "inference"),
        (Exact(), drift, {"buffer": VectorReplayBuffer(100, 2)}, "buffers"),
        (None, drift, {}, "Tianshou 2 policy"),
        (torch.nn.Linear(2, 2), drift, {}, "Tianshou 2 policy"),
        (Exact(), None, {}, ours),
        (Exact(), gymnasium.vector.SyncVectorEnv([DriftEnv]), {}, ours),
    ):
        with pytest.raises(ValueError, match=words):
            Collector(policy, env, **settings)  # type: ignore[arg-type]
    for settings, is_random in (({"inference": "driver"}, False), ({"prefetch": True}, True)):
        collector = Collector(Exact(), drift, unbiased=True, **settings)  # type: ignore[arg-type]
        collector.reset()
        with pytest.raises(ConfigError, match="unbiased=True requires chunks"):
            collector.collect(n_episode=5, random=is_random)


class Gives(Policy):
    """Gives one action always; its noise adds one. What it draws is random."""

    def __init__(self, act: int | None) -> None:
        super().__init__(action_space=spaces.Discrete(9))
        self.act = act

    def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
        n = len(batch.obs)
        return Batch(act=torch.randint(9, (n,)) if self.act is None else np.full(n, self.act))

    def add_exploration_noise(self, act: Any, batch: Any) -> Any:
        return act + 1


def local(env_fns: list[Any]) -> RayVectorEnv:
    return RayVectorEnv(env_fns, num_nodes=0, workers_per_node=0)


def acts(collector: Any) -> list[int]:
    return collector.buffer.act[collector.buffer.sample_indices(0)].tolist()


@pytest.mark.parametrize("settings", [{}, {"prefetch": True}], ids=str)
def test_another_policy_or_noise_that_is_set_acts(settings: dict[str, Any]) -> None:
    with closing(local([DriftEnv] * 2)) as env:
        collector = Collector(Gives(0), env, VectorReplayBuffer(100, 2), **settings)
        collector.reset()
        collector.collect(n_step=4)
        collector.policy = Gives(3)
        stats: Any = [collector.collect(n_step=4) for _ in range(3)]
        assert acts(collector)[-4:] == [3] * 4 and set(acts(collector)) == {0, 3}
        assert not settings or max(each.staleness for each in stats) == 1
        collector.exploration_noise = True
        collector.reset()
        collector.collect(n_step=4)
        assert acts(collector) == [4] * 4
