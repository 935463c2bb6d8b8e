"""RayVecEnv against Gymnasium's SyncVectorEnv, on every topology; its errors; and its end."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from conftest import MakeVec
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as vector_wrappers
from kinds import ALL_SPACES, ARRAY_SPACES, MODES, OBJECT_SPACES, env_fns, in_lockstep, within
from odd_envs import OddInfo, OneInfo, OwnError, SlowCall, TellsPid, TwoFaced

import rayvec
from rayvec.errors import ConfigError, EnvError, NodeLostError, WorkerLostError
from rayvec.testing import CountingEnv, DriftEnv, FaultyEnv, SpaceEnv, assert_identical
from rayvec.types import tree_leaves, tree_map
from rayvec.vector import RayVecEnv

TOPOLOGIES = {"1x1": (1, 1), "1x2": (1, 2), "2x1": (2, 1), "1x3": (1, 3)}
DEADLINE_S = 20.0
ALONE = ["box32", "image", "zero_d", "discrete", "multidiscrete_2d", "multibinary", "tuple", *OBJECT_SPACES][:-2]
"""What stands at the top as well as in a dict."""
EVERYTHING = {"arrays": spaces.Dict(ARRAY_SPACES), "objects": spaces.Dict(OBJECT_SPACES)}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.02)


def pids_of(env: RayVecEnv) -> list[list[int]]:
    """Process ids of each node: its actor's first, then its workers'."""
    return list(env._pool.worker_pids().values())


def assert_explained(error: BaseException) -> None:
    for word in ("Expected:", "Got:", "Remedy:"):
        assert word in str(error), str(error)


class TestEquivalence:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize(
        ("kind", "topology"),
        [*(("arrays", topology) for topology in TOPOLOGIES), ("objects", "2x1"), ("objects", "1x3")],
    )
    def test_every_space_at_once(self, make_vec: MakeVec, kind: str, topology: str, mode: AutoresetMode) -> None:
        fns = env_fns(5, EVERYTHING[kind], EVERYTHING[kind])
        env = make_vec(fns, *TOPOLOGIES[topology], autoreset_mode=mode)
        assert env.transports == ("shm", "tcp")[: TOPOLOGIES[topology][0]]
        with closing(SyncVectorEnv(fns, autoreset_mode=mode)) as sync:
            assert in_lockstep(env, sync, 12, options={"level": 2}) > 10

    @pytest.mark.parametrize("kind", ALONE)
    def test_every_kind_alone_over_shared_memory_and_stream(self, make_vec: MakeVec, kind: str) -> None:
        mode = MODES[ALONE.index(kind) % 3]
        fns = env_fns(3, ALL_SPACES[kind], ALL_SPACES[kind])
        env = make_vec(fns, 2, 1, autoreset_mode=mode)
        with closing(SyncVectorEnv(fns, autoreset_mode=mode)) as sync:
            assert in_lockstep(env, sync, 8) > 0

    @pytest.mark.parametrize(
        ("env_id", "env_kwargs", "mode"),
        [
            ("CartPole-v1", {"sutton_barto_reward": True}, "NextStep"),
            ("CartPole-v1", {}, "SameStep"),
            ("Pendulum-v1", {"max_episode_steps": 9}, "Disabled"),
            ("Blackjack-v1", {"natural": True}, "SameStep"),
            ("Blackjack-v1", {}, "NextStep"),
            ("Taxi-v4", {"max_episode_steps": 6}, "SameStep"),
            ("Taxi-v4", {"max_episode_steps": 6, "is_rainy": True}, "NextStep"),
            ("FrozenLake-v1", {"is_slippery": True}, "Disabled"),
        ],
    )
    def test_real_environments(self, make_vec: MakeVec, env_id: str, env_kwargs: dict[str, Any], mode: str) -> None:
        env = make_vec(env_id, 1, 2, num_envs=3, env_kwargs=env_kwargs, autoreset_mode=mode)
        assert env.spec is not None and env.spec.id == env_id
        fns = [partial(gymnasium.make, env_id, **env_kwargs)] * 3
        with closing(SyncVectorEnv(fns, autoreset_mode=mode)) as sync:
            assert in_lockstep(env, sync, 60) > 2

    @pytest.mark.parametrize("topology", ["1x1", "2x1"])
    def test_infos_that_are_hard_to_send(self, make_vec: MakeVec, topology: str) -> None:
        fns = [OddInfo] * 3
        env = make_vec(fns, *TOPOLOGIES[topology])
        with closing(SyncVectorEnv(fns)) as sync:
            in_lockstep(env, sync, 9)

    def test_one_info_dict_used_for_ever(self, make_vec: MakeVec) -> None:
        """Gymnasium merges the final info before the reset; what the reset writes must not show there."""
        env = make_vec([OneInfo] * 2, autoreset_mode="SameStep")
        env.reset(seed=0)
        env.step(np.zeros(2, int))
        infos = env.step(np.zeros(2, int))[4]
        assert infos["final_info"]["at"].tolist() == ["step 2"] * 2
        assert infos["at"].tolist() == ["reset 1"] * 2


class TestSeeds:
    """Seeds, options and masks, on one environment for each mode."""

    @pytest.fixture(scope="class", params=MODES)
    @classmethod
    def pair(cls, request: pytest.FixtureRequest, make_class_vec: MakeVec) -> Any:
        fns = env_fns(4, ARRAY_SPACES["box32"])
        sync = SyncVectorEnv(fns, autoreset_mode=request.param)
        yield make_class_vec(fns, 2, 1, autoreset_mode=request.param), sync
        sync.close()

    @pytest.mark.parametrize("seed", [0, 12345, [4, 3, 2, 1], (9, 9, 9, 9)])
    @pytest.mark.parametrize("options", [None, {}, {"level": 7, "far": [1, 2]}, {"odd": {1, 2}}])
    def test_seeds_and_options(self, pair: tuple[RayVecEnv, SyncVectorEnv], seed: Any, options: Any) -> None:
        env, sync = pair
        assert_identical(env.reset(seed=seed, options=options), sync.reset(seed=seed, options=options))
        assert env.np_random_seed == sync.np_random_seed
        assert [r.random() for r in env.np_random] == [r.random() for r in env.np_random]
        assert_identical(env.reset(), sync.reset())

    def test_a_list_with_gaps_seeds_only_some(self, pair: tuple[RayVecEnv, SyncVectorEnv]) -> None:
        env, sync = pair
        assert_identical(env.reset(seed=1), sync.reset(seed=1))
        assert_identical(env.reset(seed=[None, 5, None, 6]), sync.reset(seed=[None, 5, None, 6]))

    def test_without_a_seed_episodes_differ(self, make_vec: MakeVec) -> None:
        env = make_vec(env_fns(4, ARRAY_SPACES["box32"]), 1, 2)
        first, second = env.reset()[0], env.reset()[0]
        assert len({row.tobytes() for row in np.concatenate([first, second])}) == 8

    def test_some_are_reset_the_others_left_alone(self, pair: tuple[RayVecEnv, SyncVectorEnv]) -> None:
        env, sync = pair
        disabled = env.autoreset_mode is AutoresetMode.DISABLED
        assert_identical(env.reset(seed=5), sync.reset(seed=5))
        rng = np.random.default_rng(0)
        done = np.zeros(4, bool)
        for t in range(40):
            if (done.any() and disabled) or (not disabled and t % 3 == 2):
                masks = [done] if disabled else [rng.random(4) < 0.5]
                if disabled and done.sum() > 1:  # one after the other
                    masks = [np.arange(4) == i for i in np.flatnonzero(done)]
                for mask in masks:
                    if mask.any():
                        options = {"reset_mask": mask, "n": t}
                        seed = [t, None, t, t]
                        got = env.reset(seed=seed, options=options)
                        assert list(options) == ["reset_mask", "n"], "the caller's options were changed"
                        assert_identical(got, sync.reset(seed=seed, options=dict(options)), f"reset in step {t}")
            actions = rng.integers(0, 2, 4)
            expected = sync.step(actions)
            assert_identical(env.step(actions), expected, f"step {t}")
            done = expected[2] | expected[3]

    @pytest.mark.parametrize(
        ("mask", "error"),
        [
            ([True] * 4, TypeError),
            (np.ones(4), TypeError),
            (np.ones(3, bool), ValueError),
            (np.zeros(4, bool), ValueError),
            (np.ones((4, 1), bool), ValueError),
        ],
    )
    def test_a_wrong_mask_is_explained(self, pair: tuple[RayVecEnv, SyncVectorEnv], mask: Any, error: Any) -> None:
        with pytest.raises(error) as caught:
            pair[0].reset(options={"reset_mask": mask})
        assert_explained(caught.value)
        pair[0].reset()

    def test_a_wrong_number_of_seeds_is_explained(self, pair: tuple[RayVecEnv, SyncVectorEnv]) -> None:
        with pytest.raises(ValueError, match="one seed for each") as caught:
            pair[0].reset(seed=[1, 2])
        assert_explained(caught.value)
        pair[0].reset()

    def test_a_seed_that_gymnasium_refuses_is_its_error(self, make_vec: MakeVec) -> None:
        env = make_vec(env_fns(2, ARRAY_SPACES["box32"]))
        with pytest.raises(gymnasium.error.Error, match="Seed"):
            env.reset(seed=-5)


class TestGroups:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("topology", ["1x2", "2x1"])
    def test_each_group_is_a_vector_environment(self, make_vec: MakeVec, topology: str, mode: AutoresetMode) -> None:
        """While one group steps the other is answered, in either order, and between whole steps."""
        fns = env_fns(5, ARRAY_SPACES["nested"], ARRAY_SPACES["dict"])
        env = make_vec(fns, *TOPOLOGIES[topology], groups=2, autoreset_mode=mode)
        assert sorted(np.concatenate(env.groups).tolist()) == [0, 1, 2, 3, 4]
        halves = [SyncVectorEnv([fns[i] for i in ids], autoreset_mode=mode) for ids in env.groups]
        obs, _ = env.reset(seed=20)
        for ids, half in zip(env.groups, halves, strict=True):
            half.action_space.seed(1)
            expected, _ = half.reset(seed=(20 + ids).tolist())
            assert_identical(tree_map(lambda leaf, ids=ids: leaf[ids], obs), expected)
        over = [np.zeros(len(ids), bool) for ids in env.groups]
        for t in range(12):
            if mode is AutoresetMode.DISABLED and any(mask.any() for mask in over):
                mask = np.zeros(5, bool)
                for ids, half, done in zip(env.groups, halves, over, strict=True):
                    mask[ids] = done
                    if done.any():
                        half.reset(options={"reset_mask": done})
                env.reset(options={"reset_mask": mask})
            actions = [half.action_space.sample() for half in halves]
            env.send(actions[0], group=0)
            env.send(actions[1], group=1)
            for group in (0, 1) if t % 2 else (1, 0):
                batch = env.recv(group=group)
                expected = halves[group].step(actions[group])
                assert_identical(batch.env_ids, env.groups[group])
                got = (batch.obs, batch.rew, batch.terminated, batch.truncated, batch.info)
                assert_identical(got, expected, f"step {t}, group {group}")
                over[group] = expected[2] | expected[3]
        for half in halves:
            half.close()

    def test_whole_steps_with_two_groups(self, make_vec: MakeVec) -> None:
        fns = env_fns(5, ARRAY_SPACES["tuple"])
        env = make_vec(fns, 2, 1, groups=2)
        with closing(SyncVectorEnv(fns)) as sync:
            in_lockstep(env, sync, 8)

    def test_order_of_calls(self, make_vec: MakeVec) -> None:
        env = make_vec([CountingEnv] * 4, groups=2)
        env.reset(seed=0)
        with pytest.raises(NoAsyncCallError):
            env.recv(0)
        env.send(np.zeros(2, int), group=0)
        for forbidden in (
            partial(env.send, np.zeros(2, int), 0),
            partial(env.step_async, np.zeros(4, int)),
            env.reset_async,
            partial(env.call, "spec"),
            partial(env.rollout, lambda obs: np.zeros(len(obs), int), 2),
        ):
            with pytest.raises(AlreadyPendingCallError):
                forbidden()
        env.send(np.zeros(2, int), group=1)
        with pytest.raises(NoAsyncCallError):
            env.step_wait()
        assert env.recv(1).rew.tolist() == [1.0, 1.0]
        assert env.recv(0).rew.tolist() == [1.0, 1.0]
        for wrong in (2, -1):
            with pytest.raises(ConfigError) as caught:
                env.send(np.zeros(2, int), group=wrong)
            assert_explained(caught.value)

    def test_one_environment_makes_one_group(self, make_vec: MakeVec) -> None:
        env = make_vec([CountingEnv], groups=2)
        assert [ids.tolist() for ids in env.groups] == [[0]]


class TestMemory:
    """What is returned belongs to the caller."""

    @pytest.mark.parametrize("topology", ["1x2", "2x1"])
    @pytest.mark.parametrize("kind", ["nested", "dict_of_text"])
    def test_everything_is_writable_and_stays_as_it_was(self, make_vec: MakeVec, topology: str, kind: str) -> None:
        env = make_vec(env_fns(4, ALL_SPACES[kind]), *TOPOLOGIES[topology], autoreset_mode="SameStep")
        with closing(SyncVectorEnv(env_fns(4, ALL_SPACES[kind]), autoreset_mode="SameStep")) as sync:
            for e in (env, sync):
                e.reset(seed=3)
            kept, expected = [env.reset()], [sync.reset()]
            for t in range(5):
                actions = np.full(4, t % 2)
                kept.append(env.step(actions))
                expected.append(sync.step(actions))
            assert_identical(kept, expected)
            arrays = [array for answer in kept for array in all_arrays(answer)]
            assert len(arrays) > 50
            for i, array in enumerate(arrays):
                assert array.flags.writeable and array.flags.aligned
                assert not any(np.shares_memory(array, other) for other in arrays[:i])
                if array.dtype != object:
                    array[...] = np.ones((), array.dtype)  # as wrappers do; the next step must not see it
            actions = np.zeros(4, int)
            assert_identical(env.step(actions), sync.step(actions))

    def test_without_copies_observations_are_as_good_until_the_next_step(self, make_vec: MakeVec) -> None:
        fns = env_fns(3, ARRAY_SPACES["dict"])
        env = make_vec(fns, 1, 2, copy=False)
        with closing(SyncVectorEnv(fns, copy=False)) as sync:
            in_lockstep(env, sync, 8)


def all_arrays(value: Any) -> list[np.ndarray]:
    if isinstance(value, np.ndarray):
        inner = [array for item in value.flat for array in all_arrays(item)] if value.dtype == object else []
        return [value, *inner] if value.size else []
    if isinstance(value, dict):
        value = tuple(value.values())
    return [array for item in value for array in all_arrays(item)] if isinstance(value, (tuple, list)) else []


class TestAttributes:
    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls, make_class_vec: MakeVec) -> Any:
        fns = env_fns(4, ARRAY_SPACES["box32"], render_mode="rgb_array")
        sync = SyncVectorEnv(fns)
        env = make_class_vec(fns, 2, 1)
        for e in (env, sync):
            e.reset(seed=0)
        yield env, sync
        sync.close()

    def test_calls(self, pair: tuple[RayVecEnv, SyncVectorEnv]) -> None:
        env, sync = pair
        assert_identical(env.call("scaled", 2.0, by=3.0), sync.call("scaled", 2.0, by=3.0))
        assert_identical(env.get_attr("render_mode"), sync.get_attr("render_mode"))
        assert_identical(env.render(), sync.render())
        assert env.render_mode == sync.render_mode == "rgb_array"

    @pytest.mark.parametrize("values", [2.5, [1.0, 2.0, 3.0, 4.0], (4.0, 3.0, 2.0, 1.0)])
    def test_setting(self, pair: tuple[RayVecEnv, SyncVectorEnv], values: Any) -> None:
        env, sync = pair
        for e in pair:
            e.set_attr("factor", values)
        assert_identical(env.get_attr("factor"), sync.get_attr("factor"))
        assert_identical(env.call("scaled", 3.0), sync.call("scaled", 3.0))

    def test_a_wrong_number_of_values_is_explained(self, pair: tuple[RayVecEnv, SyncVectorEnv]) -> None:
        with pytest.raises(ValueError, match="one for each") as caught:
            pair[0].set_attr("factor", [1.0, 2.0])
        assert_explained(caught.value)

    def test_calls_later(self, pair: tuple[RayVecEnv, SyncVectorEnv]) -> None:
        env, _ = pair
        env.call_async("scaled", 1.0, by=2.0)
        with pytest.raises(AlreadyPendingCallError):
            env.step_async(np.zeros(4, int))
        assert len(env.call_wait()) == 4

    def test_repr_names_the_environment(self, make_vec: MakeVec) -> None:
        env = make_vec("CartPole-v1", num_envs=2)
        assert "RayVecEnv" in repr(env) and "CartPole-v1" in repr(env) and "2" in repr(env)


class TestDifferingSpaces:
    FNS = [partial(SpaceEnv, spaces.Box(0.0, float(high), (2,), np.float32)) for high in (1, 2, 3)]  # noqa: RUF012

    def test_bounds_may_differ_if_one_says_so(self, make_vec: MakeVec) -> None:
        env = make_vec(self.FNS, 2, 1, observation_mode="different")
        with closing(SyncVectorEnv(self.FNS, observation_mode="different")) as sync:
            in_lockstep(env, sync, 6)

    def test_or_gives_both_spaces(self, make_vec: MakeVec) -> None:
        mode = (spaces.Box(0.0, 9.0, (3, 2), np.float32), spaces.Box(0.0, 9.0, (2,), np.float32))
        env = make_vec(self.FNS, observation_mode=mode)
        with closing(SyncVectorEnv(self.FNS, observation_mode=mode)) as sync:
            in_lockstep(env, sync, 6)

    @pytest.mark.parametrize(
        ("observation", "action", "mode"),
        [
            (spaces.Box(0.0, 9.0, (2,)), spaces.Discrete(2), "same"),
            (spaces.Box(0.0, 1.0, (3,)), spaces.Discrete(2), "different"),
            (spaces.Box(0.0, 1.0, (2,), np.float64), spaces.Discrete(2), "different"),
            (spaces.Box(0.0, 1.0, (2,)), spaces.Discrete(3), "same"),
        ],
    )
    def test_what_does_not_fit_is_explained_as_a_runtime_error(
        self, make_vec: MakeVec, observation: Any, action: Any, mode: Any
    ) -> None:
        fns = [partial(SpaceEnv, spaces.Box(0.0, 1.0, (2,)))] * 2 + [partial(SpaceEnv, observation, action)]
        with pytest.raises(RuntimeError, match="environment 2") as caught:
            make_vec(fns, 2, 1, observation_mode=mode)
        assert_explained(caught.value)

    def test_an_unknown_mode_is_explained(self, make_vec: MakeVec) -> None:
        for mode in ("other", (1, 2)):
            with pytest.raises((ValueError, TypeError)) as caught:
                make_vec([CountingEnv], observation_mode=mode)
            assert_explained(caught.value)


class TestWrappers:
    @pytest.mark.parametrize(
        "wrap",
        [
            vector_wrappers.RecordEpisodeStatistics,
            vector_wrappers.NormalizeObservation,
            vector_wrappers.NormalizeReward,
            vector_wrappers.FlattenObservation,
            partial(vector_wrappers.ClipReward, min_reward=-0.5, max_reward=0.5),
            lambda env: vector_wrappers.DictInfoToList(vector_wrappers.RecordEpisodeStatistics(env)),
            lambda env: vector_wrappers.NormalizeObservation(vector_wrappers.RecordEpisodeStatistics(env)),
        ],
        ids=lambda wrap: getattr(wrap, "__name__", "partial"),
    )
    def test_gymnasiums_wrappers_see_no_difference(self, pair: tuple[RayVecEnv, SyncVectorEnv], wrap: Any) -> None:
        ours, theirs = (wrap(env) for env in pair)
        results = [play(env) for env in (ours, theirs)]
        assert_identical(*[without_times(result) for result in results])

    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls, make_class_vec: MakeVec) -> Any:
        fns = [partial(gymnasium.make, "MountainCarContinuous-v0", max_episode_steps=5)] * 3
        sync = SyncVectorEnv(fns)
        yield make_class_vec(fns, 1, 2), sync
        sync.close()

    def test_statistics_survive_a_partial_reset(self, make_vec: MakeVec) -> None:
        """Gymnasium takes the mask out of the caller's options, upon which this wrapper forgets every episode."""
        env = vector_wrappers.RecordEpisodeStatistics(
            make_vec([partial(CountingEnv, 1)] * 2, autoreset_mode="Disabled")
        )
        env.reset(seed=[0, 0])
        env.step(np.zeros(2, int))
        env.reset(options={"reset_mask": np.array([True, False])})
        assert env.episode_lengths.tolist() == [0, 1]


def play(env: Any) -> list[Any]:
    results: list[Any] = [env.reset(seed=4)]
    env.action_space.seed(0)
    results += [env.step(env.action_space.sample()) for _ in range(14)]
    return results


def without_times(value: Any) -> Any:
    """Leaves out how long an episode took."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in ("t", "_t")}
    if isinstance(value, (list, tuple)):
        return type(value)(without_times(item) for item in value)
    return value


class TestStates:
    def test_order_of_calls(self, make_vec: MakeVec) -> None:
        env = make_vec([CountingEnv] * 2)
        for early in (env.step_wait, env.reset_wait, env.call_wait):
            with pytest.raises(NoAsyncCallError):
                early()
        env.reset_async(seed=0)
        for late in (
            env.reset_async,
            partial(env.step_async, np.zeros(2, int)),
            partial(env.call_async, "spec"),
            partial(env.set_attr, "x", 1),
            partial(env.send, np.zeros(2, int)),
            partial(env.rollout, lambda obs: np.zeros(len(obs), int), 2),
        ):
            with pytest.raises(AlreadyPendingCallError, match=r"reset|send"):
                late()
        for other in (env.step_wait, env.call_wait, env.recv):
            with pytest.raises(NoAsyncCallError):
                other()
        assert env.reset_wait()[0].tolist() == [[0, 0, 0, 0], [1, 0, 0, 0]]
        env.step_async(np.zeros(2, int))
        with pytest.raises(AlreadyPendingCallError, match="step"):
            env.step_async(np.zeros(2, int))
        assert env.step_wait()[1].tolist() == [1.0, 1.0]

    def test_after_close_everything_says_so(self, make_vec: MakeVec) -> None:
        env = make_vec([CountingEnv] * 2)
        env.reset(seed=0)
        env.close()
        env.close()
        assert env.closed
        for late in (
            env.reset,
            env.step_wait,
            env.reset_wait,
            env.call_wait,
            env.recv,
            env.render,
            partial(env.step, np.zeros(2, int)),
            partial(env.send, np.zeros(2, int)),
            partial(env.call, "spec"),
            partial(env.get_attr, "spec"),
            partial(env.set_attr, "x", 1),
            partial(env.rollout, lambda obs: obs, 2),
        ):
            with pytest.raises(ClosedEnvironmentError):
                late()

    @pytest.mark.parametrize("topology", ["1x2", "2x1"])
    def test_what_timed_out_is_waited_for_again_and_nothing_is_lost(self, make_vec: MakeVec, topology: str) -> None:
        """The first environment answers at once, with infos; the last one late."""
        env = make_vec([partial(CountingEnv, 1), partial(CountingEnv, 1, 0.5)], *TOPOLOGIES[topology])
        env.reset(seed=[0, 0])
        env.step_async(np.zeros(2, int))
        for timeout in (0, 0.0, 0.05):
            with pytest.raises(multiprocessing.TimeoutError):
                env.step_wait(timeout=timeout)
        with pytest.raises(AlreadyPendingCallError):
            env.step_async(np.zeros(2, int))
        obs, rew, terminated, _, info = env.step_wait()
        assert obs.tolist() == [[0, 0, 1, 1]] * 2
        assert (rew.tolist(), terminated.tolist(), info) == ([1.0, 1.0], [True, True], {})
        obs, _, _, _, info = env.step(np.zeros(2, int))
        assert obs.tolist() == [[0, 1, 0, 1]] * 2 and info["began"].tolist() == [1, 1]

    @pytest.mark.parametrize("topology", ["1x2", "2x1"])
    def test_infos_outlive_a_timeout(self, make_vec: MakeVec, topology: str) -> None:
        fns = [partial(CountingEnv, 1), partial(CountingEnv, 1, 0.5)]
        env = make_vec(fns, *TOPOLOGIES[topology], autoreset_mode="SameStep")
        env.reset(seed=[0, 0])
        env.step_async(np.zeros(2, int))
        with pytest.raises(multiprocessing.TimeoutError):
            env.step_wait(timeout=0.1)
        info = within(DEADLINE_S, env.step_wait)[4]
        assert info["_final_obs"].tolist() == [True, True]
        assert np.stack(info["final_obs"]).tolist() == [[0, 0, 1, 1]] * 2 and info["began"].tolist() == [1, 1]

    @pytest.mark.parametrize("topology", ["1x2", "2x1"])
    def test_calls_and_resets_outlive_a_timeout(self, make_vec: MakeVec, topology: str) -> None:
        env = make_vec([SlowCall, partial(SlowCall, seconds=0.5)], *TOPOLOGIES[topology])
        env.call_async("slow", 0.0)
        with pytest.raises(multiprocessing.TimeoutError):
            env.call_wait(timeout=0.05)
        assert within(DEADLINE_S, env.call_wait) == (0.0, 0.5)
        env.reset_async(seed=7)
        with pytest.raises(multiprocessing.TimeoutError):
            env.reset_wait(timeout=0.05)
        obs, info = within(DEADLINE_S, env.reset_wait)
        assert obs[:, 0].tolist() == [7, 8] and info["began"].tolist() == [0, 0]

    def test_the_environment_decides_what_step_before_reset_does(self, make_vec: MakeVec) -> None:
        env = make_vec("CartPole-v1", num_envs=2)
        with pytest.raises(gymnasium.error.ResetNeeded):
            env.step(np.zeros(2, int))

    def test_disabled_wants_a_reset_after_an_episode(self, make_vec: MakeVec) -> None:
        env = make_vec([partial(CountingEnv, 1)] * 2, autoreset_mode="Disabled")
        env.reset(seed=[0, 0])
        env.step(np.zeros(2, int))
        with pytest.raises(AssertionError):
            env.step(np.zeros(2, int))
        env.reset(options={"reset_mask": np.array([True, True])})
        env.step(np.zeros(2, int))
        env.rollout(lambda obs: np.zeros(len(obs), int), 3)
        env.step(np.zeros(2, int))

    def test_with_closes(self, ray_cluster: object) -> None:
        with RayVecEnv([CountingEnv], num_nodes=1, workers_per_node=1) as env:
            env.reset()
        assert env.closed

    def test_what_nobody_holds_is_closed(self, ray_cluster: object) -> None:
        env = RayVecEnv([CountingEnv], num_nodes=1, workers_per_node=1)
        pids = pids_of(env)[0]
        del env
        gc.collect()
        wait_until(lambda: not any(map(alive, pids)), "its processes have ended")


class TestActions:
    @pytest.fixture(scope="class")
    @classmethod
    def env(cls, make_class_vec: MakeVec) -> RayVecEnv:
        env = make_class_vec(env_fns(3, spaces.Discrete(2), spaces.Box(-1.0, 1.0, (2,), np.float32)), 2, 1)
        env.reset(seed=0)
        return env

    @pytest.fixture(scope="class")
    @classmethod
    def dicts(cls, make_class_vec: MakeVec) -> Any:
        fns = env_fns(3, spaces.Discrete(2), spaces.Dict({"a": spaces.Discrete(9), "b": spaces.Discrete(9)}))
        sync = SyncVectorEnv(fns)
        env = make_class_vec(fns, 2, 1)
        for e in (env, sync):
            e.reset(seed=0)
        yield env, sync
        sync.close()

    @pytest.mark.parametrize(
        "actions",
        [
            np.zeros((2, 2)),
            np.zeros((4, 2)),
            np.zeros((3, 1)),
            np.zeros((3, 2, 1)),
            np.zeros(3),
            np.zeros(()),
            0.0,
            None,
            [],
            [[0.0, 0.0]] * 2,
            [[0.0], [0.0, 0.0], [0.0]],
            {"a": np.zeros((3, 2))},
            (np.zeros((3, 2)), np.zeros((3, 2))),
        ],
        ids=lambda actions: repr(actions)[:30].replace("\n", ""),
    )
    def test_a_wrong_number_or_shape_is_explained_and_harmless(self, env: RayVecEnv, actions: Any) -> None:
        with pytest.raises(ConfigError) as caught:
            env.step(actions)
        assert_explained(caught.value)
        env.step(np.zeros((3, 2), np.float32))

    def test_lists_are_as_good_as_arrays(self, env: RayVecEnv) -> None:
        env.step([[0.0, 0.5]] * 3)
        env.step([np.zeros(2, np.float32)] * 3)
        env.step(tuple(np.zeros((3, 2), np.float32)))

    def test_every_data_type_arrives_as_it_was(self, make_vec: MakeVec) -> None:
        fns = env_fns(3, spaces.Discrete(2), spaces.Box(-1.0, 1.0, (2,), np.float32))
        env = make_vec(fns, 2, 1)
        with closing(SyncVectorEnv(fns)) as sync:
            assert_identical(env.reset(seed=0), sync.reset(seed=0))
            for code in "?bBhHiIlLqQefdgFDO":
                actions = np.ones((3, 2), code)
                assert_identical(env.step(actions), sync.step(actions), code)

    def test_dicts_go_by_key(self, dicts: tuple[RayVecEnv, SyncVectorEnv]) -> None:
        env, sync = dicts
        actions = {"b": np.array([1, 2, 3]), "a": np.array([4, 5, 6])}
        for _ in range(6):
            assert_identical(env.step(actions), sync.step(actions))

    @pytest.mark.parametrize("keys", [("a", "c"), ("x", "y"), ("a",), ("a", "b", "c")])
    def test_wrong_keys_are_explained_and_harmless(self, dicts: tuple[RayVecEnv, SyncVectorEnv], keys: Any) -> None:
        with pytest.raises((ConfigError, KeyError)) as caught:
            dicts[0].step({key: np.zeros(3, int) for key in keys})
        assert_explained(caught.value)
        for env in dicts:
            env.step({"a": np.zeros(3, int), "b": np.zeros(3, int)})

    def test_too_few_objects_are_explained_and_harmless(self, make_vec: MakeVec) -> None:
        env = make_vec(env_fns(3, spaces.Discrete(2), spaces.Text(4)), 2, 1)
        env.reset(seed=0)
        with pytest.raises(ConfigError) as caught:
            env.step(("a", "b"))
        assert_explained(caught.value)
        env.step(("a", "b", "c"))


ERRORS: dict[str, Callable[[], Exception]] = {
    "plain": partial(ValueError, "this environment is broken"),
    "timeout": partial(TimeoutError, "a server of the environment's own does not answer"),
    "eof": partial(EOFError, "a file of the environment's own ends"),
    "pipe": partial(BrokenPipeError, "a pipe of the environment's own is broken"),
    "key": partial(KeyError, "missing"),
    "two arguments": partial(OSError, 5, "disk"),
}


class TestErrors:
    @pytest.mark.parametrize(("kind", "nodes"), [("plain", 1), ("timeout", 1), *((kind, 2) for kind in ERRORS)])
    def test_an_error_in_a_step_keeps_its_type_and_message(self, make_vec: MakeVec, kind: str, nodes: int) -> None:
        fns = [CountingEnv, CountingEnv, partial(FaultyEnv, "raise", "step", 1, ERRORS[kind])]
        env = make_vec(fns, nodes, 3 - nodes)
        env.reset(seed=100)
        env.step(np.zeros(3, int))
        expected = ERRORS[kind]()
        with pytest.raises(type(expected)) as caught:
            within(DEADLINE_S, partial(env.step, np.zeros(3, int)))
        assert type(caught.value) is type(expected) and str(caught.value) == str(expected)
        cause = caught.value.__cause__
        assert isinstance(cause, EnvError)
        for words in ("node ", "worker ", "environment 2", "seed 102", "Traceback", "_maybe"):
            assert words in str(cause)
        assert env.closed

    @pytest.mark.parametrize("nodes", [1, 2])
    def test_an_error_in_a_reset(self, make_vec: MakeVec, nodes: int) -> None:
        env = make_vec([CountingEnv, partial(FaultyEnv, "raise", "reset", 1)], nodes)
        env.reset(seed=5)
        with pytest.raises(ValueError, match="broken") as caught:
            env.reset(seed=8)
        assert "environment 1, seed 9" in str(caught.value.__cause__)
        assert env.closed

    @pytest.mark.parametrize("nodes", [1, 2])
    def test_an_error_in_a_constructor_leaves_nothing(self, make_vec: MakeVec, nodes: int) -> None:
        import ray

        def all_free() -> bool:
            return bool(ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])

        wait_until(all_free, "all cores are free")
        with pytest.raises(ValueError, match="broken") as caught:
            make_vec([CountingEnv, partial(FaultyEnv, "raise", "init")], nodes)
        assert "environment 1" in str(caught.value.__cause__)
        wait_until(
            lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"], "all cores are free again"
        )

    def test_an_error_in_a_call(self, make_vec: MakeVec) -> None:
        env = make_vec([CountingEnv] * 2, 2)
        with pytest.raises(AttributeError, match="no_such") as caught:
            env.call("no_such_thing")
        assert isinstance(caught.value.__cause__, EnvError)

    def test_an_error_in_a_group(self, make_vec: MakeVec) -> None:
        """It is raised where its own group is received, not before."""
        env = make_vec([CountingEnv, partial(FaultyEnv, "raise")], 2, groups=1)
        assert len(env.groups) == 1
        env.close()
        fns = [CountingEnv, CountingEnv, CountingEnv, partial(FaultyEnv, "raise")]
        env = make_vec(fns, groups=2)
        env.reset(seed=0)
        env.send(np.zeros(2, int), group=1)
        env.send(np.zeros(2, int), group=0)
        assert env.recv(0).rew.tolist() == [1.0, 1.0]
        with pytest.raises(ValueError, match="broken"):
            env.recv(1)

    @pytest.mark.parametrize("nodes", [1, 2])
    def test_an_error_that_can_not_be_rebuilt_is_told_in_full(self, make_vec: MakeVec, nodes: int) -> None:
        env = make_vec([CountingEnv, partial(FaultyEnv, "raise", error=partial(OwnError, 3, "odd"))], nodes)
        env.reset(seed=0)
        with pytest.raises(Exception, match=r"odd \(3\)") as caught:
            env.step(np.zeros(2, int))
        assert isinstance(caught.value, EnvError) or str(caught.value) == "odd (3)"

    @pytest.mark.parametrize("nodes", [1, 2])
    @pytest.mark.parametrize("when", ["init", "reset", "step"])
    def test_a_worker_that_ends(self, make_vec: MakeVec, nodes: int, when: str) -> None:
        def play() -> None:
            env = make_vec([CountingEnv, partial(FaultyEnv, "kill", when)], nodes, 3 - nodes)
            env.reset(seed=0)
            env.step(np.zeros(2, int))

        with pytest.raises(WorkerLostError) as caught:
            within(DEADLINE_S, play)
        assert_explained(caught.value)
        assert "environments 1 to 1" in str(caught.value)

    @pytest.mark.parametrize("nodes", [1, 2])
    def test_a_worker_that_is_killed_takes_nobody_along(self, make_vec: MakeVec, nodes: int) -> None:
        env = make_vec([CountingEnv] * 4, nodes, 2)
        pids = pids_of(env)
        env.reset(seed=0)
        os.kill(pids[-1][-1], signal.SIGKILL)
        with pytest.raises(WorkerLostError) as caught:
            for _ in range(2):
                within(DEADLINE_S, partial(env.step, np.zeros(4, int)))
        assert_explained(caught.value)
        assert env.closed
        wait_until(lambda: not any(alive(pid) for node in pids for pid in node), "every process has ended")

    @pytest.mark.parametrize("nodes", [1, 2])
    def test_an_actor_that_is_killed_is_a_lost_node(self, make_vec: MakeVec, nodes: int) -> None:
        env = make_vec([CountingEnv] * 2, nodes, on_node_loss="raise")
        pids = pids_of(env)
        env.reset(seed=0)
        os.kill(pids[-1][0], signal.SIGKILL)
        with pytest.raises((NodeLostError, WorkerLostError)) as caught:
            deadline = time.monotonic() + DEADLINE_S
            while time.monotonic() < deadline:  # an answer or two may be under way
                within(DEADLINE_S, partial(env.step, np.zeros(2, int)))
        assert_explained(caught.value)
        within(DEADLINE_S, env.close)
        wait_until(lambda: not any(alive(pid) for node in pids for pid in node), "every process has ended")

    def test_observations_that_do_not_fit_are_errors_of_the_environment(self, make_vec: MakeVec) -> None:
        for kind, error in (("shape", ValueError), ("dtype", TypeError)):
            env = make_vec([CountingEnv, partial(TwoFaced, kind)])
            env.reset(seed=0)
            with pytest.raises(error) as caught:
                env.step(np.zeros(2, int))
            assert "environment 1" in str(caught.value.__cause__)


class TestEnd:
    @pytest.mark.parametrize(("nodes", "pending"), [(1, "step"), (2, "step"), (2, "reset"), (1, "call"), (2, None)])
    def test_close_leaves_nothing(self, make_vec: MakeVec, nodes: int, pending: str | None) -> None:
        fds, names = len(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
        env = make_vec([partial(SlowCall, seconds=0.2)] * 4, nodes, 2)
        pids = [pid for node in pids_of(env) for pid in node]
        assert len(pids) == 3 * nodes and all(map(alive, pids))
        env.reset(seed=0)
        if pending == "step":
            env.step_async(np.zeros(4, int))
        elif pending == "reset":
            env.reset_async()
        elif pending == "call":
            env.call_async("slow", 0.2)
        within(DEADLINE_S, env.close)
        wait_until(lambda: not any(map(alive, pids)), "its processes have ended")
        wait_until(lambda: set(os.listdir("/dev/shm")) <= names, "its shared memory is gone")
        gc.collect()
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= fds + 2, "its descriptors are closed")

    def test_close_although_an_environment_hangs(self, make_vec: MakeVec) -> None:
        env = make_vec([CountingEnv, partial(FaultyEnv, "hang")], 2)
        pids = [pid for node in pids_of(env) for pid in node]
        env.reset(seed=0)
        env.step_async(np.zeros(2, int))
        with pytest.raises(multiprocessing.TimeoutError):
            env.step_wait(timeout=0.1)
        within(2 * DEADLINE_S, env.close)
        wait_until(lambda: not any(map(alive, pids)), "its processes have ended")


class TestInput:
    @pytest.mark.parametrize(
        "kwargs",
        [
            {"env": "NoSuchEnvironment-v0", "num_envs": 2},
            {"env": "no_such_module:Env-v0", "num_envs": 2},
            {"env": "CartPole-v1", "num_envs": 0},
            {"env": "CartPole-v1", "num_envs": -1},
            {"env": "CartPole-v1", "num_envs": 1.5},
            {"env": "CartPole-v1", "num_envs": True},
            {"env": "CartPole-v1", "num_envs": "four"},
            {"env": "CartPole-v1", "num_envs": float("nan")},
            {"env": []},
            {"env": 5},
            {"env": CountingEnv},
            {"env": [CountingEnv(), CountingEnv()]},
            {"env": [CountingEnv] * 2, "num_envs": 3},
            {"env": [CountingEnv], "env_kwargs": {"a": 1}},
            {"env": [CountingEnv], "num_nodes": 0},
            {"env": [CountingEnv], "num_nodes": -1},
            {"env": [CountingEnv], "workers_per_node": 0},
            {"env": [CountingEnv], "workers_per_node": 1.5},
            {"env": [CountingEnv], "workers_per_node": "x"},
            {"env": [CountingEnv], "groups": 3},
            {"env": [CountingEnv], "groups": 0},
            {"env": [CountingEnv], "autoreset_mode": "sometimes"},
        ],
        ids=repr,
    )
    def test_each_mistake_is_one_explained_error(self, ray_cluster: object, kwargs: dict[str, Any]) -> None:
        with pytest.raises(ConfigError) as caught:
            RayVecEnv(**kwargs)
        assert_explained(caught.value)

    def test_an_unknown_id_is_also_gymnasiums_error(self, ray_cluster: object) -> None:
        with pytest.raises(gymnasium.error.NameNotFound):
            RayVecEnv("NoSuchEnvironment-v0", 2)

    def test_more_cores_than_there_are(self, ray_cluster: object, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("rayvec.placement._PLACE_S", 0.3)
        for kwargs in ({"workers_per_node": 25}, {"num_nodes": 3}):
            with pytest.raises(ConfigError, match="core") as caught:
                RayVecEnv([CountingEnv] * 60, **kwargs)
            assert_explained(caught.value)

    def test_arguments_of_the_environment_that_are_wrong_are_its_error(self, make_vec: MakeVec) -> None:
        with pytest.raises(TypeError, match="no_such_argument"):
            make_vec("CartPole-v1", num_envs=2, env_kwargs={"no_such_argument": 1})

    @pytest.mark.parametrize("num_steps", [0, -1, 1.5, "x"])
    @pytest.mark.parametrize("inference", ["worker", "driver"])
    def test_rollouts_of_no_length(self, small: RayVecEnv, num_steps: Any, inference: Any) -> None:
        with pytest.raises(ConfigError) as caught:
            small.rollout(lambda obs: np.zeros(len(obs), int), num_steps, inference)
        assert_explained(caught.value)
        small.reset(seed=0)

    def test_rollouts_with_no_policy_or_nowhere(self, small: RayVecEnv) -> None:
        for mistake in (
            partial(small.rollout, 5, 3),
            partial(small.rollout, lambda obs: obs, 3, "nowhere"),
            partial(small.rollout, None, 3, "driver"),
        ):
            with pytest.raises(ConfigError) as caught:
                mistake()
            assert_explained(caught.value)

    @pytest.fixture(scope="class")
    @classmethod
    def small(cls, make_class_vec: MakeVec) -> RayVecEnv:
        return make_class_vec([CountingEnv] * 2)

    @pytest.mark.parametrize(
        ("inference", "shape"),
        [("worker", (1,)), ("worker", (3, 1)), ("worker", ()), ("driver", (1,)), ("driver", (6, 1)), ("driver", (7,))],
    )
    def test_policies_that_return_a_wrong_number_of_actions(
        self, make_vec: MakeVec, inference: Any, shape: tuple[int, ...]
    ) -> None:
        env = make_vec([CountingEnv] * 6, 2)

        def policy(obs: Any) -> Any:
            return np.zeros(shape, int)

        with pytest.raises(ConfigError) as caught:
            env.rollout(policy, 3, inference, seed=0)
        assert_explained(caught.value)


class TestConstruction:
    def test_make_vec_mirrors_gymnasiums(self, ray_cluster: object) -> None:
        kwargs = {"max_episode_steps": 7}
        with rayvec.make_vec("CartPole-v1", 3, num_nodes=1, workers_per_node=2, env_kwargs=kwargs) as env:
            sync = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync", **kwargs)
            with closing(sync):
                in_lockstep(env, sync.unwrapped, 20)
                assert env.spec is not None and env.spec.id == "CartPole-v1"

    def test_specs_and_wrappers(self, make_vec: MakeVec) -> None:
        wrappers = (gymnasium.wrappers.FlattenObservation, partial(gymnasium.wrappers.TimeLimit, max_episode_steps=4))

        def make() -> Any:
            env = gymnasium.make("Blackjack-v1")
            for wrapper in wrappers:
                env = wrapper(env)
            return env

        env = make_vec(gymnasium.spec("Blackjack-v1"), num_envs=2, wrappers=wrappers)
        with closing(SyncVectorEnv([make] * 2)) as sync:
            in_lockstep(env, sync, 10)

    def test_ids_that_only_this_process_knows(self, make_vec: MakeVec) -> None:
        gymnasium.register("rayvec-tests/Local-v0", entry_point=lambda size: SpaceEnv(spaces.Discrete(size)))
        try:
            env = make_vec("rayvec-tests/Local-v0", 2, num_envs=2, env_kwargs={"size": 7})
            assert env.single_observation_space == spaces.Discrete(7)
        finally:
            del gymnasium.registry["rayvec-tests/Local-v0"]

    def test_an_id_with_the_module_that_registers_it(self, make_vec: MakeVec) -> None:
        env = make_vec("registers_one:rayvec-tests/ByModule-v0", 2, num_envs=2)
        assert env.single_observation_space == spaces.Discrete(11)

    def test_by_default_every_node_takes_part(self, ray_cluster: object) -> None:
        with RayVecEnv([CountingEnv] * 4, workers_per_node=1) as env:
            assert env.transports == ("shm", "tcp")
            assert [len(node.env_range) for node in env.topology.nodes] == [2, 2]

    def test_environments_are_made_on_workers_alone(self, make_vec: MakeVec) -> None:
        env = make_vec([TellsPid] * 3, 2)
        pids = env.call("made_in")
        assert os.getpid() not in pids
        assert set(pids) == {pid for node in pids_of(env) for pid in node[1:]}


def test_many_steps_stay_equal_over_every_topology(make_vec: MakeVec) -> None:
    """A longer run, without Gymnasium beside it, over all topologies at once."""
    envs = [make_vec([DriftEnv] * 5, *topology, autoreset_mode="SameStep") for topology in TOPOLOGIES.values()]
    rng = np.random.default_rng(0)
    first = [env.reset(seed=1) for env in envs]
    for got in first[1:]:
        assert_identical(got, first[0])
    for _ in range(300):
        actions = rng.integers(0, 2, 5)
        expected, *others = [env.step(actions) for env in envs]
        for got in others:
            assert_identical(got, expected)
    assert all(len(list(tree_leaves(env.reset()[0]))) == 1 for env in envs)


def test_a_partial_reset_that_takes_longer_stays_pending(make_vec: MakeVec) -> None:
    """Whichever of its two parts is waited for; nothing of it is left over for the next step."""
    env, other = (make_vec([CountingEnv] * 2, nodes=2) for _ in range(2))
    options = {"reset_mask": np.array([True, False])}
    for each in (env, other):
        each.reset(seed=3)
        each.step(np.zeros(2, int))
    env.reset_async(options=options)
    while True:
        try:
            obs, _ = env.reset_wait(timeout=0.0)
            break
        except multiprocessing.TimeoutError:
            assert env._pending == "reset"
    assert_identical(obs, other.reset(options=options)[0])
    assert_identical(env.step(np.zeros(2, int))[0], other.step(np.zeros(2, int))[0])
