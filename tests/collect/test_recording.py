"""Episodes that a collector writes as a Minari dataset are those that the environments played."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import minari
import numpy as np
import pytest
from gymnasium import spaces
from helpers.interrupts import interrupted_at
from helpers.own_envs import Diary

import rayvec


def acts(observations: Any) -> Any:
    return 4 + observations["at"][0][:, 0].astype(np.int64) % 3


def assert_played(dataset: Any) -> list[tuple[int, bool]]:
    """Checks each episode by what the environment showed. Returns its length and whether it was terminated."""
    played = []
    for episode in dataset.iterate_episodes():
        count = len(episode.rewards)
        steps, before = np.asarray(episode.observations["at"][0]).T
        np.testing.assert_array_equal(steps, np.arange(count + 1))
        np.testing.assert_array_equal(before[1:], episode.actions)
        assert list(episode.observations["name"]) == [f"step {step}" for step in range(count + 1)]
        np.testing.assert_array_equal(episode.rewards, np.arange(1, count + 1))
        assert not (episode.terminations[:-1] | episode.truncations[:-1]).any()
        assert episode.terminations[-1] != episode.truncations[-1]
        played.append((count, bool(episode.terminations[-1])))
    return played


@pytest.mark.parametrize(
    "settings",
    [{}, {"prefetch": True}, {"max_staleness": 2}, {"inference": "driver"}],
    ids=["plain", "prefetch", "asynchronous", "driver"],
)
@pytest.mark.parametrize("fails_at", [0, 1, 6, 9], ids=lambda step: f"fails at {step}")
def test_every_step_is_in_one_episode(tmp_path: Path, settings: dict[str, Any], fails_at: int) -> None:
    """Also if Ctrl-C interrupts `close` before it waits, and it is called again."""
    kwargs = {"failed": tmp_path, "fails_at": fails_at}
    with rayvec.RayVecEnv(Diary, 3, env_kwargs=kwargs, num_nodes=0, workers_per_node=3, on_env_error="restart") as env:
        collector = rayvec.Collector(env, acts, record=tmp_path / "data", **settings)
        batches = [collector.collect(n_step=12) for _ in range(6)]
        interrupted_at(5, collector.close, "/rayvec/collect/")
        collector.close()
    dataset = minari.MinariDataset(tmp_path / "data")
    played = assert_played(dataset)
    assert dataset.total_steps == sum(count for count, _ in played) == sum(b.stats.n_collected_steps for b in batches)
    returns = sorted(count * (count + 1) / 2 for count, terminated in played if terminated)
    assert returns == sorted(np.concatenate([batch.stats.returns for batch in batches]).tolist())


def test_steps_that_are_in_no_batch_are_in_no_episode(tmp_path: Path) -> None:
    diaries = [partial(Diary, k, tmp_path) for k in range(2)]
    with rayvec.RayVecEnv(diaries, num_nodes=0, workers_per_node=0, first_id=5) as env:
        collector = rayvec.Collector(env, acts, record=tmp_path / "data")
        collector.collect(n_episode=3)
        collector.collect(n_step=14)  # begins new episodes
        collector.load_state_dict(collector.state_dict())
        collector.collect(n_step=2)  # begins new episodes
        collector.play(2)
        collector.close()
    played = assert_played(minari.MinariDataset(tmp_path / "data"))
    assert played == [*[(3, True), (3, True), (7, True)] * 2, *[(1, False)] * 3]


def test_chunks_are_recorded_by_hand(tmp_path: Path) -> None:
    with rayvec.make_vec("CartPole-v1", 4, num_nodes=0, workers_per_node=2) as env:
        collector = rayvec.Collector(env, lambda obs: np.zeros(len(obs), np.int64), seed=1)
        with rayvec.record(env, tmp_path / "data") as recording:
            chunks = [collector.collect(n_step=80).chunks[0] for _ in range(2)]
            for chunk in chunks:
                recording.add(chunk)
    dataset = minari.MinariDataset(tmp_path / "data")
    assert dataset.total_steps == 160
    assert dataset.recover_environment().spec.id == "CartPole-v1"
    first = dataset[0]
    count = len(first.rewards)
    np.testing.assert_array_equal(first.observations[:-1], chunks[0].obs[:count, 0])
    np.testing.assert_array_equal(first.observations[-1], chunks[0].next_obs()[count - 1, 0])


def test_an_environment_that_minari_can_not_make_is_recorded_without_its_spec(tmp_path: Path) -> None:
    spec = gymnasium.envs.registration.EnvSpec("Diary-v0", entry_point=partial(Diary, 0, tmp_path))
    with rayvec.RayVecEnv(spec, 1, num_nodes=0, workers_per_node=0) as env:
        rayvec.record(env, tmp_path / "data").close()
    assert minari.MinariDataset(tmp_path / "data").spec.env_spec is None


def test_refusals(tmp_path: Path) -> None:
    with rayvec.RayVecEnv("CartPole-v1", 1, num_nodes=0, workers_per_node=0) as env:
        rayvec.record(env, tmp_path / "data").close()
        for path, message in [("data", "already available"), ("missing/data", "No such file")]:
            with pytest.raises(rayvec.errors.ConfigError, match=message):
                rayvec.Collector(env, acts, record=tmp_path / path)

    class Numbers(Diary):
        observation_space = spaces.Sequence(spaces.Discrete(2))

    with rayvec.RayVecEnv(partial(Numbers, 0, tmp_path), 1, num_nodes=0, workers_per_node=0) as env:
        with pytest.raises(rayvec.errors.ConfigError, match="Sequence"):
            rayvec.record(env, tmp_path / "other")
