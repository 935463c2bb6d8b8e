"""Agents of parallel environments as rows: which rows are transitions, what chunks count, bad input."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from helpers.games import Leavers, game_rows

import rayvec
from rayvec import Collector, RayVecEnv
from rayvec.errors import ConfigError, EnvError
from rayvec.wrappers import ParallelAgents


def act(obs: Any) -> Any:
    return (obs[:, 1] % 2).astype(np.int64)


class TestRows:
    def test_an_agent_that_ends_early_waits_in_its_row(self) -> None:
        env = ParallelAgents(Leavers((2, 4, 3)))
        assert env.num_envs == 3 and env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        obs, infos = env.reset(seed=5)
        np.testing.assert_array_equal(obs[:, 1], 0)
        assert infos["began"].tolist() == [1, 1, 1]
        ended = []
        for _ in range(6):
            obs, rew, terminated, truncated, _ = env.step(np.zeros(3, np.int64))
            ended.append((terminated | truncated).tolist())
            assert not rew[obs[:, 1] == 0].any()
        assert ended == [
            [False, False, False],
            [True, False, False],
            [True, False, True],
            [True, True, True],
            [False, False, False],  # the next game begins
            [False, False, False],
        ]
        np.testing.assert_array_equal(obs[:, 1], 1)
        env.close()

    def test_several_games_are_seeded_by_their_first_row(self) -> None:
        env = ParallelAgents([Leavers((2, 3)), Leavers((4, 1))])
        obs, _ = env.reset(seed=7)
        np.testing.assert_array_equal(obs[:, 0], [7, 7, 9, 9])
        obs, _ = env.reset(seed=20, options={"reset_mask": np.array([False, False, True, True])})
        np.testing.assert_array_equal(obs[:, 0], [7, 7, 22, 22])
        env.close()


class TestChunks:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_no_transition_of_a_waiting_agent_is_counted(self, workers: int) -> None:
        makes = [partial(game_rows, ((2, 5, 3), (1, 1, 4))), partial(game_rows, ((6, 2, 2), (3, 3, 3)))]
        with closing(RayVecEnv(makes, native=True, num_nodes=0, workers_per_node=workers)) as env:
            lengths = np.array([2, 5, 3, 1, 1, 4, 6, 2, 2, 3, 3, 3])
            chunks = [env.rollout(act, 9, seed=3 if k == 0 else None) for k in range(4)]
        obs = np.concatenate([chunk.obs for chunk in chunks])
        following = np.concatenate([chunk.next_obs() for chunk in chunks])
        valid, done = (np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in ("valid", "done"))
        rew = np.concatenate([chunk.rew for chunk in chunks])
        games = np.repeat(np.arange(4), 3)
        for n, length in enumerate(lengths):
            whole = lengths[games == games[n]].max() + 1  # steps from one game to the next
            at = np.arange(36) % whole
            np.testing.assert_array_equal(valid[:, n], at < length)
            np.testing.assert_array_equal(done[:, n], at == length - 1)
            np.testing.assert_array_equal(obs[:, n, 1][valid[:, n]], at[valid[:, n]])
            np.testing.assert_array_equal(following[:, n, 1][valid[:, n]], at[valid[:, n]] + 1)
            np.testing.assert_array_equal(rew[:, n], np.where(valid[:, n], at + 1, 0))

    def test_a_collector_counts_the_episodes_of_agents(self) -> None:
        with closing(RayVecEnv([partial(game_rows, ((2, 5, 3),))] * 2, native=True, num_nodes=0)) as env:
            collector = Collector(env, act, seed=1)
            batch = collector.collect(n_episode=12)
            assert sorted(batch.stats.lens) == [2] * 4 + [3] * 4 + [5] * 4
            assert batch.stats.n_collected_steps == batch.stats.lens.sum()
            collector.close()

    def test_ppo_trains_with_shared_parameters(self, tmp_path: Any) -> None:
        config = rayvec.PPOConfig(
            native="helpers.games:leavers",
            total_steps=1_024,
            num_envs=12,
            num_nodes=0,
            workers_per_node=2,
            eval_episodes=2,  # fewer than the agents of a game
            eval_interval_steps=512,
            run_dir=tmp_path / "run",
        )
        assert np.isfinite(rayvec.train(config).eval_return_mean)


class TestBadInput:
    def test_an_environment_whose_agents_act_in_turn(self) -> None:
        class Turns(Leavers):
            agent_iter: Any = None

        with pytest.raises(ConfigError, match="act at the same time"):
            ParallelAgents(Turns((1, 1)))

    @pytest.mark.parametrize("what", ["observation", "action"])
    def test_agents_with_different_spaces(self, what: str) -> None:
        with pytest.raises(ConfigError, match="have the same spaces"):
            ParallelAgents(Leavers((1, 2), odd=what))

    def test_games_of_different_sizes(self) -> None:
        with pytest.raises(ConfigError, match="equally many agents"):
            ParallelAgents([Leavers((1, 2)), Leavers((1,))])

    @pytest.mark.parametrize("nothing", [[], ()], ids=repr)
    def test_no_games(self, nothing: Any) -> None:
        with pytest.raises(ConfigError, match="one game or more"):
            ParallelAgents(nothing)

    def test_the_same_game_several_times(self) -> None:
        with pytest.raises(ConfigError, match="an environment of its own"):
            ParallelAgents([Leavers((1, 2))] * 2)

    def test_a_mask_of_some_agents_of_a_game(self) -> None:
        env = ParallelAgents(Leavers((1, 2)))
        env.reset()
        with pytest.raises(ConfigError, match=r"begin it together.*on_bad_obs='raise' or 'keep'"):
            env.reset(options={"reset_mask": np.array([True, False])})

    @pytest.mark.parametrize("what", ["late", "gone", "silent"])
    def test_agents_that_come_late_or_leave_without_an_end(self, what: str) -> None:
        env = ParallelAgents(Leavers((3, 4), odd=what))
        with pytest.raises(EnvError, match="answers each until it ends"):
            env.reset()
            env.step(np.zeros(2, np.int64))

    @pytest.mark.parametrize(
        ("method", "change", "text"),
        [
            ("reset", lambda obs, infos: obs, "2 dicts: observations, infos. Got: dict"),
            ("reset", lambda obs, infos: ({agent: np.zeros(7) for agent in obs}, infos), "an element of Box"),
            ("step", lambda obs, *others: ({**obs, "agent_1": 3.0}, *others), r"Got: 3\.0 of 'agent_1'"),
            ("step", lambda *results: results[:4], "5 dicts: .*Got: dict, dict, dict, dict"),
            (
                "step",
                lambda obs, rew, *others: (obs, dict.fromkeys(rew, np.ones(1)), *others),
                "a number for 'agent_0'",
            ),
            ("step", lambda obs, rew, *others: (obs, dict.fromkeys(rew), *others), "a number for 'agent_0'"),
        ],
    )
    def test_what_a_game_returns(self, method: str, change: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        game = Leavers((3, 4))
        env, right = ParallelAgents(game), getattr(game, method)
        monkeypatch.setattr(game, method, lambda *args, **kwargs: change(*right(*args, **kwargs)))
        with pytest.raises(EnvError, match=text):
            env.reset()
            env.step(np.zeros(2, np.int64))

    def test_an_info_may_be_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        game = Leavers((3, 4))
        monkeypatch.setattr(game, "reset", lambda reset=game.reset, **kwargs: (reset(**kwargs)[0], {"agent_0": None}))
        assert ParallelAgents(game).reset()[1] == {}


def test_a_game_of_pettingzoo() -> None:
    pytest.importorskip("pettingzoo")
    from pettingzoo.classic.rps import rps

    env = ParallelAgents([rps.parallel_env(max_cycles=5) for _ in range(2)])
    assert env.num_envs == 4
    with closing(RayVecEnv([lambda: env], native=True, num_nodes=0, workers_per_node=0)) as pool:
        chunk = pool.rollout(lambda obs: np.arange(len(obs)) % 3, 12, seed=1)
        assert chunk.valid.mean(axis=1).tolist() == [1.0] * 5 + [0.0] + [1.0] * 5 + [0.0]
        assert chunk.done[[4, 10]].all() and not chunk.rew[~chunk.valid].any()
