"""Environments that write down when they step, in whatever process that is."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rayvec.bench.harness import recording
from rayvec.bench.harness.recording import Clocked, read_clocks


class Pausing(gymnasium.Env[Any, Any]):
    """Sleeps for 2 ms in a step and for 5 ms in a reset."""

    observation_space = spaces.Discrete(2)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        time.sleep(0.005)
        return 0, {}

    def step(self, action: Any) -> Any:
        time.sleep(0.002)
        return 0, 0.0, False, False, {}


def play(directory: str, letters: str) -> None:
    env = Clocked(Pausing(), directory)
    for letter in letters:
        if letter == "r":
            env.reset()
        else:
            env.step(0)


def test_resets_count_as_steps_or_belong_to_the_one_before(tmp_path: Path) -> None:
    begin = time.monotonic()
    play(str(tmp_path), "rssrs")
    (all_rows,) = read_clocks(str(tmp_path)).values()
    assert all_rows.shape == (5, 2) and (np.diff(all_rows.ravel()) >= 0).all()
    assert begin <= all_rows[0, 0] and all_rows[-1, 1] <= time.monotonic()
    durations = all_rows[:, 1] - all_rows[:, 0]
    assert (durations >= [0.005, 0.002, 0.002, 0.005, 0.002]).all()
    (steps,) = read_clocks(str(tmp_path), within_steps=True).values()
    np.testing.assert_array_equal(steps[:, 0], all_rows[[1, 2, 4], 0])
    np.testing.assert_array_equal(steps[:, 1], all_rows[[1, 3, 4], 1])


def test_steps_of_several_environments_in_one_process(tmp_path: Path) -> None:
    first, second = (Clocked(Pausing(), str(tmp_path)) for _ in range(2))
    for env in (first, second):
        env.reset()
    first.step(0)
    second.step(0)
    second.reset()
    first.step(0)
    (steps,) = read_clocks(str(tmp_path), within_steps=True).values()
    assert steps.shape == (3, 2) and (np.diff(steps.ravel()) >= 0).all()  # one after another, none over another
    durations = steps[:, 1] - steps[:, 0]
    assert durations[1] >= 0.007 and durations[0] >= 0.002


def test_each_process_has_its_own(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=play, args=(str(tmp_path), "rsss"))
    process.start()
    play(str(tmp_path), "rs")
    play(str(tmp_path), "rss")
    process.join()
    found = read_clocks(str(tmp_path))
    assert set(found) == {os.getpid(), process.pid}
    assert len(found[process.pid or 0]) == 4
    assert len(found[os.getpid()]) == 5
    assert all((np.diff(rows[:, 0]) > 0).all() for rows in found.values())


def test_the_newest_rows_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_REMEMBERED", 4)
    begin = time.monotonic()
    play(str(tmp_path), "rsssss")
    (rows,) = read_clocks(str(tmp_path)).values()
    assert len(rows) == 4 and (np.diff(rows[:, 0]) > 0).all()
    assert rows[0, 0] >= begin + 0.005 + 0.002  # the reset and the first step are gone
    later = time.monotonic()
    play(str(tmp_path), "r")
    play(str(tmp_path), "sssss")
    (rows,) = read_clocks(str(tmp_path)).values()
    assert len(rows) == 4 and rows[0, 0] > later  # of the others there may have been more, which are gone
