"""RayVecEnv against Gymnasium's SyncVectorEnv, on every topology."""

from __future__ import annotations

import re
from contextlib import closing
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

import gymnasium
import numpy as np
import pytest
from conftest import MakeVec
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers.exact import SpaceEnv
from helpers.kinds import ALL_SPACES, ARRAY_SPACES, MODES, OBJECT_SPACES, env_fns, in_lockstep
from helpers.obedient_envs import OddInfo
from helpers.testing import assert_identical
from helpers.vector_kit import TOPOLOGIES

from rayvec.data import tree_map
from rayvec.errors import ConfigError
from rayvec.vector.ray_vec_env import RayVecEnv

ALONE = ["box32", "image", "zero_d", "discrete", "multidiscrete_2d", "multibinary", "tuple", *OBJECT_SPACES][:-2]
"""What stands at the top as well as in a dict."""
SLOW = pytest.mark.slow
EVERYTHING = {"arrays": spaces.Dict(ARRAY_SPACES), "objects": spaces.Dict(OBJECT_SPACES)}


TOLD = {("arrays", "1x1"), ("arrays", "2x1"), ("arrays", "no Ray"), ("objects", "none")}
"""What `make test` runs of `test_every_space_at_once`."""


class TestEquivalence:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize(
        ("kind", "topology"),
        [
            pytest.param(kind, topology, marks=() if (kind, topology) in TOLD else SLOW)
            for kind in EVERYTHING
            for topology in TOPOLOGIES
        ],
    )
    def test_every_space_at_once(self, make_vec: MakeVec, kind: str, topology: str, mode: AutoresetMode) -> None:
        fns = env_fns(5, EVERYTHING[kind], EVERYTHING[kind])
        env = make_vec(fns, *TOPOLOGIES[topology], autoreset_mode=mode)
        assert env.transports == (("local",) if topology == "none" else ("shm", "tcp")[: TOPOLOGIES[topology][0] or 1])
        with closing(SyncVectorEnv(fns, autoreset_mode=mode)) as sync:
            assert in_lockstep(env, sync, 12, options={"level": 2}) > 10

    @pytest.mark.parametrize(
        "kind", [pytest.param(kind, marks=SLOW if index % 5 else ()) for index, kind in enumerate(ALONE)]
    )
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
            ("ale_py:ALE/Breakout-v5", {"max_episode_steps": 12}, "NextStep"),
            ("HalfCheetah-v5", {"max_episode_steps": 12}, "SameStep"),
            pytest.param("minigrid:MiniGrid-DoorKey-5x5-v0", {"max_episode_steps": 12}, "NextStep", marks=SLOW),
        ],
    )
    @pytest.mark.filterwarnings("ignore")  # other projects' deprecations
    def test_real_environments(self, make_vec: MakeVec, env_id: str, env_kwargs: dict[str, Any], mode: str) -> None:
        env = make_vec(env_id, 2, 1, num_envs=3, env_kwargs=env_kwargs, autoreset_mode=mode)
        assert env.spec is not None and env_id.endswith(env.spec.id)
        fns = [partial(gymnasium.make, env_id, **env_kwargs)] * 3
        with closing(SyncVectorEnv(fns, autoreset_mode=mode)) as sync:
            assert in_lockstep(env, sync, 60) > 2

    @pytest.mark.parametrize("topology", ["1x1", "2x1", "none"])
    def test_infos_that_are_hard_to_send(self, make_vec: MakeVec, topology: str) -> None:
        fns = [OddInfo] * 3
        env = make_vec(fns, *TOPOLOGIES[topology])
        with closing(SyncVectorEnv(fns)) as sync:
            in_lockstep(env, sync, 9)


class TestSeeds:
    """Seeds, options and masks, on one environment for each mode."""

    @pytest.fixture(scope="class", params=[*MODES[:1], *(pytest.param(mode, marks=SLOW) for mode in MODES[1:])])
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
        assert [r.random() for r in env.np_random] == [r.random() for r in deepcopy(sync.np_random)]
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
        "mask",
        [None, [True] * 4, np.ones(4), np.ones(3, bool), np.zeros(4, bool), np.ones((4, 1), bool), np.ones((4, 1))],
        ids=repr,
    )
    def test_a_wrong_mask_is_refused_as_by_gymnasium(self, pair: tuple[RayVecEnv, SyncVectorEnv], mask: Any) -> None:
        with pytest.raises((TypeError, ValueError)) as expected:
            pair[1].reset(options={"reset_mask": mask})
        with pytest.raises(expected.type, match=re.escape(str(expected.value))):
            pair[0].reset(options={"reset_mask": mask})
        pair[0].reset()


@pytest.mark.parametrize(
    ("topology", "mode"),
    [
        *product(["1x2", "none"], MODES),
        ("2x1", MODES[0]),
        *(pytest.param("2x1", mode, marks=SLOW) for mode in MODES[1:]),
    ],
)
def test_each_group_is_a_vector_environment(make_vec: MakeVec, topology: str, mode: AutoresetMode) -> None:
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


@pytest.mark.parametrize(
    ("kind", "topology"),
    [
        *product(["nested", "dict_of_text"], ["1x2", "none"]),
        pytest.param("nested", "2x1", marks=SLOW),
        ("dict_of_text", "2x1"),
    ],
)
def test_everything_is_writable_and_stays_as_it_was(make_vec: MakeVec, topology: str, kind: str) -> None:
    """What is returned belongs to the caller."""
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


def all_arrays(value: Any) -> list[np.ndarray]:
    if isinstance(value, np.ndarray):
        inner = [array for item in value.flat for array in all_arrays(item)] if value.dtype == object else []
        return [value, *inner] if value.size else []
    if isinstance(value, dict):
        value = tuple(value.values())
    return [array for item in value for array in all_arrays(item)] if isinstance(value, (tuple, list)) else []


@pytest.mark.parametrize("nodes", [0, 1])
def test_objects_are_copies(make_vec: MakeVec, nodes: int) -> None:
    """Who changes what was returned changes neither what is returned later nor the next chunk."""
    make_env = partial(SpaceEnv, spaces.Graph(spaces.Box(0, 1, (2,)), None))
    env = make_vec([make_env] * 2, nodes, nodes)
    obs, _ = env.reset(seed=0)
    before = deepcopy(obs)
    obs[0].nodes[:] = 9
    again, _ = env.reset(options={"reset_mask": np.array([False, True])})
    assert_identical(again[0], before[0])
    chunk = env.rollout(lambda obs: np.zeros(2, int), 3)
    last = deepcopy(chunk.last_obs[0])
    chunk.last_obs[0].nodes[:] = 9
    assert_identical(env.rollout(lambda obs: np.zeros(2, int), 1).obs[0, 0], last)


class TestDifferingSpaces:
    FNS = [partial(SpaceEnv, spaces.Box(0.0, float(high), (2,), np.float32)) for high in (1, 2, 3)]  # noqa: RUF012

    def test_bounds_may_differ_if_one_says_so(self, make_vec: MakeVec) -> None:
        env = make_vec(self.FNS, 2, 1, observation_mode="different")
        with closing(SyncVectorEnv(self.FNS, observation_mode="different")) as sync:
            in_lockstep(env, sync, 6)

    @pytest.mark.parametrize(
        ("other", "mode"),
        [
            (spaces.Box(0.0, 1.0, (3,)), "different"),
            (spaces.Box(0.0, 1.0, (2,), np.float64), "different"),
            (spaces.Discrete(3), "different"),
            (spaces.Box(0.0, 1.0, (3,)), (spaces.Box(0.0, 1.0, (2, 2)), spaces.Box(0.0, 1.0, (2,)))),
            (spaces.Box(0.0, 1.0, (2,)), (1, 2)),
        ],
    )
    def test_errors_are_of_the_type_of_gymnasiums(self, other: Any, mode: Any) -> None:
        fns = [partial(SpaceEnv, spaces.Box(0.0, 1.0, (2,))), partial(SpaceEnv, other)]
        with pytest.raises((ValueError, RuntimeError, TypeError)) as theirs:
            SyncVectorEnv(fns, observation_mode=mode)
        with pytest.raises(theirs.type, match=r"nvironment 1|observation_mode"):
            RayVecEnv(fns, num_nodes=0, workers_per_node=0, observation_mode=mode)


class TestActions:
    @pytest.fixture(scope="class")
    @classmethod
    def env(cls, make_class_vec: MakeVec) -> RayVecEnv:
        env = make_class_vec(env_fns(3, spaces.Discrete(2), spaces.Box(-1.0, 1.0, (2,), np.float32)), 2, 1)
        env.reset(seed=0)
        return env

    @pytest.mark.parametrize(
        "actions",
        [
            *(np.zeros(shape) for shape in ((2, 2), (4, 2), (3, 1), (3, 2, 1), (3,), ())),
            *(0.0, None, [], [[0.0, 0.0]] * 2, [[0.0], [0.0, 0.0], [0.0]]),
            *({"a": np.zeros((3, 2))}, (np.zeros((3, 2)), np.zeros((3, 2)))),
        ],
        ids=lambda actions: repr(actions)[:30].replace("\n", ""),
    )
    def test_a_wrong_number_or_shape_is_explained_and_harmless(self, env: RayVecEnv, actions: Any) -> None:
        with pytest.raises(ConfigError, match="Actions do not fit"):
            env.step(actions)
        env.step(np.zeros((3, 2), np.float32))

    def test_every_data_type_arrives_as_it_was(self, make_vec: MakeVec) -> None:
        fns = env_fns(3, spaces.Discrete(2), spaces.Box(-1.0, 1.0, (2,), np.float32))
        env = make_vec(fns, 2, 1)
        with closing(SyncVectorEnv(fns)) as sync:
            assert_identical(env.reset(seed=0), sync.reset(seed=0))
            for code in "?bBhHiIlLqQefdgFDO":
                actions = np.ones((3, 2), code)
                assert_identical(env.step(actions), sync.step(actions), code)
