"""Native sub-batches: the same steps as in this process, chunks without false transitions, faults, bad input."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from helpers.kinds import in_lockstep
from helpers.native_envs import Fails, Odd, counting
from helpers.simple_policies import still
from helpers.testing import CountingEnv, counting_errors

import rayvec
from rayvec import RayVecEnv
from rayvec.errors import ConfigError, EnvError

SLOW = pytest.mark.slow
MODES = ["NextStep", "SameStep", "Disabled"]
FAULTS = [("raise", 0), pytest.param("raise", 1, marks=pytest.mark.slow), ("kill", 2)]
ONE_MODE = ["NextStep", *(pytest.param(mode, marks=pytest.mark.slow) for mode in MODES[1:])]
local = partial(RayVecEnv, native=True, num_nodes=0)


class TestEquality:
    @pytest.mark.parametrize("mode", ONE_MODE)
    @pytest.mark.parametrize(
        ("nodes", "workers", "num_steps"),
        [(0, 0, 1_000), (0, 2, 100), pytest.param(0, 2, 1_000, marks=SLOW), pytest.param(2, 1, 1_000, marks=SLOW)],
    )
    def test_random_steps(self, request: Any, mode: str, nodes: int, workers: int, num_steps: int) -> None:
        if nodes:
            request.getfixturevalue("ray_cluster")
        fns = [partial(counting, 3, mode), partial(counting, 2, mode)]
        where = {"num_nodes": nodes, "workers_per_node": workers}
        with closing(RayVecEnv(fns, native=True, **where)) as ours, closing(counting(5, mode)) as theirs:
            assert ours.num_envs == 5 and ours.autoreset_mode.value == mode
            in_lockstep(ours, theirs, num_steps)

    def test_numpy_cartpoles_are_seeded_by_their_first_environment(self) -> None:
        alone = [CartPoleVectorEnv(4), CartPoleVectorEnv(3)]
        with closing(local([partial(CartPoleVectorEnv, size) for size in (4, 3)], workers_per_node=2)) as env:
            env.action_space.seed(0)
            obs, _ = env.reset(seed=10)
            np.testing.assert_array_equal(obs, np.concatenate([alone[0].reset(seed=10)[0], alone[1].reset(seed=14)[0]]))
            for _ in range(300):
                actions = env.action_space.sample()
                expected = [each.step(part) for each, part in zip(alone, np.split(actions, [4]), strict=True)]
                for got, *parts in zip(env.step(actions)[:4], *[each[:4] for each in expected], strict=True):
                    np.testing.assert_array_equal(got, np.concatenate(parts))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("workers", "inference"),
    [pytest.param(0, "worker", marks=SLOW), (2, "worker"), pytest.param(2, "driver", marks=SLOW)],
)
def test_no_transition_is_false(mode: str, workers: int, inference: Any) -> None:
    with closing(local([partial(counting, 3, mode)] * 2, workers_per_node=workers)) as env:
        chunks = [env.rollout(still, 9, inference, seed=5 if k == 0 else None) for k in range(4)]
        assert counting_errors(chunks) == []
        waits = np.concatenate([~chunk.valid for chunk in chunks])
        done = np.concatenate([chunk.done for chunk in chunks])
        expected = np.zeros_like(waits)
        expected[1:] = done[:-1] & (mode == "NextStep")
        np.testing.assert_array_equal(waits, expected)


class TestFaults:
    @pytest.mark.parametrize("mode", ONE_MODE)
    @pytest.mark.parametrize(("fault", "workers"), FAULTS)
    def test_a_sub_batch_restarts_as_a_whole(self, tmp_path: Path, mode: str, fault: str, workers: int) -> None:
        fns = [partial(Fails, mode, fault, str(tmp_path / "failed")), partial(counting, 2, mode)]
        with (
            closing(local(fns, workers_per_node=workers, on_env_error="restart")) as env,
            closing(counting(5, mode)) as theirs,
        ):
            env.reset(seed=3), theirs.reset(seed=3)
            last: Any = ()
            for step in range(1, 6):
                last = env.step(np.zeros(5, np.int64)) if step < 5 else last
                expected = theirs.step(np.zeros(5, np.int64))
                done = expected[2] | expected[3]
                if mode == "Disabled" and done.any():
                    theirs.reset(options={"reset_mask": done.copy()})
                    if step < 5:
                        last = (*env.reset(options={"reset_mask": done.copy()}), *last[2:])
            obs, rew, terminated, truncated, info = env.step(np.zeros(5, np.int64))
            assert truncated[:3].all() and not terminated[:3].any() and not rew[:3].any()
            np.testing.assert_array_equal(obs[3:], expected[0][3:])  # the other continues
            marks = info["final_info"] if mode == "SameStep" else info
            assert marks["_env_restarted"].tolist() == [True, True, True, False, False]
            shown = np.stack(list(info["final_obs"][:3])) if mode == "SameStep" else obs[:3]
            np.testing.assert_array_equal(shown, last[0][:3])

    @pytest.mark.parametrize("mode", ONE_MODE)
    @pytest.mark.parametrize(("fault", "workers"), [("raise", 1), ("kill", 2)])
    def test_chunks_hold_no_transition_of_the_fault(self, tmp_path: Path, mode: str, fault: str, workers: int) -> None:
        fns = [partial(Fails, mode, fault, str(tmp_path / "failed")), partial(counting, 2, mode)]
        with closing(local(fns, workers_per_node=workers, on_env_error="restart")) as env:
            chunks = [env.rollout(still, 8, seed=3 if k == 0 else None) for k in range(3)]
        failed = [(k, *place) for k, chunk in enumerate(chunks) for place in chunk.restarts.tolist()]
        assert sorted({n for _, _, n in failed}) == [0, 1, 2]
        for chunk in chunks:
            before, after, valid = chunk.obs, chunk.next_obs(), chunk.valid
            np.testing.assert_array_equal(after[valid][:, :2], before[valid][:, :2])  # seed and episode
            np.testing.assert_array_equal(after[valid][:, 2:], before[valid][:, 2:] + 1)
            np.testing.assert_array_equal(chunk.rew[valid], after[valid][:, 3])
            assert chunk.truncated[tuple(chunk.cuts.T)].all()
        others = [chunk.columns(3, 5) for chunk in chunks]
        assert counting_errors(others) == []


class TestCalls:
    @pytest.fixture
    def env(self) -> Iterator[RayVecEnv]:
        with closing(local([partial(CartPoleVectorEnv, 3), partial(CartPoleVectorEnv, 2)], workers_per_node=2)) as env:
            yield env

    def test_values_of_a_sub_batch_stand_for_its_environments(self, env: RayVecEnv) -> None:
        env.reset(seed=1)
        env.step(np.ones(5, np.int64))
        assert env.get_attr("num_envs") == (3, 3, 3, 2, 2)
        assert env.get_attr("steps") == (1,) * 5  # an array with a row for each
        env.set_attr("gravity", [9.0] * 3 + [8.0] * 2)
        assert env.get_attr("gravity") == (9.0, 9.0, 9.0, 8.0, 8.0)


@pytest.mark.parametrize("seeds", [[5, None, 7, 8, None], [None, 8, None, None, 1], [None, None, 1, 2, 3]])
def test_single_environments_get_each_its_own(seeds: list[int | None]) -> None:
    """A seed of None leaves an environment its generator."""
    with closing(local([partial(counting, 3), partial(counting, 2)], workers_per_node=0)) as env:
        assert env.reset(seed=seeds)[0][:, 0].tolist() == [-1 if seed is None else seed for seed in seeds]


def test_vector_entry_points() -> None:
    settings = {"num_nodes": 0, "workers_per_node": 2}
    env = rayvec.make_vec("CartPole-v1", 5, vectorization_mode="vector_entry_point", **settings)
    with closing(env):
        assert env.topology.nodes[0].worker_bounds == (0, 3, 5) and env.get_attr("num_envs")[0] == 3


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "ordinary": ({"env": [CountingEnv]}, "With native=True, each callable makes a vector environment"),
    "an id": ({"env": "CartPole-v1"}, "needs a list of callables"),
    "native is missing": ({"env": [partial(counting, 2)], "native": False}, "with native=True"),
    "num_envs": ({"env": [partial(counting, 2)] * 2, "num_envs": 2}, "have 4 environments"),
    "modes": ({"env": [partial(counting, 2), partial(counting, 2, "SameStep")]}, "different autoreset modes"),
    "another mode": ({"env": [partial(counting, 2)], "autoreset_mode": "SameStep"}, "reset by themselves"),
    "no mode": ({"env": [partial(Odd, "mode")]}, "autoreset_mode"),
    "groups": ({"env": [partial(counting, 2)], "groups": 2}, "groups=2 was passed with 1 native"),
}


class TestBadInput:
    @pytest.mark.parametrize("what", BAD)
    @pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
    def test_settings(self, what: str, workers: int) -> None:
        settings, text = BAD[what]
        with pytest.raises(ConfigError, match=text):
            RayVecEnv(**{"native": True, **settings}, num_nodes=0, workers_per_node=workers)

    @pytest.mark.parametrize("what", ["rows", "dtype", "rewards", "flags", "no final", "no mask"])
    def test_results(self, what: str) -> None:
        env = local([partial(Odd, what)], workers_per_node=0)
        env.reset(seed=1)
        with pytest.raises(
            (EnvError, ValueError, TypeError), match=r"Correct the environment|lacks their last observations"
        ):
            for _ in range(10):
                env.step(np.zeros(3, np.int64))
        assert env.closed
