"""One slice of environments: what restarts, what fails, and what it says of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers.fleet_kit import RESTART, Steps, slice_of

from rayvec import RayVecEnv
from rayvec.data.layouts import ArrayLayout
from rayvec.envs.slices import Slice, own_arrays
from rayvec.errors import ConfigError, EnvError
from rayvec.fleet.commands import Answer, Autoreset, Command, Op
from rayvec.fleet.restarts import NO_RESTARTS, restart_seed

MODES = [Autoreset.NEXT_STEP, Autoreset.SAME_STEP]


def opened(env_fns: Sequence[Any], policy: Any = RESTART, native: bool = False) -> Slice:
    """Returns a slice that was reset with the seeds 5, 6, ..."""
    slice_ = slice_of(env_fns, policy, native=native)
    layout = ArrayLayout.with_objects(slice_.spaces.observation)
    slice_.open(layout, own_arrays(layout, slice_.num_envs))
    rows = np.arange(slice_.num_envs)
    assert slice_.execute(Command(Op.RESET, rows, rest=([5 + row for row in rows.tolist()], None))).failure is None
    return slice_


def step(slice_: Slice, mode: Autoreset, rows: Any = None) -> Answer:
    rows = np.arange(slice_.num_envs) if rows is None else np.array(rows)
    return slice_.execute(Command(Op.STEP, rows, np.zeros(len(rows), np.int64), mode))


class FailsToReset(Steps):
    """Its second reset fails."""

    def reset(self, **kwargs: Any) -> Any:
        if self.episode == 1:
            self.episode = 5
            raise RuntimeError("no reset")
        return super().reset(**kwargs)


class TestRestarts:
    @pytest.mark.parametrize("mode", MODES)
    def test_a_step_that_raises_ends_the_episode_before_it(self, mode: Autoreset) -> None:
        slice_ = opened([Steps, partial(Steps, 4, (2,))])
        step(slice_, mode)
        answer = step(slice_, mode)
        assert answer.failure is None and answer.infos["env_restarted"].tolist() == [False, True]
        arrays = slice_.arrays
        assert arrays["rew"].tolist() == [1.0, 0.0] and arrays["truncated"].tolist() == [False, True]
        last = arrays["obs"][1] if mode == Autoreset.NEXT_STEP else answer.infos["final_obs"][1]
        assert last.tolist() == [1.0, 1.0, 6.0]
        if mode == Autoreset.NEXT_STEP:
            assert "env_restarted" not in step(slice_, mode).infos and arrays["rew"][1] == 0.0
        assert arrays["obs"][1, :2].tolist() == [1.0, 0.0] and arrays["obs"][1, 2] not in (5.0, 6.0)
        (note,) = answer.notes
        assert note == "this test, environment 1, seed 6 raised RuntimeError: boom; restarted"

    @pytest.mark.parametrize("mode", MODES)
    def test_a_reset_that_raises_ends_nothing(self, mode: Autoreset) -> None:
        slice_ = opened([partial(FailsToReset, 2)])
        answers = [step(slice_, mode) for _ in range(2 + (mode == Autoreset.NEXT_STEP))]
        assert len(answers[-1].notes) == 1 and not any("env_restarted" in answer.infos for answer in answers)
        assert slice_.arrays["obs"][0, 1] == 0.0
        if mode == Autoreset.SAME_STEP:
            assert answers[-1].infos["final_obs"][0].tolist() == [1.0, 2.0, 5.0] and slice_.arrays["truncated"][0]

    def test_the_seed_of_a_restart_is_used_once(self) -> None:
        slice_ = opened([partial(Steps, 2, {1})])
        step(slice_, Autoreset.SAME_STEP)
        seed = slice_.arrays["obs"][0, 2]
        assert seed != 5.0
        for _ in range(4):
            step(slice_, Autoreset.SAME_STEP)
        assert slice_.arrays["obs"][0, 2] == seed and slice_.arrays["obs"][0, 0] == 3.0

    def test_begin_resets_what_is_between_two_episodes(self) -> None:
        slice_ = opened([partial(Steps, 1), Steps, partial(Steps, 4, (1,))])
        step(slice_, Autoreset.NEXT_STEP)
        answer = slice_.execute(Command(Op.BEGIN, np.arange(3)))
        assert slice_.arrays["obs"][:, 1].tolist() == [0.0, 1.0, 0.0] and "env_restarted" not in answer.infos

    def test_a_crash_loop_is_an_error(self) -> None:
        slice_ = opened([partial(Steps, 4, range(1, 99))])
        failures = [step(slice_, Autoreset.SAME_STEP).failure for _ in range(6)]
        error = next(failure for failure in failures if failure).rebuild()
        assert isinstance(error, EnvError) and "raised again and again: RuntimeError: boom" in str(error)


class TestFailures:
    def test_the_others_complete_their_step(self) -> None:
        slice_ = opened([partial(Steps, 4, (1,)), Steps], NO_RESTARTS)
        assert step(slice_, Autoreset.NEXT_STEP).failure is not None
        assert slice_.arrays["obs"][:, 1].tolist() == [0.0, 1.0]

    @pytest.mark.parametrize(
        ("result", "words"),
        [
            ((np.zeros(3), 1.0, False, {}), "returned 4 values"),
            (None, "returned NoneType"),
            ((np.zeros(3), "much", False, False, {}), "reward of a step is 'much'"),
            ((np.zeros(3), 1.0, False, False, None), "info of a step or reset was NoneType"),
            ((np.zeros(3), 1.0, False, False, [1]), "info of a step or reset was list"),
            ((np.zeros(4), 1.0, False, False, {}), "An observation has the shape"),
        ],
    )
    def test_results_that_are_none_of_a_step(self, result: Any, words: str) -> None:
        class Wrong(Steps):
            def step(self, action: Any) -> Any:
                return result

        slice_ = opened([Wrong], NO_RESTARTS)
        failure = step(slice_, Autoreset.NEXT_STEP).failure
        assert failure is not None and words in failure.text and "environment 0, seed 5" in failure.where

    def test_one_environment_for_two_callables(self) -> None:
        env = Steps()
        with pytest.raises(ConfigError, match="same environment more than once"):
            slice_of([lambda: env] * 2)

    def test_a_constructor_that_raises(self) -> None:
        def make() -> Any:
            raise OSError("no licence")

        with pytest.raises(OSError, match="no licence") as caught:
            slice_of([Steps, make], first_id=7)
        assert "environment 8" in str(caught.value.__cause__)


class Leaks(Steps):
    """Notes in a file of its own each time that it is made."""

    def __init__(self, env_index: int, folder: Path) -> None:
        super().__init__(length=2)
        with (folder / str(env_index)).open("a") as file:
            file.write("x")


class TestMadeAgain:
    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
    def test_after_some_episodes_with_a_seed_of_its_own(
        self, tmp_path: Path, mode: AutoresetMode, workers: int
    ) -> None:
        where: dict[str, Any] = {"num_nodes": 0, "workers_per_node": workers, "autoreset_mode": mode}
        with RayVecEnv(Leaks, 2, env_kwargs={"folder": tmp_path}, restart_env_every=2, **where) as env:
            seen = [env.reset(seed=5)[0]]
            for _ in range(12):
                obs, _, _, truncated, info = env.step([0, 0])
                assert "env_restarted" not in info
                assert truncated.all() == (obs[:, 1] == (2 if mode == AutoresetMode.NEXT_STEP else 0)).all()
                seen += [obs] if not obs[:, 1].any() else []
            for env_id in range(2):
                seeds = [5 + env_id, *(restart_seed(5 + env_id, env_id, k) for k in (1, 2, 3))]
                began = [(episode + 1, float(seed or 0)) for seed in seeds for episode in range(2)]
                assert [(obs[env_id, 0], obs[env_id, 2]) for obs in seen] == began[: len(seen)]
                assert (tmp_path / str(env_id)).read_text() == "x" * ((len(seen) + 1) // 2)
            env.reset(seed=9)
            for _ in range(4):
                env.step([0, 0])
            assert env.reset(seed=9)[0][:, 2].tolist() == [9, 10]

    @pytest.mark.parametrize(
        "arguments",
        [{"env": [Steps], "restart_env_every": 0}, {"env": [lambda: SyncVectorEnv([Steps])], "native": True}],
    )
    def test_it_is_a_number_of_episodes_of_ordinary_environments(self, arguments: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="restart_env_every"):
            RayVecEnv(**{"restart_env_every": 1, "num_nodes": 0, "workers_per_node": 0, **arguments})


class TestNative:
    @pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
    def test_a_sub_batch_restarts_as_a_whole(self, mode: str) -> None:
        mode_ = AutoresetMode(mode)
        native = [
            partial(SyncVectorEnv, [Steps] * 2, autoreset_mode=mode_),
            partial(SyncVectorEnv, [Steps, partial(Steps, 4, (2,))], autoreset_mode=mode_),
        ]
        slice_ = opened(native, native=True)
        step(slice_, Autoreset[mode_.name])
        answer = step(slice_, Autoreset[mode_.name])
        assert answer.failure is None and answer.infos["env_restarted"].tolist() == [False, False, True, True]
        assert slice_.arrays["truncated"].tolist() == [False, False, True, True]
        assert slice_.arrays["obs"][:, 1].tolist() == [2, 2, *([1, 1] if mode == "NextStep" else [0, 0])]
        step(slice_, Autoreset[mode_.name], [2, 3])
        assert slice_.arrays["obs"][:, 1].tolist() == [2, 2, *([0, 0] if mode == "NextStep" else [1, 1])]

    def test_some_rows_of_it_are_reset(self) -> None:
        native = partial(SyncVectorEnv, [Steps] * 3, autoreset_mode=AutoresetMode.DISABLED)
        slice_ = opened([native], native=True)
        step(slice_, Autoreset.DISABLED)
        slice_.execute(Command(Op.RESET, np.array([0, 2]), rest=([None, None], None)))
        assert slice_.arrays["obs"][:, 1].tolist() == [0.0, 1.0, 0.0]
